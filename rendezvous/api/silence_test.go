package api

import (
	"net"
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
	return 0, &net.OpError{Op: "read", Err: os.NewSyscallError("read", e.err)}
}

// The end of a connection on which nobody has answered tells of its node, and any other end does not.
func TestSilentConnection(t *testing.T) {
	for err, suspect := range map[error]bool{
		syscall.ETIMEDOUT: true, syscall.EHOSTUNREACH: true, syscall.ENETUNREACH: true,
		syscall.ECONNRESET: false, os.ErrDeadlineExceeded: false,
	} {
		t.Run(err.Error(), func(t *testing.T) {
			h := NewHub(HubConfig{})
			defer h.Close()
			require.NoError(t, h.Join(t.Context(), "r", rendezvous.Join{
				Node: rendezvous.Node{ID: "a", Name: "a", Rank: -1, Slots: 1}, Params: rendezvous.Params{Min: 1, Max: 1},
			}))
			c := &line{Conn: ending{err: err}}
			c.watched(h, "r", "a")
			for range 2 {
				_, got := c.Read(nil)
				require.ErrorIs(t, got, err)
			}
			require.Equal(t, suspect, c.silent())
			require.Equal(t, suspect, h.Runs(true)[0].Nodes[0].Suspect)
		})
	}
}
