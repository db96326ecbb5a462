package run

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// pod is two containers that share their processes: a torchrun, and a sidecar that does not see its files.
const pod = `sidecar=$1; shift
unshare --mount sh -c 'mount -t tmpfs none /usr && exec "$@"' sh $sidecar & pid=$!
"$@"; code=$?
kill $pid; wait $pid || exit 99
exit $code`

// startPod runs a script of testdata with two workers under torchrun in a pod.
func (j *hangJob) startPod(n int, sidecar, torchrun []string, script ...string) {
	j.t.Helper()
	path, err := filepath.Abs("testdata/" + script[0])
	require.NoError(j.t, err)
	side := append([]string{filepath.Join(binDir, "checkpointd"), "--job=pod" + strconv.Itoa(n), "--shm-dir=" + j.dir,
		"--log-format=json"}, sidecar...)
	args := []string{"--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", pod, "sh", strings.Join(side, " "),
		j.python, "-m", "torch.distributed.run", "--redirects=1", "--tee=1", "--nproc_per_node=2"}
	args = append(append(append(args, torchrun...), path), script[1:]...)
	// Without it workers that a torchrun 2.x starts anew often find the addresses of those before in the store.
	fresh := []string{"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"}
	j.ls = append(j.ls, j.startPath("/usr/bin/unshare", fresh, args...))
}

// alone is a torchrun without others, at a port of its own: --standalone of PyTorch 1.13 takes always the same.
func (j *hangJob) alone(more ...string) []string {
	return append([]string{"--rdzv_backend=c10d", "--rdzv_endpoint=localhost:" + freePort(j.t), "--rdzv_id=j"}, more...)
}

func needsPods(t *testing.T) {
	t.Helper()
	if out, err := exec.Command("unshare", "--pid", "--mount", "--fork", "true").CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: SIDECARS THAT FIND HANGS ARE NOT TESTED: unshare: %v: %s", err, out)
	}
}

// A sidecar finds the hang of a plain torchrun, and has it start its workers anew.
func TestSidecarEndsAHangWithTorch(t *testing.T) {
	needsPods(t)
	besideOthers(t)
	j := newHangJob(t)
	j.env = append(j.env, actsSoon)
	// One rank of three is a minority: there is no doubt, with which nothing would be done for a minute.
	j.startPod(0, []string{"--hang=outside", "--hang-action=restart"}, j.alone("--max_restarts=1", "--nproc_per_node=3"),
		"hang.py", "stop", "1", "120")
	line, _ := j.verdict(2 * time.Minute)
	require.Regexp(t, `^hang: rank 1 \(node 0 .*stopped in misbehave at hang\.py:\d+; ranks 0,2 wait in all_reduce`, line)
	require.NotContains(t, line, "uncertain")
	j.ends()
	l := j.ls[0]
	require.Len(t, l.logged("a worker is killed because of the hang"), 1)
	require.Len(t, l.logged("looking for hangs"), 2, "the workers that torchrun has started anew are watched, too")
	require.Len(t, l.logged("hang: ", "ERROR"), 1)
	require.Empty(t, l.logged("no hang"))
	dir, err := filepath.EvalSymlinks(filepath.Join(j.files, "latest"))
	require.NoError(t, err)
	for _, file := range []string{"hang_report.txt", "py_stack.svg", "cpp_stack.svg"} {
		text, err := os.ReadFile(filepath.Join(dir, file))
		require.NoError(t, err)
		require.True(t, file == "cpp_stack.svg" || strings.Contains(string(text), "misbehave"), file)
	}
}

func TestSidecarOfAHealthyJobIsQuietWithTorch(t *testing.T) {
	needsPods(t)
	besideOthers(t)
	j := newHangJob(t)
	j.startPod(0, []string{"--hang=outside"}, j.alone(), "hang.py", "none", "1", "600")
	j.healthy()
	require.Len(t, j.ls[0].logged("looking for hangs"), 1)
	require.Empty(t, j.ls[0].logged("", "WARN", "ERROR"))
}

// Each sidecar knows its own pod: the one where all wait says that the cause may be elsewhere.
func TestSidecarsKnowTheirOwnPodWithTorch(t *testing.T) {
	needsPods(t)
	besideOthers(t)
	j := newHangJob(t)
	j.env = append(j.env, "XPU_TIMER_HANG_TIMEOUT=4")
	port := freePort(t)
	for n := range 2 {
		j.startPod(n, []string{"--hang=outside"}, []string{"--nnodes=2", fmt.Sprintf("--node_rank=%d", n),
			"--master_addr=127.0.0.1", "--master_port=" + port}, "hang.py", "data", "2")
	}
	j.verdict(2 * time.Minute)
	require.Regexp(t, `^hang: ranks 0-1 hung for \d+ s: all of them wait in all_reduce; a rank elsewhere, the network, .*`+
		`nothing is known of 2 ranks elsewhere`, j.ls[0].logged("hang: ")[0])
	require.Regexp(t, `^hang: rank 2 \(node 1 .*load_batch at hang\.py:\d+; rank 3 waits in .*uncertain: .*`+
		`nothing is known of 2 ranks elsewhere`, j.ls[1].logged("hang: ")[0])
	for _, l := range j.ls {
		require.NoError(t, l.cmd.Process.Signal(syscall.SIGKILL))
		<-l.exited
	}
}

// The same sidecar writes what the workers of a plain torchrun save in memory.
func TestSidecarWritesCheckpointsOfTorchrunWithTorch(t *testing.T) {
	needsPods(t)
	long(t)
	t.Parallel()
	j := newHangJob(t)
	client, err := filepath.Abs("../../../checkpointd/python")
	require.NoError(t, err)
	j.env = append(j.env, "PYTHONPATH="+client,
		fmt.Sprintf("DLROVER_CKPT_RUNTIME=%s/dlrover-%d/pod0", j.dir, os.Getuid()))
	j.startPod(0, []string{"--hang=outside"}, j.alone(), "ckpt.py", j.dir, filepath.Join(j.dir, "ckpts"), "20", "10")
	j.ends()
	require.Len(t, j.ls[0].logged("checkpoint committed"), 2)
	require.Equal(t, []string{"20"}, j.lines("ckpts/dlrover_latest.txt"))
	require.Empty(t, j.ls[0].logged("", "WARN", "ERROR"))
}
