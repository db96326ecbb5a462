package netcheck

import "math"

// Log-likelihoods of one test against a node. They model a faulty node that fails every other test, and a healthy one
// that fails one in a hundred: ln(0.5/0.01) and ln(0.5/0.99). A base test is worth less, because its other end is
// hardly known either.
const (
	weightFail  = 3.9   // a retest against a certified node
	weightPass  = -0.68 // the same
	weightAlone = 3.0   // a base test, by the end that never passed, with a certified one
	weightEach  = 1.5   // a test of two equally unknown nodes
	acquitAt    = -0.5
	familyWise  = 0.02 // chance that any healthy node of all is blamed
	capShare    = 0.7  // of the threshold, for a node that has had all its tests
)

// threshold is the log-likelihood that blames one of n nodes.
func threshold(n int) float64 { return math.Log(float64(max(n, 2)) / familyWise) }

// evidence summarizes the tests of a member for one capability.
type evidence struct {
	weight      float64 // log-likelihood
	early       float64 // that of base tests which have passed
	partners    int     // different certified ones that it failed with
	fails       int
	certain     int // failures with certified ones
	retestFails int
	unexplained int // failures without another known cause that were not tested again
	doubtful    int // of these, the ones in which the other end has never passed
}

// weigh adds up the evidence about f of m.
func (j *judge) weigh(m *member, f capability) (e evidence) {
	for i, t := range m.tests {
		switch t.outcome(m, f) {
		case pass:
			j.addPass(&e, t, m, f)
		case fail:
			j.addFailure(&e, i, m, f)
		}
	}
	return e
}

// addPass adds a pass: with few nodes, where all have met, the base tests count like retests. Otherwise a passed base
// test does not end the search, but counts against blame.
func (j *judge) addPass(e *evidence, t *test, m *member, f capability) {
	switch {
	case !t.other(m).certified(f.counterpart()):
	case t.kind == baseTest && !j.roundRobin:
		e.early += weightPass
	default:
		e.weight += weightPass
	}
}

func (j *judge) addFailure(e *evidence, i int, m *member, f capability) {
	t := m.tests[i]
	o := t.other(m)
	if j.explained(t, m, f) {
		return
	}
	e.fails++
	if t.again == nil || t.again.outcome(m, f) == none {
		e.unexplained++
		if !o.certified(f.counterpart()) {
			e.doubtful++
		}
	}
	if o.certified(f.counterpart()) {
		e.certain++
		if t.kind == retest {
			e.retestFails++
		}
		if !failedBefore(m, o, f, m.tests[:i]) {
			e.partners++
		}
	}
	e.weight += weightOfFailure(t, m, f)
}

// weightOfFailure is the share of a failure that counts against m: all, half, or nothing.
func weightOfFailure(t *test, m *member, f capability) float64 {
	mine, theirs := m.certified(f), t.other(m).certified(f.counterpart())
	switch {
	case theirs && t.kind == retest && t.subject() == m:
		return weightFail
	case t.kind == pairTest, t.kind == mutualTest, mine && !theirs:
		return 0 // the pair's or the other one's
	case theirs && !mine:
		return weightAlone
	case theirs && t.kind == retest:
		return 0 // m was the judge
	}
	return weightEach
}

// subject is for whom a retest is made: it serves.
func (t *test) subject() *member { return t.ends[0] }

func failedBefore(m, o *member, f capability, tests []*test) bool {
	for _, t := range tests {
		if t.other(m) == o && t.outcome(m, f) == fail {
			return true
		}
	}
	return false
}

// explained reports whether another node is known to be the cause of a failure of m.
func (j *judge) explained(t *test, m *member, f capability) bool {
	o := t.other(m)
	return f == reach && t.silentEnd(o) && !t.silentEnd(m) || // m has reported, o has not
		o.exposed(f.counterpart()) || j.leaves.cutOff(t)
}
