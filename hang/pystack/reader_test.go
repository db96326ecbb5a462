package pystack

import (
	"context"
	"errors"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// blockedMemory is that of a process whose memory lock somebody else has.
type blockedMemory struct {
	reads   atomic.Int32
	release chan struct{}
}

func (m *blockedMemory) ReadAt([]byte, uint64) error {
	m.reads.Add(1)
	<-m.release
	return errors.New("too late")
}

func (m *blockedMemory) Close() error { return nil }

// A read that does not return is left alone, and no second one of that process joins it.
func TestBlockedReadIsAbandoned(t *testing.T) {
	all := pythons()
	if len(all) == 0 {
		t.Skip("SKIPPED: " + t.Name() + " IS NOT RUN: there is no Python")
	}
	x, _ := start(t, all[0], "testdata/states.py", "asleep")
	synctest.Test(t, func(t *testing.T) {
		m := &blockedMemory{release: make(chan struct{})}
		r := New()
		r.open = func(int) (memoryFile, error) { return m, nil }
		began := time.Now()
		_, err := r.Read(t.Context(), x.pid)
		require.ErrorIs(t, err, errAbandoned)
		require.Equal(t, readDeadline+grace, time.Since(began))

		began = time.Now()
		_, err = r.Read(t.Context(), x.pid)
		require.ErrorIs(t, err, errAbandoned)
		require.Zero(t, time.Since(began))
		require.Equal(t, int32(1), m.reads.Load())

		close(m.release)
		synctest.Wait()
		require.Empty(t, r.stuck)
		r.open = New().open
		s, err := r.Read(t.Context(), x.pid)
		require.NoError(t, err)
		require.NotEmpty(t, s.Threads[0].Python)
	})
}

// Who wants no more waits no longer.
func TestContextEndsARead(t *testing.T) {
	all := pythons()
	if len(all) == 0 {
		t.Skip("SKIPPED: " + t.Name() + " IS NOT RUN: there is no Python")
	}
	x, _ := start(t, all[0], "testdata/states.py", "asleep")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s, err := New().Read(ctx, x.pid)
	require.NoError(t, err)
	require.Contains(t, s.Error, "context canceled")
}

func TestErrorsSayWhatToDo(t *testing.T) {
	require.NoError(t, explain(7, nil))
	err := explain(7, &os.PathError{Op: "open", Path: "/proc/7/mem", Err: syscall.EACCES})
	require.ErrorContains(t, err, "process 7: its memory may not be read: that needs its user and group, or CAP_SYS")
	require.ErrorContains(t, err, "kernel.yama.ptrace_scope=1")
	require.EqualError(t, explain(7, os.ErrNotExist), "process 7: it has ended")
	_, err = New().Read(t.Context(), 1<<30)
	require.EqualError(t, err, "process 1073741824: it has ended")
}

// The file of a mapping is found although the process sees another tree, or it was deleted.
func TestOpenMapped(t *testing.T) {
	pid := os.Getpid()
	maps, err := readMaps(pid)
	require.NoError(t, err)
	m := maps[0]
	for _, c := range []mapping{m, {start: 1, end: 2, path: m.path, inode: m.inode}, {start: 1, end: 2, path: m.path}} {
		f, err := openMapped(pid, c)
		require.NoError(t, err)
		require.Equal(t, m.inode, inode(f))
		require.NoError(t, f.Close())
	}
	_, err = openMapped(pid, mapping{path: "/dev/null"})
	require.ErrorContains(t, err, "not a regular file")
}
