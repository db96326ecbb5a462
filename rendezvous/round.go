// Package rendezvous decides which launchers of a run form a world, with which ranks, and the next duty of each of
// them.
//
// Round is a pure state machine: it never reads a clock, never blocks and starts no goroutine. The shell around it
// (rendezvous/api) feeds it events with their times, carries out the actions it returns, and calls Step with a Tick at
// the time of Next. Besides the standard library, the package imports internal/duration, internal/job,
// internal/stable, internal/text and rendezvous/ledger.
package rendezvous

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous/ledger"
)

// Config holds a Round's settings and callbacks.
type Config struct {
	// Term is the first term, larger than that of any earlier daemon (such as its
	// start in nanoseconds). Sequence numbers and later terms count up from it.
	Term uint64
	// Topology maps a node's IP to its access switch; nil leaves ranks in their own order.
	Topology Topology
	// Suspicious returns in one line, or "", why the end of an epoch may have a cause that checks of nodes find: then all
	// nodes are checked before the next world. It must be pure. Nil suspects nothing.
	Suspicious func(job.Evidence) string
	// Suspect reports that spares are preferred to a machine, when there are more nodes than a world takes. The machine is
	// given by the node's name if it is unknown. Between two events its answers must stay the same. Nil suspects none.
	Suspect func(machine string) bool
	// Run is the run's name, for launchers that are started after it has succeeded: they get its result and no workers. ""
	// lets them open the run anew.
	Run string
	// Kept is the state that earlier daemons have kept of the run; nil: none. The Round refers to it.
	Kept *Kept
	// Server is the launcher that serves this Round; nil: a daemon that belongs to no run.
	Server *Server
}

// Errors of Step that a launcher can act upon.
var (
	// ErrUnknownNode: the ID is not part of the run; the launcher has to join (again).
	ErrUnknownNode = errors.New("rendezvous: unknown node")
	// ErrFinishing: the run is over and its last nodes are still leaving; try again shortly.
	ErrFinishing = errors.New("rendezvous: the run is finishing")
	// ErrReturning: the run is one of an earlier daemon, and its own nodes may come back; try again shortly.
	ErrReturning = errors.New("rendezvous: the run's own nodes may come back")
	// ErrTaken: another node holds the wished rank of the static rendezvous; it may
	// be dead, which shows within silentGrace, so try again for a while.
	ErrTaken = errors.New("the node rank is taken")
	// ErrRefused wraps every reason why a Join can never succeed.
	ErrRefused = errors.New("the rendezvous refuses this node")
)

// Errors of Step with an Order.
var (
	// ErrNotRunning: no world is sealed, so nothing can be started anew.
	ErrNotRunning = errors.New("rendezvous: no workers run")
	// ErrNotPaused: there is no pause to end.
	ErrNotPaused = errors.New("rendezvous: the run is not paused")
	// ErrFinished: the run has ended; nothing can be ordered any more.
	ErrFinished = errors.New("rendezvous: the run has ended")
	// ErrBadOrder wraps an error in an order itself.
	ErrBadOrder = errors.New("rendezvous: bad order")
)

// Round is the state of one run. It leads its parts: each owns a state, and none knows the Round. A part uses only
// parts that stand below it.
//
//	Join, Failing, Order, ... -->  Round  --> directives, notes, nodes to check
//
//	costs      the time of the run, and the costs of its stops
//	memory     the world of an earlier daemon, being rebuilt
//	sealer     when a world forms, of which nodes and with which ranks
//	gate       holds a world back until the checks of its nodes have passed
//	checks     which nodes are checked, and the results
//	shortage   why there are too few nodes
//	admission  which launchers may join
//	liveness   which nodes have gone without a word
//	outbox     the actions of a step; every directive carries the state below
//	account    the budget of restarts, and the price of the newest epoch's end
//	orders     bars, pause, hold and command
//	epoch      the newest world, the phase, and the evidence about its end
//	members    the nodes that are here, by state
//
// The epoch goes through the phases:
//
//	           nodes went away
//	       +---------------------+
//	       v                     |
//	+-> forming -------------> gating ------+
//	|    |  |   enough nodes,               | checks answered
//	|    |  |   some unchecked              v
//	|    |  +--------------------------> releasing ------> running ------> finished
//	|    |         sealed                   |   rank 0       |  all succeeded, ^
//	|    |                                  |   is ready     |  no restart left|
//	|    +----------------------------------|----------------|-----------------+
//	|         no world in time              |                |
//	+---------------------------------------+----------------+
//	          failure, loss, growth, order
type Round struct {
	cfg       *Config
	params    *Params // those of the node that has opened the run; all parts share them
	members   *members
	epoch     *epoch
	orders    *orders
	account   *account
	out       *outbox
	liveness  *liveness
	admission *admission
	shortage  *shortage
	checks    *checks
	gate      *gate
	sealer    *sealer
	memory    *memory
	costs     *costs

	ended []NodeStatus // the nodes at the end of the run
}

// New returns the Round of a run that no node has joined, unless in the time of an earlier daemon.
func New(cfg Config) *Round {
	past := cfg.Kept
	if cfg.Kept = nil; past != nil && cfg.Term <= past.Term { // the clock was set back
		cfg.Term = termAfter(past.Term, cfg.Term)
	}
	r := &Round{
		cfg: &cfg, params: &Params{}, members: newMembers(), orders: &orders{bars: map[string]*job.Cause{}},
		epoch: &epoch{phase: forming, id: job.EpochID{Term: cfg.Term}, term: cfg.Term},
	}
	r.account = &account{params: r.params}
	r.out = &outbox{params: r.params, members: r.members, epoch: r.epoch, orders: r.orders, account: r.account,
		seq: cfg.Term}
	r.liveness = &liveness{params: r.params, members: r.members, epoch: r.epoch, out: r.out}
	r.shortage = &shortage{params: r.params, members: r.members, epoch: r.epoch, orders: r.orders, out: r.out,
		refused: map[string]bool{}, gone: map[string]*job.Cause{}}
	r.checks = &checks{cfg: r.cfg, params: r.params, members: r.members, epoch: r.epoch, orders: r.orders,
		shortage: r.shortage, out: r.out, wary: map[string]bool{}}
	r.gate = &gate{params: r.params, members: r.members, epoch: r.epoch, orders: r.orders, shortage: r.shortage,
		checks: r.checks, out: r.out}
	r.sealer = &sealer{cfg: r.cfg, params: r.params, members: r.members, epoch: r.epoch, account: r.account,
		orders: r.orders, shortage: r.shortage, checks: r.checks, gate: r.gate, out: r.out}
	r.admission = &admission{cfg: r.cfg, params: r.params, members: r.members, epoch: r.epoch, orders: r.orders}
	r.memory = &memory{cfg: r.cfg, params: r.params, members: r.members, epoch: r.epoch, account: r.account,
		orders: r.orders, checks: r.checks, gate: r.gate, out: r.out, book: new(ledger.Ledger)}
	r.costs = newCosts(r)
	if cfg.Server != nil {
		r.orders.brought(cfg.Server.Bars)
	}
	if past != nil {
		r.admission.works, r.admission.over = past.Works, past.Over
		r.memory.recall(past)
		if past.End != nil {
			r.ended = past.End.Nodes
		}
	}
	return r
}

// Step applies one event and returns the actions that follow. An error refuses the event and leaves the state unchanged
// but for the passing of time; nodes that wait hear of a Join that was refused.
func (r *Round) Step(now time.Time, ev Event) ([]Action, error) {
	r.out.acts = nil
	r.costs.hear(now, ev)
	err := r.apply(now, ev)
	away, doubt := r.liveness.due(now)
	for _, n := range away {
		if why := r.liveness.expired(now, n, doubt); why != "" {
			r.depart(now, n, job.CauseLoss, why, true)
		}
	}
	r.settle(now)
	r.costs.pass(now)
	r.checks.tell(now)
	return r.out.acts, err
}

func (r *Round) apply(now time.Time, ev Event) error {
	switch e := ev.(type) {
	case Join:
		return r.join(now, e)
	case Leaving:
		return r.beginLeave(now, e)
	case Leave:
		return r.leave(now, e)
	case Attach:
		back, err := r.liveness.attach(e.ID)
		if back {
			r.account.cameBack()
		}
		return err
	case Detach, Refused, Silence, Unreachable, HungUp:
		if n, why := r.liveness.apply(now, ev); n != nil {
			r.depart(now, n, job.CauseLoss, why, true)
		}
		return nil
	case Ready:
		return r.ready(now, e)
	case Failing:
		return r.failing(now, e)
	case Success:
		return r.success(now, e)
	case Stepped:
		_, err := r.members.find(e.ID)
		if err == nil && e.EpochID == r.epoch.id {
			r.account.stepped(e.Progress)
		}
		return err
	case Cleared:
		return r.checks.passed(now, e)
	case Barred:
		return r.gate.failed(now, e)
	case Doubt:
		return r.checks.doubt(now, e)
	case Order:
		return r.order(now, e)
	case Rewire:
		r.cfg.Topology = e.Topology
		r.out.note(job.EventTopology, "", fmt.Sprintf("%d nodes; it counts from the next seal", len(e.Topology)))
		return nil
	case OtherRun:
		r.shortage.tellOtherRun(e)
		return nil
	case Slowed, Tick:
		return nil
	}
	return fmt.Errorf("rendezvous: unknown event %T", ev)
}

func (r *Round) ready(now time.Time, e Ready) error {
	if _, err := r.members.find(e.ID); err != nil {
		return err
	}
	if r.epoch.phase != releasing || e.EpochID != r.epoch.id || r.epoch.world[0].ID != e.ID {
		return nil // the world broke meanwhile; the leader gets a newer directive
	}
	r.epoch.run(r.orders.hold != nil)
	r.account.ran(now, r.epoch.held)
	addr := overviewOf(r.epoch.world).reach(r.epoch.world[0], e.Addr)
	failover := r.sealer.failover()
	r.epoch.votes, r.epoch.plan = failover != nil, failover
	for i, p := range r.epoch.places(r.account.restarts) { // nothing has changed since the seal
		p.MasterAddr, p.MasterPort = addr, e.Port
		r.out.direct(r.epoch.world[i], Directive{Kind: job.Run, Place: &p, Cause: r.epoch.cause, Failover: failover})
	}
	r.epoch.cause = nil
	r.out.tellSpares()
	r.out.note(job.EventRun, "", fmt.Sprintf("store at %s:%d", addr, e.Port))
	return nil
}

func (r *Round) success(now time.Time, e Success) error {
	n, err := r.members.find(e.ID)
	if err != nil {
		return err
	}
	if e.EpochID != r.epoch.id || n.state != member || r.epoch.phase != running && r.memory.rebuild == nil {
		return nil
	}
	r.epoch.results.succeeded(n, e, r.params.Budget.Tolerate)
	if len(e.Ranks) == 0 {
		r.epoch.complete(n, r.members, r.out)
	}
	r.checkDone(now)
	return nil
}

// settle makes the time-dependent decisions of the present phase.
func (r *Round) settle(now time.Time) {
	at, c := r.memory.limit()
	if r.epoch.phase != finished && len(r.members.nodes) > 0 && !at.IsZero() && !now.Before(at) {
		r.finish(now, job.Failed, c)
	}
	switch r.epoch.phase {
	case forming, gating:
		if len(r.members.nodes) == 0 {
			if r.memory.abandoned(now) {
				r.reset() // the next node starts afresh
			}
			return
		}
		if r.memory.rebuild != nil {
			r.resumed(now)
		}
		if r.memory.rebuild != nil || !r.epoch.collecting() {
			return
		}
		if !r.account.failPendingAt.IsZero() {
			r.judge(now)
		}
		if r.epoch.phase == finished || !r.account.failPendingAt.IsZero() {
			return
		}
		if c := r.gate.fate(now); c != nil {
			r.finish(now, job.Failed, c)
		} else if c := r.sealer.form(now, r.memory.holding(now)); c != nil {
			r.finish(now, job.Failed, c)
		}
	case running:
		if c := r.sealer.grow(now); c != nil {
			r.breakWorld(now, *c)
		}
	case finished:
		if len(r.members.nodes) == 0 {
			r.epoch.archive(r.out.evidence())
			clear(r.members.wishes)
		}
	}
}

// limit is the account's. What is kept of a run has no limit before one of its nodes is back: it may be another job.
func (m *memory) limit() (time.Time, *job.Cause) {
	if m.kept != nil && !m.back {
		return time.Time{}, nil
	}
	return m.account.limit(m.orders.paused, m.epoch.starting())
}

func (r *Round) finish(now time.Time, o job.Outcome, c *job.Cause) {
	r.ended = r.members.lastStatuses(r.cfg.Topology, r.orders.bars, o)
	r.epoch.finish(now, o, c)
	r.memory.rebuild, r.memory.kept = nil, nil
	r.orders.finish()
	for _, n := range r.members.sorted(everyNode) {
		r.out.direct(n, r.epoch.verdict())
	}
	texts := []string{LedgerOf(r, now).String()}
	if c != nil {
		texts = []string{c.Text, texts[0]}
	}
	r.out.note(job.Event(o), "", strings.TrimSuffix(strings.Join(texts, "; "), "; "))
	r.out.ended()
}

// Remark is a note about the present state of the run, from code outside of the Round.
func (r *Round) Remark(event job.Event, nodeName, text string) Note {
	return r.out.remark(event, nodeName, text)
}

// resumed goes on with the world of an earlier daemon when it is rebuilt, and handles the events that had to wait for
// that.
func (r *Round) resumed(now time.Time) {
	w := r.memory.rebuilt(now)
	if w == nil {
		return
	}
	r.shortage.over()
	if w.missing > 0 {
		w.names = cmp.Or(listed(r.epoch.forsake(w, r.cfg.Server)), w.names)
		r.epoch.elastic = true
		r.epoch.kept.losses = append(w.broken.Losses, r.epoch.kept.losses...)
		r.breakWorld(now, w.cause())
	}
	for _, e := range w.failing {
		if !w.followed {
			_ = r.failing(now, e) // the node is here, or its loss has been booked
		}
	}
	if w.restart != nil && r.epoch.phase == running {
		r.breakCharged(now, *w.restart.cause(), w.restart.cost())
	}
	r.enforce(now)
	if len(w.stopped) > 0 && r.epoch.phase == running {
		r.breakWorld(now, restartedAcross())
	}
	for _, n := range w.stopped {
		if n.state == pending { // and not gone meanwhile
			r.checks.queue(now, n)
		}
	}
	if r.epoch.phase == running {
		r.checks.askAll(now)
	}
	r.checkDone(now)
}
