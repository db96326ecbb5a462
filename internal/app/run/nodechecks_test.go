package run

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/torchpython"
	"dlrover-run/netcheck"
)

// checked are the arguments of a job on the cluster whose nodes check each other first.
func (c *cluster) checked(nodes string, more ...string) []string {
	return append([]string{"--nnodes=" + nodes, "--nproc-per-node=1", "--rdzv-backend=c10d",
		"--rdzv-endpoint=" + c.addrs[0] + ":29401", "--rdzv-id=job", "--rdzv-conf=last_call_timeout=3,join_timeout=120",
		"--network-check", "--check-level=host", "--exit-code-policy=reason"}, more...)
}

// all starts a launcher on every machine.
func (c *cluster) all(args ...string) []*launched {
	var ls []*launched
	for i := range c.names {
		ls = append(ls, c.on(i, "dlrover-run", nil, args...))
	}
	return ls
}

// picture is what dlroverctl shows of the check, asked on machine 0.
func (c *cluster) picture() (p netcheck.Picture) {
	c.t.Helper()
	l := c.on(0, "dlroverctl", []string{"DLROVER_MASTER_ADDR=" + c.addrs[0] + ":29401"}, "check", "job", "--json")
	require.Equal(c.t, 0, l.wait(), l.err.String())
	require.NoError(c.t, json.Unmarshal([]byte(l.out.String()), &p))
	return p
}

func states(p netcheck.Picture) map[string]netcheck.State {
	m := map[string]netcheck.State{}
	for _, n := range p.Nodes {
		m[n.Node.Name] = n.Verdict.State
	}
	return m
}

func (c *cluster) up(world int) func() bool {
	return func() bool {
		for i := range world {
			if !c.exists(fmt.Sprintf("up.%d.%d", world, i))() {
				return false
			}
		}
		return true
	}
}

const allOK = "ok ok ok ok"

func (c *cluster) verdicts() string {
	m := states(c.picture())
	var words []string
	for i := range c.names {
		words = append(words, string(m[fmt.Sprint("node", i)]))
	}
	return strings.Join(words, " ")
}

// Four sound nodes are tested once; a restart of their workers tests nothing.
func TestChecksOfSoundNodes(t *testing.T) { unstarved(t, checksOfSoundNodes) }

func checksOfSoundNodes(t *testing.T) {
	c := newCluster(t, 4, "100mbit")
	ls := c.all(c.sh(hold+"; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 1", c.checked("4", "--max-restarts=1")...)...)
	eventually(t, "up", c.up(4))
	require.Equal(t, allOK, c.verdicts())
	p := c.picture()
	require.Greater(t, len(p.Pairs), 4)
	for _, pair := range p.Pairs {
		require.Equal(t, netcheck.OK, pair.Class)
		require.InDelta(t, 94, pair.Mbps, 14, "%+v", pair)
	}
	c.release()
	for _, l := range ls {
		require.Equal(t, 0, l.wait())
		require.Equal(t, 1, strings.Count(l.err.String(), "checking this node"), l.err.String())
	}
}

// A node that sends at half the rate is left out, with its direction named; the three others train.
func TestSlowSenderIsLeftOut(t *testing.T) { unstarved(t, slowSenderIsLeftOut) }

func slowSenderIsLeftOut(t *testing.T) {
	c := newCluster(t, 4, "100mbit")
	c.sends(2, "50mbit")
	ls := c.all(c.sh(hold, c.checked("3:4", "--exclude-straggler")...)...)
	require.Equal(t, 40, ls[2].wait())
	last := strings.TrimSpace(ls[2].err.String())
	last = last[strings.LastIndexByte(last, '\n')+1:]
	require.Contains(t, last, "has not passed its check")
	require.Regexp(t, `send|tx`, last)
	eventually(t, "up", c.up(3))
	require.Equal(t, "ok ok faulty ok", c.verdicts())
	c.release()
	for _, i := range []int{0, 1, 3} {
		require.Equal(t, 0, ls[i].wait())
	}
}

// One path is cut. No node is to blame, so all train, and the path is named.
func TestCutPathBlamesNobody(t *testing.T) {
	besideOthers(t) // no rate decides
	unstarved(t, cutPathBlamesNobody)
}

func cutPathBlamesNobody(t *testing.T) {
	c := newCluster(t, 4, "100mbit")
	c.cut(1, 3)
	c.cut(3, 1)
	ls := c.all(c.sh(hold, c.checked("3:4")...)...)
	eventually(t, "up", c.up(4))
	p := c.picture()
	for _, n := range p.Nodes {
		require.NotEqual(t, netcheck.StateFaulty, n.Verdict.State)
		require.False(t, n.Verdict.Excluded)
	}
	require.Regexp(t, "node1.*node3|node3.*node1", strings.Join(p.Paths, "\n"))
	c.release()
	for _, l := range ls {
		require.Equal(t, 0, l.wait())
	}
}

// The launcher that serves the rendezvous is at fault itself: it goes on serving without workers, and says so.
func TestServingNodeIsLeftOut(t *testing.T) { unstarved(t, servingNodeIsLeftOut) }

func servingNodeIsLeftOut(t *testing.T) {
	c := newCluster(t, 4, "100mbit")
	c.receives(0, "40mbit")
	ls := c.all(c.sh(hold, c.checked("3:4", "--exclude-straggler")...)...)
	eventually(t, "up", c.up(3))
	eventually(t, "said", func() bool {
		return strings.Contains(ls[0].err.String(), "it stays, because other nodes depend on it")
	})
	require.Equal(t, "faulty ok ok ok", c.verdicts())
	c.release()
	for _, l := range ls {
		require.Equal(t, 0, l.wait())
	}
}

// In a static job nobody can be replaced: the check fails it and names the node.
func TestStaticJobFailsByItsCheck(t *testing.T) { unstarved(t, staticJobFailsByItsCheck) }

func staticJobFailsByItsCheck(t *testing.T) {
	c := newCluster(t, 4, "100mbit")
	c.sends(2, "40mbit")
	var ls []*launched
	for i := range c.names {
		ls = append(ls, c.on(i, "dlrover-run", nil, c.sh(hold, c.checked("4", "--exclude-straggler", "--rdzv-backend=static",
			"--rdzv-endpoint=", "--master-addr="+c.addrs[0], "--master-port=29401", fmt.Sprint("--node-rank=", i))...)...))
	}
	for i, l := range ls {
		want := 41
		if i == 2 {
			want = 40
		}
		require.Equal(t, want, l.wait())
		require.Contains(t, l.err.String(), "node2")
	}
	require.Empty(t, c.lines("starts"))
}

// A node dies in the midst of the check, another one takes its place.
func TestNodeIsKilledInTheCheck(t *testing.T) {
	besideOthers(t) // no rate decides
	unstarved(t, nodeIsKilledInTheCheck)
}

func nodeIsKilledInTheCheck(t *testing.T) {
	c := newCluster(t, 4, "100mbit")
	args := c.sh(hold, c.checked("4")...)
	ls := c.all(args...)
	eventually(t, "checking", func() bool { return strings.Contains(ls[3].err.String(), "checking this node") })
	time.Sleep(1500 * time.Millisecond) // into the first tests
	ls[3].signal(syscall.SIGKILL)
	ls[3].wait()
	again := c.on(3, "dlrover-run", nil, args...)
	eventually(t, "up", c.up(4))
	c.release()
	for _, l := range []*launched{ls[0], ls[1], ls[2], again} {
		require.Equal(t, 0, l.wait())
	}
}

// A launcher is stopped in the midst of the check, so that it cannot say that it is left out. The others train soon,
// and it leaves when it goes on.
func TestNodeIsStoppedInTheCheck(t *testing.T) { unstarved(t, nodeIsStoppedInTheCheck) }

func nodeIsStoppedInTheCheck(t *testing.T) {
	c := newCluster(t, 4, "100mbit")
	ls := c.all(c.sh(hold, c.checked("3:4")...)...)
	eventually(t, "checking", func() bool { return strings.Contains(ls[3].err.String(), "checking this node") })
	time.Sleep(1500 * time.Millisecond) // into the first tests
	ls[3].freeze()
	stopped := time.Now()
	eventually(t, "up", c.up(3))
	require.Less(t, time.Since(stopped), 25*time.Second)
	ls[3].thaw()
	require.Equal(t, 40, ls[3].wait())
	require.Equal(t, "ok ok ok faulty", c.verdicts())
	c.release()
	for _, l := range ls[:3] {
		require.Equal(t, 0, l.wait())
	}
}

// The daemon is killed in the midst of the check, and started again.
func TestDaemonIsKilledInTheCheck(t *testing.T) {
	besideOthers(t) // no rate decides
	unstarved(t, daemonIsKilledInTheCheck)
}

func daemonIsKilledInTheCheck(t *testing.T) {
	c := newCluster(t, 4, "100mbit")
	listen := c.addrs[0] + ":50001"
	daemon := func() *launched {
		d := c.on(0, "dlrover-master", nil, "--listen="+listen)
		eventually(t, "serving", func() bool { return strings.Contains(d.err.String(), `"msg":"serving"`) })
		return d
	}
	d := daemon()
	args := c.sh(hold, c.checked("4", "--rdzv-backend=dlrover-master", "--rdzv-endpoint="+listen)...)
	ls := c.all(args...)
	eventually(t, "checking", func() bool { return strings.Contains(ls[3].err.String(), "checking this node") })
	time.Sleep(1500 * time.Millisecond) // into the first tests
	d.signal(syscall.SIGKILL)
	d.wait()
	d = daemon()
	eventually(t, "up", c.up(4))
	c.release()
	for _, l := range ls {
		require.Equal(t, 0, l.wait())
	}
	d.signal(syscall.SIGTERM)
	d.wait()
}

// With --check-only nothing is started, and who asks reads the table.
func TestCheckOnly(t *testing.T) { unstarved(t, checkOnly) }

func checkOnly(t *testing.T) {
	c := newCluster(t, 4, "100mbit")
	c.sends(1, "30mbit")
	ls := c.all(c.checked("3:4", "--check-only", "--exclude-straggler")...)
	for i, l := range ls {
		want := 0
		if i == 1 {
			want = 40
		}
		require.Equal(t, want, l.wait(), "node%d", i)
	}
	table := ls[0].out.String() + ls[2].out.String() + ls[3].out.String()
	require.Regexp(t, regexp.MustCompile(`node1 +\w+, left out`), table)
}

// served starts a daemon on machine 0, and returns the arguments of a job of the other ones with it.
func (c *cluster) served(nodes string, more ...string) []string {
	listen := c.addrs[0] + ":50001"
	d := c.on(0, "dlrover-master", nil, "--listen="+listen)
	eventually(c.t, "serving", func() bool { return strings.Contains(d.err.String(), `"msg":"serving"`) })
	c.t.Cleanup(func() {
		d.signal(syscall.SIGTERM)
		d.wait()
	})
	return c.checked(nodes, append([]string{"--rdzv-backend=dlrover-master", "--rdzv-endpoint=" + listen}, more...)...)
}

// apart cuts a machine off from others, but not from the daemon.
func (c *cluster) apart(i int, others ...int) {
	for _, j := range others {
		c.cut(i, j)
		c.cut(j, i)
	}
}

// One of three nodes dies, and its replacement reaches the rendezvous, but none of the two that are left. They go on
// without it, and are not stopped when it comes again.
func TestDeadReplacementIsLeftOut(t *testing.T) {
	besideOthers(t) // no rate decides
	unstarved(t, deadReplacementIsLeftOut)
}

func deadReplacementIsLeftOut(t *testing.T) {
	c := newCluster(t, 5, "100mbit")
	args := c.sh(hold, c.served("2:4")...)
	ls := map[int]*launched{}
	for _, i := range []int{1, 2, 3} {
		ls[i] = c.on(i, "dlrover-run", nil, args...)
	}
	eventually(t, "three", c.up(3))
	ls[3].signal(syscall.SIGKILL)
	ls[3].wait()
	eventually(t, "two", c.up(2))
	c.apart(4, 1, 2)
	began := time.Now()
	bad := c.on(4, "dlrover-run", nil, args...)
	require.Equal(t, 40, bad.wait())
	require.Contains(t, bad.err.String(), "good nodes have failed")
	eventually(t, "two again", func() bool { return len(c.lines("starts")) == 3+2+2 })
	t.Logf("the two were without workers for less than %v", time.Since(began))
	again := c.on(4, "dlrover-run", nil, args...)
	passed := func() bool { return strings.Contains(again.err.String(), "the check of this node has passed") }
	eventually(t, "checked", passed)
	time.Sleep(3 * time.Second) // three times the growth delay
	require.Len(t, c.lines("starts"), 3+2+2, "nobody is stopped for it again")
	require.False(t, c.exists("up.4.0")())
	c.release()
	for _, l := range []*launched{ls[1], ls[2], again} {
		require.Equal(t, 0, l.wait())
	}
}

// No node reaches any other one: that is no success of a check, and nobody waits for other nodes.
func TestCheckOnlyOfNodesThatReachNobody(t *testing.T) {
	besideOthers(t) // no rate decides
	unstarved(t, checkOnlyOfNodesThatReachNobody)
}

func checkOnlyOfNodesThatReachNobody(t *testing.T) {
	c := newCluster(t, 4, "100mbit")
	c.apart(1, 2, 3)
	c.apart(2, 3)
	args := c.served("1:3", "--check-only")
	began := time.Now()
	var ls []*launched
	for i := 1; i < 4; i++ {
		ls = append(ls, c.on(i, "dlrover-run", nil, args...))
	}
	for _, l := range ls {
		require.Contains(t, []int{40, 41}, l.wait())
		require.Contains(t, l.out.String()+l.err.String(), "not one of 3 pairs has passed over eth0: unreachable")
	}
	require.Less(t, time.Since(began), 90*time.Second)
}

// A node whose check fails gets a mark at the master, which outlives the master and ends with a check that passes.
func TestAFailedCheckMarksTheNodeUntilOnePasses(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	check := filepath.Join(b.dir, "prolog")
	script := "#!/bin/sh\n[ ! -e $DIR/slow.$NODE_NAME ] || { echo eth0 is slow >&2; exit 1; }\n"
	require.NoError(t, writeProgram(check, []byte(script)))
	slow := filepath.Join(b.dir, "slow.gpu-01")
	require.NoError(t, os.WriteFile(slow, nil, 0o600))
	master := func() (d *launched, addr string) {
		d = b.start("dlrover-master", nil, "--listen=127.0.0.1:0", "--data-dir="+filepath.Join(b.dir, "data"),
			"--event-log="+filepath.Join(b.dir, "events.json"))
		return d, b.served(d)
	}
	d, addr := master()
	node := func(n string, args ...string) *launched {
		env := []string{"DLROVER_MASTER_ADDR=" + addr, "POD_NAME=pod-" + n, "NODE_NAME=gpu-" + n}
		return b.start("dlrover-run", env, append([]string{"--nnodes=2", "--nproc-per-node=1", "--health-check=" + check,
			"--exit-code-policy=reason", "--rdzv-conf=last_call_timeout=1"}, args...)...)
	}
	args := append([]string{"--rdzv-id=job"}, b.sh(hold)...)
	good, bad := node("00", args...), node("01", args...)
	require.Equal(t, 40, bad.wait(), bad.err.String())
	eventually(t, "the mark", func() bool { return len(b.events("node-marked")) == 1 })
	require.Equal(t, "gpu-01", b.events("node-marked")[0]["node"])
	require.Contains(t, b.events("node-marked")[0]["text"], "eth0 is slow")
	spare := node("02", args...)
	eventually(t, "the others run", func() bool { return b.exists("up.2.0")() && b.exists("up.2.1")() })
	b.release()
	require.Zero(t, good.wait(), good.err.String())
	require.Zero(t, spare.wait(), spare.err.String())

	d.signal(syscall.SIGKILL)
	d.wait()
	_, addr = master()
	known := b.start("dlroverctl", []string{"DLROVER_MASTER_ADDR=" + addr}, "nodes")
	require.Zero(t, known.wait(), known.err.String())
	require.Regexp(t, `gpu-01 .*check-failed`, known.out.String())
	require.NoError(t, os.Remove(slow))
	for _, l := range []*launched{node("01", "--rdzv-id=again", "--check-only"), node("02", "--rdzv-id=again",
		"--check-only")} {
		require.Zero(t, l.wait(), l.err.String())
	}
	eventually(t, "the end of the mark, in the timelines of both runs", func() bool {
		return len(b.events("node-unmarked")) == 2
	})
	require.Contains(t, b.events("node-unmarked")[0]["text"], "a check of the node has passed")
}

// The site's own check fails on one of two nodes.
func TestHealthCheckOfTheSite(t *testing.T) {
	b := newBench(t)
	check := filepath.Join(b.dir, "prolog")
	script := "#!/bin/sh\n[ $POD_NAME = good ] || { echo GPU 3 is hot >&2; exit 1; }\n"
	require.NoError(t, writeProgram(check, []byte(script)))
	args := b.sh(hold, b.c10d("1:2", "--health-check="+check, "--exit-code-policy=reason")...)
	good := b.start("dlrover-run", []string{"POD_NAME=good"}, args...)
	eventually(t, "serving", func() bool { return strings.Contains(good.err.String(), "serving the rendezvous") })
	bad := b.start("dlrover-run", []string{"POD_NAME=bad"}, args...)
	require.Equal(t, 40, bad.wait())
	require.Contains(t, bad.err.String(), "GPU 3 is hot")
	eventually(t, "up", b.exists("up.2.0"))
	b.release()
	require.Equal(t, 0, good.wait())
}

func TestHealthCheckOfOneNode(t *testing.T) {
	b := newBench(t)
	l := b.run(b.sh("exit 0", "--standalone", "--health-check=exit 7", "--exit-code-policy=reason")...)
	require.Equal(t, 40, l.wait())
	require.Contains(t, l.err.String(), "exit status 7")
	l = b.run(b.sh("exit 0", b.c10d("1", "--health-check=exit 7", "--exit-code-policy=reason")...)...)
	require.Equal(t, 40, l.wait(), "it serves a rendezvous that nobody else comes to")
	l = b.run(b.sh("exit 0", "--standalone", "--health-check=/no/such/check", "--exit-code-policy=reason")...)
	require.Equal(t, 0, l.wait(), "a check that is broken is a warning")
	require.Contains(t, l.err.String(), "could not be run")
	l = b.run(b.sh("exit 0", "--standalone", "--health-check=exit 7", "--check-action=report")...)
	require.Equal(t, 0, l.wait())
	require.Contains(t, l.err.String(), "exit status 7")
}

// A Go test of a node's own part with PyTorch is in netcheck/python; here the pairs are real, and so is gloo.
func TestCheckWithTorch(t *testing.T) { unstarved(t, checkWithTorch) }

func checkWithTorch(t *testing.T) {
	python := torchpython.Require(t, "node checks with PyTorch")
	c := newCluster(t, 4, "300mbit")
	var ls []*launched
	for i := range c.names {
		ls = append(ls, c.on(i, "dlrover-run", []string{"PYTHON_EXEC=" + python, "GLOO_SOCKET_IFNAME=eth0"},
			c.sh(hold, c.checked("4", "--check-level=full", "--precheck=2")...)...))
	}
	require.Eventually(t, c.up(4), 3*time.Minute, 10*time.Millisecond)
	p := c.picture()
	for _, n := range p.Nodes {
		require.False(t, n.Verdict.Excluded, "%+v", n.Verdict)
	}
	collectives := 0
	for _, pair := range p.Pairs {
		if pair.Torch {
			collectives++
			require.Contains(t, []netcheck.Class{netcheck.OK, netcheck.Slow}, pair.Class)
			require.Greater(t, pair.Mbps, 1.0)
		}
	}
	require.GreaterOrEqual(t, collectives, 4)
	c.release()
	for _, l := range ls {
		require.Equal(t, 0, l.wait())
		require.NotContains(t, l.err.String(), "no tests with PyTorch")
	}
}

// Nothing listens and nothing runs when nobody asks for a check.
func TestNoCheckIsNothing(t *testing.T) {
	b := newBench(t)
	l := b.run(b.sh("exit 0", "--standalone")...)
	require.Equal(t, 0, l.wait())
	require.NotContains(t, l.err.String(), "check")
}
