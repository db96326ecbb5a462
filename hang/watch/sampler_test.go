package watch

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/hang/page"
)

// lookAt is a looker for processes of this machine, or of a directory that stands for /proc.
func lookAt(root string, pids ...int) *looker {
	l := &looker{
		sampler: &sampler{
			fs: newProcfs(root), now: Monotonic, parse: page.Read, leads: &leads{tid: map[int]int{}},
		}, patient: time.Minute,
		blocked: func(int) {},
	}
	for i, pid := range pids {
		l.state = append(l.state, tracked{local: i, rank: 10 + i, pid: pid})
	}
	return l
}

// process starts one that ends with the test.
func process(t *testing.T, name string, args ...string) int {
	t.Helper()
	c := exec.Command(name, args...)
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, c.Start())
	t.Cleanup(func() {
		_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL)
		_ = c.Wait()
	})
	return c.Process.Pid
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	require.Eventually(t, f, 20*time.Second, 5*time.Millisecond, what)
}

func TestSampleOfSleepersSpinnersAndTheStopped(t *testing.T) {
	sleeps, spins := process(t, "sleep", "100"), process(t, "sh", "-c", "while :; do :; done")
	stopped := process(t, "sleep", "100")
	l := lookAt("/proc", sleeps, spins, stopped)
	require.NoError(t, syscall.Kill(stopped, syscall.SIGSTOP))
	eventually(t, "asleep, stopped", func() bool {
		s := l.look(t.Context(), false)
		return s[0].Proc.WChan != "" && s[0].Proc.State == 'S' && s[2].Proc.State == 'T'
	})
	first := l.look(t.Context(), true)
	var second []hang.Sample
	eventually(t, "spins", func() bool {
		second = l.look(t.Context(), true)
		return second[1].Proc.CPU > first[1].Proc.CPU && second[1].Proc.MainCPU > first[1].Proc.MainCPU
	})
	require.Equal(t, first[0].Proc, second[0].Proc, "who sleeps does nothing at all")
	require.Equal(t, first[2].Proc, second[2].Proc)
	require.Equal(t, hang.Worker{Rank: 12, Local: 2, PID: stopped, Start: first[2].Start}, second[2].Worker)
	require.NotZero(t, second[0].Start)
	require.Greater(t, second[0].At, first[0].At)
}

func TestSampleCountsWhatDescendantsDo(t *testing.T) {
	shell := process(t, "sh", "-c", "while :; do cat /proc/self/stat > /dev/null; done & sleep 100; wait")
	l := lookAt("/proc", shell)
	first := l.look(t.Context(), false)[0]
	eventually(t, "the tree works", func() bool {
		s := l.look(t.Context(), false)[0]
		require.GreaterOrEqual(t, s.Proc.TreeCPU, first.Proc.TreeCPU)
		return s.Proc.TreeCPU > first.Proc.TreeCPU+20*time.Millisecond && s.Proc.TreeIO > first.Proc.TreeIO &&
			s.Proc.CPU < 50*time.Millisecond
	})
}

// What trains may be below a shell that only waits for it.
func TestSampleIsOfThePythonBelowAWrapper(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("SKIPPED: " + t.Name() + " IS NOT RUN: there is no python3")
	}
	shell := process(t, "sh", "-c", `"$0" -c "import time; time.sleep(100)"; true`, python)
	l := lookAt("/proc", shell)
	eventually(t, "found", func() bool { return l.look(t.Context(), false)[0].PID != shell })
	s := l.look(t.Context(), false)[0]
	require.NoError(t, syscall.Kill(s.PID, syscall.SIGSTOP))
	eventually(t, "stopped", func() bool { return l.look(t.Context(), false)[0].Proc.State == 'T' })
	require.NoError(t, syscall.Kill(s.PID, syscall.SIGKILL))
	eventually(t, "the worker itself", func() bool {
		s := l.look(t.Context(), false)[0]
		return s.PID == shell || s.Proc.State == 0
	})
}

func TestSampleOfAProcessThatIsGone(t *testing.T) {
	c := exec.Command("sleep", "100")
	require.NoError(t, c.Start())
	l := lookAt("/proc", c.Process.Pid)
	require.NotZero(t, l.look(t.Context(), false)[0].Proc.State)
	require.NoError(t, c.Process.Kill())
	_ = c.Wait()
	s := l.look(t.Context(), true)[0]
	require.Zero(t, s.Proc)
	require.Equal(t, c.Process.Pid, s.PID)
}

// fakeProc writes files of a process below a directory that stands for /proc.
func fakeProc(t testing.TB, root string, pid int, start uint64) {
	t.Helper()
	dir := filepath.Join(root, strconv.Itoa(pid))
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "task", strconv.Itoa(pid)), 0o700))
	for name, text := range map[string]string{
		"stat": line("python3", 'S', 1, 1, 0, 0, 4, start), "schedstat": "5 5 5\n", "wchan": "futex_wait_queue",
		"io": "rchar: 1\nwchar: 2\n",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
}

func TestPidOfAnotherProcess(t *testing.T) {
	root := t.TempDir()
	fakeProc(t, root, 7, 100)
	l := lookAt(root, 7)
	require.Equal(t, hang.Proc{State: 'S', CPU: 20 * time.Millisecond, MainCPU: 5, MainWait: 5, Switches: 5, IO: 3,
		TreeIO: 3,
		WChan:  "futex_wait_queue", Threads: 4}, l.look(t.Context(), false)[0].Proc)
	fakeProc(t, root, 7, 101)
	require.Zero(t, l.look(t.Context(), false)[0].Proc, "another process has got the number")
}

// Reading the stat of a process blocks, as it can in the kernel: the others are looked at, and it is not read again.
func TestAProcessThatCannotBeRead(t *testing.T) {
	root := t.TempDir()
	for _, pid := range []int{7, 8, 9} {
		fakeProc(t, root, pid, 1)
	}
	l := lookAt(root, 7, 8, 9)
	l.patient = 20 * time.Millisecond
	var blocked []int
	l.blocked = func(pid int) { blocked = append(blocked, pid) }
	require.Len(t, l.look(t.Context(), false), 3)

	pipe := filepath.Join(root, "8", "stat")
	require.NoError(t, os.Remove(pipe))
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	defer func() { // lets the reader that was left behind go
		f, err := os.OpenFile(pipe, os.O_WRONLY, 0)
		require.NoError(t, err)
		require.NoError(t, f.Close())
	}()
	for range 3 {
		s := l.look(t.Context(), false)
		require.Equal(t, byte('S'), s[0].Proc.State)
		require.Equal(t, byte('D'), s[1].Proc.State)
		require.Equal(t, 8, s[1].PID)
		require.Equal(t, byte('S'), s[2].Proc.State)
	}
	require.Equal(t, []int{8}, blocked)
	require.Equal(t, byte('D'), l.clone().look(t.Context(), true)[1].Proc.State)
}

func TestLookEndsWithItsContext(t *testing.T) {
	root := t.TempDir()
	fakeProc(t, root, 7, 1)
	pipe := filepath.Join(root, "7", "stat")
	require.NoError(t, os.Remove(pipe))
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.Nil(t, lookAt(root, 7).look(ctx, false))
	f, err := os.OpenFile(pipe, os.O_WRONLY, 0)
	require.NoError(t, err)
	require.NoError(t, f.Close())
}

// BenchmarkLook is one look at eight workers with four loaders each.
func BenchmarkLook(b *testing.B) {
	var pids []int
	for range 8 {
		c := exec.Command("sh", "-c", "sleep 1000 & sleep 1000 & sleep 1000 & sleep 1000 & wait")
		c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		require.NoError(b, c.Start())
		b.Cleanup(func() { _ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL); _ = c.Wait() })
		pids = append(pids, c.Process.Pid)
	}
	time.Sleep(100 * time.Millisecond)
	l := lookAt("/proc", pids...)
	b.ReportAllocs()
	for b.Loop() {
		l.look(b.Context(), false)
	}
}

// Connections are looked for while a worker is quiet only; what they have carried before is no news.
func TestTrafficOfTheQuiet(t *testing.T) {
	root := t.TempDir()
	fakeProc(t, root, 7, 100)
	l := lookAt(root, 7)
	now, raw, asked := time.Hour, uint64(1<<30), 0
	l.sampler.now = func() time.Duration { return now }
	l.sampler.traffic = func(pids []int) uint64 {
		require.Equal(t, []int{7}, pids)
		asked++
		return raw
	}
	look := func() uint64 { now += time.Second; return l.look(t.Context(), false)[0].Proc.Net }
	look()
	for range quiet/time.Second - 1 {
		require.Zero(t, look())
	}
	require.Zero(t, asked)
	require.Zero(t, look())
	require.Equal(t, 1, asked)
	raw += 500
	require.EqualValues(t, 500, look())
	raw = 100 // a connection is closed
	require.EqualValues(t, 500, look())
	raw = 300
	require.EqualValues(t, 700, look())
	require.NoError(t, os.WriteFile(filepath.Join(root, "7", "schedstat"), []byte("9000000000 5 500\n"), 0o600))
	require.Zero(t, look(), "it goes on")
	require.Equal(t, 4, asked)
}
