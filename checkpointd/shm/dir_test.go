package shm_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/shm"
)

func top(base string) string { return filepath.Join(base, fmt.Sprintf("dlrover-%d", os.Getuid())) }

func TestCreate(t *testing.T) {
	t.Run("private, and again the same", func(t *testing.T) {
		base := t.TempDir()
		d, err := shm.Create(base, "run-1")
		require.NoError(t, err)
		require.Equal(t, filepath.Join(top(base), "run-1"), d.Path())
		for _, p := range []string{"", "seg", "peer", ".."} {
			fi, err := os.Lstat(filepath.Join(d.Path(), p))
			require.NoError(t, err)
			require.Equal(t, os.ModeDir|0o700, fi.Mode())
		}
		_, err = shm.Create(base, "run-1")
		require.NoError(t, err)
		_, err = shm.OpenDir(d.Path())
		require.NoError(t, err)
	})
	for _, key := range []string{"", ".", "..", ".x", "a/b", "a\x00", "a b", strings.Repeat("k", 129)} {
		t.Run(fmt.Sprintf("bad key %.10q", key), func(t *testing.T) {
			base := t.TempDir()
			_, err := shm.Create(base, key)
			require.ErrorContains(t, err, "bad name")
			require.False(t, exists(top(base)))
		})
	}
	for name, spoil := range map[string]func(t *testing.T, base string){
		"link":          func(t *testing.T, base string) { require.NoError(t, os.Symlink(t.TempDir(), top(base))) },
		"file":          func(t *testing.T, base string) { require.NoError(t, os.WriteFile(top(base), nil, 0o700)) },
		"open to group": func(t *testing.T, base string) { require.NoError(t, os.Mkdir(top(base), 0o750)) },
		"linked run": func(t *testing.T, base string) {
			require.NoError(t, os.Mkdir(top(base), 0o700))
			require.NoError(t, os.Symlink(t.TempDir(), filepath.Join(top(base), "run-1")))
		},
		"linked seg": func(t *testing.T, base string) {
			require.NoError(t, os.MkdirAll(filepath.Join(top(base), "run-1"), 0o700))
			require.NoError(t, os.Symlink(t.TempDir(), filepath.Join(top(base), "run-1", "seg")))
		},
		"of another user": func(t *testing.T, base string) {
			if os.Getuid() != 0 {
				t.Skip("only root can give a directory away, so that of another user is NOT tested")
			}
			require.NoError(t, os.Mkdir(top(base), 0o700))
			require.NoError(t, os.Chown(top(base), 12345, 12345))
		},
	} {
		t.Run(name, func(t *testing.T) {
			base := t.TempDir()
			spoil(t, base)
			_, err := shm.Create(base, "run-1")
			require.Error(t, err)
			if name != "linked seg" {
				_, err = shm.OpenDir(filepath.Join(top(base), "run-1"))
				require.Error(t, err)
			}
		})
	}
}

func TestOwn(t *testing.T) {
	d := newDir(t)
	other, err := shm.OpenDir(d.Path())
	require.NoError(t, err)
	release, err := d.Own()
	require.NoError(t, err)

	_, err = d.Own()
	require.ErrorIs(t, err, shm.ErrOwned)
	_, err = other.Own()
	require.ErrorIs(t, err, shm.ErrOwned)
	require.ErrorIs(t, other.RemoveAll(), shm.ErrOwned)
	require.True(t, exists(d.Path()))

	left := filepath.Join(d.Path(), "peer", ".r1-0.seg.0123.part")
	require.NoError(t, os.WriteFile(left, nil, 0o600))
	require.NoError(t, release())
	require.NoError(t, release(), "again")
	release, err = other.Own()
	require.NoError(t, err)
	require.False(t, exists(left), "what was half received is removed")
	require.NoError(t, other.RemoveAll(), "the owner may")
	require.False(t, exists(d.Path()))
	require.NoError(t, release())
	require.NoError(t, d.RemoveAll(), "there is none")
	_, err = d.Own()
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestNames(t *testing.T) {
	d := newDir(t)
	for _, n := range []string{"seg/l1-0.seg", "seg/l0-2.seg", "peer/r13-0.seg", "seg/l0-0.seg.new", "seg/r0-0.seg",
		"peer/.r1-0.seg.1.part",
		"seg/l-1.seg", "l0-0.seg"} {
		require.NoError(t, os.WriteFile(filepath.Join(d.Path(), n), nil, 0o600))
	}
	require.NoError(t, os.Symlink("l0-2.seg", filepath.Join(d.Path(), "seg/l5-0.seg")))
	names, err := d.Names()
	require.NoError(t, err)
	require.Equal(t, []string{"peer/r13-0.seg", "seg/l0-2.seg", "seg/l1-0.seg"}, names)

	require.NoError(t, d.Remove("seg/l1-0.seg"))
	require.NoError(t, d.Remove("seg/l1-0.seg"), "there is none")
	require.Error(t, d.Remove("seg/../owner"))
	names, err = d.Names()
	require.NoError(t, err)
	require.Equal(t, []string{"peer/r13-0.seg", "seg/l0-2.seg"}, names)
}

func TestOpenRefuses(t *testing.T) {
	for name, make := range map[string]func(t *testing.T, path string){
		"nothing": func(*testing.T, string) {},
		"link": func(t *testing.T, path string) {
			target := filepath.Join(t.TempDir(), "x")
			require.NoError(t, os.WriteFile(target, simple(1).Bytes(t), 0o600))
			require.NoError(t, os.Symlink(target, path))
		},
		"directory": func(t *testing.T, path string) { require.NoError(t, os.Mkdir(path, 0o700)) },
		"pipe":      func(t *testing.T, path string) { require.NoError(t, syscall.Mkfifo(path, 0o600)) },
		"short":     func(t *testing.T, path string) { require.NoError(t, os.WriteFile(path, []byte{1}, 0o600)) },
		"of another user": func(t *testing.T, path string) {
			if os.Getuid() != 0 {
				t.Skip("only root can give a file away, so that of another user is NOT tested")
			}
			require.NoError(t, os.WriteFile(path, simple(1).Bytes(t), 0o666))
			require.NoError(t, os.Chown(path, 12345, 12345))
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDir(t)
			make(t, filepath.Join(d.Path(), "seg/l0-0.seg"))
			_, err := d.Open("seg/l0-0.seg")
			require.ErrorContains(t, err, "seg/l0-0.seg")
		})
	}
	t.Run("linked directory", func(t *testing.T) {
		d, target := newDir(t), t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(target, "l0-0.seg"), simple(1).Bytes(t), 0o600))
		require.NoError(t, os.Remove(filepath.Join(d.Path(), "seg")))
		require.NoError(t, os.Symlink(target, filepath.Join(d.Path(), "seg")))
		_, err := d.Open("seg/l0-0.seg")
		require.Error(t, err)
	})
	for _, name := range []string{"", "owner", "seg/../owner", "/etc/passwd", "seg/l0-0.seg/x", "seg/l0-0.seg\x00"} {
		_, err := newDir(t).Open(name)
		require.ErrorContains(t, err, "bad name")
	}
}

func TestDead(t *testing.T) {
	base := t.TempDir()
	dead, err := shm.Dead(base)
	require.NoError(t, err)
	require.Empty(t, dead)

	create := func(key string) *shm.Dir {
		d, err := shm.Create(base, key)
		require.NoError(t, err)
		return d
	}
	old := time.Now().Add(-time.Hour)
	age := func(d *shm.Dir) {
		for _, p := range []string{"seg", "peer", "owner", ""} {
			if p := filepath.Join(d.Path(), p); exists(p) {
				require.NoError(t, os.Chtimes(p, old, old))
			}
		}
	}
	release, err := create("alive").Own()
	require.NoError(t, err)
	defer release()
	endedDir := create("ended")
	ended, err := endedDir.Own()
	require.NoError(t, err)
	require.NoError(t, ended())
	create("just-made")
	about := create("about-to-be-owned") // its owner is between open and lock
	require.NoError(t, os.WriteFile(filepath.Join(about.Path(), "owner"), nil, 0o600))
	age(create("never-owned"))
	never := create("never-signed")
	require.NoError(t, os.WriteFile(filepath.Join(never.Path(), "owner"), nil, 0o600))
	age(never)

	gone := exec.Command("true")
	require.NoError(t, gone.Run())
	var ns syscall.Stat_t
	require.NoError(t, syscall.Stat("/proc/self/ns/pid", &ns))
	create(fmt.Sprintf("t%d-1-%d", gone.Process.Pid, ns.Ino))
	create(fmt.Sprintf("t%d-1-%d", os.Getpid(), ns.Ino)) // another process had our id
	create(fmt.Sprintf("t%d-%s-%d", os.Getpid(), startTime(t), ns.Ino))
	create("t1-1-7") // of another PID namespace: as old as one that lives may be
	old = old.Add(-time.Minute)
	age(create("t2-1-7"))
	atWork := create("t3-1-7")
	age(atWork)
	worker, err := os.Open(atWork.Path())
	require.NoError(t, err)
	defer worker.Close()
	require.NoError(t, syscall.Flock(int(worker.Fd()), syscall.LOCK_SH))
	require.NoError(t, os.Symlink(endedDir.Path(), filepath.Join(top(base), "link")))
	require.NoError(t, os.WriteFile(filepath.Join(top(base), "file"), nil, 0o600))
	require.NoError(t, os.Mkdir(filepath.Join(top(base), "open"), 0o755))

	dead, err = shm.Dead(base)
	require.NoError(t, err)
	var keys []string
	for _, d := range dead {
		keys = append(keys, filepath.Base(d.Path()))
	}
	require.ElementsMatch(t, []string{"ended", "never-owned", "never-signed",
		fmt.Sprintf("t%d-1-%d", gone.Process.Pid, ns.Ino), fmt.Sprintf("t%d-1-%d", os.Getpid(), ns.Ino), "t2-1-7"}, keys)

	t.Run("age", func(t *testing.T) {
		d := create("aged")
		s := simple(1)
		s.Saved = time.Now().Add(-10 * time.Minute)
		path := s.Write(t, d, "seg/l0-0.seg")
		require.Less(t, d.Age(), time.Minute)
		require.NoError(t, os.Chtimes(path, old, old))
		age(d)
		require.InDelta(t, (10 * time.Minute).Seconds(), d.Age().Seconds(), 60, "the last save counts")
	})
}

// startTime is the 22nd field of our own stat.
func startTime(t *testing.T) string {
	b, err := os.ReadFile("/proc/self/stat")
	require.NoError(t, err)
	return strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))[19]
}

func TestFree(t *testing.T) {
	n, err := shm.Free(t.TempDir())
	require.NoError(t, err)
	require.Positive(t, n)
	_, err = shm.Free(filepath.Join(t.TempDir(), "none"))
	require.ErrorIs(t, err, os.ErrNotExist)
}
