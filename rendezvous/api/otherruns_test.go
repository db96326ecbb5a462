package api

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// Nodes that use two names for one job learn of each other, at once and in the error at the end.
func TestOtherRuns(t *testing.T) {
	pair := rendezvous.Params{Min: 2, Max: 2, JoinTimeout: time.Minute}
	for name, c := range map[string]struct {
		other rendezvous.Params
		more  string // a further node of the run x
		told  bool
	}{
		"one job by two names": {other: pair, told: true},
		"another size":         {other: rendezvous.Params{Min: 3, Max: 3, JoinTimeout: time.Minute}},
		"a run that is whole":  {other: pair, more: "c"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := NewHub(HubConfig{})
				defer h.Close()
				require.NoError(t, h.Join(t.Context(), "x", joinOf("a", pair)))
				require.NoError(t, h.Join(t.Context(), "y", joinOf("b", c.other)))
				if c.more != "" {
					require.NoError(t, h.Join(t.Context(), "x", joinOf(c.more, pair)))
				}
				n, err := h.Watch(t.Context(), "y", "b", Cursor{})
				require.NoError(t, err)
				ahead := time.Now()
				n, err = h.Watch(t.Context(), "y", "b", Cursor{Directive: n.Directive.Seq})
				if !c.told {
					require.ErrorIs(t, err, ErrNothingNew)
					return
				}
				require.NoError(t, err)
				require.Equal(t, otherRunsAfter, time.Since(ahead))
				require.Equal(t, job.Wait, n.Directive.Kind)
				require.Contains(t, n.Directive.Cause.Text, `nodes also wait in run "x" of this rendezvous`)
				hint := n.Directive.Seq
				for err = ErrNothingNew; err != nil; {
					n, err = h.Watch(t.Context(), "y", "b", Cursor{Directive: hint})
					require.Less(t, time.Since(ahead), 2*time.Minute)
				}
				require.Contains(t, n.Directive.Cause.Text, "1 nodes joined, need 2; nodes also wait in run \"x\"")
			})
		})
	}
}
