package run

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// An operator in tmux opens the job, drains a node after a question, and finds the cursor and the shell as they were.
func TestTopInTmux(t *testing.T) {
	if _, err := exec.LookPath("tmux"); err != nil {
		t.Skip("SKIPPED: dlroverctl top IS NOT TESTED ON A TERMINAL: no tmux (apt-get install tmux):", err)
	}
	b := newBench(t)
	_, addr := b.startDaemon("127.0.0.1:0")
	b.env = append(b.env, "DLROVER_MASTER_ADDR="+addr)
	args := b.sh(hold, "--nnodes=1:2", "--rdzv-id=job", "--rdzv-conf=last_call_timeout=2")
	first := b.start("dlrover-run", []string{"POD_NAME=gpu-01", "NODE_RANK=0"}, args...)
	second := b.start("dlrover-run", []string{"POD_NAME=gpu-02", "NODE_RANK=1"}, args...)
	eventually(t, "two workers", b.exists("up.2.1"))

	socket := filepath.Join(os.TempDir(), fmt.Sprintf("dlrover-tmux-%d", os.Getpid())) // $TMPDIR may be too long for one
	tmux := func(args ...string) string {
		cmd := exec.Command("tmux", append([]string{"-f", os.DevNull, "-S", socket}, args...)...)
		cmd.Env = b.env
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%v: %s", args, out)
		return string(out)
	}
	shows := func(text string) {
		t.Helper()
		eventually(t, text, func() bool { return strings.Contains(tmux("capture-pane", "-p"), text) })
	}
	tmux("new-session", "-d", "-x", "100", "-y", "30",
		filepath.Join(binDir, "dlroverctl")+" top; echo ended with $?; stty -a; read end")
	defer func() { tmux("kill-server"); _ = os.Remove(socket) }()
	shows("1 runs")
	tmux("send-keys", "Enter")
	shows("Yes: 2 workers run")
	tmux("send-keys", "Down", "d")
	shows("drain gpu-02 in job? Stops 2 workers.")
	tmux("send-keys", "y")
	shows("Yes: 1 workers run")
	shows("barred: drain by dlroverctl")
	second.wait()
	tmux("send-keys", "q")
	shows("ended with 0")
	shows(" icanon")
	require.NotContains(t, tmux("capture-pane", "-p"), "Is it moving?")
	b.release()
	require.Equal(t, 0, first.wait())
}
