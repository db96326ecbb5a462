package api

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous"
)

// ending is a connection whose next read fails.
type ending struct {
	net.Conn
	err error
}

func (e ending) Read([]byte) (int, error) {
	if e.err == io.EOF {
		return 0, e.err
	}
	return 0, &net.OpError{Op: "read", Err: os.NewSyscallError("read", e.err)}
}

// The end of a connection on which nobody has answered, or whose peer has hung up, tells of its node, and any other
// end does not.
func TestEndOfAConnection(t *testing.T) {
	for err, want := range map[error]struct{ silent, suspect bool }{
		syscall.ETIMEDOUT: {true, true}, syscall.EHOSTUNREACH: {true, true}, syscall.ENETUNREACH: {true, true},
		syscall.ECONNRESET: {false, true}, io.EOF: {false, true}, os.ErrDeadlineExceeded: {false, false},
	} {
		t.Run(err.Error(), func(t *testing.T) {
			h, c := joinedOver(t, err)
			c.watched(h, "r", "a")
			for range 2 {
				_, got := c.Read(nil)
				require.ErrorIs(t, got, err)
			}
			require.Equal(t, want.silent, c.silent())
			require.Equal(t, want.suspect, h.Runs(true)[0].Nodes[0].Suspect)
		})
	}
}

// joinedOver is a Hub with the node a, and a connection whose reads fail.
func joinedOver(t *testing.T, err error) (*Hub, *line) {
	t.Helper()
	h := NewHub(HubConfig{})
	t.Cleanup(h.Close)
	require.NoError(t, h.Join(t.Context(), "r", rendezvous.Join{
		Node: rendezvous.Node{ID: "a", Name: "a", Rank: -1, Slots: 1}, Params: rendezvous.Params{Min: 1, Max: 1},
	}))
	return h, &line{Conn: ending{err: err}}
}

// A peer that hangs up while its request is carried out is suspect when that has ended, but not if it has another one.
func TestPeerThatHangsUpEarly(t *testing.T) {
	for name, c := range map[string]struct {
		request func(*testing.T, *Hub, *line)
		suspect bool
	}{
		"joining": {func(_ *testing.T, h *Hub, c *line) { c.watched(h, "r", "a") }, true},
		"told something": {func(t *testing.T, h *Hub, c *line) {
			_, err := h.watch(t.Context(), "r", "a", Cursor{}, c)
			require.NoError(t, err)
		}, true},
		"watching elsewhere": {func(t *testing.T, h *Hub, c *line) {
			r, err := h.existing("r")
			require.NoError(t, err)
			require.NoError(t, r.step(rendezvous.Attach{ID: "a"}))
			c.watched(h, "r", "a")
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			h, l := joinedOver(t, io.EOF)
			_, err := l.Read(nil)
			require.ErrorIs(t, err, io.EOF)
			c.request(t, h, l)
			require.Equal(t, c.suspect, h.Runs(true)[0].Nodes[0].Suspect)
		})
	}
}

// What was read of a connection and given back is read first.
func TestUnread(t *testing.T) {
	c := &line{Conn: ending{err: io.EOF}}
	c.Unread([]byte("cd"))
	c.Unread([]byte("ab"))
	got, err := io.ReadAll(c)
	require.NoError(t, err)
	require.Equal(t, "abcd", string(got))
}

// The context of a connection ends with it, at whichever end, and is the same for all of its requests.
func TestConnectionOfARequest(t *testing.T) {
	ctxs := make(chan context.Context, 1)
	h := http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) { ctxs <- Connection(req.Context()) })
	s := NewServer(h)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	go func() { _ = s.Serve(Watchful(l)) }()
	t.Cleanup(func() { _ = s.Close() })
	connect := func() (net.Conn, context.Context) {
		nc, err := net.Dial("tcp", l.Addr().String())
		require.NoError(t, err)
		t.Cleanup(func() { _ = nc.Close() })
		ask := func() context.Context {
			_, err := io.WriteString(nc, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
			require.NoError(t, err)
			return <-ctxs
		}
		first := ask()
		require.NotNil(t, first)
		require.Same(t, first, ask())
		require.NoError(t, first.Err())
		return nc, first
	}
	for range 2 {
		nc, ctx := connect()
		require.NoError(t, nc.Close())
		<-ctx.Done()
	}
	_, ctx := connect()
	require.NoError(t, s.Close())
	<-ctx.Done()
}

// A host that has fallen silent ends its connection, and nobody knows the end of one that is no line.
func TestConnectionOfASilentHost(t *testing.T) {
	for err, want := range map[error]bool{syscall.ETIMEDOUT: true, io.EOF: true, os.ErrDeadlineExceeded: false} {
		c := &line{Conn: ending{err: err}}
		before := Connection(context.WithValue(t.Context(), lineKey{}, c))
		_, _ = c.Read(nil)
		require.Equal(t, want, before.Err() != nil, err)
		late := &line{Conn: ending{err: err}}
		_, _ = late.Read(nil)
		require.Equal(t, want, Connection(context.WithValue(t.Context(), lineKey{}, late)).Err() != nil, err)
	}
	require.Nil(t, Connection(t.Context()))
}
