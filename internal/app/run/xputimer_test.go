package run

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/guarded"
)

// asXPUTimer is the program by its other name, and an environment without what the test's own has.
func asXPUTimer(t *testing.T, vars []string, args ...string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, guarded.XPUTimerLaunch)
	require.NoError(t, os.Symlink(filepath.Join(binDir, "dlrover-run"), path))
	cmd := exec.CommandContext(t.Context(), path, args...)
	cmd.Env = append([]string{"PATH=" + dir + ":" + binDir + ":" + os.Getenv("PATH"), "HOME=" + dir}, vars...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	return cmd, &stderr
}

func TestXPUTimerLaunchRunsOneWorker(t *testing.T) {
	cmd, stderr := asXPUTimer(t, []string{"PET_NNODES=7", "PET_MODULE=1", "TERM=x"}, "sh", "-c",
		`echo $RANK/$WORLD_SIZE $LOCAL_RANK $PET_NNODES ${DLROVER_HANG_DIR:+watched} "$1"; exit 7`, "name", "--nnodes=3")
	out, _ := cmd.Output()
	require.Equal(t, "0/1 0 7 watched --nnodes=3\n", string(out), stderr)
	require.Equal(t, 7, cmd.ProcessState.ExitCode(), stderr)

	cmd, stderr = asXPUTimer(t, []string{"DLROVER_HANG=off"}, "sh", "-c", `echo "<$DLROVER_HANG_DIR>"`)
	out, err := cmd.Output()
	require.NoError(t, err, stderr)
	require.Equal(t, "<>\n", string(out))

	cmd, stderr = asXPUTimer(t, nil, "sh", "-c", "kill -9 $$")
	require.Error(t, cmd.Run())
	require.Equal(t, 137, cmd.ProcessState.ExitCode(), stderr)
}

func TestXPUTimerLaunchBecomesTheCommandInAWorker(t *testing.T) {
	dir := t.TempDir()
	cmd, stderr := asXPUTimer(t, []string{"RANK=3", "LOCAL_RANK=1", "DLROVER_HANG_DIR=" + dir, "PYTHONPATH=/user"}, "sh",
		"-c",
		`echo $$ $RANK $DLROVER_HANG_DIR $PYTHONPATH; exit 7`)
	out, _ := cmd.Output()
	require.Equal(t, 7, cmd.ProcessState.ExitCode(), stderr)
	require.Regexp(t, `^`+strconv.Itoa(cmd.Process.Pid)+` 3 `+dir+` /dev/shm/dlrover-\d+/\S*hang-shim\S*:/user\n$`,
		string(out))
	require.Empty(t, stderr.String())

	shim := strings.Split(strings.Fields(string(out))[3], ":")[0]
	require.FileExists(t, filepath.Join(shim, "sitecustomize.py"))
	cmd, _ = asXPUTimer(t, []string{"RANK=3", "DLROVER_HANG_DIR=" + dir, "PYTHONPATH=/user:" + shim}, "sh", "-c",
		`echo $PYTHONPATH`)
	out, err := cmd.Output()
	require.NoError(t, err)
	require.Equal(t, "/user:"+shim+"\n", string(out), "it is there once")

	cmd, stderr = asXPUTimer(t, []string{"RANK=0", "LOCAL_RANK=0"}, "sh", "-c", `env | grep -E '^(DLROVER|PYTHON)'`)
	out, _ = cmd.Output()
	require.Empty(t, string(out))
	require.Contains(t, stderr.String(), "this worker's launcher does not look into it")
}

func TestXPUTimerLaunchBeforeALauncher(t *testing.T) {
	cmd, stderr := asXPUTimer(t, nil, "dlrover-run", "--standalone", "--nproc-per-node=2", "--no-python", "sh", "-c",
		`echo $WORLD_SIZE ${DLROVER_HANG_DIR:+watched}`)
	out, err := cmd.Output()
	require.NoError(t, err, stderr)
	require.Equal(t, "2 watched\n2 watched\n", string(out), stderr)

	// The launcher shall know that xpu_timer is meant, and make its directory when there is something to write.
	cmd, stderr = asXPUTimer(t, []string{"DLROVER_HANG=off"}, "dlrover-run", "--standalone", "--no-python", "sh", "-c",
		`echo "${DLROVER_HANG_DIR:+watched} $XPU_TIMER_TIMELINE_PATH"`)
	out, err = cmd.Output()
	require.NoError(t, err, stderr)
	home := "/root"
	if os.Geteuid() != 0 {
		home = strings.TrimPrefix(cmd.Env[1], "HOME=")
	}
	require.Equal(t, " "+filepath.Join(home, "timeline")+"\n", string(out), stderr)

	cmd, stderr = asXPUTimer(t, nil, "sh", "-c", `exec dlrover-run --standalone --no-python xpu_timer_launch sh -c '
		echo $RANK ${DLROVER_HANG_DIR:+watched}'`)
	cmd.Path, cmd.Args = "/bin/sh", cmd.Args[1:]
	out, err = cmd.Output()
	require.NoError(t, err, stderr)
	require.Equal(t, "0 watched\n", string(out), stderr)
}

func TestXPUTimerLaunchOfNothing(t *testing.T) {
	cmd, stderr := asXPUTimer(t, nil)
	require.Error(t, cmd.Run())
	require.Equal(t, 2, cmd.ProcessState.ExitCode())
	require.Contains(t, stderr.String(), "usage: xpu_timer_launch COMMAND")
	cmd, stderr = asXPUTimer(t, nil, "--help")
	out, err := cmd.Output()
	require.NoError(t, err, stderr)
	require.Contains(t, string(out), "usage: xpu_timer_launch COMMAND")

}

// As the shell that xpu_timer's launcher is.
func TestXPUTimerLaunchOfWhatIsNotThere(t *testing.T) {
	for _, vars := range [][]string{nil, {"RANK=0", "LOCAL_RANK=1"}} {
		for command, code := range map[string]int{"/none/such": 127, "none-such": 127, "/etc/passwd": 126, "/": 126} {
			cmd, stderr := asXPUTimer(t, vars, command)
			require.Error(t, cmd.Run())
			require.Contains(t, stderr.String(), fmt.Sprintf("error: cannot execute %q: ", command))
			require.Equal(t, code, cmd.ProcessState.ExitCode(), "%v %s", vars, command)
		}
	}
}
