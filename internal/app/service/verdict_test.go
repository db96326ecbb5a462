package service

import (
	"log/slog"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous"
)

var noon = time.Unix(1700000000, 0).UTC()

func epoch(n int, e job.Evidence) rendezvous.EpochEvidence {
	e.MaxRestarts, e.WorldSize = 3, 4
	return rendezvous.EpochEvidence{EpochID: job.EpochID{Term: 1, Round: 1, Epoch: n}, Evidence: e}
}

func failed(rank int, output string) job.Evidence {
	return job.Evidence{
		Cause: &job.Cause{Kind: job.CauseFailure, Text: "a rank failed"},
		Failures: verdict.Pack([]verdict.Failure{
			{Node: 1, NodeName: "gpu-07", Rank: rank, PID: 42, ExitCode: 7, At: noon, LastLines: output},
		}),
	}
}

func grown() job.Evidence {
	return job.Evidence{Cause: &job.Cause{Kind: job.CauseGrowth, Text: "a node joined"}}
}

func TestVerdictOfTheNewestEpochThatTellsSomething(t *testing.T) {
	three := 3
	for name, c := range map[string]struct {
		epochs []rendezvous.EpochEvidence
		want   Verdict
	}{
		"the newest": {[]rendezvous.EpochEvidence{epoch(0, failed(1, "old")), epoch(1, failed(3, "bad batch"))}, Verdict{
			Epoch: 1, Rule: verdict.FirstExit, Class: verdict.Unknown, RootRank: &three, RootNode: "gpu-07", Failures: 1,
			Line: `rank 3 (node 1 gpu-07, local rank 0, pid 42) failed first: exit code 7, last output "bad batch"; ` +
				`no other rank of 4 failed; restarts used 0 of 3`,
		}},
		"before a growth": {[]rendezvous.EpochEvidence{epoch(0, failed(3, "bad batch")), epoch(1, grown())}, Verdict{
			Epoch: 0, Rule: verdict.FirstExit, Class: verdict.Unknown, RootRank: &three, RootNode: "gpu-07", Failures: 1,
			Line: `rank 3 (node 1 gpu-07, local rank 0, pid 42) failed first: exit code 7, last output "bad batch"; ` +
				`no other rank of 4 failed; restarts used 0 of 3`,
		}},
		"nothing but growths": {[]rendezvous.EpochEvidence{epoch(0, grown()), epoch(1, grown())}, Verdict{
			Epoch: 1, Rule: verdict.NoCause, Class: verdict.Unknown,
			Line: "a node joined; no worker failed by itself; restarts used 0 of 3",
		}},
		"stopped": {[]rendezvous.EpochEvidence{epoch(0, failed(3, "old")), epoch(1, job.Evidence{
			Outcome: job.Failed, Cause: &job.Cause{Kind: job.CauseOperator, Text: "stopped by hand"}})},
			Verdict{Epoch: 1, Outcome: job.Failed, Rule: verdict.NoCause, Class: verdict.Unknown,
				Line: "stopped by hand; no worker failed by itself; restarts used 0 of 3"}},
		"a lost node": {[]rendezvous.EpochEvidence{
			epoch(0, job.Evidence{
				Losses: []job.Loss{{Node: "gpu-09", GroupRank: 1, RankBase: 2, Slots: 2, Reason: "silent", At: noon}},
			}),
		},
			Verdict{Rule: verdict.NodeLost, Class: verdict.Lost, RootNode: "gpu-09", Losses: 1,
				Line: "node 1 gpu-09 went away first: silent; it ran ranks 2-3; class node-lost; restarts used 0 of 3"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := judge(c.epochs)
			require.True(t, ok)
			c.want.Round, c.want.MaxRestarts, c.want.WorldSize = 1, 3, 4
			require.Equal(t, got.Epoch, got.epoch.Epoch)
			got.Cause, got.epoch = nil, job.EpochID{}
			require.Equal(t, c.want, got)
		})
	}
}

func TestVerdictsAreServed(t *testing.T) {
	s, err := New(Config{Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	at := "http://" + serving(t, s) + "/v1/runs/r/verdict"
	status, body := get(t, at, "")
	require.Equal(t, http.StatusNotFound, status)
	require.Contains(t, body, "unknown_run")

	require.NoError(t, s.Hub.Join(t.Context(), "r", joining("n0", "10.0.0.1")))
	status, _ = get(t, at, "")
	require.Equal(t, http.StatusNoContent, status)

	resp, err := http.Post(at, "", nil)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, http.StatusMethodNotAllowed, resp.StatusCode)
}
