// Package marks keeps one nodehealth.Registry for a daemon: with its store, its clock, the handlers below /v1/nodes and
// an Actor that applies marks elsewhere, such as to a cluster. Follow adds the findings of a service about machines.
//
// Goroutines, until Close: one that keeps the records and the time, one that acts if there is an Actor, and one that
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
	"dlrover-run/rendezvous/lead"
)

// Config says how a Manager applies its marks.
type Config struct {
	Store  lead.Decisions // keeps the Registry, by the leader of Term; nil: it ends with the process
	Term   lead.Term
	Actor  Actor // nil: marks have no effect elsewhere
	DryRun bool  // log the calls of an Actor instead of making them
	// Action names the Actor's effect on a machine, for people, such as "taint".
	Action string
	Policy nodehealth.Config
	Log    *slog.Logger
	// Annotate adds a line to the timeline of a run, which may be over; nil adds none.
	Annotate func(run string, event job.Event, node, text string)
	// Devices returns the broken devices of a node that was to blame for a failure, before ctx ends; nil: they are not
	// known.
	Devices func(ctx context.Context, node string) []string
	// Settle is how long findings are collected before they are judged together, so that a mass of them is seen to be
	// one. Default: 1 s.
	Settle time.Duration
}

// Manager keeps a Registry. It is safe for use by several goroutines.
type Manager struct {
	cfg     Config
	kept    *records // nil without a Store
	actor   *actor
	queue   *queue
	service atomic.Pointer[service.Service] // nil before Follow
	ctx     context.Context                 // until Close
	stop    context.CancelFunc
	wg      sync.WaitGroup
	asking  atomic.Bool // somebody looks up the devices of a node

	mu       sync.Mutex
	registry *nodehealth.Registry
	waiting  []chan error // for the next write
	failed   error        // of the last write

	dirty, urgent chan struct{} // hold one when the store is older than the Registry; urgent: it is to be written now
}

// Open loads what is known of nodes, and keeps it from then on.
func Open(cfg Config) (*Manager, error) {
	if cfg.Settle == 0 {
		cfg.Settle = time.Second
	}
	mgr := &Manager{cfg: cfg, registry: nodehealth.New(cfg.Policy), dirty: make(chan struct{}, 1),
		urgent: make(chan struct{}, 1)}
	ctx, stop := context.WithCancel(context.Background())
	mgr.ctx, mgr.stop = ctx, stop
	if cfg.Store != nil {
		mgr.kept = &records{store: cfg.Store, term: cfg.Term}
		var err error
		if mgr.registry, err = mgr.kept.load(ctx, cfg.Policy); err != nil {
			stop()
			return nil, err
		}
	}
	if cfg.Actor != nil && !cfg.DryRun {
		mgr.actor = newActor(mgr)
	}
	mgr.expire(true) // the policy may allow marks less time than that of the daemon before
	if mgr.actor != nil {
		mgr.actor.begin(mgr.registry.Marks())
		mgr.wg.Go(func() { mgr.actor.work(ctx) })
	}
	mgr.queue = newQueue()
	mgr.wg.Go(func() { mgr.keep(ctx) })
	return mgr, nil
}

// Close writes all changes, and ends the Manager. Those that cannot be written are lost; the log names their machines.
func (mgr *Manager) Close() error {
	mgr.stop()
	mgr.wg.Wait()
	err := mgr.write()
	if err == nil {
		return nil
	}
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	if lost := mgr.kept.unkept(mgr.registry); len(lost) > 0 {
		mgr.cfg.Log.Warn("marks and findings of these nodes could not be written, and end with this process: the next one "+
			"knows what was written before", "nodes", lost[:min(len(lost), maxLost)], "count", len(lost), "err", err)
	}
	return err
}

// maxLost is how many machines the log names.
const maxLost = 64

// gather is the time for which changes are batched before they are written, unless a caller waits or a mark has
// changed. retry is the delay after a failed write.
const (
	gather = time.Second
	retry  = 10 * time.Second
)

// keep ticks, and writes changes.
func (mgr *Manager) keep(ctx context.Context) {
	var again <-chan time.Time
	for {
		wait, stop := mgr.tick()
		select {
		case <-ctx.Done():
		case <-wait:
			stop()
			continue
		case <-mgr.urgent:
		case <-again:
		case <-mgr.dirty:
			mgr.gather(ctx)
		}
		stop()
		if ctx.Err() != nil {
			return
		}
		again = nil
		if mgr.write() != nil { // the store has said why
			again = time.After(retry)
		}
	}
}

func (mgr *Manager) gather(ctx context.Context) {
	timer := time.NewTimer(gather)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-mgr.urgent:
	case <-timer.C:
	}
}

// longestTurn is how long a turn of keep waits at most where anything is kept: a clock that is set moves no timer.
const longestTurn = time.Hour

// tick lets marks expire. It runs even if none is due: after the clock was set back, the due times are far away, and
// only a Tick bounds them. It returns the timer of the next tick, and a function that stops it.
func (mgr *Manager) tick() (<-chan time.Time, func()) {
	mgr.expire(false)
	mgr.mu.Lock()
	next := mgr.registry.Next()
	mgr.mu.Unlock()
	if next.IsZero() {
		return nil, func() {}
	}
	timer := time.NewTimer(min(max(time.Until(next), 0), longestTurn))
	return timer.C, func() { timer.Stop() }
}

func (mgr *Manager) expire(touched bool) {
	mgr.change(func(now time.Time) []nodehealth.Act { return mgr.registry.Tick(now) }, touched)
}

// signal puts something into a channel that holds one.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// change changes the Registry, and carries out the acts that follow. touched means that there is a change even without
// acts.
func (mgr *Manager) change(f func(now time.Time) []nodehealth.Act, touched bool) {
	mgr.mu.Lock()
	acts := f(time.Now())
	for _, a := range acts {
		mgr.carryOut(a)
	}
	if mgr.actor != nil && slices.ContainsFunc(acts, func(a nodehealth.Act) bool { return a.Do != nodehealth.Hold }) {
		mgr.actor.avoid()
	}
	mgr.mu.Unlock()
	if len(acts) > 0 {
		signal(mgr.urgent)
	} else if touched {
		signal(mgr.dirty)
	}
	for _, a := range acts {
		mgr.tell(a)
	}
}

// carryOut has the actor do it. The lock is held, so that acts come in order.
func (mgr *Manager) carryOut(a nodehealth.Act) {
	switch {
	case a.Do == nodehealth.Hold:
	case mgr.cfg.DryRun:
		mgr.cfg.Log.Info("dry run: this would be done", "action", string(a.Do), "node", a.Mark.Node,
			"level", mgr.cfg.Action, "text", a.Text)
	case mgr.actor != nil:
		mgr.actor.enqueue(a)
	}
}

// events are the names of acts in the timeline.
var events = map[nodehealth.Do]job.Event{
	nodehealth.Apply:  job.EventNodeMarked,
	nodehealth.Remove: job.EventNodeUnmarked,
	nodehealth.Hold:   job.EventNodeMarkHeld,
}

// tell adds an act to the timeline of its run and of all runs in which the machine takes part.
func (mgr *Manager) tell(a nodehealth.Act) {
	event, node := events[a.Do], a.Mark.Node
	mgr.cfg.Log.Warn(string(event), "node", node, "run_id", a.Run, "kind", string(a.Mark.Kind), "text", a.Text)
	if mgr.cfg.Annotate == nil {
		return
	}
	mgr.mu.Lock()
	runs := mgr.registry.RunsOf(node)
	mgr.mu.Unlock()
	if a.Run != "" && !slices.Contains(runs, a.Run) {
		runs = append(runs, a.Run)
	}
	for _, run := range runs {
		mgr.cfg.Annotate(run, event, node, a.Text)
	}
}

// write brings the store up to date, and wakes the callers that wait for it.
func (mgr *Manager) write() error {
	mgr.mu.Lock()
	waiting := mgr.waiting
	mgr.waiting = nil
	write, err := func() error { return nil }, error(nil)
	if mgr.kept != nil {
		write, err = mgr.kept.take(mgr.registry)
	}
	mgr.mu.Unlock()
	if err == nil {
		err = write()
	}
	mgr.mu.Lock()
	mgr.failed = err
	mgr.mu.Unlock()
	for _, w := range waiting {
		w <- err
	}
	return err
}

// durable waits until all changes so far are in the store.
func (mgr *Manager) durable(ctx context.Context) error {
	done := make(chan error, 1)
	mgr.mu.Lock()
	mgr.waiting = append(mgr.waiting, done)
	mgr.mu.Unlock()
	signal(mgr.urgent)
	select {
	case err := <-done:
		return err
	case <-mgr.ctx.Done():
		return errors.New("the daemon ends")
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Find records and judges findings, as nodehealth.Registry does. So do Failed, Passed and Size.
func (mgr *Manager) Find(found ...nodehealth.Finding) {
	mgr.change(func(now time.Time) []nodehealth.Act { return mgr.registry.Find(now, found...) }, true)
}

// Failed records how an epoch of a run has ended.
func (mgr *Manager) Failed(run, culprit, text string) {
	mgr.change(func(now time.Time) []nodehealth.Act { return mgr.registry.Failed(now, run, culprit, text) }, true)
}

// Passed records the aspects of a machine that a check has found to be sound.
func (mgr *Manager) Passed(node string, covered ...string) {
	mgr.change(func(now time.Time) []nodehealth.Act { return mgr.registry.Passed(now, node, covered...) }, true)
}

// Size sets the machines that take part in a run now; none: it is over.
func (mgr *Manager) Size(run string, machines []string) {
	mgr.change(func(now time.Time) []nodehealth.Act { mgr.registry.Size(now, run, machines); return nil }, true)
}

// Mark marks a machine in the name of an operator. It returns once the mark is stored.
func (mgr *Manager) Mark(ctx context.Context, node, by, why string) (err error) {
	mgr.change(func(now time.Time) (acts []nodehealth.Act) {
		acts, err = mgr.registry.SetMark(now, node, by, why, time.Time{})
		return acts
	}, false)
	if err != nil {
		return err
	}
	return mgr.durable(ctx)
}

// Clear removes every mark of a machine, and forgets its findings, in the name of an operator. It returns once that is
// stored; known is false if there was nothing.
func (mgr *Manager) Clear(ctx context.Context, node, by, why string) (known bool, err error) {
	if err := nodehealth.CheckName(node); err != nil {
		return false, err
	}
	mgr.change(func(now time.Time) (acts []nodehealth.Act) {
		acts, known = mgr.registry.Clear(now, node, by, why)
		return acts
	}, true)
	return known, mgr.durable(ctx)
}

// List is the record of all machines, and the Actor's progress.
func (mgr *Manager) List() Known {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	now := time.Now()
	known := Known{Nodes: []machineRecord{}, Avoid: mgr.registry.Avoid(now), Action: mgr.cfg.Action,
		DryRun: mgr.cfg.DryRun}
	for _, n := range mgr.registry.List(now) {
		known.Nodes = append(known.Nodes, machineRecord{Node: n, Record: mgr.record(n)})
	}
	if mgr.failed != nil {
		known.Troubles = []string{"the newest changes are not kept yet, and end with this daemon: " + mgr.failed.Error()}
	}
	if mgr.actor == nil {
		return known
	}
	busy, troubles := mgr.actor.busy()
	known.Troubles = append(known.Troubles, troubles...)
	for _, name := range busy { // such as a mark that could not be removed yet
		if !slices.ContainsFunc(known.Nodes, func(m machineRecord) bool { return m.Name == name }) {
			known.Nodes = append(known.Nodes, machineRecord{nodehealth.Node{Name: name}, mgr.actor.record(name)})
		}
	}
	slices.SortFunc(known.Nodes, func(a, b machineRecord) int { return strings.Compare(a.Name, b.Name) })
	return known
}

func (mgr *Manager) record(n nodehealth.Node) *ActionRecord {
	switch {
	case mgr.actor != nil:
		return mgr.actor.record(n.Name)
	case mgr.cfg.DryRun && n.Mark != nil:
		return &ActionRecord{Do: nodehealth.Apply, State: DryRun}
	}
	return nil
}

// Known is the answer to GET /v1/nodes.
type Known struct {
	Nodes []machineRecord `json:"nodes"`
	// Avoid are the machines where no replacement should be placed.
	Avoid []string `json:"avoid"`
	// Action names the effect on a marked machine, "" for none. DryRun means that it is only logged.
	Action   string   `json:"action,omitempty"`
	DryRun   bool     `json:"dry_run,omitempty"`
	Troubles []string `json:"troubles,omitempty"` // pending failures about no machine in particular
}

// machineRecord is the record of one machine, and the Actor's progress.
type machineRecord struct {
	nodehealth.Node
	Record *ActionRecord `json:"action,omitempty"`
}

// Avoid are the machines where no replacement should be placed, by name.
func (mgr *Manager) Avoid() []string {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	return mgr.registry.Avoid(time.Now())
}

// marked reports whether a machine has a mark.
func (mgr *Manager) marked(machine string) bool {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	return mgr.registry.Marked(time.Now(), machine)
}

// Suspect reports whether a spare is preferred to a machine: it is marked, or the culprit of many failures.
func (mgr *Manager) Suspect(machine string) bool {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	return mgr.registry.Suspect(machine) || mgr.registry.Marked(time.Now(), machine)
}

// Stats are counts of a Manager's records.
type Stats struct {
	Marked   int // machines with a mark
	Held     int // machines with a mark that the breaker has held back
	Pending  int // machines with pending tasks
	Failures int // calls of the Actor that have failed, since the start
}

// Stats counts.
func (mgr *Manager) Stats() Stats {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	now := time.Now()
	s := Stats{Marked: len(mgr.registry.Avoid(now)), Held: mgr.registry.Held(now)}
	if mgr.actor != nil {
		s.Pending, s.Failures = mgr.actor.counts()
	}
	return s
}

// Ready reports why the newest write has failed.
func (mgr *Manager) Ready() error {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	return mgr.failed
}
