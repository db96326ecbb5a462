package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/cmd/internal/ckptd"
	"dlrover-run/cmd/internal/guarded"
)

// The guard starts the launcher before the packages are initialised that it does not
// need itself; one import too many, and it waits for most of them.
func TestGuardStartsEarly(t *testing.T) {
	b := newBench(t)
	l := b.start("dlrover-run", []string{"GODEBUG=inittrace=1"}, b.sh("exit 0", "--nproc-per-node=1")...)
	require.Equal(t, 0, l.wait())
	processes := strings.Split(l.err.String(), "init runtime @")
	require.Len(t, processes, 3, "guard and launcher")
	require.Less(t, strings.Count(processes[1], "\ninit "), 30, "in the guard: %s", processes[1])
	require.NotContains(t, processes[1], "init net/http @")
	require.Contains(t, processes[2], "init net/http @")
}

// The daemon is the same file, and has no guard.
func TestGuardedDaemon(t *testing.T) {
	require.Equal(t, ckptd.Name, guarded.Daemon)
}

// A job with a limited address space that starts nevertheless was warned.
func TestLittleAddressSpace(t *testing.T) {
	b := newBench(t)
	l := b.startPath("/bin/sh", nil,
		append([]string{"-c", `ulimit -v 1000000; exec "$@"`, "sh", filepath.Join(binDir, "dlrover-run")},
			b.sh("exit 0", "--nproc-per-node=1")...)...)
	l.wait()
	if strings.HasPrefix(l.err.String(), "runtime: ") || strings.HasPrefix(l.err.String(), "fatal error: ") {
		t.Skip("SKIPPED: this Go runtime does not start under the limit, so WHAT IS SAID THEN IS NOT TESTED")
	}
	require.Contains(t, l.err.String(), "dlrover-run: warning: the address space is limited to 976 MiB (ulimit -v)")
}
