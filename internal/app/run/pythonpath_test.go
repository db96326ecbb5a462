package run

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

func aTree(name string, after bool) pythonTree {
	files := fstest.MapFS{name + ".py": {Data: []byte("x = 1\n")}}
	return pythonTree{
		Source: pytree.Source{Name: name, Files: files}, what: name + " client", loss: "no " + name, after: after,
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
	p := &pythonPath{shmDir: t.TempDir(), log: slog.New(slog.DiscardHandler)}
	defer p.close()
	untouched := []string{"A=1", "PYTHONPATH=/mine"}
	require.Equal(t, untouched, p.environ(untouched), "nothing was asked for")
	p.add(aTree("last", true))
	require.Equal(t, []string{"/mine", "last.py"}, treeNames(p.environ(untouched)))
	p.add(aTree("first", false))
	p.add(aTree("second", false))
	for user, want := range map[string][]string{
		"":    {"first.py", "second.py", "last.py"},
		"/x":  {"first.py", "second.py", "/x", "last.py"},
		"/x:": {"first.py", "second.py", "/x", "", "last.py"}, // an empty entry is the working directory
	} {
		require.Equal(t, want, treeNames(p.environ([]string{"PYTHONPATH=/old", "PYTHONPATH=" + user})), user)
	}
	require.Equal(t, []string{"first.py", "second.py", "last.py"}, treeNames(p.environ(nil)))
}

// Two features may ask for the same tree.
func TestPythonPathHasATreeOnce(t *testing.T) {
	dir := t.TempDir()
	p := &pythonPath{shmDir: dir, log: slog.New(slog.DiscardHandler)}
	defer p.close()
	p.add(aTree("one", false))
	p.add(aTree("one", false))
	require.Equal(t, []string{"one.py"}, treeNames(p.environ(nil)))
	trees, err := filepath.Glob(filepath.Join(dir, "*", ".python-one-*"))
	require.NoError(t, err)
	require.Len(t, trees, 1)
}

// Where shared memory is of no use a temporary directory is, as long as the launcher lives.
func TestPythonPathInATemporaryDirectory(t *testing.T) {
	temporary := t.TempDir()
	t.Setenv("TMPDIR", temporary)
	p := &pythonPath{shmDir: "/proc", log: slog.New(slog.DiscardHandler)}
	p.add(aTree("one", false))
	require.Equal(t, []string{"one.py"}, treeNames(p.environ(nil)))
	p.close()
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
	p := &pythonPath{shmDir: "/proc", log: slog.New(slog.NewTextHandler(&log, nil))}
	defer p.close()
	p.add(aTree("one", false))
	require.Equal(t, []string{"A=1"}, p.environ([]string{"A=1"}))
	require.Contains(t, log.String(), "no place for the one client: no one")
}
