package coordinator

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"
)

// Aged replaces the ages of the given ranks.
type Aged struct {
	Node int   `json:"node"`
	Ages []Age `json:"ages"`
}

type age struct {
	Age
	node  int
	heard time.Time
}

func (a Aged) check() error {
	for _, x := range a.Ages {
		if x.Rank < 0 || x.Rank >= MaxShards {
			return fmt.Errorf("%w: rank %d: need 0 to %d", ErrBadRequest, x.Rank, MaxShards-1)
		}
	}
	return nil
}

func (a Aged) step(st *State, now time.Time) ([]Topic, error) {
	for _, x := range a.Ages {
		st.ages[x.Rank] = age{x, a.Node, now}
	}
	return nil, nil
}

// Summary is a run for the status page and for metrics.
type Summary struct {
	Saves []SaveStatus `json:"saves"` // in order of steps; those that are over stay for a while
	Ages  []Age        `json:"ages"`  // in order of ranks
}

// SaveStatus is one save in a Summary. Prepared and Placed count shards.
type SaveStatus struct {
	Save
	Phase    Phase     `json:"phase"` // the last that is known to be reached by all it takes
	Prepared int       `json:"prepared"`
	Placed   int       `json:"placed"`
	Error    string    `json:"error,omitempty"`
	Heard    time.Time `json:"heard"` // when a node last spoke of it
}

// Summary describes the run as it is.
func (st *State) Summary() Summary {
	sum := Summary{Saves: make([]SaveStatus, 0, len(st.saves)), Ages: make([]Age, 0, len(st.ages))}
	for _, s := range st.saves {
		sum.Saves = append(sum.Saves, s.status())
	}
	slices.SortFunc(sum.Saves, func(a, b SaveStatus) int {
		return cmp.Or(cmp.Compare(a.Step, b.Step), cmp.Compare(a.ID, b.ID))
	})
	for _, rank := range slices.Sorted(maps.Keys(st.ages)) {
		sum.Ages = append(sum.Ages, st.ages[rank].Age)
	}
	return sum
}

func (s *save) status() SaveStatus {
	st := SaveStatus{Save: s.Save, Prepared: len(s.entries), Placed: s.placed.n, Heard: s.heard}
	if len(s.failures) > 0 {
		st.Error = s.failure(ErrAborted).Error()
		if s.intent {
			st.Error = s.failure(ErrStalled).Error()
		}
	}
	switch {
	case s.published:
		st.Phase, st.Prepared, st.Placed = Published, s.Shards, s.Shards
	case s.aborted():
		st.Phase = Failed
	case s.placed.n == s.Shards:
		st.Phase = Placed
	case s.intent:
		st.Phase = Intent
	case s.allPrepared():
		st.Phase = Prepared
	}
	return st
}
