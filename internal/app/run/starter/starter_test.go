package starter

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/argv/native"
	"dlrover-run/launcher/remote"
)

// The end of a job leaves time for last checkpoints, unless somebody wants it.
func TestStarterWaitsForTheEnd(t *testing.T) {
	t.Parallel()
	s := &Starter{muster: remote.NewMuster(2, 2),
		Config: Config{Memo: remote.Memo{Grace: time.Minute, Drain: time.Hour}}}
	s.endAll()
	require.WithinRange(t, s.until, time.Now().Add(30*time.Minute), time.Now().Add(61*time.Minute))
	s.pass(syscall.SIGUSR1)
	require.Greater(t, time.Until(s.until), 30*time.Minute)
	s.pass(syscall.SIGTERM)
	require.LessOrEqual(t, time.Until(s.until), time.Minute)
	at := s.until
	s.pass(syscall.SIGTERM)
	s.endAll()
	require.Equal(t, at, s.until)
}

// Whoever does not end is named.
func TestStarterNamesWhomItGivesUp(t *testing.T) {
	t.Parallel()
	s := &Starter{Config: Config{Job: &native.Remote{}}}
	for i := range 14 {
		s.Job.Hosts = append(s.Job.Hosts, fmt.Sprintf("h%d", i))
		s.sessions = append(s.sessions, &remote.Session{})
	}
	s.sessions[1] = nil
	require.Equal(t, "these hosts have not ended in time, and are cut off: h0, h2, h3, h4, h5, h6, h7, h8, h9, h10 and 3 "+
		"more; see what still runs there", s.leftBehind())
	clear(s.sessions[3:])
	require.Contains(t, s.leftBehind(), "cut off: h0, h2; see")
}

// The checkpoint daemon of a launcher that was killed writes on when the starter ends.
func TestDaemonsOf(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("sleep", "60")
	cmd.Args[0] = "checkpointd"
	other := exec.Command("sleep", "60")
	require.NoError(t, cmd.Start())
	require.NoError(t, other.Start())
	defer func() {
		for _, c := range []*exec.Cmd{cmd, other} {
			_ = c.Process.Kill()
			_ = c.Wait()
		}
	}()
	require.Contains(t, daemonsOf(os.Getpid()), cmd.Process.Pid)
	require.NotContains(t, daemonsOf(os.Getpid()), other.Process.Pid)
}
