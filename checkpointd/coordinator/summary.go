package coordinator

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"dlrover-run/internal/stable"
	"dlrover-run/internal/text"
)

// agesEvent replaces the ages of the given ranks.
type agesEvent struct {
	Of   string `json:"of,omitempty"`
	Node int    `json:"node"`
	Ages []Age  `json:"ages"`
}

const maxTrouble = 512 // bytes

type age struct {
	Age
	node  int
	heard time.Time
}

func (a agesEvent) check() error {
	if a.Of != "" {
		if err := (seat{a.Of, a.Node}).check(); err != nil {
			return err
		}
	}
	for _, x := range a.Ages {
		if x.Rank < 0 || x.Rank >= maxShards {
			return fmt.Errorf("%w: rank %d: need 0 to %d", errBadRequest, x.Rank, maxShards-1)
		}
	}
	return nil
}

func (a agesEvent) step(st *state, now time.Time) ([]topic, error) {
	for _, x := range a.Ages {
		x.Trouble = text.Line(x.Trouble, maxTrouble)
		st.ages[x.Rank] = age{x, a.Node, now}
	}
	return nil, nil
}

// Summary is a run for the status page and for metrics.
type Summary struct {
	Saves []saveStatus `json:"saves"` // in order of steps; those that are over stay for a while
	Ages  []Age        `json:"ages"`  // in order of ranks
}

// saveStatus is one save in a Summary. Prepared and Placed count shards.
type saveStatus struct {
	Save
	Phase    Phase     `json:"phase"` // the last that is known to be reached by all it takes
	Prepared int       `json:"prepared"`
	Placed   int       `json:"placed"`
	Error    string    `json:"error,omitempty"`
	Heard    time.Time `json:"heard"` // when a node last reported it
}

// summary describes the run at present.
func (st *state) summary() Summary {
	sum := Summary{Saves: make([]saveStatus, 0, len(st.saves)), Ages: make([]Age, 0, len(st.ages))}
	for _, s := range st.saves {
		sum.Saves = append(sum.Saves, s.status())
	}
	stable.Sort(sum.Saves, func(a, b saveStatus) int {
		return cmp.Or(cmp.Compare(a.Step, b.Step), cmp.Compare(a.ID, b.ID))
	})
	for _, rank := range slices.Sorted(maps.Keys(st.ages)) {
		sum.Ages = append(sum.Ages, st.ages[rank].Age)
	}
	return sum
}

func (s *save) status() saveStatus {
	st := saveStatus{Save: s.Save, Prepared: len(s.entries), Placed: s.placed.n, Heard: s.heard}
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
