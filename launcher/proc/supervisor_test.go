package proc

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/internal/testkit"
	"dlrover-run/launcher/proc/family"
)

func TestExit(t *testing.T) {
	s := newSupervisor(t, Config{})
	type row struct {
		name, script string
		code         int
		signal       syscall.Signal
	}
	rows := []row{{"zero", "exit 0", 0, 0}, {"one", "exit 1", 1, 0}, {"largest", "exit 255", 255, 0}}
	for _, sig := range []syscall.Signal{unix.SIGHUP, unix.SIGINT, unix.SIGABRT, unix.SIGKILL, unix.SIGSEGV,
		unix.SIGTERM, unix.SIGUSR1} {
		rows = append(rows, row{SignalName(sig), fmt.Sprintf("ulimit -c 0; kill -%d $$", sig), -int(sig), sig})
	}
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			before := time.Now()
			e, _ := runSpec(t, s, sh(r.script))
			require.Equal(t, r.code, e.Code)
			require.Equal(t, r.signal, e.Signal)
			require.False(t, e.CoreDump)
			require.WithinRange(t, e.At, before, time.Now())
			require.Positive(t, e.MaxRSS)
		})
	}
}

func TestExitCoreDump(t *testing.T) {
	s := newSupervisor(t, Config{})
	spec := sh("ulimit -c unlimited || exit 9; kill -SEGV $$")
	spec.Dir = t.TempDir() // where a core file goes
	e, _ := runSpec(t, s, spec)
	if e.Code == 9 {
		t.Skip("SKIPPED: the hard limit forbids core files")
	}
	require.Equal(t, -int(unix.SIGSEGV), e.Code)
	require.True(t, e.CoreDump)
}

func TestExitCPUTime(t *testing.T) {
	s := newSupervisor(t, Config{})
	e, _ := runSpec(t, s, sh("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"))
	require.Zero(t, e.Code)
	require.Greater(t, e.UserTime+e.SysTime, time.Millisecond)
}

func TestWaitingTakesNoThread(t *testing.T) {
	s := newSupervisor(t, Config{})
	before := len(family.Numbers("/proc/self/task"))
	var ps []*Process
	for range 32 {
		p, _ := startReady(t, s, "echo ready; exec sleep 1000")
		ps = append(ps, p)
	}
	require.Less(t, len(family.Numbers("/proc/self/task")), before+16)
	require.NoError(t, s.Stop(ps, unix.SIGTERM, patience, nil))
}

func TestWaitWithoutPidfd(t *testing.T) {
	cmd := exec.Command("/bin/sh", "-c", "exit 7")
	require.NoError(t, cmd.Start())
	blockUntilExit(cmd.Process.Pid)
	require.True(t, inState(cmd.Process.Pid, 'Z'), "the status must stay for Wait")
	require.ErrorContains(t, cmd.Wait(), "exit status 7")
	require.False(t, parkUntilExit(cmd.Process), "a handle that is gone must lead to the blocking wait")
}

func TestStartEnvironment(t *testing.T) {
	s := newSupervisor(t, Config{})
	t.Run("given", func(t *testing.T) {
		spec := Spec{Path: "/usr/bin/env", Env: []string{"A=a", "B=c", "A=b"}}
		_, out := runSpec(t, s, spec)
		require.Equal(t, "A=b\nB=c", out, "nothing is added")
	})
	t.Run("inherited", func(t *testing.T) {
		t.Setenv("PROC_TEST_VALUE", "v")
		_, out := runSpec(t, s, sh("echo $PROC_TEST_VALUE"))
		require.Equal(t, "v", out)
	})
	t.Run("directory", func(t *testing.T) {
		spec := sh("pwd -P")
		spec.Dir = t.TempDir()
		_, out := runSpec(t, s, spec)
		require.Equal(t, spec.Dir, out)
	})
	t.Run("program from PATH of Env", func(t *testing.T) {
		dir := t.TempDir()
		require.NoError(t, testkit.WriteProgram(filepath.Join(dir, "hello"), "#!/bin/sh\necho from $0\n"))
		_, out := runSpec(t, s, Spec{Path: "hello", Env: []string{"PATH=/nowhere:" + dir}})
		require.Equal(t, "from "+dir+"/hello", out)
	})
	t.Run("own session", func(t *testing.T) {
		p, _ := startReady(t, s, "echo; exec sleep 1000")
		st, err := family.ReadStat(p.PID())
		require.NoError(t, err)
		require.Equal(t, p.PID(), st.Session)
		require.NoError(t, p.SignalOnly(unix.SIGKILL))
		waitDone(t, p)
	})
}

// A descriptor that leaks into a worker keeps pipes and locks of the launcher
// alive; the write end of the guard's pipe would blind the guard.
func TestStartLeaksNoFiles(t *testing.T) {
	inherited, err := unix.Dup(0) // no close-on-exec, as left open by a parent
	require.NoError(t, err)
	defer unix.Close(inherited)
	s := newSupervisor(t, Config{})
	other, _ := startReady(t, s, "echo; exec sleep 1000")
	e, out := runSpec(t, s, Spec{Path: "ls", Args: []string{"ls", "/proc/self/fd"}})
	require.Zero(t, e.Code)
	require.Equal(t, []string{"0", "1", "2", "3"}, strings.Fields(out), "3 is the directory that ls reads")
	require.NoError(t, s.Stop([]*Process{other}, unix.SIGKILL, patience, nil))
}

func TestStartAffinity(t *testing.T) {
	s := newSupervisor(t, Config{})
	set := unix.NewCPUSet(maxCPUs)
	require.NoError(t, unix.SchedGetaffinityDynamic(0, set))
	cpu := 0
	for !set.IsSet(cpu) {
		cpu++
	}
	mask := sh("sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status")
	_, all := runSpec(t, s, mask)
	mask.CPUs = []int{cpu}
	_, one := runSpec(t, s, mask)
	require.Equal(t, fmt.Sprint(cpu), one)
	mask.CPUs = nil
	_, again := runSpec(t, s, mask)
	require.Equal(t, all, again, "the starting thread must get its mask back")

	mask.CPUs = []int{maxCPUs - 1}
	_, err := s.Start(mask)
	require.ErrorContains(t, err, "set CPU affinity [8191] (does this machine or cpuset have these CPUs?)")
	mask.CPUs = []int{-1}
	_, err = s.Start(mask)
	require.ErrorContains(t, err, "CPU -1: must be 0 to 8191")
}

func TestStartErrors(t *testing.T) {
	s := newSupervisor(t, Config{})
	dir := t.TempDir()
	file := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), mode))
		return path
	}
	busy := file("busy", "", 0o755)
	f, err := os.OpenFile(busy, os.O_WRONLY, 0)
	require.NoError(t, err)
	defer f.Close()
	tests := []struct {
		name  string
		spec  Spec
		text  string
		cause error
	}{
		{"no program", Spec{}, "no program given", nil},
		{"not found", Spec{Path: dir + "/none"}, dir + "/none: file not found", unix.ENOENT},
		{"not in PATH", Spec{Path: "none", Env: []string{"PATH=/a:/b"}}, "none: not found in PATH (/a:/b)", os.ErrNotExist},
		{"not executable", Spec{Path: file("plain", "x", 0o644)}, "not executable (mode -rw-r--r--)", unix.EACCES},
		{"directory", Spec{Path: dir}, "is a directory", unix.EACCES},
		{"bad interpreter", Spec{Path: file("bad", "#! /no/such/python3 -u\n", 0o755)},
			`its interpreter "/no/such/python3" (first line of the script) does not exist`, unix.ENOENT},
		{"DOS line ends", Spec{Path: file("dos", "#!/bin/sh\r\n", 0o755)}, "DOS line ends", unix.ENOENT},
		{"no format", Spec{Path: file("text", "echo\n", 0o755)},
			"neither a program for this machine nor a script", unix.ENOEXEC},
		{"open for writing", Spec{Path: busy}, "open for writing", unix.ETXTBSY},
		{"too long", Spec{Path: "/bin/true", Args: []string{"true", strings.Repeat("x", 1<<18)}},
			"262150 bytes of arguments", unix.E2BIG},
		{"no directory", Spec{Path: "/bin/true", Dir: dir + "/gone"}, "working directory " + dir + "/gone does not exist",
			unix.ENOENT},
		{"relative to Dir", Spec{Path: "./plain", Dir: dir}, "cannot start ./plain: not executable", unix.EACCES},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := s.Start(tt.spec)
			require.ErrorContains(t, err, tt.text)
			if tt.cause != nil {
				require.ErrorIs(t, err, tt.cause)
			}
		})
	}
}

func TestSignal(t *testing.T) {
	s := newSupervisor(t, Config{})
	t.Run("group", func(t *testing.T) {
		p, _ := startReady(t, s, "sleep "+token(1)+" & echo; wait")
		requireAlive(t, token(1))
		require.NoError(t, p.Signal(unix.SIGUSR1))
		require.Equal(t, -int(unix.SIGUSR1), waitDone(t, p).Code)
		requireGone(t, token(1))
		require.ErrorIs(t, p.Signal(unix.SIGTERM), os.ErrProcessDone)
		require.ErrorIs(t, p.SignalOnly(unix.SIGTERM), os.ErrProcessDone)
	})
	t.Run("process only", func(t *testing.T) {
		p, _ := startReady(t, s, "sleep "+token(2)+" & echo; wait")
		requireAlive(t, token(2))
		require.NoError(t, p.SignalOnly(unix.SIGUSR1))
		require.Equal(t, -int(unix.SIGUSR1), waitDone(t, p).Code)
		require.Len(t, alive(token(2)), 1)
		n, err := s.Sweep()
		require.NoError(t, err)
		require.Equal(t, 1, n)
		require.Empty(t, alive(token(2)))
	})
}

func TestStop(t *testing.T) {
	for _, noCgroup := range []bool{false, true} {
		t.Run(fmt.Sprintf("NoCgroup=%v", noCgroup), func(t *testing.T) {
			s := newSupervisor(t, Config{NoCgroup: noCgroup})
			t.Run("worker obeys", func(t *testing.T) {
				p, _ := startReady(t, s, "trap 'exit 5' TERM; echo; while :; do sleep 0.01; done")
				require.NoError(t, s.Stop([]*Process{p}, unix.SIGTERM, patience, nil))
				require.Equal(t, 5, p.Exit().Code)
			})
			t.Run("worker ignores", func(t *testing.T) {
				p, _ := startReady(t, s, "trap '' TERM; echo; sleep 1000")
				const grace = 200 * time.Millisecond
				start := time.Now()
				require.NoError(t, s.Stop([]*Process{p}, unix.SIGTERM, grace, nil))
				require.GreaterOrEqual(t, time.Since(start), grace)
				require.Equal(t, -int(unix.SIGKILL), p.Exit().Code)
			})
			t.Run("force", func(t *testing.T) {
				p, out := startReady(t, s, "trap 'echo got' TERM; echo; while :; do sleep 0.01; done")
				force := make(chan struct{})
				go func() { out.ReadString('\n'); close(force) }()
				require.NoError(t, s.Stop([]*Process{p}, unix.SIGTERM, time.Hour, force))
				require.Equal(t, -int(unix.SIGKILL), p.Exit().Code)
			})
			t.Run("stopped worker", func(t *testing.T) {
				p, _ := startReady(t, s, "trap 'exit 5' TERM; echo; kill -STOP $$; while :; do sleep 0.01; done")
				require.Eventually(t, func() bool { return inState(p.PID(), 'T') }, patience, time.Millisecond)
				require.NoError(t, s.Stop([]*Process{p}, unix.SIGTERM, patience, nil))
				require.Equal(t, 5, p.Exit().Code)
			})
			t.Run("children of a dead and of a living worker", func(t *testing.T) {
				dead, _ := startReady(t, s, "sleep "+token(1)+" & echo; exit 3")
				live, _ := startReady(t, s, "trap 'exit 0' TERM; setsid sleep "+token(2)+" & echo; while :; do sleep 0.01; done")
				require.Equal(t, 3, waitDone(t, dead).Code)
				requireAlive(t, token(1))
				requireAlive(t, token(2))
				require.NoError(t, s.Stop([]*Process{dead, live}, unix.SIGTERM, patience, nil))
				require.Empty(t, alive(token(1)))
				require.Empty(t, alive(token(2)))
				require.Zero(t, live.Exit().Code)
			})
		})
	}
}

func TestSweep(t *testing.T) {
	for _, noCgroup := range []bool{false, true} {
		t.Run(fmt.Sprintf("NoCgroup=%v", noCgroup), func(t *testing.T) {
			s := newSupervisor(t, Config{NoCgroup: noCgroup})
			tests := []struct{ name, script string }{
				{"same group", "sleep TOKEN &"},
				{"double fork and setsid", "(setsid sh -c 'sleep TOKEN & exit' &);"},
				{"empty environment", "env -i sleep TOKEN &"},
				{"empty environment and setsid", "setsid env -i sleep TOKEN &"},
				{"stopped", "sleep TOKEN & until grep -q sleep /proc/$!/comm; do :; done; kill -STOP $!;"},
				{"deep tree", "sh -c 'sh -c \"setsid sh -c \\\"sleep TOKEN; :\\\"; :\"; :' &"},
			}
			for i, tt := range tests {
				t.Run(tt.name, func(t *testing.T) {
					tok := token(i)
					p, _ := startReady(t, s, strings.ReplaceAll(tt.script, "TOKEN", tok)+" echo")
					waitDone(t, p)
					requireAlive(t, tok)
					n, err := s.Sweep()
					require.NoError(t, err)
					require.Positive(t, n)
					require.Empty(t, alive(tok))
				})
			}
			n, err := s.Sweep()
			require.NoError(t, err)
			require.Zero(t, n)
		})
	}
}

// A tree that forks all the time must not outrun the sweep.
func TestSweepForkingTree(t *testing.T) {
	s := newSupervisor(t, Config{NoCgroup: true})
	p, _ := startReady(t, s, "f() { sleep 0.005; (f &) ; }; f & f & f & echo; wait")
	waitDone(t, p)
	_, err := s.Sweep()
	require.NoError(t, err)
	require.Empty(t, family.Children())
}

func TestSweepSparesHelpers(t *testing.T) {
	s := newSupervisor(t, Config{})
	spec := sh("sleep " + token(1) + " & wait")
	spec.Helper = true
	helper, err := s.Start(spec)
	require.NoError(t, err)
	requireAlive(t, token(1))
	worker, _ := startReady(t, s, "sleep "+token(2)+" & echo; wait")
	n, err := s.Sweep()
	require.NoError(t, err)
	require.Equal(t, 2, n)
	require.Equal(t, -int(unix.SIGKILL), waitDone(t, worker).Code)
	require.Len(t, alive(token(1)), 1)
	require.NoError(t, s.Close())
	require.Equal(t, -int(unix.SIGKILL), waitDone(t, helper).Code)
	require.Empty(t, alive(token(1)))
}

func TestReapOrphansKeepsOwnStatuses(t *testing.T) {
	s := newSupervisor(t, Config{})
	const n = 50
	var wg sync.WaitGroup
	codes := make([]int, n)
	for i := range n {
		wg.Go(func() {
			// Leaves an orphan that ends at about the same time.
			p, err := s.Start(sh(fmt.Sprintf("(sleep 0.00%d &) ; exit %d", i%10, i)))
			if err != nil {
				codes[i] = -1000
				return
			}
			<-p.Done()
			codes[i] = p.Exit().Code
		})
	}
	wg.Wait()
	for i, code := range codes {
		require.Equal(t, i, code)
	}
	require.Eventually(t, func() bool { return len(family.Children()) == 0 }, patience, time.Millisecond,
		"orphans are left as zombies")
}

func TestClose(t *testing.T) {
	s, err := New(Config{Logger: quiet()})
	require.NoError(t, err)
	p, _ := startReady(t, s, "trap '' TERM; sleep "+token(1)+" & echo; wait")
	require.NoError(t, s.Close())
	require.Equal(t, -int(unix.SIGKILL), waitDone(t, p).Code)
	require.Empty(t, alive(token(1)))
	require.Empty(t, family.Children())
	require.NoError(t, s.Close())
	_, err = s.Start(sh("exit 0"))
	require.ErrorIs(t, err, ErrClosed)
}

func TestCgroupHoldsWorkers(t *testing.T) {
	haveCgroup(t)
	s := newSupervisor(t, Config{})
	p, _ := startReady(t, s, "echo; exec sleep 1000")
	require.Equal(t, []int{p.PID()}, family.Members(s.cgroup.dir.Name()))
	nested := filepath.Join(s.cgroup.dir.Name(), "made-by-worker")
	require.NoError(t, os.Mkdir(nested, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(nested, "cgroup.procs"), []byte(fmt.Sprint(p.PID())), 0))
	path := s.cgroup.path
	require.NoError(t, s.Close())
	require.NoDirExists(t, path)
}

func TestCgroupRefusedByKernel(t *testing.T) {
	s := newSupervisor(t, Config{NoCgroup: true})
	path := filepath.Join(t.TempDir(), "no-cgroup")
	require.NoError(t, os.Mkdir(path, 0o755))
	dir, err := os.Open(path)
	require.NoError(t, err)
	s.mu.Lock()
	s.cgroup = &cgroup{path: path, dir: dir} // clone3 answers EBADF
	s.mu.Unlock()
	e, _ := runSpec(t, s, sh("exit 4"))
	require.Equal(t, 4, e.Code)
	require.Nil(t, s.cgroup)
	require.NoDirExists(t, path)
}

// Linux 6.18 kills what is cloned into a cgroup that was once killed.
func TestCgroupKilledBefore(t *testing.T) {
	haveCgroup(t)
	s := newSupervisor(t, Config{})
	require.NoError(t, family.KillCgroup(s.cgroup.dir.Name()))
	e, _ := runSpec(t, s, sh("exit 4"))
	require.Equal(t, 4, e.Code)
}

func TestRemoveStaleCgroups(t *testing.T) {
	parent := t.TempDir()
	hour := time.Now().Add(-time.Hour)
	for _, name := range []string{"dlrover-stale/1", "dlrover-used", "dlrover-new", "other"} {
		require.NoError(t, os.MkdirAll(filepath.Join(parent, name), 0o755))
	}
	for _, name := range []string{"dlrover-stale", "dlrover-used", "other"} {
		require.NoError(t, os.Chtimes(filepath.Join(parent, name), hour, hour))
	}
	used, err := os.Open(filepath.Join(parent, "dlrover-used"))
	require.NoError(t, err)
	defer used.Close()
	require.NoError(t, unix.Flock(int(used.Fd()), unix.LOCK_SH))
	removeStale(parent)
	require.NoDirExists(t, filepath.Join(parent, "dlrover-stale"))
	for _, name := range []string{"dlrover-used", "dlrover-new", "other"} {
		require.DirExists(t, filepath.Join(parent, name))
	}
}

// What a launcher and its guard have left that were killed at the same moment ends when
// the next launcher starts.
func TestStaleCgroupIsKilled(t *testing.T) {
	haveCgroup(t)
	c, err := makeCgroup(fmt.Sprintf("stale-%d", os.Getpid()))
	require.NoError(t, err)
	cmd := exec.Command("/bin/sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(c.dir.Fd())}
	require.NoError(t, cmd.Start())
	hour := time.Now().Add(-time.Hour)
	require.NoError(t, os.Chtimes(c.path, hour, hour))
	removeStale(filepath.Dir(c.path))
	require.DirExists(t, c.path, "its launcher lives")
	require.NoError(t, c.lock.Close())
	removeStale(filepath.Dir(c.path))
	require.Error(t, cmd.Wait())
	removeStale(filepath.Dir(c.path))
	require.NoDirExists(t, c.path)
}

// Every generation of workers has to be in a cgroup, not only the first.
func TestCgroupAfterSweep(t *testing.T) {
	haveCgroup(t)
	s := newSupervisor(t, Config{})
	for range 3 {
		p, _ := startReady(t, s, "echo; exec sleep 1000")
		require.Equal(t, []int{p.PID()}, family.Members(s.cgroup.dir.Name()))
		require.NoError(t, s.Stop([]*Process{p}, unix.SIGTERM, 0, nil))
	}
}

func BenchmarkStart(b *testing.B) {
	for _, noCgroup := range []bool{false, true} {
		b.Run(fmt.Sprintf("NoCgroup=%v", noCgroup), func(b *testing.B) {
			s := newSupervisor(b, Config{NoCgroup: noCgroup})
			for b.Loop() {
				p, err := s.Start(Spec{Path: "/bin/true"})
				if err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				<-p.Done()
				b.StartTimer()
			}
		})
	}
}

// BenchmarkExitDetection measures from the kill of a process to Done.
func BenchmarkExitDetection(b *testing.B) {
	s := newSupervisor(b, Config{})
	for b.Loop() {
		b.StopTimer()
		p, err := s.Start(Spec{Path: "/bin/sleep", Args: []string{"sleep", "1000"}})
		if err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		p.SignalOnly(unix.SIGKILL)
		<-p.Done()
	}
}

func BenchmarkSweepNothing(b *testing.B) {
	s := newSupervisor(b, Config{})
	for b.Loop() {
		if n, err := s.Sweep(); n != 0 || err != nil {
			b.Fatal(n, err)
		}
	}
}

func BenchmarkNewClose(b *testing.B) {
	for b.Loop() {
		s, err := New(Config{Logger: quiet()})
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
