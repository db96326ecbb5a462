package run

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/run/lighthouse"
)

// groupWorker leaves "GROUP/GROUPS:NODE:RANK/WORLD:PID" in the file starts. It ends when the file "go" is there, or
// with status 7 when it finds one "fail.GROUP", which it removes.
const groupWorker = `echo $REPLICA_GROUP_ID/$NUM_REPLICA_GROUPS:$POD_NAME:$RANK/$WORLD_SIZE:$$ >> $DIR/starts
while [ ! -e $DIR/go ]; do
  mv $DIR/fail.$REPLICA_GROUP_ID $DIR/failed.$$ 2>/dev/null && { echo "ValueError: bad batch" >&2; exit 7; }
  sleep 0.02; done`

// grouped is a job with replica groups.
type grouped struct {
	*bench
	args []string
	env  []string
}

func (g *grouped) node(name string, more ...string) *launched {
	g.t.Helper()
	args := slices.Concat(g.args, []string{"--hang=off", "--rdzv-id=job", "--event-log=" + g.dir + "/events.json"}, more)
	return g.start("dlrover-run", append([]string{"POD_NAME=" + name}, g.env...), g.sh(groupWorker, args...)...)
}

// fail has a worker of the group fail.
func (g *grouped) fail(group int) {
	g.t.Helper()
	require.NoError(g.t, os.WriteFile(filepath.Join(g.dir, fmt.Sprint("fail.", group)), nil, 0o600))
}

// started waits for so many starts of workers, and returns all of them.
func (g *grouped) started(n int) []string {
	g.t.Helper()
	eventually(g.t, fmt.Sprint(n, " workers"), func() bool { return len(g.lines("starts")) >= n })
	all := g.lines("starts")
	require.Len(g.t, all, n)
	return all
}

// inGroup are the starts of the group with the index, without pids.
func inGroup(index int, starts []string) (all []string) {
	for _, s := range starts {
		if strings.HasPrefix(s, fmt.Sprint(index, "/")) {
			all = append(all, s[:strings.LastIndexByte(s, ':')])
		}
	}
	slices.Sort(all)
	return all
}

// running wants the processes of these starts to live.
func (g *grouped) running(starts []string) {
	g.t.Helper()
	for _, s := range starts {
		pid := s[strings.LastIndexByte(s, ':')+1:]
		require.DirExists(g.t, "/proc/"+pid, "worker %s has ended", s)
	}
}

func overMaster(t *testing.T, args ...string) *grouped {
	g := &grouped{bench: newBench(t), args: args}
	_, addr := g.startDaemon("127.0.0.1:0", "DLROVER_TOKEN="+testToken)
	g.env = []string{"DLROVER_MASTER_ADDR=" + addr, "DLROVER_TOKEN=" + testToken}
	return g
}

func (g *grouped) ctl(args ...string) string {
	g.t.Helper()
	l := g.start("dlroverctl", g.env, args...)
	require.Equal(g.t, 0, l.wait(), l.err.String())
	return l.out.String()
}

// Three groups of two ranks, each on one node. One node is killed: only its group starts again, when the node is back.
// The verdict names the group.
func TestGroupsFailAlone(t *testing.T) {
	g := overMaster(t, "--nnodes=1:3", "--replica-groups=3", "--nproc-per-node=2", "--max-restarts=0")
	nodes := []*launched{g.node("a")}
	starts := g.started(2)
	require.Equal(t, []string{"0/3:a:0/2", "0/3:a:1/2"}, inGroup(0, starts), "a group does not wait for others")
	nodes = append(nodes, g.node("b"))
	require.Equal(t, []string{"1/3:b:0/2", "1/3:b:1/2"}, inGroup(1, g.started(4)))
	nodes = append(nodes, g.node("c"))
	starts = g.started(6)
	require.Equal(t, []string{"2/3:c:0/2", "2/3:c:1/2"}, inGroup(2, starts))
	spare := g.node("d")
	eventually(t, "a spare", func() bool { return strings.Contains(spare.err.String(), "this node is a spare") })

	nodes[1].signal(syscall.SIGKILL)
	again := g.started(8)
	require.Equal(t, []string{"1/3:d:0/2", "1/3:d:1/2"}, inGroup(1, again[6:]), "the spare takes the place")
	kept := slices.DeleteFunc(slices.Clone(starts), func(s string) bool { return s[0] == '1' })
	g.running(kept)

	g.fail(2)
	require.NotZero(t, nodes[2].wait())
	require.Contains(t, nodes[2].err.String(), "job job.g2")
	g.running(again[6:])
	g.running(kept[:2])
	state := g.ctl("status", "job")
	require.Contains(t, state, "run job has 3 replica groups, of which 1 are needed")
	require.Regexp(t, `(?m)^1 +job.g1 +1 +1 +2 .* running`, state)
	require.Regexp(t, `(?m)^2 +job.g2 .* failed`, state)

	g.release()
	require.Zero(t, nodes[0].wait())
	require.Zero(t, spare.wait())
}

// A launcher that is started again comes back into its group, which waits for it. The restarts of each group are
// counted alone.
func TestGroupsKeepTheirNodesAndBudgets(t *testing.T) {
	g := overMaster(t, "--nnodes=4", "--replica-groups=2", "--nproc-per-node=1", "--max-restarts=1")
	all := map[string]*launched{}
	for i, name := range []string{"a", "b", "c", "d"} {
		all[name] = g.node(name, "--node-rank="+fmt.Sprint(i))
	}
	starts := g.started(4)
	require.Equal(t, []string{"0/2:a:0/2", "0/2:b:1/2"}, inGroup(0, starts))
	require.Equal(t, []string{"1/2:c:0/2", "1/2:d:1/2"}, inGroup(1, starts))
	all["b"].signal(syscall.SIGKILL)
	all["d"].signal(syscall.SIGKILL)
	<-all["d"].exited
	all["d"] = g.node("d")
	require.Equal(t, []string{"1/2:c:0/2", "1/2:d:1/2"}, inGroup(1, g.started(6)[4:]))
	all["b"] = g.node("b")
	require.Equal(t, []string{"0/2:a:0/2", "0/2:b:1/2"}, inGroup(0, g.started(8)[6:]))

	for group, n := range []int{10, 12} { // each group spends its own restart
		g.fail(group)
		again := inGroup(group, g.started(n)[n-2:])
		require.Len(t, again, 2)
	}
	g.release()
	for name, l := range all {
		require.Zero(t, l.wait(), name)
	}
}

// With fewer groups than the run needs, all end.
func TestTooFewGroupsEndTheRun(t *testing.T) {
	g := overMaster(t, "--nnodes=2:3", "--replica-groups=3", "--nproc-per-node=1", "--max-restarts=0")
	nodes := []*launched{g.node("a", "--node-rank=0"), g.node("b", "--node-rank=1"), g.node("c", "--node-rank=2")}
	starts := g.started(3)
	g.fail(0)
	require.NotZero(t, nodes[0].wait())
	kept := slices.DeleteFunc(starts, func(s string) bool { return s[0] == '0' })
	g.running(kept)
	g.fail(1)
	require.NotZero(t, nodes[1].wait())
	require.NotZero(t, nodes[2].wait())
	require.Contains(t, nodes[2].err.String(), "replica group 1 of run job has failed, and 1 of 3 groups are left, but 2 "+
		"are needed")
}

// The launcher that serves the others is killed, and started again at its place: the other groups never stop.
func TestGroupsOutliveTheServer(t *testing.T) {
	g := &grouped{bench: newBench(t)}
	g.args = []string{"--nnodes=2", "--replica-groups=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
		"--rdzv-endpoint=localhost:" + freePort(t)}
	server := g.node("a")
	g.started(1)
	other := g.node("b")
	starts := g.started(2)
	server.signal(syscall.SIGKILL)
	<-server.exited
	server = g.node("a")
	require.Equal(t, []string{"0/2:a:0/1"}, inGroup(0, g.started(3)[2:]))
	g.running(starts[1:])
	eventually(t, "the other group is back", func() bool { return strings.Contains(other.err.String(), "joined again") })
	g.release()
	require.Zero(t, other.wait())
	require.Zero(t, server.wait())
}

func TestGroupsByStaticRanks(t *testing.T) {
	g := &grouped{bench: newBench(t)}
	g.args = []string{"--nnodes=4", "--replica-groups=2", "--nproc-per-node=1", "--rdzv-backend=static",
		"--master-addr=127.0.0.1", "--master-port=" + freePort(t)}
	var nodes []*launched
	for i := range 4 {
		nodes = append(nodes, g.node(fmt.Sprint("n", i), fmt.Sprint("--node-rank=", i)))
	}
	starts := g.started(4)
	require.Equal(t, []string{"0/2:n0:0/2", "0/2:n1:1/2"}, inGroup(0, starts))
	require.Equal(t, []string{"1/2:n2:0/2", "1/2:n3:1/2"}, inGroup(1, starts))
	g.release()
	for _, l := range nodes {
		require.Zero(t, l.wait())
	}
}

// replicaOf is torchft's manager in a worker of a group, as its lighthouse sees it.
type replicaOf struct {
	t    *testing.T
	name string // one letter
	url  string // of the lighthouse
}

// replica is in the worker with that start.
func (g *grouped) replica(name, start string) *replicaOf {
	g.t.Helper()
	env, err := os.ReadFile("/proc/" + start[strings.LastIndexByte(start, ':')+1:] + "/environ")
	require.NoError(g.t, err)
	for kv := range strings.SplitSeq(string(env), "\x00") {
		if url, ok := strings.CutPrefix(kv, lighthouse.Variable+"="); ok {
			return &replicaOf{g.t, name, url}
		}
	}
	g.t.Fatalf("%s has no $%s", start, lighthouse.Variable)
	return nil
}

// call sends a message by gRPC. It returns that of the answer.
func (r *replicaOf) call(method, in string) string {
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	c := &http.Client{Transport: &http.Transport{Protocols: p}, Timeout: time.Minute}
	defer c.CloseIdleConnections()
	resp, err := c.Post(r.url+"/torchft.LighthouseService/"+method, "application/grpc",
		strings.NewReader("\x00\x00\x00\x00"+string(byte(len(in)))+in))
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.Trailer.Get("Grpc-Status") != "0" || len(body) < 5 {
		return fmt.Sprint(err, resp.Trailer)
	}
	return string(body[5:])
}

func (r *replicaOf) beats() { require.Empty(r.t, r.call("Heartbeat", "\x0a\x01"+r.name)) }

// asks asks for the next quorum. The channel gets the names of its replicas.
func (r *replicaOf) asks() <-chan string {
	c := make(chan string, 1)
	go func() {
		names := ""
		quorum := r.call("Quorum", "\x0a\x03\x0a\x01"+r.name)
		for _, member := range regexp.MustCompile("\x12\x03\x0a\x01(.)").FindAllStringSubmatch(quorum, -1) {
			names += member[1]
		}
		c <- names
	}()
	return c
}

// Workers find torchft's lighthouse at their launcher; here they have no torchft. A quorum does not wait for the
// heartbeats of a group whose node was killed, which are missed after five seconds.
func TestLighthouseOfGroups(t *testing.T) {
	g := overMaster(t, "--nnodes=1:3", "--replica-groups=3", "--nproc-per-node=1", "--preset=torchft")
	var nodes []*launched
	var replicas []*replicaOf
	for i, name := range []string{"a", "b", "c"} {
		nodes = append(nodes, g.node(name))
		replicas = append(replicas, g.replica(name, g.started(i + 1)[i]))
	}
	for _, c := range []<-chan string{replicas[2].asks(), replicas[1].asks(), replicas[0].asks()} {
		require.Equal(t, "abc", <-c)
	}
	a, b := replicas[0].asks(), replicas[1].asks()
	replicas[2].beats()
	nodes[2].signal(syscall.SIGKILL)
	killed := time.Now()
	require.Equal(t, "ab", <-a)
	require.Equal(t, "ab", <-b)
	require.Less(t, time.Since(killed), 4*time.Second)
	nodes[2] = g.node("c")
	again := g.replica("d", g.started(4)[3]).asks()
	eventually(t, "the group in a quorum", func() bool {
		a, b := replicas[0].asks(), replicas[1].asks()
		all := <-a
		require.Equal(t, all, <-b)
		return all == "abd"
	})
	require.Equal(t, "abd", <-again)
	g.release()
	for _, l := range nodes {
		require.Zero(t, l.wait())
	}
}

// A replica that asks for a quorum does not notice that another server decides it.
func TestLighthouseOutlivesTheServer(t *testing.T) {
	g := &grouped{bench: newBench(t)}
	g.args = []string{"--nnodes=2", "--replica-groups=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--preset=torchft",
		"--rdzv-endpoint=localhost:" + freePort(t)}
	server := g.node("a")
	a := g.replica("a", g.started(1)[0])
	other := g.node("b")
	b := g.replica("b", g.started(2)[1])
	first := a.asks()
	require.Equal(t, "ab", <-b.asks())
	require.Equal(t, "ab", <-first)
	waiting := b.asks()
	server.signal(syscall.SIGKILL)
	<-server.exited
	server = g.node("a")
	require.Equal(t, "bc", <-g.replica("c", g.started(3)[2]).asks())
	require.Equal(t, "bc", <-waiting)
	g.release()
	require.Zero(t, other.wait())
	require.Zero(t, server.wait())
}

// The plan is that of the group which the node wishes.
func TestPlanOfAGroup(t *testing.T) {
	b := newBench(t)
	plan := func(env string, more ...string) string {
		args := append([]string{"--nnodes=2:6", "--replica-groups=3", "--nproc-per-node=2", "--rdzv-backend=c10d",
			"--rdzv-endpoint=localhost:1", "--dry-run"}, more...)
		l := b.start("dlrover-run", []string{env}, b.sh("true", args...)...)
		require.Zero(t, l.wait(), l.err.String())
		return l.out.String()
	}
	got := plan("X=", "--node-rank=3", "--preset=torchft")
	for _, want := range []string{"group rank 1 of 2 nodes with 2 workers each", `"RANK=3"`, `"WORLD_SIZE=4"`,
		`"TORCHELASTIC_RUN_ID=none.g1"`, `"REPLICA_GROUP_ID=1"`, `"NUM_REPLICA_GROUPS=3"`,
		`"TORCHFT_LIGHTHOUSE=<from the rendezvous>"`} {
		require.Contains(t, got, want)
	}
	got = plan("TORCHFT_LIGHTHOUSE=http://mine:1", "--preset=torchft")
	require.Contains(t, got, `"REPLICA_GROUP_ID=<from the rendezvous>"`)
	require.NotContains(t, got, `"TORCHFT_LIGHTHOUSE=`)
	require.NotContains(t, plan("X="), `"TORCHFT_LIGHTHOUSE=`, "the preset is another")
}

func TestGroupsThatCannotBe(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct{ args, group, want string }{
		{"--nnodes=4 --replica-groups=1", "", "--replica-groups=1: need 2 to 256 groups, or 0 for none"},
		{"--nnodes=4 --replica-groups=-2", "", "--replica-groups=-2: need 2 to 256 groups, or 0 for none"},
		{"--replica-groups=2", "", "each group has a launcher of its own at least, and the job has 1; use --nnodes=2"},
		{"--nnodes=5 --replica-groups=2", "", "--nnodes=5:5 cannot be divided into so many groups; use a multiple of 2"},
		{"--nnodes=3:4 --replica-groups=2", "", "in --nnodes=3:4 has to be a multiple of 2"},
		{"--nnodes=4 --replica-groups=2 --node-unit=2", "", "nodes come and go by groups; leave out one of the two"},
		{"--nnodes=4 --replica-groups=2", "2", `$REPLICA_GROUP_ID="2": with --replica-groups=2 it must be from 0 to 1`},
	} {
		args := append(strings.Fields(c.args), "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:1")
		l := b.start("dlrover-run", []string{"MASTER_ADDR=", "REPLICA_GROUP_ID=" + c.group}, b.sh("true", args...)...)
		require.NotZero(t, l.wait())
		require.Contains(t, l.err.String(), c.want, c.args)
	}
}
