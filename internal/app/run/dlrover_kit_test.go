package run

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// dlrover is a version of DLRover's package, how it is spoken to, and with which PyTorch it trains: the distribution's,
// or the newest 2.x.
type dlrover struct {
	version string
	http    bool
	torch2  bool
}

// dlrovers are all that are tested: HTTP came with 0.5.
var dlrovers = []dlrover{{version: "0.6.1"}, {version: "0.6.1", http: true}, {version: "0.5.1"},
	{version: "0.5.1", http: true}, {version: "0.4.0"}}

func (d dlrover) String() string {
	name := d.version + "-grpc"
	if d.http {
		name = d.version + "-http"
	}
	if d.torch2 {
		name += "-torch2"
	}
	return name
}

// restarts reports whether its agents can restart workers: those before 0.6 cannot with torch 2.8 or later.
func (d dlrover) restarts() bool { return !d.torch2 || d.version == "0.6.1" }

// dlroverPackages is the directory of the virtual environments; the test is skipped without one.
func dlroverPackages(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("DLROVER_PACKAGES")
	if dir == "" {
		t.Skipf("SKIPPED: %s IS RUN BY make e2e-dlrover only: it needs DLRover's Python package", t.Name())
	}
	return dir
}

// besideDLRovers lets all tests with DLRover's package run at once, as many as make e2e-dlrover says.
func besideDLRovers(t *testing.T) {
	t.Helper()
	dlroverPackages(t)
	t.Parallel()
}

// interpreter is the Python with DLRover's package.
func (d dlrover) interpreter(t *testing.T) string {
	t.Helper()
	venv := "dlrover-" + d.version
	if d.torch2 {
		venv = "agents-" + d.version
	}
	python := filepath.Join(dlroverPackages(t), venv, "bin", "python")
	if _, err := os.Stat(python); err != nil {
		t.Skipf("SKIPPED: DLROVER %s IS NOT TESTED: %v; make e2e-dlrover makes it", d, err)
	}
	return python
}

// dlJob is a job whose master and agents may each be DLRover's or ours.
type dlJob struct {
	*fwJob
	dlrover
	py    string   // DLRover's interpreter
	port  string   // of the master
	uid   string   // of the job, as the master knows it
	nodes string   // the most that there may be
	args  []string // of every agent
	// pods are the master's machine and one for each node ID; nil: all are processes of this one.
	pods *network
}

// confTimes makes worlds that may have more nodes quickly. This is how all of DLRover's versions spell it.
const confTimes = "--rdzv_conf=lastcall_timeout=3"

// newJob is a job of two workers on every node, with one restart of three. They train without PyTorch.
func (d dlrover) newJob(t *testing.T, nodes string, args ...string) *dlJob {
	t.Helper()
	if strings.Contains(t.Name(), "/") {
		t.Parallel() // as its parent is already
	}
	j := &dlJob{dlrover: d, py: d.interpreter(t), port: freePort(t), nodes: nodes[strings.LastIndex(nodes, ":")+1:]}
	j.fwJob = &fwJob{bench: newBench(t)}
	j.log = filepath.Join(j.dir, "log")
	script, err := filepath.Abs("testdata/dlrover_train.py")
	require.NoError(t, err)
	j.then = []string{script, j.log}
	j.args = append([]string{"--nnodes=" + nodes, "--nproc_per_node=2", "--max_restarts=3", confTimes}, args...)
	j.bench.env = append(j.bench.env, "PYTHON_EXEC="+j.py, "PYTHONDONTWRITEBYTECODE=1", "GLOO_SOCKET_IFNAME=lo",
		"DLROVER_EVENT_FILE_DIR="+j.dir, "DLROVER_MASTER_ADDR=127.0.0.1:"+j.port, "ELASTIC_JOB_NAME=job")
	return j
}

// torch has the workers train with PyTorch.
func (j *dlJob) torch() { j.then = append(j.then, "--torch") }

// replacements are the most nodes of a job that come after those of its first world.
const replacements = 2

// theirMaster is DLRover's, with testdata/dlrover_master.py around it, on a machine of its own. It answers when this
// returns. Its pods have what its operator tells them, and nothing else: no job token.
func (j *dlJob) theirMaster(nodes int) *launched {
	j.t.Helper()
	if j.pods == nil {
		j.pods = newNetwork(j.t, 1+nodes+replacements)
		j.bench.env = slices.DeleteFunc(j.bench.env, func(v string) bool {
			name, _, _ := strings.Cut(v, "=")
			return slices.Contains([]string{"ELASTIC_JOB_NAME", "DLROVER_TOKEN", "DLROVER_TOKEN_FILE", "PET_INSECURE"}, name)
		})
		j.bench.env = append(j.bench.env, "DLROVER_MASTER_ADDR="+net.JoinHostPort(j.pods.addrs[0], j.port),
			"GLOO_SOCKET_IFNAME=eth0")
	}
	return j.theirMasterOn("local", "--node_num", strconv.Itoa(nodes))
}

// startOn starts a program on a machine of the job, 0 is the master's.
func (j *dlJob) startOn(machine int, env []string, command ...string) *launched {
	j.t.Helper()
	if j.pods != nil {
		command = j.pods.within(machine, command...)
	}
	return j.startPath(command[0], env, command[1:]...)
}

// address is that of a machine of the job.
func (j *dlJob) address(machine int) string {
	if j.pods == nil {
		return "127.0.0.1"
	}
	return j.pods.addrs[machine]
}

func (j *dlJob) theirMasterOn(platform string, args ...string) *launched {
	j.t.Helper()
	script, err := filepath.Abs("testdata/dlrover_master.py")
	require.NoError(j.t, err)
	args = slices.Concat([]string{dlrover{version: j.version}.interpreter(j.t), script, j.dir, j.uid,
		"--platform", platform, "--port", j.port, "--job_name", "job"}, args)
	if j.http {
		args = append(args, "--service_type", "http")
	}
	m := j.startOn(0, nil, args...)
	j.answers(m)
	return m
}

// kitUID is what agents name that can: those of 0.6.
const kitUID = "uid-of-the-job"

// ourMaster is our daemon, which Python agents may join.
func (j *dlJob) ourMaster(args ...string) *launched {
	j.t.Helper()
	agents := []string{"--python-agents=open"}
	if j.version == "0.6.1" {
		agents = []string{"--python-agents", "--job-uid=" + kitUID}
		j.bench.env = append(j.bench.env, "JOB_UID="+kitUID)
	}
	m := j.start("dlrover-master", nil, slices.Concat([]string{"--listen=127.0.0.1:" + j.port, "--python-run=job"}, agents,
		args)...)
	j.answers(m)
	return m
}

func (j *dlJob) answers(m *launched) {
	j.t.Helper()
	eventually(j.t, "a master at its port", func() bool {
		require.False(j.t, m.ended(), "the master has ended")
		return listens(m.cmd.Process.Pid, j.port)
	})
}

// listens reports whether somebody listens at a port where a process is.
func listens(pid int, port string) bool {
	const local, state, listen = 1, 3, "0A"
	n, _ := strconv.Atoi(port)
	for _, table := range []string{"tcp", "tcp6"} {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		for line := range strings.Lines(string(text)) {
			if w := strings.Fields(line); len(w) > state && w[state] == listen &&
				strings.HasSuffix(w[local], fmt.Sprintf(":%04X", n)) {
				return true
			}
		}
	}
	return false
}

// place is what DLRover's operator tells a pod: id is new for every replacement of a rank.
func (j *dlJob) place(rank, id int) []string {
	env := []string{fmt.Sprintf("NODE_RANK=%d", rank), nodeID(id), "NODE_TYPE=worker", "NODE_NUM=" + j.nodes}
	if j.http {
		env = append(env, "DLROVER_MASTER_SERVICE_TYPE=http")
	}
	return env
}

func nodeID(id int) string { return fmt.Sprintf("NODE_ID=%d", id) }

// kill is the end of a pod: the agent, and whatever it has started.
func (j *dlJob) kill(l *launched, id int) {
	j.t.Helper()
	l.signal(syscall.SIGKILL)
	<-l.exited
	for _, pid := range j.tagged() {
		env, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if slices.Contains(strings.Split(string(env), "\x00"), nodeID(id)) {
			_ = syscall.Kill(pid, syscall.SIGKILL) // or it has ended
		}
	}
}

// ourAgent is our launcher as the node of a rank.
func (j *dlJob) ourAgent(rank, id int, args ...string) *launched {
	j.t.Helper()
	command := slices.Concat([]string{filepath.Join(binDir, "dlrover-run")}, j.args, args, j.then)
	return j.startOn(1+id, j.place(rank, id), command...)
}

// theirAgent is DLRover's. PyTorch 1 reads the default of its options --redirects and --tee, 0, as None with Python
// 3.11, and then starts no workers: not all members of a flag are in it any more.
func (j *dlJob) theirAgent(rank, id int, args ...string) *launched {
	return j.theirAgentWith(nil, rank, id, args...)
}

func (j *dlJob) theirAgentWith(env []string, rank, id int, args ...string) *launched {
	j.t.Helper()
	site, err := filepath.Abs("testdata/dlrover_site")
	require.NoError(j.t, err)
	env = slices.Concat(j.place(rank, id), env, []string{"POD_IP=" + j.address(1+id), "PYTHONPATH=" + site,
		"DLROVER_FOLDER=" + filepath.Join(j.dir, nodeID(id))})
	first := []string{"-m", "dlrover.trainer.torch.elastic_run", "--monitor_interval=0.3"}
	if !j.torch2 {
		first = append(first, "--redirects=1", "--tee=1")
	}
	return j.startOn(1+id, env, slices.Concat([]string{j.py}, first, j.args, args, j.then)...)
}

// dlHeard is a message that a master has heard.
type dlHeard struct {
	Call string         `json:"call"`
	ID   int            `json:"id"`
	Name string         `json:"name"`
	Of   map[string]any `json:"of"`
}

// heard are all messages of a name that DLRover's master has heard so far from a node.
func (j *dlJob) heard(name string, id int) (all []dlHeard) {
	j.t.Helper()
	text, _ := os.ReadFile(filepath.Join(j.dir, "heard"))
	for line := range strings.Lines(string(text)) {
		var h dlHeard
		if !strings.HasSuffix(line, "\n") {
			continue // being written
		}
		require.NoError(j.t, json.Unmarshal([]byte(line), &h), line)
		if h.Name == name && h.ID == id {
			all = append(all, h)
		}
	}
	return all
}

// ends are how a node has told the master that it has ended.
func (j *dlJob) ends(id int) (all []string) {
	j.t.Helper()
	for _, h := range j.heard("NodeEvent", id) {
		if kind := fmt.Sprint(h.Of["event_type"]); strings.HasSuffix(kind, "_EXITED") {
			all = append(all, kind)
		}
	}
	return all
}

// dlFailure is a failure of workers as the master's json.loads reads it, by global rank.
type dlFailure map[string]struct {
	LocalRank int    `json:"local_rank"`
	ExitCode  int    `json:"exitcode"`
	Message   string `json:"message"`
	Datetime  string `json:"datetime"`
}

// failures of a level that the master has heard of from a node.
func (j *dlJob) failures(level string, id int) (all []dlHeard) {
	return slices.DeleteFunc(j.heard("NodeFailure", id), func(h dlHeard) bool { return h.Of["level"] != level })
}

// dlStart is what a worker has told at its start.
type dlStart struct{ rank, world, node, restarts, pid int }

func (j *dlJob) starts() (all []dlStart) {
	j.t.Helper()
	text, _ := os.ReadFile(j.log + ".starts")
	for line := range strings.Lines(string(text)) {
		var s dlStart
		if _, err := fmt.Sscan(line, &s.rank, &s.world, &s.node, &s.restarts, &s.pid); err == nil &&
			strings.HasSuffix(line, "\n") {
			all = append(all, s)
		}
	}
	return all
}

// started is what the worker with a pid has told.
func (j *dlJob) started(pid int) dlStart {
	j.t.Helper()
	all := j.starts()
	i := slices.IndexFunc(all, func(s dlStart) bool { return s.pid == pid })
	require.GreaterOrEqual(j.t, i, 0, "nothing of worker %d in %v", pid, all)
	return all[i]
}

// goOn waits until the worker of rank 0 has made ten more steps.
func (j *dlJob) goOn(pids []int, l ...*launched) {
	j.t.Helper()
	from := j.lastStep()
	eventually(j.t, "more steps of the same workers", func() bool {
		for _, l := range l {
			require.False(j.t, l.ended(), "the launcher has ended")
		}
		return slices.ContainsFunc(j.steps(), func(s fwStep) bool { return s.pid == pids[0] && s.step >= from+10 })
	})
}

// act has the master ask a node for an action, once: a type of NodeAction, or the class of another one.
func (j *dlJob) act(id int, kind string) {
	j.t.Helper()
	path := filepath.Join(j.dir, fmt.Sprintf("action.%d", id))
	require.NoError(j.t, os.WriteFile(path+".new", []byte(kind), 0o600))
	require.NoError(j.t, os.Rename(path+".new", path))
}

// clean wants a master without errors of its own. Once for every launcher, 0.4 cannot read a message of 0.5, and logs
// that in a way that fails, with two tracebacks.
func (j *dlJob) clean(m *launched) {
	j.t.Helper()
	log := m.out.String() + m.err.String()
	known := 0
	if j.version == "0.4.0" {
		known = strings.Count(log, "--- Logging error ---")
	}
	require.Equal(j.t, 2*known, strings.Count(log, "Traceback"), "the master's log has a traceback")
}
