package torchpython

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/testkit"
)

// TestRequire asks in a process of its own what becomes of a test.
func TestRequire(t *testing.T) {
	if os.Getenv("TORCH_PYTHON_CHILD") != "" {
		require.Equal(t, os.Getenv(variable), Require(t, "NOTHING IS"))
		return
	}
	dir := t.TempDir()
	good, bad := filepath.Join(dir, "good"), filepath.Join(dir, "bad")
	require.NoError(t, testkit.WriteProgram(good, "#!/bin/sh\nexit 0\n"))
	require.NoError(t, testkit.WriteProgram(bad, "#!/bin/sh\necho No module named torch\nexit 1\n"))
	for path, want := range map[string]string{
		good:              "--- PASS",
		bad:               "$TORCH_PYTHON=" + bad + ": " + bad + " cannot import torch: exit status 1 No module named torch",
		"/nowhere/python": "$TORCH_PYTHON=/nowhere/python: ",
	} {
		cmd := exec.Command(os.Args[0], "-test.run=^TestRequire$", "-test.v")
		cmd.Env = append(os.Environ(), "TORCH_PYTHON_CHILD=1", variable+"="+path)
		out, err := cmd.CombinedOutput()
		require.Equal(t, path == good, err == nil, "%s", out)
		require.Contains(t, string(out), want)
	}
}

func TestPath(t *testing.T) {
	t.Setenv(variable, "")
	require.Equal(t, System, Path())
	t.Setenv(variable, "/venv/bin/python")
	require.Equal(t, "/venv/bin/python", Path())
}
