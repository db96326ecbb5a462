package run

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	elected  = "this one was elected to serve it"
	follower = "another one was elected"
)

// trainers are machines with a PyTorch job each, of which the first serves the rendezvous.
type trainers struct {
	*cluster
	args  []string
	nodes []*launched
}

func newTrainers(t *testing.T, n int, nnodes string, more ...string) *trainers {
	if !hasTorch() {
		t.Skip("SKIPPED: no PyTorch for /usr/bin/python3, so successors of a launcher that serves are NOT tested")
	}
	c := &trainers{cluster: &cluster{newBench(t), newNetwork(t, n)}}
	script, err := filepath.Abs("testdata/allreduce.py")
	require.NoError(t, err)
	c.args = slices.Concat([]string{"--nnodes=" + nnodes, "--nproc-per-node=1", "--rdzv-backend=c10d",
		"--rdzv-endpoint=" + c.addrs[0] + ":29401", "--rdzv-id=job", "--max-restarts=3"}, more, []string{script, c.dir})
	for i := range n {
		c.nodes = append(c.nodes, c.train(i))
	}
	eventually(t, "all train", c.exists(fmt.Sprint("trained.", n)))
	return c
}

func (c *trainers) train(i int) *launched {
	return c.on(i, "dlrover-run", []string{"PYTHON_EXEC=/usr/bin/python3", "GLOO_SOCKET_IFNAME=eth0"}, c.args...)
}

// kill ends a launcher; its guard ends the workers.
func (c *trainers) kill(i int) {
	c.t.Helper()
	require.NoError(c.t, syscall.Kill(c.nodes[i].launcher(), syscall.SIGKILL))
}

// ends lets the nodes finish, but for those that have ended.
func (c *trainers) ends(gone ...int) {
	c.t.Helper()
	c.release()
	for i, l := range c.nodes {
		if !slices.Contains(gone, i) {
			require.Equal(c.t, 0, l.wait(), l.err.String())
		}
	}
}

// server waits until one of the nodes has been elected.
func (c *trainers) server(not ...int) (elect int) {
	c.t.Helper()
	eventually(c.t, "one is elected", func() bool {
		for i, l := range c.nodes {
			if !slices.Contains(not, i) && strings.Contains(l.err.String(), elected) {
				elect = i
				return true
			}
		}
		return false
	})
	return elect
}

// The launcher that serves is killed, with its workers, and then the one that was elected. A pod that takes the first
// one's place at the endpoint comes to the second successor.
func TestKilledLauncherHasSuccessors(t *testing.T) {
	long(t)
	t.Parallel()
	c := newTrainers(t, 5, "2:5")
	c.kill(0)
	killed := time.Now()
	first := c.server(0)
	t.Logf("node %d serves after %s", first, time.Since(killed).Round(time.Millisecond))
	eventually(t, "four train", c.exists("trained.4"))
	c.kill(first)
	second := c.server(0, first)
	eventually(t, "three train", c.exists("trained.3"))
	again := c.train(0)
	eventually(t, "four train again", c.exists("trained.4.again"))
	require.Contains(t, again.err.String(), "joining it")
	c.ends(0, first)
	require.Equal(t, 0, again.wait(), again.err.String())
	for i, l := range c.nodes {
		if i != 0 && i != first && i != second {
			require.Contains(t, l.err.String(), follower)
		}
	}
}

// A node that leaves hands the service over: the world that it leaves behind is sealed once, and restarted by nothing.
func TestLauncherThatLeavesHandsOver(t *testing.T) {
	long(t)
	t.Parallel()
	c := newTrainers(t, 3, "2:3")
	c.nodes[0].signal(syscall.SIGTERM)
	c.nodes[0].wait()
	eventually(t, "two train", c.exists("trained.2"))
	c.server(0)
	c.ends(0)
	for _, l := range c.nodes[1:] {
		require.Equal(t, 2, strings.Count(l.err.String(), `"msg":"workers started"`), l.err.String())
	}
}

// A spare takes the place of the launcher that serves when that is killed.
func TestSpareTakesThePlaceOfTheServer(t *testing.T) {
	long(t)
	t.Parallel()
	c := newTrainers(t, 3, "3:3")
	spare := c.train(1)
	eventually(t, "the spare waits", func() bool {
		return strings.Contains(spare.err.String(), "waiting for the other nodes")
	})
	c.kill(0)
	c.server(0)
	eventually(t, "three train again", c.exists("trained.3.again"))
	c.ends(0)
	require.Equal(t, 0, spare.wait(), spare.err.String())
}

// Of two launchers one is left, and serves.
func TestSurvivorOfTwoServes(t *testing.T) {
	long(t)
	t.Parallel()
	c := newTrainers(t, 2, "1:2", "--rdzv-conf=last_call_timeout=20")
	c.kill(0)
	require.Equal(t, 1, c.server(0))
	eventually(t, "one trains", c.exists("trained.1"))
	c.says(1, "node 0 (node0) is gone: its launcher, which served the rendezvous, has died")
	c.ends(0)
}

func (c *trainers) link(i int, state string) {
	c.t.Helper()
	c.tool("ip", "-n", c.hub, "link", "set", port(i), state)
}

func (c *trainers) says(i int, text string) {
	c.t.Helper()
	eventually(c.t, text, func() bool { return strings.Contains(c.nodes[i].err.String(), text) })
}

// The host of the launcher that serves is cut off from the others, which are most of the world. They go on without it,
// and it does not go on without them, until it joins them again.
func TestMajorityReplacesASilentHost(t *testing.T) {
	long(t)
	t.Parallel()
	c := newTrainers(t, 3, "1:3")
	c.link(0, "down")
	cut := time.Now()
	t.Logf("node %d serves %s after the cut", c.server(0), time.Since(cut).Round(time.Millisecond))
	eventually(t, "two train", c.exists("trained.2"))
	c.says(0, "no world is sealed while 2 of the 3 nodes")
	require.NoFileExists(t, c.dir+"/trained.1")
	c.link(0, "up")
	c.says(0, "joining it")
	eventually(t, "three train again", c.exists("trained.3.again"))
	c.ends()
}

// Half of the world goes on if it has the server, and the other half waits.
func TestHalfWithTheServerGoesOn(t *testing.T) {
	long(t)
	t.Parallel()
	c := newTrainers(t, 2, "1:2")
	c.link(1, "down")
	eventually(t, "one trains", c.exists("trained.1"))
	c.says(1, "is silent")
	c.link(1, "up")
	eventually(t, "two train again", c.exists("trained.2.again"))
	c.ends()
	require.NotContains(t, c.nodes[1].err.String(), elected)
}

// Saves of several nodes need the rendezvous, and find the new one.
func TestCheckpointsGoOnUnderASuccessor(t *testing.T) {
	long(t)
	t.Parallel()
	b := newTraining(t, 80)
	b.env = append(b.env, "DLROVER_TOKEN="+testToken)
	args := b.args(b.c10d("2:3", "--max-restarts=10", "--nproc-per-node=1", "--rdzv-conf=last_call_timeout=20"), 5)
	first := b.run(args...)
	eventually(t, "serving", func() bool { return strings.Contains(first.err.String(), "serving the rendezvous") })
	second, third := b.run(args...), b.run(args...)
	eventually(t, "a committed step", func() bool { return b.latest() >= 10 })
	require.NoError(t, syscall.Kill(first.launcher(), syscall.SIGKILL))
	require.Equal(t, 0, second.wait(), second.err.String())
	require.Equal(t, 0, third.wait(), third.err.String())
	require.Contains(t, second.err.String()+third.err.String(), elected)
	require.Equal(t, 80, b.latest())
	require.Equal(t, 2, b.sizes()[len(b.sizes())-1])
}
