package verdict_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/verdict"
)

var noon = time.Unix(1700000000, 0).UTC()

func TestWhatIsPackedIsUnpacked(t *testing.T) {
	f := verdict.Failure{
		Node: 1, NodeName: "gpu-07", Rank: 3, LocalRank: 1, PID: 42, ExitCode: 7, At: noon,
		LastLines: "ValueError: bad batch",
	}
	packed := verdict.Pack([]verdict.Failure{f})
	require.Equal(t, `rank 3 (node 1 gpu-07, local rank 1) failed: exit code 7, last output "ValueError: bad batch"`,
		packed[0].Text)
	e := verdict.Unpack(job.Evidence{Failures: packed, Restarts: 1, MaxRestarts: 2, WorldSize: 4})
	require.Equal(t, verdict.Evidence{Failures: []verdict.Failure{f}, RestartsUsed: 1, MaxRestarts: 2, WorldSize: 4}, e)
	require.Empty(t, verdict.Pack(nil))
}

func TestTheDaemonsClockCounts(t *testing.T) {
	packed := verdict.Pack([]verdict.Failure{{Rank: 3, At: noon, ErrorTime: noon.Add(-2 * time.Second)}})
	packed[0].At = noon.Add(time.Hour)
	f := verdict.Unpack(job.Evidence{Failures: packed}).Failures[0]
	require.Equal(t, noon.Add(time.Hour), f.At)
	require.Equal(t, noon.Add(time.Hour-2*time.Second), f.ErrorTime)
}

func TestAFailureOfAnotherLauncher(t *testing.T) {
	e := verdict.Unpack(job.Evidence{
		Failures: []job.Failure{{Rank: 3, GroupRank: 1, Text: "it burns", At: noon, Detail: []byte(`"?"`)}},
	})
	require.Equal(t, []verdict.Failure{{Rank: 3, Node: 1, Message: "it burns", At: noon, ExitCode: 1}}, e.Failures)
}

func TestALostNode(t *testing.T) {
	e := verdict.Unpack(job.Evidence{
		Losses: []job.Loss{{Node: "gpu-07", GroupRank: 1, RankBase: 2, Slots: 2, Reason: "it is silent", At: noon}},
	})
	require.Equal(t, []verdict.Loss{{Node: 1, NodeName: "gpu-07", Reason: "it is silent", At: noon, Ranks: []int{2, 3}}},
		e.Losses)
}
