package hang

import (
	"cmp"
	"maps"
	"slices"
	"strconv"

	"dlrover-run/hang/rankset"
)

// blamer makes verdicts on ranks of a world.
type blamer struct {
	world  World
	limits limits
}

// on begins a verdict on the culprits; g is the group in which the others wait for them, nil if unknown.
func (b blamer) on(culprits, waiters members, g *processGroup) *Verdict {
	v := &Verdict{Kind: kindOf(culprits), Confidence: High, Age: slices.Concat(culprits, waiters).age()}
	t := both(b.limits.base())
	for _, m := range culprits {
		t = t.longest(b.limits.terms(m))
		v.Phase = cmp.Or(v.Phase, m.phase)
		v.Suspects = append(v.Suspects, suspect(m))
	}
	v.Tell, v.Deadline = t.tell, t.deadline
	if culprits.any((*member).wakes) {
		v.doubt("it looks for something that may come from outside of the job")
	}
	v.Waiting = waiters.ranks(culprits).String()
	v.In, v.Group = g.place(waiters)
	return v
}

// kindOf is the kind that all culprits have in common.
func kindOf(culprits members) Kind {
	kinds := map[class]Kind{classStopped: KindStopped, classBlocked: KindBlocked, classBusy: KindBusy}
	if len(culprits) == 0 || culprits.any(func(m *member) bool { return m.class != culprits[0].class }) {
		return KindBehind
	}
	return cmp.Or(kinds[culprits[0].class], KindBehind)
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

// silent replaces a verdict on a network by one on ranks that the others may wait for, and that have no data:
// their node may be lost, which the rendezvous finds out meanwhile.
func (b blamer) silent(v *Verdict, ranks rankset.Set) {
	for i, n := range b.world.Nodes {
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

func suspect(m *member) Suspect {
	return Suspect{
		Rank: m.rank, Node: m.node, GroupRank: m.groupRank, PID: m.pid, Doing: m.doing(), Where: m.where,
		Exception: m.error, Phase: m.phase,
	}
}

// place names the operation that most waiters for g are in, as all_reduce #246, and the name of g unless all are in
// it. Nil is an unknown group.
func (g *processGroup) place(waiters members) (in, group string) {
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
