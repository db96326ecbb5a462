package hang

import (
	"cmp"
	"fmt"
	"iter"
	"slices"
	"time"

	"dlrover-run/hang/rankset"
)

// Judge compares the ranks of a world with each other, and names the ranks that the others wait for. The evidence may
// be in any order, and may lack ranks: these are "no data". Kind is KindNone if nothing hangs, or if there is no
// result.
//
// Verdict.Age is from the pages, 0 without; an Incident knows more. A verdict is not yet confirmed: for that it takes a
// second look. The samples of that look are added to the evidence.
func Judge(w World, ev iter.Seq[Evidence], store []StoreWait) Verdict {
	a := newAnalysis(w, ev, store)
	if a.members.any(func(m *member) bool { return m.moved }) { // such a rank does not hang, and neither do its waiters
		return Verdict{NoData: a.noData.String()}
	}
	for _, rule := range []func() *Verdict{
		a.byCollectives, a.byStore, a.byStacks, a.byOperation, a.byCircle, a.byNetwork, a.byPeers, a.byUnknown,
		a.byThemselves,
	} {
		if v := rule(); v != nil {
			v.NoData = a.noData.String()
			v.unseen(w.Elsewhere)
			v.Line = line(*v)
			return *v
		}
	}
	return Verdict{NoData: a.noData.String()}
}

// analysis is the state of one call of Judge.
type analysis struct {
	members members         // by rank, one for each rank with evidence
	groups  []*processGroup // with at least two members, in a fixed order
	noData  rankset.Set
	search  *waitSearch // from all waiting ranks
	store   []StoreWait
	blame   blamer
}

func newAnalysis(w World, ev iter.Seq[Evidence], store []StoreWait) *analysis {
	a := &analysis{store: store}
	known, read := rankset.Set{}, readings{}
	for e := range ev {
		if m := classify(&e, read); m.class != classUnknown {
			a.members = append(a.members, m)
		}
	}
	slices.SortStableFunc(a.members, func(a, b *member) int { return a.rank - b.rank })
	a.members = slices.CompactFunc(a.members, func(a, b *member) bool { return a.rank == b.rank })
	for _, m := range a.members {
		known.Add(m.rank)
	}
	world := w.Ranks()
	a.noData = world.Without(known)
	a.groups = groupsOf(a.members, world)
	a.search = a.members.follow(true)
	a.blame = blamer{w, limits{p99: a.members.p99(), early: a.members.early(), outside: a.members.outside()}}
	return a
}

// byCollectives compares the sequence numbers: some have entered a collective that others have not.
func (a *analysis) byCollectives() *Verdict {
	h := a.search
	if len(h.culprits) == 0 {
		h = a.members.follow(false)
	}
	if len(h.culprits) == 0 {
		return nil
	}
	culprits := a.blame.limits.urgent(h.culprits)
	v := a.blame.on(culprits, h.waiters, h.group)
	switch {
	case len(a.noData) > 0:
		v.doubt("nothing is known of ranks " + a.noData.Brief(8))
	case !h.waiters.any((*member).seemsToWait):
		v.doubt("nobody is seen to wait")
	case v.Kind == KindBusy:
		v.doubt("it may be at work")
	}
	return v
}

// byStacks uses the stacks where numbers are no help: a rank that does nothing while others wait is the culprit.
func (a *analysis) byStacks() *Verdict {
	waiters := a.members.all(func(m *member) bool { return m.class == classWaiting && !m.wait.store })
	culprits := a.members.all(func(m *member) bool { return m.halted() || m.class == classIdle && !m.asyncWait() })
	if len(culprits) == 0 {
		culprits = a.members.all(func(m *member) bool { return m.class == classBusy })
	}
	if len(waiters) == 0 || len(culprits) == 0 {
		return nil
	}
	v := a.blame.on(a.blame.limits.urgent(culprits), waiters, nil)
	a.doubtStacks(v, culprits, waiters)
	if v.Kind == KindBusy && len(culprits) >= len(waiters) {
		v.Tell = v.Deadline // those that only seem to be at work may wait for their devices
	}
	return v
}

// doubtStacks notes why a verdict by stacks alone may be wrong.
func (a *analysis) doubtStacks(v *Verdict, culprits, waiters members) {
	idle := func(m *member) bool { return !m.halted() && m.maybe }
	abreast := func(m *member) bool { return !m.halted() && len(m.in) > 0 }
	switch {
	case len(a.noData) > 0:
		v.doubt("nothing is known of ranks " + a.noData.Brief(8))
	case culprits.any(abreast):
		v.doubt("it has entered every collective that others have")
	case v.Kind == KindBusy:
		v.doubt("it may be at work")
	case len(culprits) >= len(waiters):
		v.doubt("it is not in the minority")
	case culprits.any(idle):
		v.doubt("it may wait for something that its stack does not show")
	case !waiters.any(func(m *member) bool { return m.page != nil || !m.spinsOnDevice() }):
		v.doubt("the others may be at work on their devices")
	}
}

// byOperation finds ranks that are in different collectives, although these have the same number.
func (a *analysis) byOperation() *Verdict {
	for _, g := range a.meetings() {
		if v := a.mismatch(g); v != nil {
			return v
		}
	}
	return nil
}

// meetings are groups with all members waiting at the same place, and for no member of another group. Without pages
// that is the world. If some are waited for, only their groups matter. The group that was entered last is first.
func (a *analysis) meetings() []*processGroup {
	meets := func(m *member) bool { return m.class == classWaiting && !m.wait.store && !m.wait.p2p }
	if len(a.groups) == 0 && len(a.members) > 1 && len(a.members.all(meets)) == len(a.members) {
		return []*processGroup{{members: a.members, unknown: a.noData}}
	}
	stuck := a.search.stuck
	gs := slices.DeleteFunc(slices.Clone(a.groups), func(g *processGroup) bool {
		strange := g.members.any(func(m *member) bool { return !meets(m) || m.blocking() != nil })
		missed := stuck.any(func(m *member) bool { return slices.Contains(m.in, g) })
		return len(g.late) > 0 || strange || len(stuck) > 0 && !missed
	})
	slices.SortStableFunc(gs, func(a, b *processGroup) int {
		return cmp.Or(cmp.Compare(a.age(), b.age()), cmp.Compare(len(b.members), len(a.members)))
	})
	return gs
}

// mismatch sorts the members of a group by their operations: those that are in another one than most are suspected.
func (a *analysis) mismatch(g *processGroup) *Verdict {
	ops := map[string]members{}
	for _, m := range g.members {
		if op := m.operation(g); op != "" {
			ops[op] = append(ops[op], m)
		}
	}
	if len(ops) < 2 {
		return nil
	}
	var most members
	for _, op := range sortedKeys(ops) {
		if len(ops[op]) > len(most) {
			most = ops[op]
		}
	}
	others := slices.DeleteFunc(slices.Clone(g.members), func(m *member) bool {
		op := m.operation(g)
		return op == "" || slices.Contains(ops[op], most[0])
	})
	v := a.blame.on(others, most, g)
	v.Kind = KindMismatch
	a.doubtMismatch(v, g, len(most))
	v.Certain = v.Confidence == High && len(ops["backward"]) == 0 // which is of several collectives
	return v
}

// doubtMismatch notes why most of a group, so many, may not be right.
func (a *analysis) doubtMismatch(v *Verdict, g *processGroup, most int) {
	switch {
	case most*2 <= len(g.members):
		v.doubt("no collective has the majority")
	case len(g.unknown) > 0:
		v.doubt("nothing is known of ranks " + g.unknown.Brief(8))
	case a.members.outside():
		v.doubt("without pages nobody knows whether these are at the same place")
	case g.Backend == "nccl" && !g.recorded():
		v.doubt("operations on devices may be waited for later")
	}
}

// byCircle finds groups that wait for each other.
func (a *analysis) byCircle() *Verdict {
	h := a.search
	if len(h.circle) < 2 {
		return nil
	}
	v := a.blame.on(h.circle, h.waiters, nil)
	v.Kind, v.Waiting, v.In = KindDeadlock, "", ""
	v.Deadline = max(v.Deadline, a.blame.limits.comm())
	v.doubt("who is wrong cannot be told from a circle")
	return v
}

// byNetwork: all members of a group are in the same collective, and it does not end. If that is true of several
// groups and none waits for another, all of them are meant.
func (a *analysis) byNetwork() *Verdict {
	gs := a.meetings()
	if len(gs) == 0 {
		return nil
	}
	g, waiters := gs[0], gs[0].members
	if together := a.together(gs); len(together) > len(waiters) {
		g, waiters = nil, together
	}
	v := a.blame.on(nil, waiters, g)
	v.Kind = KindComm
	v.Deadline = max(v.Tell, a.blame.limits.comm())
	if a.members.outside() {
		v.Tell, v.Deadline = outsideTell, outsideComm
		v.doubt("without pages nobody knows whether they are at the same place")
	}
	if len(gs[0].unknown) > 0 {
		a.blame.silent(v, gs[0].unknown)
	}
	return v
}

// byPeers: all wait, and some of them for one other rank, which numbers do not show.
func (a *analysis) byPeers() *Verdict {
	peers := a.members.all(func(m *member) bool { return m.class == classWaiting && m.wait.p2p })
	others := a.members.all(func(m *member) bool { return m.class == classWaiting && !m.wait.p2p && !m.wait.store })
	if len(peers) == 0 || len(peers)+len(others) < len(a.members) {
		return nil
	}
	if len(a.noData) > 0 {
		v := a.blame.on(nil, a.members, nil)
		a.blame.silent(v, a.noData)
		return v
	}
	v := a.blame.on(peers, others, nil)
	v.Kind = KindDeadlock
	if len(others) > 0 {
		v.Kind = KindMismatch
	}
	v.Deadline = max(v.Deadline, a.blame.limits.comm())
	v.doubt("for which ranks they wait is not known")
	return v
}

// sameTime is how far apart collectives of groups may have begun that stopped together.
const sameTime = 2 * time.Second

// together are the members of groups that stopped at the same time as the first.
func (a *analysis) together(gs []*processGroup) members {
	in := map[*member]bool{}
	for _, g := range gs {
		if g.age()-gs[0].age() <= sameTime && g.age() > 0 {
			for _, m := range g.members {
				in[m] = true
			}
		}
	}
	return a.members.all(func(m *member) bool { return in[m] })
}

// byUnknown names the ranks that others wait for, and that wait for something unknown.
func (a *analysis) byUnknown() *Verdict {
	h := a.search
	if len(h.stuck) == 0 {
		return nil
	}
	v := a.blame.on(h.stuck, h.waiters, nil)
	v.Deadline = max(v.Deadline, a.blame.limits.comm())
	if h.stuck.any(func(m *member) bool { return !m.inOwnKernel() }) {
		v.doubt("it waits for something that is not known")
	}
	return v
}

// byThemselves looks at ranks without waiters: with pages it is known that they have made progress once.
func (a *analysis) byThemselves() *Verdict {
	if a.members.any(func(m *member) bool { return m.class == classWaiting }) {
		return nil
	}
	alone := a.members.all(func(m *member) bool {
		return m.page != nil && m.page.progress() > 0 && (m.class == classIdle || m.halted() && m.class != classEnded)
	})
	if len(alone) == 0 {
		return nil
	}
	ended := a.members.all(func(m *member) bool { return m.class == classEnded })
	v := a.blame.on(alone, nil, nil)
	v.Kind = KindAlone
	v.Deadline = max(v.Deadline, phaseMin)
	if len(ended) == 0 || len(ended)+len(alone) < len(a.members) {
		v.Tell = v.Deadline
	}
	v.doubt("nobody waits for it")
	return v
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
