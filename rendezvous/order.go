package rendezvous

import (
	"fmt"
	"slices"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
)

// Bounds of the state that orders leave behind.
const (
	maxBars      = 4096 // names
	maxOrderText = 1024 // bytes
)

// orderCauses are the causes that an order may give.
var orderCauses = []job.CauseKind{job.CauseHang, job.CauseCheck, job.CauseOperator, job.CauseDeadline, job.CauseNoStep}

// cause is the cause in o, CauseOperator unless it names another.
func (o Order) cause() *job.Cause {
	c := &job.Cause{Kind: o.Cause, Node: o.Node, Text: o.Text}
	if c.Kind == "" {
		c.Kind = job.CauseOperator
	}
	if c.Text == "" {
		c.Text = fmt.Sprintf("%s ordered (%s)", o.Kind, c.Kind)
	}
	return c
}

// validate reports an invalid o, independently of a run's state.
func (o Order) validate() error {
	kinds := []OrderKind{OrderRestart, OrderStop, OrderBar, OrderUnbar, OrderPause, OrderResume,
		OrderDrain}
	switch {
	case !slices.Contains(kinds, o.Kind):
		return fmt.Errorf("%w: kind %.100q; need one of %q", ErrBadOrder, o.Kind, kinds)
	case o.Cause != "" && !slices.Contains(orderCauses, o.Cause):
		return fmt.Errorf("%w: cause %.100q; need one of %q", ErrBadOrder, o.Cause, orderCauses)
	case len(o.Text) > maxOrderText || !text.Printable(o.Text):
		return fmt.Errorf("%w: text %.100q: %s, at most %d bytes", ErrBadOrder, o.Text, text.PrintableRule, maxOrderText)
	case len(o.Node) > MaxName || !text.Printable(o.Node):
		return fmt.Errorf("%w: node %.100q: %s, at most %d bytes", ErrBadOrder, o.Node, text.PrintableRule, MaxName)
	case o.Of != (job.EpochID{}) && o.Kind != OrderRestart && o.Kind != OrderStop:
		return fmt.Errorf("%w: only %s and %s can be of one epoch, not %s", ErrBadOrder, OrderRestart, OrderStop, o.Kind)
	case o.Command != nil && !slices.Contains([]OrderKind{OrderRestart, OrderPause, OrderResume}, o.Kind):
		return fmt.Errorf("%w: %s takes no command", ErrBadOrder, o.Kind)
	case o.Command.Validate() != nil:
		return fmt.Errorf("%w: %w", ErrBadOrder, o.Command.Validate())
	case o.Node == "" && (o.Kind == OrderBar || o.Kind == OrderUnbar || o.Kind == OrderDrain):
		return fmt.Errorf("%w: %s which node? Give its name", ErrBadOrder, o.Kind)
	}
	return nil
}

// refusal is why o cannot be carried out now.
func (r *Round) refusal(o Order) error {
	switch {
	case r.epoch.phase == finished:
		return ErrFinished
	case o.Kind == OrderRestart && r.epoch.collecting() && r.resume == nil:
		return ErrNotRunning
	case o.Of != (job.EpochID{}) && (o.Of != r.epoch.id || r.epoch.collecting() && r.resume == nil):
		return fmt.Errorf("%w any more in that epoch", ErrNotRunning)
	case o.Kind == OrderResume && r.orders.paused == nil && r.orders.hold == nil:
		return ErrNotPaused
	case o.Kind == OrderDrain && len(r.Named(o.Node)) == 0:
		return fmt.Errorf("%w: no node named %q is here", ErrUnknownNode, o.Node)
	case (o.Kind == OrderBar || o.Kind == OrderDrain) && !r.orders.roomForBar(o.Node):
		return fmt.Errorf("%w: %d names are barred already; unbar some", ErrBadOrder, maxBars)
	case o.Kind == OrderUnbar && r.orders.bars[o.Node] == nil && len(r.members.barredAs(o.Node)) == 0:
		return fmt.Errorf("%w: no node named %q is barred", ErrUnknownNode, o.Node)
	}
	return r.members.commandRefusal(o.Command)
}

func (r *Round) order(now time.Time, o Order) error {
	if err := o.validate(); err != nil {
		return err
	}
	if err := r.refusal(o); err != nil {
		return err
	}
	c := o.cause()
	r.out.note(job.EventOrder, o.Node, fmt.Sprintf("%s: %s", o.Kind, c.Text))
	switch o.Kind {
	case OrderRestart:
		r.orders.setCommand(o.Command, r.out)
		r.restart(now, o)
	case OrderStop:
		r.finish(now, job.Failed, c)
	case OrderBar:
		r.barName(now, o.Node, c)
	case OrderUnbar:
		r.checks.unbarName(now, o.Node)
	case OrderPause:
		r.orders.setCommand(o.Command, r.out)
		r.orders.commandAhead(r.out)
		r.pause(now, c)
	case OrderResume:
		r.resumeRun(now, o)
	case OrderDrain:
		r.drain(now, o.Node, c)
	}
	return nil
}

// restart has the sealed world stopped and sealed again, or one that is being rebuilt as soon as it is complete.
func (r *Round) restart(now time.Time, o Order) {
	if r.resume != nil {
		r.resume.restart = &o
	} else {
		c := *o.cause()
		r.breakCharged(now, c, cost{charge: o.Charge, count: o.Charge, node: o.Node, rank: -1})
	}
}

// barName keeps every node of the name without workers, those to come, too. The world goes on without it.
func (r *Round) barName(now time.Time, name string, c *job.Cause) {
	r.checks.barName(name, c)
	r.enforce(now)
}

// enforce breaks a sealed world in which someone is barred, or that is paused.
func (r *Round) enforce(now time.Time) {
	if r.epoch.collecting() {
		return
	}
	i := slices.IndexFunc(r.epoch.world, func(n *node) bool { return r.orders.bars[n.Name] != nil && n.state == member })
	if i >= 0 {
		r.breakWorld(now, *r.orders.bars[r.epoch.world[i].Name])
		r.epoch.elastic = true
	}
	if r.orders.paused != nil {
		r.breakWorld(now, *r.orders.paused)
	}
	r.startHeld(now)
}

// pause makes a pause that nodes have brought from an earlier daemon one of this daemon: it ends with an order only.
func (r *Round) pause(now time.Time, c *job.Cause) {
	r.orders.pausedIn = nil
	if r.orders.paused != nil {
		return
	}
	r.orders.paused = c
	r.sealer.restart()
	r.account.pauseBegins(now)
	r.gate.leave(now)
	r.out.repeat(everyNode)
	r.enforce(now)
	r.checks.requeue(now)
}

func (r *Round) unpause(now time.Time) {
	r.orders.paused, r.orders.pausedIn, r.orders.unpaused, r.epoch.formingAt = nil, nil, true, now
	r.account.pauseEnds(now)
	r.out.repeat(everyNode)
	r.checks.requeue(now)
}

// restore takes over the orders that an earlier daemon had sent to the joining node, unless this history is newer: it
// has orders of its own, or a newer world than the pause.
func (r *Round) restore(now time.Time, n *node, e Join) {
	r.orders.restoreCommand(e)
	if e.Paused != nil {
		r.restorePause(now, n, e)
	}
	if e.Barred == nil {
		return
	}
	bar := bounded(*e.Barred)
	if bar.Kind == job.CauseCheck {
		if r.checks.mustCheck(now, n) {
			n.bar = bar
		}
		return
	}
	if _, known := r.orders.bars[n.Name]; !known && r.orders.roomForBar(n.Name) {
		r.barName(now, n.Name, bar)
	}
}

// bounded is c without values that no daemon has ever sent, but a node may send all the same.
func bounded(c job.Cause) *job.Cause {
	kind := job.CauseKind(text.Clip(string(c.Kind), MaxName))
	return &job.Cause{Kind: kind, Node: text.Clip(c.Node, MaxName), Text: text.Clip(c.Text, maxOrderText)}
}

func (r *Round) restorePause(now time.Time, n *node, e Join) {
	switch {
	case r.orders.pausedIn != nil && e.Seen.Newer(*r.orders.pausedIn):
		r.orders.pausedIn = &e.Seen
	case r.orders.paused != nil || r.orders.unpaused || !r.epoch.collecting():
	case r.epoch.fresh() || r.resume != nil && !r.epoch.id.Newer(e.Seen):
		r.out.note(job.EventOrder, n.Name, "pause: it was ordered before the rendezvous daemon was started again")
		r.pause(now, bounded(*e.Paused))
		r.orders.pausedIn = &e.Seen
	}
}

// expirePause ends a pause that a node has brought when a member of a newer world comes: the pause had ended before.
func (r *Round) expirePause(now time.Time, e job.EpochID) {
	if r.orders.pausedIn != nil && e.Newer(*r.orders.pausedIn) {
		r.orders.paused, r.orders.pausedIn = nil, nil
		r.account.pauseEnds(now)
		r.checks.requeue(now)
	}
}

// resumeRun ends a pause, a hold, or both.
func (r *Round) resumeRun(now time.Time, o Order) {
	if r.orders.hold != nil {
		r.orders.commandAhead(r.out)
	}
	r.orders.setCommand(o.Command, r.out)
	r.orders.hold, r.orders.unheld = nil, true
	if r.orders.paused != nil {
		r.unpause(now)
	} else if !r.epoch.collecting() && r.epoch.held {
		r.breakWorld(now, *o.cause())
	} else {
		r.out.repeat(everyNode)
	}
}

// startHeld ends a world that runs without workers although the run is not held any more.
func (r *Round) startHeld(now time.Time) {
	if r.epoch.held && r.orders.hold == nil && !r.epoch.collecting() {
		r.breakWorld(now, job.Cause{Kind: job.CauseOperator, Text: "the hold has ended"})
	}
}
