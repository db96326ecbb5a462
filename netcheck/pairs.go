package netcheck

import (
	"math/rand/v2"
	"slices"
)

// step is how far a phase of pairs is.
type step uint8

const (
	inBase    step = iota // the planned tests of all
	inRetests             // of suspects only
	inMutual              // those that are blamed, with each other
	allDone
)

// pairPhase tests members in pairs until it knows enough of each: first the planned base tests, then suspects against
// certified nodes, at last blamed nodes against each other. A test begins as soon as both its ends are idle; all
// members wait for each other only between the steps. The judge weighs the tests, the scheduler chooses further
// pairs, and the reporter words the verdicts.
//
// Invariants: a member is in at most one running test. A certified or blamed member stays so. The evidence is added up
// anew from the history whenever it changes, so this invariant makes it converge.
type pairPhase struct {
	cfg    Config
	rng    *rand.Rand
	torch  bool
	final  bool // cleared nodes may be released
	step   step
	left   int // base tests that have not ended
	island island
	judge  judge
	queue  scheduler
	report reporter
	out    effects
}

// effects are for the Check to carry out after every call of a phase, with the tests that its scheduler has started.
type effects struct {
	baseEnded bool      // the timeline gets the result of the base tests
	released  []*member // no test needs them: they are decided
}

// newPairPhase makes the phase of nodes. old are the usual rates of the last phase of its kind.
func newPairPhase(cfg Config, rng *rand.Rand, nodes []*node, old norms, torch, final bool) *pairPhase {
	s := &pairPhase{cfg: cfg, rng: rng, torch: torch, final: final}
	s.judge.leaves = switches{counts: map[string]*leafCount{}, dead: map[string]bool{}}
	if s.judge.rates.norms = old; old == nil {
		s.judge.rates.norms = norms{}
	}
	s.queue.judge, s.queue.torch = &s.judge, torch
	s.report = reporter{judge: &s.judge, words: words{&s.judge.rates, torch}, spec: cfg.Spec}
	for _, n := range nodes {
		s.add(n)
	}
	return s
}

func (s *pairPhase) add(n *node) *member {
	m := &member{n: n, want: 1, leaf: s.cfg.leafOf(n)}
	n.member = m
	s.judge.members = append(s.judge.members, m)
	s.judge.size++
	return m
}

// begin plans the base tests and starts the first of them.
func (s *pairPhase) begin() {
	rounds := s.plan()
	s.judge.base = len(rounds)
	for r, pairs := range rounds {
		for _, p := range pairs {
			s.enqueue(s.judge.members[p[0]], s.judge.members[p[1]], r+1, r >= thorough(s.judge.base))
		}
	}
	for _, m := range s.judge.members {
		s.proceed(m)
	}
	s.barrier()
}

// plan pairs all members, or every subject with helpers where there are enough of these.
func (s *pairPhase) plan() [][][2]int {
	if subjects, helpers := s.split(); len(helpers) >= 2 && 2*len(helpers) >= len(subjects) {
		references := 1
		if len(s.judge.rates.norms) == 0 {
			references = referencePairs
		}
		rounds := withHelpers(subjects, helpers, references)
		s.judge.roundRobin = len(s.judge.members) == 3
		return rounds
	}
	s.judge.roundRobin = len(s.judge.members) <= roundRobinTo
	return plan(len(s.judge.members), func(i int) string { return s.judge.members[i].leaf }, s.rng)
}

func (s *pairPhase) split() (subjects, helpers []int) {
	for i, m := range s.judge.members {
		if m.n.helper {
			helpers = append(helpers, i)
		} else {
			subjects = append(subjects, i)
		}
	}
	return subjects, helpers
}

// thorough is the number of long measurements in so many base rounds. With short measurements in the others, a healthy
// check is below 10 s for any number of nodes.
func thorough(rounds int) int {
	if rounds > 3 {
		return 1
	}
	return 2
}

// enqueue plans a base test.
func (s *pairPhase) enqueue(a, b *member, round int, quick bool) {
	t := newTest(s.torch, baseTest, a, b)
	t.round, t.quick = round, quick || a.n.helper || b.n.helper
	a.queue, b.queue = append(a.queue, t), append(b.queue, t)
	s.left++
}

func newTest(torch bool, kind testKind, a, b *member) *test {
	return &test{kind: kind, torch: torch, ends: [2]*member{a, b}, cross: a.leaf != b.leaf}
}

// head is m's next base test that will be made.
func (m *member) head() *test {
	for len(m.queue) > 0 && m.queue[0].dropped {
		m.queue = m.queue[1:]
	}
	if len(m.queue) == 0 {
		return nil
	}
	return m.queue[0]
}

// proceed starts m's next base test when both ends have come to it.
func (s *pairPhase) proceed(m *member) {
	t := m.head()
	if t == nil || !m.idle() || !t.other(m).idle() || t.other(m).head() != t {
		return
	}
	for _, e := range t.ends {
		e.queue = e.queue[1:]
	}
	s.queue.start(t)
}

// drop gives up m's planned base tests.
func (s *pairPhase) drop(m *member) {
	for _, t := range m.queue {
		if !t.dropped {
			t.dropped = true
			s.left--
			s.proceed(t.other(m))
		}
	}
	m.queue = nil
}

// end takes a test that is over: all reports are in, it has expired, or it is void.
func (s *pairPhase) end(t *test) {
	s.queue.running--
	t.conclude()
	s.judge.enter(t)
	if t.kind == baseTest {
		s.left--
		s.endBase(t)
	} else {
		s.endLater(t)
	}
}

// endBase goes on with both ends. The base rounds do not wait for a silent member again.
func (s *pairPhase) endBase(t *test) {
	for i, m := range t.ends {
		if t.class[i] == Silent {
			s.drop(m)
		}
		s.proceed(m)
	}
	s.barrier()
}

// barrier ends the base rounds with their last test: the usual rates are known now.
func (s *pairPhase) barrier() {
	if s.step != inBase || s.left > 0 || s.queue.running > 0 || s.complete() {
		return
	}
	s.step = inRetests
	s.weighBase()
	s.judge.many = 2*s.queue.unsettled > s.judge.size
	s.out.baseEnded = true
	s.pump()
}

// complete has all of a few nodes meet where some have failed with helpers: that decides most. It reports whether
// there is anything to be tested.
func (s *pairPhase) complete() bool {
	if s.judge.roundRobin || len(s.judge.members) > roundRobinTo || s.judge.history.passed == len(s.judge.history.ended) {
		return false
	}
	s.judge.roundRobin = true
	for _, pairs := range circle(s.rng.Perm(len(s.judge.members)), len(s.judge.members)) {
		for _, p := range pairs {
			a, b := s.judge.members[p[0]], s.judge.members[p[1]]
			if a.idle() && b.idle() && a.silents+b.silents == 0 && a.meetings(b) == 0 {
				s.enqueue(a, b, s.judge.base+1, true)
			}
		}
	}
	for _, m := range s.judge.members {
		s.proceed(m)
	}
	return s.left > 0
}

// weighBase judges the base tests: the usual rates are known now.
func (s *pairPhase) weighBase() {
	s.judge.judgeAll()
	s.reassess(s.judge.members...)
}

// endLater judges a test of the later phases.
func (s *pairPhase) endLater(t *test) {
	s.judge.rates.judge(t)
	if t.kind == pairTest {
		s.judge.repeated(t)
	}
	if s.step == inMutual {
		s.endMutual(t)
		return
	}
	s.reassess(t.ends[0], t.ends[1])
	s.pump()
}

// reassess updates members, and then the members whose failures they explain.
func (s *pairPhase) reassess(ms ...*member) {
	ms = slices.Clone(ms)
	for len(ms) > 0 {
		m := ms[0]
		ms = ms[1:]
		s.judge.assess(m)
		s.queue.count(m)
		if known := m.known(); known != m.told {
			m.told = known
			ms = append(ms, m.failedWith()...)
		}
		s.queue.place(m, s.step == inRetests)
	}
}

// leave removes the member of a node that has gone; its running test is void already.
func (s *pairPhase) leave(m *member) {
	s.queue.count(m)
	s.judge.size--
	s.drop(m)
	s.barrier()
	s.pump()
}

// join takes a newcomer in: it is tested against certified nodes only, and quickly.
func (s *pairPhase) join(n *node) {
	m := s.add(n)
	m.newcomer, m.want = true, newRounds
	m.standing = open
	s.queue.count(m)
	s.queue.place(m, s.step == inRetests)
	s.pump()
}

// pump starts all possible tests, releases members that no test needs, and ends the phase when nothing is left.
func (s *pairPhase) pump() {
	switch s.step {
	case inRetests:
		s.queue.startPairs()
		s.queue.startRetests()
		if s.queue.running == 0 && !s.queue.fallback() {
			s.enterMutual()
			return
		}
		if s.final {
			s.out.released = append(s.out.released, s.queue.spare()...)
		}
	case inMutual:
		if s.queue.running == 0 {
			s.mutualRound()
		}
	}
}
