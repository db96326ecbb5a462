package serve

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/internal/job"
)

// paced posts what two nodes see of their ranks, every 10 s: the late one is behind by 0.3 of a step.
func (r *rdzv) paced(t *testing.T, tr Transport, looks map[int]*hang.RankLooks, times, late int) {
	t.Helper()
	for range times {
		for node := range r.nodes {
			s := &hang.Summary{Steps: 1}
			for rank := 2 * node; rank < 2*node+2; rank++ {
				l := looks[rank]
				if l == nil {
					l = &hang.RankLooks{Rank: rank, Groups: []hang.GroupLooks{{ID: 1}}}
					looks[rank] = l
				}
				position := 0.1
				if rank == late {
					position = -0.2
				}
				const steps, unit = 100, 1 << 16
				l.Steps, l.Watched, l.Busy = l.Steps+steps, l.Watched+10_000, l.Busy+9_000
				g := &l.Groups[0]
				g.Begun, g.Steps = g.Begun+steps, g.Steps+steps
				g.Positions += uint64(steps * unit * (1 + position))
				g.Squares += uint64(steps * unit * (position*position + 0.01))
				s.Looks = append(s.Looks, *l)
				s.Looks[len(s.Looks)-1].Groups = []hang.GroupLooks{*g}
			}
			_, err := tr.Post(t.Context(), "r", hang.Report{ID: id(node), Epoch: r.epoch, Summary: s})
			require.NoError(t, err)
		}
		time.Sleep(10 * time.Second)
	}
}

func TestSlowRanksAreToldOfAndTakenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRdzv(hang.ActReport, 2)
		cfg, fewer := r.config(), []float64(nil)
		cfg.Slowed = func(_ string, e job.EpochID, n float64) {
			require.Equal(t, r.epoch, e)
			r.locked(func() { fewer = append(fewer, n) })
		}
		h := New(cfg)
		defer h.Close()
		over, looks := Over(caller{h.Handler()}), map[int]*hang.RankLooks{}
		slowed := func() []hang.Slowed {
			p, err := over.Picture(t.Context(), "r", false)
			require.NoError(t, err)
			return p.Slowed
		}
		r.paced(t, over, looks, 6, -1)
		require.Empty(t, slowed())
		synctest.Wait()
		require.Equal(t, []float64{0}, fewer, "once")

		r.paced(t, over, looks, 6, 3)
		found := slowed()
		require.Len(t, found, 1)
		require.Equal(t, "n1", found[0].Node)
		require.Regexp(t, `^rank 3 \(node 1 n1\) slows the job: 1\.4x since \S+, computing, 30 % of every step$`,
			found[0].Line())

		r.paced(t, over, looks, 12, -1)
		require.Empty(t, slowed())
		synctest.Wait()
		require.Len(t, r.notes, 2)
		require.Equal(t, job.EventSlowFound, r.notes[0].Event)
		require.Equal(t, "n1", r.notes[0].Node)
		require.Equal(t, job.EventSlowOver, r.notes[1].Event)
		require.Regexp(t, `^rank 3 \(node 1 n1\) slows the job no more`, r.notes[1].Text)
		require.InDelta(t, 10*0.3/0.7, slices.Max(fewer), 0.1, "of 10 steps in a second, which wait for 30 %")
		require.Zero(t, fewer[len(fewer)-1])

		r.paced(t, over, looks, 6, 0)
		require.NotEmpty(t, slowed())
		h.Ended("r", r.epoch)
		synctest.Wait()
		require.Empty(t, slowed(), "the workers are gone")
	})
}
