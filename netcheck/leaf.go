package netcheck

// When the uplink of a leaf switch is dead its nodes pass among themselves and fail with all others.
const (
	leafPasses = 2 // in the leaf, at least
	leafFails  = 4 // across, at least
	leafFactor = 4 // failures across for every pass across
)

// switches counts the tests of nodes by their leaf switches, and knows the dead ones.
type switches struct {
	counts map[string]*leafCount
	dead   map[string]bool
}

// leafCount counts the tests of one leaf's nodes.
type leafCount struct{ members, in, crossPass, crossFail int }

// tally enters an ended test.
func (l *switches) tally(t *test) {
	a, b := t.ends[0].leaf, t.ends[1].leaf
	if a == "" || b == "" || t.reach == none {
		return
	}
	if a == b {
		if t.reach == pass {
			l.of(a).in++
		}
		return
	}
	for _, name := range []string{a, b} {
		if t.reach == pass {
			l.of(name).crossPass++
		} else {
			l.of(name).crossFail++
		}
	}
}

func (l *switches) of(name string) *leafCount {
	x := l.counts[name]
	if x == nil {
		x = &leafCount{}
		l.counts[name] = x
	}
	return x
}

// isDead reports whether failed tests between a leaf's nodes and others are to be blamed on the leaf.
func (l *leafCount) isDead() bool {
	return l.in >= leafPasses && l.crossFail >= leafFails && l.crossFail > leafFactor*l.crossPass
}

// find looks for dead leaves, once, when all base tests are done. Of two parts the smaller one is cut off.
func (l *switches) find(members []*member, size int) {
	for _, m := range members {
		l.of(m.leaf).members++
	}
	for name, x := range l.counts {
		if x.isDead() && 2*x.members <= size {
			l.dead[name] = true
		}
	}
}

// cutOff reports whether t was made over the uplink of a dead leaf.
func (l *switches) cutOff(t *test) bool {
	a, b := t.ends[0].leaf, t.ends[1].leaf
	return len(l.dead) > 0 && a != b && (l.dead[a] || l.dead[b])
}
