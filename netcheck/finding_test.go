package netcheck

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestALossySenderIsLeftOut(t *testing.T) {
	for _, n := range []int{4, 12} {
		s := newSim(1, n)
		s.nodes[2].loss = 0.01
		s.run()
		s.states(t, map[int]State{2: StateFaulty})
		v := s.nodes[2].verdict
		require.Equal(t, "net.loss", v.Kind)
		require.True(t, v.Excluded)
		require.Contains(t, v.Reason, "eth0 sends with 0.01 of the segments lost, at most 0.005 is right")
		require.Equal(t, "retransmissions", v.Findings[0].Metric)
		require.Equal(t, Fatal, v.Findings[0].Severity)
	}
}

func TestWhereAllLoseNobodyIsBlamed(t *testing.T) {
	s := newSim(1, 12)
	for _, x := range s.nodes {
		x.loss = 0.01
	}
	s.run()
	s.states(t, nil)
	require.Contains(t, s.nodes[0].verdict.Findings[0].Text, "eth0 sends 0.01 of the segments again")
}

func TestALittleLossIsTold(t *testing.T) {
	s := newSim(1, 12)
	s.nodes[2].loss = 0.002
	s.nodes[3].loss = 0.0005
	s.run()
	s.states(t, nil)
	require.Len(t, s.nodes[2].verdict.Findings, 1)
	require.Equal(t, Warn, s.nodes[2].verdict.Findings[0].Severity)
	require.Empty(t, s.nodes[3].verdict.Findings)
}

func TestFewSegmentsSayNothingAboutLoss(t *testing.T) {
	s := newSim(1, 12)
	s.nodes[2].got = func(r *Result, _ *simNode) { r.Flows[0].Segments, r.Flows[0].Retrans = minSegments-1, 0.5 }
	s.run()
	s.states(t, nil)
	require.Empty(t, s.nodes[2].verdict.Findings)
}

func TestALatencyIsTold(t *testing.T) {
	s := newSim(1, 12)
	slow := func(r *Result, _ *simNode) { r.Flows[0].P50 = 300 }
	s.nodes[2].sent, s.nodes[2].got = slow, slow
	s.run()
	s.states(t, nil)
	require.Len(t, s.nodes[2].verdict.Findings, 1)
	require.Equal(t, "eth0 answers after 300 us, the median is 50", s.nodes[2].verdict.Findings[0].Text)
	require.Empty(t, s.nodes[3].verdict.Findings)
}

func TestASlowBestIsTold(t *testing.T) {
	s := newSim(1, 12)
	s.nodes[2].rx = 0.79
	s.noise = 0.005
	s.run()
	s.states(t, nil)
	require.Len(t, s.nodes[2].verdict.Findings, 1)
	x := s.nodes[2].verdict.Findings[0]
	require.Equal(t, Warn, x.Severity)
	require.Equal(t, "rx", x.Direction)
	require.Equal(t, "net.rx", x.Kind)
	require.InDelta(t, 790, x.Value, 15)
	require.InDelta(t, 850, x.Threshold, 15)
}

func TestACPUThatIsTheLimitIsNoEvidence(t *testing.T) {
	s := newSim(1, 12)
	s.nodes[2].tx, s.nodes[2].rx = 0.3, 0.3
	s.nodes[2].got = func(r *Result, _ *simNode) { r.Flows[0].CPUBound = true }
	s.run()
	for i, x := range s.nodes {
		require.Equal(t, StateOK, x.verdict.State, i)
		require.Empty(t, x.verdict.Findings, i)
	}
	require.Less(t, s.took(), 10*time.Second)
}

func TestWhereAllAreLimitedByCPUTheyAreCompared(t *testing.T) {
	s := newSim(1, 12)
	for _, x := range s.nodes {
		x.got = func(r *Result, _ *simNode) { r.Flows[0].CPUBound = true }
	}
	s.run()
	s.states(t, nil)
	require.InDelta(t, 1000, s.check.Picture().Median, 50)
}

// twoRails gives all nodes a second interface, and RDMA on the first one.
func twoRails(s *sim) {
	for _, x := range s.nodes {
		x.node.NICs = append(x.node.NICs, NIC{Name: "eth1", Mbps: 1000, MTU: 1500})
		x.got = func(r *Result, _ *simNode) {
			rdma, second := r.Flows[0], r.Flows[0]
			rdma.Kind, rdma.Mbps = "rdma", 5*rdma.Mbps
			second.Rail = 1
			r.Flows = append(r.Flows, second, rdma)
		}
	}
}

func TestARailIsNamed(t *testing.T) {
	for _, n := range []int{4, 12} {
		s := newSim(1, n)
		twoRails(s)
		s.nodes[2].sent = func(r *Result, _ *simNode) { r.Flows[1].Mbps /= 2 }
		s.run()
		s.states(t, map[int]State{2: StateSlow})
		require.Equal(t, "eth1", s.nodes[2].verdict.Findings[0].Entity)
		require.Equal(t, "net.tx", s.nodes[2].verdict.Kind)
		rails := map[int]bool{}
		for _, p := range s.check.Picture().Pairs {
			rails[p.Rail] = true
		}
		require.Equal(t, map[int]bool{0: true, 1: true}, rails)
	}
}

func TestTheTopologyNamesLeaves(t *testing.T) {
	for what, label := range map[string]func(*sim){
		"topology": func(s *sim) {
			s.check.cfg.Topology = func(n Node) string { return map[bool]string{true: "a", false: "b"}[s.byID[n.ID].i < 8] }
		},
		"switch": func(s *sim) {
			for i, x := range s.nodes {
				x.node.Switch, x.node.Domain = map[bool]string{true: "a", false: "b"}[i < 8], "all"
			}
		},
		"domain": func(s *sim) {
			for i, x := range s.nodes {
				x.node.Domain = map[bool]string{true: "a", false: "b"}[i < 8]
			}
		},
	} {
		s := newSim(1, 64)
		label(s)
		s.badPath = func(a, b int) bool { return (a < 8) != (b < 8) }
		s.run()
		for i, x := range s.nodes {
			if i < 8 {
				require.Equal(t, StateLeaf, x.verdict.State, what)
				require.True(t, x.verdict.Excluded, "a world with both parts cannot work")
				require.True(t, x.verdict.Again)
				require.Contains(t, x.verdict.Reason, "leaf a is cut off")
			} else {
				require.Equal(t, StateOK, x.verdict.State, what)
			}
		}
	}
}

func TestWhatDiffersFromMostIsTold(t *testing.T) {
	s := newSim(1, 5)
	s.nodes[1].node.NICs[0].Mbps = 100
	s.nodes[2].node.NICs[0].MTU = 9000
	s.nodes[3].node.NICs[0].Mbps = 0 // unknown
	for i, cpu := range []int{33, 6400, 6400, 6400, 0} {
		s.nodes[i].node.CPU = cpu
	}
	s.nodes[4].node.NICs = nil
	s.run()
	s.states(t, nil)
	require.Equal(t, "node CPU time is 33 % of a CPU, most other nodes have 6400", s.nodes[0].verdict.Findings[0].Text)
	require.Equal(t, "rail 0 speed is 100 Mbit/s, most other nodes have 1000", s.nodes[1].verdict.Findings[0].Text)
	require.Equal(t, "rail 0 MTU is 9000 bytes, most other nodes have 1500", s.nodes[2].verdict.Findings[0].Text)
	require.Empty(t, s.nodes[3].verdict.Findings)
	require.Equal(t, "node interfaces is 0, most other nodes have 1", s.nodes[4].verdict.Findings[0].Text)
	require.Equal(t, Warn, s.nodes[4].verdict.Findings[0].Severity)
}

func TestOfTwoNodesNobodyDiffers(t *testing.T) {
	s := newSim(1, 2)
	s.nodes[1].node.NICs[0].Mbps = 100
	s.nodes[1].node.GPUs = 8
	s.run()
	s.states(t, nil)
	require.Empty(t, s.nodes[1].verdict.Findings)
}

func TestStrangersAndRepeatedReportsAreDropped(t *testing.T) {
	s := newSim(1, 4)
	s.begin()
	for range 12 {
		s.step()
	}
	for _, ev := range []Event{Report{"nobody", Result{}}, Ready{ID: "nobody"}, Gone{"nobody"},
		Report{"n0", Result{Test: "old", Class: Failed}}, Ready{ID: "n0", Test: "old"}} {
		s.give(ev)
	}
	s.drain()
	s.states(t, nil)
	before := s.check.Picture()
	for _, ev := range []Event{Report{"n0", Result{}}, Ready{ID: "n0"}, Tick{}, Gone{"n1"}} {
		require.Empty(t, s.check.Step(s.now, ev))
	}
	require.Equal(t, before, s.check.Picture())
}

// The end that dials cannot have measured before it was told to dial, and each end reports once.
func TestEarlyAndSecondReportsAreDropped(t *testing.T) {
	s := newSim(1, 4)
	s.early = false
	s.began = func(test string, _, b int) {
		s.at(simLatency/2, Report{s.nodes[b].id, Result{Test: test, Class: Failed}})
	}
	for _, x := range s.nodes {
		x.got = func(r *Result, y *simNode) {
			t := s.check.roster.byID[y.id].test
			if other := t.ends[1].n.ID; other != y.id { // it has reported already
				took := 3 * time.Second
				if t.quick {
					took = 1200 * time.Millisecond
				}
				s.at(took, Report{other, Result{Test: r.Test, Class: Failed}})
			}
		}
	}
	s.run()
	s.states(t, nil)
	require.NotEmpty(t, s.check.Picture().Pairs)
	for _, p := range s.check.Picture().Pairs {
		require.Equal(t, OK, p.Class)
	}
}

func TestALossyPathIsNamed(t *testing.T) {
	s := newSim(1, 6)
	s.nodes[5].sent = func(r *Result, y *simNode) {
		if y.i == 2 {
			r.Flows[0].Retrans = 0.02
		}
	}
	s.run()
	s.states(t, map[int]State{2: StatePath, 5: StatePath})
	require.Contains(t, s.nodes[2].verdict.Reason, "a path is not: node2 > node5: 0.02 of the segments lost")
}

func TestWhatReaches(t *testing.T) {
	for _, v := range []Verdict{{State: StateOK}, {State: StateSlow}, {State: StatePath, Partners: 1}} {
		require.True(t, v.Reaches(), v)
	}
	for _, v := range []Verdict{{}, {State: StatePath}, {State: StateFaulty, Partners: 3}, {State: StateNotTested},
		{State: StateUnreachable}, {State: StateIsland}, {State: StateLeaf}, {State: StateUndecided}} {
		require.False(t, v.Reaches(), v)
	}
}

// A report is refused if a figure is beyond its bound, so every figure has one.
func TestEveryFigureHasABound(t *testing.T) {
	f := Flow{Segments: 5, Retrans: 6, P50: 7, MTU: 8}
	most := map[float64]float64{}
	for _, b := range f.Bounds() {
		require.NotEmpty(t, b.Name)
		most[b.Value] = b.Most
	}
	require.Equal(t, map[float64]float64{5: 1e12, 6: 1, 7: 1e12, 8: 1e12}, most)
}

func TestAnAliasIsNoID(t *testing.T) {
	require.Equal(t, Alias("a"), Alias("a"))
	require.NotEqual(t, Alias("a"), Alias("b"))
	require.Len(t, Alias("a"), 24)
}

func TestTimeDoesNotGoBack(t *testing.T) {
	c := New(Config{Spec: simSpec()})
	c.Step(simBegin, Expect{IDs: []string{"a"}})
	require.Equal(t, simBegin.Add(gatherQuiet), c.Next())
	c.Step(simBegin.Add(time.Second), Arrive{Node{ID: "b"}})
	c.Step(simBegin, Arrive{Node{ID: "c"}})
	require.Equal(t, simBegin.Add(time.Second+gatherQuiet), c.Next())
	c.Step(simBegin.Add(9*time.Second), Arrive{Node{ID: "d"}})
	require.Equal(t, simBegin.Add(gatherMost), c.Next())
}

func TestNothingIsToBeDoneBeforeTheFirstEvent(t *testing.T) {
	c := New(Config{Spec: simSpec()})
	require.True(t, c.Next().IsZero())
	require.Empty(t, c.Step(simBegin, Tick{}))
	require.Equal(t, "no check yet", c.Picture().Summary)
	require.Equal(t, "idle", c.Picture().Phase)
}

func TestMedians(t *testing.T) {
	require.Zero(t, median([]float64{}))
	require.Equal(t, 3., median([]float64{9, 1, 3}))
	require.Equal(t, 2.5, median([]float64{9, 1, 3, 2}))
}

func TestVerdictsOfStagesAddUp(t *testing.T) {
	path := Verdict{State: StatePath, Kind: "net.both", Reason: "a path", Confidence: 0.9, Paired: true,
		Findings: []Finding{{Text: "1"}}}
	both := path.and(Verdict{State: StateOK, Findings: []Finding{{Text: "2"}}})
	require.Equal(t, StatePath, both.State)
	require.Equal(t, "a path", both.Reason)
	require.True(t, both.Paired)
	require.Len(t, both.Findings, 2)
	require.Equal(t, StateFaulty, path.and(Verdict{State: StateFaulty}).State)
	untested := Verdict{State: StateNotTested, Reason: unpaired}
	for before, partners := range map[State]int{StateOK: 3, StatePath: 1, StateFaulty: 2} {
		v := Verdict{State: before, Partners: partners}.and(untested)
		require.Equal(t, Verdict{State: before, Partners: partners}, v, "a later phase without a test takes nothing away")
	}
}
