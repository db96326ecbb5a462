package run

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func listenOn(t *testing.T, port int) (net.Listener, error) {
	t.Helper()
	return net.Listen("tcp", fmt.Sprintf(":%d", port))
}

func TestPortsOption(t *testing.T) {
	for line, want := range map[string]string{
		"--ports=-1 train.py": "--ports=-1: need 0 to 256", "--ports=257 train.py": "--ports=257: need 0 to 256",
	} {
		_, err := resolved(t, line, nil)
		require.ErrorContains(t, err, want)
	}
	_, err := resolved(t, "--ports=256 train.py", nil)
	require.NoError(t, err)
}

const reportPorts = `n=$RANK.$TORCHELASTIC_RESTART_COUNT; echo $DLROVER_PORTS > $DIR/ports.$n
cp $DLROVER_WORLD_FILE $DIR/world.$n
: > $DIR/up.$n
while [ ! -e $DIR/go.$TORCHELASTIC_RESTART_COUNT ]; do sleep 0.02; done; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 1`

// ports is what the worker of a rank was told after so many restarts: its node's and those of all nodes.
func (b *bench) ports(rank, restarts int) (own string, world []worldNode) {
	b.t.Helper()
	n := fmt.Sprintf("%d.%d", rank, restarts)
	eventually(b.t, "rank and restarts "+n, b.exists("up."+n))
	require.NoError(b.t, json.Unmarshal(read(b.t, filepath.Join(b.dir, "world."+n)), &world))
	return strings.TrimSpace(string(read(b.t, filepath.Join(b.dir, "ports."+n)))), world
}

// Two nodes tell each other their ports. One of them is somebody else's when the workers start again.
func TestPortsOfAllNodes(t *testing.T) {
	b := newBench(t)
	args := b.sh(reportPorts, b.c10d("2", "--ports=2", "--max-restarts=1")...)
	l1, l2 := b.run(args...), b.run(args...)
	list := func(ports []int) string { return strings.Trim(strings.ReplaceAll(fmt.Sprint(ports), " ", ","), "[]") }
	var first []worldNode
	for rank := range 4 {
		own, world := b.ports(rank, 0)
		require.Len(t, world, 2)
		require.Equal(t, list(world[rank/2].Ports), own)
		require.Len(t, world[rank/2].Ports, 2)
		require.Equal(t, rank/2*2, world[rank/2].RankBase)
		if rank > 0 {
			require.Equal(t, first, world, "all workers see the same world")
		}
		first = world
	}
	require.Len(t, slices.Compact(slices.Sorted(slices.Values(slices.Concat(first[0].Ports, first[1].Ports)))), 4,
		"the nodes are on one machine")
	taken, err := listenOn(t, first[1].Ports[0])
	require.NoError(t, err, "while workers run the ports are theirs")
	defer taken.Close()
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, "go.0"), nil, 0o600))

	node := map[string]worldNode{}
	for rank := range 4 {
		own, world := b.ports(rank, 1)
		require.Equal(t, list(world[rank/2].Ports), own)
		for _, n := range world {
			require.Len(t, n.Ports, 2)
			require.NotContains(t, n.Ports, first[1].Ports[0])
			node[n.Addr+list(n.Ports)] = n
		}
	}
	require.Len(t, node, 2)
	require.Contains(t, node, first[0].Addr+list(first[0].Ports), "nobody took those of the other node")
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, "go.1"), nil, 0o600))
	require.Equal(t, 0, l1.wait(), l1.err.String())
	require.Equal(t, 0, l2.wait(), l2.err.String())
	left, err := filepath.Glob(filepath.Join(b.dir, "dlrover-world-*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// Hardly a port is free for whoever names none, and one of them is the endpoint's, where this node serves.
func TestPortsLeaveTheEndpointAlone(t *testing.T) {
	if out, err := exec.Command("unshare", "--net", "true").CombinedOutput(); err != nil {
		t.Skipf("PORTS OF A FULL MACHINE ARE NOT TESTED: unshare --net: %v: %s", err, out)
	}
	b := newBench(t)
	few := filepath.Join(b.dir, "few")
	require.NoError(t, writeProgram(few, fmt.Appendf(nil, "#!/bin/sh\nip link set lo up || exit 99\n"+
		"echo 30000 30031 > /proc/sys/net/ipv4/ip_local_port_range || exit 99\nexec %s/dlrover-run \"$@\"\n", binDir)))
	l := b.startPath("/usr/bin/unshare", nil, append([]string{"--net", few}, b.sh("exit 0", "--nnodes=1",
		"--rdzv-backend=c10d", "--rdzv-endpoint=localhost:30007", "--ports=28")...)...)
	require.Equal(t, 0, l.wait(), l.err.String())
}

// One node has a world, too.
func TestPortsStandalone(t *testing.T) {
	b := newBench(t)
	l := b.run(b.sh(`echo $DLROVER_PORTS; cat $DLROVER_WORLD_FILE`, "--standalone", "--ports=1")...)
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Regexp(t, `^(\d+)\n\[\{"group_rank":0,.*"ports":\[\d+\]\}\]\n$`, l.out.String())
}

func TestWithoutPortsNothingIsSaidOfThem(t *testing.T) {
	b := newBench(t)
	l := b.run(b.sh(`env | grep -c "DLROVER_PORTS\|DLROVER_WORLD_FILE"; exit 0`, "--standalone")...)
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Equal(t, "0\n", l.out.String())
}

// worldNode is a node of the world file.
type worldNode struct {
	GroupRank int    `json:"group_rank"`
	Node      string `json:"node"`
	Addr      string `json:"addr"`
	RankBase  int    `json:"rank_base"`
	Slots     int    `json:"slots"`
	Role      string `json:"role"`
	Ports     []int  `json:"ports"`
}
