package checkpointd

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"dlrover-run/checkpointd/shm"
)

// replicaStore keeps the copies of other nodes' shards: for each owner one more than it has checkpoint directories, at
// least two. The newest complete copy of a directory is never touched. The next copy reuses the memory of another one,
// or replaces it.
type replicaStore struct{ segs *segments }

const (
	// reuseTries and reusePause bound the wait for readers that pin a copy briefly. A reader that loads it takes longer,
	// and is not waited for.
	reuseTries = 5
	reusePause = 10 * time.Millisecond
	// maxSlots bounds the copies of an owner; fewSlots is the minimum.
	maxSlots, fewSlots = 16, 2
)

// replicaSlot is one of the segments of an owner.
type replicaSlot struct {
	name  string
	seg   *shm.Segment // nil: cannot be opened
	seq   uint64
	saved time.Time // zero: cannot be read
	made  int64     // shm.Meta.SavedNS
	step  int64
	epoch string
	dir   string
	err   error // why it cannot be read
}

// Incoming implements replica.Store.
func (s replicaStore) Incoming(m shm.Meta, size int64) (*shm.Incoming, error) {
	slots := make([]replicaSlot, maxSlots)
	for k := range slots {
		slots[k] = s.slot(m.Rank, k)
	}
	for _, have := range slots {
		if have.err == nil && have.dir == m.Dir && have.epoch == m.Epoch && have.after(m) {
			return nil, fmt.Errorf("rank %d: step %d is older than step %d, which is here", m.Rank, m.Step, have.step)
		}
	}
	free, err := shm.Free(s.segs.dir.Path())
	a := pickSlot(slots, m.Dir, err == nil && size <= free)
	if in := a.reuse(size); in != nil {
		return in, nil
	}
	if err != nil {
		return nil, err
	}
	if size > free {
		return nil, fmt.Errorf("no room for a copy of rank %d: %d bytes, %d are free in %s", m.Rank, size, free,
			s.segs.dir.Path())
	}
	return s.segs.dir.Incoming(a.name, size)
}

// pickSlot picks the slot for the next copy of dir: the oldest that is not the newest of its directory, else, if there
// is room for it, one more, else the oldest of another directory.
func pickSlot(slots []replicaSlot, dir string, room bool) replicaSlot {
	newest := map[string]replicaSlot{}
	for _, s := range slots {
		if n, ok := newest[s.dir]; s.err == nil && (!ok || n.compare(s) < 0) {
			newest[s.dir] = s
		}
	}
	class := map[string]int{}
	for k, s := range slots {
		extra := k >= fewSlots && errors.Is(s.err, fs.ErrNotExist)
		switch {
		case extra && room:
			class[s.name] = 1
		case extra:
			class[s.name] = 3
		case s.err != nil || newest[s.dir].name != s.name: // class 0
		case s.dir == dir:
			class[s.name] = 3
		default:
			class[s.name] = 2
		}
	}
	return slices.MinFunc(slots, func(a, b replicaSlot) int {
		return cmp.Or(class[a.name]-class[b.name], a.compare(b))
	})
}

// after reports whether the copy was saved after m, by the same rank. Steps may go back.
func (a replicaSlot) after(m shm.Meta) bool {
	if a.made != 0 && m.SavedNS != 0 {
		return a.made > m.SavedNS
	}
	return a.step > m.Step
}

// compare is negative if a is to be replaced before b.
func (a replicaSlot) compare(b replicaSlot) int {
	if a.empty() != b.empty() && a.saved.Equal(b.saved) {
		if a.empty() {
			return -1
		}
		return 1
	}
	return cmp.Or(a.saved.Compare(b.saved), cmp.Compare(a.step, b.step))
}

// empty reports that the slot has nothing to lose. A slot that cannot be read for another reason may have the newest
// copy.
func (a replicaSlot) empty() bool {
	return errors.Is(a.err, shm.ErrIncomplete) || errors.Is(a.err, fs.ErrNotExist)
}

func (s replicaStore) slot(rank, k int) replicaSlot {
	out := replicaSlot{name: fmt.Sprintf("peer/r%d-%d.seg", rank, k), step: -1}
	opened, err := s.segs.open(out.name)
	if err != nil {
		out.err = err
		return out
	}
	out.seg = opened.seg
	h, err := out.seg.Header() // before Pin: a copy that is received later has another seq
	if err != nil {
		out.err = err
		return out
	}
	out.seq = h.Seq
	p, err := out.seg.Pin()
	if err != nil {
		out.err = err
		return out
	}
	defer p.Release()
	out.saved, out.made, out.step = p.Header.Saved, p.Meta.SavedNS, p.Meta.Step
	out.epoch, out.dir = p.Meta.Epoch, p.Meta.Dir
	return out
}

// reuse returns nil if a new file is needed. A complete copy that is taken over is the older of two.
func (old replicaSlot) reuse(size int64) *shm.Incoming {
	if old.seg == nil || old.err != nil && !old.empty() {
		return nil
	}
	for try := 1; ; try++ {
		in, err := old.seg.Reuse(size, old.seq)
		if err == nil {
			return in
		}
		if !errors.Is(err, shm.ErrBusy) || try == reuseTries {
			return nil
		}
		time.Sleep(reusePause)
	}
}

// Published implements replica.Store.
func (s replicaStore) Published(seg *shm.Segment) { s.segs.adopt(seg) }

// Copy implements replica.Store. rank is anyRank for a save that every rank can load.
func (s replicaStore) Copy(rank int, save string) (*shm.Pinned, error) {
	names, err := s.segs.dir.Names()
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		seg, err := s.segs.open(name)
		if err != nil {
			continue
		}
		p, err := seg.seg.Pin()
		if err != nil {
			continue
		}
		if p.Meta.Save == save && (p.Meta.Rank == rank || rank == anyRank) {
			return p, nil
		}
		p.Release()
	}
	return nil, fmt.Errorf("rank %d of save %s is not held here", rank, save)
}
