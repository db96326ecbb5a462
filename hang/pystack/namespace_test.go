package pystack

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A process in a container has its own files, and its own numbers.
func TestOtherNamespaces(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 || exec.Command("unshare", "--pid", "--mount", "--fork", "true").Run() != nil {
		t.Skip("SKIPPED: STACKS IN OTHER NAMESPACES ARE NOT TESTED: they cannot be made here")
	}
	somePythons(t, func(t *testing.T, p python) {
		dir := t.TempDir()
		script, err := filepath.Abs("testdata/states.py")
		require.NoError(t, err)
		exe, err := filepath.EvalSymlinks(p.path)
		require.NoError(t, err)
		// Nobody outside sees the interpreter where it runs.
		const inside = `set -e; mount -t tmpfs none "$1"; cp "$2" "$1/interpreter"; ` +
			`PYTHONHOME="$4" exec "$1/interpreter" "$3" many`
		x, line := start(t, python{path: "unshare"}, "--pid", "--mount", "--fork", "--kill-child",
			"sh", "-c", inside, "sh", dir, exe, script, p.home)
		require.Equal(t, "now", line)
		children, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(x.pid), "task", strconv.Itoa(x.pid), "children"))
		require.NoError(t, err)
		pid, err := strconv.Atoi(strings.TrimSpace(string(children)))
		require.NoError(t, err)
		require.Equal(t, 1, innerID(pid))
		s, err := New().Read(t.Context(), pid)
		require.NoError(t, err)
		require.Empty(t, s.Error)
		require.Equal(t, "CPython "+p.version, s.Interpreter)
		require.Len(t, s.Threads, 201)
		require.Equal(t, pid, mainOf(t, s).TID)
		require.Equal(t, "many", mainOf(t, s).Python[0].Func)
		for _, th := range s.Threads {
			require.NotZero(t, th.TID)
		}
	})
}
