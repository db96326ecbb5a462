package proc

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/internal/testkit"
	"dlrover-run/launcher/proc/family"
)

// nobody is a user without rights.
const nobody = 65534

// guarded is a launcher below a guard; see helperGuard.
type guarded struct {
	cmd      *exec.Cmd // the guard
	launcher int       // pid
	cgroup   string
	stderr   string // file: what a child holds would keep Wait
}

func (g *guarded) said() string {
	text, _ := os.ReadFile(g.stderr)
	return string(text)
}

// asNobody drops root's rights, where the test has them.
func asNobody(t testing.TB, cmd *exec.Cmd) {
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
}

func startGuarded(t testing.TB, prepare func(*exec.Cmd), env ...string) *guarded {
	t.Helper()
	g := &guarded{stderr: filepath.Join(t.TempDir(), "stderr")}
	stderr, err := os.Create(g.stderr)
	require.NoError(t, err)
	defer stderr.Close()
	g.cmd = exec.Command("/proc/self/exe", wordOfTheJob)
	g.cmd.Env = append(os.Environ(), append(env, helperEnv+"=launcher")...)
	g.cmd.Stderr = stderr
	if prepare != nil {
		prepare(g.cmd)
	}
	out, err := g.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, g.cmd.Start())
	t.Cleanup(func() { g.cmd.Process.Kill(); g.cmd.Wait() })
	line, _ := bufio.NewReader(out).ReadString('\n') // nothing with KILL=now
	fmt.Sscan(line, &g.launcher, &g.cgroup)
	return g
}

// publicDir is a directory that any user may write to.
func publicDir(t testing.TB) string {
	dir := t.TempDir()
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		require.NoError(t, os.Chmod(d, 0o777))
	}
	return dir
}

// wordOfTheJob is in the command line of no other test's processes.
var wordOfTheJob = fmt.Sprintf("word-of-job-%d.", os.Getpid())

// kills are the ways in which a job is killed.
var kills = []struct {
	name string
	kill func(g *guarded)
}{
	{"guard", func(g *guarded) { g.cmd.Process.Kill() }},
	{"launcher", func(g *guarded) { unix.Kill(g.launcher, unix.SIGKILL) }},
	{"stopped launcher's guard", func(g *guarded) { unix.Kill(g.launcher, unix.SIGSTOP); g.cmd.Process.Kill() }},
	{"by a word of the command line", func(g *guarded) { // as pkill -9 -f does
		for _, pid := range family.Numbers("/proc") {
			line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			if bytes.Contains(line, []byte(wordOfTheJob)) {
				unix.Kill(pid, unix.SIGKILL)
			}
		}
	}},
}

// Nothing of a job lives on when one of its two processes is killed, whatever it did to
// hide.
func TestKilledJobLeavesNothing(t *testing.T) {
	python, err := exec.LookPath("/usr/bin/python3")
	if err != nil {
		t.Skip("SKIPPED: THE WAYS TO HIDE ARE NOT TRIED without /usr/bin/python3:", err)
	}
	script, err := filepath.Abs("testdata/hide.py")
	require.NoError(t, err)
	text, err := os.ReadFile(script)
	require.NoError(t, err)
	for _, user := range []string{"root", "nobody"} {
		if user == "root" && os.Geteuid() != 0 {
			t.Log("SKIPPED: NOT TRIED AS ROOT")
			continue
		}
		for _, noCgroup := range []string{"", "1"} {
			for _, k := range kills {
				t.Run(fmt.Sprintf("%s/NOCGROUP=%s/%s", user, noCgroup, k.name), func(t *testing.T) {
					dir := publicDir(t)
					copied := filepath.Join(dir, "hide.py")
					require.NoError(t, os.WriteFile(copied, text, 0o644))
					prepare := func(cmd *exec.Cmd) {
						cmd.Dir = dir
						if user == "nobody" {
							asNobody(t, cmd)
						}
					}
					g := startGuarded(t, prepare, "NOCGROUP="+noCgroup, "SCRIPT=exec "+python+" "+copied+" "+dir)
					require.NotZero(t, g.launcher, g.said())
					k.kill(g)
					requireReleased(t, dir)
					g.cmd.Wait()
					requireEnded(t, g)
				})
			}
		}
	}
}

// requireReleased waits until nobody holds the locks of hide.py.
func requireReleased(t *testing.T, dir string) {
	t.Helper()
	locks, err := filepath.Glob(filepath.Join(dir, "*.lock"))
	require.NoError(t, err)
	require.Greater(t, len(locks), 20)
	for _, path := range locks {
		way := strings.TrimSuffix(filepath.Base(path), ".lock")
		said, err := os.ReadFile(filepath.Join(dir, way+".up"))
		require.NoError(t, err)
		if string(said) != "hidden\n" {
			t.Logf("SKIPPED: %s: %s", way, said)
		}
		f, err := os.Open(path)
		require.NoError(t, err)
		require.Eventually(t, func() bool { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil }, patience,
			patience/4000, "%s lives on", way)
		f.Close()
	}
}

// requireEnded waits for the launcher, which is not a child of the test.
func requireEnded(t *testing.T, g *guarded) {
	t.Helper()
	require.Eventually(t, func() bool {
		st, err := family.ReadStat(g.launcher)
		return err != nil || st.Ended()
	}, patience, patience/4000, "the launcher lives on")
	if g.cgroup != "" {
		require.Eventually(t, func() bool { return !exists(g.cgroup) }, patience, patience/4000, "%s is left", g.cgroup)
	}
}

// The launcher is killed before it has done anything but start a worker.
func TestLauncherKilledAtOnce(t *testing.T) {
	for _, noCgroup := range []string{"", "1"} {
		startGuarded(t, nil, "KILL=now", "NOCGROUP="+noCgroup,
			"SCRIPT=setsid env -i sleep "+token(0)+" & sleep "+token(1)).cmd.Wait()
		requireGone(t, token(0))
		requireGone(t, token(1))
	}
}

func TestManyGrandchildren(t *testing.T) {
	g := startGuarded(t, nil, "NOCGROUP=1", "SCRIPT=i=0; while [ $i -lt 700 ]; do setsid sh -c 'sleep "+token(0)+
		" & sleep "+token(0)+" & wait' & i=$((i+1)); done; echo; wait")
	require.NotZero(t, g.launcher)
	require.NoError(t, unix.Kill(g.launcher, unix.SIGKILL))
	g.cmd.Wait()
	require.Empty(t, alive(token(0)), "the guard ends after them")
}

// The guard ends as the launcher does: whoever waits for it learns what became of that.
func TestGuardEndsAsTheLauncher(t *testing.T) {
	for _, code := range []int{0, 1, 7, 255} {
		g := startGuarded(t, nil, "KILL=end", fmt.Sprintf("CODE=%d", code), "SCRIPT=echo")
		g.cmd.Wait()
		require.Equal(t, code, g.cmd.ProcessState.ExitCode())
		require.Empty(t, g.said())
	}
	for _, sig := range []syscall.Signal{unix.SIGKILL, unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGSYS} {
		g := startGuarded(t, nil, "NOCGROUP=1", "SCRIPT=setsid sleep "+token(0)+" & echo; wait")
		require.NoError(t, unix.Kill(g.launcher, sig))
		g.cmd.Wait()
		ws := g.cmd.ProcessState.Sys().(syscall.WaitStatus)
		if sig == unix.SIGSYS && ws.Exited() {
			continue // the Go runtime makes a crash of it
		}
		require.True(t, ws.Signaled(), "%v: %v", sig, g.cmd.ProcessState)
		require.Equal(t, sig, ws.Signal())
		require.False(t, ws.CoreDump())
		require.Contains(t, g.said(), "dlrover-run: the launcher died; killed ")
	}
}

// What survives the launcher is not killed by either, and the guard does not wait for it.
func TestHeirLivesOn(t *testing.T) {
	for _, k := range kills[:3] {
		t.Run(k.name, func(t *testing.T) {
			g := startGuarded(t, nil, "SURVIVOR=sleep "+token(1), "SCRIPT=sleep "+token(0)+" & echo; wait")
			requireAlive(t, token(1))
			k.kill(g)
			g.cmd.Wait()
			requireEnded(t, g)
			requireGone(t, token(0))
			requireAlive(t, token(1))
			for _, pid := range alive(token(1)) {
				st, err := family.ReadStat(pid)
				require.NoError(t, err)
				unix.Kill(st.Parent, unix.SIGKILL)
				unix.Kill(pid, unix.SIGKILL)
			}
			requireGone(t, token(1))
		})
	}
}

// Children that a process had before it executed the launcher are not the job's.
func TestGuardSparesEarlierChildren(t *testing.T) {
	g := startGuarded(t, func(cmd *exec.Cmd) {
		self, err := os.Executable()
		require.NoError(t, err)
		cmd.Path, cmd.Args = "/bin/sh", []string{"sh", "-c", "sleep " + token(1) + " & exec " + self}
	}, "SCRIPT=sleep "+token(0)+" & echo; wait")
	requireAlive(t, token(1))
	require.NoError(t, unix.Kill(g.launcher, unix.SIGKILL))
	g.cmd.Wait()
	require.Empty(t, alive(token(0)))
	require.Len(t, alive(token(1)), 1)
	require.NoError(t, unix.Kill(alive(token(1))[0], unix.SIGKILL))
	requireGone(t, token(1))
}

// Every signal that can be caught reaches the launcher through its guard.
func TestGuardPassesSignalsOn(t *testing.T) {
	for _, sig := range []syscall.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGQUIT, unix.SIGHUP} {
		g := startGuarded(t, nil, "SCRIPT=echo; exec sleep 1000")
		require.NoError(t, g.cmd.Process.Signal(sig))
		g.cmd.Wait()
		requireEnded(t, g)
	}
}

// With hidepid, /proc shows no process that is not dumpable to others than root: the
// kernel's list of children has it, and it is killed at once.
func TestSweepWithHiddenChildren(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can mount a /proc that hides processes: A SWEEP THERE IS NOT TESTED")
	}
	python, err := exec.LookPath("/usr/bin/python3")
	if err != nil {
		t.Skip("SKIPPED: HIDDEN PROCESSES ARE NOT TESTED without /usr/bin/python3:", err)
	}
	dir := publicDir(t)
	self, err := os.ReadFile("/proc/self/exe")
	require.NoError(t, err)
	program := filepath.Join(dir, "proc.test")
	require.NoError(t, testkit.WriteProgram(program, string(self)))
	const hide = "import ctypes,fcntl,os,sys,time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_SH); " +
		"ctypes.CDLL(None).prctl(4, 0); print(flush=True); time.sleep(1000)"
	lock := filepath.Join(dir, "lock")
	cmd := exec.Command("/usr/bin/unshare", "--mount", "--fork", "sh", "-c",
		"mount -t proc -o hidepid=2 proc /proc && exec setpriv --reuid=65534 --regid=65534 --clear-groups "+program)
	cmd.Env = append(os.Environ(), helperEnv+"=launcher",
		"KILL=end", "NOCGROUP=1", `SCRIPT=`+python+` -c "`+hide+`" `+lock+` & wait`)
	began := time.Now()
	out, err := cmd.CombinedOutput()
	if strings.Contains(string(out), "unshare") || strings.Contains(string(out), "mount:") {
		t.Skipf("SKIPPED: A SWEEP UNDER hidepid IS NOT TESTED: %s", out)
	}
	require.NoError(t, err, "%s", out)
	require.Less(t, time.Since(began), patience)
	f, err := os.Open(lock)
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB), "it lives on")
}

// A limit on processes is said in one line, where the Go runtime would end with a trace;
// under one that is merely low the launcher starts fewer threads, and workers do
// not see how.
func TestLowProcessLimit(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: the limit is on a user's processes, of which only root can have a new one: " +
			"A LOW ulimit -u IS NOT TESTED")
	}
	const nproc = 6 // RLIMIT_NPROC
	dir := publicDir(t)
	run := func(limit uint64) *guarded {
		var before unix.Rlimit
		require.NoError(t, unix.Getrlimit(nproc, &before))
		require.NoError(t, unix.Setrlimit(nproc, &unix.Rlimit{Cur: limit, Max: before.Max}))
		defer unix.Setrlimit(nproc, &before)
		g := startGuarded(t, func(cmd *exec.Cmd) {
			user := 100_000 + uint32(os.Getpid()) // nobody else's, not even that of another run of this test
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
		}, "KILL=end", "SCRIPT=echo procs=$GOMAXPROCS. > "+dir+"/env; echo")
		g.cmd.Wait()
		return g
	}
	g := run(10)
	require.Equal(t, 1, g.cmd.ProcessState.ExitCode())
	require.Regexp(t,
		`^the limit of 10 processes and threads .*\(ulimit -u\) is too small: others take 0, .*: raise it\n$`, g.said())
	g = run(500)
	require.Equal(t, 0, g.cmd.ProcessState.ExitCode(), g.said())
	text, err := os.ReadFile(dir + "/env")
	require.NoError(t, err)
	require.Equal(t, "procs=.\n", string(text))
}

// PID 1 ends with its container, so it stays until those have ended that survive the
// launcher, and it says by its status how that ended.
func TestPID1StaysForSurvivors(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: a PID namespace needs root: A KILLED LAUNCHER BELOW PID 1 IS NOT TESTED")
	}
	dir := t.TempDir()
	cmd := exec.Command("/usr/bin/unshare", "--pid", "--fork", "--mount-proc", os.Args[0])
	cmd.Env = append(os.Environ(), helperEnv+"=launcher",
		"KILL=now", "NOCGROUP=1", "SCRIPT=setsid sleep "+token(0)+" & wait", "SURVIVOR=sleep 0.5; : > "+dir+"/saved")
	out, err := cmd.CombinedOutput()
	if strings.Contains(string(out), "unshare") {
		t.Skipf("SKIPPED: A KILLED LAUNCHER BELOW PID 1 IS NOT TESTED: %s", out)
	}
	require.Error(t, err)
	require.Equal(t, 128+int(unix.SIGKILL), cmd.ProcessState.ExitCode(), "%s", out)
	require.FileExists(t, dir+"/saved")
}
