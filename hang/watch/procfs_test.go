package watch

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// line is /proc/PID/stat.
func line(name string, state byte, utime, stime, cutime, cstime, threads, start uint64) string {
	return fmt.Sprintf("7 (%s) %c 1 7 7 0 -1 4194304 90 0 0 0 %d %d %d %d 20 0 %d 0 %d 1000 5 184467440737 1 1\n",
		name, state, utime, stime, cutime, cstime, threads, start)
}

func TestStat(t *testing.T) {
	for _, name := range []string{"python3", "a b", ") R 1 (", "x)\n(", ""} {
		s, ok := parseStat([]byte(line(name, 'D', 12, 3, 4, 5, 6, 789)))
		require.True(t, ok, name)
		require.Equal(t, stat{state: 'D', cpu: 150 * time.Millisecond, reaped: 90 * time.Millisecond, threads: 6, start: 789,
			parent: 1}, s)
	}
	for _, bad := range []string{
		"", "7", "7 (a", "7 (a)", "7 (a) S 1", strings.Repeat(" ", 100), line("a", 'S', 1, 1, 1, 1, 1, 1)[:50],
		strings.Replace(line("a", 'S', 1, 1, 1, 1, 1, 987), " 987 ", " x87 ", 1),
	} {
		_, ok := parseStat([]byte(bad))
		require.False(t, ok, "%q", bad)
	}
}

func TestSchedstat(t *testing.T) {
	cpu, wait, n, ok := parseSchedstat([]byte("1500000000 77 12\n"))
	require.True(t, ok)
	require.Equal(t, 1500*time.Millisecond, cpu)
	require.EqualValues(t, 77, wait)
	require.EqualValues(t, 12, n)
	for _, bad := range []string{"", "1 2", "a b c", "0 0 0", "-1 2 3"} { // all 0: the kernel does not count
		_, _, _, ok = parseSchedstat([]byte(bad))
		require.False(t, ok, "%q", bad)
	}
}

func FuzzProcfs(f *testing.F) {
	f.Add([]byte(line("python3", 'S', 1, 2, 3, 4, 5, 6)))
	f.Add([]byte("rchar: 5\nwchar: 6\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, ok := parseStat(b)
		require.True(t, !ok || s.cpu >= 0 && s.reaped >= 0 && s.threads >= 0)
		cpu, wait, _, ok := parseSchedstat(b)
		require.True(t, !ok || cpu >= 0 && wait >= 0)
		fieldOf(b, "rchar:")
	})
}
