package pystack

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/hang"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// python is an interpreter of this machine. home is its installation; version tells of free threads, too.
type python struct{ path, home, version string }

const freeThreaded = " free-threaded"

// pythons are those of 3.8 to 3.14 that are here, one or more of each version.
var pythons = sync.OnceValue(findPythons)

func findPythons() (all []python) {
	paths := []string{"/usr/bin/python3"}
	installed, _ := filepath.Glob(os.Getenv("PYENV_ROOT") + "/versions/*/bin/python3")
	paths = append(paths, installed...)
	for minor := 8; minor <= newestMinor; minor++ {
		for _, suffix := range []string{"", "t"} {
			path, err := exec.LookPath(fmt.Sprintf("python3.%d%s", minor, suffix))
			if err == nil && !strings.Contains(path, "/shims/") { // pyenv's are slow scripts
				paths = append(paths, path)
			}
		}
	}
	seen := map[string]bool{}
	for _, path := range paths {
		const who = "import os, platform, sys\nprint(os.readlink('/proc/self/exe'), sys.base_prefix, " +
			"platform.python_version() + '" + freeThreaded + "' * ('free-threading' in sys.version), sep='\\n', end='')"
		out, err := exec.Command(path, "-c", who).Output()
		said := strings.Split(string(out), "\n")
		if err == nil && !seen[said[0]] && minorOf(said[2]) >= 8 {
			seen[said[0]] = true
			all = append(all, python{path: path, home: said[1], version: said[2]})
		}
	}
	return all
}

func minorOf(version string) (minor int) {
	_, _ = fmt.Sscanf(version, "3.%d", &minor)
	return minor
}

// eachPython tests with all interpreters, and says which versions are not here.
func eachPython(t *testing.T, test func(t *testing.T, p python)) {
	t.Helper()
	var minors []int
	for _, p := range pythons() {
		minors = append(minors, minorOf(p.version))
		t.Run(p.version, func(t *testing.T) { test(t, p) })
	}
	for minor := 8; minor <= newestMinor; minor++ {
		if !slices.Contains(minors, minor) {
			t.Run(fmt.Sprintf("3.%d", minor), func(t *testing.T) {
				t.Skipf("SKIPPED: STACKS OF CPYTHON 3.%d ARE NOT TESTED: it is not installed", minor)
			})
		}
	}
}

// somePythons tests with all of them, or with two if time is short: what does not depend on their layouts.
func somePythons(t *testing.T, test func(t *testing.T, p python)) {
	t.Helper()
	all := slices.Clone(pythons())
	if len(all) == 0 {
		t.Skip("SKIPPED: STACKS ARE NOT TESTED: there is no CPython from 3.8 on")
	}
	slices.SortFunc(all, func(a, b python) int { return minorOf(a.version) - minorOf(b.version) })
	if testing.Short() {
		all = []python{all[0], all[len(all)-1]}
	}
	for _, p := range all {
		t.Run(p.version, func(t *testing.T) { test(t, p) })
	}
}

// target is a process whose stacks are read.
type target struct {
	pid   int
	lines *bufio.Reader
	cmd   *exec.Cmd
}

// start runs a Python program until it has said a line, which is the result.
func start(t *testing.T, p python, args ...string) (*target, string) {
	t.Helper()
	cmd := exec.Command(p.path, args...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // its children end with it
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		_ = cmd.Wait()
	})
	x := &target{pid: cmd.Process.Pid, lines: bufio.NewReader(out), cmd: cmd}
	line, err := x.lines.ReadString('\n')
	require.NoError(t, err)
	return x, strings.TrimSpace(line)
}

// in waits until the main thread has one of these states.
func (x *target) in(t *testing.T, states string) {
	t.Helper()
	require.Eventually(t, func() bool {
		tasks, err := readTasks(x.pid)
		return err == nil && len(tasks) > 0 && strings.IndexByte(states, tasks[0].state) >= 0
	}, 10*time.Second, 10*time.Millisecond)
}

// text is a stack as people read it: func at file:line.
func text(frames []hang.Frame) (lines []string) {
	for _, f := range frames {
		lines = append(lines, fmt.Sprintf("%s at %s:%d", f.Func, filepath.Base(f.File), f.Line))
	}
	return lines
}
