package launcher

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/verdict"
)

func TestReasonsOfFailure(t *testing.T) {
	fail := func(kind job.CauseKind) Directive {
		return Directive{Kind: job.Fail, Cause: because(kind, "because")}
	}
	bar := Directive{Kind: job.Bar, Cause: because(job.CauseCheck, "node-x: slow")}
	for name, tt := range map[string]struct {
		told    []Directive
		parts   []Part
		want    policy.Reason
		verdict string
	}{
		"timeout":   {[]Directive{fail(job.CauseTimeout)}, nil, policy.RendezvousTimeout, "because"},
		"check":     {[]Directive{fail(job.CauseCheck)}, nil, policy.TooFewPassed, "because"},
		"hang":      {[]Directive{fail(job.CauseHang)}, nil, policy.Hung, "because"},
		"deadline":  {[]Directive{fail(job.CauseDeadline)}, nil, policy.Deadline, "because"},
		"no step":   {[]Directive{fail(job.CauseNoStep)}, nil, policy.NoFirstStep, "because"},
		"operator":  {[]Directive{fail(job.CauseOperator)}, nil, policy.OperatorStop, "because"},
		"elsewhere": {[]Directive{fail("worker-failure")}, nil, policy.RendezvousClosed, "because"},
		"barred by a check": {[]Directive{bar, fail(job.CauseCheck)}, nil, policy.NodeCheckFailed,
			"because; this node had not passed its check: node-x: slow"},
		"barred by an operator": {[]Directive{{Kind: job.Bar, Cause: because(job.CauseOperator, "")}, fail(job.CauseHang)},
			nil, policy.Hung, "because"},
		"not barred any more": {[]Directive{bar, {Kind: job.Wait}, fail(job.CauseHang)}, nil, policy.Hung, "because"},
		"passed after a bar":  {[]Directive{bar, {Kind: job.Check}, fail(job.CauseHang)}, nil, policy.Hung, "because"},
		"own check": {[]Directive{{Kind: job.Check}, bar, fail(job.CauseOperator)},
			[]Part{says("speed", CheckResult{Reason: "slow"}, nil)}, policy.NodeCheckFailed,
			"because; this node had not passed its check: speed: slow"},
		"the cause says it": {[]Directive{bar,
			{Kind: job.Fail, Cause: because(job.CauseCheck, "of 2 nodes 1 passed: node-x: slow")}}, nil, policy.NodeCheckFailed,
			"of 2 nodes 1 passed: node-x: slow"},
	} {
		bubble(t, name, func(t *testing.T) {
			b := newBare(tt.parts...)
			b.cfg.StayWhenBarred = true
			b.begin(t, tt.told...)
			res := <-b.done
			require.Equal(t, tt.want, res.Reason)
			require.Equal(t, tt.verdict, res.Verdict)
		})
	}
}

// An order's cause counts for more than what the workers did when they were stopped; a loss counts for nothing then.
func TestOrderExplainsTheEndOfAJob(t *testing.T) {
	v := verdict.Judge(verdict.Evidence{Failures: []verdict.Failure{{Rank: 1, ExitCode: 1, PID: 7}}})
	res := outcome{cause: because(job.CauseOperator, "alice: wrong data"), verdict: v}.result()
	require.Equal(t, policy.OperatorStop, res.Reason)
	require.Equal(t, "alice: wrong data", res.Verdict)
	require.Contains(t, outcome{cause: because(job.CauseHang, ""), verdict: v}.result().Verdict, "rank 1",
		"an order that does not say why")
	require.Contains(t, outcome{cause: because("worker-failure", "c"), verdict: v}.result().Verdict, "rank 1")
	v = verdict.Judge(verdict.Evidence{Losses: []verdict.Loss{{}}})
	require.Equal(t, policy.Hung, outcome{cause: job.Cause{Kind: job.CauseHang}, verdict: v}.reason())
}

// What ended the job decides the blame; what the workers of this node did decides whose it is.
func TestBlameOfFailure(t *testing.T) {
	failure := func(rank, second int, f verdict.Failure) verdict.Failure {
		f.Rank, f.PID, f.At = rank, 7, time.Unix(int64(second), 0)
		if f.ExitCode == 0 {
			f.ExitCode = 1
		}
		return f
	}
	xid := verdict.Failure{LastLines: "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus."}
	oom := verdict.Failure{ExitCode: -9, OOM: &verdict.OOM{}}
	stoppedOOM := oom
	stoppedOOM.Stopped = true
	plain := verdict.Failure{LastLines: "the data set is empty"}
	type failures = []verdict.Failure
	for name, tt := range map[string]struct {
		own, others failures
		kind        job.CauseKind
		want        policy.Blame
	}{
		"hardware here": {failures{failure(0, 1, xid)}, nil, job.CauseFailure, policy.OwnHardware},
		"hardware here, others fail": {failures{failure(0, 1, xid)}, failures{failure(1, 2, plain)}, job.CauseFailure,
			policy.OwnHardware},
		"hardware elsewhere": {nil, failures{failure(1, 1, xid)}, job.CauseFailure, policy.OtherHardware},
		"hardware elsewhere, and a consequence here": {failures{failure(0, 2, plain)}, failures{failure(1, 1, xid)},
			job.CauseBudget, policy.OtherHardware},
		"hardware here, after that of another": {failures{failure(0, 2, xid)}, failures{failure(1, 1, xid)}, job.CauseFailure,
			policy.OwnHardware},
		"hardware here, after a program": {failures{failure(0, 2, xid)}, failures{failure(1, 1, plain)}, job.CauseFailure,
			policy.Nobody},
		"memory here":      {failures{failure(0, 1, oom)}, nil, job.CauseFailure, policy.OwnMemory},
		"memory elsewhere": {nil, failures{failure(1, 1, oom)}, job.CauseFailure, policy.Nobody},
		"memory elsewhere, and a stopped worker here": {failures{failure(0, 2, stoppedOOM)}, failures{failure(1, 1, oom)},
			job.CauseFailure, policy.Nobody},
		"a program":          {failures{failure(0, 1, plain)}, nil, job.CauseFailure, policy.Nobody},
		"an order":           {failures{failure(0, 1, xid)}, nil, job.CauseOperator, policy.Nobody},
		"a hang":             {failures{failure(0, 1, xid)}, nil, job.CauseHang, policy.Nobody},
		"too few came again": {failures{failure(0, 1, xid)}, nil, job.CauseTimeout, policy.Nobody},
		"nothing known":      {nil, nil, job.CauseFailure, policy.Nobody},
	} {
		t.Run(name, func(t *testing.T) {
			v := verdict.Judge(verdict.Evidence{Failures: slices.Concat(tt.own, tt.others)})
			require.Equal(t, tt.want, outcome{cause: because(tt.kind, "c"), verdict: v, local: tt.own}.result().Blame)
		})
	}
}
