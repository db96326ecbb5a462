package serve

import (
	"encoding/json"
	"fmt"
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
			rep := hang.Report{ID: id(node), Epoch: r.epoch, Summary: s}
			if node == 0 {
				rep.Suspicions = r.suspects
			}
			_, err := tr.Post(t.Context(), "r", rep)
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

// facts are what a node knows of itself; one of them has a slower link.
func (r *rdzv) facts(node int) []hang.Fact {
	return []hang.Fact{{Kind: "link.speed", Of: "eth0\x1b", Value: 100 / float64(1+9*node)}}
}

// A node whose rank slows the job for a minute is compared with another one, once; nobody else acts on that.
func TestANodeThatSlowsTheJobIsCompared(t *testing.T) {
	for _, slow := range []hang.Action{hang.ActCheck, hang.ActDrain, ""} {
		synctest.Test(t, func(t *testing.T) {
			r := newRdzv(hang.ActReport, 2)
			r.spec.Slow = slow
			cfg := r.config()
			cfg.Drain = func(string, hang.Drain) error { return errNobody }
			h := New(cfg)
			defer h.Close()
			over, looks := Over(caller{h.Handler()}), map[int]*hang.RankLooks{}
			for times := 0; times < 12 && len(r.asks) == 0; times++ {
				r.paced(t, over, looks, 1, 3)
				synctest.Wait()
			}
			if slow != hang.ActCheck {
				require.Empty(t, r.asks)
				return
			}
			require.Len(t, r.asks, 1)
			ask := <-r.asks
			require.Equal(t, hang.Ask{Seq: ask.Seq, Judge: ask.Judge, Epoch: r.epoch, What: hang.AskFacts, Nodes: []int{1, 0}},
				ask)
			for node := range 2 {
				_, err := over.Post(t.Context(), "r",
					hang.Report{ID: id(node), Epoch: r.epoch, Ask: ask.Seq, Facts: r.facts(node)})
				require.NoError(t, err)
			}
			synctest.Wait()
			require.Len(t, r.notes, 2)
			require.Equal(t, job.Note{Event: job.EventSlowChecked, Node: "n1",
				Text: "rank 3 (node 1 n1): eth0  runs at 10 Gb/s, 100 at node 0 n0"}, r.notes[1], "no terminal acts on it")
			p, err := over.Picture(t.Context(), "r", false)
			require.NoError(t, err)
			require.Contains(t, p.Slowed[0].Line(), "% of every step; eth0  runs at 10 Gb/s")
			require.Equal(t, hang.StateIdle, p.State, "nothing hangs")
			r.paced(t, over, looks, 60, 3)
			require.Empty(t, r.asks)
			require.Len(t, r.notes, 2)
		})
	}
}

// With SlowLink each of the two gets a test of its own that the other one does not, with the same key.
func TestLinksOfSlowNodesAreTested(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRdzv(hang.ActReport, 2)
		r.spec.Slow, r.spec.SlowLink = hang.ActCheck, true
		h := New(r.config())
		defer h.Close()
		over, looks := Over(caller{h.Handler()}), map[int]*hang.RankLooks{}
		for len(r.asks) == 0 {
			r.paced(t, over, looks, 1, 3)
			synctest.Wait()
		}
		require.True(t, (<-r.asks).Listen)
		answer := func(node int, facts []hang.Fact, end string) {
			rep := hang.Report{ID: id(node), Epoch: r.epoch, Ask: 1, Facts: facts, End: json.RawMessage(end)}
			_, err := over.Post(t.Context(), "r", rep)
			require.NoError(t, err)
		}
		for node := range 2 {
			answer(node, r.facts(node), fmt.Sprintf(`{"node":%d}`, node))
		}
		synctest.Wait()
		require.Len(t, r.asks, 2)
		first, second := <-r.asks, <-r.asks
		require.Equal(t, []string{"n1", "n0"}, []string{first.To, second.To})
		require.JSONEq(t, `{"node":0}`, string(first.Link.Peer))
		require.JSONEq(t, `{"node":1}`, string(second.Link.Peer))
		require.NotEqual(t, first.Link.Serve, second.Link.Serve)
		require.Equal(t, first.Link.Key, second.Link.Key)
		require.GreaterOrEqual(t, len(first.Link.Key), 32)
		require.Equal(t, first.Seq+1, second.Seq)
		for node := range 2 {
			answer(node, []hang.Fact{{Kind: "test.received", Of: "eth0", Value: 5 + float64(node)}}, "")
		}
		synctest.Wait()
		require.Regexp(t, "100 at node 0 n0; eth0 sends 5 Gb/s to node 0 n0, and gets 6$", r.notes[1].Text)
	})
	rep := hang.Report{End: make(json.RawMessage, maxEnd+1)}
	fit(&rep)
	require.Nil(t, rep.End, "no notice could carry it")
}

// While something is suspected, nodes are asked for nothing else.
func TestHangsComeFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRdzv(hang.ActReport, 2)
		r.spec.Slow = hang.ActCheck
		h := New(r.config())
		defer h.Close()
		looks := map[int]*hang.RankLooks{}
		r.paced(t, h, looks, 5, 3)
		require.Len(t, r.asks, 0)
		r.suspects = r.suspicion(0, 12*time.Second).Suspicions
		r.paced(t, h, looks, 4, 3)
		synctest.Wait()
		require.Equal(t, hang.AskEvidence, (<-r.asks).What)
		r.suspects = nil
		for len(r.asks) > 0 {
			require.NotEqual(t, hang.AskFacts, (<-r.asks).What)
		}
		r.paced(t, h, looks, 2, 3)
		synctest.Wait()
		require.Equal(t, hang.TellOver, (<-r.asks).What)
		require.Equal(t, hang.AskFacts, (<-r.asks).What)
	})
}

// What nobody has asked for is not kept, and a report has a bound.
func TestFactsOfStrangers(t *testing.T) {
	many := make([]hang.Fact, 3*maxFacts)
	many[0] = hang.Fact{Fault: string(make([]byte, 10*maxFault))}
	rep := hang.Report{Facts: many}
	fit(&rep)
	require.Len(t, rep.Facts, maxFacts)
	require.LessOrEqual(t, len(rep.Facts[0].Fault), maxFault)
}
