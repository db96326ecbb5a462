package netcheck

import (
	"time"

	"dlrover-run/internal/job"
)

// nodeState is how far a node is in the present check.
type nodeState uint8

const (
	expected nodeState = iota // to be checked, but it has sent nothing yet
	here
	decided
	departed // gone, or replaced by a later arrival of the same node
)

// node is one node in one check.
type node struct {
	Node
	state    nodeState
	witness  bool
	local    bool      // an expected one: it does its local checks
	due      time.Time // of an expected one: then it is silent
	trial    *trial    // that it takes part in now
	member   *member   // of the present stage
	busy     bool      // computing, or in the collective
	test     string    // the name of that
	matmul   float64   // milliseconds of its slowest device; 0 is unknown
	computed Class     // how computing ended
	why      string    // the same in words
	torched  bool      // it has passed a test with PyTorch
	slow     Verdict   // as a straggler
	verdict  Verdict
}

func (n *node) present() bool { return n.state == here }

// name is the node's name for people.
func (n *node) name() string {
	if n.Name != "" {
		return n.Name
	}
	return n.ID
}

// enlist adds a node to the check.
func (c *Check) enlist(n *node) *node {
	c.nodes = append(c.nodes, n)
	c.byID[n.ID] = n
	c.count(n, +1)
	return n
}

// count keeps the numbers of nodes that the check waits for. It is not over before they are decided, except witnesses
// that have not come.
func (c *Check) count(n *node, by int) {
	if n.state == expected && n.local {
		c.local += by
	}
	switch {
	case n.state == expected && n.witness:
		c.missing[1] += by
	case n.state == expected:
		c.missing[0] += by
		c.open += by
	case n.state == here:
		c.open += by
	}
}

// become changes the state of a node.
func (c *Check) become(n *node, state nodeState) {
	c.count(n, -1)
	n.state = state
	c.count(n, +1)
}

// depart takes a node out of the check, whichever phase it is in.
func (c *Check) depart(n *node) {
	c.become(n, departed) // first, so that nothing new is begun with it
	if n.trial != nil {
		c.void(n.trial)
	}
	if n.member != nil {
		c.stage().leave(n.member)
		c.perform(c.stage())
	}
	if n.busy {
		n.busy = false
		c.yield(n)
	}
}

// decide ends the check of a node that is here.
func (c *Check) decide(n *node, v Verdict) {
	if n.state != here {
		return
	}
	c.become(n, decided)
	c.settle(n, v)
	told := n.verdict // which may be revised
	c.assign(n, Assignment{Duty: Decided, Verdict: &told})
}

// maxTold bounds the nodes of a check in the timeline; the picture has all.
const maxTold = 64

// settle makes v the verdict of n, with the results of its local checks, under this Spec.
func (c *Check) settle(n *node, v Verdict) {
	v = v.by(fatal(n.Findings))
	v.Findings = append(append([]Finding(nil), n.Findings...), v.Findings...)
	v.Findings = v.Findings[:min(len(v.Findings), MaxFindings)]
	v.Excluded = v.Excluded && !c.cfg.Spec.ReportOnly
	v.Again = v.Again && v.Excluded
	v.Covered = n.cover(v)
	n.verdict = v
	if n.witness && v.State == StateNotTested {
		return // it was not needed
	}
	c.verdicts.count(v, +1)
	if c.verdicts.excluded+c.verdicts.others <= maxTold && v.State != StateOK {
		c.note(job.EventCheckVerdict, n.name(), "%s: %s", v.State, v.Reason)
		c.noteFaults(n)
	}
}

// maxFaults bounds the faults of one node's devices in the timeline.
const maxFaults = 4

// noteFaults notes devices that their driver reports as broken, if the verdict does not exclude the node.
func (c *Check) noteFaults(n *node) {
	told := 0
	for _, f := range n.Findings {
		if what := f.fault(); what != "" && !n.verdict.Excluded && told < maxFaults {
			c.note(job.EventDeviceFault, n.name(), "%s: %s", what, f.Text)
			told++
		}
	}
}

// fault returns the kind of a hardware fault that no program can cause, "" for other findings. Retired memory or a
// pending reset is no new error.
func (f Finding) fault() string {
	switch {
	case f.Severity != Fatal:
		return ""
	case f.Metric == "xid" || f.Kind == "gpu.lost":
		return "xid"
	case f.Metric == "ecc_uncorrected":
		return "ecc"
	}
	return ""
}

// assign gives a node its duty.
func (c *Check) assign(n *node, a Assignment) {
	c.seq++
	a.Seq = c.seq
	c.out = append(c.out, Action{To: n.ID, Assign: &a})
}

// leafOf is the label of the node's switch: the topology's, else its own, else that of its NVLink domain.
func (c Config) leafOf(n *node) string {
	if c.Topology != nil {
		if l := c.Topology(n.Node); l != "" {
			return l
		}
	}
	if n.Switch != "" {
		return n.Switch
	}
	return n.Domain
}
