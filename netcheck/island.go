package netcheck

// Nodes that are cut off together look faulty to all others, and fine to each other.
const (
	mutualFrom   = 3 // blamed nodes that are worth the rounds
	mutualRounds = 4
	mutualPasses = 2 // with different others; a single one may be chance
	mutualVain   = 2 // rounds without any pass after which there is no island
)

// enterMutual follows the retests.
func (s *stage) enterMutual() {
	s.phase = inMutual
	s.mutualRound()
}

// mutualRound tests those that are blamed against each other, or ends the stage.
func (s *stage) mutualRound() {
	blamed := s.cutOffMaybe()
	if len(blamed) >= mutualFrom && s.mutuals < mutualRounds && (s.mutuals < mutualVain || s.islanders > 0) {
		s.mutuals++
		s.pairUp(blamed)
	}
	if s.running == 0 {
		s.phase = stageOver
	}
}

// cutOffMaybe are the candidates for an island: blamed for reaching nobody, but not silent.
func (s *stage) cutOffMaybe() (blamed []*member) {
	for _, m := range s.members {
		if m.record(reach).blamed && m.silents == 0 && m.owns == 0 && m.idle() {
			blamed = append(blamed, m)
		}
	}
	s.c.rng.Shuffle(len(blamed), func(i, j int) { blamed[i], blamed[j] = blamed[j], blamed[i] })
	return blamed
}

// pairUp starts as many trials as possible. A node that has passed once meets another such node, which is likely to
// pass again. Nodes that have passed often enough meet unknown nodes. The rest meet each other.
func (s *stage) pairUp(blamed []*member) {
	var byPasses [mutualPasses + 1][]*member
	for _, m := range blamed {
		k := min(m.mutual, mutualPasses)
		byPasses[k] = append(byPasses[k], m)
	}
	never, once, often := byPasses[0], byPasses[1], byPasses[mutualPasses]
	s.match(once, once)
	s.match(once, often)
	s.match(often, never)
	s.match(once, never)
	s.match(never, never)
}

// match starts trials between idle members of two groups that have not met.
func (s *stage) match(group, others []*member) {
	for _, m := range group {
		if p := stranger(m, others); p != nil {
			t := s.trial(mutualTrial, m, p)
			t.round, t.quick = s.base+s.mutuals, !s.torch
			s.start(t)
		}
	}
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

// endMutual takes a trial of two blamed members.
func (s *stage) endMutual(t *trial) {
	if t.kind == mutualTrial && t.reach == pass {
		s.islanders++
		t.ends[0].mutual++
		t.ends[1].mutual++
	}
	s.pump()
}

// ofIsland reports whether m is fine, but reaches only its like.
func (m *member) ofIsland() bool { return m.record(reach).blamed && m.mutual >= mutualPasses }
