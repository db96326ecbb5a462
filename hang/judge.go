package hang

import (
	"cmp"
	"fmt"
	"iter"
	"slices"
	"time"
)

// Deadlines, counted from the last progress. Ranks that may be at work have the deadline of their phase.
const (
	limitMin   = 10 * time.Second
	limitMax   = 300 * time.Second
	limitFirst = 600 * time.Second // before the first steps

	namedByStore = 25 * time.Second // a rank that has not joined its process group, and does nothing
	phaseMin     = 600 * time.Second
	spinMax      = 300 * time.Second // a loop that may be an endless one
	commMin      = 60 * time.Second
	// Without pages it is unknown whether there was a first step. A young process may prepare something.
	youngAge      = 120 * time.Second
	youngDeadline = 90 * time.Second
	outsideComm   = 300 * time.Second
	outsideTell   = 60 * time.Second
	silentTell    = 60 * time.Second // the rendezvous gives up nodes sooner

	debugMax = 24 * time.Hour // a person may sit in a debugger for so long
)

// firstSteps is how many steps must be done before their times are of use.
const firstSteps = 3

// Judge compares the ranks of a world with each other, and names the ranks that the others wait for. The evidence may
// be in any order, and may lack ranks: these are "no data". Kind is KindNone if nothing hangs, or if there is no
// result.
//
// Verdict.Age is from the pages, 0 without; a caller that knows more sets it by Verdict.Aged. A verdict is not yet
// confirmed: for that it takes a second look. The samples of that look are added to the evidence.
func Judge(w World, ev iter.Seq[Evidence], store []StoreWait) Verdict {
	c := newAnalysis(w, ev, store)
	if c.anyMoved() {
		return Verdict{NoData: c.noData.String()}
	}
	for _, rule := range []func() *Verdict{
		c.byCollectives, c.byStore, c.byStacks, c.byOperation, c.byCircle, c.byNetwork, c.byPeers, c.byUnknown,
		c.byThemselves,
	} {
		if v := rule(); v != nil {
			v.NoData = c.noData.String()
			v.unseen(w.Elsewhere)
			v.Line = line(*v)
			return *v
		}
	}
	return Verdict{NoData: c.noData.String()}
}

// anyMoved reports progress of a rank: such a rank does not hang, and neither do its waiters.
func (c *analysis) anyMoved() bool {
	return slices.ContainsFunc(c.members, func(m *member) bool { return m.moved })
}

// byCollectives compares the sequence numbers: some have entered a collective that others have not.
func (c *analysis) byCollectives() *Verdict {
	h := c.follow(true)
	if len(h.culprits) == 0 {
		h = c.follow(false)
	}
	if len(h.culprits) == 0 {
		return nil
	}
	culprits := c.urgent(h.culprits)
	v := c.blame(culprits, h.waiters, h.group)
	switch {
	case len(c.noData) > 0:
		v.doubt("nothing is known of ranks " + c.noData.Brief(8))
	case !slices.ContainsFunc(h.waiters, (*member).seemsToWait):
		v.doubt("nobody is seen to wait")
	case v.Kind == KindBusy:
		v.doubt("it may be at work")
	}
	return v
}

// seemsToWait reports whether no sign contradicts a wait. A rank that computes in its own code may wait there for a
// device, as .item() does: the flight recorder knows a collective that has not ended.
func (m *member) seemsToWait() bool {
	return m.recorded() != "" || m.class == classWaiting || m.class == classIdle ||
		m.wait.op == "" && m.class == classBusy && !m.spin
}

// byStacks uses the stacks where numbers are no help: a rank that does nothing while others wait is the culprit.
func (c *analysis) byStacks() *Verdict {
	waiters := c.all(func(m *member) bool { return m.class == classWaiting && !m.wait.store })
	culprits := c.all(func(m *member) bool { return m.halted() || m.class == classIdle && !m.asyncWait(c) })
	if len(culprits) == 0 {
		culprits = c.all(func(m *member) bool { return m.class == classBusy })
	}
	if len(waiters) == 0 || len(culprits) == 0 {
		return nil
	}
	v := c.blame(c.urgent(culprits), waiters, nil)
	c.doubtStacks(v, culprits, waiters)
	if v.Confidence == Low && v.Kind == KindBusy && len(culprits) >= len(waiters) {
		v.Tell = v.Deadline // those that only seem to be at work may wait for their devices
	}
	return v
}

// asyncWait reports whether m has entered all collectives that others have, and rests where it might wait for them.
func (m *member) asyncWait(c *analysis) bool { return m.maybe && len(m.in) > 0 && !c.behind(m) }

// doubtStacks notes why a verdict by stacks alone may be wrong.
func (c *analysis) doubtStacks(v *Verdict, culprits, waiters []*member) {
	idle := func(m *member) bool { return !m.halted() && m.maybe }
	abreast := func(m *member) bool { return !m.halted() && len(m.in) > 0 }
	switch {
	case len(c.noData) > 0:
		v.doubt("nothing is known of ranks " + c.noData.Brief(8))
	case slices.ContainsFunc(culprits, abreast):
		v.doubt("it has entered every collective that others have")
	case v.Kind == KindBusy:
		v.doubt("it may be at work")
	case len(culprits) >= len(waiters):
		v.doubt("it is not in the minority")
	case slices.ContainsFunc(culprits, idle):
		v.doubt("it may wait for something that its stack does not show")
	case !slices.ContainsFunc(waiters, func(m *member) bool { return m.page != nil || !m.spinsOnDevice() }):
		v.doubt("the others may be at work on their devices")
	}
}

// all returns the members with a property.
func (c *analysis) all(is func(*member) bool) (ms []*member) {
	for _, m := range c.members {
		if is(m) {
			ms = append(ms, m)
		}
	}
	return ms
}

// byOperation finds ranks that are in different collectives, although these have the same number.
func (c *analysis) byOperation() *Verdict {
	for _, g := range c.meetings() {
		if v := c.mismatch(g); v != nil {
			return v
		}
	}
	return nil
}

// meetings are groups with all members waiting at the same place, and for no member of another group. Without pages
// that is the world. If some are waited for, only their groups matter. The group that was entered last is first.
func (c *analysis) meetings() []*processGroup {
	meets := func(m *member) bool { return m.class == classWaiting && !m.wait.store && !m.wait.p2p }
	if len(c.groups) == 0 && len(c.members) > 1 && len(c.all(meets)) == len(c.members) {
		return []*processGroup{{members: c.members, unknown: c.noData, whole: true}}
	}
	stuck := c.follow(true).stuck
	gs := slices.DeleteFunc(slices.Clone(c.groups), func(g *processGroup) bool {
		strange := slices.ContainsFunc(g.members, func(m *member) bool { return !meets(m) || c.blocking(m) != nil })
		missed := slices.ContainsFunc(stuck, func(m *member) bool { return slices.Contains(m.in, g) })
		return len(g.late) > 0 || strange || len(stuck) > 0 && !missed
	})
	slices.SortStableFunc(gs, func(a, b *processGroup) int {
		return cmp.Or(cmp.Compare(a.age(), b.age()), cmp.Compare(len(b.members), len(a.members)))
	})
	return gs
}

// age is the time since its first member has entered the newest collective.
func (g *processGroup) age() time.Duration {
	m := g.members[0]
	if m.page == nil {
		return 0
	}
	return m.at - m.page.since(g.ID)
}

// mismatch sorts the members of a group by their operations: those that are in another one than most are suspected.
func (c *analysis) mismatch(g *processGroup) *Verdict {
	ops := map[string][]*member{}
	for _, m := range g.members {
		if op := m.operation(g); op != "" {
			ops[op] = append(ops[op], m)
		}
	}
	if len(ops) < 2 {
		return nil
	}
	var most []*member
	for _, op := range sortedKeys(ops) {
		if len(ops[op]) > len(most) {
			most = ops[op]
		}
	}
	others := slices.DeleteFunc(slices.Clone(g.members), func(m *member) bool {
		op := m.operation(g)
		return op == "" || slices.Contains(ops[op], most[0])
	})
	v := c.blame(others, most, g)
	v.Kind = KindMismatch
	c.doubtMismatch(v, g, len(most))
	v.Certain = v.Confidence == High && len(ops["backward"]) == 0 // which is of several collectives
	return v
}

// doubtMismatch notes why most of a group, so many, may not be right.
func (c *analysis) doubtMismatch(v *Verdict, g *processGroup, most int) {
	switch {
	case most*2 <= len(g.members):
		v.doubt("no collective has the majority")
	case len(g.unknown) > 0:
		v.doubt("nothing is known of ranks " + g.unknown.Brief(8))
	case c.outside():
		v.doubt("without pages nobody knows whether these are at the same place")
	case g.Backend == "nccl" && !g.recorded():
		v.doubt("operations on devices may be waited for later")
	}
}

// operation is the operation of m, as far as it is comparable with others: by the flight recorder, or by name.
func (m *member) operation(g *processGroup) string {
	if e := m.entry(g.Name); e != nil {
		return e.Op
	}
	if m.wait.named && !m.wait.p2p || m.wait.op == "backward" {
		return m.wait.op
	}
	return ""
}

// entry is the oldest collective of a group that m has not completed, as the flight recorder has it.
func (m *member) entry(group string) *FlightEntry {
	if m.flight == nil {
		return nil
	}
	for i := range m.flight.Entries {
		if e := &m.flight.Entries[i]; e.Group == group && e.State != "completed" {
			return e
		}
	}
	return nil
}

// recorded reports whether the flight recorders of all members have an entry.
func (g *processGroup) recorded() bool {
	return !slices.ContainsFunc(g.members, func(m *member) bool { return m.entry(g.Name) == nil })
}

// byCircle finds groups that wait for each other.
func (c *analysis) byCircle() *Verdict {
	h := c.follow(true)
	if len(h.circle) < 2 {
		return nil
	}
	v := c.blame(h.circle, h.waiters, nil)
	v.Kind, v.Waiting, v.In = KindDeadlock, "", ""
	v.Deadline = max(v.Deadline, commMin, 8*c.p99())
	v.doubt("who is wrong cannot be told from a circle")
	return v
}

// byNetwork: all members of a group are in the same collective, and it does not end. If that is true of several
// groups and none waits for another, all of them are meant.
func (c *analysis) byNetwork() *Verdict {
	gs := c.meetings()
	if len(gs) == 0 {
		return nil
	}
	g, waiters := gs[0], gs[0].members
	if together := c.together(gs); len(together) > len(waiters) {
		g, waiters = nil, together
	}
	v := c.blame(nil, waiters, g)
	v.Kind = KindComm
	v.Deadline = max(v.Tell, commMin, 8*c.p99())
	if c.outside() {
		v.Tell, v.Deadline = outsideTell, outsideComm
		v.doubt("without pages nobody knows whether they are at the same place")
	}
	if len(gs[0].unknown) > 0 {
		c.blameSilent(v, gs[0].unknown)
	}
	return v
}

// blameSilent replaces a verdict on a network by one on ranks that the others may wait for, and that have no data:
// their node may be lost, which the rendezvous finds out meanwhile.
func (c *analysis) blameSilent(v *Verdict, ranks RankSet) {
	for i, n := range c.world.Nodes {
		for r := n.RankBase; r < n.RankBase+n.Slots; r++ {
			if ranks.Has(r) {
				v.Suspects = append(v.Suspects, Suspect{Rank: r, Node: n.Name, GroupRank: i, Doing: "silent"})
			}
		}
	}
	if len(v.Suspects) > 0 {
		v.Kind = KindBehind
	}
	v.Tell = max(v.Tell, silentTell)
	v.Deadline = max(v.Deadline, v.Tell)
	v.doubt("nothing is known of ranks " + ranks.Brief(8))
}

// byPeers: all wait, and some of them for one other rank, which numbers do not show.
func (c *analysis) byPeers() *Verdict {
	peers := c.all(func(m *member) bool { return m.class == classWaiting && m.wait.p2p })
	others := c.all(func(m *member) bool { return m.class == classWaiting && !m.wait.p2p && !m.wait.store })
	if len(peers) == 0 || len(peers)+len(others) < len(c.members) {
		return nil
	}
	if len(c.noData) > 0 {
		v := c.blame(nil, c.members, nil)
		c.blameSilent(v, c.noData)
		return v
	}
	v := c.blame(peers, others, nil)
	v.Kind = KindDeadlock
	if len(others) > 0 {
		v.Kind = KindMismatch
	}
	v.Deadline = max(v.Deadline, commMin, 8*c.p99())
	v.doubt("for which ranks they wait is not known")
	return v
}

// sameTime is how far apart collectives of groups may have begun that stopped together.
const sameTime = 2 * time.Second

// together are the members of groups that stopped at the same time as the first.
func (c *analysis) together(gs []*processGroup) []*member {
	in := map[*member]bool{}
	for _, g := range gs {
		if g.age()-gs[0].age() <= sameTime && g.age() > 0 {
			for _, m := range g.members {
				in[m] = true
			}
		}
	}
	return c.all(func(m *member) bool { return in[m] })
}

// byUnknown names the ranks that others wait for, and that wait for something unknown.
func (c *analysis) byUnknown() *Verdict {
	h := c.follow(true)
	if len(h.stuck) == 0 {
		return nil
	}
	v := c.blame(h.stuck, h.waiters, nil)
	v.Deadline = max(v.Deadline, commMin, 8*c.p99())
	if slices.ContainsFunc(h.stuck, func(m *member) bool { return !m.inOwnKernel() }) {
		v.doubt("it waits for something that is not known")
	}
	return v
}

// inOwnKernel reports whether it waits for its device, and no collective of it is under way there.
func (m *member) inOwnKernel() bool {
	return m.wait.op == onDevice && m.flight != nil &&
		!slices.ContainsFunc(m.flight.Entries, func(e FlightEntry) bool { return e.State != "completed" })
}

// byThemselves looks at ranks without waiters: with pages it is known that they have made progress once.
func (c *analysis) byThemselves() *Verdict {
	if slices.ContainsFunc(c.members, func(m *member) bool { return m.class == classWaiting }) {
		return nil
	}
	alone := c.all(func(m *member) bool {
		return m.page != nil && m.page.progress() > 0 && (m.class == classIdle || m.halted() && m.class != classEnded)
	})
	if len(alone) == 0 {
		return nil
	}
	ended := c.all(func(m *member) bool { return m.class == classEnded })
	v := c.blame(alone, nil, nil)
	v.Kind = KindAlone
	v.Deadline = max(v.Deadline, phaseMin)
	if len(ended) == 0 || len(ended)+len(alone) < len(c.members) {
		v.Tell = v.Deadline
	}
	v.doubt("nobody waits for it")
	return v
}

// outside reports whether no rank has a page.
func (c *analysis) outside() bool {
	return !slices.ContainsFunc(c.members, func(m *member) bool { return m.page != nil })
}

// unseen: so many ranks of the job are not in the world; the others may all wait for them.
func (v *Verdict) unseen(ranks int) {
	if ranks <= 0 {
		return
	}
	why := fmt.Sprintf("nothing is known of %d ranks elsewhere", ranks)
	if v.Confidence == Low {
		v.Doubt += ", and " + why
	}
	v.doubt(why)
	v.Elsewhere, v.Certain = ranks, false
}

// doubt lowers the confidence. The first reason counts.
func (v *Verdict) doubt(why string) {
	if v.Confidence != Low {
		v.Confidence, v.Doubt = Low, why
	}
}
