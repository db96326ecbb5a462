package netcheck

import (
	"time"
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
	helper   bool
	local    bool      // an expected one: it does its local checks
	due      time.Time // of an expected one: then it is silent
	test     *test     // that it takes part in now
	member   *member   // of the present phase
	busy     bool      // computing, or in the collective
	task     string    // the name of that
	matmul   float64   // milliseconds of its slowest device; 0 is unknown
	computed Class     // how computing ended
	why      string    // the same in words
	torched  bool      // it has passed a test with PyTorch
	listens  []string  // where, for its next test; nil: nowhere yet
	heard    time.Time // when it said so
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

// depart takes a node out of the check, whichever phase it is in.
func (c *Check) depart(n *node) {
	c.roster.become(n, departed) // first, so that nothing new is begun with it
	if n.test != nil {
		n.test.cancel()
		c.finish(n.test)
	}
	if n.member != nil {
		c.pairs().leave(n.member)
		c.perform(c.pairs())
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
	c.roster.become(n, decided)
	if c.results.settle(n, v) {
		c.out.verdict(n)
	}
	told := n.verdict // which may be revised
	c.out.assign(n, Assignment{Duty: Decided, Verdict: &told})
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
