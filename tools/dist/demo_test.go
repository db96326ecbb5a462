package main

import (
	"bytes"
	"cmp"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// built is a folder with the launcher of this repository.
func built(t *testing.T) string {
	t.Helper()
	bin := t.TempDir()
	build := exec.Command("go", "build", "-o", bin, "./cmd/dlrover-run")
	build.Dir = "../.."
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	return bin
}

const script = "python/dlrover_run/demo.py"

// command runs with programs in a folder, and leaves its files in another.
func command(bin, left, name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "TMPDIR="+left)
	return cmd
}

const debianPython = "/usr/bin/python3"

// withTorch is a Python that has PyTorch.
func withTorch(t *testing.T) string {
	t.Helper()
	python := cmp.Or(os.Getenv("TORCH_PYTHON"), debianPython)
	if err := exec.Command(python, "-c", "import torch").Run(); err != nil {
		t.Skipf("SKIPPED: THE DEMO IS NOT RUN: %s has no PyTorch", python)
	}
	return python
}

func TestDemo(t *testing.T) {
	t.Parallel()
	left := t.TempDir()
	out, err := command(built(t), left, withTorch(t), script).CombinedOutput()
	require.NoError(t, err, string(out))
	trained(t, string(out))
	nothingLeft(t, left)
}

// A user can give it to dlrover-run as any other script. Files of a run before are no part of it.
func TestDemoAsAScript(t *testing.T) {
	t.Parallel()
	bin, left := built(t), t.TempDir()
	old := filepath.Join(left, "dlrover-run-demo-again")
	require.NoError(t, os.Mkdir(old, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(old, "killed"), []byte("1 2"), 0o600))
	cmd := command(bin, left, filepath.Join(bin, "dlrover-run"), "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
		"--rdzv-id=again", "--nproc-per-node=2", "--max-restarts=1", "--log-dir="+left, script)
	cmd.Env = append(cmd.Env, "PYTHON_EXEC="+withTorch(t))
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	trained(t, string(out))
}

// nothingLeft asserts that the demo has removed its files.
func nothingLeft(t *testing.T, left string) {
	t.Helper()
	found, err := os.ReadDir(left)
	require.NoError(t, err)
	require.Empty(t, found)
}

func TestDemoIsInterrupted(t *testing.T) {
	t.Parallel()
	left := t.TempDir()
	cmd := command(built(t), left, withTorch(t), script, "--steps=100000")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	require.NoError(t, cmd.Start())
	require.Eventually(t, func() bool {
		found, _ := filepath.Glob(filepath.Join(left, "dlrover-run-demo-*", "*"))
		return len(found) > 0 // the workers have begun
	}, time.Minute, 10*time.Millisecond)
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	err := cmd.Wait()
	require.ErrorContains(t, err, "exit status")
	nothingLeft(t, left)
}

func TestDemoRefuses(t *testing.T) {
	if _, err := os.Stat(debianPython); err != nil {
		t.Skip("SKIPPED: THE DEMO IS NOT TRIED WITHOUT PYTORCH: ", err)
	}
	refused := func(want string, args ...string) {
		cmd := exec.Command(debianPython, append([]string{"-S", script}, args...)...)
		cmd.Env = append(os.Environ(), "PATH=")
		out, err := cmd.CombinedOutput()
		require.Error(t, err)
		require.Contains(t, string(out), want)
		require.False(t, strings.Contains(string(out), "Traceback"), string(out))
	}
	refused("--workers=1 --steps=160: the demo needs 2 workers or more", "--workers=1")
	refused("it trains with PyTorch, which ") // -S hides all packages
}
