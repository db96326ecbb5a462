package rendezvous

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// quorumTest has three groups of a run, at least one of which is needed, on a clock of its own.
type quorumTest struct {
	t *testing.T
	Quorums
	now time.Time
}

func newQuorumTest(t *testing.T, least int) *quorumTest {
	return &quorumTest{t, Quorums{Groups: 3, Min: least}, time.Unix(1_700_000_000, 0)}
}

func (q *quorumTest) after(d time.Duration) { q.now = q.now.Add(d) }

func (q *quorumTest) lives(replicas ...string) {
	for _, id := range replicas {
		require.True(q.t, q.Hear(QuorumAsk{Replica: id, Group: int(id[0] - 'a')}, q.now))
	}
}

func askOf(id, number string) QuorumAsk {
	return QuorumAsk{Replica: id, Group: int(id[0] - 'a'), Number: number, Member: []byte(id)}
}

// asks has replicas ask under a number.
func (q *quorumTest) asks(number string, replicas ...string) {
	for _, id := range replicas {
		require.True(q.t, q.Hear(askOf(id, number), q.now))
	}
}

// have wants these replicas, which have asked, to have a quorum of themselves. It returns its ID.
func (q *quorumTest) have(number string, replicas ...string) (quorum int64) {
	q.t.Helper()
	for _, id := range replicas {
		got := q.Answer(askOf(id, number), q.now)
		require.NotNil(q.t, got, id)
		require.Equal(q.t, fmt.Sprint(replicas), fmt.Sprintf("%s", got.Members))
		quorum = got.ID
	}
	return quorum
}

func (q *quorumTest) waits(number, replica string) {
	q.t.Helper()
	require.Nil(q.t, q.Answer(askOf(replica, number), q.now))
}

// begun has a quorum of all three groups.
func begun(t *testing.T, least int) (q *quorumTest, id int64) {
	q = newQuorumTest(t, least)
	q.asks("1", "c", "a", "b")
	return q, q.have("1", "a", "b", "c")
}

func TestQuorumOfAll(t *testing.T) {
	q, first := begun(t, 1)
	require.Equal(t, first, q.have("1", "a", "b", "c"), "the same answer for an ask that is repeated")
	q.asks("2", "a", "b")
	q.waits("2", "a")
	q.asks("2", "c")
	require.Equal(t, first, q.have("2", "a", "b", "c"), "nobody has to connect anew")
	failed := askOf("b", "3")
	failed.Failed = true
	require.True(t, q.Hear(failed, q.now))
	q.asks("3", "a", "c")
	require.Equal(t, first+1, q.have("3", "a", "b", "c"), "after a step that failed they do")
}

func TestQuorumWithoutAGroup(t *testing.T) {
	t.Run("that was ended", func(t *testing.T) {
		q, first := begun(t, 1)
		q.asks("2", "a", "b")
		q.Ended(2)
		q.lives("c") // its last sign of life was on the way
		require.Equal(t, first+1, q.have("2", "a", "b"))
		q.asks("3", "a", "b", "c2")
		require.Equal(t, first+2, q.have("3", "a", "b", "c2"), "its new workers")
	})
	t.Run("whose old end becomes known late", func(t *testing.T) {
		q, first := begun(t, 1)
		q.asks("2", "a", "b", "c")
		q.Ended(2)
		q.asks("2", "c") // it repeats its ask
		require.Equal(t, first, q.have("2", "a", "b", "c"))
	})
	t.Run("that gives no sign of life", func(t *testing.T) {
		q, first := begun(t, 1)
		q.asks("2", "a", "b")
		q.after(replicaLost - 1)
		q.lives("a", "b")
		q.waits("2", "a")
		q.after(1)
		require.Equal(t, first+1, q.have("2", "a", "b"))
	})
	t.Run("that lives and does not ask", func(t *testing.T) {
		q, first := begun(t, 1)
		q.asks("2", "a", "b")
		for range replicaJoins/time.Second - 1 {
			q.after(time.Second)
			q.lives("a", "b", "c")
			q.waits("2", "a")
		}
		q.after(time.Second)
		require.Equal(t, first+1, q.have("2", "a", "b"))
	})
	t.Run("that is needed", func(t *testing.T) {
		q, _ := begun(t, 3)
		q.asks("2", "a", "b")
		q.Ended(2)
		q.waits("2", "a")
	})
	t.Run("and the majority", func(t *testing.T) {
		q, _ := begun(t, 1)
		q.asks("2", "a")
		for range 2 * replicaJoins / time.Second {
			q.after(time.Second)
			q.lives("a", "b", "c")
			q.waits("2", "a")
		}
	})
}

func TestFirstQuorumWaitsForOthers(t *testing.T) {
	q := newQuorumTest(t, 1)
	q.asks("1", "a")
	q.after(replicasSettle - 1)
	q.waits("1", "a")
	q.lives("b") // it came in time
	q.after(time.Second)
	q.waits("1", "a")
	q.asks("1", "b")
	q.have("1", "a", "b")
	q.asks("2", "a", "b", "c")
	q.have("2", "a", "b", "c")
}

func TestQuorumOfALaterServer(t *testing.T) {
	old, id := begun(t, 1)
	for range 100 {
		failed := askOf("a", fmt.Sprint(old.id))
		failed.Failed = true
		require.True(t, old.Hear(failed, old.now))
		old.asks(failed.Number, "b", "c")
		id = old.have(failed.Number, "a", "b", "c")
	}
	next := newQuorumTest(t, 1)
	next.now = old.now.Add(time.Second)
	next.asks("1", "a", "b", "c")
	require.Greater(t, next.have("1", "a", "b", "c"), id)
}

func TestQuorumThatOnlyShrinks(t *testing.T) {
	q := newQuorumTest(t, 1)
	q.asks("1", "a", "b")
	q.after(replicasSettle)
	q.have("1", "a", "b")
	shrink := askOf("a", "2")
	shrink.ShrinkOnly = true
	require.True(t, q.Hear(shrink, q.now))
	q.asks("2", "b", "c")
	q.have("2", "a", "b")
	q.waits("2", "c")
	q.asks("3", "a", "b")
	require.Len(t, q.Answer(askOf("a", "3"), q.now).Members, 3, "and grows again")
}

func TestReplicasAreBounded(t *testing.T) {
	q := newQuorumTest(t, 1)
	for i := range 3 * replicasPerGroup {
		q.lives(fmt.Sprint("a", i))
	}
	require.False(t, q.Hear(askOf("b", "1"), q.now))
	q.after(replicaLost)
	q.lives("b")
	require.Len(t, q.replicas, 1)
}
