package pypath

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/pytree"
	"dlrover-run/internal/tempdir"
)

func aTree(name string, after bool) Tree {
	files := fstest.MapFS{name + ".py": {Data: []byte("x = 1\n")}}
	return Tree{
		Source: pytree.Source{Name: name, Files: files}, What: name + " client", Loss: "no " + name, After: after,
	}
}

// names are the trees of a path, and whatever else is on it.
func treeNames(env []string) (names []string) {
	path, _ := strings.CutPrefix(env[len(env)-1], "PYTHONPATH=")
	for _, dir := range filepath.SplitList(path) {
		if found, _ := filepath.Glob(filepath.Join(dir, "*.py")); len(found) == 1 {
			dir = filepath.Base(found[0])
		}
		names = append(names, dir)
	}
	return names
}

func TestPythonPathOrder(t *testing.T) {
	p := New(t.TempDir(), slog.New(slog.DiscardHandler))
	defer p.Close()
	untouched := []string{"A=1", "PYTHONPATH=/mine"}
	require.Equal(t, untouched, p.Environ(untouched), "nothing was asked for")
	p.Add(aTree("last", true))
	require.Equal(t, []string{"/mine", "last.py"}, treeNames(p.Environ(untouched)))
	p.Add(aTree("first", false))
	p.Add(aTree("second", false))
	for user, want := range map[string][]string{
		"":    {"first.py", "second.py", "last.py"},
		"/x":  {"first.py", "second.py", "/x", "last.py"},
		"/x:": {"first.py", "second.py", "/x", "", "last.py"}, // an empty entry is the working directory
	} {
		require.Equal(t, want, treeNames(p.Environ([]string{"PYTHONPATH=/old", "PYTHONPATH=" + user})), user)
	}
	require.Equal(t, []string{"first.py", "second.py", "last.py"}, treeNames(p.Environ(nil)))
}

// Two features may ask for the same tree.
func TestPythonPathHasATreeOnce(t *testing.T) {
	dir := t.TempDir()
	p := New(dir, slog.New(slog.DiscardHandler))
	defer p.Close()
	p.Add(aTree("one", false))
	p.Add(aTree("one", false))
	require.Equal(t, []string{"one.py"}, treeNames(p.Environ(nil)))
	trees, err := filepath.Glob(filepath.Join(dir, "*", ".python-one-*"))
	require.NoError(t, err)
	require.Len(t, trees, 1)
}

// Where shared memory is of no use a temporary directory is, as long as the launcher lives.
func TestPythonPathInATemporaryDirectory(t *testing.T) {
	temporary := t.TempDir()
	t.Setenv("TMPDIR", temporary)
	p := New("/proc", slog.New(slog.DiscardHandler))
	p.Add(aTree("one", false))
	require.Equal(t, []string{"one.py"}, treeNames(p.Environ(nil)))
	p.Close()
	entries, err := os.ReadDir(temporary)
	require.NoError(t, err)
	require.Empty(t, entries)
}

func TestPythonPathNowhere(t *testing.T) {
	fallbacks := tempdir.Fallbacks
	tempdir.Fallbacks = nil
	t.Cleanup(func() { tempdir.Fallbacks = fallbacks })
	t.Setenv("TMPDIR", "/proc")
	var log bytes.Buffer
	p := New("/proc", slog.New(slog.NewTextHandler(&log, nil)))
	defer p.Close()
	p.Add(aTree("one", false))
	require.Equal(t, []string{"A=1"}, p.Environ([]string{"A=1"}))
	require.Contains(t, log.String(), "no place for the one client: no one")
}
