package service

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

func ends(kind job.CauseKind, fs ...verdict.Failure) job.Evidence {
	return job.Evidence{Cause: &job.Cause{Kind: kind, Text: "why"}, Failures: verdict.Pack(fs)}
}

func fails(rank int, output string) verdict.Failure {
	return verdict.Failure{
		Node: rank / 2, NodeName: "gpu-07", Rank: rank, PID: 42, ExitCode: 1,
		At: noon.Add(time.Duration(rank) * time.Millisecond), LastLines: output,
	}
}

func TestSuspiciousEnds(t *testing.T) {
	const follows = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:1234"
	first, second := fails(0, follows), fails(1, follows)
	lost := func(silent bool, e job.Evidence) job.Evidence {
		e.Losses = []job.Loss{{Node: "gpu-09", GroupRank: 3, Reason: "silent for 15s", At: noon, Silent: silent}}
		return e
	}
	killed := verdict.Failure{ExitCode: -9, At: noon, OOM: &verdict.OOM{}}
	for name, c := range map[string]struct {
		end  job.Evidence
		want string
	}{
		"nothing known":        {job.Evidence{}, ""},
		"an error of a worker": {ends(job.CauseFailure, first, fails(1, "ValueError: bad batch")), ""},
		"out of memory":        {ends(job.CauseFailure, killed), ""},
		"all only followed": {ends(job.CauseFailure, first, second),
			"the first failure only followed something that nobody has reported: rank 0"},
		"a hang": {ends(job.CauseHang), "the workers hung: why"},
		"a silent loss": {lost(true, ends(job.CauseLoss)),
			"node gpu-09 went away without a good-bye: silent for 15s"},
		"a silent loss in a growth": {lost(true, ends(job.CauseGrowth)), "node gpu-09 went away"},
		"a good-bye":                {lost(false, ends(job.CauseLeave, first)), ""},
		"a good-bye and its traces": {lost(false, ends(job.CauseFailure, first)), ""},
		"growth":                    {ends(job.CauseGrowth, first), ""},
		"an operator's restart":     {ends(job.CauseOperator, first), ""},
	} {
		t.Run(name, func(t *testing.T) {
			if c.want == "" {
				require.Empty(t, suspicious(c.end))
				return
			}
			require.Contains(t, suspicious(c.end), c.want)
		})
	}
}

// What hung is checked before it starts anew.
func TestSuspiciousEndsReachTheRounds(t *testing.T) {
	for name, c := range map[string]struct {
		cause job.CauseKind
		want  job.Kind
	}{"hang": {job.CauseHang, job.Check}, "by hand": {job.CauseOperator, job.Lead}} {
		t.Run(name, func(t *testing.T) {
			s := newService(t)
			j := joining("n0", "10.0.0.1")
			j.Params, j.Node.Can = rendezvous.Params{Min: 1, Max: 1, Gate: true}, []rendezvous.Ability{rendezvous.CanGate}
			require.NoError(t, s.Hub.Join(t.Context(), "r", j))
			require.NoError(t, s.Hub.Report(t.Context(), "r", rendezvous.Cleared{ID: j.Node.ID}))
			lead, err := s.Hub.Watch(t.Context(), "r", "n0", api.Cursor{})
			require.NoError(t, err)
			require.Equal(t, job.Lead, lead.Kind)
			require.NoError(t, s.Hub.Order("r", rendezvous.Order{Kind: rendezvous.OrderRestart, Cause: c.cause}))
			j.Stopped = lead.EpochID
			require.NoError(t, s.Hub.Join(t.Context(), "r", j))
			next, err := s.Hub.Watch(t.Context(), "r", "n0", api.Cursor{})
			require.NoError(t, err)
			require.Equal(t, c.want, next.Kind)
		})
	}
}
