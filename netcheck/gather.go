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
	helperTime  = 2 * time.Second  // for helpers, after the last node that is to be checked
	absentTime  = 10 * time.Second // beyond gathering: then a node is silent
)

// expect begins a check, or adds to it.
func (c *Check) expect(ev Expect) {
	for _, id := range ev.IDs {
		c.expectOne(Node{ID: id, Name: ev.Names[id]}, false)
	}
	for _, id := range ev.Helpers {
		c.expectOne(Node{ID: id, Name: ev.Names[id]}, true)
	}
}

func (c *Check) expectOne(who Node, helper bool) {
	if c.phase == idle || c.phase == closing {
		c.gather()
	}
	old := c.roster.byID[who.ID]
	switch {
	case old == nil:
	case old.state == decided:
		c.roster.become(old, departed) // expected again: as another node
	case old.helper && !helper && old.state == expected:
		c.roster.count(old, -1)
		old.helper = false
		c.roster.count(old, +1)
		c.roster.await(old, c.phase == gathering, c.now)
		return
	default:
		return
	}
	c.roster.await(c.roster.enlist(&node{Node: who, helper: helper}), c.phase == gathering, c.now)
}

// gather begins a new check. Nodes that the last one still expected stay expected.
func (c *Check) gather() {
	c.roster = c.roster.successor(c.now)
	c.results = results{spec: c.cfg.Spec}
	c.phase, c.round = gathering, 0
	c.began, c.ended, c.pairPhases = c.now, time.Time{}, nil
	c.out.note(job.EventCheckBegan, "", "the nodes are checked: %s", c.cfg.Spec)
}

// arrive introduces a node. One that is in the check already has begun anew.
func (c *Check) arrive(introduced Node) {
	if c.phase == idle {
		if n := c.roster.byID[introduced.ID]; n == nil || !n.helper || n.state != expected {
			c.gather()
		}
	}
	n := c.roster.byID[introduced.ID]
	if n == nil || n.state != expected {
		n = c.renew(n, introduced.ID)
	}
	n.Node = introduced
	c.roster.become(n, here)
	c.roster.changed = c.now
	c.place(n)
}

// renew replaces a node that has begun anew, if there is one.
func (c *Check) renew(old *node, id string) *node {
	n := &node{Node: Node{ID: id}}
	if old != nil {
		n.helper = old.helper && old.state != decided
		c.depart(old)
	}
	return c.roster.enlist(n)
}

// place decides a new node by its own report, or gives it a place in the running check.
func (c *Check) place(n *node) {
	unfit := n.unfit()
	switch {
	case unfit != nil:
		c.decide(n, *unfit)
	case c.phase == gathering:
	case c.cfg.Spec.Level == LevelLocal:
		c.decide(n, Verdict{State: StateOK})
	case n.helper:
		c.decide(n, Verdict{State: StateNotTested, Paired: true, Reason: unpaired + ": nobody needs it any more"})
	case c.phase == inHost:
		c.pairs().join(n)
		c.perform(c.pairs())
	default:
		c.decide(n, Verdict{State: StateNotTested, Reason: unpaired + ": it came too late"})
	}
}

// unfit is the verdict of a node that has failed its own checks and so takes part in no test; else nil.
func (n *node) unfit() *Verdict {
	var v Verdict
	if f := fatal(n.Findings); f != nil {
		v = Verdict{}.by(f)
	} else if n.Wants && n.GPUs == 0 {
		v = noGPU("--accelerator or --nproc-per-node=gpu asks for some")
	} else {
		return nil
	}
	return &v
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

func (c *Check) advanceGathering() {
	switch {
	case c.roster.open == 0:
		c.end()
	case !c.roster.gatherUntil(c.began, c.cfg.Spec.Timeout).After(c.now):
		c.endGathering()
	}
}

// endGathering begins the first phase.
func (c *Check) endGathering() {
	for _, n := range c.roster.nodes {
		if n.state == expected && !n.helper {
			c.roster.makeAbsent(n, c.now.Add(absentTime))
		}
	}
	c.hard = c.now.Add(c.cfg.Spec.Timeout)
	c.compareInventories()
	c.beginHost()
}

// silent decides an expected node that did not come.
func (c *Check) silent(n *node) {
	c.roster.absent.pop()
	c.roster.become(n, decided)
	v := Verdict{State: StateUnreachable, Kind: "net.silent", Confidence: 1, Excluded: true,
		Reason: "it was told to be checked and has not answered"}
	if c.results.settle(n, v) {
		c.out.verdict(n)
	}
	c.out.actions = append(c.out.actions, Action{Silent: n.ID, Verdict: &n.verdict})
}

// gone takes a node out that left the run, or has something else to do.
func (c *Check) gone(id string) {
	n := c.roster.byID[id]
	if n == nil {
		return
	}
	delete(c.roster.byID, id)
	if n.state == decided {
		return // the findings stay visible
	}
	c.depart(n)
	if c.phase == gathering {
		c.roster.changed = c.now
	}
}
