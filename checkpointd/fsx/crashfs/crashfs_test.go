package crashfs

import (
	"context"
	"io/fs"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/checkpointd/fsx"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type text string

func (s text) Len() int64                         { return int64(len(s)) }
func (s text) Bytes() []byte                      { return []byte(s) }
func (s text) Ready(context.Context, int64) error { return nil }

func write(t *testing.T, f *FS, path, data string) {
	t.Helper()
	require.NoError(t, f.WriteFrom(context.Background(), path, text(data)))
}

func TestStateAfterACrash(t *testing.T) {
	old := map[string]string{"/d/": "", "/d/old": "old"}
	with := func(more map[string]string) map[string]string {
		for name, data := range old {
			if _, ok := more[name]; !ok {
				more[name] = data
			}
		}
		return more
	}
	cases := map[string]struct {
		do                  func(*testing.T, *FS)
		lost, kept, process map[string]string
	}{
		"a file whose name is not synced": {
			do:      func(t *testing.T, f *FS) { write(t, f, "/d/new", "data") },
			lost:    old,
			kept:    with(map[string]string{"/d/new": "data"}),
			process: with(map[string]string{"/d/new": "data"}),
		},
		"a file with its name": {
			do: func(t *testing.T, f *FS) {
				write(t, f, "/d/new", "data")
				require.NoError(t, f.SyncDir("/d"))
			},
			lost:    with(map[string]string{"/d/new": "data"}),
			kept:    with(map[string]string{"/d/new": "data"}),
			process: with(map[string]string{"/d/new": "data"}),
		},
		"a rename": {
			do:      func(t *testing.T, f *FS) { require.NoError(t, f.Rename("/d/old", "/d/new")) },
			lost:    old,
			kept:    map[string]string{"/d/": "", "/d/new": "old"},
			process: map[string]string{"/d/": "", "/d/new": "old"},
		},
		"a removal": {
			do:      func(t *testing.T, f *FS) { require.NoError(t, f.Remove("/d/old")) },
			lost:    old,
			kept:    map[string]string{"/d/": ""},
			process: map[string]string{"/d/": ""},
		},
		"a small file": {
			do:      func(t *testing.T, f *FS) { require.NoError(t, f.WriteFile("/d/old", []byte("new"))) },
			lost:    map[string]string{"/d/": "", "/d/old": "new"},
			kept:    map[string]string{"/d/": "", "/d/old": "new"},
			process: map[string]string{"/d/": "", "/d/old": "new"},
		},
		"a directory": {
			do:      func(t *testing.T, f *FS) { require.NoError(t, f.MkdirAll("/d/a/b")) },
			lost:    with(map[string]string{"/d/a/": "", "/d/a/b/": ""}),
			kept:    with(map[string]string{"/d/a/": "", "/d/a/b/": ""}),
			process: with(map[string]string{"/d/a/": "", "/d/a/b/": ""}),
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			f := New()
			f.Put("/d/old", "old")
			c.do(t, f)
			require.Equal(t, c.lost, f.Crash(Lost).Tree())
			require.Equal(t, c.kept, f.Crash(Kept).Tree())
			require.Equal(t, c.process, f.Crash(Process).Tree())
			require.Equal(t, c.lost, f.Crash(Process).Crash(Lost).Tree(), "the end of a process makes nothing durable")
			for seed := range Choice(20) {
				found := f.Crash(seed)
				require.Equal(t, found.Tree(), f.Crash(seed).Tree(), "a seed means the same each time")
				require.Equal(t, found.Tree(), found.Crash(Lost).Tree(), "what was found is durable")
				require.Contains(t, []map[string]string{c.lost, c.kept}, found.Tree())
			}
		})
	}
}

func TestUnsyncedData(t *testing.T) {
	f := New()
	f.Put("/d/x", "")
	seen := map[string]bool{}
	f.Fault(func(o Op) error {
		if o.Kind == "fsync" {
			require.Equal(t, "", f.Crash(Torn).Tree()["/d/new"])
			require.NotContains(t, f.Crash(Lost).Tree(), "/d/new")
			require.Equal(t, "data", f.Crash(Kept).Tree()["/d/new"])
			for seed := range Choice(100) {
				if data, ok := f.Crash(seed).Tree()["/d/new"]; ok {
					seen[data] = true
				}
			}
		}
		return nil
	})
	write(t, f, "/d/new", "data")
	for _, data := range []string{"", "da", "data", "\x00\x00\x00\x00"} {
		require.True(t, seen[data], "%q", data)
	}
}

func TestCrashAt(t *testing.T) {
	f := New()
	f.Put("/d/x", "x")
	f.CrashAt(2) // create, allocate, [write]
	require.ErrorIs(t, f.WriteFrom(t.Context(), "/d/y", text("data")), errCrashed)
	require.True(t, f.Crashed())
	_, err := f.ReadFile("/d/x", 10)
	require.ErrorIs(t, err, errCrashed)
	require.ErrorIs(t, f.Remove("/d/none"), errCrashed)
	require.Equal(t, map[string]string{"/d/": "", "/d/x": "x", "/d/y": ""}, f.Crash(Kept).Tree())
	require.Len(t, f.Log(), 2)
	require.Equal(t, "0 create /d/y", f.Log()[0].String())
}

func TestFaults(t *testing.T) {
	f := New()
	f.Put("/d/x", "x")
	f.FailAt(1, syscall.ENOSPC)
	require.ErrorIs(t, f.WriteFrom(t.Context(), "/d/y", text("data")), syscall.ENOSPC)
	require.Equal(t, map[string]string{"/d/": "", "/d/x": "x"}, f.Tree())
	write(t, f, "/d/y", "data")

	f.Fault(func(o Op) error {
		if o.Kind == "read" && o.Path == "/d/y" {
			return syscall.EIO
		}
		return nil
	})
	_, _, err := f.Checksum(t.Context(), "/d/y")
	require.ErrorIs(t, err, syscall.EIO)

	reached, release := f.BlockAt(f.Ops() + 1)
	done := make(chan error)
	go func() { done <- f.WriteFrom(context.Background(), "/d/z", text("data")) }()
	<-reached
	f.Fault(nil)
	_, err = f.Size("/d/x") // the others go on
	require.NoError(t, err)
	release()
	require.NoError(t, <-done)
}

func TestErrors(t *testing.T) {
	f := New()
	f.Put("/d/x", "xyz")
	_, err := f.ReadFile("/d/none", 1)
	require.ErrorIs(t, err, fs.ErrNotExist)
	_, err = f.ReadFile("/d/x", 2)
	require.ErrorIs(t, err, fsx.ErrTooLong)
	_, err = f.List("/d/x")
	require.Error(t, err)
	require.ErrorIs(t, f.Remove("/d"), syscall.ENOTEMPTY)
	require.ErrorIs(t, f.Rename("/d/none", "/d/y"), fs.ErrNotExist)
	require.ErrorIs(t, f.Rename("/d/x", "/x"), syscall.EXDEV)
	require.ErrorIs(t, f.MkdirAll("/d/x/y"), syscall.ENOTDIR)
	require.ErrorIs(t, f.WriteFrom(t.Context(), "/none/y", text("")), fs.ErrNotExist)
}

func TestTimesAndFingerprint(t *testing.T) {
	f := New()
	f.Put("/d/x", "x")
	before := f.Now()
	same := f.Crash(Process)
	f.Advance(time.Hour)
	require.Equal(t, time.Hour, f.Now().Sub(before))
	require.Equal(t, same.Fingerprint(), f.Fingerprint())
	require.NoError(t, f.Remove("/d/x"))
	require.NotEqual(t, f.Crash(Kept).Fingerprint(), f.Fingerprint(), "one is durable")
	require.Equal(t, same.Fingerprint(), f.Crash(Lost).Fingerprint())
}
