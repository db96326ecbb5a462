package checkpointd

import (
	"context"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/shm"
)

// fullTable is a listener that finds no descriptor for its first connection.
type fullTable struct {
	net.Listener
	asked int
	again context.CancelFunc
}

func (f *fullTable) Accept() (net.Conn, error) {
	if f.asked++; f.asked == 1 {
		return nil, &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
	}
	f.again()
	return nil, net.ErrClosed
}

func (f *fullTable) Close() error { return nil }

// A full table of descriptors passes, and the saves in memory need the daemon.
func TestServeOutlivesAFullTable(t *testing.T) {
	dir, err := shm.Create(t.TempDir(), "job")
	require.NoError(t, err)
	d, err := New(Config{Dir: dir})
	require.NoError(t, err)
	l := &fullTable{again: d.life.cancel}
	require.NoError(t, d.Serve(t.Context(), l))
	require.Equal(t, 2, l.asked)
	d.Close()
}
