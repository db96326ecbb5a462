package rendezvous

import (
	"fmt"
	"math/rand"
	"slices"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"dlrover-run/internal/job"
)

// sim drives a Round as the shell and well-behaved launchers do.
type sim struct {
	t    rapid.TB
	r    *Round
	now  time.Time
	p    Params
	dirs map[string]Directive
	runs map[string]Directive // nodes whose workers run
	gone map[string]bool      // vanished: nobody there to obey

	can      []Ability               // of the nodes that join
	health   map[string]checkOutcome // what the checks of nodes say, by ID
	answered map[string]uint64       // the newest Check that a node has answered
	freed    []string                // those that were released last
	awaited  map[string]bool         // who was told to Check, has not answered, and was not released
	checked  map[string][]uint64     // the Checks that each node was told as a subject
	log      []Note
	opened   bool                 // the newest gate has opened without all answers
	worked   map[string]Directive // the newest epoch that had workers here
	ended    []EpochEvidence
}

func newSim(t rapid.TB, p Params) *sim {
	s := &sim{
		t: t, r: New(Config{Term: uint64(rand.Int63())}), now: time.Unix(1000, 0).UTC(), p: p, dirs: map[string]Directive{},
		runs: map[string]Directive{}, gone: map[string]bool{}, health: map[string]checkOutcome{},
		answered: map[string]uint64{}, checked: map[string][]uint64{}, awaited: map[string]bool{},
		worked: map[string]Directive{},
	}
	if p.Budget == (Budget{}) {
		s.p.Budget.BackoffMax = -1 // time does not go by between failures
	}
	return s
}

func (s *sim) step(ev Event) error {
	acts, err := s.r.Step(s.now, ev)
	switch e := ev.(type) {
	case Cleared:
		delete(s.awaited, e.ID)
	case Barred:
		delete(s.awaited, e.ID)
	}
	s.take(acts)
	return err
}

// take does what actions ask of the shell.
func (s *sim) take(acts []Action) {
	s.holdActions(acts)
	for _, a := range acts {
		if a.Directive != nil && !s.gone[a.Node] {
			s.dirs[a.Node] = *a.Directive
		}
	}
}

func (s *sim) member(id string) Member {
	m, _ := s.r.Member(id)
	return m
}

func (s *sim) must(ev Event) { s.t.Helper(); require.NoError(s.t, s.step(ev)) }

// join introduces nodes by name; the name is the ID, too.
func (s *sim) join(ids ...string) {
	s.t.Helper()
	for _, id := range ids {
		s.joinNode(Node{ID: id, Name: id, Rank: -1, Slots: 2, Can: s.can})
	}
}

func (s *sim) joinNode(n Node) {
	s.t.Helper()
	s.must(Join{Node: n, Params: s.p})
	s.must(Attach{ID: n.ID})
}

// obey lets every node do what it was told until nothing changes.
func (s *sim) obey() {
	s.t.Helper()
	for changed := true; changed; {
		changed = false
		for _, id := range sortedKeys(s.dirs) {
			changed = s.obeyOne(id) || changed
		}
	}
}

func (s *sim) obeyOne(id string) bool {
	s.t.Helper()
	d := s.dirs[id]
	if d.Leave != nil {
		delete(s.runs, id)
		delete(s.dirs, id)
		s.must(Leave{ID: id})
		return true
	}
	switch d.Kind {
	case job.Lead:
		s.must(Ready{ID: id, EpochID: d.EpochID, Addr: id, Port: 1})
	case job.Run:
		_, works := s.runs[id]
		if s.runs[id].Seq == d.Seq || !works && s.worked[id].EpochID == d.EpochID {
			return false // nobody starts an epoch twice
		}
		s.runs[id], s.worked[id] = d, d
	case job.Stop:
		delete(s.runs, id)
		n := Node{ID: id, Name: id, Rank: s.r.members.nodes[id].Rank, Slots: 2}
		s.must(Join{Node: n, Params: s.p, Stopped: d.EpochID})
	case job.Check:
		delete(s.runs, id)
		return s.answer(id)
	case job.Wait, job.Bar:
		delete(s.runs, id)
		return false
	case job.Done, job.Fail:
		delete(s.runs, id)
		return false
	default:
		return false
	}
	return true
}

func sortedKeys[V any](m map[string]V) []string {
	ks := make([]string, 0, len(m))
	for k := range m {
		ks = append(ks, k)
	}
	slices.Sort(ks)
	return ks
}

// pass lets time go by, with a Tick whenever the Round asks for one.
func (s *sim) pass(d time.Duration) {
	s.t.Helper()
	end := s.now.Add(d)
	for n := 0; ; n++ {
		require.Less(s.t, n, 1000, "the round asks for ticks without end")
		next := s.r.Next()
		if next.IsZero() || next.After(end) {
			break
		}
		if next.After(s.now) {
			s.now = next
		}
		s.must(Tick{})
	}
	s.now = end
	s.must(Tick{})
}

func (s *sim) vanish(ids ...string) { // kill -9 of launcher and workers
	for _, id := range ids {
		delete(s.runs, id)
		delete(s.dirs, id)
		s.gone[id] = true
		s.must(Detach{ID: id, Broken: true})
	}
}

func (s *sim) fail(id string, d Decision) {
	run := s.runs[id]
	s.must(Failing{
		ID: id, EpochID: run.EpochID, Decision: d,
		Failures: []job.Failure{{Rank: run.Place.RankBase, GroupRank: run.Place.GroupRank, Text: id + " failed", At: s.now}},
	})
}

func (s *sim) succeed(ids ...string) {
	for _, id := range ids {
		s.must(Success{ID: id, EpochID: s.runs[id].EpochID})
	}
}

// order lists the running nodes by group rank.
func (s *sim) order() string {
	names := make([]string, len(s.runs))
	for id, d := range s.runs {
		names[d.Place.GroupRank] = id
	}
	return strings.Join(names, " ")
}

func nodes(n int) []string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprintf("n%03d", i)
	}
	return ids
}
