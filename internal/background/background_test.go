package background

import (
	"errors"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func init() { runtime.LockOSThread() } // the main thread, which would not end

// nice is the niceness of the calling thread.
func nice(t *testing.T) int {
	left, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	require.NoError(t, err)
	return 20 - left
}

func TestRun(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	mine := nice(t)
	failed := errors.New("failed")
	thread := 0
	require.Equal(t, failed, Run(func() error {
		thread = unix.Gettid()
		require.Equal(t, max(mine, niceness), nice(t))
		done := make(chan int)
		go func() { done <- nice(t) }()
		require.Equal(t, mine, <-done)
		return failed
	}))
	require.Equal(t, mine, nice(t))
	require.Eventually(t, func() bool {
		_, err := os.Stat("/proc/self/task/" + strconv.Itoa(thread))
		return errors.Is(err, fs.ErrNotExist)
	}, time.Minute, time.Millisecond)
}

func TestAHigherNicenessStays(t *testing.T) {
	got := make(chan int)
	go func() {
		runtime.LockOSThread()
		if nice(t) > 15 || unix.Setpriority(unix.PRIO_PROCESS, 0, 15) != nil {
			got <- 15
			return
		}
		Enter()
		got <- nice(t)
	}()
	require.Equal(t, 15, <-got)
}
