package shm_test

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/checkpointd/shm"
)

// writing makes a segment that a worker writes, until it ends: it has published if state is Complete, and has died if
// it is Writing.
func writing(t *testing.T, d *shm.Dir, name string) (end func(state shm.State)) {
	t.Helper()
	f, err := os.OpenFile(simple(1).Write(t, d, name), os.O_RDWR, 0)
	require.NoError(t, err)
	setState := func(state shm.State) {
		_, err := f.WriteAt([]byte{byte(state)}, 16)
		require.NoError(t, err)
	}
	setState(shm.Writing)
	require.NoError(t, unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}))
	return func(state shm.State) {
		setState(state)
		require.NoError(t, f.Close())
	}
}

func TestYielder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // its clock moves only in sleeps
		d := newDir(t)
		open := func(name string) *shm.Segment {
			seg, err := d.Open(name)
			require.NoError(t, err)
			return seg
		}
		simple(7).Write(t, d, "seg/l0-0.seg")
		flushed := open("seg/l0-0.seg")
		defer flushed.Close()
		p, err := flushed.Pin()
		require.NoError(t, err)
		defer p.Release()
		y := p.Yielder()
		waited := func() time.Duration {
			begin := time.Now()
			require.NoError(t, y.Wait(t.Context()))
			return time.Since(begin)
		}
		require.Zero(t, waited(), "nobody saves")

		end := writing(t, d, "peer/r3-0.seg")
		copied := open("peer/r3-0.seg")
		defer copied.Close()
		require.Zero(t, waited(), "a copy of another node's save keeps nobody from training")
		end(shm.Complete)

		end = writing(t, d, "seg/l1-0.seg")
		saving := open("seg/l1-0.seg")
		defer saving.Close()
		time.AfterFunc(70*time.Millisecond+time.Microsecond, func() { end(shm.Complete) })
		require.Equal(t, 76*time.Millisecond, waited(), "until the save has been complete for a while")

		time.Sleep(time.Minute)
		end = writing(t, d, "seg/l2-0.seg")
		stopped := open("seg/l2-0.seg")
		simple(1).Write(t, d, "seg/l2-1.seg")
		idle := open("seg/l2-1.seg")
		defer idle.Close()
		require.Equal(t, time.Second, waited(), "for a worker that is stopped in the middle")
		require.Zero(t, waited())
		time.Sleep(100 * time.Millisecond)
		require.Equal(t, 400*time.Millisecond, waited(), "four times as long as the work")
		time.Sleep(time.Minute)
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Millisecond, func() { cancel(io.ErrUnexpectedEOF) })
		require.ErrorIs(t, y.Wait(ctx), io.ErrUnexpectedEOF)
		end(shm.Writing)
		require.Zero(t, waited(), "for a worker that has died in the middle")

		end = writing(t, d, "seg/l3-0.seg")
		defer end(shm.Writing)
		closed := open("seg/l3-0.seg")
		require.NoError(t, os.Truncate(filepath.Join(d.Path(), "seg/l2-0.seg"), 0))
		require.NoError(t, closed.Close())
		require.Zero(t, waited(), "for a segment that is closed, and one that shrank")
		require.NoError(t, stopped.Close())
	})
}

// TestSealYields: checksums wait for a save as well, and a worker in Python is one that saves.
func TestSealYields(t *testing.T) {
	d := newDir(t)
	simple(7).Write(t, d, "seg/l0-0.seg")
	seg, err := d.Open("seg/l0-0.seg")
	require.NoError(t, err)
	defer seg.Close()
	p, err := seg.Pin()
	require.NoError(t, err)
	defer p.Release()
	w := startWorker(t, filepath.Join(d.Path(), "seg/l1-0.seg"))
	saving, err := d.Open("seg/l1-0.seg")
	require.NoError(t, err)
	defer saving.Close()
	w.do("begin", "ok")
	sealed := make(chan error)
	go func() {
		_, err := p.Seal(t.Context(), 0).Sum()
		sealed <- err
	}()
	select {
	case <-sealed:
		require.Fail(t, "it has not waited")
	case <-time.After(100 * time.Millisecond):
	}
	w.do("end 20", "ok")
	require.NoError(t, <-sealed)
}
