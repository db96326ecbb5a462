package python

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/shm"
	"dlrover-run/launcher/torchpython"
)

const (
	systemPython = torchpython.System
	// moduleTimeout is longer than any module of tests needs. At a load of 14 per CPU each of dozens of processes takes 40
	// seconds to import torch; the longest module has needed more than five minutes.
	moduleTimeout = 15 * time.Minute
	shownBytes    = 16 << 10
)

// TestPython runs the tests of the client with the system's Python.
func TestPython(t *testing.T) {
	if out, err := python(t, systemPython, "-c", "import torch"); err != nil {
		t.Skipf("SKIPPED: THE PYTHON CLIENT IS NOT TESTED: %s cannot import torch (apt-get install python3-torch): %v\n%s",
			systemPython, err, out)
	}
	runModules(t, systemPython)
}

// TestPlainDirectory checks that Go recognizes the directory of a worker without a launcher.
func TestPlainDirectory(t *testing.T) {
	base := t.TempDir()
	out, err := python(t, systemPython,
		"-c", "import sys; from dlrover_ckpt import segment; print(segment.runtime_dir({'DLROVER_CKPT_SHM': "+
			"sys.argv[1]})[0])", base)
	require.NoError(t, err, out)
	old := time.Now().Add(-2 * time.Hour)
	for _, dir := range []string{"seg", ""} {
		require.NoError(t, os.Chtimes(filepath.Join(strings.TrimSpace(out), dir), old, old))
	}
	dead, err := shm.Dead(base)
	require.NoError(t, err)
	require.Empty(t, dead, "its parent, this process, lives")
}

// TestPythonTorch2 runs them with PyTorch 2, in the Python that TORCH_PYTHON names.
func TestPythonTorch2(t *testing.T) {
	interpreter := torchpython.Chosen()
	if interpreter == "" {
		t.Skip("SKIPPED: FSDP, SAFETENSORS AND HUGGING FACE ARE NOT TESTED: TORCH_PYTHON names no Python " +
			"(make e2e-torch2 does)")
	}
	out, err := python(t, interpreter, "-c", "import torch; assert int(torch.__version__.split('.')[0]) >= 2")
	require.NoError(t, err, out)
	runModules(t, interpreter)
}

// runModules runs each module in a process of its own: they replace modules and change the environment.
func runModules(t *testing.T, interpreter string) {
	modules, err := filepath.Glob("tests/test_*.py")
	require.NoError(t, err)
	require.NotEmpty(t, modules)
	for _, module := range modules {
		name := strings.TrimSuffix(filepath.Base(module), ".py")
		t.Run(name, func(t *testing.T) {
			out, err := python(t, interpreter, "-m", "unittest", "-v", "tests."+name)
			if err != nil {
				t.Fatalf("%v\n%s", err, tail(out))
			}
		})
	}
}

// python runs an interpreter with the client on its path, and returns its output. After a timeout the output ends with
// the stack.
func python(t *testing.T, interpreter string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), moduleTimeout)
	defer cancel()
	here, err := filepath.Abs(".")
	require.NoError(t, err)
	cmd := exec.CommandContext(ctx, interpreter, args...)
	cmd.Env = append(os.Environ(), "PYTHONPATH="+here+":"+filepath.Join(here, "tests"),
		"PYTHONDONTWRITEBYTECODE=1", "PYTHONFAULTHANDLER=1", "OMP_NUM_THREADS=1")
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGABRT) }
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = 10 * time.Second // children may hold the pipe
	err = cmd.Run()
	return out.String(), err
}

// tail returns the end of unittest's output: the failures and the summary.
func tail(out string) string {
	if len(out) > shownBytes {
		return "[...]" + out[len(out)-shownBytes:]
	}
	return out
}
