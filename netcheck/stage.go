package netcheck

import "slices"

// stagePhase is where a stage is.
type stagePhase uint8

const (
	inBase    stagePhase = iota // the planned trials of all
	inRetests                   // of suspects only
	inMutual                    // those that are blamed, with each other
	stageOver
)

// stage tests members in pairs until it knows enough of each: first the planned base trials, then suspects against
// certified nodes, at last blamed nodes against each other. A trial begins as soon as both its ends are idle; all
// members wait for each other only between the phases.
//
// Invariants: a member is in at most one running trial. A certified or blamed member stays so. The evidence is added up
// anew from the history whenever it changes, so this invariant makes it converge.
type stage struct {
	c          *Check
	torch      bool
	final      bool // cleared nodes may be released
	members    []*member
	size       int // of all that are judged together
	base       int // rounds
	roundRobin bool
	lanes      []lane
	norms      norms
	leaves     map[string]*leafCount
	dead       map[string]bool // leaves

	phase     stagePhase
	aborted   bool // its time was over
	left      int  // base trials that have not ended
	running   int
	passed    int      // trials
	alive     int      // members that have passed any
	slowTwice int      // directions
	many      bool     // most members were suspects after the base trials
	unsettled int      // members that are pending or open
	ended     []*trial // for Picture and the medians
	pool      fifo[*member]
	waiting   fifo[*member]
	disputes  fifo[*trial]
	mutuals   int // rounds of them
	islanders int // mutual trials that passed
	pairs     int // different pairs tested
	decision  decision
}

// newStage makes a stage of nodes. old are the usual rates of the last stage of its kind.
func newStage(c *Check, nodes []*node, old norms) *stage {
	s := &stage{c: c, norms: old, leaves: map[string]*leafCount{}, dead: map[string]bool{}}
	if s.norms == nil {
		s.norms = norms{}
	}
	for _, n := range nodes {
		s.add(n)
	}
	return s
}

func (s *stage) add(n *node) *member {
	m := &member{n: n, want: 1, leaf: s.c.leafOf(n)}
	n.member = m
	s.members = append(s.members, m)
	s.size++
	return m
}

// begin plans the base trials and starts the first of them.
func (s *stage) begin() {
	rounds := s.plan()
	s.base = len(rounds)
	for r, pairs := range rounds {
		for _, p := range pairs {
			s.enqueue(s.members[p[0]], s.members[p[1]], r+1, r >= thorough(s.base))
		}
	}
	s.c.round = 1
	for _, m := range s.members {
		s.proceed(m)
	}
	s.barrier()
}

// plan pairs all members, or every subject with witnesses where there are enough of these.
func (s *stage) plan() [][][2]int {
	if subjects, witnesses := s.split(); len(witnesses) >= 2 && 2*len(witnesses) >= len(subjects) {
		references := 1
		if len(s.norms) == 0 {
			references = referencePairs
		}
		rounds := withWitnesses(subjects, witnesses, references)
		s.roundRobin = len(s.members) == 3
		return rounds
	}
	s.roundRobin = len(s.members) <= roundRobinTo
	return plan(len(s.members), func(i int) string { return s.members[i].leaf }, s.c.rng)
}

func (s *stage) split() (subjects, witnesses []int) {
	for i, m := range s.members {
		if m.n.witness {
			witnesses = append(witnesses, i)
		} else {
			subjects = append(subjects, i)
		}
	}
	return subjects, witnesses
}

// thorough is the number of long measurements in so many base rounds. With short measurements in the others, a healthy
// check is below 10 s for any number of nodes.
func thorough(rounds int) int {
	if rounds > 3 {
		return 1
	}
	return 2
}

// enqueue plans a base trial.
func (s *stage) enqueue(a, b *member, round int, quick bool) {
	t := s.trial(baseTrial, a, b)
	t.round, t.quick = round, quick || a.n.witness || b.n.witness
	a.queue, b.queue = append(a.queue, t), append(b.queue, t)
	s.left++
}

func (s *stage) trial(kind trialKind, a, b *member) *trial {
	return &trial{kind: kind, ends: [2]*member{a, b}, cross: a.leaf != b.leaf}
}

// head is m's next base trial that will be made.
func (m *member) head() *trial {
	for len(m.queue) > 0 && m.queue[0].dropped {
		m.queue = m.queue[1:]
	}
	if len(m.queue) == 0 {
		return nil
	}
	return m.queue[0]
}

// proceed starts m's next base trial when both ends have come to it.
func (s *stage) proceed(m *member) {
	t := m.head()
	if t == nil || !m.idle() || !t.other(m).idle() || t.other(m).head() != t {
		return
	}
	for _, e := range t.ends {
		e.queue = e.queue[1:]
	}
	s.start(t)
}

// drop gives up m's planned base trials.
func (s *stage) drop(m *member) {
	for _, t := range m.queue {
		if !t.dropped {
			t.dropped = true
			s.left--
			s.proceed(t.other(m))
		}
	}
	m.queue = nil
}

// start begins a trial of two idle members.
func (s *stage) start(t *trial) {
	s.running++
	s.c.round = max(s.c.round, t.round)
	s.c.startTrial(s, t)
}

// end takes a trial that is over: all reports are in, it has expired, or it is void.
func (s *stage) end(t *trial) {
	s.running--
	t.conclude()
	s.enter(t)
	if t.kind == baseTrial {
		s.left--
		s.endBase(t)
	} else {
		s.endLater(t)
	}
}

// enter puts an ended trial where evidence is looked for.
func (s *stage) enter(t *trial) {
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
	s.ended = append(s.ended, t)
	if t.ends[0].meetings(t.ends[1]) == 0 {
		s.pairs++
	}
	for _, m := range t.ends {
		m.trials = append(m.trials, t)
	}
	if t.reach == pass {
		s.passed++
		for _, m := range t.ends {
			if r := m.recordOf(reach); !r.passed {
				r.passed = true
				s.alive++
			}
		}
	}
	s.tally(t)
}

// endBase goes on with both ends. The base rounds do not wait for a silent member again.
func (s *stage) endBase(t *trial) {
	for i, m := range t.ends {
		if t.class[i] == Silent {
			s.drop(m)
		}
		s.proceed(m)
	}
	s.barrier()
}

// barrier ends the base rounds with their last trial: the usual rates are known now.
func (s *stage) barrier() {
	if s.phase != inBase || s.left > 0 || s.running > 0 || s.complete() {
		return
	}
	s.phase = inRetests
	s.weighBase()
	s.many = 2*s.unsettled > s.size
	s.c.noteBase(s)
	s.pump()
}

// complete has all of a few nodes meet where some have failed with witnesses: that decides most. It reports whether
// there is anything to be tested.
func (s *stage) complete() bool {
	if s.roundRobin || len(s.members) > roundRobinTo || s.passed == len(s.ended) {
		return false
	}
	s.roundRobin = true
	for _, pairs := range circle(s.c.rng.Perm(len(s.members)), len(s.members)) {
		for _, p := range pairs {
			a, b := s.members[p[0]], s.members[p[1]]
			if a.idle() && b.idle() && a.silents+b.silents == 0 && a.meetings(b) == 0 {
				s.enqueue(a, b, s.base+1, true)
			}
		}
	}
	for _, m := range s.members {
		s.proceed(m)
	}
	return s.left > 0
}

// weighBase judges the base trials: the usual rates are known now.
func (s *stage) weighBase() {
	s.measure(s.ended)
	for _, t := range s.ended {
		s.judge(t)
	}
	s.findLeaves()
	s.reassess(s.members...)
}

// endLater judges a trial of the later phases.
func (s *stage) endLater(t *trial) {
	s.judge(t)
	if t.kind == pairTrial {
		s.repeated(t)
	}
	if s.phase == inMutual {
		s.endMutual(t)
		return
	}
	s.reassess(t.ends[0], t.ends[1])
	s.pump()
}

// repeated enters with the disputed trials of a pair that it was made again.
func (s *stage) repeated(t *trial) {
	for _, old := range t.ends[0].trials {
		if old != t && old.other(t.ends[0]) == t.ends[1] && old.again == nil {
			old.again = t
			if fs := s.pathCapabilities(old); len(fs) > 0 && fs[0] != reach {
				s.slowTwice += len(fs)
			}
		}
	}
}

// reassess updates members, and then the members whose failures they explain.
func (s *stage) reassess(ms ...*member) {
	ms = slices.Clone(ms)
	for len(ms) > 0 {
		m := ms[0]
		ms = ms[1:]
		s.assess(m)
		s.count(m)
		if known := m.known(); known != m.told {
			m.told = known
			ms = append(ms, m.failedWith()...)
		}
		s.place(m)
	}
}

// count keeps the number of members that are not settled.
func (s *stage) count(m *member) {
	unsettled := m.n.present() && (m.standing == pending || m.standing == open)
	switch {
	case unsettled && !m.counted:
		s.unsettled++
	case !unsettled && m.counted:
		s.unsettled--
	}
	m.counted = unsettled
}

// place puts m into the queues for its standing.
func (s *stage) place(m *member) {
	for _, t := range m.trials {
		if !t.listed && s.disputed(t) {
			t.listed = true
			s.disputes.push(t)
		}
	}
	if s.phase != inRetests || !m.idle() {
		return
	}
	switch {
	case m.standing == cleared && !m.pooled && m.certified(reach):
		m.pooled = true
		s.pool.push(m)
	case m.standing == open && !m.waiting:
		m.waiting = true
		s.waiting.push(m)
	}
}

// leave removes the member of a node that has gone; its running trial is void already.
func (s *stage) leave(m *member) {
	s.count(m)
	s.size--
	s.drop(m)
	s.barrier()
	s.pump()
}

// join takes a newcomer in: it is tested against certified nodes only, and quickly.
func (s *stage) join(n *node) {
	m := s.add(n)
	m.newcomer, m.want = true, newRounds
	m.standing = open
	s.count(m)
	s.place(m)
	s.pump()
}

// lane is the index of l, which is made if it is new.
func (s *stage) lane(l lane) int {
	if i := slices.Index(s.lanes, l); i >= 0 {
		return i
	}
	s.lanes = append(s.lanes, l)
	return len(s.lanes) - 1
}
