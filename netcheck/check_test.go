package netcheck

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

// full makes a sim of nodes with PyTorch, which takes a while to import.
func full(seed uint64, n int) *sim {
	s := newSim(seed, n)
	s.check.cfg.Spec.Level = LevelFull
	s.compute = 8 * time.Second
	for _, x := range s.nodes {
		x.node.Torch, x.node.GPUs = true, 8
	}
	return s
}

// states requires the verdicts of the sim's nodes: ok, except those that are named, and helpers that nobody has
// needed.
func (s *sim) states(t *testing.T, except map[int]State) {
	t.Helper()
	for i, x := range s.nodes {
		require.NotNil(t, x.verdict, "node %d is not decided", i)
		want, named := except[i]
		switch {
		case named:
		case i >= len(s.nodes)-s.helpers && x.verdict.State == StateNotTested:
			continue
		default:
			want = StateOK
		}
		require.Equal(t, want, x.verdict.State, "node %d: %+v", i, x.verdict)
	}
}

func TestHealthyNodesPassWithinTenSeconds(t *testing.T) {
	for _, n := range []int{2, 3, 4, 5, 6, 7, 16, 33, 100, 1000} {
		s := newSim(uint64(n), n)
		s.run()
		s.states(t, nil)
		require.Less(t, s.took(), 10*time.Second, n)
		for _, x := range s.nodes {
			require.True(t, x.verdict.Paired)
		}
		p := s.check.Picture()
		require.Equal(t, "idle", p.Phase)
		require.Len(t, p.Nodes, n)
		require.InDelta(t, 1000, p.Median, 60)
		require.InDelta(t, 750, p.Line, 45)
		require.Equal(t, []string{"check-began", "check-round", "check-ended"}, events(s.notes))
	}
}

// Nodes that listen before their tests are decided as others are, and most of their tests begin with both ends.
func TestNodesThatListenBeforeTheirTests(t *testing.T) {
	s := newSim(2, 100)
	s.early = true
	s.nodes[7].dead, s.nodes[50].fails = true, 1
	s.run()
	s.states(t, map[int]State{7: StateFaulty, 50: StateFaulty})
	require.Greater(t, s.told, len(s.work)/2)
}

// Where a node listened counts for one test, and soon.
func TestListenersOfOtherTests(t *testing.T) {
	ago := func(d time.Duration) *member {
		return &member{n: &node{listens: []string{"10.0.0.1:1"}, heard: simBegin.Add(-d)}}
	}
	for name, c := range map[string]struct {
		test  test
		early bool
	}{
		"both":                {test{ends: [2]*member{ago(0), ago(freshTime)}}, true},
		"PyTorch":             {test{ends: [2]*member{ago(0), ago(0)}, torch: true}, false},
		"an old server":       {test{ends: [2]*member{{n: &node{}}, ago(0)}}, false},
		"an old dialer":       {test{ends: [2]*member{ago(0), {n: &node{}}}}, false},
		"a server of earlier": {test{ends: [2]*member{ago(freshTime + 1), ago(0)}}, false},
		"a dialer of earlier": {test{ends: [2]*member{ago(0), ago(freshTime + 1)}}, false},
	} {
		require.Equal(t, c.early, c.test.early(simBegin), name)
	}
}

func events(notes []job.Note) (names []string) {
	for _, n := range notes {
		names = append(names, string(n.Event))
	}
	return names
}

func TestOneNodeAloneIsNotPaired(t *testing.T) {
	s := newSim(1, 1)
	s.run()
	require.Equal(t, StateOK, s.nodes[0].verdict.State)
	require.False(t, s.nodes[0].verdict.Paired)
	require.Less(t, s.took(), time.Second)
}

func TestLevelLocalPairsNobody(t *testing.T) {
	s := newSim(1, 5)
	s.check.cfg.Spec.Level = LevelLocal
	s.run()
	s.states(t, nil)
	require.Empty(t, s.work)
}

func TestASilentNodeIsNamedOverItsPartner(t *testing.T) {
	for _, n := range []int{2, 3, 4, 7, 100} {
		for seed := range uint64(20) {
			s := newSim(seed, n)
			s.nodes[n-1].dead = true
			s.run()
			want := map[int]State{n - 1: StateFaulty}
			if n == 2 {
				want[0] = StateNotTested
			}
			s.states(t, want)
			require.Equal(t, "net.silent", s.nodes[n-1].verdict.Kind)
			require.True(t, s.nodes[n-1].verdict.Excluded)
			require.Less(t, s.took(), 20*time.Second)
		}
	}
}

func TestWhoNeverComesIsSilent(t *testing.T) {
	s := newSim(1, 5)
	s.nodes[3].absent = true
	s.run()
	s.states(t, map[int]State{3: StateUnreachable})
	require.True(t, s.nodes[3].verdict.Excluded)
	require.Less(t, s.took(), gatherQuiet+absentTime+time.Second)
	require.Less(t, s.nodes[0].done, gatherQuiet+10*time.Second, "the others do not wait for it")
}

func TestWhoComesLateIsTestedAgainstCertifiedNodes(t *testing.T) {
	s := newSim(1, 40)
	s.nodes[7].absent = true
	s.nodes[3].fails = 1 // keeps the check going
	s.begin()
	s.at(gatherQuiet+2*time.Second, Arrive{s.nodes[7].node})
	s.drain()
	s.states(t, map[int]State{3: StateFaulty})
	require.True(t, s.nodes[7].verdict.Paired)
	require.Equal(t, 2, s.nodes[7].verdict.Partners)
}

func TestWhoComesWhenAllAreDecidedIsNotPaired(t *testing.T) {
	s := newSim(1, 5)
	s.nodes[3].absent = true
	s.begin()
	s.at(gatherQuiet+absentTime-time.Second, Arrive{s.nodes[3].node})
	s.drain()
	s.states(t, map[int]State{3: StateNotTested})
	require.False(t, s.nodes[3].verdict.Paired)
}

func TestTwoNodesThatDoNotMeetAreAPath(t *testing.T) {
	s := newSim(1, 2)
	s.nodes[0].fails = 1
	s.run()
	s.states(t, map[int]State{0: StatePath, 1: StatePath})
	require.False(t, s.nodes[0].verdict.Excluded)
	require.True(t, s.nodes[0].verdict.Paired)
	require.Less(t, s.took(), 20*time.Second)
}

func TestWhatNeverPassedBlamesNobody(t *testing.T) {
	for _, n := range []int{3, 4, 7, 50, 1000} {
		s := newSim(1, n)
		for _, x := range s.nodes {
			x.fails, x.class = 1, Refused
		}
		s.run()
		for i, x := range s.nodes {
			require.Equal(t, StateUnattributable, x.verdict.State, "%d of %d: %+v", i, n, x.verdict)
			require.False(t, x.verdict.Excluded)
			require.Contains(t, x.verdict.Reason, "refused")
		}
		require.Less(t, s.took(), 30*time.Second)
		require.Contains(t, s.check.Picture().Summary, "has passed")
	}
}

func TestTwoOfThreeDeadBlamesNobody(t *testing.T) {
	s := newSim(1, 3)
	s.nodes[0].fails, s.nodes[1].fails = 1, 1
	s.run()
	s.states(t, map[int]State{0: StateUnattributable, 1: StateUnattributable, 2: StateUnattributable})
}

func TestTheMTUIsNamed(t *testing.T) {
	s := newSim(1, 8)
	s.nodes[2].fails, s.nodes[2].class = 1, MTU
	s.run()
	s.states(t, map[int]State{2: StateFaulty})
	require.Equal(t, "net.mtu", s.nodes[2].verdict.Kind)
}

func TestALocalFaultDecidesAtOnce(t *testing.T) {
	s := newSim(1, 5)
	s.nodes[1].node.Findings = []Finding{{Severity: Fatal, Kind: "host.nic", Text: "eth0 is down"}}
	s.nodes[2].node.Wants = true
	s.run()
	s.states(t, map[int]State{1: StateFaulty, 2: StateFaulty})
	require.Equal(t, "eth0 is down", s.nodes[1].verdict.Reason)
	require.Equal(t, "host.gpu", s.nodes[2].verdict.Kind)
	require.Less(t, s.nodes[1].done, time.Second)
	for _, w := range s.work {
		require.NotContains(t, []int{1, 2}, w.ends[0])
		require.NotContains(t, []int{1, 2}, w.ends[1])
	}
}

func TestANodeWithoutGPUsAmongNodesWithSomeFails(t *testing.T) {
	s := newSim(1, 5)
	for _, x := range s.nodes[1:] {
		x.node.GPUs = 8
	}
	s.nodes[4].node.GPUs = 7
	s.run()
	s.states(t, map[int]State{0: StateFaulty})
	require.Contains(t, s.nodes[4].verdict.Findings[0].Text, "node GPUs is 7, most other nodes have 8")

	s = newSim(1, 5) // what has no workers needs none
	for _, x := range s.nodes[1:] {
		x.node.GPUs, x.node.CPU = 8, 800
	}
	s.nodes[0].node.Bare, s.nodes[0].node.CPU = true, 100
	s.run()
	s.states(t, nil)
	require.Empty(t, s.nodes[0].verdict.Findings)

	s = newSim(1, 4) // a job without GPUs, and a node that has some
	s.nodes[0].node.GPUs = 8
	s.run()
	s.states(t, nil)
}

func TestANodeThatCannotDoItsPartIsNamed(t *testing.T) {
	s := newSim(1, 7)
	s.nodes[2].fails, s.nodes[2].class = 1, Own
	s.run()
	for i, x := range s.nodes { // the sim lets both ends say so
		require.Equal(t, i == 2, x.verdict.State == StateFaulty, "%d %+v", i, x.verdict)
	}
}

func TestReportOnlyExcludesNobody(t *testing.T) {
	s := newSim(1, 9)
	s.check.cfg.Spec.ReportOnly = true
	s.nodes[2].fails = 1
	s.nodes[3].node.Findings = []Finding{{Severity: Fatal, Text: "broken"}}
	s.run()
	s.states(t, map[int]State{2: StateFaulty, 3: StateFaulty})
	require.False(t, s.nodes[2].verdict.Excluded)
	require.False(t, s.nodes[3].verdict.Excluded)
}

func TestBrokenDevicesAreToldWhereNobodyIsLeftOut(t *testing.T) {
	fatal := func(kind, metric string) Finding {
		return Finding{Severity: Fatal, Kind: kind, Metric: metric, Text: "GPU 3: " + kind + " " + metric}
	}
	faults := func(reportOnly bool) (told []job.Note) {
		s := newSim(1, 9)
		s.check.cfg.Spec.ReportOnly = reportOnly
		s.nodes[2].node.Findings = []Finding{fatal("gpu.driver", "xid"), fatal("gpu.memory", "ecc_uncorrected"),
			fatal("gpu.lost", ""), fatal("gpu.driver", "hang"), fatal("gpu.memory", "memory_used"),
			{Severity: Warn, Kind: "gpu.memory", Metric: "ecc_uncorrected"}}
		for range 9 {
			s.nodes[3].node.Findings = append(s.nodes[3].node.Findings, fatal("gpu.driver", "xid"))
		}
		s.run()
		for _, n := range s.notes {
			if n.Event == "device-fault" {
				told = append(told, n)
			}
		}
		slices.SortStableFunc(told, func(a, b job.Note) int { return strings.Compare(a.Node, b.Node) })
		return told
	}
	require.Empty(t, faults(false), "who is left out says why")
	told := faults(true)
	require.Len(t, told, 3+maxFaults)
	require.Equal(t, []string{"xid: GPU 3: gpu.driver xid", "ecc: GPU 3: gpu.memory ecc_uncorrected",
		"xid: GPU 3: gpu.lost "}, []string{told[0].Text, told[1].Text, told[2].Text})
}

// Many nodes at once are hardly at fault themselves. A world with them would not work all the same.
func TestMassVerdictIsHeldAgainstNobody(t *testing.T) {
	for _, c := range [][2]int{{8, 3}, {8, 5}, {30, 2}, {30, 3}, {64, 9}} {
		s := newSim(1, c[0])
		want := map[int]State{}
		for i, x := range s.nodes[:c[1]] {
			x.fails, want[i] = 1, StateFaulty
		}
		s.run()
		s.states(t, want)
		for i, x := range s.nodes {
			require.Equal(t, i < c[1], x.verdict.Excluded)
			require.Equal(t, i < c[1] && c[1] > 2, x.verdict.Again)
		}
		if c[1] > 2 {
			require.Contains(t, s.nodes[0].verdict.Reason, fmt.Sprintf("%d of %d nodes are blamed at once", c[1], c[0]))
		}
	}
}

// Where hardly any node reaches another one nobody is named, and those go on that reach each other.
func TestFewGoodNodesGoOnWithoutTheOthers(t *testing.T) {
	for _, c := range [][2]int{{8, 2}, {16, 3}, {40, 6}} {
		s := newSim(1, c[0])
		want := map[int]State{}
		for i, x := range s.nodes[c[1]:] {
			x.fails, want[c[1]+i] = 1, StateUnattributable
		}
		s.run()
		for i, x := range s.nodes {
			require.Equal(t, i >= c[1], x.verdict.State == StateUnattributable, "%d of %v: %+v", i, c, x.verdict)
			require.Equal(t, i >= c[1], x.verdict.Excluded, "%d of %v: %+v", i, c, x.verdict)
			require.Equal(t, i >= c[1], x.verdict.Again)
		}
		require.Less(t, s.took(), 40*time.Second)
	}
}

func TestANodeThatLeavesBlamesNobody(t *testing.T) {
	for _, n := range []int{2, 3, 6, 20} {
		s := newSim(1, n)
		s.begin()
		s.at(1500*time.Millisecond, Gone{s.nodes[0].id})
		s.drain()
		require.Nil(t, s.nodes[0].verdict)
		want := StateOK
		if n == 2 {
			want = StateNotTested
		}
		for _, x := range s.nodes[1:] {
			require.Equal(t, want, x.verdict.State)
		}
		require.Less(t, s.took(), 12*time.Second)
		require.Len(t, s.check.Picture().Nodes, n-1)
	}
}

func TestANodeThatArrivesAgainBeginsAnew(t *testing.T) {
	s := newSim(1, 20)
	s.begin()
	s.at(1500*time.Millisecond, Arrive{s.nodes[0].node})
	s.drain()
	s.states(t, nil)
	require.True(t, s.nodes[0].verdict.Paired)
	require.Len(t, s.check.Picture().Nodes, 20)
}

func TestHelpersAreLetGoWithinFourSeconds(t *testing.T) {
	for _, subjects := range []int{1, 2, 5} {
		s := full(3, subjects+4*subjects+4)
		s.helpers = 4*subjects + 4
		s.run()
		s.states(t, nil)
		require.Less(t, s.took(), 4*time.Second)
		for _, x := range s.nodes[:subjects] {
			require.Equal(t, 2, x.verdict.Partners)
		}
	}
}

func TestHelpersShowWhatIsUsual(t *testing.T) {
	s := newSim(3, 9)
	s.helpers = 8
	s.nodes[0].tx = 0.5
	s.run()
	s.states(t, map[int]State{0: StateSlow})
	require.Equal(t, "net.tx", s.nodes[0].verdict.Kind)
}

// Many helpers test each other only as long as the run does not know what is usual.
func TestWhatIsUsualIsKnownFromTheLastCheck(t *testing.T) {
	for _, before := range []bool{false, true} {
		s := newSim(3, 9)
		if before {
			s.run()
			s.work = nil
		}
		s.helpers = 8
		s.nodes[0].tx = 0.5
		s.run()
		s.states(t, map[int]State{0: StateSlow})
		between := 0
		for _, w := range s.work {
			if w.ends[0] > 0 && w.ends[1] > 0 {
				between++
			}
		}
		require.Equal(t, map[bool]int{false: 4, true: 2}[before], between)
	}
}

// A network that has become slower for all is no fault of a node.
func TestWhatIsUsualChanges(t *testing.T) {
	s := newSim(3, 8)
	s.run()
	for _, x := range s.nodes {
		x.verdict, x.tx = nil, 0.5
	}
	s.run()
	s.states(t, nil)
	require.InDelta(t, 500, s.check.Picture().Median, 40)
}

func TestASubjectThatFailsWithHelpersIsNamed(t *testing.T) {
	s := newSim(3, 10)
	s.helpers = 8
	s.nodes[1].fails = 1
	s.run()
	s.states(t, map[int]State{1: StateFaulty})
}

func TestHelpersThatDoNotComeAreNotWaitedFor(t *testing.T) {
	s := newSim(3, 10)
	s.helpers = 8
	for _, x := range s.nodes[5:] {
		x.absent = true
	}
	s.begin()
	s.at(20*time.Second, Arrive{s.nodes[9].node})
	s.drain()
	for _, x := range s.nodes[:5] {
		require.Equal(t, StateOK, x.verdict.State)
		require.Less(t, x.done, helperTime+4*time.Second)
	}
	require.Equal(t, StateNotTested, s.nodes[9].verdict.State, "it is not checked, although it comes late")
}

func TestFullLevelComputesAndMeets(t *testing.T) {
	s := full(1, 4)
	s.check.cfg.Spec.Comm = true
	s.run()
	s.states(t, nil)
	require.Less(t, s.took(), 45*time.Second)
	p := s.check.Picture()
	torch := 0
	for _, x := range p.Pairs {
		if x.Torch {
			torch++
			require.InDelta(t, 1000, x.Mbps, 200)
		}
	}
	require.Equal(t, 12, torch)
	require.Contains(t, fmt.Sprint(s.notes), "a collective of 4 nodes: 800 Mbit/s")
}

func TestACollectiveThatFailsNamesNobody(t *testing.T) {
	s := full(1, 4)
	s.check.cfg.Spec.Comm = true
	s.commFails = true
	s.run()
	s.states(t, nil)
	require.Contains(t, s.check.Picture().Summary, "the collective of 4 nodes failed: node0: failed")

	s = full(1, 4)
	s.check.cfg.Spec.Comm = true
	s.commBus = 125 * commShare * 0.9
	s.run()
	s.states(t, nil)
	require.Regexp(t, `the collective of 4 nodes reached 675 Mbit/s, pairs reach \d+`, s.check.Picture().Summary)

	s = full(1, 4)
	s.check.cfg.Spec.Comm = true
	s.until(t, inComm)
	s.nodes[2].dead = true
	s.drain()
	s.states(t, nil)
	require.Contains(t, s.check.Picture().Summary, "the collective of 4 nodes was not done in time by 1")
}

// until plays a check up to one of its phases.
func (s *sim) until(t *testing.T, p phase) {
	s.begin()
	for s.check.phase != p {
		require.True(t, s.step())
	}
}

// What is said of an earlier test, or for the second time, changes nothing.
func TestOldWordsAboutPyTorchAreDropped(t *testing.T) {
	s := full(1, 4)
	s.check.cfg.Spec.Comm = true
	s.until(t, inCompute)
	s.give(Report{"n0", Result{Test: "old", Class: Failed}})
	for s.check.phase != inComm {
		require.True(t, s.step())
	}
	require.Empty(t, s.check.Step(s.now, Ready{ID: "n0", Test: "old"}))
	for !s.check.comm.told {
		require.True(t, s.step())
	}
	require.Empty(t, s.check.Step(s.now, Ready{ID: "n0", Test: s.check.comm.test}))
	s.drain()
	s.states(t, nil)
	require.NotContains(t, s.check.Picture().Summary, "failed")
}

func TestALeaverEndsTheCollective(t *testing.T) {
	s := full(1, 4)
	s.check.cfg.Spec.Comm = true
	s.until(t, inComm)
	begun := s.took()
	s.at(time.Second, Gone{s.nodes[2].id})
	s.drain()
	require.Equal(t, StateOK, s.nodes[0].verdict.State)
	require.Less(t, s.nodes[0].done-begun, 1100*time.Millisecond)
}

func TestTorchThatFailsToComputeIsTheNodesFault(t *testing.T) {
	s := full(1, 5)
	s.nodes[2].broken = Failed
	s.run()
	s.states(t, map[int]State{2: StateFaulty})
	require.Equal(t, "compute", s.nodes[2].verdict.Kind)
}

func TestTorchThatNeverAnswersIsTheNodesFault(t *testing.T) {
	s := full(1, 5)
	s.until(t, inCompute)
	s.queue = s.queue[:4]
	s.drain()
	failed := 0
	for _, x := range s.nodes {
		if x.verdict.State == StateFaulty {
			failed++
			require.Equal(t, "compute", x.verdict.Kind)
		}
	}
	require.Equal(t, 1, failed)
}

func TestWhoIsNotTestedWithTorchIsTold(t *testing.T) {
	s := full(1, 5)
	s.nodes[1].node.Torch, s.nodes[1].node.NoTorch = false, "no python3"
	s.nodes[2].broken = Own
	s.run()
	s.states(t, nil)
	for i, x := range s.nodes {
		skipped := 0
		for _, f := range x.verdict.Findings {
			if f.Kind == torchSkipped {
				require.Equal(t, Warn, f.Severity)
				skipped++
			}
		}
		require.Equal(t, i == 1 || i == 2, skipped == 1, "node %d: %+v", i, x.verdict.Findings)
	}
}

func TestWithoutTorchTheHostCounts(t *testing.T) {
	s := full(1, 5)
	for _, x := range s.nodes[:2] {
		x.node.Torch = false
	}
	s.run()
	s.states(t, nil)
	require.Equal(t, []int{2, 3, 4}, s.torchNodes())
}

func (s *sim) torchNodes() (nodes []int) {
	for _, x := range s.nodes {
		if s.check.roster.byID[x.id].matmul > 0 {
			nodes = append(nodes, x.i)
		}
	}
	return nodes
}

func TestAPairThatFailsWithTorchOnlyIsFound(t *testing.T) {
	s := full(1, 8)
	s.nodes[5].torchFails = true
	s.run()
	s.states(t, map[int]State{5: StateFaulty})
	require.Equal(t, "torch", s.nodes[5].verdict.Findings[0].Check)
}

func TestTheHardEndDecidesAll(t *testing.T) {
	s := newSim(1, 100)
	s.failTime = 5500 * time.Millisecond // nearly all that a test may take
	s.spurious = 0.5
	s.run()
	for _, x := range s.nodes {
		require.NotNil(t, x.verdict)
		require.NotEqual(t, StateFaulty, x.verdict.State, "%+v %s", x.verdict, s.check.Picture().Summary)
		require.LessOrEqual(t, x.done, DefaultTimeout+time.Second)
	}
}

func TestChecksFollowEachOther(t *testing.T) {
	s := newSim(1, 8)
	s.run()
	for range 3 {
		s.start = s.now
		for _, x := range s.nodes {
			x.verdict = nil
		}
		s.run()
		s.states(t, nil)
		require.Less(t, s.took(), 10*time.Second)
	}
}

// A health check of the site may take its time, as long as the node says that it is there.
func TestWhoIsBusyIsWaitedFor(t *testing.T) {
	s := newSim(1, 5)
	s.nodes[3].absent = true
	s.begin()
	s.at(3*time.Second, Busy{s.nodes[3].node.ID})
	s.at(3*time.Second, Busy{s.nodes[3].node.ID}) // twice is once
	s.at(40*time.Second, Arrive{s.nodes[3].node})
	s.drain()
	s.states(t, nil)
	require.True(t, s.nodes[3].verdict.Paired, "gathering has waited")
	require.Less(t, s.took(), 50*time.Second, "and no longer")

	s = newSim(1, 5)
	s.nodes[3].absent = true
	s.begin()
	s.at(3*time.Second, Busy{s.nodes[3].node.ID})
	s.drain()
	s.states(t, map[int]State{3: StateUnreachable})
	require.Less(t, s.took(), DefaultTimeout+3*absentTime)

	took := map[string]time.Duration{}
	for _, id := range []string{"nobody", "n3"} { // which has arrived
		s = newSim(1, 5)
		s.nodes[4].absent = true
		s.begin()
		s.at(time.Second, Busy{id})
		s.drain()
		took[id] = s.took()
	}
	require.Equal(t, took["nobody"], took["n3"])

	s = newSim(1, 5)
	s.nodes[3].absent = true
	s.begin()
	s.at(gatherMost+absentTime/5, Busy{s.nodes[3].node.ID}) // gathering has ended without it
	s.at(50*time.Second, Arrive{s.nodes[3].node})
	s.drain()
	s.states(t, map[int]State{3: StateNotTested})
}

func TestProgress(t *testing.T) {
	s := newSim(1, 16)
	require.Empty(t, s.check.Progress())
	s.begin()
	seen := map[string]bool{}
	for s.step() {
		seen[s.check.Progress()] = true
	}
	for _, text := range []string{"0 of 16 nodes passed", "0 of 16 nodes passed, round 1 of 3",
		"0 of 16 nodes passed, round 3 of 3", ""} {
		require.True(t, seen[text], "%q in %v", text, seen)
	}
}
