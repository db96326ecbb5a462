package launcher

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/proc"
)

// scarce fails the first starts as a full table of descriptors does.
type scarce struct {
	Processes
	fails int
}

func (s *scarce) Start(spec proc.Spec) (*proc.Process, error) {
	if s.fails--; s.fails >= 0 {
		return nil, fmt.Errorf("cannot start it: %w", &os.SyscallError{Syscall: "pipe2", Err: syscall.EMFILE})
	}
	return s.Processes.Start(spec)
}

func TestStartWaitsForDescriptors(t *testing.T) {
	r := newRig(t, "exit 0", 0)
	r.cfg.Processes = &scarce{r.cfg.Processes, 3}
	require.NoError(t, r.run(t).Err)
	require.Equal(t, []string{"ready", "success", "leave: done"}, r.fakeRdzv.said())
}

func TestNoDescriptorsIsNoWorkersFailure(t *testing.T) {
	r := newRig(t, "exit 0", 0)
	r.cfg.Processes = &scarce{r.cfg.Processes, 1 << 30}
	res := r.run(t)
	require.ErrorIs(t, res.Err, syscall.EMFILE)
	require.ErrorContains(t, res.Err, "the launcher has no file descriptor left (limit ")
	require.Empty(t, res.Local, "no worker is blamed")
	require.Equal(t, []string{"ready"}, r.fakeRdzv.said())
}

func TestWithFiles(t *testing.T) {
	other := errors.New("other")
	require.Equal(t, other, withFiles(now().Add(time.Hour), func() error { return other }), "at once")
	require.True(t, outOfFiles(fmt.Errorf("fork/exec: %w", syscall.EBADF)))
	require.Equal(t, syscall.ENFILE, withFiles(now(), func() error { return syscall.ENFILE }))
}
