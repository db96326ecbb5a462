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
	"slices"
	"sync"
	"time"

	"dlrover-run/internal/retry"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/lead"
)

// Times of writes.
const (
	gather     = 100 * time.Millisecond // news that nobody waits for are written together; more in a lead.Slow
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

	maxLines int           // bytes of all timelines: less in a store that was full. The writer's
	lean     bool          // it is full without any: of runs that have ended it gets little. The writer's
	full     bool          // it was full, and that was logged. The writer's
	patience time.Duration // of Settle
	gather   time.Duration

	wake, hurry chan struct{} // with room for one: there is news, and somebody waits for it
	stop        context.CancelFunc
	wg          sync.WaitGroup

	mu      sync.Mutex
	runs    map[string]*record
	failed  int  // writes
	failing bool // the newest write has failed
	over    bool // nothing is written any more
}

// record is what the store has of a run, and what it lacks. mu guards told, kept, waiter, gone, ends and hangs; the
// rest is the writer's.
type record struct {
	told   int // changes that the Hub has told
	kept   int // of those, in the store
	waiter chan struct{}
	gone   bool // the Hub has forgotten the run, and told nothing of it since
	ends   int  // how often it has
	of     int  // ends before the run that line is of
	tried  int  // the newest chunk that a write had, which may have failed, and kept it all the same; 0: there was none

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
		hurry: make(chan struct{}, 1), stop: func() {}, maxLines: maxLines, patience: patience,
		gather: gather}
	if s, slow := store.(lead.Slow); slow {
		k.gather = max(k.gather, s.Pause())
	}
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
	if r.told, r.gone = r.told+1, gone; gone {
		r.ends, r.hangs = r.ends+1, nil
	}
	signal(k.wake)
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Settle implements api.Keeper. It waits for no store that has failed.
func (k *Keeper) Settle(run string) (leads bool) {
	k.mu.Lock()
	r := k.runs[run]
	if r == nil || r.kept == r.told || k.failing || k.over {
		defer k.mu.Unlock()
		return !k.over
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
	k.mu.Lock()
	defer k.mu.Unlock()
	return !k.over
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
		k.rest(ctx)
		for ctx.Err() == nil && !k.flush(context.WithoutCancel(ctx), appendTime) {
			pause.Wait(ctx)
		}
		pause.Reset()
	}
	k.flush(context.WithoutCancel(ctx), farewell)
	k.end()
}

// rest gathers news until somebody waits for them, or for long enough.
func (k *Keeper) rest(ctx context.Context) {
	enough := time.NewTimer(k.gather)
	defer enough.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-enough.C:
			return
		case <-k.hurry:
			if k.awaited() { // what that was for may have been written since
				return
			}
		}
	}
}

func (k *Keeper) awaited() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, r := range k.runs {
		if r.waiter != nil {
			return true
		}
	}
	return false
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
	err := k.flushAll(ctx)
	for errors.Is(err, lead.ErrFull) {
		shed, failed := k.shed(ctx)
		if failed != nil {
			err = failed
		}
		if failed != nil || !shed {
			break
		}
		err = k.flushAll(ctx)
	}
	if errors.Is(err, lead.ErrDeposed) {
		k.stop() // the leader of now goes on
		return true
	}
	if err != nil {
		k.outcome(err)
	}
	return err == nil
}

// flushAll writes the news of all runs, as many as fit into one Append at a time, and drops what is too old.
func (k *Keeper) flushAll(ctx context.Context) error {
	var some batch
	for _, n := range k.news() {
		changes, wrote := k.changes(n)
		if all := slices.Concat(some.records, changes); fitting(all) < len(all) || some.gone != n.gone {
			if err := k.append(ctx, some); err != nil {
				return err
			}
			some = batch{gone: n.gone}
		}
		some.records = append(some.records, changes...)
		some.wrote = append(some.wrote, func() {
			wrote()
			k.wrote(n)
		})
	}
	if err := k.append(ctx, some); err != nil {
		return err
	}
	return k.evict(ctx)
}

// batch is what is written together of some runs, that are gone or not.
type batch struct {
	gone    bool
	records []lead.Record
	wrote   []func() // to be called once the store has them
}

func (k *Keeper) append(ctx context.Context, b batch) error {
	for rest := b.records; len(rest) > 0; {
		n := fitting(rest)
		if err := k.store.Append(ctx, k.term, rest[:n]...); err != nil {
			return err
		}
		rest = rest[n:]
	}
	for _, f := range b.wrote {
		f()
	}
	if len(b.wrote) > 0 {
		k.outcome(nil)
	}
	return nil
}

// learned is what is known from hangs of a run.
func (k *Keeper) learned(run string, r *record) []byte {
	hangs := k.hangs(run)
	k.mu.Lock()
	defer k.mu.Unlock()
	if hangs != nil {
		r.hangs = hangs
	}
	return r.hangs
}

// news are changes of a run that the store lacks.
type news struct {
	run  string
	r    *record
	told int // their number
	gone bool
	ends int
	late bool // nobody waits for them
}

// news are those of all runs, first those that somebody waits for. In a store that is full, runs that are gone make
// room before.
func (k *Keeper) news() (all []news) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for run, r := range k.runs {
		if r.told != r.kept {
			all = append(all, news{run, r, r.told, r.gone, r.ends, r.waiter == nil})
		}
	}
	rank := func(n news) int {
		switch {
		case n.gone && k.full:
			return 0
		case !n.late:
			return 1
		case n.gone:
			return 2
		}
		return 3
	}
	slices.SortFunc(all, func(a, b news) int { return rank(a) - rank(b) })
	return all
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

// wrote books that the store has the news of a run.
func (k *Keeper) wrote(n news) {
	k.mu.Lock()
	defer k.mu.Unlock()
	n.r.kept = n.told
	if n.gone {
		k.maxLines = min(k.maxLines+fullChunk, maxLines) // there is room again
	}
	if n.r.told == n.told {
		n.r.wakeAll()
		if n.gone {
			delete(k.runs, n.run)
		}
	}
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
func (k *Keeper) changes(n news) (changes []lead.Record, wrote func()) {
	run, r := n.run, n.r
	if n.gone {
		if r.round != nil || r.tried > 0 {
			changes = append(changes, lead.Record{Key: roundKey(run)})
		}
		return append(changes, r.removal(run)...), func() { r.round, r.line, r.of, r.tried = nil, line{}, n.ends, 0 }
	}
	old := r.line
	if r.of != n.ends { // another run by that name
		changes, old = r.removal(run), line{newest: max(old.newest, r.tried)}
	}
	past, exists := k.hub.Kept(run, old.event, old.proof)
	if !exists {
		return nil, func() {} // that is told next
	}
	grown, chunks := old.grown(run, past.Line)
	if k.lean && past.Round.End != nil {
		shorten(&past.Round)
	}
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
	r.tried = max(r.tried, grown.newest, 1)
	return append(changes, chunks...), func() { r.round, r.line, r.of = round, grown, n.ends }
}

// removal removes all chunks of a run that the store may have.
func (r *record) removal(run string) []lead.Record {
	changes := r.line.remove(run)
	for n := r.line.newest + 1; n <= r.tried; n++ {
		changes = append(changes, lead.Record{Key: chunkKey(run, n)})
	}
	return changes
}
