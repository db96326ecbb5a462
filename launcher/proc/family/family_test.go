package family

import (
	"io"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestParseStat(t *testing.T) {
	const rest = " 1 2 3 4 5 6 7 8 9 10 "
	tests := []struct {
		text string
		want Stat
	}{
		{"12 (sh) S 1 12 10 0 -1 64" + rest + "3 0",
			Stat{PID: 12, Parent: 1, Session: 10, Flags: 64, Threads: 3, Comm: "sh", State: 'S'}},
		{"7 (a) R 9 (b\n) Z 3 4 5 0 -1 0" + rest + "1 0",
			Stat{PID: 7, Parent: 3, Session: 5, Threads: 1, Comm: "a) R 9 (b\n", State: 'Z'}},
	}
	for _, tt := range tests {
		got, err := parseStat(tt.text)
		require.NoError(t, err)
		require.Equal(t, tt.want, got)
	}
	require.False(t, tests[0].want.Ended())
	require.True(t, tests[1].want.Ended())
	require.False(t, Stat{State: 'Z', Threads: 2}.Ended(), "only the first thread has ended")
	for _, bad := range []string{"", "12", "12 (sh", ") (", "12 (sh) S", "x (sh) S 1 2 3 4 5 6" + rest + "1",
		"12 (sh) S 1 2 3 4 5 6" + rest,
		"12 (sh) S x 2 3 4 5 6" + rest + "1", "12 (sh) S 1 2 3 4 5 x" + rest + "1", "12 (sh) SS 1 2 3 4 5 6" + rest + "1"} {
		_, err := parseStat(bad)
		require.ErrorContains(t, err, "parse process status", bad)
	}
	self, err := ReadStat(os.Getpid())
	require.NoError(t, err)
	require.Equal(t, os.Getppid(), self.Parent)
	require.Greater(t, self.Threads, 1)
}

func FuzzParseStat(f *testing.F) {
	f.Add("12 (sh) S 1 12 10 0 -1 64 1 2 3 4 5 6 7 8 9 10 1")
	f.Add("7 (a) R 9 (b) Z 3 4 5 0 -1 0 1 2 3 4 5 6 7 8 9 10 1")
	f.Fuzz(func(t *testing.T, text string) {
		st, err := parseStat(text)
		if err == nil {
			require.Contains(t, text, "("+st.Comm+")")
		}
	})
}

// sleeper starts a child that ends with the test.
func sleeper(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/bin/cat")
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { in.Close(); cmd.Wait() })
	return cmd
}

// All ways to list the children have to agree; many kernels offer one only.
func TestChildren(t *testing.T) {
	pid := sleeper(t).Process.Pid
	require.Equal(t, []int{pid}, Children())
	require.Equal(t, []int{pid}, probedChildren(candidates()))
	require.Equal(t, []int{pid}, probedChildren([]int{1, pid, os.Getpid()}))
	require.Equal(t, []int{pid}, below(os.Getpid(), func(int) bool { return false }))
	require.Empty(t, below(os.Getpid(), func(int) bool { return true }))
}

func TestAnyChild(t *testing.T) {
	require.False(t, anyChild())
	sleeper := exec.Command("/bin/cat")
	in, err := sleeper.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, sleeper.Start())
	require.True(t, anyChild(), "it runs")
	require.NoError(t, in.Close())
	require.NoError(t, unix.Waitid(unix.P_PID, sleeper.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil))
	require.True(t, anyChild(), "it is a zombie")
	require.NoError(t, sleeper.Wait())
	require.False(t, anyChild())

	// One that tells its parent nothing of its end, as a helper of a library may be.
	var none uintptr
	pid, _, errno := unix.RawSyscall(unix.SYS_CLONE, none, none, none)
	if pid == 0 {
		unix.RawSyscall(unix.SYS_EXIT_GROUP, none, none, none)
	}
	require.Zero(t, errno)
	require.True(t, anyChild())
	_, err = unix.Wait4(int(pid), nil, unix.WALL, nil)
	require.NoError(t, err)
	require.False(t, anyChild())
}

func TestEnded(t *testing.T) {
	cmd := exec.Command("/bin/true")
	require.NoError(t, cmd.Start())
	require.NoError(t, unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil))
	require.Equal(t, cmd.Process.Pid, Ended())
	require.True(t, hasEnded(cmd.Process.Pid))
	require.NoError(t, cmd.Wait())
	require.Zero(t, Ended())
	require.False(t, hasEnded(sleeper(t).Process.Pid))
}

// The error says of each what was tried.
func TestSurvivors(t *testing.T) {
	s := Sweep{denied: map[int]bool{os.Getppid(): true}}
	err := s.survivors([]int{os.Getpid(), os.Getppid()})
	require.ErrorContains(t, err, "2 processes are left: pid ")
	require.Regexp(t, `^[^;]*survived SIGKILL; [^;]*belongs to another user$`, err.Error())
}

// A sweep spares what it is told to spare, and returns once the rest is gone.
func TestSweep(t *testing.T) {
	spared := sleeper(t).Process.Pid
	other := exec.Command("/bin/sh", "-c", "setsid sleep 1000 & setsid sleep 1000 & echo; wait")
	out, err := other.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, other.Start())
	_, err = out.Read(make([]byte, 1))
	require.NoError(t, err)
	require.NoError(t, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
	defer unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
	s := Sweep{
		Spared: func(pid int) bool { return pid == spared },
		Cgroup: func() ([]int, bool) { return nil, false },
		Reap: func() {
			if pid := Ended(); pid != 0 {
				unix.Wait4(pid, nil, unix.WNOHANG, nil)
			}
		},
	}
	n, err := s.Run(Patience)
	require.NoError(t, err)
	require.Equal(t, 3, n)
	require.Equal(t, []int{spared}, Children())
	_, err = io.ReadAll(out)
	require.NoError(t, err, "nobody holds the pipe")
	other.Wait()
}
