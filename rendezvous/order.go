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
var orderCauses = []job.CauseKind{job.CauseHang, job.CauseCheck, job.CauseOperator, job.CauseDeadline, job.CauseNoStep,
	job.CauseSlow}

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

// cost is the price of an end of an epoch by o.
func (o Order) cost() cost {
	return cost{charge: o.Charge, count: o.Charge, node: o.Node, rank: -1}
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
	case o.Of != (job.EpochID{}) && o.Kind != OrderRestart && o.Kind != OrderStop && o.Kind != OrderDrain:
		return fmt.Errorf("%w: only %s, %s and %s can be of one epoch, not %s", ErrBadOrder, OrderRestart, OrderStop,
			OrderDrain, o.Kind)
	case o.Command != nil && !slices.Contains([]OrderKind{OrderRestart, OrderPause, OrderResume}, o.Kind):
		return fmt.Errorf("%w: %s takes no command", ErrBadOrder, o.Kind)
	case o.Command.Validate() != nil:
		return fmt.Errorf("%w: %w", ErrBadOrder, o.Command.Validate())
	case o.Node == "" && (o.Kind == OrderBar || o.Kind == OrderUnbar || o.Kind == OrderDrain):
		return fmt.Errorf("%w: %s which node? Give its name", ErrBadOrder, o.Kind)
	}
	return nil
}

func (r *Round) order(now time.Time, o Order) error {
	if err := o.validate(); err != nil {
		return err
	}
	if err := r.orders.refusal(o, r.epoch, r.members, r.memory.rebuild != nil); err != nil {
		return err
	}
	if err := o.shortage(r.members, r.params); err != nil {
		return err
	}
	c := o.cause()
	r.out.note(job.EventOrder, o.Node, fmt.Sprintf("%s: %s", o.Kind, c.Text))
	switch o.Kind {
	case OrderRestart:
		r.orders.setCommand(o.Command, r.out)
		o.Of, o.Command = r.epoch.id, nil
		r.orders.restart = &o
		if r.memory.rebuild != nil {
			r.memory.rebuild.restart = &o // as soon as it is complete
		} else {
			r.breakCharged(now, *c, o.cost())
		}
	case OrderStop:
		r.finish(now, job.Failed, c)
	case OrderBar:
		r.checks.barName(o.Node, c)
		r.enforce(now)
	case OrderUnbar:
		r.checks.unbarName(now, o.Node)
	case OrderPause:
		r.orders.setCommand(o.Command, r.out)
		r.orders.commandAhead(r.out)
		r.pause(now, c, nil)
	case OrderResume:
		r.resumeRun(now, o)
	case OrderDrain:
		r.drain(now, o.Node, c)
	}
	return nil
}

// enforce breaks a sealed world in which someone is barred, that is paused, or that is held although the run is not any
// more.
func (r *Round) enforce(now time.Time) {
	if r.epoch.collecting() || r.epoch.phase == finished {
		return
	}
	i := slices.IndexFunc(r.epoch.world, func(n *node) bool { return r.orders.bars[n.Name] != nil && n.state == member })
	if i >= 0 {
		r.breakWorld(now, *r.orders.bars[r.epoch.world[i].Name])
	}
	if r.orders.paused != nil {
		r.breakWorld(now, *r.orders.paused)
	}
	if r.epoch.held && r.orders.hold == nil && !r.epoch.collecting() {
		r.breakWorld(now, job.Cause{Kind: job.CauseOperator, Text: "the hold has ended"})
	}
}

// pause stops the workers, and holds the seal. In is as in orders.pause.
func (r *Round) pause(now time.Time, c *job.Cause, in *job.EpochID) {
	if !r.orders.pause(c, in) {
		return
	}
	r.sealer.cancel()
	r.account.pauseBegins(now)
	r.gate.leave(now)
	r.out.repeat(everyNode)
	r.enforce(now)
	r.checks.requeue(now)
}

// resumeRun ends a pause, a hold, or both.
func (r *Round) resumeRun(now time.Time, o Order) {
	if r.orders.hold != nil {
		r.orders.commandAhead(r.out)
	}
	r.orders.setCommand(o.Command, r.out)
	in := r.epoch.ordered()
	r.orders.release(in)
	if r.orders.paused != nil {
		r.orders.unpause(in)
		r.epoch.formingAt = now
		r.account.pauseEnds(now)
		r.out.repeat(everyNode)
		r.checks.requeue(now)
	} else if !r.epoch.collecting() && r.epoch.held {
		r.breakWorld(now, *o.cause())
	} else {
		r.out.repeat(everyNode)
	}
}
