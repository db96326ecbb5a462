package checkpointd

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/replica"
	"dlrover-run/checkpointd/shm"
)

// A worker reports a save, and so does the exchange of addresses: the partner gets one copy, not two.
func TestASaveIsCopiedOnce(t *testing.T) {
	now := time.Now()
	p := &peers{pending: map[origin]pendingCopy{}, copied: map[origin]pendingCopy{}, unreachable: map[int]backoff{},
		key:   "1.0.0",
		known: []coordinator.Peer{{Node: 0}, {Node: 1}}, partners: []replica.Peer{{Node: 1}}}
	due := func() int {
		t, _ := p.next(now)
		for _, to := range t.to {
			p.recordResult(t, to.Node, nil)
		}
		return len(t.to)
	}
	first, second := shm.Meta{Save: "1", Dir: "/ckpt"}, shm.Meta{Save: "2", Dir: "/ckpt"}
	p.enqueue(now, first)
	require.Equal(t, 1, due())
	p.enqueue(now, first) // before it is known that all have it
	require.Zero(t, due())
	p.enqueue(now, first) // and after
	require.Zero(t, due())
	p.enqueue(now.Add(-1), second)
	require.Zero(t, due(), "an older one")
	p.enqueue(now.Add(1), second)
	require.Equal(t, 1, due())
}

// Only whole saves can be loaded: they are fetched first, however new the others are.
func TestHoldersOfCompleteSavesAreFirst(t *testing.T) {
	copied := func(save string, shard int, second int64) coordinator.Copy {
		return coordinator.Copy{Rank: shard, Shard: shard, Save: save, Step: second, Dir: "/ckpt", SavedNS: second,
			Shards: 2}
	}
	p := &peers{known: []coordinator.Peer{
		{Node: 0, Copies: []coordinator.Copy{copied("new", 0, 30), copied("half", 0, 40)}},
		{Node: 1, Addr: "one", Copies: []coordinator.Copy{copied("half", 0, 40), copied("new", 1, 30),
			copied("old", 0, 10)}},
		{Node: 2, Addr: "two", Copies: []coordinator.Copy{copied("new", 0, 30), copied("old", 1, 10)}},
	}}
	saves := func(have ...restorable) (out []string) {
		for _, h := range p.holders(0, request{Rank: 0, Dir: "/ckpt"}, have) {
			out = append(out, h.addr+" "+h.copy.Save)
		}
		return out
	}
	require.Equal(t, []string{"two new", "one old", "one half"}, saves())
	require.Equal(t, []string{"one half"}, saves(restorable{Save: "new", Step: 30, SavedNS: 30}), "only what is newer")
	require.Empty(t, p.holders(0, request{Rank: 0, Dir: "/other"}, nil))
}

func TestANodeThatIsAwayIsTriedEverMoreSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &peers{pending: map[origin]pendingCopy{{0, "/ckpt"}: {"s", time.Now(), map[int]bool{}}},
			copied: map[origin]pendingCopy{}, unreachable: map[int]backoff{}, key: "1.0.0",
			partners: []replica.Peer{{Node: 1}, {Node: 2}}}
		away := errors.New("connection refused")
		var pauses []time.Duration
		for range 7 {
			task, _ := p.next(time.Now())
			require.Equal(t, 2, task.to[len(task.to)-1].Node, "who may keep us waiting comes last")
			_, is := p.recordResult(task, 2, away)
			require.True(t, is)
			p.recordResult(task, 1, away)
			delete(p.unreachable, 1)
			pauses = append(pauses, p.unreachable[2].pause)
			task, _ = p.next(time.Now())
			require.Equal(t, []replica.Peer{{Node: 1}}, task.to)
			time.Sleep(p.unreachable[2].pause)
		}
		ms := time.Millisecond
		require.Equal(t, []time.Duration{250 * ms, 500 * ms, 1000 * ms, 2000 * ms, 4000 * ms, 8000 * ms, 8000 * ms},
			pauses)
		task, _ := p.next(time.Now())
		was, is := p.recordResult(task, 2, fmt.Errorf("%w: no memory", replica.ErrRefused))
		require.True(t, was)
		require.False(t, is, "it answers, even though it does not want the copy")
		p.recordResult(task, 1, nil)
		task, due := p.next(time.Now())
		require.Empty(t, task.to)
		require.Zero(t, due)
		require.Empty(t, p.pending)
	})
}
