package inbox

import (
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// systemd, for one, signals every process of a unit: the same signal by both ways is
// one, and a second one is a second.
func TestInboxCountsSignals(t *testing.T) {
	in := &Inbox{caught: map[syscall.Signal]chan<- os.Signal{}, echoes: map[echo][]time.Time{}, twoWays: true}
	out := make(chan os.Signal, 16)
	in.caught[syscall.SIGTERM] = out
	for _, c := range []struct {
		passed bool
		want   int
	}{{true, 1}, {false, 1}, {false, 2}, {true, 2}, {true, 3}, {true, 4}, {false, 4}, {false, 4}, {false, 5}} {
		in.deliver(syscall.SIGTERM, c.passed)
		require.Len(t, out, c.want)
	}
	for k := range in.echoes {
		for i := range in.echoes[k] {
			in.echoes[k][i] = in.echoes[k][i].Add(-2 * sameSignal)
		}
	}
	in.deliver(syscall.SIGTERM, true)
	require.Len(t, out, 6, "what came long ago is another signal")
}
