package netcheck

// When the uplink of a leaf switch is dead its nodes pass among themselves and fail with all others.
const (
	leafPasses = 2 // in the leaf, at least
	leafFails  = 4 // across, at least
	leafFactor = 4 // failures across for every pass across
)

// leafCount counts the tests of one leaf's nodes.
type leafCount struct{ members, in, crossPass, crossFail int }

// tally enters an ended trial.
func (s *stage) tally(t *trial) {
	a, b := t.ends[0].leaf, t.ends[1].leaf
	if a == "" || b == "" || t.reach == none {
		return
	}
	if a == b {
		if t.reach == pass {
			s.leaf(a).in++
		}
		return
	}
	for _, l := range []string{a, b} {
		if t.reach == pass {
			s.leaf(l).crossPass++
		} else {
			s.leaf(l).crossFail++
		}
	}
}

func (s *stage) leaf(name string) *leafCount {
	l := s.leaves[name]
	if l == nil {
		l = &leafCount{}
		s.leaves[name] = l
	}
	return l
}

// isDead reports whether failed tests between a leaf's nodes and others are to be blamed on the leaf.
func (l *leafCount) isDead() bool {
	return l.in >= leafPasses && l.crossFail >= leafFails && l.crossFail > leafFactor*l.crossPass
}

// findLeaves looks for dead leaves, once, when all base tests are done. Of two parts the smaller one is cut off.
func (s *stage) findLeaves() {
	for _, m := range s.members {
		s.leaf(m.leaf).members++
	}
	for name, l := range s.leaves {
		if l.isDead() && 2*l.members <= s.size {
			s.dead[name] = true
		}
	}
}

// cutOff reports whether t was made over the uplink of a dead leaf.
func (s *stage) cutOff(t *trial) bool {
	a, b := t.ends[0].leaf, t.ends[1].leaf
	return len(s.dead) > 0 && a != b && (s.dead[a] || s.dead[b])
}
