// Package coordinator lets the daemons of a job agree on the progress of each save.
//
// A Coordinator answers four questions. May this node enter the next phase of a save (Post)? Which save do the nodes
// still hold completely in memory (Agree)? Where are the other nodes (Peers)? How old are the newest saves of each rank
// (Ages)? state is the pure state machine behind the answers. Local keeps one in this process, for saves of one node.
// Hub keeps one for every run of a master, and Client connects to it. Files needs no master, but storage that all nodes
// share.
//
// A save is a two-phase commit, and the leader (the writer of shard 0) decides. A node that has posted Prepared must
// keep its temporary files until a Post returns ErrAborted: the leader may be past the intent.
//
// This package starts no goroutines of its own. It has a timer for each run.
package coordinator

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"dlrover-run/checkpointd/commit"
)

// Limits of one run. A request beyond them is refused with ErrLimit and changes nothing.
const (
	maxSaves  = 64       // saves in flight
	maxKeys   = 64       // agreements, and as many exchanges of peers, remembered at a time
	maxShards = 100_000  // shards of a save, nodes of an agreement, ranks with ages
	maxBytes  = 64 << 20 // memory for entries, holdings and peers
	maxBody   = 2 << 20  // one request
)

// forgetAfter is how long a save, an agreement, an exchange or an age is remembered after its last event. Waiting
// daemons repeat themselves far more often than that. The newest exchange is remembered for as long as ages come.
const forgetAfter = 10 * time.Minute

// Errors of a Coordinator.
var (
	// ErrAborted reports that a shard failed before the intent. The save is aborted; remove its temporary files.
	ErrAborted = errors.New("the save is given up")
	// ErrDecided refuses a Failed that is too late: the leader may have written the intent. Keep the files, and continue
	// the save or leave it to recovery.
	ErrDecided = errors.New("the save can no longer be given up")
	// ErrStalled: a shard could not be put in place after the intent. Recovery completes the save.
	ErrStalled = errors.New("the save is complete but not in place")
	// ErrCommitted answers a Prepared of a save that is already published: there is nothing left to do for it.
	ErrCommitted = errors.New("the save is already committed")
	// errBadRequest: no coordinator accepts this. Trying again is useless.
	errBadRequest = errors.New("bad request")
	// ErrLimit: one of the limits of a run is reached, or the hub keeps as many runs as it may.
	ErrLimit = errors.New("over the limit")
)

// Save names one save of all shards.
type Save struct {
	ID     string `json:"id"` // 1 to 64 letters, digits, '-' or '_': it becomes a file name
	Step   int64  `json:"step"`
	Shards int    `json:"shards"`        // 1 to maxShards
	Dir    string `json:"dir,omitempty"` // the checkpoint directory; Files needs it
}

// Phase is how far a node is with its shards of a save.
type Phase string

// The phases in order, and Failed.
const (
	Prepared  Phase = "prepared"  // the temporary files are durable
	Intent    Phase = "intent"    // the intent is durable: from here only forward (leader only)
	Placed    Phase = "placed"    // the files have their final names, durably
	Published Phase = "published" // the manifest is durable (leader only)
	Failed    Phase = "failed"
)

// Report is a node's progress with its shards of a save. The reporter of shard 0 is the leader.
type Report struct {
	Save    Save           `json:"save"`
	Phase   Phase          `json:"phase"`
	Shards  []int          `json:"shards"`
	Entries []commit.Entry `json:"entries,omitempty"` // Prepared: one for each of Shards; otherwise not looked at
	Error   string         `json:"error,omitempty"`   // Failed: why; cut at 2 KiB
}

// Holding is one shard of a save in a node's memory.
type Holding struct {
	Save   string    `json:"save"`
	Dir    string    `json:"dir"`
	Step   int64     `json:"step"`
	Saved  time.Time `json:"saved"`
	Shard  int       `json:"shard"`
	Shards int       `json:"shards"`
	Copy   bool      `json:"copy,omitempty"` // a peer's copy, not the node's own
}

// Plan is a node's part in the save that an agreement chose.
type Plan struct {
	Save   string `json:"save"`
	Dir    string `json:"dir"`
	Step   int64  `json:"step"`
	Mine   []int  `json:"mine,omitempty"` // the shards that this node writes, ascending
	Leader bool   `json:"leader,omitempty"`
}

// Peer is a node as others reach it. Switch may be empty.
type Peer struct {
	Node   int    `json:"node"`
	Addr   string `json:"addr"`
	Switch string `json:"switch,omitempty"`
	Copies []Copy `json:"copies,omitempty"`
}

// Copy is a shard of a save that a node can give to others. Coordinators of earlier releases know nothing of the fields
// after Step: their zero values stand for any.
type Copy struct {
	Rank    int    `json:"rank"`
	Shard   int    `json:"shard"`
	Save    string `json:"save"`
	Step    int64  `json:"step"`
	Dir     string `json:"dir,omitempty"`      // the checkpoint directory
	SavedNS int64  `json:"saved_ns,omitempty"` // since 1970; after a rollback lower steps are newer
	Shards  int    `json:"shards,omitempty"`   // of the whole save
}

// Age is the newest save of a rank, in memory and on disk: the work that would survive if the rank stopped now.
type Age struct {
	Rank        int       `json:"rank"`
	MemoryStep  int64     `json:"memory_step"`
	DurableStep int64     `json:"durable_step"`
	MemoryAt    time.Time `json:"memory_at,omitzero"`
	DurableAt   time.Time `json:"durable_at,omitzero"`
	// Trouble is why the node of the rank cannot write now, at its first rank alone; cut at 512 bytes.
	Trouble string `json:"trouble,omitempty"`
}

// Coordinator connects the daemons of a run. Every method may be called concurrently and ends when ctx does. It may be
// called again with the same arguments, even after the coordinator has lost its memory. Results must not be modified.
type Coordinator interface {
	// Post reports that this node has reached a phase with the shards of r, and returns when it may continue:
	//   - Prepared: the leader when all shards are prepared, with all entries in order of shards; the others, with no
	//     entries, when the leader has posted Intent.
	//   - Placed: the leader when all shards are placed; the others when the leader has posted Published.
	//   - Intent, Published and Failed: at once.
	//
	// A Prepared takes back an earlier Failed of the same shard, so that a save can be tried again; then every shard
	// has to be posted again. Errors: ErrAborted, ErrDecided, ErrStalled, ErrCommitted, errBadRequest, ErrLimit, or
	// that of ctx.
	Post(ctx context.Context, r Report) ([]commit.Entry, error)
	// Agree announces this node's holdings in memory. It waits until all nodes (numbered from 0) have done so under the
	// key, but at most for patience from the first, and returns the result of choose; false when there is none. After the
	// first answer all nodes get the same answer for as long as the key is remembered. So use a new key for every
	// agreement, such as "word.term.round.epoch.more"; nodes that are dead in the round are not waited for. If an aborted
	// save is chosen, it may be written again.
	Agree(ctx context.Context, key string, node, nodes int, hs []Holding, patience time.Duration) (Plan, bool, error)
	// Announce lists the keys under which this node will call Agree, so that others do not wait for it under another.
	// Coordinators of earlier releases do not know it; then their patience has to do.
	Announce(ctx context.Context, s Participation) error
	// Peers exchanges addresses and copies. It waits until all nodes (numbered from 0) are there, at most for patience
	// from the first. Later calls return at once with the nodes known by then, and replace the node's own data. The result
	// is in order of nodes. A coordinator that has lost its memory may not know all of them.
	Peers(ctx context.Context, key string, self Peer, nodes int, patience time.Duration) ([]Peer, error)
	// Ages replaces the ages of the given ranks. of is the round of the node, "term.round": where the coordinator sees
	// connections, it knows from then on whether the node's daemon is there. "" says nothing about that.
	Ages(ctx context.Context, of string, node int, ages []Age) error
}

func (s Save) check() error {
	switch {
	case !goodID(s.ID):
		return fmt.Errorf("%w: save id %.80q: need 1 to 64 letters, digits, '-' or '_'", errBadRequest, s.ID)
	case s.Shards < 1:
		return fmt.Errorf("%w: save %s has %d shards", errBadRequest, s.ID, s.Shards)
	case s.Shards > maxShards:
		return fmt.Errorf("%w: save %s has %d shards, at most %d are possible", ErrLimit, s.ID, s.Shards, maxShards)
	case len(s.Dir) > maxPath || s.Dir != "" && !filepath.IsAbs(s.Dir):
		return fmt.Errorf("%w: checkpoint directory %.80q of save %s is not an absolute path", errBadRequest, s.Dir,
			s.ID)
	}
	return nil
}

// Text from outside is kept in memory and shown to people.
const (
	maxPath   = 4096
	maxKey    = 256
	maxReason = 2048
)

func goodID(id string) bool {
	return id != "" && len(id) <= 64 && !strings.ContainsFunc(id, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '_')
	})
}

func (r Report) check() error {
	if err := r.Save.check(); err != nil {
		return err
	}
	switch r.Phase {
	case Prepared, Placed, Failed:
	case Intent, Published:
		if !r.leads() {
			return fmt.Errorf("%w: %s of save %s comes from the writer of shard 0 only", errBadRequest, r.Phase,
				r.Save.ID)
		}
	default:
		return fmt.Errorf("%w: unknown phase %.40q", errBadRequest, r.Phase)
	}
	if len(r.Shards) == 0 {
		return fmt.Errorf("%w: %s of save %s names no shard", errBadRequest, r.Phase, r.Save.ID)
	}
	for _, n := range r.Shards {
		if n < 0 || n >= r.Save.Shards {
			return fmt.Errorf("%w: shard %d of save %s, which has %d shards", errBadRequest, n, r.Save.ID,
				r.Save.Shards)
		}
	}
	if r.Phase == Prepared {
		return r.checkEntries()
	}
	return nil
}

// checkEntries makes sure that there is one entry for each shard.
func (r Report) checkEntries() error {
	missing := make(map[int]bool, len(r.Shards))
	for _, n := range r.Shards {
		missing[n] = true
	}
	for _, e := range r.Entries {
		if !missing[e.Shard] {
			return fmt.Errorf("%w: save %s: the entry of shard %d is there twice, or not for a shard of this report",
				errBadRequest, r.Save.ID, e.Shard)
		}
		delete(missing, e.Shard)
	}
	for n := range missing {
		return fmt.Errorf("%w: save %s: no entry for shard %d", errBadRequest, r.Save.ID, n)
	}
	return nil
}

func (r Report) leads() bool { return slices.Contains(r.Shards, 0) }
