package run

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/torchpython"
)

// training is a real PyTorch job that saves at every step.
type training struct {
	*bench
	ckpts, shm string
	steps      int
}

func newTraining(t *testing.T, steps int) *training {
	b := newBench(t)
	shm, err := os.MkdirTemp("/dev/shm", "dlrover-e2e-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(shm)) })
	b.env = append(b.env, "PYTHON_EXEC="+torchpython.Require(t, "CHECKPOINTS OF REAL TRAINING ARE"))
	return &training{bench: b, ckpts: filepath.Join(b.dir, "ckpts"), shm: shm, steps: steps}
}

// args is the command line of a job whose script saves to disk at every diskEvery-th step.
func (b *training) args(opts []string, diskEvery int, more ...string) []string {
	script, err := filepath.Abs("testdata/ckpt.py")
	require.NoError(b.t, err)
	args := append([]string{"--ckpt-shm-dir=" + b.shm}, opts...)
	return append(append(args, script, b.dir, b.ckpts, strconv.Itoa(b.steps), strconv.Itoa(diskEvery)), more...)
}

func (b *training) standalone(diskEvery int, more ...string) []string {
	return b.args([]string{"--standalone", "--nproc-per-node=2", "--max-restarts=100"}, diskEvery, more...)
}

// rows are the complete lines of a file that grows.
func (b *training) rows(file string) []string {
	data, _ := os.ReadFile(filepath.Join(b.dir, file))
	rows := strings.Split(string(data), "\n")
	return rows[:len(rows)-1]
}

// curve is the losses by step; a step that was trained twice must have given the same.
func (b *training) curve() map[string]string {
	out := map[string]string{}
	for _, line := range b.rows("losses") {
		step, loss, _ := strings.Cut(line, " ")
		if before, twice := out[step]; twice {
			require.Equal(b.t, before, loss, "step %s was trained twice and gave another loss", step)
		}
		out[step] = loss
	}
	return out
}

// undisturbed is the curve of the same training when nothing happens to it.
func undisturbed(t *testing.T, steps int, opts ...string) map[string]string {
	b := newTraining(t, steps)
	l := b.run(b.args(append([]string{"--standalone", "--nproc-per-node=2"}, opts...), steps)...)
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Len(t, b.curve(), steps)
	b.requireMemoryIsGone()
	return b.curve()
}

func (b *training) trained() int { return len(b.rows("losses")) }

// starts and sizes are the step and the size of the world at each start of a rank.
func (b *training) starts() []int { return b.column("starts", 2) }
func (b *training) sizes() []int  { return b.column("starts", 1) }

func (b *training) column(file string, i int) (values []int) {
	for _, line := range b.rows(file) {
		n, err := strconv.Atoi(strings.Fields(line)[i])
		require.NoError(b.t, err)
		values = append(values, n)
	}
	return values
}

// requireMemoryIsGone: a job that ended well leaves nothing in shared memory.
func (b *training) requireMemoryIsGone() {
	b.t.Helper()
	files, err := filepath.Glob(filepath.Join(b.shm, "*/[^.]*/*"))
	require.NoError(b.t, err)
	require.Empty(b.t, files)
}

func (b *training) latest() int {
	data, err := os.ReadFile(filepath.Join(b.ckpts, "dlrover_latest.txt"))
	if err != nil {
		return 0
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(data)))
	require.NoError(b.t, err)
	return n
}

// workers are the pids of the training processes.
func (b *training) workers() (pids []int) {
	for _, pid := range b.tagged() {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if strings.Contains(string(line), "\x00-u\x00") {
			pids = append(pids, pid)
		}
	}
	return pids
}

// worker is the pid of one of them.
func (b *training) worker() int {
	b.t.Helper()
	pids := b.workers()
	require.NotEmpty(b.t, pids, "the training is over")
	return pids[0]
}

// daemons are the checkpoint daemons of this bench; they do not carry its tag.
func (b *training) daemons() (pids []int) {
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range lines {
		line, _ := os.ReadFile(path)
		if strings.HasPrefix(string(line), "checkpointd\x00") && strings.Contains(string(line), b.shm) {
			pid, _ := strconv.Atoi(strings.Split(path, "/")[2])
			pids = append(pids, pid)
		}
	}
	return pids
}

// A worker is killed: the job goes on from memory, at most one step back, and the loss
// is that of an undisturbed run to the last bit.
func TestTorchCheckpointWorkerKilled(t *testing.T) {
	t.Parallel()
	const steps = 60
	want := undisturbed(t, steps)
	b := newTraining(t, steps)
	l := b.run(b.standalone(1000)...)
	for _, at := range []int{10, 25} {
		eventually(t, "training", func() bool { return b.trained() >= at })
		before := b.trained()
		require.NoError(t, syscall.Kill(b.worker(), syscall.SIGKILL))
		n := len(b.starts())
		eventually(t, "the next start", func() bool { return len(b.starts()) == n+2 })
		for _, step := range b.starts()[n:] {
			require.GreaterOrEqual(t, step, before-2, "more than one step of memory was lost")
		}
	}
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Equal(t, want, b.curve())
	require.GreaterOrEqual(t, b.latest(), 8, "the breakpoint save reached the disk")
	b.requireMemoryIsGone()
}

// Workers that do not end when they are told to are given --restart-grace only, for what they have saved is safe.
func TestTorchCheckpointRestartGrace(t *testing.T) {
	long(t)
	t.Parallel()
	b := newTraining(t, 40)
	l := b.run(b.standalone(1000, "deaf")...)
	eventually(t, "training", func() bool { return b.trained() >= 8 })
	n, killed := len(b.starts()), time.Now()
	require.NoError(t, syscall.Kill(b.worker(), syscall.SIGKILL))
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Len(t, b.starts(), n+2)
	require.Positive(t, b.starts()[n])
	require.Less(t, time.Since(killed), 25*time.Second)
	require.Contains(t, l.err.String(), "killing them for the restart")
	b.requireMemoryIsGone()
}

// The daemon is killed while it works: a new one finds everything in the headers.
func TestTorchCheckpointDaemonKilled(t *testing.T) {
	t.Parallel()
	const steps = 60
	b := newTraining(t, steps)
	l := b.run(b.standalone(5)...)
	var daemons []int
	for _, at := range []int{8, 20, 32} {
		killed := daemons // the last of them takes a while to die
		eventually(t, "training", func() bool { return b.trained() >= at })
		eventually(t, "a new daemon", func() bool {
			daemons = b.daemons()
			return len(daemons) == 1 && !slices.Equal(daemons, killed)
		})
		require.NoError(t, syscall.Kill(daemons[0], syscall.SIGKILL))
	}
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Equal(t, steps, b.latest())
	require.Len(t, b.starts(), 2, "nobody was restarted")
	b.requireMemoryIsGone()
	out, err := exec.Command(filepath.Join(binDir, "dlroverctl"), "checkpoints", "verify", b.ckpts).CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// The launcher is killed: what was in memory is on disk before the daemon ends, and the
// next run goes on from there.
func TestTorchCheckpointLauncherKilled(t *testing.T) {
	long(t)
	t.Parallel()
	const steps = 40
	want := undisturbed(t, steps)
	b := newTraining(t, steps)
	l := b.run(b.standalone(1000)...)
	eventually(t, "training", func() bool { return b.trained() >= 15 })
	l.signal(syscall.SIGKILL)
	l.wait()
	eventually(t, "the daemon's end", func() bool { return len(b.daemons()) == 0 })
	require.GreaterOrEqual(t, b.latest(), b.trained()-2)
	b.requireMemoryIsGone()
	n := len(b.starts())
	l = b.run(b.standalone(1000)...)
	require.Equal(t, 0, l.wait(), l.err.String())
	for _, step := range b.starts()[n:] {
		require.Positive(t, step)
	}
	require.Equal(t, want, b.curve())
}

// A pod is evicted: SIGTERM saves what is in memory.
func TestTorchCheckpointSIGTERM(t *testing.T) {
	t.Parallel()
	b := newTraining(t, 100000)
	l := b.run(b.args([]string{"--standalone", "--nproc-per-node=2", "--no-save-at-breakpoint"}, 1000000)...)
	eventually(t, "training", func() bool { return b.trained() >= 10 })
	l.signal(syscall.SIGTERM)
	require.Equal(t, 1, l.wait())
	require.GreaterOrEqual(t, b.latest(), b.trained()-2)
	b.requireMemoryIsGone()
}

// Each rank has a shard of its own on two nodes; a node is killed and replaced. Its
// shard comes back from the other node's memory.
func TestTorchCheckpointNodeReplaced(t *testing.T) {
	long(t)
	t.Parallel()
	b := newTraining(t, 100000)
	b.env = append(b.env, "DLROVER_TOKEN_FILE="+b.secret("job.token", testToken))
	args := b.args(b.c10d("2:2", "--max-restarts=10", "--ckpt-replicas=2", "--rdzv-conf=last_call_timeout=5"), 1000000,
		"sharded")
	l1 := b.run(args...)
	eventually(t, "serving", func() bool { return strings.Contains(l1.err.String(), "serving the rendezvous") })
	l2 := b.run(args...)
	eventually(t, "training", func() bool { return b.trained() >= 10 })
	eventually(t, "a copy of each shard", func() bool {
		copies, err := filepath.Glob(filepath.Join(b.shm, "*", "*", "peer", "r*.seg"))
		require.NoError(t, err)
		ranks := map[string]bool{}
		for _, path := range copies {
			ranks[strings.Split(filepath.Base(path), "-")[0]] = true
		}
		return len(ranks) == 4
	})
	copied := b.trained()
	eventually(t, "copies of later steps", func() bool { return b.trained() >= copied+10 })
	l2.signal(syscall.SIGKILL)
	l2.wait()
	before, n := b.trained(), len(b.starts())
	l3 := b.run(args...)
	eventually(t, "the next world", func() bool { return len(b.starts()) == 2*n })
	for _, step := range b.starts()[n:] {
		require.GreaterOrEqual(t, step, before-5)
	}
	l1.signal(syscall.SIGTERM)
	l3.signal(syscall.SIGTERM)
	l1.wait()
	l3.wait()
}

// Two nodes with the full state and default arguments: rank 0 alone writes, every step
// asked for gets to the disk, and a node that dies costs nothing.
func TestTorchCheckpointTwoNodes(t *testing.T) {
	t.Parallel()
	b := newTraining(t, 40)
	b.env = append(b.env, "DLROVER_TOKEN="+testToken)
	args := b.args(b.c10d("2:2", "--max-restarts=10"), 5)
	l1 := b.run(args...)
	eventually(t, "serving", func() bool { return strings.Contains(l1.err.String(), "serving the rendezvous") })
	l2 := b.run(args...)
	eventually(t, "a committed step", func() bool { return b.latest() >= 10 })
	l2.signal(syscall.SIGKILL)
	l2.wait()
	l3 := b.run(args...)
	require.Equal(t, 0, l1.wait(), l1.err.String())
	require.Equal(t, 0, l3.wait(), l3.err.String())
	require.Equal(t, 40, b.latest())
	for _, step := range b.starts()[4:] {
		require.GreaterOrEqual(t, step, 10, "the new node has the state from the disk or from the other node")
	}
	files, err := filepath.Glob(filepath.Join(b.ckpts, "*/rank_*.pt"))
	require.NoError(t, err)
	for _, f := range files {
		require.Equal(t, "rank_0.pt", filepath.Base(f))
	}
	out, err := exec.Command(filepath.Join(binDir, "dlroverctl"), "checkpoints", "verify", b.ckpts).CombinedOutput()
	require.NoError(t, err, "%s", out)
	b.requireMemoryIsGone()
}

// A job loses a node, goes on without it, and grows again: from memory alone, with the
// losses of a job to which nothing happens.
func TestTorchCheckpointElasticResize(t *testing.T) {
	long(t)
	t.Parallel()
	b := newTraining(t, 60)
	b.env = append(b.env, "DLROVER_TOKEN="+testToken)
	args := b.args(b.c10d("1:2", "--max-restarts=10", "--rdzv-conf=last_call_timeout=3"), 1000000, "equal")
	l1 := b.run(args...)
	eventually(t, "serving", func() bool { return strings.Contains(l1.err.String(), "serving the rendezvous") })
	l2 := b.run(args...)
	eventually(t, "two nodes", func() bool { return slices.Contains(b.sizes(), 4) && b.trained() >= 10 })
	l2.signal(syscall.SIGKILL)
	l2.wait()
	before, starts := b.trained(), len(b.starts())
	eventually(t, "one node", func() bool { return len(b.starts()) >= starts+2 && b.trained() > before+2 })
	require.Equal(t, 2, b.sizes()[starts])
	l3 := b.run(args...)
	require.Equal(t, 0, l1.wait(), l1.err.String())
	require.Equal(t, 0, l3.wait(), l3.err.String())
	require.Equal(t, 4, b.sizes()[len(b.sizes())-1])
	for _, step := range b.starts()[starts:] {
		require.GreaterOrEqual(t, step, before-2, "from memory")
	}
	quiet := newTraining(t, 60)
	l := quiet.run(quiet.args([]string{"--standalone", "--nproc-per-node=1"}, 1000000, "equal")...)
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Equal(t, quiet.curve(), b.curve())
}

func TestCheckpointMetrics(t *testing.T) {
	t.Parallel()
	b := newTraining(t, 100000)
	addr := "127.0.0.1:" + freePort(t)
	l := b.run(b.args([]string{"--standalone", "--nproc-per-node=2", "--metrics-addr=" + addr}, 5)...)
	eventually(t, "a committed step", func() bool { return b.latest() >= 10 })
	text := get(t, "http://"+addr+"/metrics")
	require.Regexp(t, `(?m)^dlrover_checkpoint_commits_total [1-9]`, text)
	require.Regexp(t, `(?m)^dlrover_checkpoint_step\{rank="0",where="disk"\} [1-9]`, text)
	l.signal(syscall.SIGTERM)
	l.wait()
}

func TestCheckpointOptions(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct{ name, opt, want string }{
		{"contradiction", "--save-at-breakpoint --no-save-at-breakpoint", "contradict"},
		{"replicas of one node", "--ckpt-replicas=2 --standalone", "one node"},
		{"negative replicas", "--ckpt-replicas=-1", "--ckpt-replicas=-1: need 0 to 16 nodes"},
		{"relative directory", "--ckpt-shm-dir=here", "absolute path"},
		{"rate", "--ckpt-write-rate=fast", "--ckpt-write-rate=fast"},
		{"missing directory", "--ckpt-shm-dir=/no/such/directory", "there is no such directory"},
		{"sidecar's name", "--ckpt-sidecar=a/b", "--ckpt-sidecar=a/b: need 1 to 128 letters"},
		{"sidecar and off", "--ckpt-daemon=off --ckpt-sidecar=x", "contradict"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := b.run(b.sh("true", strings.Fields(c.opt)...)...)
			require.Equal(t, 2, l.wait())
			require.Contains(t, l.err.String(), c.want)
		})
	}
	l := b.run(b.sh("true", "--dry-run", "--ckpt-write-rate=500M")...)
	require.Equal(t, 0, l.wait())
	var p struct{ Checkpoints map[string]any }
	require.NoError(t, json.Unmarshal([]byte(l.out.String()), &p))
	require.Equal(t, map[string]any{"shm_dir": b.dir, "save_at_breakpoint": true, "replicas": 0.0, "write_rate": "500M"},
		p.Checkpoints)
}

// A sidecar container keeps the daemon; the launcher only speaks to it.
func TestTorchCheckpointSidecar(t *testing.T) {
	t.Parallel()
	b := newTraining(t, 20)
	side := b.start("checkpointd", nil, "--job=side", "--shm-dir="+b.shm)
	socket := filepath.Join(b.shm, fmt.Sprintf("dlrover-%d", os.Getuid()), "side", "sock")
	eventually(t, "the sidecar's socket", func() bool { _, err := os.Stat(socket); return err == nil })
	args := b.args([]string{"--standalone", "--nproc-per-node=2", "--ckpt-sidecar=side"}, 5)
	l := b.run(args...)
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Equal(t, 20, b.latest())
	require.Contains(t, side.err.String(), "checkpoint committed")
	require.NotContains(t, l.err.String(), "checkpoint committed")

	require.NoError(t, os.RemoveAll(b.ckpts))
	b.steps = 100000
	args = b.args([]string{"--standalone", "--nproc-per-node=2", "--max-restarts=3", "--ckpt-sidecar=side"}, 1000000)
	n := b.trained()
	l = b.run(args...)
	eventually(t, "training", func() bool { return b.trained() >= n+10 })
	require.NoError(t, syscall.Kill(b.worker(), syscall.SIGKILL))
	eventually(t, "the breakpoint save", func() bool { return b.latest() >= 8 })
	before, n := b.latest(), b.trained()
	eventually(t, "training again", func() bool { return b.trained() >= n+10 })
	l.signal(syscall.SIGKILL)
	l.wait()
	eventually(t, "the save after the launcher's death", func() bool { return b.latest() >= before+8 })
	require.Contains(t, side.err.String(), `"msg":"checkpoint loaded"`)
	side.signal(syscall.SIGTERM)
	require.Equal(t, 0, side.wait())
}

// A sidecar that is not there costs a warning, not the job.
func TestTorchCheckpointNoSidecar(t *testing.T) {
	t.Parallel()
	b := newTraining(t, 10)
	l := b.run(b.args([]string{"--standalone", "--nproc-per-node=2", "--ckpt-sidecar=nobody"}, 5)...)
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Equal(t, 10, b.latest())
}

// What is in memory at a good end goes to disk as well.
func TestTorchCheckpointGoodEnd(t *testing.T) {
	t.Parallel()
	b := newTraining(t, 13)
	l := b.run(b.standalone(5)...)
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Equal(t, 13, b.latest())
	b.requireMemoryIsGone()
}

// Without a daemon the workers write to disk by themselves.
func TestTorchCheckpointWithoutDaemon(t *testing.T) {
	t.Parallel()
	b := newTraining(t, 10)
	l := b.run(b.args([]string{"--standalone", "--nproc-per-node=2", "--ckpt-daemon=off"}, 5)...)
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Equal(t, 10, b.latest())
	require.Contains(t, l.err.String(), "there is no checkpoint daemon")
}
