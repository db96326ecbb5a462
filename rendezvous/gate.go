package rendezvous

import (
	"fmt"
	"time"

	"dlrover-run/internal/job"
)

// gate holds a world back until the checks of its nodes have passed.
//
// With Params.Gate no node gets workers before a check has cleared it. When a world could be sealed, the phase gating
// begins: all nodes that need one get a Check, and the world is sealed as soon as further answers cannot make it
// larger. A node that arrives while a sealed world runs is checked on arrival, so that growth and replacement find
// cleared nodes. Invariants:
//
//   - A node whose launcher cannot gate counts as cleared, and never gets Check or Bar.
//   - A check's bar ends with a check that passes, and a barred node is checked again when the next world forms.
//     The world waits for that second opinion only if it cannot form without the node. Without an answer the bar
//     stands.
//   - A node whose check has proved nothing (Barred.Again) waits under such a bar. Where there is no world without it,
//     it is checked again in the same gate, maxRechecks times at most.
//   - In gating no node has workers, and every node that waits has been cleared, or cannot gate.
//   - A node that gets an optional Check (a helper, or one that has passed alone) goes on to wait. The gate does not
//     wait for its answer, and it is a candidate for a world as before.
type gate struct {
	params   *Params
	members  *members
	epoch    *epoch
	orders   *orders
	shortage *shortage
	checks   *checks
	out      *outbox

	since    time.Time // when the phase gating began
	until    time.Time // it ends then without the missing answers
	rechecks int       // in the present gate, of nodes without a result
	failAt   time.Time // a static run fails then because of a check
}

// maxRechecks is how often a gate repeats checks that have proved nothing.
const maxRechecks = 2

// staticPatience is how long a static run in which a check has failed waits for other checks, to name all nodes.
const staticPatience = 5 * time.Second

// failed books a check that has failed.
func (g *gate) failed(now time.Time, e Barred) error {
	err := g.checks.failed(e)
	if n := g.members.nodes[e.ID]; n != nil && n.bar != nil && !n.unsure {
		g.fails(now)
	}
	return err
}

// pass reports whether the world may be sealed, and with how many nodes: trySeal has found that it could be.
func (g *gate) pass(now time.Time) (size int, open bool) {
	if !g.params.Gate {
		return g.params.fit(g.members.waiting), true
	}
	entered := g.epoch.phase != gating
	if entered {
		g.epoch.phase, g.since, g.until, g.rechecks = gating, now, now.Add(g.params.GateTimeout), 0
		for _, n := range g.members.nodes {
			n.late = false
		}
		g.checks.askAll(now)
	}
	sure, possible := g.params.fit(g.members.waiting), g.params.fit(g.members.waiting+g.members.checking)
	if sure == possible && sure >= g.params.Min {
		return sure, !g.askLate(now)
	}
	if entered {
		g.note(now)
	} else if g.members.checking == 0 {
		g.recheck(now)
	}
	if now.Before(g.until) {
		return 0, false
	}
	if possible < g.params.Min {
		g.insist(now)
		return 0, false
	}
	text := fmt.Sprintf("%d of %d nodes have not answered within %s; they count as cleared",
		g.members.checking, g.members.waiting+g.members.checking, g.params.GateTimeout)
	g.out.note(job.EventGateOpened, "", text)
	return possible, true
}

// askLate has nodes checked with others, once, that came too late to be paired. It reports whether there are any.
func (g *gate) askLate(now time.Time) bool {
	if g.members.gaters() < 2 {
		return false
	}
	late := g.members.sorted(func(n *node) bool {
		return n.state == waiting && n.unpaired && !n.late && g.checks.mustCheck(now, n)
	})
	for _, n := range late {
		n.late = true
		g.checks.ask(n)
	}
	if len(late) > 0 {
		g.until = now.Add(g.params.GateTimeout)
		g.note(now)
	}
	return len(late) > 0
}

// recheck repeats the checks of nodes that the world needs and of which nothing is proved. In the end their bars stand
// as those of others.
func (g *gate) recheck(now time.Time) {
	if len(g.members.sorted(func(n *node) bool { return n.state == checking && now.Before(g.until) })) > 0 {
		return
	}
	unsure := g.members.sorted(func(n *node) bool { return n.state == barred && n.unsure && g.orders.bars[n.Name] == nil })
	if len(unsure) == 0 {
		return
	}
	if g.rechecks == maxRechecks {
		for _, n := range unsure {
			g.stand(n)
		}
		g.fails(now)
		g.leave(now)
		return
	}
	g.rechecks++
	g.until = now.Add(g.params.GateTimeout)
	for _, n := range unsure {
		g.checks.ask(n)
	}
	g.note(now)
}

// insist goes on after the gate's time where the world needs nodes of which nothing is proved.
func (g *gate) insist(now time.Time) {
	g.recheck(now)
	if !now.Before(g.until) {
		g.leave(now)
	}
}

// stand makes the bar of n one that the next gate may end, and no earlier one.
func (g *gate) stand(n *node) {
	n.unsure = false
	g.members.setBar(n, n.bar, false)
	g.checks.exclude(n)
}

// fails lets a run that no other node can join fail soon because of a check.
func (g *gate) fails(now time.Time) {
	if (g.params.Static || g.params.CheckOnly) && g.failAt.IsZero() {
		g.failAt = now.Add(staticPatience)
	}
}

// fate returns why a static run ends after a check has failed, or nil. It ends when no answers are missing, or after
// staticPatience.
func (g *gate) fate(now time.Time) *job.Cause {
	enough := g.params.fit(g.members.waiting+g.members.checking) >= g.params.Min
	switch {
	case g.failAt.IsZero() || g.orders.paused != nil:
		return nil
	case !g.shortage.failed(), g.params.CheckOnly && enough: // it is mended
		g.failAt = time.Time{}
		return nil
	case g.members.checking > 0 && now.Before(g.failAt):
		return nil
	}
	text := "checks of nodes have failed, and nobody replaces a node of a static run"
	if g.params.CheckOnly {
		text = "too few nodes have passed their checks: " + g.shortage.numbers()
	}
	return g.shortage.lack(job.CauseCheck, text)
}

// note notes the nodes that the gate waits for, and calls helpers.
func (g *gate) note(now time.Time) {
	open := g.members.checking + g.members.again
	text := fmt.Sprintf("checking %d of %d nodes", open, open+g.members.waiting)
	if helpers := g.checks.askHelpers(now, open); helpers > 0 {
		text += fmt.Sprintf("; %d others help", helpers)
	}
	g.out.note(job.EventGate, "", text)
}

// leave goes on collecting nodes. The time in the gate does not count against the join timeout.
func (g *gate) leave(now time.Time) {
	if g.epoch.phase != gating {
		return
	}
	g.epoch.phase = forming
	g.epoch.formingAt = g.epoch.formingAt.Add(now.Sub(g.since))
	g.endChecks()
}

// endChecks notifies waiting nodes that their check is over. While the gate is closed, a cleared node gets no Wait:
// nearly always its next directive is Run.
func (g *gate) endChecks() {
	for _, n := range g.members.sorted(func(n *node) bool { return n.state == waiting && n.dir.Kind == job.Check }) {
		g.out.direct(n, g.shortage.wait())
	}
}

// endSecondOpinions lets the bars stand of nodes that have not answered within the gate's time.
func (g *gate) endSecondOpinions(now time.Time) {
	if g.epoch.phase != gating || now.Before(g.until) {
		return
	}
	for _, n := range g.members.sorted(func(n *node) bool { return n.state == checking && n.bar != nil }) {
		g.stand(n)
	}
}

// reopen lets the gate of the next world check the nodes again whose check has failed before.
func (g *gate) reopen() {
	for _, n := range g.members.nodes {
		if n.bar != nil && g.orders.bars[n.Name] == nil {
			g.members.setBar(n, n.bar, true)
		}
	}
}
