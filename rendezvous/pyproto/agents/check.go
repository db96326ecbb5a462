package agents

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"time"

	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/pyproto"
)

// check is the rendezvous in which agents test each other before they train (NetworkCheckRendezvousManager in DLRover's
// master): two rounds of pairs, the second of which puts the slow together with the fast. It decides by the times that
// it is given, and is guarded by Host.mu.
//
// A join to the next round does not disturb the present one: nodes that have not read its pairs still can, and its
// results are readable until the next round begins. The next round waits for it, but no longer than a test may take.
type check struct {
	params  *rendezvous.Params
	others  int            // nodes of the run that take no part
	waiting map[int]tester // by node rank
	again   int            // of waiting: those that were in the newest round
	joined  time.Time      // of the last join

	// Of the newest round:
	round   int
	world   []int // node ranks in order
	begun   time.Time
	testers map[int]tester
	groups  [][]int
	groupOf map[int]int
	open    map[int]bool // have neither reported, nor joined again, nor gone
	result  *findings    // nil: not known, or it has changed

	// Of the newest check:
	due    map[int]bool // by NODE_ID: have reported, so that a second round may be theirs
	passed map[int]bool
	times  map[int]float64 // the shortest, in seconds
}

// tester is a node in a check.
type tester struct {
	id, slots int
	seen      time.Time // when it asked last, while it waits
}

// findings are those of a round that all have reported.
type findings struct{ faults, stragglers []int }

const (
	// rounds are those of one check.
	rounds = 2
	// testTime is for how long a round is waited for: DLRover's agents test for 300 s, and wait for 360 s.
	testTime = 6 * time.Minute
)

func newCheck() check {
	return check{waiting: map[int]tester{}, testers: map[int]tester{}, groupOf: map[int]int{}, open: map[int]bool{},
		due: map[int]bool{}, passed: map[int]bool{}, times: map[int]float64{}}
}

// rules are those of an agent. Later ones count: an agent that joins anew may have others. Agents bring them before the
// first round of a check, and not before the second.
func (c *check) rules(p rendezvous.Params, id int) {
	p = p.WithDefaults()
	c.params = &p
	delete(c.due, id)
}

// join puts a node among those that wait.
func (c *check) join(now time.Time, rank, id, slots int) {
	t, waits := c.waiting[rank]
	if waits && t.id > id {
		return // of a pod that was replaced
	}
	if _, was := c.testers[rank]; was && !waits {
		c.again++
	}
	if !waits {
		c.joined = now
	}
	c.waiting[rank] = tester{id, slots, now}
	c.close(rank)
}

// close: nothing more is heard of a node in the newest round.
func (c *check) close(rank int) {
	if c.open[rank] {
		delete(c.open, rank)
		c.result = nil
	}
}

// gone ends the wait for an agent that leaves.
func (c *check) gone(rank, id int) {
	if t, ok := c.waiting[rank]; ok && t.id == id {
		c.drop(rank)
	}
	if t, ok := c.testers[rank]; ok && t.id == id {
		c.close(rank)
	}
}

func (c *check) drop(rank int) {
	delete(c.waiting, rank)
	if _, was := c.testers[rank]; was {
		c.again--
	}
}

// goneID is gone for an agent that is known by its NODE_ID only.
func (c *check) goneID(id int) {
	for rank, t := range c.waiting {
		if t.id == id {
			c.drop(rank)
		}
	}
	for rank, t := range c.testers {
		if t.id == id {
			c.close(rank)
		}
	}
}

// over: a node goes on to train. Its next check is another one.
func (c *check) over(id int) { delete(c.due, id) }

// seen: a node that waits has asked.
func (c *check) seen(now time.Time, rank, id int) {
	if t, ok := c.waiting[rank]; ok && t.id == id {
		t.seen = now
		c.waiting[rank] = t
	}
}

// waitingNum is how many wait, if that is a reason for others to join: one of the newest round was started again, or
// there are enough newcomers.
func (c *check) waitingNum() int {
	if c.again > 0 || c.params != nil && len(c.waiting) >= c.params.Unit {
		return len(c.waiting)
	}
	return 0
}

// complete begins a round if all are there, or enough and the last join is older than the time of the last call. It
// reports whether it has begun one.
func (c *check) complete(now time.Time) bool {
	if !c.ready(now) {
		return false
	}
	c.dropSilent(now)
	if !c.ready(now) {
		return false
	}
	lowest, highest := c.bounds()
	n := min(len(c.waiting), highest)
	if n < highest {
		n = n / c.params.Unit * c.params.Unit
	}
	if n < lowest {
		return false
	}
	c.begin(now, sortedRanks(c.waiting)[:n])
	return true
}

// dropSilent drops agents that no longer poll. Agents that are about to train return to the check for the nodes that
// wait in it.
func (c *check) dropSilent(now time.Time) {
	for rank, t := range c.waiting {
		if now.Sub(t.seen) > silence {
			c.drop(rank)
		}
	}
}

// bounds limit the nodes of a round: those of the run without the nodes that take no part.
func (c *check) bounds() (lowest, highest int) {
	return max(1, c.params.Min-c.others), max(1, c.params.Max-c.others)
}

func (c *check) ready(now time.Time) bool {
	if c.params == nil {
		return false
	}
	n := len(c.waiting)
	lowest, highest := c.bounds()
	switch {
	case n < lowest:
		return false
	case len(c.open) > 0 && now.Sub(c.begun) < testTime:
		return false
	}
	return n >= highest || now.Sub(c.joined) >= c.params.LastCall
}

func sortedRanks[T any](m map[int]T) []int {
	ranks := make([]int, 0, len(m))
	for rank := range m {
		ranks = append(ranks, rank)
	}
	slices.Sort(ranks)
	return ranks
}

func (c *check) begin(now time.Time, ranks []int) {
	if !slices.ContainsFunc(ranks, func(rank int) bool { return c.due[c.waiting[rank].id] }) {
		c.first()
	}
	c.world, c.begun, c.testers, c.result = ranks, now, map[int]tester{}, nil
	clear(c.open)
	for _, rank := range ranks {
		t := c.waiting[rank]
		if c.round%rounds == 0 || !c.due[t.id] { // the rank's results are of another check
			delete(c.passed, rank)
			delete(c.times, rank)
		}
		c.testers[rank], c.open[rank] = t, true
		delete(c.waiting, rank)
	}
	clear(c.due)
	c.again = 0 // no waiting agent was in this round
	c.pair()
	c.round++
}

// first: the next round is the first of a check.
func (c *check) first() { c.round = (c.round + rounds - 1) / rounds * rounds }

// pair puts the nodes into groups of two, but an odd one into a group of three.
func (c *check) pair() {
	groups := [][]int{}
	if c.round%rounds == 0 {
		for chunk := range slices.Chunk(c.world, 2) {
			groups = append(groups, slices.Clone(chunk))
		}
	} else {
		byTime := slices.Clone(c.world)
		slices.SortStableFunc(byTime, func(a, b int) int { return cmp.Compare(c.timeOf(a), c.timeOf(b)) })
		for i, j := 0, len(byTime)-1; i <= j; i, j = i+1, j-1 {
			groups = append(groups, slices.Compact([]int{byTime[i], byTime[j]}))
		}
	}
	if last := len(groups) - 1; last > 0 && len(groups[last]) == 1 {
		groups[last-1] = append(groups[last-1], groups[last][0])
		groups = groups[:last]
	}
	c.groups = groups
	clear(c.groupOf)
	for i, g := range groups {
		for _, rank := range g {
			c.groupOf[rank] = i
		}
	}
}

// timeOf sorts a node without a time behind all others, as DLRover sorts failed ones.
func (c *check) timeOf(rank int) float64 {
	if t, ok := c.times[rank]; ok {
		return t
	}
	return failedTime
}

// failedTime is the time that DLRover's agents report for a test that has failed, in seconds.
const failedTime = 3600

// report books a node's measurements. A success in one round makes good for a failure in the other.
func (c *check) report(rank, id int, passed bool, seconds float64) {
	if t, ok := c.testers[rank]; !ok || t.id != id {
		return
	}
	if math.IsNaN(seconds) || seconds < 0 {
		seconds = failedTime
	}
	c.close(rank)
	c.due[id], c.result = true, nil
	c.passed[rank] = c.passed[rank] || passed
	if t, ok := c.times[rank]; !ok || seconds < t {
		c.times[rank] = seconds
	}
}

// The reasons that agents know.
const (
	notBegun    = "Not Initialized"
	waitingNode = "Waiting node"
	nodeFailure = "Node Failure"
)

// found are the results of the newest round, nil while some are missing.
func (c *check) found() *findings {
	if c.world == nil || len(c.open) > 0 {
		return nil
	}
	if c.result == nil {
		c.result = &findings{c.failed(), c.slow()}
		if len(c.result.faults)+len(c.result.stragglers) == 0 {
			c.first() // no second round is needed
		}
	}
	return c.result
}

func (c *check) failed() (ranks []int) {
	for _, rank := range c.world {
		if passed, told := c.passed[rank]; told && !passed {
			ranks = append(ranks, rank)
		}
	}
	return ranks
}

// slow are those that took more than twice the median.
func (c *check) slow() (ranks []int) {
	var times []float64
	for _, rank := range c.world {
		if t, told := c.times[rank]; told {
			times = append(times, t)
		}
	}
	n := len(times)
	if n == 0 {
		return nil
	}
	slices.Sort(times)
	median := (times[(n-1)/2] + times[n/2]) / 2
	for _, rank := range c.world {
		if c.times[rank] > 2*median {
			ranks = append(ranks, rank)
		}
	}
	return ranks
}

// has: a node waits, or has been in the newest round.
func (c *check) has(id int) bool {
	for _, t := range c.nodes() {
		if t.id == id {
			return true
		}
	}
	return false
}

// nodes are those that wait or have been in the newest round, by rank.
func (c *check) nodes() map[int]tester {
	all := maps.Clone(c.testers)
	maps.Copy(all, c.waiting)
	return all
}

// faults are the nodes that have failed, with the reason that agents of DLRover expect.
func (c *check) faults() (ranks []int, reason string) {
	r := c.found()
	switch {
	case c.world == nil:
		return nil, notBegun
	case r == nil:
		return nil, waitingNode
	case len(r.faults) > 0:
		return r.faults, nodeFailure
	}
	return nil, ""
}

// stragglers are the nodes that are slow.
func (c *check) stragglers() (ranks []int, reason string) {
	r := c.found()
	if r == nil {
		return nil, waitingNode
	}
	return r.stragglers, ""
}

// group is that of a node in the newest round, and its number. A node that has joined again is in none.
func (c *check) group(rank int) (members []int, number int) {
	i, ok := c.groupOf[rank]
	if _, waits := c.waiting[rank]; !ok || waits {
		return nil, 0
	}
	return c.groups[i], i
}

func (h *Host) checked(who caller, rank int, passed bool, seconds float64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.check.report(rank, who.id, passed, seconds)
}

// checkWorld returns a node's group for the test.
func (h *Host) checkWorld(d pyproto.Dialect, who caller, rank int) *pyproto.Message {
	others := h.cfg.others()
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	h.check.others = others
	h.check.seen(now, rank, who.id)
	if h.check.complete(now) {
		h.store.forget(checking, h.check.round-1)
	}
	members, number := h.check.group(rank)
	world := &pyproto.Dict{}
	for _, m := range members {
		world.Pairs = append(world.Pairs, pyproto.Pair{Key: m, Value: h.check.testers[m].slots})
	}
	return rendezvousState(d, world, 0, h.check.round, number)
}

// findings answers a question about the nodes of a check.
func (h *Host) findings(d pyproto.Dialect, ask func(*check) (ranks []int, reason string)) *pyproto.Message {
	h.mu.Lock()
	ranks, reason := ask(&h.check)
	h.mu.Unlock()
	nodes := &pyproto.List{}
	for _, rank := range ranks {
		nodes.Items = append(nodes.Items, rank)
	}
	return d.New("NetworkCheckResult", pyproto.Field{Name: "nodes", Value: nodes},
		pyproto.Field{Name: "reason", Value: reason})
}
