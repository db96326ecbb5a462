package python

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/testkit"
	"dlrover-run/launcher/torchpython"
)

const (
	// moduleTimeout is what no module of tests needs, on a machine that does much else.
	moduleTimeout = 15 * time.Minute
	shownBytes    = 16 << 10
	oldest        = 8 // minor versions of Python 3 that the package is for
	newest        = 14
)

func TestEmbedsEveryModuleAndNothingElse(t *testing.T) {
	want, err := filepath.Glob("_dlrover_warm/*.py")
	require.NoError(t, err)
	var got []string
	require.NoError(t, fs.WalkDir(Files, ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			got = append(got, name)
		}
		return err
	}))
	slices.Sort(got)
	require.Equal(t, want, got)
	require.Contains(t, got, Parent)
}

// TestStart compares what is forked with what is started, in the forms that jobs use most.
func TestStart(t *testing.T) {
	interpreter := torchpython.Interpreter("3")
	if interpreter == "" {
		t.Skip("SKIPPED: WARM WORKERS ARE NOT TESTED: there is no python3")
	}
	runTests(t, interpreter, "test_start.Forms.test_a_script", "test_parent.Forks.test_refused",
		"test_parent.Forks.test_many", "test_pages")
}

// TestInterpreters runs the tests that need no PyTorch with every interpreter that is installed.
func TestInterpreters(t *testing.T) {
	testkit.Long(t, "a Python takes a minute")
	for minor := oldest; minor <= newest; minor++ {
		version := fmt.Sprintf("3.%d", minor)
		t.Run(version, func(t *testing.T) {
			interpreter := torchpython.Interpreter(version)
			if interpreter == "" {
				t.Skipf("SKIPPED: WARM WORKERS ARE NOT TESTED WITH PYTHON %s: there is no python%s", version, version)
			}
			runTests(t, interpreter, "test_start", "test_parent", "test_pages")
		})
	}
}

// TestTorch runs the tests with PyTorch.
func TestTorch(t *testing.T) {
	testkit.Long(t, "PyTorch is imported several times")
	runTests(t, torchpython.Require(t, "WARM WORKERS ARE"), "test_torch")
}

// runTests runs tests of unittest. When their time is over they end with where they were.
func runTests(t *testing.T, interpreter string, names ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), moduleTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, interpreter, append([]string{"-W", "ignore", "-m", "unittest", "-v"}, names...)...)
	cmd.Dir = "tests"
	cmd.Env = append(os.Environ(), "PYTHONPATH=.", "PYTHONDONTWRITEBYTECODE=1", "PYTHONFAULTHANDLER=1")
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGABRT) }
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = 10 * time.Second // children may hold the pipe
	if err := cmd.Run(); err != nil {
		shown := out.String()
		t.Fatalf("%s %v: %v\n%s", interpreter, names, err, shown[max(0, len(shown)-shownBytes):])
	}
	if at := strings.Index(out.String(), "SKIPPED: "); at >= 0 {
		t.Log(out.String()[at:])
	}
}
