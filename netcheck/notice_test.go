package netcheck

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

func noticed(severity Severity, kind, entity string) Finding {
	return Finding{Check: "host", Kind: kind, Severity: severity, Entity: entity, Text: entity + " has " + kind}
}

// notices has a node tell of findings with every test.
func (x *simNode) notices(found ...Finding) {
	x.got = func(r *Result, _ *simNode) { r.Findings = found }
}

func TestWhatANodeNoticesOfItselfIsInItsVerdict(t *testing.T) {
	for _, report := range []bool{false, true} {
		s := newSim(1, 8)
		s.check.cfg.Spec.ReportOnly = report
		s.nodes[2].notices(noticed(Warn, "symbols", "mlx5_0:1"), noticed(Warn, "symbols", "mlx5_1:1"))
		s.nodes[5].notices(noticed(Warn, "crc", "eth0"), noticed(Fatal, "link", "eth0"))
		s.run()
		s.states(t, map[int]State{5: StateFaulty})
		require.Len(t, s.nodes[2].verdict.Findings, 2, "each thing once")
		flaps := s.check.Picture().Nodes[5].Verdict
		require.Equal(t, "eth0 has link", flaps.Reason)
		require.Equal(t, "link", flaps.Kind)
		require.Equal(t, !report, flaps.Excluded)
		require.Len(t, flaps.Findings, 2)
	}
}

// A link that is lost after the node's last test is in the table all the same.
func TestWhatANodeNoticesAtItsVerdict(t *testing.T) {
	for _, report := range []bool{false, true} {
		s := newSim(1, 5)
		s.check.cfg.Spec.ReportOnly = report
		s.run()
		told := *s.nodes[1].verdict
		last := Report{s.nodes[1].id, Result{Test: AfterVerdict, Findings: []Finding{noticed(Fatal, "link", "eth0")}}}
		s.give(last)
		s.give(last)
		p := s.check.Picture()
		v := p.Nodes[1].Verdict
		require.Equal(t, [2]string{string(StateFaulty), "eth0 has link"}, [2]string{string(v.State), v.Reason})
		require.Equal(t, !report, v.Excluded)
		require.Len(t, v.Findings, 1)
		require.Equal(t, told, *s.nodes[1].verdict, "what was sent stays as it is")
		want := map[bool]string{false: "4 ok, 1 left out", true: "4 ok, 1 not ok, but kept"}[report]
		require.Contains(t, p.Summary, want)
		note := job.Note{Event: "check-verdict", Node: s.nodes[1].node.Name, Text: "faulty: eth0 has link"}
		require.Equal(t, note, s.notes[len(s.notes)-1])
	}
}

// Helpers that have taken part are counted as others are.
func TestWhatAHelperNoticesAtItsVerdict(t *testing.T) {
	s := newcomer(1, 4, dead())
	fine := slices.IndexFunc(s.nodes[1:], func(x *simNode) bool { return x.verdict.State == StateOK })
	require.GreaterOrEqual(t, fine, 0)
	ok := 0
	for _, n := range s.check.Picture().Nodes {
		if n.Verdict.State == StateOK {
			ok++
		}
	}
	s.give(Report{s.nodes[1+fine].id, Result{Test: AfterVerdict, Findings: []Finding{noticed(Fatal, "link", "eth0")}}})
	require.Contains(t, s.check.Picture().Summary, fmt.Sprintf("%d ok, 1 left out", ok-1))
}

// A verdict that proves nothing gives way to what the node finds of itself, and one that does stays.
func TestWhatCountsMoreThanANotice(t *testing.T) {
	link := noticed(Fatal, "link", "eth0")
	waits := Verdict{State: StateUndecided, Excluded: true, Again: true, Covered: []string{AspectHealth}}
	require.Equal(t, Verdict{State: StateFaulty, Kind: "link", Confidence: 1, Excluded: true, Reason: "eth0 has link",
		Findings: []Finding{link}}, waits.Against(link))
	faulty := Verdict{State: StateFaulty, Kind: "net.both", Excluded: true, Reason: "no way"}
	require.Equal(t, "no way", faulty.Against(link).Reason)
	require.Equal(t, waits.Reason, waits.Against(noticed(Warn, "crc", "eth0")).Reason)
	require.True(t, waits.Against(noticed(Warn, "crc", "eth0")).Again)
}

func TestNoticesAreBounded(t *testing.T) {
	s := newSim(1, 3)
	var many []Finding
	for i := range 3 * MaxFindings {
		many = append(many, noticed(Warn, "crc", fmt.Sprint("eth", i)))
	}
	s.nodes[0].notices(many...)
	s.run()
	s.give(Report{s.nodes[0].id, Result{Test: AfterVerdict, Findings: []Finding{noticed(Warn, "link", "eth0")}}})
	require.Len(t, s.check.Picture().Nodes[0].Verdict.Findings, MaxFindings)
	s.give(Report{"nobody", Result{Findings: many}})
}

// A port that passes less than the interfaces can send is told, though TCP finds out by itself.
func TestAPortWithASmallMTUIsTold(t *testing.T) {
	for _, n := range []int{2, 6, 16} {
		s := newSim(1, n)
		for _, x := range s.nodes {
			x.node.NICs[0].MTU = 9000
			x.sent = func(r *Result, _ *simNode) { r.Flows[0].MTU = 9000 }
		}
		s.nodes[1].sent = func(r *Result, _ *simNode) { r.Flows[0].MTU = 1500 }
		s.run()
		s.states(t, nil)
		require.Equal(t, "eth0 sends packets of at most 1500 bytes, though the MTU is 9000 at both ends",
			s.nodes[1].verdict.Findings[0].Text)
		require.Len(t, s.nodes[1].verdict.Findings, 1)
		for i, x := range s.nodes {
			require.True(t, i == 1 || n == 2 || len(x.verdict.Findings) == 0, x.verdict.Findings)
		}
	}
}

// What a test failed of is in the reason: it names the one of two interfaces that is dead.
func TestTheWordsOfAFailureAreInTheReason(t *testing.T) {
	for n, state := range map[int]State{2: StatePath, 8: StateFaulty} {
		s := newSim(1, n)
		s.nodes[1].fails, s.nodes[1].class = 1, Unreachable
		s.failText = "rail 1 (eth1): no route to host"
		s.run()
		require.Equal(t, state, s.nodes[1].verdict.State)
		require.Contains(t, s.nodes[1].verdict.Reason, "unreachable: rail 1 (eth1): no route to host")
	}
}

// A rate by RDMA is not that of the interface beside it.
func TestASlowRDMADeviceIsNamed(t *testing.T) {
	s := newSim(1, 8)
	twoRails(s)
	for _, x := range s.nodes {
		x.node.NICs[0].HCA = "mlx5_0"
	}
	s.nodes[2].sent = func(r *Result, _ *simNode) { r.Flows[2].Mbps /= 4 }
	s.run()
	s.states(t, map[int]State{2: StateSlow})
	require.Equal(t, "mlx5_0 by RDMA", s.nodes[2].verdict.Findings[0].Entity)
	require.Regexp(t, `^mlx5_0 by RDMA sends 12\d\d Mbit/s, 0.2\d of the median of `, s.nodes[2].verdict.Reason)
	require.Less(t, s.took(), time.Minute)
}
