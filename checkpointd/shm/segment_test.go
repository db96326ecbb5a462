package shm_test

import (
	"bufio"
	"context"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/checkpointd/shm/shmtest"
)

func TestPin(t *testing.T) {
	s := simple(7)
	s.Disk, s.Seq = true, 4
	s.Files = append(s.Files, shmtest.File{Path: "1/empty", Kind: "raw"},
		shmtest.File{Path: "1/b", Kind: "raw", Data: make([]byte, 4096)})
	seg := opened(t, s)
	p, err := seg.Pin()
	require.NoError(t, err)
	require.Equal(t, "seg/l0-0.seg", seg.Name())
	require.Equal(t, uint64(4), p.Header.Seq)
	require.Equal(t, int64(7), p.Header.Step)
	require.True(t, p.Header.Disk)
	require.Equal(t, s.Meta.Save, p.Meta.Save)
	require.Equal(t, "hello", string(p.File(0)))
	require.Equal(t, []int{4096, 0, 4096}, []int{cap(p.File(0)), cap(p.File(1)), cap(p.File(2))})
	require.Equal(t, s.Files[0].Data, p.Used()[4096:4101])
	require.GreaterOrEqual(t, int64(len(p.Used())), p.Header.MetaOff+p.Header.MetaLen)

	h, err := seg.Header()
	require.NoError(t, err)
	require.Equal(t, p.Header, h)
	seg.SetReleased(4)
	seg.SetReleased(3)
	seg.SetDurable(2)
	h, err = seg.Header()
	require.NoError(t, err)
	require.Equal(t, []uint64{4, 2}, []uint64{h.Released, h.Durable})

	again, err := seg.Pin()
	require.NoError(t, err)
	p.Release()
	p.Release() // counts once
	require.NoError(t, seg.Close())
	require.Equal(t, "hello", string(again.File(0)), "mapped until the last release")
	_, err = seg.Pin()
	require.ErrorIs(t, err, shm.ErrClosed)
	again.Release()
	_, err = seg.Header()
	require.ErrorIs(t, err, shm.ErrClosed)
	seg.SetReleased(9)
	require.NoError(t, seg.Close())
}

// Peek reads the same as Pin, and the writer need not wait for it.
func TestPeek(t *testing.T) {
	seg := opened(t, simple(7))
	h, m, err := seg.Peek()
	require.NoError(t, err)
	p, err := seg.Pin()
	require.NoError(t, err)
	require.Equal(t, []any{p.Header, p.Meta}, []any{h, m})
	p.Release()
	require.NoError(t, seg.Close())
	_, _, err = seg.Peek()
	require.ErrorIs(t, err, shm.ErrClosed)
}

// Peek remembers what it has read of a save, but neither how far that has got nor that another has taken its place.
func TestPeekAgain(t *testing.T) {
	d := newDir(t)
	path := filepath.Join(d.Path(), "seg/l0-0.seg")
	first, second := simple(7), simple(8)
	first.Seq, second.Seq = 1, 2
	require.NoError(t, os.WriteFile(path, first.Bytes(t), 0o600))
	seg, err := d.Open("seg/l0-0.seg")
	require.NoError(t, err)
	for range 2 {
		_, m, err := seg.Peek()
		require.NoError(t, err)
		require.EqualValues(t, 7, m.Step)
	}
	seg.SetDurable(1)
	h, _, err := seg.Peek()
	require.NoError(t, err)
	require.EqualValues(t, 1, h.Durable)
	require.NoError(t, os.WriteFile(path, second.Bytes(t), 0o600))
	h, m, err := seg.Peek()
	require.NoError(t, err)
	require.EqualValues(t, []int64{8, 8}, []int64{h.Step, m.Step})
	require.NoError(t, os.Truncate(path, 0))
	_, _, err = seg.Peek()
	require.Error(t, err)
	require.NoError(t, seg.Close())
}

func TestPinRefuses(t *testing.T) {
	good := simple(7)
	good.Files[0].Data = make([]byte, 3*4096)
	for _, tc := range []struct {
		name   string
		change func(b []byte) []byte
		want   error
	}{
		{"new file", func(b []byte) []byte { clear(b); return b }, shm.ErrIncomplete},
		{"being written, writer gone", func(b []byte) []byte { b[16] = 1; return b }, shm.ErrIncomplete},
		{"freed", func(b []byte) []byte { b[16] = 0; return b }, shm.ErrIncomplete},
		{"other file", func(b []byte) []byte { b[0] = 0; return b }, shm.ErrDamaged},
		{"header changed", func(b []byte) []byte { b[33]++; return b }, shm.ErrDamaged},
		{"meta changed", func(b []byte) []byte { b[4*4096+3]++; return b }, shm.ErrDamaged},
		{"cut", func(b []byte) []byte { return b[:2*4096] }, shm.ErrDamaged},
		{"step of the meta differs", func([]byte) []byte {
			s := simple(7)
			b := s.Bytes(t)
			h, err := shm.ParseHeader(b)
			require.NoError(t, err)
			h.Step = 8
			copy(b, h.Append(nil))
			return b
		}, shm.ErrDamaged},
		{"fix-up in the payload", func([]byte) []byte {
			s := simple(7)
			s.Files[0].Data = make([]byte, 100)
			s.Fixups = []shmtest.Fixup{{Off: 8, Len: 20, First: 10}}
			return s.Bytes(t)
		}, shm.ErrDamaged},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := newDir(t)
			require.NoError(t, os.WriteFile(filepath.Join(d.Path(), "seg/l0-0.seg"), tc.change(good.Bytes(t)), 0o600))
			seg, err := d.Open("seg/l0-0.seg")
			require.NoError(t, err)
			defer seg.Close()
			for range 2 { // a refusal leaves no lock behind
				_, err = seg.Pin()
				require.ErrorIs(t, err, tc.want)
			}
		})
	}
}

func TestFileThatShrinks(t *testing.T) {
	s := simple(7)
	s.Files[0].Data = make([]byte, 64<<10)
	d := newDir(t)
	path := s.Write(t, d, "seg/l0-0.seg")
	seg, err := d.Open("seg/l0-0.seg")
	require.NoError(t, err)
	defer seg.Close()
	p, err := seg.Pin()
	require.NoError(t, err)
	defer p.Release()
	require.NoError(t, os.Truncate(path, 0))

	_, err = p.Seal(t.Context(), 0).Sum()
	require.ErrorIs(t, err, shm.ErrDamaged)
	_, err = seg.Header()
	require.ErrorIs(t, err, shm.ErrDamaged)
	_, err = seg.Pin()
	require.ErrorIs(t, err, shm.ErrDamaged)
	seg.SetReleased(1)
}

func TestReplaced(t *testing.T) {
	d := newDir(t)
	simple(1).Write(t, d, "seg/l0-0.seg")
	seg, err := d.Open("seg/l0-0.seg")
	require.NoError(t, err)
	defer seg.Close()
	require.False(t, seg.Replaced())
	simple(2).Write(t, d, "seg/l0-0.seg")
	require.True(t, seg.Replaced())
	require.NoError(t, d.Remove("seg/l0-0.seg"))
	require.True(t, seg.Replaced())
	h, err := seg.Header()
	require.NoError(t, err)
	require.Equal(t, int64(1), h.Step, "the old one can still be read")
}

func TestIncoming(t *testing.T) {
	s := simple(7)
	b := s.Bytes(t)
	receive := func(t *testing.T, d *shm.Dir, b []byte) *shm.Incoming {
		in, err := d.Incoming("peer/r3-0.seg", int64(len(b)))
		require.NoError(t, err)
		require.Len(t, in.Bytes(), len(b))
		copy(in.Bytes(), b)
		return in
	}
	t.Run("published", func(t *testing.T) {
		d := newDir(t)
		simple(6).Write(t, d, "peer/r3-0.seg")
		in := receive(t, d, b)
		names, err := d.Names()
		require.NoError(t, err)
		require.Equal(t, []string{"peer/r3-0.seg"}, names)
		seg, err := in.Publish(header(t, b))
		require.NoError(t, err)
		defer seg.Close()
		in.Abort()
		require.False(t, seg.Replaced())
		p, err := seg.Pin()
		require.NoError(t, err)
		defer p.Release()
		require.Equal(t, int64(7), p.Meta.Step)
		require.Equal(t, 1, copies(t, d))
	})
	t.Run("aborted", func(t *testing.T) {
		d := newDir(t)
		in := receive(t, d, b)
		in.Abort()
		in.Abort()
		_, err := in.Publish(header(t, b))
		require.ErrorIs(t, err, shm.ErrClosed)
		require.Zero(t, copies(t, d))
	})
	for name, change := range map[string]func(b []byte){
		"nothing": func(b []byte) { clear(b) }, "damaged": func(b []byte) { b[2*4096]++ },
	} {
		t.Run(name, func(t *testing.T) {
			d := newDir(t)
			in := receive(t, d, b)
			change(in.Bytes())
			_, err := in.Publish(header(t, b))
			require.Error(t, err)
			in.Abort()
			require.Zero(t, copies(t, d))
		})
	}
	t.Run("not for our own segments", func(t *testing.T) {
		_, err := newDir(t).Incoming("seg/l0-0.seg", 8192)
		require.Error(t, err)
		_, err = newDir(t).Incoming("peer/../owner", 8192)
		require.Error(t, err)
	})
	t.Run("too large", func(t *testing.T) {
		d := newDir(t)
		for _, size := range []int64{-1, 0, 4095, 1 << 60} {
			_, err := d.Incoming("peer/r3-0.seg", size)
			require.Error(t, err)
		}
		require.Zero(t, copies(t, d))
	})
}

func header(t testing.TB, b []byte) shm.Header {
	t.Helper()
	h, err := shm.ParseHeader(b)
	require.NoError(t, err)
	return h
}

// copies is how many files there are in the directory of copies, hidden ones too.
func copies(t testing.TB, d *shm.Dir) int {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(d.Path(), "peer"))
	require.NoError(t, err)
	return len(entries)
}

// worker is a writer in another process that executes commands.
type worker struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func startWorker(t *testing.T, path string) *worker {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3, so segments that a worker in Python writes are NOT tested")
	}
	cmd := exec.Command(python, "testdata/writer.py", path)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	w := &worker{t, cmd, in, bufio.NewScanner(out)}
	t.Cleanup(w.kill)
	w.expect("ready")
	return w
}

func (w *worker) do(command, answer string) {
	w.t.Helper()
	_, err := fmt.Fprintln(w.in, command)
	require.NoError(w.t, err)
	w.expect(answer)
}

func (w *worker) expect(answer string) {
	w.t.Helper()
	require.True(w.t, w.out.Scan(), "the worker has ended")
	require.Equal(w.t, answer, w.out.Text())
}

func (w *worker) kill() {
	_ = w.cmd.Process.Kill()
	_ = w.cmd.Wait()
}

func TestWorker(t *testing.T) {
	d := newDir(t)
	w := startWorker(t, filepath.Join(d.Path(), "seg/l0-0.seg"))
	seg, err := d.Open("seg/l0-0.seg")
	require.NoError(t, err)
	defer seg.Close()
	_, err = seg.Pin()
	require.ErrorIs(t, err, shm.ErrIncomplete, "nothing saved yet")

	w.do("begin", "ok")
	_, err = seg.Pin()
	require.ErrorIs(t, err, shm.ErrBusy)
	h, err := seg.Header()
	require.NoError(t, err)
	require.Equal(t, shm.Writing, h.State)
	w.do("end 20", "ok")

	before := time.Now()
	p, err := seg.Pin()
	require.NoError(t, err)
	require.Equal(t, []any{uint64(1), int64(20), true}, []any{p.Header.Seq, p.Header.Step, p.Header.Disk})
	require.WithinDuration(t, before, p.Header.Saved, time.Minute)
	require.Equal(t, []shm.File{{Path: "20/rank_0.pt", Off: 0, Len: 5000, Kind: "torchzip"}}, p.Meta.Files)
	require.Equal(t, []commit.Tracker{{Path: "dlrover_latest.txt", Text: "20"}}, p.Meta.Trackers)
	sum, err := p.Seal(t.Context(), 0).Sum()
	require.NoError(t, err)
	file := p.File(0)
	require.Equal(t, crc32.ChecksumIEEE(file), sum)
	want := crc32.ChecksumIEEE(file[300:4300])
	for _, dst := range []int{200, 204} {
		require.Equal(t, want, uint32(file[dst])|uint32(file[dst+1])<<8|uint32(file[dst+2])<<16|uint32(file[dst+3])<<24)
	}

	w.do("begin", "BlockingIOError") // pinned
	again, err := seg.Pin()
	require.NoError(t, err)
	p.Release()
	w.do("begin", "BlockingIOError") // pinned once more
	again.Release()
	w.do("begin", "ok")
	w.do("end 30", "ok")
	p, err = seg.Pin()
	require.NoError(t, err)
	require.Equal(t, []any{uint64(2), int64(30)}, []any{p.Header.Seq, p.Header.Step})
	p.Release()

	w.do("lock", "ok")
	_, err = seg.Pin()
	require.ErrorIs(t, err, shm.ErrBusy, "about to write")
	w.do("unlock", "ok")
	w.do("begin", "ok")
	w.kill()
	_, err = seg.Pin()
	require.ErrorIs(t, err, shm.ErrIncomplete, "killed in mid-copy")
}

func TestSealKeepsTheLock(t *testing.T) {
	d := newDir(t)
	path := simple(1).Write(t, d, "seg/l0-0.seg")
	seg, err := d.Open("seg/l0-0.seg")
	require.NoError(t, err)
	p, err := seg.Pin()
	require.NoError(t, err)
	sealing := p.Seal(t.Context(), 0)
	p.Release()
	require.NoError(t, seg.Close())
	_, err = sealing.Sum()
	require.NoError(t, err)

	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}),
		"free after the end")
}

func TestSealEndsWithItsContext(t *testing.T) {
	p := pinned(t, simple(1))
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(io.ErrUnexpectedEOF)
	_, err := p.Seal(ctx, 0).Sum()
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}

func TestMessagesNameTheSegment(t *testing.T) {
	d := newDir(t)
	require.NoError(t, os.WriteFile(filepath.Join(d.Path(), "seg/l2-1.seg"), []byte(strings.Repeat("x", 4096)), 0o600))
	seg, err := d.Open("seg/l2-1.seg")
	require.NoError(t, err)
	defer seg.Close()
	_, err = seg.Pin()
	require.ErrorContains(t, err, "seg/l2-1.seg")
}
