package slow

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"dlrover-run/hang"
	"dlrover-run/internal/job"
)

// Times of Checks.
const (
	checkAfter = time.Minute      // for which ranks slow the job before their node is examined
	nextCheck  = 5 * time.Minute  // until another node is
	answerTime = 45 * time.Second // for both nodes
	testTime   = 20 * time.Second // for a test of their links
)

// Checks decides which node is examined because its ranks slow the job, and with which one it is compared: one at a
// time, and once for each finding. The zero value is of a run in which none was examined.
type Checks struct {
	Links bool // are tested, too
	next  time.Time
	of    *check // under way
}

// check is an examination of a node, and of the one that it is compared with, if there is one.
type check struct {
	slowed hang.Slowed
	epoch  job.EpochID
	nodes  []int // their group ranks
	other  string
	late   time.Time
	names  [2]string
	facts  [2][]hang.Fact     // of nodes; nil: it has not answered
	ends   [2]json.RawMessage // of a test of links; nil: there is none
	tested bool               // such a test has begun
	rates  [2][]hang.Fact     // in it
}

// Next returns the group ranks of the nodes that examine themselves now; mostly there are none.
func (c *Checks) Next(now time.Time, j *Judge) []int {
	if c.of != nil || now.Before(c.next) {
		return nil
	}
	var worst *finding
	for i := range j.found {
		f := &j.found[i]
		due := !f.examined && f.missed == 0 && now.Sub(f.Since) >= checkAfter
		if due && (worst == nil || f.Share > worst.Share) {
			worst = f
		}
	}
	if worst == nil {
		return nil
	}
	worst.examined, c.next = true, now.Add(nextCheck)
	c.of = &check{slowed: worst.Slowed, epoch: j.world.Epoch, nodes: []int{worst.GroupRank}, late: now.Add(answerTime)}
	c.of.names[0] = worst.Node
	if i := j.other(worst.GroupRank); i >= 0 {
		c.of.names[1] = j.world.Nodes[i].Name
		c.of.nodes, c.of.other = append(c.of.nodes, i), fmt.Sprintf("node %d %s", i, j.world.Nodes[i].Name)
	}
	return c.of.nodes
}

// other returns the next node that has as many ranks and no slow one; -1 if there is none.
func (j *Judge) other(than int) int {
	for k := 1; k < len(j.nodes); k++ {
		i := (than + k) % len(j.nodes)
		slow := slices.ContainsFunc(j.found, func(f finding) bool { return f.GroupRank == i })
		if !slow && len(j.nodes[i].ranks) == len(j.nodes[than].ranks) {
			return i
		}
	}
	return -1
}

// Heard takes the facts of a node. Those that nobody has asked for are dropped.
func (c *Checks) Heard(groupRank int, r *hang.Report) {
	if c.of == nil || len(r.Facts) == 0 {
		return
	}
	switch i := slices.Index(c.of.nodes, groupRank); {
	case i < 0:
	case c.of.tested:
		c.of.rates[i] = r.Facts
	default:
		c.of.facts[i], c.of.ends[i] = r.Facts, r.End
	}
}

// Test returns what both nodes are asked to do for a test of their links, once; the caller adds its name and key.
func (c *Checks) Test(now time.Time) []hang.Ask {
	k := c.of
	if k == nil || k.tested || !c.Links || k.ends[0] == nil || k.ends[1] == nil {
		return nil
	}
	k.tested, k.late = true, now.Add(testTime)
	var asks []hang.Ask
	for i, node := range k.nodes {
		asks = append(asks, hang.Ask{What: hang.AskLink, To: k.names[i], Nodes: []int{node},
			Link: &hang.Link{Serve: i == 1, Peer: k.ends[1-i]}})
	}
	return asks
}

// Done returns the ranks of an examination that has ended, once, and notes the result in the finding.
func (c *Checks) Done(now time.Time, j *Judge) *hang.Slowed {
	k := c.of
	if k == nil || k.waits() && now.Before(k.late) && k.epoch == j.world.Epoch {
		return nil
	}
	if c.of = nil; k.epoch != j.world.Epoch {
		return nil
	}
	s := &k.slowed
	s.Checked = k.result(c.Links)
	for i := range j.found {
		if f := &j.found[i]; f.GroupRank == s.GroupRank && f.examined {
			f.Checked = s.Checked
		}
	}
	return s
}

func (k *check) waits() bool {
	for i := range k.nodes {
		if k.facts[i] == nil || k.tested && k.rates[i] == nil {
			return true
		}
	}
	return false
}
