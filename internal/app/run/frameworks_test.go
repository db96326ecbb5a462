package run

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// frameworks are started with the newest packages of PyPI, in the virtual environments below DLROVER_FRAMEWORKS, which
// `make e2e-frameworks` makes.
var frameworks = []frameworkCase{
	{name: "torch", venv: "torch"},
	{name: "deepspeed", venv: "torch", args: []string{"--zero=1"}},
	{name: "deepspeed", venv: "torch", args: []string{"--zero=2"}, brief: true},
	{name: "deepspeed", venv: "torch", args: []string{"--zero=3"}, brief: true},
	{name: "mindspore", venv: "mindspore"},
	{name: "jax", venv: "jax", restart: 3 * time.Second},
	{name: "tensorflow", venv: "tensorflow"},
	{name: "paddle", venv: "paddle"},
}

type frameworkCase struct {
	name, venv string
	args       []string      // of its script
	brief      bool          // start and restart only
	restart    time.Duration // from the end of a rank to new workers at most; 0 = not bounded
}

// patience is for imports and first compilations on a machine that does other things as well.
const patience = 5 * time.Minute

func TestFrameworks(t *testing.T) {
	for _, f := range frameworks {
		t.Run(f.name+strings.Join(f.args, ""), func(t *testing.T) {
			python := f.python(t)
			t.Run("restart", func(t *testing.T) { f.testRestart(t, python) })
			if !f.brief {
				t.Run("stop", func(t *testing.T) { f.testStop(t, python) })
				t.Run("nodes", func(t *testing.T) { f.testNodes(t, python) })
				t.Run("elastic", func(t *testing.T) { f.testElastic(t, python) })
			}
		})
	}
}

func (f frameworkCase) python(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("DLROVER_FRAMEWORKS")
	if dir == "" {
		t.Skipf("SKIPPED: %s IS RUN BY make e2e-frameworks only: it takes many minutes, and gigabytes of packages", t.Name())
	}
	python := filepath.Join(dir, f.venv, "bin", "python")
	if _, err := os.Stat(python); err != nil {
		t.Skipf("SKIPPED: %s IS NOT TESTED: %v; make e2e-frameworks makes it", f.name, err)
	}
	return python
}

// fwJob is a job of a framework; see testdata/frameworks/told.py.
type fwJob struct {
	*bench
	log  string
	args []string // of the launcher
	then []string // script and its arguments
}

func (f frameworkCase) train(t *testing.T, python string, args ...string) *fwJob {
	t.Helper()
	j := &fwJob{bench: newBench(t)}
	j.log = filepath.Join(j.dir, "log")
	script, err := filepath.Abs("testdata/frameworks/train_" + f.name + ".py")
	require.NoError(t, err)
	bin := filepath.Dir(python)
	j.env = append(j.env, "PYTHON_EXEC="+python, "PYTHONDONTWRITEBYTECODE=1", "DS_ACCELERATOR=cpu",
		"PATH="+bin+":"+os.Getenv("PATH"), "TORCH_EXTENSIONS_DIR="+j.extensions(filepath.Join(bin, "../extensions")))
	j.sweepsBuffers()
	j.args = append([]string{"--preset=" + f.name, "--max-restarts=3", "--hang=off",
		"--event-log=" + j.dir + "/events.json"}, args...)
	j.then = append([]string{script, j.log}, f.args...)
	return j
}

// sweepsBuffers removes from shared memory what DeepSpeed's workers leave there when they are killed.
func (j *fwJob) sweepsBuffers() {
	buffers := func() []string {
		found, err := filepath.Glob("/dev/shm/deepspeed_allreduce_buffer_*")
		require.NoError(j.t, err)
		return found
	}
	before := buffers()
	j.t.Cleanup(func() {
		for _, path := range buffers() {
			if !slices.Contains(before, path) {
				_ = os.Remove(path)
			}
		}
	})
}

// extensions is PyTorch's directory of what it has compiled, without the locks of processes that were killed: it would
// wait for them without end.
func (j *fwJob) extensions(dir string) string {
	locks, err := filepath.Glob(filepath.Join(dir, "*", "lock"))
	require.NoError(j.t, err)
	for _, lock := range locks {
		require.NoError(j.t, os.Remove(lock))
	}
	return dir
}

func (j *fwJob) launch() *launched { return j.run(slices.Concat(j.args, j.then)...) }

// fwStep is a line of the log.
type fwStep struct {
	rank, world, pid, step int
	w, total               float64
}

// steps are all whole lines of the log. What a rank has told is right if it trained with all others.
func (j *fwJob) steps() (all []fwStep) {
	j.t.Helper()
	text, _ := os.ReadFile(j.log)
	for line := range strings.Lines(string(text)) {
		var l fwStep
		if _, err := fmt.Sscan(line, &l.rank, &l.world, &l.pid, &l.step, &l.w, &l.total); err != nil ||
			!strings.HasSuffix(line, "\n") {
			continue // being written
		}
		n := float64(l.world)
		require.Equal(j.t, n*(n+1)/2, l.total, line)
		require.InDelta(j.t, (n+1)/2*(1-math.Pow(0.9, float64(l.step))), l.w, 1e-3, line)
		all = append(all, l)
	}
	return all
}

// trained waits until all ranks of a world of that size have made three steps as processes that old does not have, and
// returns their pids by rank.
func (j *fwJob) trained(world int, old []int, l ...*launched) (pids []int) {
	j.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) { // a log has no other notice
		pids = make([]int, world)
		for _, line := range j.steps() {
			if line.world == world && line.step >= 3 && !slices.Contains(old, line.pid) {
				pids[line.rank] = line.pid
			}
		}
		if !slices.Contains(pids, 0) {
			return pids
		}
		for _, l := range l {
			require.False(j.t, l.ended(), "the launcher has ended")
		}
		require.True(j.t, time.Now().Before(end), "no world of %d", world)
	}
}

func (l *launched) ended() bool {
	select {
	case <-l.exited:
		return true
	default:
		return false
	}
}

// finish lets the job end, and wants it to succeed.
func (j *fwJob) finish(all ...*launched) {
	j.t.Helper()
	require.NoError(j.t, os.WriteFile(j.log+".stop", nil, 0o600))
	for _, l := range all {
		require.Equal(j.t, 0, l.wait(), "exit code")
	}
}

// restarts are how long it took from the first end of a worker to the start of the next ones, by the event log.
func (j *fwJob) restarts() (all []time.Duration) {
	at := func(e map[string]any) time.Time {
		when, err := time.Parse(time.RFC3339Nano, e["time"].(string))
		require.NoError(j.t, err)
		return when
	}
	starts, exits := j.events("start"), j.events("worker-exit")
	for _, s := range starts {
		var first time.Time
		for _, e := range exits {
			if at(e).Before(at(s)) && e["stopped"] == false {
				first = at(e)
			}
		}
		if !first.IsZero() {
			all = append(all, at(s).Sub(first))
		}
	}
	return all
}

// TestFrameworksDeepSpeedOverSSH has one pod start the job on two others over ssh, as Arena does; a rank fails, and
// trains again.
func TestFrameworksDeepSpeedOverSSH(t *testing.T) {
	f := frameworkCase{name: "deepspeed", venv: "torch"}
	python := f.python(t)
	farm := newFarm(t)
	farm.serve(0, true)
	farm.serve(1, false)
	j := &fwJob{bench: farm.bench, log: filepath.Join(farm.dir, "log")}
	j.sweepsBuffers()
	script, err := filepath.Abs("testdata/frameworks/train_deepspeed.py")
	require.NoError(t, err)
	bin := filepath.Dir(python)
	farm.file(".deepspeed_env", "GLOO_SOCKET_IFNAME=eth\nTORCH_EXTENSIONS_DIR="+j.extensions(bin+"/../extensions")+"\n")
	env := []string{"PYTHON_EXEC=" + python, "PYTHONDONTWRITEBYTECODE=1", "PATH=" + bin + ":" + os.Getenv("PATH"),
		"PET_MAX_RESTARTS=1", "PET_HANG=off"}
	hosts := j.hosts(farmHosts[0]+" slots=1", farmHosts[1]+" slots=2")
	l := farm.deepSpeed(3, env, "--hostfile="+hosts, script, j.log)
	pids := j.trained(3, nil, l)
	require.NoError(t, syscall.Kill(pids[2], syscall.SIGKILL))
	j.trained(3, pids, l)
	j.finish(l)
	require.Contains(t, l.err.String(), farmHosts[1]+": ")
}

// testRestart: one node of two ranks, one of which is killed.
func (f frameworkCase) testRestart(t *testing.T, python string) {
	j := f.train(t, python, "--standalone", "--nproc-per-node=2")
	l := j.launch()
	pids := j.trained(2, nil, l)
	killed := time.Now()
	require.NoError(t, syscall.Kill(pids[1], syscall.SIGKILL))
	j.trained(2, pids, l)
	trained := time.Since(killed)
	j.finish(l)
	took := j.restarts()
	require.Len(t, took, 1)
	t.Logf("from the kill to new workers %v, to their third step %v", took[0], trained.Round(time.Millisecond))
	if f.restart > 0 {
		require.Less(t, took[0], f.restart)
	}
}

// testStop: the platform ends the pod.
func (f frameworkCase) testStop(t *testing.T, python string) {
	j := f.train(t, python, "--standalone", "--nproc-per-node=2")
	l := j.launch()
	j.trained(2, nil, l)
	began := time.Now()
	l.signal(syscall.SIGTERM)
	require.NotZero(t, l.wait())
	t.Logf("ended %v after SIGTERM with %d", time.Since(began).Round(time.Millisecond), l.code)
}

// testNodes: two nodes of two ranks, one of which exits with 9.
func (f frameworkCase) testNodes(t *testing.T, python string) {
	j := f.train(t, python)
	j.args = append(j.args, j.c10d("2")...)
	nodes := []*launched{j.launch(), j.launch()}
	pids := j.trained(4, nil, nodes...)
	require.NoError(t, os.WriteFile(j.log+".exit3", nil, 0o600))
	j.trained(4, pids, nodes...)
	j.finish(nodes...)
}

// testElastic: a job of one node grows, and loses the second node.
func (f frameworkCase) testElastic(t *testing.T, python string) {
	j := f.train(t, python)
	j.args = append(append(j.args, j.c10d("1:2")...), "--nproc-per-node=1")
	first := j.launch()
	pids := j.trained(1, nil, first)
	second := j.launch()
	pids = append(pids, j.trained(2, pids, first, second)...)
	second.signal(syscall.SIGKILL)
	j.trained(1, pids, first)
	j.finish(first)
}

// TestTorchft has two replica groups, each a job of one rank. One of them is killed: the other goes on, and the one
// that comes back trains where that is.
func TestTorchft(t *testing.T) {
	f := frameworkCase{name: "torchft", venv: "torch"}
	j := f.train(t, f.python(t), "--standalone", "--nproc-per-node=1")
	lighthouse := j.startPath(f.python(t), nil, "-c", "import time, torchft._torchft\n"+
		"server = torchft._torchft.LighthouseServer('127.0.0.1:0', 1)\n"+
		"open('lighthouse', 'w').write(server.address())\ntime.sleep(600)")
	defer lighthouse.signal(syscall.SIGKILL)
	address := j.lighthouse()
	group := func(id string) *launched {
		return j.start("dlrover-run", []string{"TORCHFT_LIGHTHOUSE=" + address, "REPLICA_GROUP_ID=" + id},
			slices.Concat(j.args, j.then)...)
	}
	groups := []*launched{group("0"), group("1")}
	pids := j.trained(2, nil, groups...)
	require.NoError(t, syscall.Kill(pids[1], syscall.SIGKILL))
	begun := j.lastStep()
	again := j.trained(2, pids[1:], groups...)
	require.Contains(t, again, pids[0], "the other group was started again")
	require.Greater(t, j.lastStep(), begun)
	j.finish(groups...)
}

// groupStep is a line of the log of train_torchft_groups.py.
type groupStep struct {
	group, rank, pid, step, groups int
	w, at                          float64 // at is in seconds
}

// groupSteps are all whole lines of the log. Every one has the weight of that step.
func (j *fwJob) groupSteps() (all []groupStep) {
	j.t.Helper()
	text, _ := os.ReadFile(j.log)
	for line := range strings.Lines(string(text)) {
		var l groupStep
		_, err := fmt.Sscan(line, &l.group, &l.rank, &l.pid, &l.step, &l.groups, &l.w, &l.at)
		if err != nil || !strings.HasSuffix(line, "\n") {
			continue // being written
		}
		require.InDelta(j.t, 1-math.Pow(0.9, float64(l.step)), l.w, 1e-3, line)
		all = append(all, l)
	}
	return all
}

// together waits until all three groups have made a step together after the one with that number, and returns their
// pids by group and rank, and the step.
func (j *fwJob) together(after int) (pids [3][2]int, step int) {
	j.t.Helper()
	require.Eventually(j.t, func() bool {
		pids = [3][2]int{}
		n := 0
		for _, l := range j.groupSteps() {
			if l.step > after && l.groups == 3 && pids[l.group][l.rank] != l.pid {
				pids[l.group][l.rank], step, n = l.pid, l.step, n+1
			}
		}
		return n >= 6 && !slices.ContainsFunc(pids[:], func(g [2]int) bool { return slices.Contains(g[:], 0) })
	}, patience, 100*time.Millisecond)
	return pids, step
}

// TestTorchftReplicaGroups has one job of three groups of two ranks, which finds its lighthouse by itself. The node of
// one group is killed, then that of the launcher which serves all, then a rank. The other groups go on: at once, or
// after five seconds if Gloo waits for a peer in the step that was under way. A group that comes back has its peers'
// weights.
func TestTorchftReplicaGroups(t *testing.T) {
	f := frameworkCase{name: "torchft_groups", venv: "torch"}
	j := f.train(t, f.python(t))
	j.args = append(j.c10d("1:3"), "--replica-groups=3", "--preset=torchft", "--max-restarts=3", "--hang=off")
	node := func(i int) *launched {
		return j.start("dlrover-run", []string{"REPLICA_GROUP_ID=" + strconv.Itoa(i)}, slices.Concat(j.args, j.then)...)
	}
	nodes := []*launched{node(0)}
	require.Eventually(t, func() bool { return len(j.groupSteps()) > 0 }, patience, 50*time.Millisecond)
	nodes = append(nodes, node(1), node(2))
	pids, step := j.together(0)
	for _, killed := range []int{2, 0, 1} {
		from := len(j.groupSteps())
		if killed == 1 {
			require.NoError(t, syscall.Kill(pids[killed][1], syscall.SIGKILL))
		} else {
			nodes[killed].signal(syscall.SIGKILL)
			<-nodes[killed].exited
			nodes[killed] = node(killed)
		}
		again := pids
		for end := time.Now().Add(patience); again == pids; again, step = j.together(step) {
			require.True(t, time.Now().Before(end), "the group has not come back")
		}
		for g := range pids {
			require.Equal(t, g != killed, again[g] == pids[g], "group %d after the loss of %d", g, killed)
		}
		waited := j.longestPause(pids, again, from)
		t.Logf("without group %d the others made no step for %.1f s", killed, waited)
		require.Less(t, waited, 10.0)
		pids = again
	}
	j.finish(nodes...)
}

// longestPause is the longest time between two steps of a rank that both had, in seconds.
func (j *fwJob) longestPause(before, after [3][2]int, from int) (longest float64) {
	last := map[int]float64{}
	for i, l := range j.groupSteps() {
		if before[l.group][l.rank] != after[l.group][l.rank] {
			continue
		}
		if at := last[l.pid]; at > 0 && i > from {
			longest = max(longest, l.at-at)
		}
		last[l.pid] = l.at
	}
	return longest
}

func (j *fwJob) lighthouse() string {
	var address []byte
	require.Eventually(j.t, func() bool {
		address, _ = os.ReadFile(filepath.Join(j.dir, "lighthouse"))
		return len(address) > 0
	}, patience, 50*time.Millisecond)
	return string(address)
}

func (j *fwJob) lastStep() (last int) {
	for _, line := range j.steps() {
		last = max(last, line.step)
	}
	return last
}
