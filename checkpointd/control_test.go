package checkpointd

import (
	"bufio"
	"context"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// ending is a connection whose reader's context ends with the first reply.
type ending struct {
	net.Conn
	end     context.CancelFunc
	expired chan struct{}
}

func (e *ending) Read(b []byte) (int, error) {
	n, err := e.Conn.Read(b)
	e.end()
	<-e.expired
	return n, err
}

func (e *ending) SetDeadline(at time.Time) error {
	if !at.IsZero() {
		defer close(e.expired)
	}
	return e.Conn.SetDeadline(at)
}

// The end of a call's context has no effect on the next call.
func TestContextThatEndsWithTheReply(t *testing.T) {
	ours, theirs := net.Pipe()
	defer ours.Close()
	go func() { // a daemon
		for in := bufio.NewReader(theirs); ; {
			if _, err := in.ReadString('\n'); err != nil {
				return
			}
			_, _ = io.WriteString(theirs, `{"ok":true,"left":3}`+"\n")
		}
	}()
	ctx, cancel := context.WithCancel(t.Context())
	conn := &ending{ours, cancel, make(chan struct{})}
	c := &Control{conn: conn, in: bufio.NewReader(conn)}
	require.NoError(t, c.Lead(ctx, "l"))
	left, err := c.End(t.Context(), 0)
	require.NoError(t, err)
	require.Equal(t, 3, left)
}
