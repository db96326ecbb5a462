package slow

import (
	"cmp"
	"slices"

	"dlrover-run/hang"
	"dlrover-run/hang/rankset"
	"dlrover-run/internal/stable"
)

const (
	maxFound = 16
	patience = 2 // windows without a finding, after which it is over
)

// judge compares the ranks by the last two windows, and notes what has changed.
func (j *Judge) judge() (changes []Change) {
	all, groups := j.workers()
	if len(groups) == 0 {
		return nil
	}
	orders := make(map[uint64]order, len(groups))
	for id, ps := range groups {
		orders[id] = compare(ps, j.least, j.orders[id])
	}
	j.orders, j.pace = orders, pace(all)
	by := map[int][]*worker{}
	for _, w := range culprits(all) {
		by[w.groupRank] = append(by[w.groupRank], w)
	}
	for i := range j.found {
		f := &j.found[i]
		ws := by[f.GroupRank]
		delete(by, f.GroupRank)
		if len(ws) == 0 {
			if slices.ContainsFunc(all, func(w *worker) bool { return w.groupRank == f.GroupRank && len(w.places) > 0 }) {
				f.missed++
			}
			continue
		}
		was := *f
		*f = j.finding(all, ws)
		f.Since, f.Checked, f.examined = was.Since, was.Checked, was.examined
	}
	changes = j.over()
	for _, ws := range by {
		if len(j.found) < maxFound {
			f := j.finding(all, ws)
			j.found = append(j.found, f)
			changes = append(changes, Change{Slowed: f.Slowed})
		}
	}
	stable.Sort(j.found, func(a, b finding) int { return cmp.Compare(a.GroupRank, b.GroupRank) })
	return changes
}

// pace is how many steps the median rank has made in a second.
func pace(all []*worker) float64 {
	var each []float64
	for _, w := range all {
		each = append(each, 1000*float64(w.looks.Steps)/max(float64(w.looks.Watched), 1))
	}
	slices.Sort(each)
	return each[len(each)/2]
}

// over takes back what has not been found any more.
func (j *Judge) over() (changes []Change) {
	j.found = slices.DeleteFunc(j.found, func(f finding) bool {
		if f.missed < patience {
			return false
		}
		changes = append(changes, Change{Slowed: f.Slowed, Over: true})
		return true
	})
	return changes
}

// least is the share of a step from which a rank counts as late.
func (j *Judge) least(w *worker) float64 {
	for i := range j.found {
		if j.found[i].ranks.Has(w.rank) {
			return stillShare
		}
	}
	return leastShare
}

// finding is that about the culprits of one node.
func (j *Judge) finding(all, culprits []*worker) finding {
	var ranks rankset.Set
	worst := culprits[0]
	for _, w := range culprits {
		ranks.Add(w.rank)
		if w.worst.share > worst.worst.share {
			worst = w
		}
	}
	n := j.world.Nodes[worst.groupRank]
	return finding{ranks: ranks, Slowed: hang.Slowed{GroupRank: worst.groupRank, Node: n.Name, Ranks: ranks.String(),
		All: len(culprits) == n.Slots, Share: min(worst.worst.share, 0.99), Doing: doing(all, worst), Since: j.before}}
}

// doing is what a late rank does meanwhile: what fills half of the time for which it is late, beyond the others. Those
// that wait may be as busy, where they ask their device all the time.
func doing(all []*worker, w *worker) string {
	beyond := func(of func(*worker) float64) bool {
		return of(w)-median(all, of) >= w.worst.share/2
	}
	switch {
	case beyond((*worker).data):
		return "loading data"
	case beyond((*worker).busy), w.busy() >= 0.5:
		return computing
	}
	return "asleep"
}
