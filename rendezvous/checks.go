package rendezvous

import (
	"cmp"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
)

// checks asks nodes for their checks, and keeps the results.
//
// A check that has passed gives the node a pass: the node needs no other check until the pass runs out. The pass's
// clock stands still from the seal of a world until all of its workers have been stopped. So a restart of the same
// world never leads to a check. An event that the check cannot have covered makes the pass void. For one node that is a
// Doubt; for all nodes, an end of an epoch that Config.Suspicious finds suspicious.
//
// A node without a partner has passed alone: its pass runs out at once. It waits like a cleared node, and the next gate
// checks it again if there is a partner.
type checks struct {
	cfg      *Config
	params   *Params
	members  *members
	epoch    *epoch
	orders   *orders
	shortage *shortage
	out      *outbox

	wary map[string]bool // machines that have failed a check with others, and passed none since
}

// maxReason bounds the reason of a failed check, in bytes.
const maxReason = 1024

// maxAspect bounds the word for the failed part.
const maxAspect = 64

// mustCheck reports whether n needs a check before it may have workers.
func (c *checks) mustCheck(now time.Time, n *node) bool {
	valid := n.cleared && (n.until.IsZero() || now.Before(n.until))
	return c.params.Gate && n.can(CanGate) && !valid
}

// passed books a check that has passed.
func (c *checks) passed(now time.Time, e Cleared) error {
	n, err := c.members.find(e.ID)
	if err != nil {
		return err
	}
	n.asked = false
	c.grant(now, n, e)
	if !n.unpaired {
		delete(c.wary, n.machine())
	}
	if n.bar != nil {
		c.members.setBar(n, nil, false)
		c.out.note(job.EventCleared, n.Name, "its check has passed")
	}
	switch {
	case c.epoch.phase == finished:
		return nil
	case n.state == checking || n.state == barred && c.orders.bars[n.Name] == nil:
		c.members.become(n, waiting)
	case n.optional:
		n.optional = false
	default:
		return nil
	}
	if c.epoch.phase != gating || n.dir.Kind != job.Check {
		c.out.direct(n, c.shortage.wait())
	}
	return nil
}

// grant gives n a pass. The short one of a helper does not replace a longer one.
func (c *checks) grant(now time.Time, n *node, e Cleared) {
	c.shortage.back(n.Name)
	at, until := now, e.Until
	if !n.idle() && !c.epoch.sealedAt.IsZero() { // an answer that comes late: the clock stands still already
		at = c.epoch.sealedAt
	}
	if !until.IsZero() {
		until = until.Add(at.Sub(now))
	}
	if e.Domain != "" {
		n.domain = text.Clip(e.Domain, MaxName)
	}
	shorter := n.until.IsZero() || !until.IsZero() && !until.After(n.until)
	if (n.optional || !n.idle()) && shorter && !c.mustCheck(at, n) {
		return
	}
	n.cleared, n.until, n.unpaired = true, until, !until.IsZero() && !at.Before(until)
}

// void takes the pass of n away.
func (n *node) void() { n.cleared, n.unpaired = false, false }

// failed books a check that has failed.
func (c *checks) failed(e Barred) error {
	n, err := c.members.find(e.ID)
	if err != nil {
		return err
	}
	n.asked = false
	if c.epoch.phase == finished || !c.params.Gate || !n.can(CanGate) || n.state == barred {
		return nil
	}
	n.void()
	reason, aspect, event := text.Clip(e.Reason, maxReason), text.Clip(e.Aspect, maxAspect), job.EventBarred
	if e.Again {
		event = job.EventUndecided // it is not a mark of a node
	}
	if !n.idle() { // the gate had opened without this answer
		if !e.Again {
			event = job.EventLateCheck
		}
		c.out.note(event, n.Name, reason+"; it is checked again before the next world").Aspect = aspect
		return nil
	}
	if c.epoch.phase == gating && e.withOthers() && len(c.wary) < maxGone {
		c.wary[n.machine()] = true
	}
	n.unsure = e.Again && !c.params.CheckOnly
	c.members.setBar(n, &job.Cause{Kind: job.CauseCheck, Node: n.Name, Text: reason}, n.unsure)
	c.exclude(n)
	c.out.note(event, n.Name, reason).Aspect = aspect
	c.shortage.back(n.Name)
	return nil
}

// withOthers: the check with others has failed. Older launchers name no aspect.
func (e Barred) withOthers() bool {
	return e.Again || e.Aspect == "" || e.Aspect == "network" || e.Aspect == "pytorch"
}

// doubt voids the pass of a node. A node that waits while a sealed world runs is checked again at once, all
// others at the next gate.
func (c *checks) doubt(now time.Time, e Doubt) error {
	n, err := c.members.find(e.ID)
	if err != nil {
		return err
	}
	if !n.cleared || c.epoch.phase == finished {
		return nil
	}
	n.void()
	c.out.note(job.EventRecheck, n.Name, text.Clip(e.Reason, maxReason))
	if n.state == waiting {
		c.queue(now, n)
	}
	return nil
}

// epochOver lets the passes of the last world's members run on, and voids all if the end of the epoch was
// suspicious. It is called when the last member has stopped its workers: everything about that end is known.
func (c *checks) epochOver(now time.Time) {
	if c.epoch.sealedAt.IsZero() {
		return
	}
	stood := now.Sub(c.epoch.sealedAt)
	c.epoch.sealedAt = time.Time{}
	for _, n := range c.epoch.world {
		if !n.until.IsZero() {
			n.until = n.until.Add(stood)
		}
	}
	if !c.params.Gate || c.cfg.Suspicious == nil {
		return
	}
	if why := c.cfg.Suspicious(c.out.evidence()); why != "" {
		for _, n := range c.members.nodes {
			n.void()
		}
		c.out.note(job.EventRecheck, "", text.Clip(why, maxReason))
	}
}

// queue lets a node without workers wait for the next world, and sends it the directive for that.
func (c *checks) queue(now time.Time, n *node) {
	switch {
	case c.orders.bars[n.Name] != nil:
		c.exclude(n)
	case c.mustCheck(now, n) && c.epoch.phase != forming:
		c.ask(n)
		c.findPartners(now)
	case n.bar != nil:
		c.members.setBar(n, n.bar, true)
		c.exclude(n)
	default:
		c.members.become(n, waiting)
		c.out.direct(n, c.shortage.wait())
	}
}

// requeue gives all nodes without workers a new directive. A check that a pause has ended begins again at the gate.
func (c *checks) requeue(now time.Time) {
	for _, n := range c.members.sorted((*node).idle) {
		c.queue(now, n)
	}
}

// exclude keeps n without workers because of its name's bar, or else its own.
func (c *checks) exclude(n *node) {
	d := Directive{Kind: job.Bar, Cause: cmp.Or(c.orders.bars[n.Name], n.bar)}
	if !n.can(CanGate) || n.unsure && c.orders.bars[n.Name] == nil {
		d.Kind = job.Wait
	}
	c.members.become(n, barred)
	c.out.direct(n, d)
}

// barName keeps every node of the name without workers, those to come, too.
func (c *checks) barName(name string, why *job.Cause) {
	c.orders.set(name, why)
	for _, n := range c.members.sorted(func(n *node) bool { return n.Name == name && n.idle() }) {
		c.members.setBar(n, n.bar, false)
		c.exclude(n)
	}
	c.out.repeat(func(n *node) bool { return n.Name == name })
	c.out.tellDeputies()
}

// evict goes on without n, a node of a broken world, if that is decided about it.
func (c *checks) evict(n *node, d Decision, why job.Cause) {
	q := d.consequence()
	if !q.leave || n.state != pending {
		return
	}
	why.Text = text.Clip(why.Text, maxOrderText)
	if n.can(CanLeave) {
		n.drained = &why
		c.members.become(n, leaving)
		c.out.direct(n, Directive{Kind: job.Stop, Cause: &why})
	}
	if (q.bar || !n.can(CanLeave)) && c.orders.roomForBar(n.Name) {
		c.barName(n.Name, &why)
	}
}

// unbarName ends the bar of the name, and checks' bars of its nodes: these are checked once more. The entry stays, as
// nil: a node that has not heard of it may still bring its bar (memory.bar).
func (c *checks) unbarName(now time.Time, name string) {
	c.orders.set(name, nil)
	for _, n := range c.members.barredAs(name) {
		c.members.setBar(n, nil, false)
		if n.state == barred {
			c.queue(now, n)
		}
	}
	c.out.repeat(func(n *node) bool { return n.Name == name })
	c.out.tellDeputies()
}

func (c *checks) ask(n *node) {
	c.members.become(n, checking)
	c.out.check(n, false)
}

// askAll sends a Check to all waiting nodes that are not cleared, and returns their number. A node that has passed
// alone is checked again at a gate with a possible partner.
func (c *checks) askAll(now time.Time) int {
	if !c.params.Gate {
		return 0
	}
	company := c.epoch.phase == gating && c.members.gaters() > 1
	ns := c.members.sorted(func(n *node) bool {
		return n.state == waiting && c.mustCheck(now, n) && (company || !n.unpaired) || n.state == barred && n.again
	})
	for _, n := range ns {
		c.ask(n)
	}
	return len(ns)
}

// findPartners finds partners for a node that has come to be checked while no other one is.
func (c *checks) findPartners(now time.Time) {
	if c.members.checking > 1 {
		return
	}
	alone := func(n *node) bool { return n.state == waiting && n.unpaired && c.mustCheck(now, n) }
	for _, n := range c.members.sorted(alone) {
		c.out.check(n, true)
	}
	c.askHelpers(now, 1)
}

// askHelpers has cleared nodes help with the checks of others.
func (c *checks) askHelpers(now time.Time, subjects int) int {
	ns := c.members.sorted(func(n *node) bool { return n.state == waiting && n.can(CanGate) && !c.mustCheck(now, n) })
	ns = ns[:min(len(ns), 4*subjects+4)]
	for _, n := range ns {
		c.out.check(n, true)
	}
	return len(ns)
}

// newcomers is how many nodes wait, but for those on machines that have failed a check with others and have passed only
// alone since: no workers are stopped for these.
func (c *checks) newcomers() int {
	waits := c.members.waiting
	if len(c.wary) == 0 {
		return waits
	}
	for _, n := range c.members.nodes {
		if n.state == waiting && c.wary[n.machine()] {
			waits--
		}
	}
	return waits
}

// tell names the nodes that got a Check in this step, unless they have got another directive since, and those whose
// answers are no longer wanted.
func (c *checks) tell(now time.Time) {
	var a Action
	for _, n := range c.out.told {
		switch {
		case !c.members.here(n) || n.dir.Kind != job.Check:
		case n.optional && !c.mustCheck(now, n):
			a.Helpers = append(a.Helpers, n.ID)
		default:
			a.Gate = append(a.Gate, n.ID)
		}
	}
	for _, n := range c.out.free {
		if c.members.here(n) && !n.asked {
			a.Released = append(a.Released, n.ID)
		}
	}
	if len(a.Gate)+len(a.Helpers)+len(a.Released) > 0 {
		c.out.acts = append(c.out.acts, a)
	}
	c.out.told, c.out.free = nil, nil
}
