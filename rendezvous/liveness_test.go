package rendezvous

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A loss is dated by the last sign of life, and by its news where the node was there until then.
func TestWhenANodeWentAway(t *testing.T) {
	for name, c := range map[string]struct {
		away func(*sim)
		ago  time.Duration
	}{
		"its connection broke": {func(s *sim) { s.vanish("b"); s.pass(BrokenGrace) }, BrokenGrace},
		"silent":               {func(s *sim) { s.must(Detach{ID: "b"}); s.pass(SilentGrace) }, SilentGrace},
		"replaced while it was connected": {func(s *sim) {
			s.pass(time.Hour)
			s.joinNode(Node{ID: "b2", Name: "b", Rank: 1, Generation: 2, Slots: 2})
		}, 0},
		"left without a request": {func(s *sim) {
			s.must(Detach{ID: "b"})
			s.pass(time.Second)
			s.must(Leave{ID: "b"})
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, Params{Min: 1, Max: 2})
			s.joinNode(Node{ID: "a", Name: "a", Rank: 0, Generation: 1, Slots: 2})
			s.joinNode(Node{ID: "b", Name: "b", Rank: 1, Generation: 1, Slots: 2})
			s.obey()
			c.away(s)
			losses := s.r.Evidence().Losses
			require.Len(t, losses, 1)
			require.Equal(t, "b", losses[0].Node)
			require.Equal(t, c.ago, s.now.Sub(losses[0].At))
		})
	}
}

// Who has stopped its workers as told and goes away then did not make them fail.
func TestOnlyWhoOwesAStopMayHaveDied(t *testing.T) {
	s := world(t, Params{Min: 1, Max: 2}, "a", "b")
	s.fail("a", Permanent)
	s.obey()
	s.ordered(OrderBar, "b")
	s.must(Detach{ID: "b", Broken: true})
	s.pass(AttributionWindow)
	require.Equal(t, Failed, s.r.Evidence().Outcome)
	require.Contains(t, s.r.Evidence().Cause.Text, "a failed")
}
