package netcheck

// Nodes that are cut off together look faulty to all others, and fine to each other.
const (
	mutualFrom   = 3 // blamed nodes that are worth the rounds
	mutualRounds = 4
	mutualPasses = 2 // with different others; a single one may be chance
	mutualVain   = 2 // rounds without any pass after which there is no island
)

// island counts the tests of blamed members with each other.
type island struct {
	rounds int
	passed int
}

// goesOn reports whether another round may show that they are an island.
func (i island) goesOn() bool {
	return i.rounds < mutualRounds && (i.rounds < mutualVain || i.passed > 0)
}

// enterMutual follows the retests.
func (s *pairPhase) enterMutual() {
	s.step = inMutual
	s.mutualRound()
}

// mutualRound tests those that are blamed against each other, or ends the phase.
func (s *pairPhase) mutualRound() {
	blamed := s.cutOffMaybe()
	if len(blamed) >= mutualFrom && s.island.goesOn() {
		s.island.rounds++
		s.queue.pairUp(blamed, s.judge.base+s.island.rounds)
	}
	if s.queue.running == 0 {
		s.step = allDone
	}
}

// cutOffMaybe are the candidates for an island: blamed for reaching nobody, but not silent.
func (s *pairPhase) cutOffMaybe() (blamed []*member) {
	for _, m := range s.judge.members {
		if m.record(reach).blamed && m.silents == 0 && m.owns == 0 && m.idle() {
			blamed = append(blamed, m)
		}
	}
	s.rng.Shuffle(len(blamed), func(i, j int) { blamed[i], blamed[j] = blamed[j], blamed[i] })
	return blamed
}

// stranger is an idle one of others that m has not met, or nil.
func stranger(m *member, others []*member) *member {
	for _, p := range others {
		if p != m && m.idle() && p.idle() && m.meetings(p) == 0 {
			return p
		}
	}
	return nil
}

// endMutual takes a test of two blamed members.
func (s *pairPhase) endMutual(t *test) {
	if t.kind == mutualTest && t.reach == pass {
		s.island.passed++
		t.ends[0].mutual++
		t.ends[1].mutual++
	}
	s.pump()
}

// ofIsland reports whether m is fine, but reaches only its like.
func (m *member) ofIsland() bool { return m.record(reach).blamed && m.mutual >= mutualPasses }
