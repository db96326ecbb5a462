package run

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// network are network namespaces on one switch, which is in a namespace of its own: as many machines, as far as the
// network goes. All traffic stays between them.
type network struct {
	test  *testing.T
	names []string
	addrs []string
	hub   string
}

// networks counts them, for names that no other test has.
var networks atomic.Int32

// newNetwork makes n machines that reach each other.
func newNetwork(t *testing.T, n int) *network {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: network namespaces need root, so jobs of several machines are NOT tested")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("SKIPPED: no ip command (package iproute2), so jobs of several machines are NOT tested:", err)
	}
	prefix := fmt.Sprintf("dlc%d-%d-", os.Getpid(), networks.Add(1))
	c := &network{test: t, hub: prefix + "hub"}
	c.namespace(c.hub)
	c.tool("ip", "-n", c.hub, "link", "add", "name", "switch0", "type", "bridge")
	c.tool("ip", "-n", c.hub, "link", "set", "switch0", "up")
	for i := range n {
		name := fmt.Sprint(prefix, i)
		c.namespace(name)
		c.names, c.addrs = append(c.names, name), append(c.addrs, fmt.Sprintf("10.98.7.%d", i+1))
		c.tool("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port(i), "netns", c.hub)
		c.tool("ip", "-n", c.hub, "link", "set", port(i), "master", "switch0", "up")
		c.tool("ip", "-n", name, "addr", "add", c.addrs[i]+"/24", "dev", "eth0")
		c.tool("ip", "-n", name, "link", "set", "eth0", "up")
		c.tool("ip", "-n", name, "link", "set", "lo", "up")
	}
	return c
}

// within is the command line that executes another one on a machine, with the same pid.
func (c *network) within(i int, command ...string) []string {
	return append([]string{"ip", "netns", "exec", c.names[i]}, command...)
}

// cluster is a network whose machines have slow cables, and a directory for what runs there.
type cluster struct {
	*bench
	*network
}

// newCluster makes n machines that reach each other at rate, such as 1gbit, in both directions.
func newCluster(t *testing.T, n int, rate string) *cluster {
	if _, err := exec.LookPath("tc"); err != nil {
		t.Skip("SKIPPED: no tc command (package iproute2), so checks across hosts are NOT tested:", err)
	}
	c := &cluster{newBench(t), newNetwork(t, n)}
	for i := range n {
		c.sends(i, rate)
		c.receives(i, rate)
	}
	return c
}

// port is the switch's end of a machine's cable.
func port(i int) string { return fmt.Sprint("p", i) }

func (c *network) namespace(name string) {
	if out, err := exec.Command("ip", "netns", "add", name).CombinedOutput(); err != nil {
		c.test.Skipf("SKIPPED: network namespaces are not allowed here, so jobs of several machines are NOT tested: %v %s",
			err, out)
	}
	c.test.Cleanup(func() { _ = exec.Command("ip", "netns", "del", name).Run() })
}

func (c *network) tool(args ...string) {
	c.test.Helper()
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	require.NoError(c.test, err, "%v: %s", args, out)
}

// sends and receives limit what a machine sends and receives.
func (c *cluster) sends(i int, rate string)    { c.limit(c.names[i], "eth0", rate) }
func (c *cluster) receives(i int, rate string) { c.limit(c.hub, port(i), rate) }

func (c *cluster) limit(ns, dev, rate string) {
	c.t.Helper()
	c.tool("tc", "-n", ns, "qdisc", "replace", "dev", dev, "root", "tbf", "rate", rate, "burst", "256kb",
		"latency", "20ms")
}

// cut loses what machine i sends to machine j, without a word: it goes to a card that nobody has.
func (c *cluster) cut(i, j int) {
	c.t.Helper()
	c.tool("ip", "-n", c.names[i], "neigh", "replace", c.addrs[j], "lladdr", "02:00:00:00:00:99", "nud", "permanent",
		"dev", "eth0")
}

// on starts a program on a machine; exec keeps its pid.
func (c *cluster) on(i int, program string, env []string, args ...string) *launched {
	c.t.Helper()
	command := c.within(i, append([]string{filepath.Join(binDir, program)}, args...)...)
	env = append([]string{"DLROVER_TOKEN=" + testToken, fmt.Sprint("POD_NAME=node", i)}, env...)
	return c.startPath(command[0], env, command[1:]...)
}
