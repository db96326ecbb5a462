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
	in := &Inbox{caught: map[syscall.Signal]chan<- os.Signal{}, duplicates: map[delivery][]time.Time{},
		last: map[syscall.Signal]time.Time{}, twoWays: true}
	out := make(chan os.Signal, 16)
	in.caught[syscall.SIGTERM] = out
	for _, c := range []struct {
		passed bool
		want   int
	}{{true, 1}, {false, 1}, {false, 2}, {true, 2}, {true, 3}, {true, 4}, {false, 4}, {false, 4}, {false, 5}} {
		in.deliver(syscall.SIGTERM, c.passed)
		require.Len(t, out, c.want)
	}
	for k := range in.duplicates {
		for i := range in.duplicates[k] {
			in.duplicates[k][i] = in.duplicates[k][i].Add(-2 * sameSignal)
		}
	}
	in.deliver(syscall.SIGTERM, true)
	require.Len(t, out, 6, "what came long ago is another signal")
}

// Who starts a launcher on this host, and passes signals on, may be of its unit, too.
func TestInboxCountsRelayedSignals(t *testing.T) {
	for _, order := range [][]bool{{true, true, false}, {true, false, true}, {false, true, true}} {
		in := &Inbox{caught: map[syscall.Signal]chan<- os.Signal{}, duplicates: map[delivery][]time.Time{},
			last: map[syscall.Signal]time.Time{}, twoWays: true}
		in.Relayed()
		out := make(chan os.Signal, 16)
		in.caught[syscall.SIGTERM] = out
		for range 2 {
			want := len(out) + 1
			for _, passed := range order {
				in.deliver(syscall.SIGTERM, passed)
				require.Len(t, out, want, order)
			}
			in.last[syscall.SIGTERM] = in.last[syscall.SIGTERM].Add(-sameRelayed)
		}
	}
}
