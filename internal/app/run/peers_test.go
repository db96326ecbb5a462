package run

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous"
)

// Who is served without a token, and when nobody is.
func TestHostsThatAreServedWithoutAToken(t *testing.T) {
	const line = "--nnodes=1:3 --rdzv-backend=c10d --rdzv-endpoint=w-0:29400 "
	for name, c := range map[string]struct {
		own, line string
		env       map[string]string
		hosts     string
		bind      string // of the node that serves; "": it joins
		warned    bool
		err       string
	}{
		"the first pod": {"w-0", line, nil, "w-0, w-1, w-2", ":29400", true, ""},
		"a later one":   {"w-2", line, nil, "w-0, w-1, w-2", "", false, ""},
		"with a token":  {"w-0", line, variables("DLROVER_TOKEN=" + secret), "", ":29400", false, ""},
		"for everybody": {"w-0", line + "--insecure ", nil, "", ":29400", false, ""},
		"one node": {"w-0", "--nnodes=1 --rdzv-backend=c10d --rdzv-endpoint=w-0:29400 ", nil, "",
			"127.0.0.1:29400", false, ""},
		"a pod too many": {"w-3", line, nil, "", "", false, "needs a job token"},
		"on this host": {"w-0", "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:29400 ", nil, "",
			"127.0.0.1:29400", false, ""},
		"static, its rank": {"w-1", "--nnodes=2 --node-rank=1 --master-addr=w-0 ", nil, "w-0, w-1", "", false, ""},
		"a PyTorchJob": {"job-master-0", "", variables("MASTER_ADDR=localhost MASTER_PORT=7 RANK=0 WORLD_SIZE=2"),
			"job-master-0, job-worker-0", ":7", true, ""},
		"a master of DLRover's": {"w-1", "--nnodes=2 ", variables("DLROVER_MASTER_ADDR=w-0:1"), "", "", false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			env := variables(inPod)
			maps.Copy(env, c.env)
			h := testHost()
			h.name, h.owns = c.own, func(host string) bool { return host == c.own || host == "localhost" }
			s, err := resolvedOn(t, h, c.line+"train.py", env)
			if c.err != "" {
				require.ErrorContains(t, err, c.err)
				return
			}
			require.NoError(t, err)
			p, err := makePlan(&s, h)
			require.NoError(t, err)
			require.Equal(t, c.hosts, p.Rendezvous.Hosts)
			require.Equal(t, c.warned, strings.Contains(strings.Join(s.warnings, "\n"), "serves launchers on "+c.hosts+" alone"))
			require.Equal(t, c.bind != "", s.rdzv.serves(s.node.Rank, h))
			if c.bind != "" {
				require.Equal(t, c.bind, new(endpoint).bindAddr(&s))
			}
		})
	}
}

// inPod is what the kubelet tells every pod.
const inPod = "KUBERNETES_SERVICE_HOST=10.0.0.1"

// pods are machines that know each other by the names of a hosts file.
type pods struct {
	*bench
	*network
	names map[string]int // whose name is whose
}

// newPods makes a machine for each name, "" for one that nobody knows.
func newPods(t *testing.T, names ...string) *pods {
	p := &pods{bench: newBench(t), network: newNetwork(t, len(names)), names: map[string]int{}}
	for i, name := range names {
		dir := filepath.Join("/etc/netns", p.network.names[i]) // which ip netns exec mounts over /etc
		require.NoError(t, os.MkdirAll(dir, 0o755))
		t.Cleanup(func() { _ = os.RemoveAll(dir) })
		if name != "" {
			p.names[name] = i
		}
	}
	p.publish()
	return p
}

// publish writes what every machine knows; those that run read it again.
func (p *pods) publish() {
	p.t.Helper()
	text := "127.0.0.1 localhost\n"
	for name, i := range p.names {
		text += fmt.Sprintln(p.addrs[i], name)
	}
	for _, ns := range p.network.names {
		require.NoError(p.t, os.WriteFile(filepath.Join("/etc/netns", ns, "hosts"), []byte(text), 0o600))
	}
}

// on starts a program on a machine, with its name as the host's.
func (p *pods) on(i int, name, program string, env []string, args ...string) *launched {
	p.t.Helper()
	if !strings.Contains(program, "/") {
		program = filepath.Join(binDir, program)
	}
	script := append([]string{"unshare", "--uts", "sh", "-c", `hostname "$0" && exec "$@"`, name, program}, args...)
	command := p.within(i, script...)
	return p.startPath(command[0], append([]string{"GLOO_SOCKET_IFNAME=eth0", inPod}, env...), command[1:]...)
}

// pod starts a program on the machine that has a name.
func (p *pods) pod(name, program string, env []string, args ...string) *launched {
	p.t.Helper()
	return p.on(p.names[name], name, program, env, args...)
}

// warnings of a launcher that say that it has no token.
func (l *launched) tokenWarnings() int { return strings.Count(l.err.String(), `"msg":"no job token: `) }

// Pods as operators start them, with nothing added: no token, no --insecure.
func TestPodsWithoutAToken(t *testing.T) {
	t.Parallel()
	torchrun := "--nnodes=2 --nproc_per_node=1 --rdzv_backend=c10d --rdzv_endpoint=job-worker-0:29400 --rdzv_id=job"
	elastic := "PET_NNODES=2:2 PET_NPROC_PER_NODE=1 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=job-worker-0:23456 " +
		"PET_RDZV_ID=job"
	static := "PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_MASTER_ADDR=job-master-0 PET_MASTER_PORT=23456 PET_NODE_RANK=%d"
	kubeflow := "MASTER_ADDR=job-master-0 MASTER_PORT=23456 WORLD_SIZE=2 RANK=%d"
	for name, c := range map[string]struct {
		first, second, program, env, args string
		store                             bool // is used by PyTorch with -short, too
	}{
		"T9k's torchrun":             {"job-worker-0", "job-worker-1", "torchrun", "", torchrun, true},
		"the same line, torch's own": {"job-worker-0", "job-worker-1", "python", "", torchrun, true},
		"an elastic PyTorchJob":      {"job-worker-0", "job-worker-1", "torchrun", elastic, "", false},
		"a PyTorchJob": {"job-master-0", "job-worker-0", "dlrover-run", kubeflow, "--nproc-per-node=1",
			false},
		"a PyTorchJob, PET_ of torchrun": {"job-master-0", "job-worker-0", "torchrun", static, "", true},
		"T9k without torchrun's settings": {"job-worker-0", "job-worker-1", "dlrover-run",
			strings.ReplaceAll(kubeflow, "job-master", "job-worker"), "--nproc-per-node=1", false},
	} {
		t.Run(name, func(t *testing.T) {
			switch {
			case c.program == "python" && testing.Short():
				t.Skip("SKIPPED: TORCH'S OWN LAUNCHER IS NOT RUN with -short (make e2e does)")
			case c.program == "python" && !hasTorch():
				t.Skip("SKIPPED: no PyTorch for /usr/bin/python3, so torch's own launcher is NOT run")
			}
			p := newPods(t, c.first, c.second)
			program, args := c.program, strings.Fields(c.args)
			script := p.sh("echo $MASTER_ADDR")
			switch {
			case testing.Short() && !c.store:
				t.Log("the workers' store is NOT tested across hosts with -short (make e2e does)")
			case hasTorch():
				path, err := filepath.Abs("testdata/allreduce.py")
				require.NoError(t, err)
				script = []string{path, p.dir}
				p.release()
			default:
				t.Log("no PyTorch for /usr/bin/python3: the workers' store is NOT tested across hosts")
			}
			switch program {
			case "torchrun":
				program = filepath.Join(p.dir, "torchrun")
				require.NoError(t, os.Symlink(filepath.Join(binDir, "dlrover-run"), program))
			case "python": // PyTorch 1 needs the two options with Python 3.11
				program, args = "/usr/bin/python3", append([]string{"-m", "torch.distributed.run", "--redirects=1", "--tee=1"},
					args...)
			}
			var nodes []*launched
			for rank, pod := range []string{c.first, c.second} {
				env := []string{"PYTHON_EXEC=/usr/bin/python3"}
				for v := range strings.FieldsSeq(c.env) {
					env = append(env, strings.ReplaceAll(v, "%d", fmt.Sprint(rank)))
				}
				nodes = append(nodes, p.pod(pod, program, env, slices.Concat(args, script)...))
			}
			require.Equal(t, 0, nodes[0].wait())
			require.Equal(t, 0, nodes[1].wait())
			if c.program != "python" {
				require.Equal(t, 1, nodes[0].tokenWarnings(), nodes[0].err.String())
				require.Contains(t, nodes[0].err.String(), "serves launchers on "+c.first+", "+c.second+" alone")
				require.Zero(t, nodes[1].tokenWarnings())
			}
		})
	}
}

// request is one to a rendezvous.
type request struct{ method, path, body string }

// ask makes requests from a machine, all at once, since a refusal takes a second in which names are looked up. It
// returns status and body of each.
func (p *pods) ask(machine int, addr string, requests ...request) []string {
	p.t.Helper()
	const script = `import concurrent.futures, http.client, sys
def ask(request):
    c = http.client.HTTPConnection(sys.argv[1], timeout=30)
    c.request(request[0], request[1], request[2] or None)
    r = c.getresponse()
    return "%d %s" % (r.status, r.read().decode().strip())
requests = list(zip(*[iter(sys.argv[2:])] * 3))
print(*concurrent.futures.ThreadPoolExecutor(len(requests)).map(ask, requests), sep="\n")`
	command := p.within(machine, "/usr/bin/python3", "-c", script, addr)
	for _, r := range requests {
		command = append(command, r.method, r.path, r.body)
	}
	l := p.startPath(command[0], nil, command[1:]...)
	require.Equal(p.t, 0, l.wait(), l.err.String())
	answers := strings.Split(strings.TrimSpace(l.out.String()), "\n")
	require.Len(p.t, answers, len(requests))
	return answers
}

// ctl runs dlroverctl on a machine.
func (p *pods) ctl(machine int, args ...string) (code int, text string) {
	p.t.Helper()
	command := p.within(machine, append([]string{filepath.Join(binDir, "dlroverctl")}, args...)...)
	l := p.startPath(command[0], nil, command[1:]...)
	return l.wait(), l.out.String() + l.err.String()
}

// Two jobs without a token, and a stranger, in one network.
func TestOnlyTheJobsHostsAreServed(t *testing.T) {
	t.Parallel()
	p := newPods(t, "a-worker-0", "a-worker-1", "b-worker-0", "b-worker-1", "")
	const stranger = 4
	job := func(name string, more ...string) []string {
		return append([]string{"--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
			"--rdzv-endpoint=" + name + "-worker-0:29400", "--rdzv-id=" + name, "--exit-code-policy=reason"}, more...)
	}
	var nodes []*launched
	for _, pod := range []string{"a-worker-0", "a-worker-1", "b-worker-0", "b-worker-1"} {
		args := p.sh(strings.ReplaceAll(hold, "up.", "up.$TORCHELASTIC_RUN_ID."), job(pod[:1])...)
		nodes = append(nodes, p.pod(pod, "dlrover-run", nil, args...))
	}
	for _, up := range []string{"up.a.2.0", "up.a.2.1", "up.b.2.0", "up.b.2.1"} {
		eventually(t, up, p.exists(up))
	}
	at := p.addrs[0] + ":29400"
	world := request{"GET", "/v1/runs/a/world", ""}
	launchers := []request{world, {"POST", "/v1/runs/a/leave", `{"id":"x"}`}}
	others := []request{
		{"GET", "/v1/runs", ""}, {"GET", "/v1/runs/a/events", ""}, {"GET", "/v1/runs/a/verdict", ""},
		{"GET", "/v1/runs/a/failures", ""}, {"POST", "/v1/runs/a/orders", `{"kind":"stop"}`},
		{"POST", "/v1/runs/a/notices", `{"topic":"t"}`}, {"GET", "/v1/runs/a/streams/logs", ""},
		{"GET", "/v1/runs/a/streams/exec", ""}, {"GET", "/v1/runs/a/hang", ""}, {"POST", "/v1/runs/a/hang/stacks", "{}"},
		{"GET", "/v1/runs/a/hang/evidence", ""}, {"GET", "/v1/runs/a/checkpoints", ""},
		{"POST", "/v1/runs/a/%6frders", `{"kind":"stop"}`}, {"POST", "/v1/runs/a/join/", "{}"}, {"GET", "/v1/nodes", ""},
	}
	for from, status := range map[int]string{stranger: "403", 2: "403", 1: "401"} {
		asked := others
		if from != 1 {
			asked = slices.Concat(others, launchers)
		}
		for i, answer := range p.ask(from, at, asked...) {
			require.Regexp(t, "^"+status+" ", answer, "%d: %v", from, asked[i])
			if asked[i] == world {
				require.Contains(t, answer, "this one has the address "+p.addrs[from]+", and none of these has it: a-worker-0, "+
					"a-worker-1")
			}
		}
	}
	require.Regexp(t, "^200 ", p.ask(1, at, world)[0])
	require.Contains(t, nodes[0].err.String(), "a host that is not of this job was turned away")

	foreign := p.pod("b-worker-1", "dlrover-run", nil, p.sh("exit 0", job("a")...)...)
	require.Equal(t, 2, foreign.wait(), "its name says that it is of another job")
	require.Contains(t, foreign.err.String(), "needs a job token")
	// A pod that thinks it is one: the server knows better.
	forged := p.on(stranger, "a-worker-1", "dlrover-run", nil,
		p.sh("exit 0", job("a", "--rdzv-conf=read_timeout=2")...)...)
	require.Equal(t, 23, forged.wait())
	last := forged.err.String()[strings.LastIndex(strings.TrimSpace(forged.err.String()), "\n")+1:]
	require.Regexp(t, `^dlrover-run: error: a-worker-0:29400 has turned this node away: .*this one has the address `+
		p.addrs[stranger]+`, and none of these has it: a-worker-0, a-worker-1; give the job a token: .*\n$`, last)

	code, text := p.ctl(1, "--master", at, "stop", "a")
	require.NotZero(t, code)
	require.Contains(t, text, "serves other hosts only what launchers need")
	for _, addr := range []string{"127.0.0.1:29400", at} { // on the host itself, as before
		code, text = p.ctl(0, "--master", addr, "status", "a")
		require.Zero(t, code, text)
		require.Contains(t, text, "a-worker-1")
	}
	code, text = p.ctl(0, "--master", "127.0.0.1:29400", "stop", "a", "--reason", "enough")
	require.Zero(t, code, text)
	require.NotZero(t, nodes[0].wait())
	require.NotZero(t, nodes[1].wait())
	require.Contains(t, nodes[1].err.String(), "enough")
	p.release()
	require.Equal(t, 0, nodes[2].wait())
	require.Equal(t, 0, nodes[3].wait())
}

// What all nodes have to tell the one that serves is told without a token, too: results of checks, output, stacks.
func TestAllHostsAreHeardWithoutAToken(t *testing.T) {
	long(t)
	t.Parallel()
	p := newPods(t, "job-0", "job-1")
	args := p.sh("echo hello $RANK; "+hold, "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=job",
		"--rdzv-endpoint=job-0:29400", "--network-check", "--check-level=host")
	l0, l1 := p.pod("job-0", "dlrover-run", nil, args...), p.pod("job-1", "dlrover-run", nil, args...)
	eventually(t, "together", func() bool { return p.exists("up.2.0")() && p.exists("up.2.1")() })
	for command, want := range map[string]string{"check": "job-1", "logs": "hello 1", "stacks": "2 ranks on 2 nodes"} {
		code, text := p.ctl(0, "--master", "127.0.0.1:29400", command, "job")
		require.Zero(t, code, text)
		require.Contains(t, text, want)
	}
	p.release()
	require.Equal(t, 0, l0.wait())
	require.Equal(t, 0, l1.wait())
}

// The checkpoint daemons of two nodes agree on what is whole, without a token.
func TestCheckpointsOfPodsWithoutAToken(t *testing.T) {
	long(t)
	t.Parallel()
	p, b := newPods(t, "job-0", "job-1"), newTraining(t, 20)
	p.bench, p.env = b.bench, append(b.env, "GLOO_SOCKET_IFNAME=eth0", inPod)
	args := b.args([]string{"--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=job",
		"--rdzv-endpoint=job-0:29400"}, 10, "sharded")
	l0, l1 := p.pod("job-0", "dlrover-run", nil, args...), p.pod("job-1", "dlrover-run", nil, args...)
	require.Equal(t, 0, l0.wait())
	require.Equal(t, 0, l1.wait())
	require.Equal(t, 20, b.latest())
	b.requireShards(strings.TrimPrefix(b.env[len(b.env)-1], "PYTHON_EXEC="), 2)
	b.requireMemoryIsGone()
}

// A pod is replaced under its name, with another address: the old one is a stranger's then.
func TestAPodIsReplacedUnderItsName(t *testing.T) {
	t.Parallel()
	p := newPods(t, "job-0", "job-1", "")
	args := p.sh(hold, "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=job-0:29400",
		"--rdzv-id=job", "--max-restarts=1")
	l0 := p.pod("job-0", "dlrover-run", nil, args...)
	l1 := p.pod("job-1", "dlrover-run", nil, args...)
	eventually(t, "together", func() bool { return p.exists("up.2.0")() && p.exists("up.2.1")() })
	require.Regexp(t, "^200 ", p.ask(1, p.addrs[0]+":29400", request{"GET", "/v1/runs/job/world", ""})[0])
	l1.signal(syscall.SIGKILL)
	<-l1.exited
	starts := len(p.lines("starts"))
	p.names["job-1"] = 2
	p.publish()
	l1 = p.pod("job-1", "dlrover-run", nil, args...)
	eventually(t, "together again", func() bool { return len(p.lines("starts")) >= starts+2 })
	require.Regexp(t, "^403 ", p.ask(1, p.addrs[0]+":29400", request{"GET", "/v1/runs/job/world", ""})[0])
	p.release()
	require.Equal(t, 0, l0.wait())
	require.Equal(t, 0, l1.wait())
}

// A process of another user on the serving pod is not a launcher of the job, whatever address it comes from.
func TestOthersOnTheServingPod(t *testing.T) {
	p := newPods(t, "job-0", "job-1")
	args := p.sh("exit 0", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=job-0:29400",
		"--rdzv-id=job")
	l0 := p.pod("job-0", "dlrover-run", nil, args...)
	eventually(t, "serving", func() bool { return strings.Contains(l0.err.String(), "serving the rendezvous") })
	const script = `import http.client, os, socket, sys, time
os.setgid(12345); os.setuid(12345)
for at in sys.argv[1], "127.0.0.1":
    c = http.client.HTTPConnection(at, 29400, timeout=30)
    c.request("GET", "/v1/runs/job/world")
    print(c.getresponse().status)
# gone before it is asked who it is
for i in range(20):
    s = socket.create_connection((sys.argv[1], 29400))
    body = sys.argv[2].encode()
    s.sendall(b"POST /v1/runs/gone/join HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    s.close()`
	join, err := json.Marshal(rendezvous.Join{Params: rendezvous.Params{Min: 2, Max: 2},
		Node: rendezvous.Node{ID: "x", Name: "x", Rank: -1, Slots: 1, Addr: p.addrs[0]}})
	require.NoError(t, err)
	p.ask(1, p.addrs[0]+":29400", request{"GET", "/v1/runs/job/world", ""}) // the names are known from then on
	command := p.within(0, "/usr/bin/python3", "-c", script, p.addrs[0], string(join))
	l := p.startPath(command[0], nil, command[1:]...)
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Equal(t, "401\n401\n", l.out.String())
	code, text := p.ctl(0, "--master", p.addrs[0]+":29400", "runs")
	require.Zero(t, code, text)
	require.NotContains(t, text, "gone")
	l1 := p.pod("job-1", "dlrover-run", nil, args...)
	require.Equal(t, 0, l0.wait())
	require.Equal(t, 0, l1.wait())
}
