package probe

import (
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// stolen is for how long the hypervisor has given CPUs of this machine to others, since it was booted.
func stolen(t *testing.T) time.Duration {
	text, err := os.ReadFile("/proc/stat")
	require.NoError(t, err)
	line, _, _ := strings.Cut(string(text), "\n")
	fields := strings.Fields(line) // cpu user nice system idle iowait irq softirq steal
	require.Greater(t, len(fields), 8)
	ticks, err := strconv.Atoi(fields[8])
	require.NoError(t, err)
	return time.Duration(ticks) * time.Second / 100
}

// skipStarved skips a test of rates on a machine whose CPUs are given to others.
func skipStarved(t *testing.T) {
	t.Helper()
	const sample, most = 500 * time.Millisecond, 100 * time.Millisecond
	before := stolen(t)
	time.Sleep(sample) // of which the counters tell
	if took := stolen(t) - before; took > most {
		t.Skipf("SKIPPED: the hypervisor took %s of %s: %s IS NOT TESTED", took, sample, t.Name())
	}
}
