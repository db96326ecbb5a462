package run

import (
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/torchpython"
)

// What `make e2e-gpu` does on a machine with a GPU is rehearsed here on CPUs, as far as that goes.
func TestGPUChecksAreRehearsedWithTorch(t *testing.T) {
	besideOthers(t)
	python := torchpython.Require(t, "THE CHECKS OF make e2e-gpu ARE")
	out, err := exec.CommandContext(t.Context(), python, "testdata/gpu/e2e.py", "--rehearse", "--jobs=2", "--bin="+binDir,
		"--out="+t.TempDir(), "checkpoints_are", "hang_beside_nccl", "other_names").CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "tensors compared")
	require.Contains(t, string(out), "it needs a GPU")
}
