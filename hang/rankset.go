package hang

import (
	"slices"
	"sort"
	"strconv"
	"strings"
)

// RankRun are the ranks from First to Last.
type RankRun struct {
	First int `json:"first"`
	Last  int `json:"last"`
}

// RankSet is a set of ranks: ascending runs with a gap before each but the first. The zero value is empty.
type RankSet []RankRun

// RanksOf returns the set of these ranks, which may be in any order and repeated.
func RanksOf(ranks ...int) (s RankSet) {
	for _, r := range ranks {
		s.Add(r)
	}
	return s
}

// Add costs nothing worth mentioning where ranks are in ascending order.
func (s *RankSet) Add(rank int) {
	runs := *s
	if n := len(runs); n > 0 && rank >= runs[n-1].First {
		switch last := &runs[n-1]; {
		case rank <= last.Last:
			return
		case rank == last.Last+1:
			last.Last = rank
			return
		}
		*s = append(runs, RankRun{rank, rank})
		return
	}
	i := s.search(rank)
	if i < len(runs) && runs[i].First <= rank {
		return
	}
	*s = slices.Insert(runs, i, RankRun{rank, rank})
	s.join(i)
	s.join(i - 1)
}

// search finds the first run that ends at rank or after it.
func (s RankSet) search(rank int) int {
	return sort.Search(len(s), func(i int) bool { return s[i].Last >= rank })
}

// join makes one of the run i and the next, if there is no gap between them.
func (s *RankSet) join(i int) {
	runs := *s
	if i < 0 || i+1 >= len(runs) || runs[i].Last+1 != runs[i+1].First {
		return
	}
	runs[i].Last = runs[i+1].Last
	*s = slices.Delete(runs, i+1, i+2)
}

// Has reports whether rank is in the set.
func (s RankSet) Has(rank int) bool {
	i := s.search(rank)
	return i < len(s) && s[i].First <= rank
}

// Len is how many ranks there are.
func (s RankSet) Len() (n int) {
	for _, r := range s {
		n += r.Last - r.First + 1
	}
	return n
}

// Meets reports whether the sets have a rank in common. It is quick where o has few runs.
func (s RankSet) Meets(o RankSet) bool {
	return slices.ContainsFunc(o, func(r RankRun) bool {
		i := s.search(r.First)
		return i < len(s) && s[i].First <= r.Last
	})
}

// Without returns the ranks that are not in o.
func (s RankSet) Without(o RankSet) RankSet { return s.FirstWithout(o, len(s)+len(o)) }

// FirstWithout returns the first of the ranks that are not in o, with at most that many runs.
func (s RankSet) FirstWithout(o RankSet, runs int) (left RankSet) {
	k := 0
	for _, r := range s {
		for k < len(o) && o[k].Last < r.First {
			k++
		}
		first := r.First
		for i := k; i < len(o) && o[i].First <= r.Last; i++ {
			if first < o[i].First {
				left = append(left, RankRun{first, o[i].First - 1})
			}
			first = o[i].Last + 1
		}
		if first <= r.Last {
			left = append(left, RankRun{first, r.Last})
		}
		if len(left) >= runs {
			return left[:runs]
		}
	}
	return left
}

func (s RankSet) filter(keep func(rank int) bool) (kept RankSet) {
	for _, r := range s {
		for rank := r.First; rank <= r.Last; rank++ {
			if keep(rank) {
				kept.Add(rank)
			}
		}
	}
	return kept
}

// String writes the set for people, as 0-3,8.
func (s RankSet) String() string { return string(s.append(nil, ',')) }

// Brief is String with at most that many runs, and how many ranks more there are.
func (s RankSet) Brief(runs int) string {
	if len(s) <= runs {
		return s.String()
	}
	return s[:runs].String() + " and " + strconv.Itoa(s[runs:].Len()) + " more"
}

// append writes the runs with a separator between them.
func (s RankSet) append(b []byte, sep byte) []byte {
	for i, r := range s {
		if i > 0 {
			b = append(b, sep)
		}
		b = strconv.AppendInt(b, int64(r.First), 10)
		if r.Last > r.First {
			b = append(b, '-')
			b = strconv.AppendInt(b, int64(r.Last), 10)
		}
	}
	return b
}

// Ranks are all ranks of the world.
func (w World) Ranks() (s RankSet) {
	for _, n := range w.Nodes {
		for r := range n.Slots {
			s.Add(n.RankBase + r)
		}
	}
	return s
}

// Working is how many nodes have workers.
func (w World) Working() (n int) {
	for i := range w.Nodes {
		n += min(w.Nodes[i].Slots, 1)
	}
	return n
}

// NodeOf returns the node that a rank belongs to, with its group rank; -1 if it belongs to none.
func (w World) NodeOf(rank int) (WorldNode, int) {
	for i, n := range w.Nodes {
		if rank >= n.RankBase && rank < n.RankBase+n.Slots {
			return n, i
		}
	}
	return WorldNode{}, -1
}

// stateNames are the names in /proc/PID/status, each behind its letter.
var stateNames = [...]string{
	"Rrunning", "Ssleeping", "Ddisk sleep", "Tstopped", "ttracing stop", "Zzombie", "Xdead", "Iidle", "Pparked",
}

// StateName writes a state of a process as /proc/PID/status does: S (sleeping).
func StateName(state byte) string {
	if state == 0 {
		return "gone"
	}
	for _, name := range stateNames {
		if name[0] == state {
			return name[:1] + " (" + name[1:] + ")"
		}
	}
	return strings.ToValidUTF8(string(rune(state)), "?")
}
