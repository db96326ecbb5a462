package hang

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"time"
)

// terms are the times of the report and of the action, counted from the last progress.
type terms struct{ tell, deadline time.Duration }

func both(d time.Duration) terms { return terms{d, d} }

// terms returns the deadlines of a rank that others wait for. An idle rank is reported at once. A rank that may be at
// work gets the time limit of its phase. A rank that only spins is reported, but no action follows. Incident decides
// when anything is done.
func (c *analysis) terms(m *member) terms {
	quick := both(c.base())
	if c.early() {
		quick = both(max(quick.deadline, limitFirst))
	} else if c.young(m) && !m.halted() {
		quick = both(max(quick.deadline, youngDeadline))
	}
	long := both(max(quick.deadline, phaseMin, 3*m.longest))
	switch {
	case m.debugged:
		return terms{quick.tell, debugMax}
	case m.class == classStopped || m.class == classEnded:
		return quick
	case m.phase.lasting():
		return long
	case m.wakes():
		return terms{quick.tell, long.deadline}
	case m.class != classBusy:
		return quick
	case m.spin && (m.phase == PhaseUnknown || m.phase == PhaseTrain || m.phase == PhaseEnd):
		return terms{quick.tell, max(quick.deadline, spinMax)}
	}
	return long
}

// base is the earliest time for a verdict: the normal limit, and then a second look.
func (c *analysis) base() time.Duration {
	p99 := c.p99()
	return adaptive(p99) + max(10*time.Second, 2*p99)
}

// adaptive is the time without progress that makes a worker suspicious, if 99 of 100 steps take no longer than p99.
func adaptive(p99 time.Duration) time.Duration { return min(max(4*p99, limitMin), limitMax) }

// p99 of the steps of the slowest rank.
func (c *analysis) p99() (worst time.Duration) {
	for _, m := range c.members {
		worst = max(worst, m.p99)
	}
	return worst
}

// gaps are the times between events.
func gaps(events []time.Duration) []time.Duration {
	if len(events) < 2 {
		return nil
	}
	gs := make([]time.Duration, len(events)-1)
	for i := range gs {
		gs[i] = events[i+1] - events[i]
	}
	return gs
}

// quantile99 is 0 of nothing.
func quantile99(ds []time.Duration) time.Duration {
	if len(ds) == 0 {
		return 0
	}
	sorted := slices.Clone(ds)
	slices.Sort(sorted)
	return sorted[(len(sorted)*99+99)/100-1]
}

// early reports whether there are pages, and no rank has done the first steps. A job without an optimizer has no
// steps; after the time limit of first steps its state counts as normal.
func (c *analysis) early() bool {
	if c.outside() {
		return false
	}
	return !slices.ContainsFunc(c.members, func(m *member) bool {
		return m.page != nil && (m.page.Steps >= firstSteps || m.at-m.page.Created >= limitFirst)
	})
}

// clockTick is the unit of Worker.Start.
const clockTick = 10 * time.Millisecond

// young reports whether there are no pages, and the process was started a short time ago.
func (c *analysis) young(m *member) bool {
	return c.outside() && m.at-time.Duration(m.start)*clockTick < youngAge
}

// longest is how long a phase has lasted before.
func (p *Page) longest(phase Phase) (longest time.Duration) {
	for _, s := range p.Spans {
		if s.Phase == phase {
			longest = max(longest, s.To-s.From)
		}
	}
	return longest
}

// urgent are the culprits that need no more time than others: a rank that sleeps is not excused by another one that
// writes a checkpoint.
func (c *analysis) urgent(culprits []*member) []*member {
	soon := slices.DeleteFunc(slices.Clone(culprits), func(m *member) bool { return c.terms(m).tell >= phaseMin })
	if len(soon) == 0 {
		return culprits
	}
	return soon
}

// blame begins a verdict on the culprits; g is the group in which the others wait for them, nil if unknown.
func (c *analysis) blame(culprits, waiters []*member, g *processGroup) *Verdict {
	v := &Verdict{Kind: kindOf(culprits), Confidence: High, Age: c.age(culprits, waiters)}
	t := both(c.base())
	for i, m := range culprits {
		if mine := c.terms(m); i == 0 {
			t = mine
		} else {
			t = terms{max(t.tell, mine.tell), max(t.deadline, mine.deadline)}
		}
		v.Phase = cmp.Or(v.Phase, m.phase)
		v.Suspects = append(v.Suspects, c.suspect(m))
	}
	v.Tell, v.Deadline = t.tell, t.deadline
	if slices.ContainsFunc(culprits, (*member).wakes) {
		v.doubt("it looks for something that may come from outside of the job")
	}
	v.Waiting = ranksOf(waiters, culprits).String()
	v.In, v.Group = c.place(waiters, g)
	return v
}

// kindOf is the kind that all culprits have in common.
func kindOf(culprits []*member) Kind {
	kinds := map[Kind]bool{}
	for _, m := range culprits {
		switch m.class {
		case classStopped:
			kinds[KindStopped] = true
		case classBlocked:
			kinds[KindBlocked] = true
		case classBusy:
			kinds[KindBusy] = true
		default:
			kinds[KindBehind] = true
		}
	}
	if len(kinds) == 1 {
		return sortedKeys(kinds)[0]
	}
	return KindBehind
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

// age is the time since the newest progress of any of these ranks. Each counts by the clock of its own node.
func (c *analysis) age(lists ...[]*member) time.Duration {
	age := time.Duration(0)
	for _, m := range slices.Concat(lists...) {
		if m.page == nil || m.page.progress() == 0 {
			continue
		}
		if a := m.at - m.page.progress(); age == 0 || a < age {
			age = max(a, 1)
		}
	}
	return age
}

// ranksOf are the ranks of members except the ranks of without.
func ranksOf(members, without []*member) (s RankSet) {
	out := map[*member]bool{}
	for _, m := range without {
		out[m] = true
	}
	for _, m := range members {
		if !out[m] {
			s.Add(m.rank)
		}
	}
	return s
}

// place names the operation that most waiters for g are in, as all_reduce #246, and the name of g unless all are in
// it.
func (c *analysis) place(waiters []*member, g *processGroup) (in, group string) {
	count := map[string]int{}
	for _, m := range waiters {
		if op := m.doingIn(g); op != "" && (g == nil || slices.Contains(g.members, m)) {
			count[op]++
		}
	}
	for _, op := range sortedKeys(count) {
		if count[op] > count[in] {
			in = op
		}
	}
	if g == nil {
		return in, ""
	}
	if g.top > 0 && g.top < shownSeq && in != "" {
		in += " #" + strconv.FormatUint(g.top, 10)
	}
	if !g.whole {
		group = cmp.Or(g.Desc, g.Name)
	}
	return in, group
}

// shownSeq bounds the numbers that mean something to people: gloo begins at a random one.
const shownSeq = 1 << 26

// doingIn is the operation that m is in.
func (m *member) doingIn(g *processGroup) string {
	if g != nil {
		if e := m.entry(g.Name); e != nil {
			return e.Op
		}
	}
	if m.wait.op == "" && m.class != classStopped {
		return "a collective"
	}
	return m.wait.op
}

func (c *analysis) suspect(m *member) Suspect {
	_, groupRank := c.world.NodeOf(m.rank)
	if groupRank < 0 {
		groupRank = m.groupRank
	}
	return Suspect{
		Rank: m.rank, Node: m.node, GroupRank: groupRank, PID: m.pid, Doing: m.doing(), Where: m.where,
		Exception: m.error, Phase: m.phase,
	}
}

// doing describes in a few words the work of a rank.
func (m *member) doing() string {
	switch m.class {
	case classEnded:
		return "ended"
	case classStopped:
		return "stopped"
	case classBlocked:
		return "blocked in the kernel"
	case classWaiting:
		return "waiting in " + m.wait.op
	case classBusy:
		return m.labour() + m.lock()
	}
	return m.rest() + m.lock()
}

func (m *member) labour() string {
	switch {
	case m.use.cpu >= busyCPU || m.eager:
		return "computing"
	case m.work == workNet:
		return "sending or receiving"
	case m.work == workChild && m.use.io < busyIO:
		return "waiting for a child at work"
	}
	return "reading or writing"
}

func (m *member) rest() string {
	if m.wakes() {
		return "polling"
	}
	return "asleep"
}

func (m *member) lock() string {
	if m.gil {
		return " with the interpreter locked"
	}
	return ""
}
