package proc

import (
	"bufio"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// patience bounds waits for things that normally take milliseconds.
const patience = 20 * time.Second

// helperEnv selects what the test binary does instead of running tests.
const helperEnv = "PROC_TEST_HELPER"

func TestMain(m *testing.M) {
	if os.Args[0] == GuardName {
		os.Exit(GuardMain())
	}
	switch os.Getenv(helperEnv) {
	case "launcher":
		os.Exit(helperLauncher())
	case "oom":
		os.Exit(helperOOM())
	case "eat":
		helperEat()
	}
	goleak.VerifyTestMain(m)
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func newSupervisor(t testing.TB, cfg Config) *Supervisor {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = quiet()
	}
	s, err := New(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func sh(script string) Spec { return Spec{Path: "/bin/sh", Args: []string{"sh", "-c", script}} }

// startReady starts a script and returns once it has printed its first line.
func startReady(t testing.TB, s *Supervisor, script string) (*Process, *bufio.Reader) {
	t.Helper()
	spec := sh(script)
	r, w, err := os.Pipe()
	require.NoError(t, err)
	t.Cleanup(func() { r.Close() })
	spec.Stdout = w
	p, err := s.Start(spec)
	w.Close()
	require.NoError(t, err)
	out := bufio.NewReader(r)
	r.SetReadDeadline(time.Now().Add(patience))
	_, err = out.ReadString('\n')
	require.NoError(t, err, "the script did not get ready")
	return p, out
}

func waitDone(t testing.TB, p *Process) Exit {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(patience):
		require.FailNow(t, "process did not end", "%s", describe(p.PID()))
	}
	return p.Exit()
}

// runScript runs a script to its end and returns its exit and stdout.
func runSpec(t testing.TB, s *Supervisor, spec Spec) (Exit, string) {
	t.Helper()
	out := filepath.Join(t.TempDir(), "out")
	f, err := os.Create(out)
	require.NoError(t, err)
	defer f.Close()
	spec.Stdout = f
	p, err := s.Start(spec)
	require.NoError(t, err)
	e := waitDone(t, p)
	text, err := os.ReadFile(out)
	require.NoError(t, err)
	return e, strings.TrimSpace(string(text))
}

// token returns an argument for sleep by which alive finds the process again,
// whatever its environment, session and parent.
func token(n int) string { return fmt.Sprintf("86400.%d%03d", os.Getpid(), n) }

// alive returns the living processes with a token among their arguments.
func alive(token string) (pids []int) {
	for _, pid := range numbersIn("/proc") {
		args, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		st, err := readStat(pid)
		if err == nil && !st.zombie() && st.comm == "sleep" && strings.Contains(string(args), "\x00"+token+"\x00") {
			pids = append(pids, pid)
		}
	}
	return pids
}

func requireAlive(t testing.TB, token string) {
	t.Helper()
	require.Eventually(t, func() bool { return len(alive(token)) == 1 }, patience, time.Millisecond, "sleep %s does not run", token)
}

func requireGone(t testing.TB, token string) {
	t.Helper()
	require.Eventually(t, func() bool { return len(alive(token)) == 0 }, patience, 5*time.Millisecond, "sleep %s is still there", token)
}

func inState(pid int, state byte) bool {
	st, err := readStat(pid)
	return err == nil && st.state == state
}

// guardOf returns the guard process among the children of parent; 0 if none.
func guardOf(parent int) int {
	for _, pid := range numbersIn("/proc") {
		args, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		st, err := readStat(pid)
		if err == nil && st.ppid == parent && !st.zombie() && strings.HasPrefix(string(args), GuardName+"\x00") {
			return pid
		}
	}
	return 0
}

func haveCgroup(t testing.TB) {
	t.Helper()
	c, err := newCgroup("/proc", "probe-"+strconv.Itoa(os.Getpid()))
	if err != nil {
		t.Skipf("SKIPPED: needs a writable cgroup v2 directory: %v", err)
	}
	require.NoError(t, c.destroy())
}

// launcherCommand runs the test binary as a launcher; see helperLauncher.
func launcherCommand(env ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), append(env, helperEnv+"=launcher")...)
	cmd.Stderr = os.Stderr
	return cmd
}

// helperLauncher supervises one worker that runs $SCRIPT. It prints its cgroup
// when the worker has printed a line, then waits to be killed; with KILL=now it kills
// itself as soon as the worker is started, with KILL=guard it kills its guard
// and prints the line when the next one runs.
func helperLauncher() int {
	s, err := New(Config{NoCgroup: os.Getenv("NOCGROUP") != "", Logger: quiet()})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	r, w, _ := os.Pipe()
	spec := sh(os.Getenv("SCRIPT"))
	spec.Stdout = w
	if _, err := s.Start(spec); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	kill := os.Getenv("KILL")
	if kill == "now" {
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	w.Close()
	bufio.NewReader(r).ReadString('\n')
	if kill == "guard" {
		old := guardOf(os.Getpid())
		syscall.Kill(old, syscall.SIGKILL)
		for g := 0; g == 0 || g == old; g = guardOf(os.Getpid()) {
			unix.Poll(nil, 1)
		}
	}
	if s.cgroup != nil {
		fmt.Println(s.cgroup.path)
	} else {
		fmt.Println()
	}
	select {}
}
