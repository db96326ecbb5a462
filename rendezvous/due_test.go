package rendezvous

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

// An event that a status announces happens at that time, and not before.
func TestDue(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(*sim)
		text string
		then func(*sim) bool
	}{
		{"too few nodes", func(s *sim) { s.join("a") }, "the run fails, unless enough nodes are there",
			func(s *sim) bool { return s.r.epoch.phase == finished }},
		{"last call", func(s *sim) { s.join("a", "b") }, "the workers start without further nodes",
			func(s *sim) bool { return s.r.epoch.phase == releasing }},
		{"silent node", func(s *sim) {
			s.join("a", "b", "c", "d")
			s.obey()
			s.must(Detach{ID: "c", Broken: true})
		}, "c counts as lost, unless it comes back", func(s *sim) bool { return s.r.members.nodes["c"] == nil }},
		{"growth", func(s *sim) {
			s.join("a", "b")
			s.pass(defaultLastCall)
			s.obey()
			s.join("c")
		}, "the workers are stopped, and start again with the nodes that have come",
			func(s *sim) bool { return s.r.epoch.phase != running }},
		{"deadline", func(s *sim) {
			s.p.Budget.Deadline = time.Hour
			s.join("a", "b", "c", "d")
			s.obey()
		}, "the run fails: the job has taken longer than 1h (--deadline)",
			func(s *sim) bool { return s.r.epoch.phase == finished }},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newSim(t, Params{Min: 2, Max: 4})
			c.do(s)
			due := s.r.Status().Due
			require.NotEmpty(t, due)
			require.Equal(t, c.text, due[0].Text)
			s.pass(due[0].At.Sub(s.now) - 1)
			require.False(t, c.then(s), "too early")
			s.pass(1)
			require.True(t, c.then(s))
		})
	}
}

func TestMissing(t *testing.T) {
	s := newSim(t, Params{Min: 3, Max: 3})
	s.join("a", "b", "c")
	s.obey()
	require.Empty(t, s.r.Status().Missing)
	s.must(Leave{ID: "b", Reason: "SIGKILL", Killed: true})
	missing := s.r.Status().Missing
	require.Len(t, missing, 1)
	require.Equal(t, "b", missing[0].Node)
	require.Equal(t, 1, missing[0].GroupRank)
	s.joinNode(Node{ID: "b2", Name: "b", Rank: -1, Slots: 1})
	require.Empty(t, s.r.Status().Missing, "it is back")
	require.Equal(t, job.CauseLoss, s.r.Status().Cause.Kind)
	s = newSim(t, Params{Min: 80, Max: 80}) // a rack of 72 is lost
	for i := range 80 {
		s.join(fmt.Sprint(i))
	}
	s.obey()
	for i := range 72 {
		s.must(Leave{ID: fmt.Sprint(i), Killed: true})
	}
	require.Len(t, s.r.Status().Missing, 72)
}

// Neither in a pause nor before the workers have stopped does time alone bring anything.
func TestNothingIsDue(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 4})
	s.join("a")
	s.must(Order{Kind: OrderPause})
	require.Empty(t, s.r.Status().Due)
	s = newSim(t, Params{Min: 2, Max: 2})
	s.join("a", "b")
	s.obey()
	s.must(Leave{ID: "b", Killed: true})
	require.NotZero(t, s.r.members.stopping)
	require.Empty(t, s.r.Status().Due, "a still stops, alone")
}
