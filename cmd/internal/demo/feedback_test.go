package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// The whole story on loopback, with the real programs.
func TestFeedback(t *testing.T) { testFeedback(t, played) }

func testFeedback(t *testing.T, start func(*feedbackStory) kubernetes) {
	t.Helper()
	bin := t.TempDir()
	build := exec.Command("go", "build", "-o", bin, "../../dlrover-run", "../../dlrover-master", "../../dlroverctl")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	t.Setenv("TMPDIR", t.TempDir())
	var shown bytes.Buffer
	require.NoError(t, playFeedback(t.Context(), &screen{w: &shown}, bin, hall{}, start), &shown)
	for _, line := range []string{
		`barred pod-2: node check: .*eth0 sends 38 Mbit/s`,
		`pod-2: its launcher ends with code 40`,
		`node-marked gpu-02: `,
		`node gpu-02 has the taint dlrover/faulty=check-failed:NoSchedule`,
		`the master's pod has the annotation dlrover/avoid-nodes: \["gpu-02"\]`,
		`training: gpu-01, gpu-03 and, in the place of gpu-02, gpu-04`,
		`gpu-02 +check-failed .* taint: applied`,
		`node-unmarked gpu-02: the mark has expired`,
		`dlrover-master is killed`,
		`it knows what the one before knew of gpu-02: node check: .*eth0 sends 38 Mbit/s`,
		`node-unmarked gpu-02: a check of the node has passed`,
		`ok      the node is in use again`,
	} {
		require.Regexp(t, line, shown.String())
	}
	left, err := filepath.Glob(filepath.Join(os.TempDir(), "*"))
	require.NoError(t, err)
	require.Empty(t, left)
}
