package checkpoints

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd"
	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/job"
	"dlrover-run/launcher"
)

// moving is a rendezvous whose server is another one each time that it is asked, until the last.
type moving struct {
	feature.Rendezvous
	servers []string
	follow  func(string)
}

func (m *moving) FollowDaemons(move func(string)) { m.follow = move }

func (m *moving) Daemons() (now string) {
	now = m.servers[0]
	m.servers = m.servers[min(1, len(m.servers)-1):]
	return now
}

// A checkpoint daemon hears of a server that was elected before it has followed the elections.
func TestDaemonsAreFollowed(t *testing.T) {
	var told []string
	move := func(addr string) { told = append(told, addr) }
	m := &moving{servers: []string{"a:1", "b:1", "c:1"}}
	follow(m, m.Daemons(), move)
	require.Equal(t, []string{"b:1", "c:1"}, told)
	m.follow("d:1")
	require.Equal(t, []string{"b:1", "c:1", "d:1"}, told)
	told = nil
	follow(m, "c:1", move)
	require.Empty(t, told, "nothing has changed")
}

// The saves of an epoch are those that each worker has which makes any; those of earlier epochs do not count.
func TestSavesOfAnEpoch(t *testing.T) {
	began := time.Unix(1000, 0)
	at := func(second int) time.Time { return began.Add(time.Duration(second) * time.Second) }
	usage := checkpointd.Usage{Loaded: 4, Resumed: true, Blocked: 5 * time.Second, Before: 4 * time.Second}
	for name, c := range map[string]struct {
		ranks []coordinator.Age
		want  job.Progress
	}{
		"none": {nil, job.Progress{}},
		"of an earlier epoch": {[]coordinator.Age{{MemoryStep: 4, MemoryAt: at(-1), DurableStep: 3, DurableAt: at(-2)}},
			job.Progress{}},
		"in memory, on disk": {[]coordinator.Age{{MemoryStep: 8, MemoryAt: at(8), DurableStep: 6, DurableAt: at(6)}},
			job.Progress{Checkpoint: 8, Saving: true, Kept: 1 * time.Second}},
		"on disk alone": {[]coordinator.Age{{MemoryStep: -1, DurableStep: 6, DurableAt: at(6)}},
			job.Progress{Checkpoint: 6, Saving: true, Kept: 3 * time.Second}},
		"one worker is behind, one saves nothing": {[]coordinator.Age{{MemoryStep: 9, MemoryAt: at(9)},
			{MemoryStep: 8, MemoryAt: at(8)}, {MemoryStep: 4, MemoryAt: at(-1)}},
			job.Progress{Checkpoint: 8, Saving: true, Kept: 1 * time.Second}},
	} {
		c.want.Loaded, c.want.Resumed, c.want.Blocked = 4, true, 5*time.Second
		got := progressOf(&checkpointd.Status{Ranks: c.ranks, Usage: usage}, began, at(10))
		require.Equal(t, c.want, got, name)
	}
}

// Only where the same nodes go on may the write wait for the workers: others need it at once.
func TestPace(t *testing.T) {
	for _, c := range []struct {
		r    launcher.StopRequest
		want checkpointd.Pace
	}{
		{launcher.StopRequest{CauseKind: job.CauseFailure}, checkpointd.AfterRestart},
		{launcher.StopRequest{CauseKind: job.CauseHang}, checkpointd.AfterRestart},
		{launcher.StopRequest{CauseKind: job.CauseFailure, Early: true}, checkpointd.Early},
		{launcher.StopRequest{CauseKind: job.CauseFailure, Leaving: true}, checkpointd.AtOnce},
		{launcher.StopRequest{CauseKind: job.CauseLoss}, checkpointd.AtOnce},
		{launcher.StopRequest{CauseKind: job.CauseLeave}, checkpointd.AtOnce},
		{launcher.StopRequest{CauseKind: job.CauseGrowth}, checkpointd.AtOnce},
		{launcher.StopRequest{}, checkpointd.AtOnce}, // the workers have succeeded
	} {
		require.Equal(t, c.want, pace(c.r), "%+v", c.r)
	}
}
