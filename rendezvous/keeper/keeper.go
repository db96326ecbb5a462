// Package keeper keeps the runs of an api.Hub in a store, from which the Hub of a later leader goes on: all
// that was decided, spent and learned. The launchers tell which of them are there.
//
// Goroutines: one, from Follow until Close, or until another process leads.
package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"dlrover-run/internal/retry"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/lead"
)

// Times of writes.
const (
	gather     = 100 * time.Millisecond // news that nobody waits for are written together
	patience   = 50 * time.Millisecond  // of Settle
	appendTime = 5 * time.Second        // of one Append
	farewell   = time.Second            // of all that is written in Close
	firstRetry = 100 * time.Millisecond
	mostRetry  = 5 * time.Second
)

// Keeper is an api.Keeper. Close it after the Hub, which then tells nothing more.
type Keeper struct {
	store lead.Decisions
	term  lead.Term
	log   *slog.Logger
	hub   *api.Hub                // set by Follow
	hangs func(run string) []byte // as hub

	maxLines int           // bytes of all timelines
	patience time.Duration // of Settle

	wake, hurry chan struct{} // with room for one: there is news, and somebody waits for it
	stop        context.CancelFunc
	wg          sync.WaitGroup

	mu      sync.Mutex
	runs    map[string]*record
	failed  int  // writes
	failing bool // the newest write has failed
	over    bool // nothing is written any more
}

// record is the part of a run that the store has, and the part that it lacks. mu guards told, kept, waiter, gone and
// hangs; the rest is the writer's.
type record struct {
	told   int // changes that the Hub has told
	kept   int // of those, in the store
	waiter chan struct{}
	gone   bool // the Hub has forgotten the run, and told nothing of it since

	hangs  []byte      // guarded by mu
	past   api.KeptRun // as loaded, until Follow
	round  []byte      // as in the store
	line   line
	warned bool // it is too large
}

// Load reads the records of earlier leaders. Records that cannot be used are logged and left alone.
func Load(ctx context.Context, store lead.Decisions, term lead.Term, log *slog.Logger) (*Keeper, error) {
	all, err := store.Load(ctx, term)
	if err != nil {
		return nil, fmt.Errorf("what was decided about runs cannot be read: %w", err)
	}
	k := &Keeper{store: store, term: term, log: log, runs: map[string]*record{}, wake: make(chan struct{}, 1),
		hurry: make(chan struct{}, 1), stop: func() {}, maxLines: maxLines, patience: patience}
	for _, r := range all {
		k.load(r)
	}
	k.loadLines(all)
	return k, nil
}

// Hangs returns the lessons of earlier leaders from hangs of a run; nil: none.
func (k *Keeper) Hangs(run string) []byte {
	k.mu.Lock()
	defer k.mu.Unlock()
	if r := k.runs[run]; r != nil {
		return r.hangs
	}
	return nil
}

// Follow gives h the runs, and keeps those of h from then on, each with the result of hangs; nil is no news. Call it
// once, before h is served.
func (k *Keeper) Follow(h *api.Hub, hangs func(run string) []byte) {
	k.hub, k.hangs = h, hangs
	for run, r := range k.runs {
		if err := h.Restore(run, r.past); err != nil {
			k.log.Warn("a run of an earlier leader is not kept", "run_id", run, "err", err)
		}
		r.past = api.KeptRun{}
	}
	ctx, stop := context.WithCancel(context.Background())
	k.stop = stop
	k.wg.Go(func() { k.write(ctx) })
}

// Close writes the news, and ends the Keeper.
func (k *Keeper) Close() {
	k.stop()
	k.wg.Wait()
}

// Changed implements api.Keeper.
func (k *Keeper) Changed(run string) { k.tell(run, false) }

// Forgotten implements api.Keeper.
func (k *Keeper) Forgotten(run string) { k.tell(run, true) }

func (k *Keeper) tell(run string, gone bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	r := k.runs[run]
	if k.over || r == nil && gone {
		return
	}
	if r == nil {
		r = &record{}
		k.runs[run] = r
	}
	r.told, r.gone = r.told+1, gone
	signal(k.wake)
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Settle implements api.Keeper. It waits for no store that has failed.
func (k *Keeper) Settle(run string) {
	k.mu.Lock()
	r := k.runs[run]
	if r == nil || r.kept == r.told || k.failing || k.over {
		k.mu.Unlock()
		return
	}
	if r.waiter == nil {
		r.waiter = make(chan struct{})
	}
	waiter := r.waiter
	k.mu.Unlock()
	signal(k.hurry)
	expired := time.NewTimer(k.patience)
	defer expired.Stop()
	select {
	case <-waiter:
	case <-expired.C:
	}
}

// Stats are numbers of a Keeper: runs of which the store lacks something, and writes that have failed.
type Stats struct{ Pending, Failed int }

// Stats are those of now.
func (k *Keeper) Stats() Stats {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := Stats{Failed: k.failed}
	for _, r := range k.runs {
		if r.told != r.kept {
			s.Pending++
		}
	}
	return s
}

// write writes news until ctx ends, and then the rest of them.
func (k *Keeper) write(ctx context.Context) {
	pause := retry.Backoff{First: firstRetry, Most: mostRetry}
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-k.wake:
		}
		select {
		case <-ctx.Done():
		case <-k.hurry:
		case <-time.After(gather):
		}
		for ctx.Err() == nil && !k.flush(context.WithoutCancel(ctx), appendTime) {
			pause.Wait(ctx)
		}
		pause.Reset()
	}
	k.flush(context.WithoutCancel(ctx), farewell)
	k.end()
}

// end lets nobody wait any more.
func (k *Keeper) end() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.over = true
	for _, r := range k.runs {
		r.wakeAll()
	}
}

func (r *record) wakeAll() {
	if r.waiter != nil {
		close(r.waiter)
		r.waiter = nil
	}
}

// flush writes all news, and reports whether nothing is left to be tried again.
func (k *Keeper) flush(ctx context.Context, patience time.Duration) (done bool) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for run, told := range k.news() {
		err := k.flushRun(ctx, run, told)
		if errors.Is(err, lead.ErrDeposed) {
			k.stop() // the leader of now goes on
			return true
		}
		if k.outcome(err); err != nil {
			return false
		}
	}
	err := k.evict(ctx)
	if err != nil {
		k.outcome(err)
	}
	return err == nil
}

// learned has the lessons from hangs of a run.
func (k *Keeper) learned(run string, r *record) []byte {
	hangs := k.hangs(run)
	k.mu.Lock()
	defer k.mu.Unlock()
	if hangs != nil {
		r.hangs = hangs
	}
	return r.hangs
}

// news are the runs with changes that the store lacks, and their number.
func (k *Keeper) news() map[string]int {
	k.mu.Lock()
	defer k.mu.Unlock()
	news := map[string]int{}
	for run, r := range k.runs {
		if r.told != r.kept {
			news[run] = r.told
		}
	}
	return news
}

// outcome counts a write, and logs the first of those that fail, and the end of that.
func (k *Keeper) outcome(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case err == nil && k.failing:
		k.log.Info("what is decided about runs is kept again")
	case err != nil && !k.failing:
		k.log.Warn("what is decided about runs cannot be kept, and is lost if this master ends now; it is tried again",
			"err", err)
	}
	if k.failing = err != nil; k.failing {
		k.failed++
		for _, r := range k.runs {
			r.wakeAll()
		}
	}
}

// flushRun writes the news of a run.
func (k *Keeper) flushRun(ctx context.Context, run string, told int) error {
	k.mu.Lock()
	r, gone := k.runs[run], k.runs[run].gone
	k.mu.Unlock()
	changes, wrote := k.changes(run, r, gone)
	for len(changes) > 0 {
		n := fitting(changes)
		if err := k.store.Append(ctx, k.term, changes[:n]...); err != nil {
			return err
		}
		changes = changes[n:]
	}
	wrote()
	k.mu.Lock()
	defer k.mu.Unlock()
	if r.kept = told; r.told == told {
		r.wakeAll()
		if gone {
			delete(k.runs, run)
		}
	}
	return nil
}

// fitting is how many of the first records fit into one Append.
func fitting(records []lead.Record) int {
	size := 0
	for i, r := range records {
		size += len(r.Key) + len(r.Value)
		if i == lead.MaxRecords || size > lead.MaxBytes {
			return i
		}
	}
	return len(records)
}

// changes are the records that the store lacks of a run. Once it has them, wrote has to be called.
func (k *Keeper) changes(run string, r *record, gone bool) (changes []lead.Record, wrote func()) {
	if gone {
		if r.round != nil {
			changes = append(changes, lead.Record{Key: roundKey(run)})
		}
		for _, c := range r.line.chunks {
			changes = append(changes, lead.Record{Key: chunkKey(run, c.n)})
		}
		return changes, func() { r.round, r.line = nil, line{} }
	}
	past, exists := k.hub.Kept(run, r.line.event, r.line.proof)
	if !exists {
		return nil, func() {} // that is told next
	}
	grown, chunks := r.line.grown(run, past.Line)
	round, err := encode(loaded{version, run, grown.base, grown.lost, past.Round, k.learned(run, r)})
	if err != nil {
		if !r.warned {
			k.log.Warn("what is decided about a run cannot be kept", "run_id", run, "err", err)
		}
		r.warned, round = true, r.round
	}
	if string(round) != string(r.round) {
		changes = append(changes, lead.Record{Key: roundKey(run), Value: round})
	}
	return append(changes, chunks...), func() { r.round, r.line = round, grown }
}
