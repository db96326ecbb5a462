package proc

import (
	"bufio"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"dlrover-run/launcher/proc/family"
	"dlrover-run/launcher/proc/guard"
)

// patience bounds waits for things that normally take milliseconds.
const patience = 20 * time.Second

// helperEnv selects what the test binary does instead of running tests.
const helperEnv = "PROC_TEST_HELPER"

func TestMain(m *testing.M) {
	switch os.Getenv(helperEnv) {
	case "launcher":
		os.Exit(helperGuard())
	case "oom":
		os.Exit(helperOOM())
	case "eat":
		helperEat()
	}
	for _, sig := range []os.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT} {
		if signal.Ignored(sig) { // under nohup, or behind a shell's &: what tests start has its default all the same
			signal.Notify(make(chan os.Signal, 1), sig)
		}
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
	require.False(t, s.isAbandoned()) // waits until s is prepared: tests look inside
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func sh(script string) Spec { return Spec{Path: "/bin/sh", Args: []string{"sh", "-c", script}} }

// startReady starts a script and returns once it has printed its first line.
func startReady(t testing.TB, s *Supervisor, script string) (*Process, *bufio.Reader) {
	t.Helper()
	return startSpecReady(t, s, sh(script))
}

func startSpecReady(t testing.TB, s *Supervisor, spec Spec) (*Process, *bufio.Reader) {
	t.Helper()
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
		require.FailNow(t, "process did not end", "%s", family.Describe(p.PID()))
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
	for _, pid := range family.Numbers("/proc") {
		args, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		st, err := family.ReadStat(pid)
		if err == nil && !st.Ended() && st.Comm == "sleep" && strings.Contains(string(args), "\x00"+token+"\x00") {
			pids = append(pids, pid)
		}
	}
	return pids
}

func requireAlive(t testing.TB, token string) {
	t.Helper()
	require.Eventually(t, func() bool { return len(alive(token)) == 1 }, patience, time.Millisecond,
		"sleep %s does not run", token)
}

func requireGone(t testing.TB, token string) {
	t.Helper()
	require.Eventually(t, func() bool { return len(alive(token)) == 0 }, patience, 5*time.Millisecond,
		"sleep %s is still there", token)
}

func inState(pid int, state byte) bool {
	st, err := family.ReadStat(pid)
	return err == nil && st.State == state
}

// makeCgroup is a launcher's directory.
func makeCgroup(id string) (*cgroup, error) {
	own, err := ownCgroups("", "")
	if err != nil {
		return nil, err
	}
	return newCgroup(own, id)
}

func haveCgroup(t testing.TB) {
	t.Helper()
	c, err := makeCgroup("probe-" + strconv.Itoa(os.Getpid()))
	if err != nil {
		t.Skipf("SKIPPED: needs a writable cgroup v2 directory: %v", err)
	}
	require.NoError(t, c.destroy())
}

// The main thread starts the launcher: see package guarded.
func init() {
	if os.Getenv(helperEnv) == "launcher" {
		runtime.LockOSThread()
	}
}

// helperGuard is a guarded launcher that runs $SCRIPT as its worker. When that has printed a
// line, the launcher prints its pid and its cgroup, and waits. Arguments are of no
// consequence.
func helperGuard() int {
	link, watch, err := guard.Divide(func(string) {})
	switch {
	case watch != nil:
		EndLeftovers(watch, os.Stderr)
		return watch.Follow()
	case link == nil:
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	s, err := New(Config{NoCgroup: os.Getenv("NOCGROUP") != "", Logger: quiet(),
		RegisterSurvivors: link.RegisterSurvivors})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	link.Follow(func(sig syscall.Signal) { unix.Kill(os.Getpid(), sig) }, func() {
		s.Abandon()
		unix.Kill(os.Getpid(), unix.SIGKILL)
	})
	return helperLauncher(s)
}

func helperLauncher(s *Supervisor) int {
	r, w, _ := os.Pipe()
	spec := sh(os.Getenv("SCRIPT"))
	spec.Stdout = w
	if _, err := s.Start(spec); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if survivor := os.Getenv("SURVIVOR"); survivor != "" {
		spec := sh(survivor)
		spec.Survives = true
		if _, err := s.Start(spec); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	if os.Getenv("KILL") == "now" {
		unix.Kill(os.Getpid(), unix.SIGKILL)
	}
	w.Close()
	bufio.NewReader(r).ReadString('\n')
	path := ""
	s.mu.Lock()
	if s.cgroup != nil {
		path = s.cgroup.path
	}
	s.mu.Unlock()
	fmt.Println(os.Getpid(), path)
	if os.Getenv("KILL") == "end" {
		if err := s.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 99
		}
		code, _ := strconv.Atoi(os.Getenv("CODE"))
		return code
	}
	select {}
}
