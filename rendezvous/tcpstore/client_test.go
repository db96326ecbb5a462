package tcpstore

import (
	"context"
	"net"
	"sort"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestClient(t *testing.T) {
	ctx := testContext(t)
	_, addr := start(t, Config{})
	c := dial(t, addr)
	require.NoError(t, c.Ping(ctx))
	require.NoError(t, c.Set(ctx, "/k", []byte("v")))
	require.NoError(t, c.Append(ctx, "/k", []byte("w")))
	v, err := c.Get(ctx, "/k")
	require.NoError(t, err)
	require.Equal(t, "vw", string(v))
	v, err = c.CompareSet(ctx, "/k", []byte("vw"), []byte("x"))
	require.NoError(t, err)
	require.Equal(t, "x", string(v))
	require.NoError(t, c.MultiSet(ctx, []string{"/a", "/b"}, [][]byte{[]byte("1"), []byte("2")}))
	require.Error(t, c.MultiSet(ctx, []string{"/a"}, nil))
	vs, err := c.MultiGet(ctx, "/b", "/no", "/a")
	require.NoError(t, err)
	require.Equal(t, [][]byte{[]byte("2"), {}, []byte("1")}, vs)
	n, err := c.Add(ctx, "/a", -4)
	require.NoError(t, err)
	require.Equal(t, int64(-3), n)
	ok, err := c.Check(ctx, "/a", "/no")
	require.NoError(t, err)
	require.False(t, ok)
	ok, err = c.Check(ctx, "/a")
	require.NoError(t, err)
	require.True(t, ok)
	keys, err := c.ListKeys(ctx)
	require.NoError(t, err)
	sort.Strings(keys)
	require.Equal(t, []string{"/a", "/b", "/k"}, keys)
	n, err = c.NumKeys(ctx)
	require.NoError(t, err)
	require.Equal(t, int64(3), n)
	ok, err = c.Delete(ctx, "/no")
	require.NoError(t, err)
	require.False(t, ok)
	require.NoError(t, c.Barrier(ctx, "/bar", 1))
}

func TestClientGivesUpAWait(t *testing.T) {
	ctx := testContext(t)
	_, addr := start(t, Config{})
	c, other := dial(t, addr), dial(t, addr)
	for name, wait := range map[string]func(context.Context) error{
		"wait":    func(ctx context.Context) error { return c.Wait(ctx, "/no") },
		"get":     func(ctx context.Context) error { _, err := c.Get(ctx, "/no"); return err },
		"pop":     func(ctx context.Context) error { _, err := c.QueuePop(ctx, "/q"); return err },
		"barrier": func(ctx context.Context) error { return c.Barrier(ctx, "/bar", 2) },
	} {
		short, cancel := context.WithTimeout(ctx, time.Millisecond)
		require.ErrorIs(t, wait(short), context.DeadlineExceeded, name)
		cancel()
	}
	require.NoError(t, other.Set(ctx, "/no", nil))
	require.NoError(t, c.Ping(ctx), "the stream is in step")
}

// TestClientWaitAnsweredWhileGivingUp has the answer cross the CANCEL_WAIT.
func TestClientWaitAnsweredWhileGivingUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mine, theirs := net.Pipe()
		server := record(theirs)
		c, err := newClient(mine)
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- c.Wait(ctx, "k") }()
		synctest.Wait()
		got, _ := server.take()
		require.Equal(t, greeting+"\x06"+strs("k"), got)
		cancel()
		synctest.Wait()
		got, _ = server.take()
		require.Equal(t, "\x0c", got)
		send(t, theirs, "\x00\x01")
		require.NoError(t, <-done, "the key was there")
		require.NoError(t, c.Close())
	})
}

func TestClientFailsForGood(t *testing.T) {
	ctx := testContext(t)
	s, addr := start(t, Config{})
	c := dial(t, addr)
	ended, cancel := context.WithCancel(ctx)
	cancel()
	require.ErrorIs(t, c.Ping(ended), context.Canceled)
	require.NoError(t, c.Ping(ctx), "nothing was sent for a context that had ended")
	s.Reset()
	require.Error(t, c.Ping(ctx))
	require.ErrorContains(t, c.Ping(ctx), "earlier failure")
	_, err := Dial(ended, addr)
	require.ErrorIs(t, err, context.Canceled)
}

func TestQueuePopHasOneWinner(t *testing.T) {
	ctx := testContext(t)
	_, addr := start(t, Config{})
	const items, workers = 200, 8
	results := make(chan string, items)
	errs := make(chan error, workers)
	for range workers {
		c := dial(t, addr)
		go func() {
			for {
				item, err := c.QueuePop(ctx, "/q")
				if err != nil || len(item) == 0 {
					errs <- err
					return
				}
				results <- string(item)
			}
		}()
	}
	c := dial(t, addr)
	for i := range items {
		require.NoError(t, c.QueuePush(ctx, "/q", []byte{byte(i), 1}))
	}
	seen := map[string]bool{}
	for range items {
		seen[<-results] = true
	}
	require.Len(t, seen, items)
	for range workers {
		require.NoError(t, c.QueuePush(ctx, "/q", nil))
	}
	for range workers {
		require.NoError(t, <-errs)
	}
}
