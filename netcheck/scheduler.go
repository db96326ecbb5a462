package netcheck

// Bounds of the work for one event.
const (
	scanPool     = 32 // members of the pool that are looked at for one that a suspect has not met
	scanWaiting  = 8  // suspects that are looked at in vain
	companionsTo = 32 // up to so many nodes suspects are tested with each other when none has passed
	allMeetTo    = 12 // up to so many nodes every pair is tested then: two of them may be fine
	onCall       = 16 // certified nodes that are kept while anything is open, and one for every open node
)

// scheduler chooses partners for the members that need more tests.
type scheduler struct {
	judge     *judge
	torch     bool
	pool      fifo[*member] // certified and clear
	waiting   fifo[*member] // open
	disputes  fifo[*test]
	unsettled int     // members that are pending or open
	running   int     // tests
	started   []*test // not taken yet
}

// start begins a test of two idle members.
func (q *scheduler) start(t *test) {
	q.running++
	for _, m := range t.ends {
		m.n.test = t
	}
	q.started = append(q.started, t)
}

// count keeps the number of members that are not settled.
func (q *scheduler) count(m *member) {
	unsettled := m.n.present() && (m.standing == pending || m.standing == open)
	switch {
	case unsettled && !m.counted:
		q.unsettled++
	case !unsettled && m.counted:
		q.unsettled--
	}
	m.counted = unsettled
}

// place puts m into the queues for its standing.
func (q *scheduler) place(m *member, retests bool) {
	for _, t := range m.tests {
		if !t.listed && q.judge.disputed(t) {
			t.listed = true
			q.disputes.push(t)
		}
	}
	if !retests || !m.idle() {
		return
	}
	switch {
	case m.standing == cleared && !m.pooled && m.certified(reach):
		m.pooled = true
		q.pool.push(m)
	case m.standing == open && !m.waiting:
		q.wait(m)
	}
}

func (q *scheduler) wait(m *member) {
	m.waiting = true
	q.waiting.push(m)
}

// startPairs repeats disputed tests.
func (q *scheduler) startPairs() {
	for range min(q.disputes.len(), scanPool) {
		t := q.disputes.pop()
		a, b := t.ends[0], t.ends[1]
		switch {
		case a.released || b.released || !a.n.present() || !b.n.present():
		case !q.judge.disputed(t):
			t.listed = false
		case a.idle() && b.idle():
			q.retest(pairTest, a, b, t)
		default:
			q.disputes.push(t)
		}
	}
}

// startRetests gives suspects partners that they have not met.
func (q *scheduler) startRetests() {
	for vain := 0; q.waiting.len() > 0 && vain < scanWaiting; {
		m := q.waiting.pop()
		m.waiting = false
		if !m.idle() || m.standing != open {
			continue
		}
		if p := q.mate(m); p != nil {
			m.mated, p.mated = true, true
			q.retest(mutualTest, m, p, nil)
			continue
		}
		if p := q.partner(m); p != nil {
			q.retest(retest, m, p, nil)
			continue
		}
		q.wait(m)
		vain++
	}
}

// mate returns another waiting member that is slow with all, as m is. Nodes behind one slow switch are slow with all
// others, but not with each other. One such test of a node is enough.
func (q *scheduler) mate(m *member) *member {
	if !q.judge.seemsSlow(m) {
		return nil
	}
	for range min(q.waiting.len(), scanPool) {
		p := q.waiting.pop()
		if q.judge.seemsSlow(p) && p.idle() && p.standing == open && m.meetings(p) == 0 {
			p.waiting = false
			return p
		}
		q.waiting.push(p)
	}
	return nil
}

// partner takes a member out of the pool that m has not met, or returns nil.
func (q *scheduler) partner(m *member) *member {
	for range min(q.pool.len(), scanPool) {
		p := q.pool.pop()
		fits := p.idle() && p.standing == cleared
		if p.pooled = fits && m.meetings(p) > 0; p.pooled {
			q.pool.push(p)
		} else if fits {
			return p
		}
	}
	return nil
}

// retest starts a test for m's sake, or of a disputed one's pair.
func (q *scheduler) retest(kind testKind, m, p *member, old *test) {
	t := newTest(q.torch, kind, m, p)
	if kind == retest {
		m.retests++
	}
	t.round = q.judge.base + m.retests
	t.quick = !q.torch && (m.newcomer || !q.judge.doubtsRate(m) && old == nil)
	q.start(t)
}

// fallback is for few nodes, and when hardly any is fine. Suspects meet earlier partners again, or certified nodes that
// wait themselves. If no node is certified, they meet each other. It reports whether it has started a test.
func (q *scheduler) fallback() bool {
	judges := q.judges()
	for range q.waiting.len() {
		m := q.waiting.pop()
		m.waiting = false
		if !m.idle() || m.standing != open {
			continue
		}
		p := leastMet(m, judges)
		if p == nil {
			p = q.companion(m)
		}
		if p == nil {
			q.wait(m) // it is the first one next time
			continue
		}
		q.retest(retest, m, p, nil)
	}
	return q.running > 0
}

// judges are idle certified members, those that are clear first.
func (q *scheduler) judges() (judges []*member) {
	if q.waiting.len() == 0 {
		return nil
	}
	for _, wanted := range []bool{true, false} {
		for _, m := range q.judge.members {
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
func (q *scheduler) companion(m *member) *member {
	most := 2 * hopeless
	if q.judge.roundRobin {
		most = hopeless
	}
	size := q.judge.size
	if size > companionsTo || q.judge.history.passed > 0 || m.newcomer || m.retests >= most && size > allMeetTo {
		return nil
	}
	var others []*member
	for _, p := range q.judge.members {
		if p.idle() && !p.newcomer && p.standing == open && (m.retests < most || m.meetings(p) == 0) {
			others = append(others, p)
		}
	}
	return leastMet(m, others)
}

// spare takes clear members out of the pool that no test will need.
func (q *scheduler) spare() (free []*member) {
	for q.pool.len() > onCall+q.unsettled {
		m := q.pool.pop()
		m.pooled = false
		if m.idle() && m.standing == cleared {
			m.released = true
			free = append(free, m)
		}
	}
	return free
}

// pairUp starts as many tests as possible. A node that has passed once meets another such node, which is likely to
// pass again. Nodes that have passed often enough meet unknown nodes. The rest meet each other.
func (q *scheduler) pairUp(blamed []*member, round int) {
	var byPasses [mutualPasses + 1][]*member
	for _, m := range blamed {
		k := min(m.mutual, mutualPasses)
		byPasses[k] = append(byPasses[k], m)
	}
	never, once, often := byPasses[0], byPasses[1], byPasses[mutualPasses]
	q.match(once, once, round)
	q.match(once, often, round)
	q.match(often, never, round)
	q.match(once, never, round)
	q.match(never, never, round)
}

// match starts tests between idle members of two groups that have not met.
func (q *scheduler) match(group, others []*member, round int) {
	for _, m := range group {
		if p := stranger(m, others); p != nil {
			t := newTest(q.torch, mutualTest, m, p)
			t.round, t.quick = round, !q.torch
			q.start(t)
		}
	}
}
