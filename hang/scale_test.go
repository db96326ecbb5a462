package hang

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang/rankset"
)

// crowd is a large world in groups of three kinds: the whole, tensor groups of 8 and data groups across them.
func crowd(nodes, culprit int) *scene {
	s := &scene{}
	n := 8 * nodes
	st, seq := inBackward(), GroupState{}
	for r := range n {
		w := Worker{Rank: r, Local: r % 8, PID: 100 + r, Start: 5}
		e := Evidence{Worker: w, Node: "n", GroupRank: r / 8, Stacks: st}
		tensor := rankset.Of(r/8*8, r/8*8+1, r/8*8+2, r/8*8+3, r/8*8+4, r/8*8+5, r/8*8+6, r/8*8+7).String()
		data := make([]int, 0, nodes)
		for k := range nodes {
			data = append(data, 8*k+r%8)
		}
		e.Groups = []Group{{ID: 1, Ranks: rankset.Of(0, n-1).String()}, {ID: uint64(100 + r/8), Ranks: tensor},
			{ID: uint64(1_000_000 + r%8), Ranks: ""}}
		if r < 8 {
			e.Groups[2].Ranks = rankset.Of(data...).String()
		}
		e.Groups[0].Ranks = "0-" + rankset.Of(n-1).String()
		for i := range 3 {
			at := now0 + evenAge + time.Duration(2*i)*time.Second
			p := &Page{PID: w.PID, Start: 5, Created: 1, Heartbeat: at, Steps: 200, LastStep: now0 - time.Second}
			for _, g := range e.Groups {
				seq = GroupState{ID: g.ID, Seq: 50, Since: now0 - time.Second}
				p.Groups = append(p.Groups, seq)
			}
			if r == culprit {
				p.Groups[2].Seq--
			} else {
				p.Groups[1].Since = now0
			}
			e.Samples = append(e.Samples, Sample{Worker: w, At: at, Page: p, Proc: Proc{State: 'S', WChan: "futex_wait_queue"}})
		}
		s.ev = append(s.ev, e)
	}
	if culprit >= 0 {
		s.ev[culprit].Stacks = inLoader()
	}
	for k := range nodes {
		s.world.Nodes = append(s.world.Nodes, WorldNode{Name: "n", RankBase: 8 * k, Slots: 8})
	}
	return s
}

// A judge of 16,384 ranks is done in a moment.
func TestJudgeOfManyRanks(t *testing.T) {
	nodes := 2048
	if testing.Short() {
		nodes = 128
	}
	for _, culprit := range []int{-1, 8*nodes - 3} {
		s := crowd(nodes, culprit)
		begin := time.Now()
		v := s.judge()
		t.Logf("%d ranks: %s; %s", 8*nodes, time.Since(begin), v.Line)
		require.Less(t, time.Since(begin), 5*time.Second)
		if culprit >= 0 {
			require.Equal(t, KindBehind, v.Kind)
			require.Len(t, v.Suspects, 1)
			require.Equal(t, culprit, v.Suspects[0].Rank)
		} else {
			require.Equal(t, KindComm, v.Kind)
			require.Equal(t, s.world.Ranks().String(), v.Waiting)
		}
	}
}

func BenchmarkJudgeOf16384(b *testing.B) {
	s := crowd(2048, 5)
	for b.Loop() {
		s.judge()
	}
}
