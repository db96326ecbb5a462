package run

import (
	"context"
	"errors"
	"math/rand"
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

	etcdstore "dlrover-run/internal/app/etcd"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/job"
	"dlrover-run/launcher/torchpython"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/lead"
)

const (
	haRounds = 2 // unless HA_ROUNDS says how many; two masters are lost in each
	haLeast  = 3 // nodes
	haMost   = 5
)

// haChaos is a PyTorch job of 3 to 5 nodes whose master is lost again and again.
type haChaos struct {
	*electorate
	rnd      *rand.Rand
	store    *etcdstore.Store
	client   *api.Client
	script   string
	nodes    []*launched
	joined   int // nodes so far
	failures int // of workers, which the run's budget pays for
	victim   int // rank of the worker that failed last
	seen     uint64
	verdict  service.Verdict
}

// haEvents are those that tell a change of the job in its timeline.
var haEvents = map[string][]job.Event{
	"nothing":        {},
	"a node joins":   {"join", "break", "seal", "run"},
	"a node leaves":  {"break", "seal", "run"}, // and that it leaves, or has left
	"a worker fails": {"break", "seal", "run"},
}

// The master that serves is killed or falsely deposed at random moments, while nodes join and leave and workers fail.
// No rank is restarted by that, no change of the world is lost or done twice, the budget never falls, the timeline has
// every change, and the verdict is about the newest one.
func TestLeadersAreLost(t *testing.T) {
	long(t)
	t.Parallel()
	if out, err := exec.Command("unshare", "--uts", "true").CombinedOutput(); err != nil {
		t.Skipf("THE LOSS OF MASTERS IS NOT TESTED: unshare --uts: %v: %s", err, out)
	}
	rounds, seed := haRounds, time.Now().UnixNano()
	if text := os.Getenv("HA_ROUNDS"); text != "" {
		var err error
		rounds, err = strconv.Atoi(text)
		require.NoError(t, err, "HA_ROUNDS")
	}
	t.Logf("seed %d", seed)
	c := newHAChaos(t, seed)
	for range 4 {
		c.join()
	}
	c.trains(4)
	for i := range rounds {
		c.round(i)
	}
	c.b.release()
	for _, l := range c.nodes {
		require.Equal(t, 0, l.wait())
	}
}

func newHAChaos(t *testing.T, seed int64) *haChaos {
	b := newBench(t)
	b.env = append(b.env, "PYTHON_EXEC="+torchpython.Require(t, "THE LOSS OF MASTERS IS"))
	c := &haChaos{electorate: newElectorate(b, 3), rnd: rand.New(rand.NewSource(seed))}
	var err error
	c.script, err = filepath.Abs("testdata/endless.py")
	require.NoError(t, err)
	c.store, err = etcdstore.Open(etcdstore.Config{Endpoints: []string{c.etcd}, Prefix: "/dlrover"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.store.Close() })
	c.client = api.NewClient(strings.Join(c.addrs, ","), testToken)
	t.Cleanup(c.client.Close)
	return c
}

func (c *haChaos) join() {
	c.joined++
	c.nodes = append(c.nodes, c.b.startPath("/usr/bin/unshare", append(c.env(), "GLOO_SOCKET_IFNAME=lo"), "--uts", "sh",
		"-c", `hostname "$0" && exec "$@"`, "n"+strconv.Itoa(c.joined), filepath.Join(binDir, "dlrover-run"),
		"--nnodes=3:5", "--nproc-per-node=1", "--rdzv-id=job", "--max-restarts=1000000", "--backoff-limit=-1",
		"--restart-backoff=0", "--same-failures=-1", "--rdzv-conf=last_call_timeout=1", c.script))
}

// round changes the job, or does not, and has one master be killed, and one deposed, about then.
func (c *haChaos) round(i int) {
	starts := len(c.b.lines("starts"))
	change := c.change()
	first, second := c.after(change), c.after(change)
	lose, then, how := c.kill, c.depose, "killed, and then deposed"
	if c.rnd.Intn(2) == 0 {
		lose, then, how = c.depose, c.kill, "deposed, and then killed"
	}
	c.b.t.Logf("round %d: %s; %v and %v later the master is %s", i, change, first, second, how)
	time.Sleep(first)
	lose()
	time.Sleep(second)
	then()
	if change != "nothing" {
		starts += len(c.nodes)
	}
	c.trains(starts)
	c.knows(change)
}

// after is when a master is lost: in the midst of the change, as a rule.
func (c *haChaos) after(change string) time.Duration {
	d := time.Duration(c.rnd.Intn(250)) * time.Millisecond
	switch {
	case change == "nothing":
		return d / 10
	case c.rnd.Intn(2) == 0:
		return d * 6
	}
	return d
}

// served asks until a master listens: between two of them none does.
func (c *haChaos) served(ask func() error) (err error) {
	eventually(c.b.t, "a master listens", func() bool { err = ask(); return !errors.Is(err, syscall.ECONNREFUSED) })
	return err
}

// knows requires that the master of now tells the change, whichever master it was known to.
func (c *haChaos) knows(change string) {
	c.b.t.Helper()
	ctx, cancel := context.WithTimeout(c.b.t.Context(), 30*time.Second)
	defer cancel()
	var es api.Events
	err := c.served(func() (err error) { es, err = c.client.Events(ctx, "job", c.seen); return err })
	require.NoError(c.b.t, err)
	require.False(c.b.t, es.Dropped)
	var names []job.Event
	for _, e := range es.Events {
		require.Greater(c.b.t, e.Seq, c.seen)
		names, c.seen = append(names, e.Event), e.Seq
	}
	require.Subset(c.b.t, names, haEvents[change])
	before := c.verdict
	err = c.served(func() error { return c.client.Mounted(ctx, "job", "verdict", &c.verdict) })
	switch change {
	case "a worker fails":
		require.NoError(c.b.t, err)
		require.NotNil(c.b.t, c.verdict.RootRank, c.verdict.Line)
		require.Equal(c.b.t, c.victim, *c.verdict.RootRank, c.verdict.Line)
		require.Contains(c.b.t, []int{c.failures - 1, c.failures}, c.verdict.Restarts, c.verdict.Line)
	case "a node leaves":
		require.NoError(c.b.t, err)
		require.Equal(c.b.t, 1, c.verdict.Losses, c.verdict.Line)
		require.Equal(c.b.t, c.failures, c.verdict.Restarts, c.verdict.Line)
	default: // growth is no failure
		if before.Failures+before.Losses > 0 {
			require.Equal(c.b.t, before.Line, c.verdict.Line)
		}
	}
}

// change does something to the job.
func (c *haChaos) change() string {
	switch n := len(c.nodes); {
	case c.rnd.Intn(3) == 0:
		return "nothing"
	case n < haMost && c.rnd.Intn(2) == 0:
		c.join()
		return "a node joins"
	case n > haLeast && c.rnd.Intn(2) == 0:
		i := c.rnd.Intn(n)
		c.nodes[i].signal(syscall.SIGTERM)
		c.nodes = slices.Delete(c.nodes, i, i+1)
		return "a node leaves"
	default:
		c.victim = c.rnd.Intn(n)
		pid, err := strconv.Atoi(c.b.lines("pid." + strconv.Itoa(c.victim))[0])
		require.NoError(c.b.t, err)
		require.NoError(c.b.t, syscall.Kill(pid, syscall.SIGKILL))
		c.failures++
		return "a worker fails"
	}
}

// trains waits until the run is complete and trains, and requires that so many ranks have been started in all.
func (c *haChaos) trains(starts int) {
	c.b.t.Helper()
	n := len(c.nodes)
	eventually(c.b.t, "all nodes are known", func() bool {
		ctx, cancel := context.WithTimeout(c.b.t.Context(), 5*time.Second)
		defer cancel()
		rs, err := c.client.Runs(ctx)
		return err == nil && len(rs) == 1 && rs[0].Phase == "running" && rs[0].Members == n &&
			len(c.b.lines("starts")) >= starts
	})
	before := c.b.lines("step")
	eventually(c.b.t, "it trains", func() bool {
		now := c.b.lines("step")
		return len(now) == 1 && !slices.Equal(now, before)
	})
	lines := c.b.lines("starts")
	require.Len(c.b.t, lines, starts, "starts of ranks")
	want := "/" + strconv.Itoa(n) + ":" + strconv.Itoa(c.failures)
	for _, line := range lines[len(lines)-n:] {
		require.Contains(c.b.t, line, want, "ranks, and restarts of the budget")
	}
}

func (c *haChaos) kill() {
	leader := c.leader()
	c.masters[leader].signal(syscall.SIGKILL)
	c.masters[leader].wait()
	c.leader(leader)
	c.start(leader)
}

// depose takes the leadership from a master that lives.
func (c *haChaos) depose() {
	ctx, cancel := context.WithCancel(c.b.t.Context())
	leaders := c.store.Watch(ctx)
	defer func() {
		cancel()
		for range leaders { // until it is closed
		}
	}()
	var old lead.Leader
	for old = range leaders {
		if old.Addr != "" {
			break
		}
	}
	require.NoError(c.b.t, c.store.Depose(ctx, old))
	for l := range leaders {
		if l.Term > old.Term {
			return
		}
	}
}
