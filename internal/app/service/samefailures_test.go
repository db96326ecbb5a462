package service

import (
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// failingRun has a node of a run with --same-failures=2 report one failure an epoch, as launchers do, until the run
// ends. It is the cause of that, nil if all epochs were followed by another one.
func failingRun(t *testing.T, fs ...verdict.Failure) *job.Cause {
	s, err := New(Config{Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	c := api.NewClient(serving(t, s), "")
	defer c.Close()
	join := rendezvous.Join{
		Node: rendezvous.Node{ID: "n", Name: "n", Rank: -1, Addr: "127.0.0.1", Slots: 64},
		Params: rendezvous.Params{Min: 1, Max: 1, MaxRestarts: 100,
			Budget: rendezvous.Budget{SameFailures: 2, BackoffMax: -1}},
	}
	var after api.Cursor
	next := func(kind job.Kind) rendezvous.Directive {
		for range 10 {
			n, err := c.Watch(t.Context(), "r", "n", after)
			require.NoError(t, err)
			if after.Directive = n.Directive.Seq; n.Directive.Kind == kind || n.Directive.Kind == job.Fail {
				return n.Directive
			}
		}
		require.FailNow(t, "not told", kind)
		return rendezvous.Directive{}
	}
	for _, f := range fs {
		require.NoError(t, c.Join(t.Context(), "r", join))
		lead := next(job.Lead)
		require.NoError(t, c.Report(t.Context(), "r", rendezvous.Ready{ID: "n", EpochID: lead.EpochID, Port: 1}))
		run := next(job.Run)
		require.NoError(t, c.Report(t.Context(), "r", rendezvous.Failing{ID: "n", EpochID: run.EpochID,
			Decision: rendezvous.RestartCharged, Failures: verdict.Pack([]verdict.Failure{f})}))
		stop := next(job.Stop)
		if stop.Kind == job.Fail {
			return stop.Cause
		}
		join.Stopped = run.EpochID
	}
	return nil
}

// --same-failures counts failures of different ranks on different hosts as the same one, however they are worded.
func TestSameFailuresOfDifferentRanks(t *testing.T) {
	failure := func(rank, pid int, host, message string) verdict.Failure {
		return verdict.Failure{Rank: rank, LocalRank: rank % 8, Node: rank / 8, NodeName: host, Host: host, PID: pid,
			ExitCode: 1, At: time.Now(), Message: message}
	}
	const said = "RuntimeError: cannot reach "
	c := failingRun(t, failure(3, 4711, "gpu-a", said+"10.0.0.7:29500 from gpu-a after 3.2s"),
		failure(17, 815, "gpu-b", said+"10.0.0.9:31234 from gpu-b after 1m12s"))
	require.NotNil(t, c, "the run goes on")
	require.Equal(t, job.CauseBudget, c.Kind)
	require.Contains(t, c.Text, "failed 2 times in a row before their first step (--same-failures): rank 17 (node 2 gpu-b")
	require.Contains(t, c.Text, said+"10.0.0.9:31234")

	require.Nil(t, failingRun(t, failure(3, 4711, "gpu-a", "ValueError: x"), failure(3, 4711, "gpu-a", "KeyError: x")))
	other := failure(3, 4711, "gpu-a", "")
	other.ExitCode = 3
	require.Nil(t, failingRun(t, failure(3, 4711, "gpu-a", ""), other))
}
