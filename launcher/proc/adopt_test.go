package proc

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// orphan has a helper start a process and end, and returns its pid once it is a child of this process.
func orphan(t *testing.T, s *Supervisor, script string) int {
	t.Helper()
	spec := sh("echo; ( ( echo $$; sh -c 'echo $$; " + script + "' ) & )")
	spec.Helper = true // the workers' cgroup is killed with all that is in it
	_, out := startSpecReady(t, s, spec)
	_, err := out.ReadString('\n')
	require.NoError(t, err)
	pid := number(t, out)
	require.Eventually(t, func() bool { return parentOf(pid) == os.Getpid() }, patience, time.Millisecond)
	return pid
}

func number(t *testing.T, r *bufio.Reader) int {
	t.Helper()
	line, err := r.ReadString('\n')
	require.NoError(t, err)
	n, err := strconv.Atoi(strings.TrimSpace(line))
	require.NoError(t, err)
	return n
}

func parentOf(pid int) int {
	text, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	_, after, _ := strings.Cut(string(text), ") ")
	f := strings.Fields(after)
	if len(f) < 2 {
		return 0
	}
	n, _ := strconv.Atoi(f[1])
	return n
}

func TestAdoptedIsAHelperUntilItIsEmployed(t *testing.T) {
	s := newSupervisor(t, Config{})
	p, err := s.Adopt(orphan(t, s, "exec sleep 1000"))
	require.NoError(t, err)
	_, err = s.Adopt(p.PID())
	require.ErrorContains(t, err, "known already")
	_, err = s.Sweep()
	require.NoError(t, err)
	require.NoError(t, unix.Kill(p.PID(), 0), "a sweep spares helpers")
	require.NoError(t, s.Employ(p))
	if s.cgroup != nil {
		procs := filepath.Join(s.cgroup.dir.Name(), "cgroup.procs")
		require.Eventually(t, func() bool {
			text, _ := os.ReadFile(procs)
			return strings.Contains("\n"+string(text), "\n"+strconv.Itoa(p.PID())+"\n")
		}, patience, time.Millisecond)
	}
	_, err = s.Sweep()
	require.NoError(t, err)
	require.Equal(t, -int(unix.SIGKILL), waitDone(t, p).Code)
	require.ErrorIs(t, s.Employ(p), os.ErrProcessDone)
}

// A fork that is nobody's child yet but the kernel's gift is no rest of the workers; what takes too long is.
func TestASweepWaitsForForks(t *testing.T) {
	s := newSupervisor(t, Config{})
	s.forkPatience = patience
	done := s.Forking()
	pid := orphan(t, s, "exec sleep 1000")
	swept := make(chan int, 1)
	go func() { n, _ := s.Sweep(); swept <- n }()
	select {
	case <-swept:
		require.Fail(t, "it does not wait")
	case <-time.After(forkPatience):
	}
	p, err := s.Adopt(pid)
	require.NoError(t, err)
	require.False(t, done())
	require.Zero(t, <-swept)
	require.False(t, done(), "once is enough")
	require.NoError(t, unix.Kill(p.PID(), 0))

	s.forkPatience = forkPatience
	done = s.Forking()
	orphan(t, s, "exec sleep 1000")
	n, err := s.Sweep()
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.True(t, done(), "it may be the one that was killed")
	require.False(t, s.Forking()(), "the next one is not")
}

// A process that a sweep has killed may tell that it is ready all the same, and take its time to end.
func TestTheSweptAreNotAdopted(t *testing.T) {
	s := newSupervisor(t, Config{})
	pid := orphan(t, s, "exec sleep 1000")
	s.mu.Lock()
	s.swept = map[int]bool{pid: true}
	s.mu.Unlock()
	_, err := s.Adopt(pid)
	require.ErrorContains(t, err, "was taken for what workers have left")
}

func TestExitOfAnAdopted(t *testing.T) {
	s := newSupervisor(t, Config{})
	for script, code := range map[string]int{
		"read x; sleep 0.1; exit 7":        7,
		"sleep 0.1; kill -SEGV $$":         -int(unix.SIGSEGV),
		"exec sleep 1000 # until a signal": -int(unix.SIGTERM),
	} {
		p, err := s.Adopt(orphan(t, s, script))
		require.NoError(t, err)
		require.NoError(t, s.Employ(p))
		if strings.HasPrefix(script, "exec") {
			require.NoError(t, s.Stop([]*Process{p}, syscall.SIGTERM, patience, nil), "it leads no group")
		}
		require.Equal(t, code, waitDone(t, p).Code)
	}
}

func TestAdoptTakesItsChildrenOnly(t *testing.T) {
	s := newSupervisor(t, Config{})
	_, err := s.Adopt(1)
	require.ErrorContains(t, err, "adopt process 1: it is a child of 0, not of this process")
	gone := exec.Command("/bin/true")
	wait, err := s.Command(gone)
	require.NoError(t, err)
	require.NoError(t, wait())
	_, err = s.Adopt(gone.Process.Pid)
	require.ErrorContains(t, err, "adopt process")
	require.NoError(t, s.Close())
	_, err = s.Adopt(1)
	require.ErrorIs(t, err, ErrClosed)
	require.ErrorIs(t, s.Employ(&Process{}), ErrClosed)
}
