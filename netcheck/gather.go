package netcheck

import (
	"fmt"
	"time"

	"dlrover-run/internal/job"
)

// How long a check waits for expected nodes.
const (
	gatherQuiet = 10 * time.Second // after the last node that came or was expected
	gatherMost  = 15 * time.Second
	witnessTime = 2 * time.Second  // for witnesses, after the last node that is to be checked
	absentTime  = 10 * time.Second // beyond gathering: then a node is silent
)

// expect begins a check, or adds to it.
func (c *Check) expect(ev Expect) {
	for _, id := range ev.IDs {
		c.expectOne(Node{ID: id, Name: ev.Names[id]}, false)
	}
	for _, id := range ev.Witnesses {
		c.expectOne(Node{ID: id, Name: ev.Names[id]}, true)
	}
}

func (c *Check) expectOne(who Node, witness bool) {
	if c.phase == idle || c.phase == closing {
		c.gather()
	}
	old := c.byID[who.ID]
	switch {
	case old == nil:
	case old.state == decided:
		c.become(old, departed) // expected again: as another node
	case old.witness && !witness && old.state == expected:
		c.count(old, -1)
		old.witness = false
		c.count(old, +1)
		c.await(old)
		return
	default:
		return
	}
	c.await(c.enlist(&node{Node: who, witness: witness}))
}

// await gives an expected node its time.
func (c *Check) await(n *node) {
	if c.phase == gathering {
		c.lastChange = c.now
	} else if !n.witness {
		n.due = c.now.Add(gatherMost + absentTime)
		c.absent.push(n)
	}
}

// isBusy gives an expected node the time that local checks may take: it is not silent.
func (c *Check) isBusy(id string) {
	n := c.byID[id]
	if n == nil || n.state != expected || n.local {
		return
	}
	n.local = true
	c.local++
	if !n.due.IsZero() {
		n.due = c.now.Add(c.cfg.Spec.Timeout)
	}
}

// gather begins a new check. Nodes that the last one still expected stay expected.
func (c *Check) gather() {
	left := c.nodes
	c.nodes, c.byID, c.open, c.missing, c.local = nil, map[string]*node{}, 0, [2]int{}, 0
	c.absent = fifo[*node]{}
	for _, n := range left {
		if n.state == expected && !n.witness {
			n.due = time.Time{}
			c.enlist(n)
		}
	}
	c.phase, c.round = gathering, 0
	c.began, c.ended, c.lastChange = c.now, time.Time{}, c.now
	c.stages, c.verdicts, c.paths, c.cause = nil, tallies{}, nil, ""
	c.note(job.EventCheckBegan, "", "the nodes are checked: %s", c.cfg.Spec)
}

// arrive introduces a node. One that is in the check already has begun anew.
func (c *Check) arrive(introduced Node) {
	if c.phase == idle {
		if n := c.byID[introduced.ID]; n == nil || !n.witness || n.state != expected {
			c.gather()
		}
	}
	n := c.byID[introduced.ID]
	if n == nil || n.state != expected {
		n = c.renew(n, introduced.ID)
	}
	n.Node = introduced
	c.become(n, here)
	c.lastChange = c.now
	c.place(n)
}

// renew replaces a node that has begun anew, if there is one.
func (c *Check) renew(old *node, id string) *node {
	n := &node{Node: Node{ID: id}}
	if old != nil {
		n.witness = old.witness && old.state != decided
		c.depart(old)
	}
	return c.enlist(n)
}

// place decides a new node by its own report, or gives it a place in the running check.
func (c *Check) place(n *node) {
	switch {
	case c.unfit(n):
	case c.phase == gathering:
	case c.cfg.Spec.Level == LevelLocal:
		c.decide(n, Verdict{State: StateOK})
	case n.witness:
		c.decide(n, Verdict{State: StateNotTested, Paired: true, Reason: unpaired + ": nobody needs it any more"})
	case c.phase == inHost:
		c.stage().join(n)
		c.perform(c.stage())
	default:
		c.decide(n, Verdict{State: StateNotTested, Reason: unpaired + ": it came too late"})
	}
}

// unfit decides a node whose own checks have failed; it takes part in no test.
func (c *Check) unfit(n *node) bool {
	if f := fatal(n.Findings); f != nil {
		c.decide(n, Verdict{}.by(f))
		return true
	}
	if n.Wants && n.GPUs == 0 {
		c.decide(n, noGPU("--accelerator or --nproc-per-node=gpu asks for some"))
		return true
	}
	return false
}

func fatal(findings []Finding) *Finding {
	for i := range findings {
		if findings[i].Severity == Fatal {
			return &findings[i]
		}
	}
	return nil
}

func noGPU(why string) Verdict {
	text := fmt.Sprintf("no GPU was found, but %s", why)
	return Verdict{State: StateFaulty, Kind: "host.gpu", Confidence: 1, Excluded: true, Reason: text, Findings: []Finding{
		{Check: "host", Kind: "host.gpu", Severity: Fatal, Metric: "gpus", Threshold: 1, Text: text}}}
}

// gatherUntil is when gathering ends if no other node comes. It waits for nodes that are known to do their local
// checks.
func (c *Check) gatherUntil() time.Time {
	if c.local > 0 {
		return c.began.Add(max(gatherMost, c.cfg.Spec.Timeout+absentTime))
	}
	wait := gatherQuiet
	switch {
	case c.missing == [2]int{}:
		wait = 0
	case c.missing[0] == 0:
		wait = witnessTime
	}
	return sooner(c.began.Add(gatherMost), c.lastChange.Add(wait))
}

func (c *Check) advanceGathering() {
	switch {
	case c.open == 0:
		c.end()
	case !c.gatherUntil().After(c.now):
		c.endGathering()
	}
}

// endGathering begins the first stage.
func (c *Check) endGathering() {
	for _, n := range c.nodes {
		if n.state == expected && !n.witness {
			n.due = c.now.Add(absentTime)
			c.absent.push(n)
		}
	}
	c.hard = c.now.Add(c.cfg.Spec.Timeout)
	c.compareInventories()
	c.beginHost()
}

// firstAbsent is the next expected node to become silent, or nil.
func (c *Check) firstAbsent() *node {
	for c.absent.len() > 0 {
		if n := c.absent.items[c.absent.head]; n.state == expected && !n.due.IsZero() {
			return n
		}
		c.absent.pop()
	}
	return nil
}

// silent decides an expected node that did not come.
func (c *Check) silent(n *node) {
	c.absent.pop()
	c.become(n, decided)
	c.settle(n, Verdict{State: StateUnreachable, Kind: "net.silent", Confidence: 1, Excluded: true,
		Reason: "it was told to be checked and has not answered"})
	c.out = append(c.out, Action{Silent: n.ID, Verdict: &n.verdict})
}

// gone takes a node out that left the run, or has something else to do.
func (c *Check) gone(id string) {
	n := c.byID[id]
	if n == nil {
		return
	}
	delete(c.byID, id)
	if n.state == decided {
		return // the findings stay visible
	}
	c.depart(n)
	if c.phase == gathering {
		c.lastChange = c.now
	}
}
