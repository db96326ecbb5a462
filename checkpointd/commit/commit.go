// Package commit makes the files of a save appear on disk all together or not at all, and finds them again.
//
// It has no state and no network: everything is in the checkpoint directory, and package coordinator decides when a
// node may enter the next phase. The writer of a shard calls
//
//	Plan, (writes the files), Prepared, (waits for the intent), Place, Placed
//
// and the writer of shard 0, when all shards are prepared, Intent, and when all are placed, Publish. Up to the intent a
// save leaves only temporary files; after the intent it can only be completed, by the writers or by Recover. Every step
// is durable when its call returns, and may be repeated.
//
// Paths read from a directory are not trusted: a save may put files elsewhere by absolute paths. But no path that is
// read back makes this package write or remove files outside of the directory, other than those of a save that named
// them.
package commit

import (
	"errors"
	"path/filepath"
	"time"

	"dlrover-run/checkpointd/fsx"
)

// Latest is the tracker that every save writes: the step of the newest committed save, in decimal.
const Latest = "dlrover_latest.txt"

// Tracker is a small file that names the newest step in the way of a framework. Path is relative to the directory.
type Tracker struct {
	Path string `json:"path"`
	Text string `json:"text"`
}

// Retention is the policy for committed steps on disk. With both zero all do.
type Retention struct {
	KeepLatest   int   `json:"keep_latest,omitempty"`   // the newest n
	KeepInterval int64 `json:"keep_interval,omitempty"` // the multiples of n
}

// Save is one save of all shards, as every writer of it knows it.
type Save struct {
	ID, Epoch, Dir, Framework, Layout string // ID: letters, digits, "-" and "_"
	Step                              int64
	Shards, WorldSize                 int
	Saved                             time.Time // when it was complete in memory; orders the saves of an epoch
	Trackers                          []Tracker // Latest need not be among them
	Retention                         *Retention
	// Late is set if other saves may have overtaken it; then it moves no tracker away from later saves.
	Late bool
}

// FileEntry is one file of a save. Path is relative to the directory, or absolute when it is elsewhere.
type FileEntry struct {
	Path  string `json:"path"`
	Size  int64  `json:"size"`
	CRC   uint32 `json:"crc32"` // CRC-32 IEEE of the whole file
	Shard int    `json:"shard"`
	// Tmp is the path of the file before the commit, for code that passes entries on. Store itself uses Path.
	Tmp string `json:"tmp,omitempty"`
}

// Entry is the part of one shard.
type Entry struct {
	Shard int         `json:"shard"`
	Files []FileEntry `json:"files"`
}

// Manifest describes a committed save, or, with a zero Committed, one that is to be.
type Manifest struct {
	Version int
	Save
	Committed time.Time
	Files     []FileEntry
}

// Recovered is the result of Recover. The strings are the ids of saves.
type Recovered struct {
	Forward []string // completed
	Removed []string // thrown away
}

// Skipped is a step that could not be used, and why.
type Skipped struct {
	Step   int64
	Reason string
}

// Store works on checkpoint directories. It has no state of its own except the Cache, and may be used concurrently.
type Store struct {
	FS    fsx.FS
	Now   func() time.Time // on the clock that stamps files, more or less
	Cache *Cache           // for frequent commits; nil: manifests are read each time
	// OnDamaged is called for each interrupted commit, or removal, that was set aside because it can never be completed.
	// path is where its leftovers are now, why the reason. May be nil.
	OnDamaged func(path string, why error)

	patience time.Duration // with a directory's lock; 0: the usual one
}

// MetaDir is where manifests and markers are.
func MetaDir(dir string) string { return filepath.Join(dir, metaDir) }

// StageDir is where the markers of a save are. dir must be without links: see fsx.FS.Resolve.
func StageDir(dir, save string) string { return filepath.Join(dir, metaDir, "stage", save) }

var (
	// errNoIntent is the refusal to publish a save for which no intent was written.
	errNoIntent = errors.New("no intent was written for this save")
	// ErrBegun is the refusal to plan or abort a save whose intent is written: it can only be completed.
	ErrBegun = errors.New("the commit of this save has begun")
	// ErrSuperseded is the refusal to begin the commit of a save after that of a later one of the same step or files.
	ErrSuperseded = errors.New("a later save is committed")
	// errDamaged reports that the content of a file of this package is invalid.
	errDamaged = errors.New("damaged")
	// ErrKept is the refusal to remove a step that is still needed.
	ErrKept = errors.New("this step must stay")
	// ErrNone reports that a directory has no checkpoint that can be used.
	ErrNone = errors.New("no usable checkpoint")
)
