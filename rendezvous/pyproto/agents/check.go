package agents

import (
	"cmp"
	"slices"
	"time"

	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/pyproto"
)

// check is the rendezvous in which agents test each other before they train (NetworkCheckRendezvousManager in DLRover's
// master): two rounds of pairs, the second of which puts the slow together with the fast. It decides by the times that
// it is given, and is guarded by Host.mu.
type check struct {
	params  *rendezvous.Params
	waiting map[int]tester
	world   []int // node ranks of the round that runs, in order; nil while one forms
	testers map[int]tester
	groups  [][]int
	round   int
	joined  time.Time // of the last who came

	reported map[int]bool
	passed   map[int]bool
	times    map[int]float64
}

// tester is a node in a check.
type tester struct{ id, slots int }

// rounds are the rounds of one check.
const rounds = 2

func newCheck() check {
	return check{waiting: map[int]tester{}, testers: map[int]tester{}, reported: map[int]bool{}, passed: map[int]bool{},
		times: map[int]float64{}}
}

// rules are those of the agents. Later ones count: who joins anew may have others.
func (c *check) rules(p rendezvous.Params) {
	p = p.WithDefaults()
	c.params = &p
}

// join puts a node among those that wait. A round that runs is over by that: somebody was started again.
func (c *check) join(now time.Time, rank, id, slots int) {
	if t, ok := c.waiting[rank]; ok && t.id > id {
		return // of a pod that was replaced
	}
	if _, ok := c.waiting[rank]; !ok {
		c.joined = now
	}
	c.waiting[rank] = tester{id, slots}
	c.world, c.groups = nil, nil
}

// gone: who leaves is not waited for.
func (c *check) gone(rank, id int) {
	if t, ok := c.waiting[rank]; ok && t.id == id {
		delete(c.waiting, rank)
	}
}

// over: agents go on to train, so that the next check begins with its first round. A round that forms is left alone.
func (c *check) over() {
	if len(c.waiting) == 0 && c.world != nil {
		c.round = (c.round + rounds - 1) / rounds * rounds
	}
}

// waitingNum is how many wait, if that is a reason for others to join: one of the last world was started again, or
// there are enough newcomers.
func (c *check) waitingNum() int {
	for rank := range c.waiting {
		if _, ok := c.testers[rank]; ok {
			return len(c.waiting)
		}
	}
	if c.params != nil && len(c.waiting) >= c.params.Unit {
		return len(c.waiting)
	}
	return 0
}

// complete begins a round if all are there, or enough and nobody has come for the time of the last call.
func (c *check) complete(now time.Time) {
	n := len(c.waiting)
	if c.world != nil || c.params == nil || n == 0 {
		return
	}
	if n < c.params.Max && (n < c.params.Min || now.Sub(c.joined) < c.params.LastCall) {
		return
	}
	n = min(n, c.params.Max)
	if n < c.params.Max {
		n = n / c.params.Unit * c.params.Unit
	}
	ranks := sortedRanks(c.waiting)[:n]
	if n == 0 {
		return
	}
	c.begin(ranks)
}

func sortedRanks[T any](m map[int]T) []int {
	ranks := make([]int, 0, len(m))
	for rank := range m {
		ranks = append(ranks, rank)
	}
	slices.Sort(ranks)
	return ranks
}

func (c *check) begin(ranks []int) {
	c.world, c.testers = ranks, map[int]tester{}
	for _, rank := range ranks {
		c.testers[rank] = c.waiting[rank]
		delete(c.waiting, rank)
	}
	if c.round%rounds == 0 {
		clear(c.passed)
		clear(c.times)
	}
	c.groups = c.pair()
	clear(c.reported)
	c.round++
}

// pair puts the nodes into groups of two, one of which may have three.
func (c *check) pair() (groups [][]int) {
	if c.round%rounds == 0 || len(c.times) == 0 {
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
	return groups
}

// timeOf sorts who has none behind all others, as DLRover sorts who has failed.
func (c *check) timeOf(rank int) float64 {
	if t, ok := c.times[rank]; ok {
		return t
	}
	return failedTime
}

// failedTime is the time that DLRover's agents report for a test that has failed, in seconds.
const failedTime = 3600

// report books what a node has measured. A success in one round makes good for a failure in the other.
func (c *check) report(rank int, passed bool, seconds float64) {
	if _, ok := c.testers[rank]; !ok {
		return
	}
	c.reported[rank] = true
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

// faults are the nodes that have failed; the reason says whether it is known.
func (c *check) faults() (ranks []int, reason string) {
	switch {
	case c.world == nil:
		return nil, notBegun
	case len(c.reported) < len(c.world):
		return nil, waitingNode
	}
	for _, rank := range c.world {
		if !c.passed[rank] {
			ranks = append(ranks, rank)
		}
	}
	if len(ranks) > 0 {
		return ranks, nodeFailure
	}
	if slow, _ := c.stragglers(); len(slow) == 0 {
		c.round = (c.round + rounds - 1) / rounds * rounds // no second round is needed
	}
	return nil, ""
}

// stragglers took more than twice the median.
func (c *check) stragglers() (ranks []int, reason string) {
	if c.world == nil || len(c.reported) < len(c.world) {
		return nil, waitingNode
	}
	var times []float64
	for _, rank := range c.world {
		times = append(times, c.times[rank])
	}
	slices.Sort(times)
	n := len(times)
	median := (times[(n-1)/2] + times[n/2]) / 2
	for _, rank := range c.world {
		if c.times[rank] > 2*median {
			ranks = append(ranks, rank)
		}
	}
	return ranks, ""
}

// group is that of a node in the round that runs, and its number.
func (c *check) group(rank int) (members []int, number int) {
	for i, g := range c.groups {
		if slices.Contains(g, rank) {
			return g, i
		}
	}
	return nil, 0
}

func (h *Host) checked(rank int, passed bool, seconds float64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.check.report(rank, passed, seconds)
}

// checkWorld tells a node with whom it tests.
func (h *Host) checkWorld(d pyproto.Dialect, rank int) *pyproto.Message {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.check.complete(time.Now())
	members, number := h.check.group(rank)
	world := &pyproto.Dict{}
	for _, m := range members {
		world.Pairs = append(world.Pairs, pyproto.Pair{Key: m, Value: h.check.testers[m].slots})
	}
	return rendezvousState(d, world, 0, h.check.round, number)
}

func (h *Host) faults(d pyproto.Dialect) *pyproto.Message {
	h.mu.Lock()
	defer h.mu.Unlock()
	return result(d)(h.check.faults())
}

func (h *Host) stragglers(d pyproto.Dialect) *pyproto.Message {
	h.mu.Lock()
	defer h.mu.Unlock()
	return result(d)(h.check.stragglers())
}

func result(d pyproto.Dialect) func(ranks []int, reason string) *pyproto.Message {
	return func(ranks []int, reason string) *pyproto.Message {
		nodes := &pyproto.List{}
		for _, rank := range ranks {
			nodes.Items = append(nodes.Items, rank)
		}
		return d.New("NetworkCheckResult", pyproto.Field{Name: "nodes", Value: nodes},
			pyproto.Field{Name: "reason", Value: reason})
	}
}
