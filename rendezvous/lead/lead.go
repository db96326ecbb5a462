// Package lead has the two interfaces of a control plane that survives its host: Leadership, the election of the
// process that serves, and Decisions, the store of its decisions. It is pure; each implementation is a package of its
// own, and internal/app/leadtest has a suite of tests for each interface:
//
//	a directory (rendezvous/lead/journal)        Leadership and Decisions
//	etcd (internal/app/etcd)                     Leadership and Decisions
//	a Lease of Kubernetes (internal/app/lease)   Leadership and Decisions
//	launchers (internal/app/run/failover)        Leadership; they bring the decisions to the next server themselves,
//	                                             and TestDecisionsInTheLaunchers of that package says which
//
// A store keeps what was decided, spent and learned, some kilobytes for a run. It never keeps who is there: launchers
// bring their epoch and place along.
package lead

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Term numbers leaderships: each has a higher one than all before it. 0 is none.
type Term uint64

// Leader is the process that serves in a term.
type Leader struct {
	Term Term   `json:"term"`
	Addr string `json:"addr"` // HOST:PORT of its API
}

// ErrDeposed is the error of a process that has lost its leadership. It must not answer any request after that.
var ErrDeposed = errors.New("another process leads")

// ErrFull is the error, perhaps wrapped, of a store that takes no more than it has. It lets records be removed.
var ErrFull = errors.New("the store is full")

// Leadership elects one of several processes. Its methods may be called by any goroutine.
type Leadership interface {
	// Campaign blocks until this process leads; addr is its Leader.Addr. lost is closed when another process may lead:
	// its leadership has expired, was taken or given up, or the store did not answer for as long as it lasts. A process
	// campaigns once at a time.
	Campaign(ctx context.Context, addr string) (term Term, lost <-chan struct{}, err error)
	// Watch sends the present leader, and every later one once, until ctx ends; then it closes the channel. It sends the
	// zero Leader when there is none. A slow reader misses all but the newest.
	Watch(ctx context.Context) <-chan Leader
	// Depose ends the leadership of l, if that lasts, before it expires by itself. It is safe at any time, because the
	// store refuses the records of a deposed leader, but rude to a leader that lives.
	Depose(ctx context.Context, l Leader) error
	// Resign ends this process's own leadership.
	Resign(ctx context.Context) error
}

// Decisions are records by key, of which the newest of a key counts. Its methods may be called by any goroutine.
type Decisions interface {
	// Append keeps all records, or none. It returns ErrDeposed unless term is that of the present leader, and from then on
	// keeps nothing of that term. After an error, the first ErrDeposed included, the records may be kept or not; the next
	// successful Append or Load tells.
	Append(ctx context.Context, term Term, records ...Record) error
	// Load returns the newest record of every key, ordered by key. A leader of term that loads sees all that leaders of
	// earlier terms have appended, and nothing that comes after; ErrDeposed: it does not lead any more.
	Load(ctx context.Context, term Term) ([]Record, error)
}

// Slow is what Decisions may be besides: each Append is a burden, so those that nobody waits for are Pause apart.
type Slow interface{ Pause() time.Duration }

// Store is both, as all but the launchers are.
type Store interface {
	Leadership
	Decisions
}

// Record is one decision. A record whose value is nil removes its key. A value is shared with the store: nobody changes
// it.
type Record struct {
	Key   string // 1 to MaxKey bytes of ASCII letters, digits, '.', '_', '-' and '/'
	Value []byte // MaxValue bytes at most
}

// Bounds of records, so that every store can take them: a Kubernetes ConfigMap has 1 MiB, a request to etcd 1.5 MiB and
// 128 operations.
const (
	MaxKey     = 200
	MaxValue   = 64 << 10
	MaxRecords = 64        // of one Append
	MaxBytes   = 256 << 10 // of one Append
)

// Validate returns an error if a store cannot take the records in one Append.
func Validate(records []Record) error {
	if len(records) > MaxRecords {
		return fmt.Errorf("%d records at once: a store takes %d", len(records), MaxRecords)
	}
	size := 0
	for _, r := range records {
		if err := r.validate(); err != nil {
			return err
		}
		size += len(r.Key) + len(r.Value)
	}
	if size > MaxBytes {
		return fmt.Errorf("records of %d bytes at once: a store takes %d", size, MaxBytes)
	}
	return nil
}

func (r Record) validate() error {
	if len(r.Key) == 0 || len(r.Key) > MaxKey {
		return fmt.Errorf("key %.40q of %d bytes: need 1 to %d", r.Key, len(r.Key), MaxKey)
	}
	for _, c := range []byte(r.Key) {
		if !keyByte(c) {
			return fmt.Errorf("key %.40q: need letters, digits and any of ._-/", r.Key)
		}
	}
	if len(r.Value) > MaxValue {
		return fmt.Errorf("value of %s: %d bytes, need at most %d", r.Key, len(r.Value), MaxValue)
	}
	return nil
}

func keyByte(c byte) bool {
	return c|0x20 >= 'a' && c|0x20 <= 'z' || c >= '-' && c <= '9' || c == '_'
}

// Newest sends l to a channel with room for one, in place of a leader that nobody has received yet. Only one goroutine
// sends to a channel.
func Newest(leaders chan Leader, l Leader) {
	for {
		select {
		case leaders <- l:
			return
		default:
		}
		select {
		case <-leaders:
		default:
		}
	}
}
