package netcheck

// testLog has the ended tests of a phase, and counts them.
type testLog struct {
	ended     []*test // for Picture and the medians
	passed    int
	alive     int // members that have passed any
	pairs     int // different pairs tested
	slowTwice int // directions
}

// enter puts an ended test where evidence is looked for.
func (h *testLog) enter(t *test) {
	for i, m := range t.ends {
		if t.class[i] == Own {
			m.owns++
		}
		if t.class[i] == Silent {
			m.silents++
		}
	}
	if t.reach == none {
		return
	}
	h.ended = append(h.ended, t)
	if t.ends[0].meetings(t.ends[1]) == 0 {
		h.pairs++
	}
	for _, m := range t.ends {
		m.tests = append(m.tests, t)
	}
	if t.reach == pass {
		h.passed++
		for _, m := range t.ends {
			if r := m.recordOf(reach); !r.passed {
				r.passed = true
				h.alive++
			}
		}
	}
}

// commonest is the class of most failures.
func (h *testLog) commonest() string {
	count := map[Class]int{}
	best := OK
	for _, t := range h.ended {
		for _, c := range t.class {
			if count[c]++; c != OK && (count[c] > count[best] || best == OK) {
				best = c
			}
		}
	}
	return string(best)
}
