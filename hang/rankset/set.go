// Package rankset has sets of ranks, as runs of them, and their text such as 0-3,8.
package rankset

import (
	"slices"
	"sort"
	"strconv"
)

// Run are the ranks from First to Last.
type Run struct {
	First int `json:"first"`
	Last  int `json:"last"`
}

// Set is a set of ranks: ascending runs with a gap before each but the first. The zero value is empty.
type Set []Run

// Of returns the set of these ranks, which may be in any order and repeated.
func Of(ranks ...int) (s Set) {
	for _, r := range ranks {
		s.Add(r)
	}
	return s
}

// Add costs nothing worth mentioning where ranks are in ascending order.
func (s *Set) Add(rank int) {
	runs := *s
	if n := len(runs); n == 0 || rank > runs[n-1].Last {
		s.addRun(Run{rank, rank})
		return
	}
	i := s.search(rank)
	if runs[i].First <= rank {
		return
	}
	*s = slices.Insert(runs, i, Run{rank, rank})
	s.join(i)
	s.join(i - 1)
}

// search finds the first run that ends at rank or after it.
func (s Set) search(rank int) int {
	return sort.Search(len(s), func(i int) bool { return s[i].Last >= rank })
}

// join makes one of the run i and the next, if there is no gap between them.
func (s *Set) join(i int) {
	runs := *s
	if i < 0 || i+1 >= len(runs) || runs[i].Last+1 != runs[i+1].First {
		return
	}
	runs[i].Last = runs[i+1].Last
	*s = slices.Delete(runs, i+1, i+2)
}

// Has reports whether rank is in the set.
func (s Set) Has(rank int) bool {
	i := s.search(rank)
	return i < len(s) && s[i].First <= rank
}

// Len is how many ranks there are.
func (s Set) Len() (n int) {
	for _, r := range s {
		n += r.Last - r.First + 1
	}
	return n
}

// Meets reports whether the sets have a rank in common. It is quick where o has few runs.
func (s Set) Meets(o Set) bool {
	return slices.ContainsFunc(o, func(r Run) bool {
		i := s.search(r.First)
		return i < len(s) && s[i].First <= r.Last
	})
}

// Without returns the ranks that are not in o.
func (s Set) Without(o Set) Set { return s.FirstWithout(o, len(s)+len(o)) }

// FirstWithout returns the first of the ranks that are not in o, with at most that many runs.
func (s Set) FirstWithout(o Set, runs int) (left Set) {
	k := 0
	for _, r := range s {
		for k < len(o) && o[k].Last < r.First {
			k++
		}
		first := r.First
		for i := k; i < len(o) && o[i].First <= r.Last; i++ {
			if first < o[i].First {
				left = append(left, Run{first, o[i].First - 1})
			}
			first = o[i].Last + 1
		}
		if first <= r.Last {
			left = append(left, Run{first, r.Last})
		}
		if len(left) >= runs {
			return left[:runs]
		}
	}
	return left
}

// Filter returns the ranks that keep is true for.
func (s Set) Filter(keep func(rank int) bool) (kept Set) {
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
func (s Set) String() string { return string(s.Append(nil, ',')) }

// Brief is String with at most that many runs, and how many ranks more there are.
func (s Set) Brief(runs int) string {
	if len(s) <= runs {
		return s.String()
	}
	return s[:runs].String() + " and " + strconv.Itoa(s[runs:].Len()) + " more"
}

// Append writes the runs with a separator between them.
func (s Set) Append(b []byte, sep byte) []byte {
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
