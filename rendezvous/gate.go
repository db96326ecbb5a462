package rendezvous

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
)

// The gate. With Params.Gate no node gets workers before a check has cleared it. When a world could be sealed, the
// Round enters the phase gating: all nodes that need one get a Check, and the world is sealed as soon as further
// answers cannot make it larger. A node that arrives while a sealed world runs is checked on arrival, so that growth
// and replacement find cleared nodes. Invariants:
//
//   - A node whose launcher cannot gate counts as cleared, and never gets Check or Bar.
//   - A check's bar ends with a check that passes, and a barred node is checked again when the next world forms.
//     The world waits for that second opinion only if it cannot form without the node. Without an answer the bar
//     stands.
//   - A node whose check has proved nothing (Barred.Again) waits under such a bar. Where there is no world without it,
//     it is checked again in the same gate, maxRechecks times at most.
//   - In gating no node has workers (stoppingCount is 0), and every node that waits has been cleared, or cannot gate.
//   - A node that gets an optional Check (a witness, or one that has passed alone) goes on to wait: the gate does not
//     wait for its answer, and it is a candidate for a world as before.

// maxReason bounds the reason of a failed check, in bytes.
const maxReason = 1024

// maxAspect bounds the word for the failed part.
const maxAspect = 64

func (n Node) can(a Ability) bool { return slices.Contains(n.Can, a) }

// idle: it has no workers, and none that it would have to stop.
func (n *node) idle() bool { return n.state == waiting || n.state == checking || n.state == barred }

// queue lets a node without workers wait for the next world, and sends it the directive for that.
func (r *Round) queue(now time.Time, n *node) {
	switch {
	case r.orders.bars[n.Name] != nil:
		r.exclude(n)
	case r.mustCheck(now, n) && r.epoch.phase != forming:
		r.ask(n)
		r.findPartners(now)
	case n.bar != nil:
		r.members.setBar(n, n.bar, true)
		r.exclude(n)
	default:
		r.members.become(n, waiting)
		r.out.direct(n, r.wait())
	}
}

// exclude keeps n without workers because of its name's bar, or else its own.
func (r *Round) exclude(n *node) {
	d := Directive{Kind: job.Bar, Cause: cmp.Or(r.orders.bars[n.Name], n.bar)}
	if !n.can(CanGate) || n.unsure && r.orders.bars[n.Name] == nil {
		d.Kind = job.Wait
	}
	r.members.become(n, barred)
	r.out.direct(n, d)
}

func (r *Round) ask(n *node) {
	r.members.become(n, checking)
	r.out.check(n, false)
}

// askAll sends a Check to all waiting nodes that are not cleared, and returns their number. A node that has passed
// alone is checked again at a gate with a possible partner.
func (r *Round) askAll(now time.Time) int {
	if !r.params.Gate {
		return 0
	}
	company := r.epoch.phase == gating && r.members.gaters() > 1
	ns := r.members.sorted(func(n *node) bool {
		return n.state == waiting && r.mustCheck(now, n) && (company || !n.unpaired) || n.state == barred && n.again
	})
	for _, n := range ns {
		r.ask(n)
	}
	return len(ns)
}

// findPartners finds partners for a node that has come to be checked while no other one is.
func (r *Round) findPartners(now time.Time) {
	if r.members.checking > 1 {
		return
	}
	for _, n := range r.members.sorted(func(n *node) bool { return n.state == waiting && n.unpaired && r.mustCheck(now, n) }) {
		r.askOptional(n)
	}
	r.askWitnesses(now, 1)
}

// askWitnesses has cleared nodes help with the checks of others.
func (r *Round) askWitnesses(now time.Time, subjects int) int {
	ns := r.members.sorted(func(n *node) bool { return n.state == waiting && n.can(CanGate) && !r.mustCheck(now, n) })
	ns = ns[:min(len(ns), 4*subjects+4)]
	for _, n := range ns {
		r.askOptional(n)
	}
	return len(ns)
}

// askOptional sends n a Check, and goes on without its answer.
func (r *Round) askOptional(n *node) {
	r.out.check(n, true)
}

// tellGate names the nodes that got a Check in this step, unless they have got another directive since, and those whose
// answers are no longer wanted.
func (r *Round) tellGate(now time.Time) {
	var a Action
	for _, n := range r.out.told {
		switch {
		case !r.members.here(n) || n.dir.Kind != job.Check:
		case n.optional && !r.mustCheck(now, n):
			a.Witnesses = append(a.Witnesses, n.ID)
		default:
			a.Gate = append(a.Gate, n.ID)
		}
	}
	for _, n := range r.out.free {
		if r.members.here(n) && !n.asked {
			a.Released = append(a.Released, n.ID)
		}
	}
	if len(a.Gate)+len(a.Witnesses)+len(a.Released) > 0 {
		r.out.acts = append(r.out.acts, a)
	}
	r.out.told, r.out.free = nil, nil
}

// passGate reports whether the world may be sealed, and with how many nodes: trySeal has found that it could be.
func (r *Round) passGate(now time.Time) (size int, open bool) {
	if !r.params.Gate {
		return r.fit(r.members.waiting), true
	}
	entered := r.epoch.phase != gating
	if entered {
		r.epoch.phase, r.gateSince, r.gateAt, r.rechecks = gating, now, now.Add(r.params.GateTimeout), 0
		for _, n := range r.members.nodes {
			n.late = false
		}
		r.askAll(now)
	}
	sure, possible := r.fit(r.members.waiting), r.fit(r.members.waiting+r.members.checking)
	if sure == possible && sure >= r.params.Min {
		return sure, !r.askLate(now)
	}
	if entered {
		r.noteGate(now)
	} else if r.members.checking == 0 {
		r.recheck(now)
	}
	if sure == possible || now.Before(r.gateAt) {
		return 0, false
	}
	text := fmt.Sprintf("%d of %d nodes have not answered within %s; they count as cleared",
		r.members.checking, r.members.waiting+r.members.checking, r.params.GateTimeout)
	r.out.note(job.EventGateOpened, "", text)
	return possible, true
}

// askLate has nodes checked with others, once, that came too late to be paired. It reports whether there are any.
func (r *Round) askLate(now time.Time) bool {
	if r.members.gaters() < 2 {
		return false
	}
	late := r.members.sorted(func(n *node) bool { return n.state == waiting && n.unpaired && !n.late && r.mustCheck(now, n) })
	for _, n := range late {
		n.late = true
		r.ask(n)
	}
	if len(late) > 0 {
		r.gateAt = now.Add(r.params.GateTimeout)
		r.noteGate(now)
	}
	return len(late) > 0
}

// maxRechecks is how often a gate repeats checks that have proved nothing.
const maxRechecks = 2

// recheck repeats the checks of nodes that the world needs and of which nothing is proved. In the end their bars stand
// as those of others.
func (r *Round) recheck(now time.Time) {
	if len(r.members.sorted(func(n *node) bool { return n.state == checking })) > 0 {
		return
	}
	unsure := r.members.sorted(func(n *node) bool { return n.state == barred && n.unsure && r.orders.bars[n.Name] == nil })
	if len(unsure) == 0 {
		return
	}
	if r.rechecks == maxRechecks {
		for _, n := range unsure {
			r.stand(n)
		}
		r.fails(now)
		r.leaveGate(now)
		return
	}
	r.rechecks++
	r.gateAt = now.Add(r.params.GateTimeout)
	for _, n := range unsure {
		r.ask(n)
	}
	r.noteGate(now)
}

// stand makes the bar of n one that the next gate may end, and no earlier one.
func (r *Round) stand(n *node) {
	n.unsure = false
	r.members.setBar(n, n.bar, false)
	r.exclude(n)
}

// fails lets a run that no other node can join fail soon because of a check.
func (r *Round) fails(now time.Time) {
	if (r.params.Static || r.params.CheckOnly) && r.failAt.IsZero() {
		r.failAt = now.Add(staticPatience)
	}
}

// noteGate notes the nodes that the gate waits for, and calls witnesses.
func (r *Round) noteGate(now time.Time) {
	open := r.members.checking + r.members.again
	text := fmt.Sprintf("checking %d of %d nodes", open, open+r.members.waiting)
	if helpers := r.askWitnesses(now, open); helpers > 0 {
		text += fmt.Sprintf("; %d others help", helpers)
	}
	r.out.note(job.EventGate, "", text)
}

// leaveGate goes on collecting nodes. The time in the gate does not count against the join timeout.
func (r *Round) leaveGate(now time.Time) {
	if r.epoch.phase != gating {
		return
	}
	r.epoch.phase = forming
	r.epoch.formingAt = r.epoch.formingAt.Add(now.Sub(r.gateSince))
	r.endChecks()
}

// endChecks notifies waiting nodes that their check is over. While the gate is closed, a cleared node gets no Wait:
// nearly always its next directive is Run.
func (r *Round) endChecks() {
	for _, n := range r.members.sorted(func(n *node) bool { return n.state == waiting && n.dir.Kind == job.Check }) {
		r.out.direct(n, r.wait())
	}
}

// endSecondOpinions lets the bars stand of nodes that have not answered within the gate's time.
func (r *Round) endSecondOpinions(now time.Time) {
	if r.epoch.phase != gating || now.Before(r.gateAt) {
		return
	}
	for _, n := range r.members.sorted(func(n *node) bool { return n.state == checking && n.bar != nil }) {
		r.stand(n)
	}
}

// barsAge lets the gate of the next world check the nodes again whose check has failed before.
func (r *Round) barsAge() {
	for _, n := range r.members.nodes {
		if n.bar != nil && r.orders.bars[n.Name] == nil {
			r.members.setBar(n, n.bar, true)
		}
	}
}

// withOthers: the check with others has failed. Older launchers name no aspect.
func (e Barred) withOthers() bool {
	return e.Again || e.Aspect == "" || e.Aspect == "network" || e.Aspect == "pytorch"
}

func (r *Round) bar(now time.Time, e Barred) error {
	n := r.members.nodes[e.ID]
	if n == nil {
		return ErrUnknownNode
	}
	n.asked = false
	if r.epoch.phase == finished || !r.params.Gate || !n.can(CanGate) || n.state == barred {
		return nil
	}
	n.void()
	reason, aspect, event := text.Clip(e.Reason, maxReason), text.Clip(e.Aspect, maxAspect), job.EventBarred
	if e.Again {
		event = job.EventUndecided // it is no mark of a node
	}
	if !n.idle() { // the gate had opened without this answer
		if !e.Again {
			event = job.EventLateCheck
		}
		r.out.note(event, n.Name, reason+"; it is checked again before the next world").Aspect = aspect
		return nil
	}
	if r.epoch.phase == gating && e.withOthers() && len(r.wary) < maxGone {
		r.wary[n.machine()] = true
	}
	n.unsure = e.Again && !r.params.CheckOnly
	r.members.setBar(n, &job.Cause{Kind: job.CauseCheck, Node: n.Name, Text: reason}, n.unsure)
	r.exclude(n)
	r.out.note(event, n.Name, reason).Aspect = aspect
	delete(r.gone, n.Name) // it is here again
	if !n.unsure {
		r.fails(now)
	}
	return nil
}
