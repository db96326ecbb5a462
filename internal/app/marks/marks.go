// Package marks keeps one nodehealth.Book for a daemon: with its file, its clock, the handlers below /v1/nodes, and an
// Actor that applies marks elsewhere, such as to a cluster. Follow adds the findings of a service about machines.
//
// Goroutines, until Close: one that keeps the file and the time, one that acts if there is an Actor, and one that
// listens after Follow.
package marks

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"dlrover-run/internal/app/nodehealth"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/job"
)

// Config says how a Keeper applies its marks.
type Config struct {
	// Dir is the directory of the file; with "" the record ends with the process.
	Dir    string
	Actor  Actor // nil: marks have no effect elsewhere
	DryRun bool  // log the calls of an Actor instead of making them
	// Action names the Actor's effect on a machine, for people, such as "taint".
	Action string
	Policy nodehealth.Config
	Log    *slog.Logger
	// Annotate adds a line to the timeline of a run, which may be over; nil adds none.
	Annotate func(run string, event job.Event, node, text string)
	// Settle is how long findings are collected before they are judged together, so that a mass of them is seen to be
	// one. Default: 1 s.
	Settle time.Duration
}

// Keeper keeps a Book. It is safe for use by several goroutines.
type Keeper struct {
	cfg     Config
	file    *file // nil without a Dir
	actor   *actor
	queue   *queue
	service atomic.Pointer[service.Service] // nil before Follow
	ctx     context.Context                 // until Close
	stop    context.CancelFunc
	wg      sync.WaitGroup

	mu      sync.Mutex
	book    *nodehealth.Book
	waiting []chan error // for the next write
	failed  error        // of the last write

	dirty, urgent chan struct{} // hold one when the file is older than the Book; urgent: it is to be written now
}

// Open reads the file in cfg.Dir, which it creates if need be, and keeps it from then on. The error names the bad file,
// or the other daemon that has the directory, and the way out.
func Open(cfg Config) (*Keeper, error) {
	if cfg.Settle == 0 {
		cfg.Settle = time.Second
	}
	k := &Keeper{cfg: cfg, book: nodehealth.NewBook(cfg.Policy), dirty: make(chan struct{}, 1),
		urgent: make(chan struct{}, 1)}
	if cfg.Dir != "" {
		f, err := openFile(cfg.Dir)
		if err != nil {
			return nil, err
		}
		if k.book, err = f.load(cfg.Policy); err != nil {
			f.close()
			return nil, err
		}
		k.file = f
	}
	ctx, stop := context.WithCancel(context.Background())
	k.ctx, k.stop = ctx, stop
	if cfg.Actor != nil && !cfg.DryRun {
		k.actor = newActor(k)
	}
	k.change((*nodehealth.Book).Tick, true) // the policy may allow marks less time than that of the daemon before
	if k.actor != nil {
		k.actor.begin(k.book.Marks())
		k.wg.Go(func() { k.actor.work(ctx) })
	}
	k.queue = newQueue(k)
	k.wg.Go(func() { k.keep(ctx) })
	return k, nil
}

// Close writes all changes, and ends the Keeper.
func (k *Keeper) Close() error {
	k.stop()
	k.wg.Wait()
	err := k.write()
	if k.file != nil {
		k.file.close()
	}
	return err
}

// gather is the time for which changes are batched before they are written, unless a caller waits or a mark has
// changed. retry is the delay after a failed write.
const (
	gather = time.Second
	retry  = 10 * time.Second
)

// keep ticks, and writes changes.
func (k *Keeper) keep(ctx context.Context) {
	var again <-chan time.Time
	for {
		wait, stop := k.tick()
		select {
		case <-ctx.Done():
		case <-wait:
			stop()
			continue
		case <-k.urgent:
		case <-again:
		case <-k.dirty:
			k.gather(ctx)
		}
		stop()
		if ctx.Err() != nil {
			return
		}
		again = nil
		if err := k.write(); err != nil {
			k.cfg.Log.Error("what is known of nodes cannot be written", "err", err)
			again = time.After(retry)
		}
	}
}

func (k *Keeper) gather(ctx context.Context) {
	timer := time.NewTimer(gather)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-k.urgent:
	case <-timer.C:
	}
}

// longestTurn is how long a turn of keep waits at most where anything is kept: a clock that is set moves no timer.
const longestTurn = time.Hour

// tick lets marks expire. It runs even if none is due: after the clock was set back, the due times are far away, and
// only a Tick bounds them. It returns the timer of the next tick, and a function that stops it.
func (k *Keeper) tick() (<-chan time.Time, func()) {
	k.change((*nodehealth.Book).Tick, false)
	k.mu.Lock()
	next := k.book.Next()
	k.mu.Unlock()
	if next.IsZero() {
		return nil, func() {}
	}
	timer := time.NewTimer(min(max(time.Until(next), 0), longestTurn))
	return timer.C, func() { timer.Stop() }
}

// signal puts something into a channel that holds one.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// change changes the Book, and carries out the acts that follow. touched means that there is a change even without
// acts.
func (k *Keeper) change(f func(b *nodehealth.Book, now time.Time) []nodehealth.Act, touched bool) {
	k.mu.Lock()
	acts := f(k.book, time.Now())
	for _, a := range acts {
		k.carryOut(a)
	}
	if k.actor != nil && slices.ContainsFunc(acts, func(a nodehealth.Act) bool { return a.Do != nodehealth.Hold }) {
		k.actor.avoid()
	}
	k.mu.Unlock()
	if len(acts) > 0 {
		signal(k.urgent)
	} else if touched {
		signal(k.dirty)
	}
	for _, a := range acts {
		k.tell(a)
	}
}

// carryOut has the actor do it. The lock is held, so that acts come in order.
func (k *Keeper) carryOut(a nodehealth.Act) {
	switch {
	case a.Do == nodehealth.Hold:
	case k.cfg.DryRun:
		k.cfg.Log.Info("dry run: this would be done", "action", string(a.Do), "node", a.Mark.Node,
			"level", k.cfg.Action, "text", a.Text)
	case k.actor != nil:
		k.actor.enqueue(a)
	}
}

// events are the names of acts in the timeline.
var events = map[nodehealth.Do]job.Event{
	nodehealth.Apply:  job.EventNodeMarked,
	nodehealth.Remove: job.EventNodeUnmarked,
	nodehealth.Hold:   job.EventNodeMarkHeld,
}

// tell adds an act to the timeline of its run and of all runs in which the machine takes part.
func (k *Keeper) tell(a nodehealth.Act) {
	event, node := events[a.Do], a.Mark.Node
	k.cfg.Log.Warn(string(event), "node", node, "run_id", a.Run, "kind", string(a.Mark.Kind), "text", a.Text)
	if k.cfg.Annotate == nil {
		return
	}
	k.mu.Lock()
	runs := k.book.RunsOf(node)
	k.mu.Unlock()
	if a.Run != "" && !slices.Contains(runs, a.Run) {
		runs = append(runs, a.Run)
	}
	for _, run := range runs {
		k.cfg.Annotate(run, event, node, a.Text)
	}
}

// write brings the file up to date, and wakes the callers that wait for it.
func (k *Keeper) write() error {
	k.mu.Lock()
	waiting := k.waiting
	k.waiting = nil
	var data []byte
	var err error
	if k.file != nil {
		data, err = k.book.Snapshot()
	}
	k.mu.Unlock()
	if k.file != nil && err == nil {
		err = k.file.save(data)
	}
	k.mu.Lock()
	k.failed = err
	k.mu.Unlock()
	for _, w := range waiting {
		w <- err
	}
	return err
}

// durable waits until all changes so far are in the file.
func (k *Keeper) durable(ctx context.Context) error {
	done := make(chan error, 1)
	k.mu.Lock()
	k.waiting = append(k.waiting, done)
	k.mu.Unlock()
	signal(k.urgent)
	select {
	case err := <-done:
		return err
	case <-k.ctx.Done():
		return errors.New("the daemon ends")
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Find records and judges findings, as nodehealth.Book does. So do Failed, Passed and Size.
func (k *Keeper) Find(found ...nodehealth.Finding) {
	k.change(func(b *nodehealth.Book, now time.Time) []nodehealth.Act { return b.Find(now, found...) }, true)
}

// Failed records how an epoch of a run has ended.
func (k *Keeper) Failed(run, culprit, text string) {
	k.change(func(b *nodehealth.Book, now time.Time) []nodehealth.Act { return b.Failed(now, run, culprit, text) }, true)
}

// Passed records the aspects of a machine that a check has found to be sound.
func (k *Keeper) Passed(node string, covered ...string) {
	k.change(func(b *nodehealth.Book, now time.Time) []nodehealth.Act { return b.Passed(now, node, covered...) }, true)
}

// Size sets the machines that take part in a run now; none: it is over.
func (k *Keeper) Size(run string, machines []string) {
	k.change(func(b *nodehealth.Book, now time.Time) []nodehealth.Act { b.Size(now, run, machines); return nil }, true)
}

// Mark marks a machine in the name of an operator. It returns once the mark is on disk.
func (k *Keeper) Mark(ctx context.Context, node, by, why string) (err error) {
	k.change(func(b *nodehealth.Book, now time.Time) (acts []nodehealth.Act) {
		acts, err = b.SetMark(now, node, by, why, time.Time{})
		return acts
	}, false)
	if err != nil {
		return err
	}
	return k.durable(ctx)
}

// Clear removes every mark of a machine, and forgets its findings, in the name of an operator. It returns once that is
// on disk; known is false if there was nothing.
func (k *Keeper) Clear(ctx context.Context, node, by, why string) (known bool, err error) {
	if err := nodehealth.CheckName(node); err != nil {
		return false, err
	}
	k.change(func(b *nodehealth.Book, now time.Time) (acts []nodehealth.Act) {
		acts, known = b.Clear(now, node, by, why)
		return acts
	}, true)
	return known, k.durable(ctx)
}

// List is the record of all machines, and the Actor's progress.
func (k *Keeper) List() Known {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Now()
	known := Known{Nodes: []Machine{}, Avoid: k.book.Avoid(now), Action: k.cfg.Action, DryRun: k.cfg.DryRun}
	for _, n := range k.book.List(now) {
		known.Nodes = append(known.Nodes, Machine{Node: n, Record: k.record(n)})
	}
	if k.actor == nil {
		return known
	}
	busy, troubles := k.actor.busy()
	known.Troubles = troubles
	for _, name := range busy { // such as a mark that could not be removed yet
		if !slices.ContainsFunc(known.Nodes, func(m Machine) bool { return m.Name == name }) {
			known.Nodes = append(known.Nodes, Machine{nodehealth.Node{Name: name}, k.actor.record(name)})
		}
	}
	slices.SortFunc(known.Nodes, func(a, b Machine) int { return strings.Compare(a.Name, b.Name) })
	return known
}

func (k *Keeper) record(n nodehealth.Node) *ActionRecord {
	switch {
	case k.actor != nil:
		return k.actor.record(n.Name)
	case k.cfg.DryRun && n.Mark != nil:
		return &ActionRecord{Do: nodehealth.Apply, State: Dry}
	}
	return nil
}

// Known is the answer to GET /v1/nodes.
type Known struct {
	Nodes []Machine `json:"nodes"`
	// Avoid are the machines where no replacement should be placed.
	Avoid []string `json:"avoid"`
	// Action names the effect on a marked machine, "" for none. DryRun means that it is only logged.
	Action   string   `json:"action,omitempty"`
	DryRun   bool     `json:"dry_run,omitempty"`
	Troubles []string `json:"troubles,omitempty"` // pending failures about no machine in particular
}

// Machine is the record of one machine, and the Actor's progress.
type Machine struct {
	nodehealth.Node
	Record *ActionRecord `json:"action,omitempty"`
}

// Avoid are the machines where no replacement should be placed, by name.
func (k *Keeper) Avoid() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.book.Avoid(time.Now())
}

// marked reports whether a machine has a mark.
func (k *Keeper) marked(machine string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.book.Marked(time.Now(), machine)
}

// Suspect reports whether a spare is preferred to a machine: it is marked, or the culprit of many failures.
func (k *Keeper) Suspect(machine string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.book.Suspect(machine) || k.book.Marked(time.Now(), machine)
}

// Stats are counts of a Keeper's records.
type Stats struct {
	Marked   int // machines with a mark
	Held     int // machines with a mark that the breaker has held back
	Pending  int // machines with pending tasks
	Failures int // calls of the Actor that have failed, since the start
}

// Stats counts.
func (k *Keeper) Stats() Stats {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Now()
	s := Stats{Marked: len(k.book.Avoid(now)), Held: k.book.Held(now)}
	if k.actor != nil {
		s.Pending, s.Failures = k.actor.counts()
	}
	return s
}

// Ready reports why the file cannot be written now; nil: it can, or there is none.
func (k *Keeper) Ready() error {
	if k.file == nil {
		return nil
	}
	k.mu.Lock()
	err := k.failed
	k.mu.Unlock()
	if err != nil {
		return err
	}
	return k.file.probe()
}
