package shm_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/checkpointd/shm"
	"dlrover-run/checkpointd/shm/shmtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newDir(t testing.TB) *shm.Dir {
	t.Helper()
	d, err := shm.Create(t.TempDir(), "run-1")
	require.NoError(t, err)
	return d
}

// opened is a save in a segment of a new directory.
func opened(t testing.TB, s shmtest.Save) *shm.Segment {
	t.Helper()
	d := newDir(t)
	s.Write(t, d, "seg/l0-0.seg")
	seg, err := d.Open("seg/l0-0.seg")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, seg.Close()) })
	return seg
}

func pinned(t testing.TB, s shmtest.Save) *shm.Pinned {
	t.Helper()
	p, err := opened(t, s).Pin()
	require.NoError(t, err)
	t.Cleanup(p.Release)
	return p
}

func simple(step int64) shmtest.Save {
	return shmtest.Save{Meta: shmtest.Meta("/ckpt", step),
		Files: []shmtest.File{{Path: "1/a.pt", Kind: "raw", Data: []byte("hello")}}}
}

func exists(path ...string) bool {
	_, err := os.Lstat(filepath.Join(path...))
	return err == nil
}
