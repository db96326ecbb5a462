package serve

import (
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// wired are the ends of a connection, and the socket of the first.
func wired(t *testing.T) (a, b net.Conn, raw syscall.RawConn) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	b, err = net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	a, err = l.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _, _ = a.Close(), b.Close() })
	raw = rawOf(a)
	require.NotNil(t, raw)
	return a, b, raw
}

// told waits for the next news, and that there is no more than one.
func (p *poller) told(t *testing.T) news {
	t.Helper()
	all, err := p.wait(&waiting{})
	require.NoError(t, err)
	require.Len(t, all, 1)
	return all[0]
}

func TestNewsIsToldOnce(t *testing.T) {
	p, err := newPoller()
	require.NoError(t, err)
	defer p.close()
	a, b, raw := wired(t)
	const id = 1<<40 | 1<<31 | 7
	_, err = b.Write([]byte("x"))
	require.NoError(t, err)
	require.NoError(t, p.add(raw, id))
	require.Error(t, p.add(raw, id), "it is there")
	require.Equal(t, news{id, false}, p.told(t), "what came before")

	quiet := make(chan news)
	go func() {
		all, err := p.wait(&waiting{})
		if err == nil {
			quiet <- all[0]
		}
		close(quiet)
	}()
	select {
	case n := <-quiet:
		require.Fail(t, "told again", "%v", n)
	case <-time.After(20 * time.Millisecond):
	}
	require.NoError(t, p.again(raw, id), "it is asked for")
	require.Equal(t, news{id, false}, <-quiet)

	_, err = a.Read(make([]byte, 8))
	require.NoError(t, err)
	require.NoError(t, p.again(raw, id), "nothing is there any more")
	require.NoError(t, b.Close())
	require.Equal(t, news{id, true}, p.told(t))

	require.NoError(t, p.remove(raw))
	require.Error(t, p.again(raw, id))
}

// Many may wait; each socket's news is told to one of them.
func TestManyWait(t *testing.T) {
	p, err := newPoller()
	require.NoError(t, err)
	const sockets = 3 * newsAtOnce
	var ends []net.Conn
	for i := range sockets {
		_, b, raw := wired(t)
		require.NoError(t, p.add(raw, uint64(i)))
		ends = append(ends, b)
	}
	got := make(chan []news)
	over := make(chan error)
	for range 4 {
		go func() {
			for w := new(waiting); ; {
				all, err := p.wait(w)
				if err != nil {
					over <- err
					return
				}
				got <- append([]news(nil), all...)
			}
		}()
	}
	for _, b := range ends {
		_, err := b.Write([]byte("x"))
		require.NoError(t, err)
	}
	seen := map[uint64]bool{}
	for len(seen) < sockets {
		for _, n := range <-got {
			require.False(t, seen[n.socket])
			seen[n.socket] = true
		}
	}
	p.close()
	for range 4 {
		require.Error(t, <-over)
	}
	_, _, raw := wired(t)
	require.Error(t, p.add(raw, 1))
}
