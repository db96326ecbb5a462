package rendezvous

import (
	"cmp"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous/ledger"
)

// costs books the time of the run. It derives the class from the state of the other parts, which do not know it.
type costs struct {
	params  *Params
	members *members
	epoch   *epoch
	orders  *orders
	account *account
	memory  *memory
	out     *outbox
	book    *ledger.Ledger
}

func newCosts(r *Round) *costs {
	return &costs{params: r.params, members: r.members, epoch: r.epoch, orders: r.orders, account: r.account,
		memory: r.memory, out: r.out, book: r.memory.book}
}

// LedgerOf is the account of r's time until now.
func LedgerOf(r *Round, now time.Time) ledger.Report { return r.costs.book.Until(now) }

// hear books a report about the workers of the newest world, of a member or of the judge of slow ranks.
func (c *costs) hear(now time.Time, ev Event) {
	var id string
	var of job.EpochID
	var p job.Progress
	switch e := ev.(type) {
	case Failing:
		id, of, p = e.ID, e.EpochID, e.Progress
	case Join:
		id, of, p = e.Node.ID, e.Stopped, e.Progress
	case Stepped:
		id, of, p = e.ID, e.EpochID, e.Progress
	case Slowed:
		if e.EpochID == c.book.Epoch.ID {
			c.book.Slow(now, e.Fewer)
		}
		return
	}
	if of.Round == 0 || of != c.book.Epoch.ID || c.members.nodes[id] == nil {
		return
	}
	if e, runs := ev.(Stepped); runs {
		if e.Trains() {
			c.book.Stepped(now, p.Ran)
		}
		p.Idle = 0 // another step may follow
	}
	if p != (job.Progress{}) {
		c.book.Heard(now, p)
	}
}

// pass books the state in which the run is since now.
func (c *costs) pass(now time.Time) {
	if c.epoch.phase != finished && len(c.members.nodes) == 0 {
		return // none is back
	}
	if !c.recalls() && !c.epoch.fresh() {
		c.follow(now)
	}
	open := !c.book.Bill.Closed
	c.book.Pass(now, c.class(now))
	if open && c.book.Bill.Closed {
		c.note(c.book.Bill)
	}
}

// follow books that a world was sealed, or has ended.
func (c *costs) follow(now time.Time) {
	e, booked := c.epoch, &c.book.Epoch
	sealed := e.id != booked.ID && e.phase != finished
	ended := !booked.Broken && booked.ID.Round > 0 && (sealed || e.collecting())
	cause := *cmp.Or(e.cause, new(restartedAcross()))
	switch {
	case ended:
		if b := c.book.Broke(now, cause); !b.Closed {
			c.note(b) // no step was made since
		}
	case booked.Broken && e.cause != nil:
		c.book.Blame(cause)
	}
	if sealed {
		c.book.Sealed(now, e.id, e.workers)
	}
}

// note tells the cost of a stop.
func (c *costs) note(b ledger.Bill) {
	if b.Cause != ledger.Start && b.Times.Sum() >= time.Millisecond {
		c.out.note(job.EventCost, b.Node, b.String())
	}
}

// recalls: the nodes of an earlier daemon's world are awaited, in the state in which it has left them.
func (c *costs) recalls() bool { return c.memory.rebuild != nil || c.memory.kept != nil }

func (c *costs) class(now time.Time) ledger.Class {
	e := c.epoch
	switch {
	case e.phase == finished:
		return ""
	case c.recalls() && c.book.Class != "":
		return c.book.Class
	case c.memory.rebuild != nil:
		return ledger.Training
	case c.orders.paused != nil || e.phase == running && e.held:
		return ledger.Paused
	case e.phase == running && (c.book.Epoch.Ran || c.account.newest.progress.Step > 0 || !c.book.Stepping):
		return ledger.Training
	case e.phase == running || e.phase == releasing:
		return ledger.Starting
	case e.phase == gating:
		return ledger.Checking
	case c.members.stopping > 0 || !c.account.failPendingAt.IsZero():
		return ledger.Stopping
	case now.Before(c.account.backoffAt) && !e.elastic && c.params.fit(c.members.possible()) >= c.params.Min:
		return ledger.BackingOff
	}
	return ledger.Waiting
}
