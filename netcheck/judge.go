package netcheck

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// Bounds for a decision.
const (
	partnersReach = 2 // different certified nodes that must have failed with a node: one path is not enough
	partnersRate  = 3
	retestsReach  = 2    // failed retests, unless all have met: of a thousand nodes some meet three bad paths in a row
	disturbed     = 0.2  // share of rates that something elsewhere may spoil
	slowWise      = 1e-3 // chance that these alone make any healthy node of all slow
	capTests      = 14   // of one node for its own sake
	fewRetests    = 4    // of one that others do not reach, where most are suspects: they fail alike
	hopeless      = 1    // more tests of one of two nodes
)

// judge holds the tests of the members of a phase, weighs them, and decides the members' standing.
type judge struct {
	members    []*member
	size       int  // of all that are judged together
	base       int  // rounds
	roundRobin bool // all members have met
	many       bool // most members were suspects after the base tests
	rates      rates
	leaves     switches
	history    testLog
}

// enter takes an ended test as evidence.
func (j *judge) enter(t *test) {
	j.history.enter(t)
	j.leaves.tally(t)
}

// judgeAll judges all tests by their common rates.
func (j *judge) judgeAll() {
	j.rates.measure(j.history.ended, j.members, j.roundRobin)
	for _, t := range j.history.ended {
		j.rates.judge(t)
	}
	j.leaves.find(j.members, j.size)
}

// repeated enters with the disputed tests of a pair that it was made again.
func (j *judge) repeated(t *test) {
	for _, old := range t.ends[0].tests {
		if old != t && old.other(t.ends[0]) == t.ends[1] && old.again == nil {
			old.again = t
			if fs := j.pathCapabilities(old); len(fs) > 0 && fs[0] != reach {
				j.history.slowTwice += len(fs)
			}
		}
	}
}

// assess brings the standing of m up to date, and blames.
func (j *judge) assess(m *member) {
	if j.leaves.dead[m.leaf] {
		m.standing = exposed // with all of its leaf
		return
	}
	m.standing = cleared
	for f := range j.rates.capabilities() {
		m.standing = max(m.standing, j.stand(m, f))
		if m.standing == exposed && f == reach {
			return
		}
	}
	if m.standing == open && j.exhausted(m) {
		m.standing = capped
	}
}

// exhausted reports whether m had all tests that one node gets. Two nodes cannot be distinguished, and where hardly any
// node has passed none is named; one test with a good node is then enough.
func (j *judge) exhausted(m *member) bool {
	switch {
	case j.size == 2:
		return m.retests >= hopeless
	case j.scarce(j.history.alive):
		return slices.ContainsFunc(m.tests, func(t *test) bool {
			return t.kind == retest && t.subject() == m && t.other(m).certified(reach)
		})
	}
	if j.many && j.stand(m, reach) == open {
		return m.retests >= fewRetests
	}
	return m.retests >= capTests-j.base
}

// stand is the standing of one capability of m.
func (j *judge) stand(m *member, f capability) standing {
	if m.record(f).blamed {
		return exposed
	}
	e := j.weigh(m, f)
	switch {
	case j.guilty(m, f, e, 1):
		r := m.recordOf(f)
		r.blamed, r.weight = true, float32(e.weight)
		return exposed
	case f == reach:
		return j.standReach(m, e)
	}
	return j.standRate(m, f, e)
}

// guilty reports whether the evidence is enough, with share of the threshold.
func (j *judge) guilty(m *member, f capability, e evidence, share float64) bool {
	if m.n.helper && f != reach {
		return false // its rates are measured only for the other end, and quickly
	}
	if f == reach && (m.silents >= 2 || m.owns >= 2) {
		return true
	}
	if e.weight+e.early < share*threshold(j.size) {
		return false
	}
	if f == reach {
		return e.partners >= partnersReach && (j.roundRobin || e.retestFails >= retestsReach)
	}
	return !m.record(f).passed && e.partners >= min(partnersRate, j.size-1) && e.retestFails > 0 &&
		e.certain >= j.lowsToBlame()
}

// lowsToBlame is how many rates of a node have to be low, and none good, before all of them can hardly be disturbed.
func (j *judge) lowsToBlame() int {
	n := float64(max(j.size, 2) * int(j.rates.capabilities()-1))
	return int(math.Ceil(math.Log(n/slowWise) / -math.Log(disturbed)))
}

func (j *judge) standReach(m *member, e evidence) standing {
	passed := m.certified(reach) && (m.want <= 1 || m.passes() >= m.want)
	switch {
	case m.n.helper && len(m.tests) == 0:
		return cleared // no test has needed it
	case !passed:
		return open
	case e.unexplained == 0:
		return cleared
	case e.weight <= acquitAt, e.weight <= 0 && e.doubtful == e.unexplained:
		return pending
	}
	return open
}

// standRate is stand for a rate: one good sample certifies. Low samples then come from the other end, the path or a
// disturbance.
func (j *judge) standRate(m *member, f capability, e evidence) standing {
	switch {
	case m.n.helper, j.lows(m, f) == 0:
		return cleared // or no rate is known, or none counts
	case !m.certified(f) && e.weight > acquitAt:
		return open
	case e.unexplained == 0:
		return cleared
	}
	return pending
}

// lows counts the low samples of f, whichever end is to blame.
func (j *judge) lows(m *member, f capability) (n int) {
	for _, t := range m.tests {
		if t.outcome(m, f) == fail && !j.leaves.cutOff(t) {
			n++
		}
	}
	return n
}

// disputed reports whether t failed between two nodes that are fine by all other tests, and was not repeated yet. The
// path has failed, or the failure was a chance.
func (j *judge) disputed(t *test) bool {
	if t.again != nil || t.kind == pairTest {
		return false
	}
	for f := range j.rates.capabilities() {
		if j.contested(t, f) {
			return true
		}
	}
	return false
}

func (j *judge) contested(t *test, f capability) bool {
	if f != reach && (t.ends[0].n.helper && t.ends[1].n.helper || j.slowFabric(j.history.slowTwice)) {
		return false // nothing is decided by it
	}
	for _, m := range t.ends {
		if t.outcome(m, f) != fail || j.explained(t, m, f) || !m.certified(f) || m.standing == capped {
			return false
		}
		if f == reach && j.weigh(m, f).weight > acquitAt {
			return false
		}
		f = f.counterpart()
	}
	return true
}

// blameAtLast blames, with less evidence than usual, a member that has had all its tests, or its time.
func (j *judge) blameAtLast(m *member) {
	for f := range j.rates.capabilities() {
		if e := j.weigh(m, f); m.standing >= open && !m.exposed(f) && j.guilty(m, f, e, capShare) {
			r := m.recordOf(f)
			r.blamed, r.weight = true, float32(e.weight)
		}
	}
}

// countPaths counts the pairs that failed twice between good nodes, and the directions that were slow.
func (j *judge) countPaths() (pairs, slow int) {
	for _, t := range j.history.ended {
		fs := j.pathCapabilities(t)
		switch {
		case len(fs) == 0:
		case fs[0] == reach:
			pairs++
		default:
			slow += len(fs)
		}
	}
	return pairs, slow
}

// pathCapabilities are the capabilities of the first end in which the path has failed.
func (j *judge) pathCapabilities(t *test) (fs []capability) {
	a, b := t.ends[0], t.ends[1]
	if t.again == nil {
		return nil
	}
	for f := range j.rates.capabilities() {
		if t.outcome(a, f) == fail && t.again.outcome(a, f) == fail && a.certified(f) && b.certified(f.counterpart()) &&
			!j.explained(t, a, f) && !j.explained(t, b, f.counterpart()) {
			fs = append(fs, f)
		}
	}
	return fs
}

// slowFabric reports whether so many directions between good nodes were slow twice that it is no matter of single
// paths.
func (j *judge) slowFabric(slow int) bool {
	return slow >= fabricFrom && float64(slow) > slowShare*float64(2*j.history.pairs*len(j.rates.lanes))
}

// scarce reports whether so few nodes have passed that none of the others can be named.
func (j *judge) scarce(passed int) bool {
	return float64(passed) < max(goodFrom, goodShare*float64(j.size))
}

// amongGood counts the tests between nodes that are certified and not blamed.
func (j *judge) amongGood() (failed, all int) {
	for _, t := range j.history.ended {
		a, b := t.ends[0], t.ends[1]
		if a.blamed() || b.blamed() || !a.certified(reach) || !b.certified(reach) || j.leaves.cutOff(t) {
			continue
		}
		if all++; t.reach == fail && !t.silentEnd(a) && !t.silentEnd(b) {
			failed++
		}
	}
	return failed, all
}

// over names the interfaces that all members have in common.
func (j *judge) over() string {
	var names []string
	for i, m := range j.members {
		var own []string
		for _, nic := range m.n.NICs {
			own = append(own, nic.Name)
		}
		if i > 0 && !slices.Equal(own, names) {
			return ""
		}
		names = own
	}
	if len(names) == 0 {
		return ""
	}
	return " over " + strings.Join(names, ", ")
}

// fails counts the failed tests of m that nothing explains.
func (j *judge) fails(m *member) (n int) {
	for f := range j.rates.capabilities() {
		n += j.weigh(m, f).unexplained
	}
	return n
}

// seemsSlow reports whether a rate of m was low in several tests and good in none.
func (j *judge) seemsSlow(m *member) bool {
	if m.mated || !m.certified(reach) {
		return false
	}
	for f := capability(1); f < j.rates.capabilities(); f++ {
		if j.lows(m, f) > 1 && !m.record(f).passed {
			return true
		}
	}
	return false
}

// doubtsRate reports whether rates of m are in question, which a short measurement would not settle.
func (j *judge) doubtsRate(m *member) bool {
	for f := capability(1); f < j.rates.capabilities(); f++ {
		if j.lows(m, f) > 0 {
			return true
		}
	}
	return false
}

// baseResult is the result of the base rounds.
func (j *judge) baseResult() string {
	suspects := 0
	for _, m := range j.members {
		if m.standing == open || m.standing == exposed {
			suspects++
		}
	}
	return fmt.Sprintf("%d nodes in %d pairs, %d rounds; %d are suspects", j.size, j.history.pairs, j.base, suspects)
}
