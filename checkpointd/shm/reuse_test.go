package shm_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/checkpointd/shm"
	"dlrover-run/checkpointd/shm/shmtest"
)

const copyName = "peer/r3-0.seg"

// sized is a save of about n KiB.
func sized(step int64, kib int) shmtest.Save {
	s := simple(step)
	s.Files[0].Data = make([]byte, kib<<10)
	for i := range s.Files[0].Data {
		s.Files[0].Data[i] = byte(int64(i) + step)
	}
	return s
}

// received is a copy that has come in and is open.
func received(t testing.TB, d *shm.Dir, name string, s shmtest.Save) *shm.Segment {
	t.Helper()
	b := s.Bytes(t)
	in, err := d.Incoming(name, int64(len(b)))
	require.NoError(t, err)
	return publish(t, in, b)
}

func publish(t testing.TB, in *shm.Incoming, b []byte) *shm.Segment {
	t.Helper()
	copy(in.Bytes()[4096:], b[4096:])
	seg, err := in.Publish(header(t, b))
	require.NoError(t, err)
	t.Cleanup(func() { seg.Close() })
	return seg
}

func requireSave(t testing.TB, seg *shm.Segment, seq uint64, s shmtest.Save) {
	t.Helper()
	p, err := seg.Pin()
	require.NoError(t, err)
	defer p.Release()
	require.Equal(t, []any{seq, seq, s.Meta.Step}, []any{p.Header.Seq, p.Header.Released, p.Meta.Step})
	require.Equal(t, s.Files[0].Data, p.File(0))
}

func TestReuse(t *testing.T) {
	d := newDir(t)
	first := sized(1, 100)
	first.Seq = 9
	seg := received(t, d, copyName, first)
	other, err := d.Open(copyName)
	require.NoError(t, err)
	defer other.Close()
	before, err := os.Stat(filepath.Join(d.Path(), copyName))
	require.NoError(t, err)

	next := sized(2, 100)
	b := next.Bytes(t) // says seq 1
	in, err := seg.Reuse(int64(len(b)), 9)
	require.NoError(t, err)
	require.Len(t, in.Bytes(), len(b))
	require.Equal(t, int64(len(b)), in.Warm())
	for _, s := range []*shm.Segment{seg, other} {
		_, err = s.Pin()
		require.ErrorIs(t, err, shm.ErrBusy)
		_, err = s.Reuse(int64(len(b)), 10)
		require.ErrorIs(t, err, shm.ErrBusy)
		h, err := s.Header()
		require.NoError(t, err)
		require.Equal(t, []any{shm.Writing, uint64(10)}, []any{h.State, h.Seq})
	}
	require.Same(t, seg, publish(t, in, b))
	in.Abort()
	_, err = in.Publish(header(t, b))
	require.ErrorIs(t, err, shm.ErrClosed)
	requireSave(t, seg, 10, next)
	requireSave(t, other, 10, next)
	after, err := os.Stat(filepath.Join(d.Path(), copyName))
	require.NoError(t, err)
	require.True(t, os.SameFile(before, after))
	require.Equal(t, 1, copies(t, d))
}

func TestReuseSizes(t *testing.T) {
	for _, tc := range []struct {
		name     string
		from, to int64
		want     error
	}{
		{"same", 300 << 10, 300 << 10, nil},
		{"a few bytes more", 300 << 10, 300<<10 + 100, nil},
		{"up", 300 << 10, 400 << 10, shm.ErrUnfit},
		{"down", 300 << 10, 200 << 10, nil},
		{"far down", 1000 << 10, 300 << 10, shm.ErrUnfit},
		{"smallest", 4096, 4096, nil},
		{"none", 300 << 10, 4095, shm.ErrDamaged},
		{"negative", 300 << 10, -1, shm.ErrDamaged},
		{"huge", 300 << 10, 1 << 62, shm.ErrDamaged},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := newDir(t)
			s := sized(1, 0)
			if tc.from > 16<<10 {
				s = sized(1, int(tc.from>>10)-16)
			}
			b := s.Bytes(t)
			in, err := d.Incoming(copyName, max(tc.from, int64(len(b))))
			require.NoError(t, err)
			seg := publish(t, in, b)
			in, err = seg.Reuse(tc.to, 1)
			require.ErrorIs(t, err, tc.want)
			if err != nil {
				requireSave(t, seg, 1, s)
				return
			}
			require.Len(t, in.Bytes(), int(tc.to))
			in.Abort()
		})
	}
}

// TestReuseRefuses checks that a refused Reuse leaves the segment unchanged.
func TestReuseRefuses(t *testing.T) {
	for _, tc := range []struct {
		name string
		do   func(t *testing.T, d *shm.Dir, seg *shm.Segment, path string)
		want error
		seq  uint64
	}{
		{"another save", func(*testing.T, *shm.Dir, *shm.Segment, string) {}, shm.ErrUnfit, 2},
		{"pinned", func(t *testing.T, _ *shm.Dir, seg *shm.Segment, _ string) {
			p, err := seg.Pin()
			require.NoError(t, err)
			t.Cleanup(p.Release)
		}, shm.ErrBusy, 1},
		{"pinned through another descriptor", func(t *testing.T, d *shm.Dir, _ *shm.Segment, _ string) {
			seg, err := d.Open(copyName)
			require.NoError(t, err)
			p, err := seg.Pin()
			require.NoError(t, err)
			t.Cleanup(func() { p.Release(); seg.Close() })
		}, shm.ErrBusy, 1},
		{"locked by a worker", func(t *testing.T, _ *shm.Dir, _ *shm.Segment, path string) {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			require.NoError(t, err)
			t.Cleanup(func() { f.Close() })
			require.NoError(t, unix.FcntlFlock(f.Fd(), unix.F_SETLK,
				&unix.Flock_t{Type: unix.F_RDLCK})) // as lockf does
		}, shm.ErrBusy, 1},
		{"replaced", func(t *testing.T, d *shm.Dir, _ *shm.Segment, _ string) { simple(3).Write(t, d, copyName) },
			shm.ErrUnfit, 1},
		{"removed", func(t *testing.T, d *shm.Dir, _ *shm.Segment, _ string) {
			require.NoError(t, d.Remove(copyName))
		}, shm.ErrUnfit, 1},
		{"link to it", func(t *testing.T, _ *shm.Dir, _ *shm.Segment, path string) {
			require.NoError(t, os.Rename(path, path+".moved"))
			require.NoError(t, os.Symlink(path+".moved", path))
		}, shm.ErrUnfit, 1},
		{"two names", func(t *testing.T, _ *shm.Dir, _ *shm.Segment, path string) {
			require.NoError(t, os.Link(path, filepath.Join(filepath.Dir(path), "r3-1.seg")))
		}, shm.ErrUnfit, 1},
		{"cut", func(t *testing.T, _ *shm.Dir, _ *shm.Segment, path string) {
			require.NoError(t, os.Truncate(path, 8192))
		}, shm.ErrUnfit, 1},
		{"damaged", func(t *testing.T, _ *shm.Dir, _ *shm.Segment, path string) {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			require.NoError(t, err)
			defer f.Close()
			_, err = f.WriteAt([]byte("x"), 0)
			require.NoError(t, err)
		}, shm.ErrDamaged, 1},
		{"closed", func(t *testing.T, _ *shm.Dir, seg *shm.Segment, _ string) { require.NoError(t, seg.Close()) },
			shm.ErrClosed, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := newDir(t)
			s := sized(1, 100)
			seg := received(t, d, copyName, s)
			tc.do(t, d, seg, filepath.Join(d.Path(), copyName))
			for range 2 { // a refusal leaves no lock behind
				_, err := seg.Reuse(int64(len(s.Bytes(t))), tc.seq)
				require.ErrorIs(t, err, tc.want)
			}
			if h, err := seg.Header(); err == nil {
				require.Equal(t, []any{shm.Complete, uint64(1)}, []any{h.State, h.Seq})
			}
		})
	}
	t.Run("own segment", func(t *testing.T) {
		_, err := opened(t, sized(1, 100)).Reuse(100<<10, 1)
		require.ErrorContains(t, err, "only copies")
	})
}

func TestReuseThatFails(t *testing.T) {
	next := sized(2, 100)
	b := next.Bytes(t)
	take := func(t *testing.T) (*shm.Dir, *shm.Segment, *shm.Incoming) {
		d := newDir(t)
		seg := received(t, d, copyName, sized(1, 100))
		in, err := seg.Reuse(int64(len(b)), 1)
		require.NoError(t, err)
		copy(in.Bytes()[4096:], b[4096:len(b)/2])
		return d, seg, in
	}
	t.Run("aborted", func(t *testing.T) {
		_, seg, in := take(t)
		in.Abort()
		in.Abort()
		_, err := seg.Pin()
		require.ErrorIs(t, err, shm.ErrIncomplete)
		in, err = seg.Reuse(int64(len(b)), 2)
		require.NoError(t, err)
		publish(t, in, b)
		requireSave(t, seg, 3, next)
	})
	t.Run("not all of it came", func(t *testing.T) {
		_, seg, in := take(t)
		clear(in.Bytes()[len(b)/2:])
		_, err := in.Publish(header(t, b))
		require.ErrorIs(t, err, shm.ErrDamaged)
		in.Abort()
		_, err = seg.Pin()
		require.ErrorIs(t, err, shm.ErrIncomplete)
	})
	t.Run("header of something longer", func(t *testing.T) {
		_, seg, in := take(t)
		h := header(t, sized(2, 200).Bytes(t))
		_, err := in.Publish(h)
		require.ErrorIs(t, err, shm.ErrDamaged)
		h.MetaLen = -1
		_, err = in.Publish(h)
		require.ErrorIs(t, err, shm.ErrDamaged)
		in.Abort()
		_, err = seg.Pin()
		require.ErrorIs(t, err, shm.ErrIncomplete)
	})
	t.Run("replaced meanwhile", func(t *testing.T) {
		d, _, in := take(t)
		third := received(t, d, copyName, sized(3, 100))
		copy(in.Bytes()[4096:], b[4096:])
		_, err := in.Publish(header(t, b))
		require.ErrorIs(t, err, shm.ErrUnfit)
		in.Abort()
		requireSave(t, third, 1, sized(3, 100))
		require.Equal(t, 1, copies(t, d))
	})
	t.Run("closed meanwhile", func(t *testing.T) {
		d, seg, in := take(t)
		require.NoError(t, seg.Close())
		_, err := seg.Pin()
		require.ErrorIs(t, err, shm.ErrClosed)
		publish(t, in, b)
		_, err = seg.Header()
		require.ErrorIs(t, err, shm.ErrClosed, "unmapped")
		again, err := d.Open(copyName)
		require.NoError(t, err)
		defer again.Close()
		requireSave(t, again, 2, next)
	})
}

// TestReuseThatDies kills a process between Reuse and Publish. Other segments stay complete.
func TestReuseThatDies(t *testing.T) {
	if path := os.Getenv("SHM_TEST_REUSE"); path != "" {
		d, err := shm.OpenDir(path)
		require.NoError(t, err)
		seg, err := d.Open(copyName)
		require.NoError(t, err)
		in, err := seg.Reuse(int64(len(sized(2, 100).Bytes(t))), 1)
		require.NoError(t, err)
		clear(in.Bytes()[4096:])
		fmt.Println("taken")
		_, _ = io.Copy(io.Discard, os.Stdin) // until the other process kills this one, or dies itself
		return
	}
	d := newDir(t)
	require.NoError(t, received(t, d, copyName, sized(1, 100)).Close())
	newest := received(t, d, "peer/r3-1.seg", sized(2, 100))

	cmd := exec.Command(os.Args[0], "-test.run=^TestReuseThatDies$")
	cmd.Env = append(os.Environ(), "SHM_TEST_REUSE="+d.Path())
	_, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(out)
	taken := lines.Scan()
	seg, err := d.Open(copyName)
	require.NoError(t, err)
	defer seg.Close()
	_, busy := seg.Pin()
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait() // killed
	require.True(t, taken)
	require.Equal(t, "taken", lines.Text())
	require.ErrorIs(t, busy, shm.ErrBusy)

	_, err = seg.Pin()
	require.ErrorIs(t, err, shm.ErrIncomplete)
	requireSave(t, newest, 1, sized(2, 100))
	b := sized(3, 100).Bytes(t)
	in, err := seg.Reuse(int64(len(b)), 2)
	require.NoError(t, err)
	require.Zero(t, in.Warm(), "a new mapping")
	publish(t, in, b)
	requireSave(t, seg, 3, sized(3, 100))
}
