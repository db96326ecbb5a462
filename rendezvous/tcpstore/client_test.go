package tcpstore

import (
	"context"
	"errors"
	"net"
	"sort"
	"sync/atomic"
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

// popOnce is what PyTorch's blocking queue_pop sends; unlike our client's it does not try again.
func popOnce(ctx context.Context, c *Client, key string) (item []byte, err error) {
	if err := c.Wait(ctx, key); err != nil {
		return nil, err
	}
	err = c.do(ctx, request{op: opQueuePop, keys: []string{key}}, func() error {
		n, err := c.uint64()
		if err == nil && n == 0 {
			err = errors.New("the queue is empty")
		}
		if err == nil {
			err = c.read(&item)
		}
		return err
	})
	return item, err
}

// TestBlockingPopNeverFindsNothing is PyTorch's queue_pop of 8 clients, who got QueueEmptyError when they raced.
func TestBlockingPopNeverFindsNothing(t *testing.T) {
	const items, workers = 200, 8
	ctx := testContext(t)
	for range 20 {
		_, addr := start(t, Config{})
		errs := make(chan error, workers)
		var popped atomic.Int64
		for range workers {
			c := dial(t, addr)
			go func() {
				for range items / workers {
					if _, err := popOnce(ctx, c, "/q"); err != nil {
						errs <- err
						return
					}
					popped.Add(1)
				}
				errs <- nil
			}()
		}
		c := dial(t, addr)
		for i := range items {
			require.NoError(t, c.QueuePush(ctx, "/q", []byte{byte(i)}))
		}
		for range workers {
			require.NoError(t, <-errs)
		}
		require.Equal(t, int64(items), popped.Load())
		n, err := c.QueueLen(ctx, "/q")
		require.NoError(t, err)
		require.Zero(t, n)
	}
}

// TestKeptItemGoesOn: one that was woken and does not pop, or is gone, must not keep an item from those who do.
func TestKeptItemGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Config{})
		idle, waiter, third := record(pipe(t, s)), record(pipe(t, s)), record(pipe(t, s))
		send(t, idle.nc, greeting+"\x06"+strs("q"))
		synctest.Wait()
		send(t, waiter.nc, greeting+"\x06"+strs("q"))
		synctest.Wait()
		send(t, third.nc, greeting+"\x0e"+str("q")+str("1"))
		synctest.Wait()
		got, _ := idle.take()
		require.Equal(t, "\x00", got)
		time.Sleep(keepTime - time.Millisecond)
		got, _ = waiter.take()
		require.Empty(t, got)
		time.Sleep(keepTime + 2*time.Millisecond)
		synctest.Wait()
		got, _ = waiter.take()
		require.Equal(t, "\x00", got, "the first had its time")

		send(t, third.nc, "\x06"+strs("q"))
		synctest.Wait()
		require.NoError(t, waiter.nc.Close())
		synctest.Wait()
		got, _ = third.take()
		require.Equal(t, "\x00", got, "the second is gone")
		send(t, third.nc, "\x0f"+str("q"))
		synctest.Wait()
		got, _ = third.take()
		require.Equal(t, u64(1)+str("1"), got)
		send(t, idle.nc, "\x0f"+str("q"))
		synctest.Wait()
		got, _ = idle.take()
		require.Equal(t, u64(0), got)
		require.NoError(t, s.Close())
	})
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
