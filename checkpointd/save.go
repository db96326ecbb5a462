package checkpointd

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/shm"
)

// phase is how far this node is with its shard of a save:
//
//	waiting --> writing --> prepared --> committed
//	   |           |            |
//	   +-----------+------------+--> superseded, failed
//
// A save that is resumed begins with prepared, because an earlier daemon has written its files. A save that storage
// already has is committed at once. Within prepared the coordinator leads through intent, placed and published: a save
// that fails after the intent keeps its files, and recovery completes it. The last three phases are final; only a
// breakpoint may launch a second attempt at a shard that was aborted.
type phase string

const (
	waiting    phase = "waiting"  // for a writer
	writing    phase = "writing"  // to temporary files
	prepared   phase = "prepared" // durable here; the other shards are waited for
	committed  phase = "committed"
	superseded phase = "superseded" // overwritten by a newer save before it was written
	failed     phase = "failed"
)

// aborted reports whether a save is over and not on disk.
func (p phase) aborted() bool { return p == superseded || p == failed }

func (p phase) terminal() bool { return p == committed || p.aborted() }

// save is one shard of a save on its way to the disk. Its goroutine (flusher.run) owns it; fields that others read are
// guarded by saves.mu. The segment may be saved over at any time: until entry is set, a reader must pin it and compare
// seq.
type save struct {
	seg         *segment // nil: it holds a newer save by now
	seq         uint64
	saved       time.Time
	meta        shm.Meta
	begun       time.Time
	ctx         context.Context         // of all that is done for it
	quit        context.CancelCauseFunc // ends ctx
	waits       context.Context         // ends when it is of no use to wait for the other shards
	stopWaiting context.CancelCauseFunc // ends waits

	afterRestart bool // it is not written while workers start again

	entry   *commit.Entry // the durable files; nil: none yet
	resumed bool          // entry is an earlier daemon's work
	release func()        // releases the segment, which is pinned; nil: it is not
	bytes   int64
	done    atomic.Int64                  // bytes that the storage has asked for
	mount   atomic.Pointer[mountIdentity] // of its directory while it was written; nil: not known

	// Guarded by saves.mu.
	phase         phase
	err           error
	secondAttempt bool // a breakpoint's: the first was aborted
	logged        bool // the reason of the abort
	stuck         bool // has waited for other shards for long: do not wait for it
}

var (
	errSuperseded = errors.New("overwritten by a newer save before it could be written")
	errLost       = errors.New("somebody has removed what was written")
	errPartial    = errors.New("a worker of this node has ended without its shard, or has saved over it")
	errElsewhere  = errors.New("another daemon has committed it")
	errOutdated   = errors.New("workers that were started later have saved a newer step")
)

func newSave(s *segment, seq uint64, saved time.Time, m shm.Meta) *save {
	j := &save{seg: s, seq: seq, saved: saved, meta: m, begun: time.Now(), phase: waiting}
	for _, f := range m.Files {
		j.bytes += f.Len
	}
	return j
}

// releaseSegment gives the segment back to its worker, if it is kept.
func (j *save) releaseSegment() {
	if j.release != nil {
		j.release()
		j.release = nil
	}
}

// made returns j as a manifest with the fields that order saves, for comparisons.
func (j *save) made() commit.Manifest {
	return commit.Manifest{Save: commit.Save{Epoch: j.meta.Epoch, Saved: j.saved}}
}

func (j *save) timeout() time.Duration {
	if j.meta.TimeoutS <= 0 {
		return defaultSave
	}
	return time.Duration(j.meta.TimeoutS) * time.Second
}

// mountIdentity is nil if it is not known.
func (j *save) mountIdentity() mountIdentity {
	if id := j.mount.Load(); id != nil {
		return *id
	}
	return nil
}

func saveOf(j *save) commit.Save {
	m := j.meta
	return commit.Save{ID: m.Save, Epoch: m.Epoch, Dir: m.Dir, Framework: m.Framework, Layout: m.Layout, Step: m.Step,
		Shards: m.Shards, WorldSize: m.WorldSize, Saved: j.saved, Trackers: m.Trackers, Retention: m.Retention,
		Late: j.resumed}
}

// drop ends a save that will not be complete any more. If the leader may have decided otherwise already, it has a while
// to go on.
func (j *save) drop(why error) {
	if j.waits.Err() == nil {
		j.stopWaiting(why)
		time.AfterFunc(dropGrace, func() { j.quit(why) })
	}
}
