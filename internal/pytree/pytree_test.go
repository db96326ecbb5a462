package pytree

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	files = fstest.MapFS{
		"dlrover/__init__.py":          {Data: []byte("import dlrover_ckpt\n")},
		"dlrover/python/__init__.py":   {},
		"dlrover/python/common/log.py": {Data: []byte("logger = None\n")},
		"dlrover_ckpt/engine.py":       {Data: bytes.Repeat([]byte("# a long file\n"), 8<<10)},
		"dlrover_ckpt/image.py":        {Data: []byte("x = 1\n")},
	}
	source = Source{Name: "test", Files: files}
)

// tree returns the contents of the files below root by their slash-separated names.
func tree(t *testing.T, fsys fs.FS, root string) map[string]string {
	t.Helper()
	all := map[string]string{}
	require.NoError(t, fs.WalkDir(fsys, root, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := fs.ReadFile(fsys, name)
		all[name] = string(data)
		return err
	}))
	return all
}

func TestSumIsThatOfTheContent(t *testing.T) {
	require.Regexp(t, "^[0-9a-f]{64}$", source.Sum())
	require.Equal(t, source.Sum(), source.Sum())
}

func TestExtract(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "python")
	require.NoError(t, source.Extract(dir))
	require.Equal(t, tree(t, files, "."), tree(t, os.DirFS(dir), "."))
	require.NoError(t, filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		require.NoError(t, err)
		info, err := d.Info()
		require.NoError(t, err)
		want := fs.FileMode(0o600)
		if d.IsDir() {
			want = fs.ModeDir | 0o700
		}
		require.Equal(t, want, info.Mode(), name)
		return nil
	}))
}

func TestExtractRepairsWhatIsThere(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "python")
	require.NoError(t, source.Extract(dir))
	changed := filepath.Join(dir, "dlrover", "__init__.py")
	require.NoError(t, os.WriteFile(changed, []byte("raise SystemExit"), 0o600))
	open := filepath.Join(dir, "dlrover_ckpt", "engine.py")
	require.NoError(t, os.Chmod(open, 0o666))
	require.NoError(t, os.Chmod(filepath.Join(dir, "dlrover_ckpt"), 0o777))
	kept, err := os.Lstat(filepath.Join(dir, "dlrover_ckpt", "image.py"))
	require.NoError(t, err)

	require.NoError(t, source.Extract(dir))

	require.Equal(t, tree(t, files, "."), tree(t, os.DirFS(dir), "."))
	for name, mode := range map[string]fs.FileMode{open: 0o600, filepath.Dir(open): fs.ModeDir | 0o700} {
		info, err := os.Lstat(name)
		require.NoError(t, err)
		require.Equal(t, mode, info.Mode(), name)
	}
	now, err := os.Lstat(filepath.Join(dir, "dlrover_ckpt", "image.py"))
	require.NoError(t, err)
	require.True(t, os.SameFile(kept, now), "an unchanged file is left alone")
}

func TestExtractAtTheSameTime(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "python")
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		wg.Go(func() { errs[i] = source.Extract(dir) })
	}
	wg.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	require.Equal(t, tree(t, files, "."), tree(t, os.DirFS(dir), "."), "and no temporary file is left")
}

func TestExtractThroughNoLink(t *testing.T) {
	for name, at := range map[string]string{"the directory itself": ".", "a directory below": "dlrover/python"} {
		t.Run(name, func(t *testing.T) {
			elsewhere, dir := t.TempDir(), filepath.Join(t.TempDir(), "python")
			require.NoError(t, source.Extract(dir))
			link := filepath.Join(dir, at)
			require.NoError(t, os.RemoveAll(link))
			require.NoError(t, os.Symlink(elsewhere, link))

			require.ErrorContains(t, source.Extract(dir), link+" is not a directory of ours")
			require.Empty(t, tree(t, os.DirFS(elsewhere), "."))
		})
	}
	t.Run("a file is replaced, not followed", func(t *testing.T) {
		dir, target := filepath.Join(t.TempDir(), "python"), filepath.Join(t.TempDir(), "target")
		require.NoError(t, source.Extract(dir))
		require.NoError(t, os.WriteFile(target, []byte("mine"), 0o600))
		link := filepath.Join(dir, "dlrover_ckpt", "engine.py")
		require.NoError(t, os.Remove(link))
		require.NoError(t, os.Symlink(target, link))

		require.NoError(t, source.Extract(dir))
		info, err := os.Lstat(link)
		require.NoError(t, err)
		require.True(t, info.Mode().IsRegular())
		data, err := os.ReadFile(target)
		require.NoError(t, err)
		require.Equal(t, "mine", string(data))
	})
}

func TestExtractNeedsTheParent(t *testing.T) {
	require.ErrorIs(t, source.Extract(filepath.Join(t.TempDir(), "missing", "python")), fs.ErrNotExist)
}

// changes are the times at which anything below dir was last changed.
func changes(t *testing.T, dir string) map[string]syscall.Timespec {
	t.Helper()
	all := map[string]syscall.Timespec{}
	require.NoError(t, filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		require.NoError(t, err)
		info, err := d.Info()
		all[name] = info.Sys().(*syscall.Stat_t).Ctim
		return err
	}))
	return all
}

func taken(t *testing.T, base string) *Tree {
	t.Helper()
	tree, err := source.Take(base)
	require.NoError(t, err)
	t.Cleanup(func() { _ = tree.Release() })
	return tree
}

func TestTakeWritesNothingWhenTheTreeIsThere(t *testing.T) {
	base := t.TempDir()
	first := taken(t, base)
	require.Equal(t, tree(t, files, "."), tree(t, os.DirFS(first.Dir()), "."))
	require.NoError(t, first.Release())
	require.NoError(t, os.Mkdir(filepath.Join(first.Dir(), "dlrover", "__pycache__"), 0o755), "Python compiles")
	before := changes(t, base)
	require.Equal(t, first.Dir(), taken(t, base).Dir())
	require.Equal(t, before, changes(t, base))
}

func TestTakeRepairs(t *testing.T) {
	base := t.TempDir()
	dir := taken(t, base).Dir()
	require.NoError(t, os.Remove(filepath.Join(dir, "dlrover", "__init__.py")))
	require.NoError(t, os.Truncate(filepath.Join(dir, "dlrover_ckpt", "engine.py"), 0))
	require.NoError(t, os.Chmod(filepath.Join(dir, "dlrover_ckpt", "image.py"), 0o666))
	require.Equal(t, dir, taken(t, base).Dir())
	require.Equal(t, tree(t, files, "."), tree(t, os.DirFS(dir), "."))
	require.True(t, source.whole(dir))
}

func TestTakeAtTheSameTime(t *testing.T) {
	base := t.TempDir()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				tree, err := source.Take(base)
				if assert.NoError(t, err) {
					assert.True(t, source.whole(tree.Dir()))
					assert.NoError(t, tree.Release())
					assert.NoError(t, discard(tree.Dir()))
				}
			}
		})
	}
	wg.Wait()
}

func TestTakeRefusesALink(t *testing.T) {
	base, elsewhere := t.TempDir(), t.TempDir()
	require.NoError(t, os.Symlink(elsewhere, filepath.Join(base, source.treeName())))
	_, err := source.Take(base)
	require.ErrorContains(t, err, "not a directory of ours")
	require.Empty(t, tree(t, os.DirFS(elsewhere), "."))
}

func TestTakeLeavesNoHalfOfATree(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: A FULL DISK IS NOT TESTED: only root can mount a small file system")
	}
	base := t.TempDir()
	require.NoError(t, syscall.Mount("tmpfs", base, "tmpfs", 0, "size=64k"))
	defer func() { require.NoError(t, syscall.Unmount(base, 0)) }()
	_, err := source.Take(base)
	require.ErrorIs(t, err, syscall.ENOSPC)
	entries, err := os.ReadDir(base)
	require.NoError(t, err)
	require.Empty(t, entries)
}

func TestTidy(t *testing.T) {
	base := t.TempDir()
	own := taken(t, base)
	old := time.Now().Add(-time.Hour)
	other := func(name string, at time.Time) string {
		dir := filepath.Join(base, treePrefix+"other-"+name)
		require.NoError(t, source.Extract(dir))
		require.NoError(t, os.Chtimes(dir, at, at))
		return dir
	}
	unused, fresh, used := other("1", old), other("2", time.Now()), other("3", old)
	held, err := lock(used, unix.LOCK_SH)
	require.NoError(t, err)
	defer held.Close()
	require.NoError(t, os.Chtimes(own.Dir(), old, old))
	require.NoError(t, os.Mkdir(filepath.Join(base, "run"), 0o700))

	require.NoError(t, Tidy(base, time.Minute))
	require.NoDirExists(t, unused)
	for _, dir := range []string{own.Dir(), fresh, used, filepath.Join(base, "run")} {
		require.DirExists(t, dir)
	}
}

func TestVersionIsTheLinkersId(t *testing.T) {
	require.NotEmpty(t, buildID())
	require.Len(t, source.version(), 16)
}
