package netcheck

import (
	"fmt"
	"time"

	"dlrover-run/internal/job"
)

// Bounds of the tests with PyTorch other than pairs.
const (
	computeTime = 20 * time.Second // beyond PyTorch's import
	commTime    = 45 * time.Second
	commShare   = 0.75 // of the pairs' median: below it the collective of all is reported as slow
)

// computing is every node measuring its devices alone.
type computing struct {
	nodes   []*node
	waiting int
	began   time.Time
	until   time.Time
}

// collective is all nodes that passed communicating together.
type collective struct {
	nodes   []*node
	first   *node // rank 0, which has the store
	test    string
	told    bool // the other ranks
	waiting int
	until   time.Time
	failed  []string // in words
	bus     []float64
}

// afterHost goes on with PyTorch if that is requested and does not delay the nodes. It would delay members of a world
// that was stopped to check others.
func (c *Check) afterHost() {
	if c.cfg.Spec.Level != LevelFull || c.roster.withHelpers() {
		c.conclude()
		return
	}
	for _, n := range c.roster.here(func(n *node) bool { return !n.Torch && n.NoTorch != "" }) {
		n.skipTorch(n.NoTorch)
	}
	nodes := c.roster.here(func(n *node) bool { return n.Torch })
	if len(nodes) == 0 || c.results.cause != "" || reached(c.hard, c.now) {
		c.conclude()
		return
	}
	c.phase = inCompute
	c.computing = computing{nodes: nodes, waiting: len(nodes), began: c.now,
		until: c.began.Add(gatherMost + ImportTimeout + computeTime)}
	for _, n := range nodes {
		n.busy = true
		n.task = c.out.testName()
		c.out.assign(n, Assignment{Duty: Compute, Test: n.task, Torch: true, Left: c.computing.until.Sub(c.now)})
	}
}

// torchSkipped is the kind of a finding with the reason why a node was not tested with PyTorch.
const torchSkipped = "torch.skipped"

func (n *node) skipTorch(why string) {
	n.Findings = append(n.Findings, Finding{Check: "torch", Kind: torchSkipped, Severity: Warn,
		Text: "not tested with PyTorch: " + why})
}

// reportAlone takes the result of a node's own work, or of its part in the collective.
func (c *Check) reportAlone(n *node, r *Result) {
	if r.Test != n.task {
		return
	}
	n.busy = false
	if c.phase == inComm {
		c.comm.report(n, r)
		c.yield(n)
		return
	}
	n.computed = r.Class
	n.why = r.Text
	if r.Class == Own {
		n.skipTorch(r.Text)
	}
	if r.Torch != nil {
		for _, ms := range r.Torch.Matmul {
			n.matmul = max(n.matmul, float64(positive(ms)))
		}
	}
	c.yield(n)
}

// yield stops waiting for a node that has answered or gone.
func (c *Check) yield(n *node) {
	switch {
	case c.phase == inCompute:
		c.computing.waiting--
	case c.phase == inComm && n.state == departed: // the others cannot do without it
		c.comm.failed = append(c.comm.failed, n.name()+" has left")
		c.comm.until = c.now
	case c.phase == inComm:
		c.comm.waiting--
	}
}

// endCompute judges the results of the compute test and goes on with pairs. Its duration counts against no node.
func (c *Check) endCompute() {
	c.hard = c.hard.Add(c.now.Sub(c.computing.began))
	nodes := c.computing.nodes
	silent := c.computing.waiting
	c.matmul = judgeCompute(nodes, c.matmul, c.cfg.Spec.ExcludeStraggler)
	for _, n := range nodes {
		late := n.busy
		c.out.stop(n)
		switch {
		case !n.present():
		case late && 2*silent < len(nodes):
			c.decide(n, n.verdict.and(brokenCompute("it did not answer in time")))
		case n.computed == Failed:
			c.decide(n, n.verdict.and(brokenCompute(n.why)))
		case n.slow.Excluded:
			c.decide(n, n.verdict.and(n.slow))
		}
	}
	c.computing = computing{}
	c.beginTorch()
}

func brokenCompute(why string) Verdict {
	text := "PyTorch failed to compute: " + why
	return Verdict{State: StateFaulty, Kind: "compute", Confidence: 1, Excluded: true, Reason: text,
		Findings: []Finding{{Check: "torch", Kind: "compute", Severity: Fatal, Text: text}}}
}

// beginTorch tests pairs with PyTorch.
func (c *Check) beginTorch() {
	nodes := c.roster.here((*node).canTorch)
	if len(nodes) < 2 || reached(c.hard, c.now) {
		c.conclude()
		return
	}
	c.phase = inTorch
	c.beginPairs(nodes, c.torchNorms, !c.cfg.Spec.Comm)
}

// canTorch reports whether a node has shown that it can use PyTorch.
func (n *node) canTorch() bool { return n.Torch && n.computed == OK && n.matmul > 0 }

// beginComm has all that passed meet once.
func (c *Check) beginComm() {
	nodes := c.roster.here((*node).canTorch)
	if !c.cfg.Spec.Comm || len(nodes) < 2 || c.results.cause != "" || reached(c.hard, c.now) {
		c.conclude()
		return
	}
	c.phase = inComm
	c.comm = collective{nodes: nodes, first: nodes[0], test: c.out.testName(), waiting: len(nodes),
		until: sooner(c.hard, c.now.Add(commTime))}
	a := c.comm.joining(0, c.now)
	for _, n := range nodes[1:] {
		n.busy, n.task = true, "" // it may leave; it reports nothing before its order to join
		a.Allow = append(a.Allow, n.Addr)
	}
	c.out.assign(nodes[0], a)
}

// joining is the part of one rank.
func (x *collective) joining(rank int, now time.Time) Assignment {
	n := x.nodes[rank]
	n.task, n.busy = x.test, true
	return Assignment{Duty: Join, Test: x.test, Torch: true, Rank: rank, World: len(x.nodes), Left: x.until.Sub(now)}
}

// report takes the result of a node.
func (x *collective) report(n *node, r *Result) {
	if r.Class != OK {
		x.failed = append(x.failed, fmt.Sprintf("%s: %s", n.name(), r.Class))
	} else if r.Torch != nil {
		x.bus = append(x.bus, float64(positive(8*r.Torch.BusMBps)))
	}
}

// cause is why the collective is not as it should be, or "". It names no node: one missing node stops all.
func (x *collective) cause(bus, usual float64) string {
	switch {
	case len(x.failed) > 0:
		return fmt.Sprintf("the collective of %d nodes failed: %s", len(x.nodes), x.failed[0])
	case x.waiting > 0:
		return fmt.Sprintf("the collective of %d nodes was not done in time by %d", len(x.nodes), x.waiting)
	case usual > 0 && bus < commShare*usual:
		return fmt.Sprintf("the collective of %d nodes reached %.0f Mbit/s, pairs reach %.0f", len(x.nodes), bus, usual)
	}
	return ""
}

// order is the assignment of a node.
type order struct {
	to *node
	Assignment
}

// ready sends the other ranks to the store of the first one.
func (x *collective) ready(ev Ready, now time.Time) (orders []order) {
	if ev.Test != x.test || x.told {
		return nil
	}
	x.told = true
	addrs := ev.Addrs[:min(len(ev.Addrs), maxRails)]
	for i, n := range x.nodes {
		if n == x.first || !n.present() {
			continue
		}
		a := x.joining(i, now)
		a.Peer = Peer{ID: x.first.ID, Name: x.first.name(), Addr: x.first.Addr, Addrs: addrs}
		orders = append(orders, order{n, a})
	}
	return orders
}

// endComm notes the result of the collective.
func (c *Check) endComm() {
	x := &c.comm
	usual := float64(c.torchNorms.main().mbps)
	bus := median(x.bus)
	c.results.cause = x.cause(bus, usual)
	text := fmt.Sprintf("a collective of %d nodes: %.0f Mbit/s a node, pairs %.0f", len(x.nodes), bus, usual)
	if c.results.cause != "" {
		text += "; " + c.results.cause
	}
	c.out.note(job.EventCheckRound, "", "%s", text)
	for _, n := range x.nodes {
		c.out.stop(n)
	}
	c.comm = collective{}
	c.conclude()
}
