package etcd

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous/lead"
)

// candidate is a process that campaigns.
type candidate struct {
	store *Store
	term  chan lead.Term
	stop  context.CancelFunc
}

func newCandidate(t *testing.T, endpoint string, seats int) *candidate {
	s, err := Open(Config{Endpoints: []string{endpoint}, Prefix: "/s", Seats: seats})
	require.NoError(t, err)
	c := &candidate{store: s, term: make(chan lead.Term, 1)}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if term, _, err := s.Campaign(ctx, "a:1"); err == nil {
			c.term <- term
		}
	}()
	c.stop = func() {
		stop()
		<-done
	}
	t.Cleanup(func() {
		c.stop()
		_ = s.Close()
	})
	return c
}

func (c *candidate) seated() bool {
	select {
	case <-c.store.Seated():
		return true
	default:
		return false
	}
}

func seated(all []*candidate) (n int) {
	for _, c := range all {
		if c.seated() {
			n++
		}
	}
	return n
}

// As many campaign as there are seats. The others hold no lease, and one of them campaigns when a seat is free.
func TestSeats(t *testing.T) {
	endpoint := server(t)
	first := newCandidate(t, endpoint, 2)
	term := <-first.term
	var others []*candidate
	for range 3 {
		others = append(others, newCandidate(t, endpoint, 2))
	}
	require.Eventually(t, func() bool { return seated(others) == 1 }, 20*time.Second, time.Millisecond)
	require.Never(t, func() bool { return seated(others) > 1 }, 300*time.Millisecond, 10*time.Millisecond)
	require.Eventually(t, func() bool {
		leases, err := first.store.client.Leases(t.Context())
		require.NoError(t, err)
		return len(leases.Leases) == 2 // those who lost the race for a seat have returned theirs
	}, 20*time.Second, 10*time.Millisecond)
	require.NoError(t, first.store.Depose(t.Context(), lead.Leader{Term: term}))
	require.Eventually(t, func() bool { return seated(others) == 2 }, 20*time.Second, time.Millisecond)
	select {
	case next := <-others[0].term:
		require.Greater(t, next, term)
	case next := <-others[1].term:
		require.Greater(t, next, term)
	case next := <-others[2].term:
		require.Greater(t, next, term)
	case <-time.After(20 * time.Second):
		require.Fail(t, "no leader")
	}
}

// All get the value of the first one, and it is kept for a while after the last one.
func TestAgree(t *testing.T) {
	endpoint := server(t)
	open := func() *Store {
		s, err := Open(Config{Endpoints: []string{endpoint}, Prefix: "/a"})
		require.NoError(t, err)
		t.Cleanup(func() { _ = s.Close() })
		return s
	}
	const n = 8
	values := make(chan string, n)
	for i := range n {
		s := open()
		go func() {
			v, err := s.Agree(t.Context(), "token", string(rune('a'+i)), time.Hour)
			if err != nil {
				v = err.Error()
			}
			values <- v
		}()
	}
	first := <-values
	require.Len(t, first, 1)
	for range n - 1 {
		require.Equal(t, first, <-values)
	}
	s := open()
	leases, err := s.client.Leases(t.Context())
	require.NoError(t, err)
	require.Len(t, leases.Leases, 1)
	_, err = s.client.Put(t.Context(), s.prefix+"by-hand", "x")
	require.NoError(t, err)
	soon, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	v, err := s.Agree(soon, "by-hand", "y", time.Hour)
	require.NoError(t, err)
	require.Equal(t, "x", v, "it has no lease")
	v, err = s.Agree(t.Context(), "other", "x", time.Second)
	require.NoError(t, err)
	require.Equal(t, "x", v)
	require.Eventually(t, func() bool {
		r, err := s.client.Get(t.Context(), s.prefix+"other")
		return err == nil && len(r.Kvs) == 0
	}, 30*time.Second, 100*time.Millisecond)
}
