package netcheck

// Bounds of the work for one event.
const (
	scanPool     = 32 // members of the pool that are looked at for one that a suspect has not met
	scanWaiting  = 8  // suspects that are looked at in vain
	companionsTo = 32 // up to so many nodes suspects are tested with each other when none has passed
	allMeetTo    = 12 // up to so many nodes every pair is tested then: two of them may be fine
	onCall       = 16 // certified nodes that are kept while anything is open, and one for every open node
)

// pump starts all possible trials, releases members that no trial needs, and ends the phase when nothing is left.
func (s *stage) pump() {
	switch s.phase {
	case inRetests:
		s.startPairs()
		s.startRetests()
		if s.running == 0 && !s.fallback() {
			s.enterMutual()
			return
		}
		s.release()
	case inMutual:
		if s.running == 0 {
			s.mutualRound()
		}
	}
}

// startPairs repeats disputed trials.
func (s *stage) startPairs() {
	for range min(s.disputes.len(), scanPool) {
		t := s.disputes.pop()
		a, b := t.ends[0], t.ends[1]
		switch {
		case a.released || b.released || !a.n.present() || !b.n.present():
		case !s.disputed(t):
			t.listed = false
		case a.idle() && b.idle():
			s.retest(pairTrial, a, b, t)
		default:
			s.disputes.push(t)
		}
	}
}

// startRetests gives suspects partners that they have not met.
func (s *stage) startRetests() {
	for vain := 0; s.waiting.len() > 0 && vain < scanWaiting; {
		m := s.waiting.pop()
		m.waiting = false
		if !m.idle() || m.standing != open {
			continue
		}
		if p := s.mate(m); p != nil {
			m.mated, p.mated = true, true
			s.retest(mutualTrial, m, p, nil)
			continue
		}
		if p := s.partner(m); p != nil {
			s.retest(retestTrial, m, p, nil)
			continue
		}
		m.waiting = true
		s.waiting.push(m)
		vain++
	}
}

// mate returns another waiting member that is slow with all, as m is. Nodes behind one slow switch are slow with all
// others, but not with each other. One such test of a node is enough.
func (s *stage) mate(m *member) *member {
	if !s.seemsSlow(m) {
		return nil
	}
	for range min(s.waiting.len(), scanPool) {
		p := s.waiting.pop()
		if s.seemsSlow(p) && p.idle() && p.standing == open && m.meetings(p) == 0 {
			p.waiting = false
			return p
		}
		s.waiting.push(p)
	}
	return nil
}

// seemsSlow reports whether a rate of m was low in several tests and good in none.
func (s *stage) seemsSlow(m *member) bool {
	if m.mated || !m.certified(reach) {
		return false
	}
	for f := capability(1); f < s.capabilities(); f++ {
		if s.lows(m, f) > 1 && !m.record(f).passed {
			return true
		}
	}
	return false
}

// partner takes a member out of the pool that m has not met, or returns nil.
func (s *stage) partner(m *member) *member {
	for range min(s.pool.len(), scanPool) {
		p := s.pool.pop()
		p.pooled = false
		if !p.idle() || p.standing != cleared {
			continue
		}
		if p != m && m.meetings(p) == 0 {
			return p
		}
		p.pooled = true
		s.pool.push(p)
	}
	return nil
}

// retest starts a trial for m's sake, or of a disputed one's pair.
func (s *stage) retest(kind trialKind, m, p *member, old *trial) {
	t := s.trial(kind, m, p)
	if kind == retestTrial {
		m.retests++
	}
	t.round = s.base + m.retests
	t.quick = !s.torch && (m.newcomer || !s.doubtsRate(m) && old == nil)
	s.start(t)
}

// doubtsRate reports whether rates of m are in question, which a short measurement would not settle.
func (s *stage) doubtsRate(m *member) bool {
	for f := capability(1); f < s.capabilities(); f++ {
		if s.lows(m, f) > 0 {
			return true
		}
	}
	return false
}

// fallback is for few nodes, and when hardly any is fine. Suspects meet earlier partners again, or certified nodes that
// wait themselves. If no node is certified, they meet each other. It reports whether it has started a trial.
func (s *stage) fallback() bool {
	judges := s.judges()
	for range s.waiting.len() {
		m := s.waiting.pop()
		m.waiting = false
		if !m.idle() || m.standing != open {
			continue
		}
		p := leastMet(m, judges)
		if p == nil {
			p = s.companion(m)
		}
		if p == nil {
			m.waiting = true
			s.waiting.push(m) // it is the first one next time
			continue
		}
		s.retest(retestTrial, m, p, nil)
	}
	return s.running > 0
}

// judges are idle certified members, those that are clear first.
func (s *stage) judges() (judges []*member) {
	if s.waiting.len() == 0 {
		return nil
	}
	for _, wanted := range []bool{true, false} {
		for _, m := range s.members {
			if m.idle() && m.certified(reach) && (m.standing == cleared) == wanted && m.standing <= open {
				judges = append(judges, m)
			}
		}
	}
	return judges
}

// leastMet is the idle one of judges that m has met least often.
func leastMet(m *member, judges []*member) (best *member) {
	least, seen := 0, 0
	for _, p := range judges {
		if p == m || !p.idle() {
			continue
		}
		if n := m.meetings(p); best == nil || n < least {
			best, least = p, n
		}
		if seen++; seen == scanPool || least == 0 {
			break
		}
	}
	return best
}

// companion is another suspect, for a few nodes of which none has passed yet.
func (s *stage) companion(m *member) *member {
	most := 2 * hopeless
	if s.roundRobin {
		most = hopeless
	}
	if s.size > companionsTo || s.passed > 0 || m.newcomer || m.retests >= most && s.size > allMeetTo {
		return nil
	}
	var others []*member
	for _, p := range s.members {
		if p.idle() && !p.newcomer && p.standing == open && (m.retests < most || m.meetings(p) == 0) {
			others = append(others, p)
		}
	}
	return leastMet(m, others)
}

// release releases clear members that no test will need.
func (s *stage) release() {
	if !s.final {
		return
	}
	for s.pool.len() > onCall+s.unsettled {
		m := s.pool.pop()
		m.pooled = false
		if m.idle() && m.standing == cleared {
			m.released = true
			s.c.decide(m.n, s.fine(m))
		}
	}
}
