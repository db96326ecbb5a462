package proc

import (
	"io"
	"os/exec"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// The reaper takes orphans only: the status of a command is its owner's, at once or later.
func TestCommandKeepsItsStatus(t *testing.T) {
	s := newSupervisor(t, Config{})
	for range 20 {
		wait, err := s.Command(exec.Command("/bin/sh", "-c", "exit 7"))
		require.NoError(t, err)
		runSpec(t, s, sh("exit 0")) // the reaper runs
		require.EqualError(t, wait(), "exit status 7")
	}
	require.Empty(t, s.children)
}

func TestSweepSparesCommands(t *testing.T) {
	s := newSupervisor(t, Config{})
	cmd := exec.Command("/bin/sh", "-c", "sleep 1000 & cat")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	wait, err := s.Command(cmd)
	require.NoError(t, err)
	killed, err := s.Sweep()
	require.NoError(t, err)
	require.Zero(t, killed)
	_, err = in.Write([]byte("x"))
	require.NoError(t, err)
	_, err = io.ReadFull(out, make([]byte, 1))
	require.NoError(t, err, "it lives")
	require.NoError(t, syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL))
	require.EqualError(t, wait(), "signal: killed")
}

func TestCommandThatCannotStart(t *testing.T) {
	s := newSupervisor(t, Config{})
	_, err := s.Command(exec.Command("/no/such/program"))
	require.ErrorContains(t, err, "/no/such/program")
	require.NoError(t, s.Close())
	_, err = s.Command(exec.Command("/bin/true"))
	require.Equal(t, ErrClosed, err)
}
