package run

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/launcher"
	"dlrover-run/rendezvous"
)

func openTestPorts(t *testing.T, n int) (*ports, *nodeJob) {
	t.Helper()
	t.Setenv("TMPDIR", t.TempDir())
	j := &nodeJob{s: &settings{}, log: slog.New(slog.DiscardHandler)}
	p, err := openPorts(j, n, true)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.close()) })
	p.offer = func([]int) {}
	return p, j
}

func listenOn(t *testing.T, port int) (net.Listener, error) {
	t.Helper()
	return net.Listen("tcp", fmt.Sprintf(":%d", port))
}

func TestPortsAreHeldUntilTheWorkersStart(t *testing.T) {
	p, j := openTestPorts(t, 3)
	require.Len(t, j.s.node.Ports, 3)
	require.NoError(t, rendezvousTakes(j.s.node.Ports))
	for _, n := range j.s.node.Ports {
		_, err := listenOn(t, n)
		require.ErrorContains(t, err, "address already in use")
		_, err = net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", n), time.Second)
		require.ErrorContains(t, err, "connection refused", "nobody serves there")
	}
	p.start(&launcher.StartRequest{})
	for _, n := range j.s.node.Ports {
		l, err := listenOn(t, n)
		require.NoError(t, err)
		require.NoError(t, l.Close())
	}
}

// rendezvousTakes says whether a node may offer the ports.
func rendezvousTakes(ports []int) error {
	if len(ports) > rendezvous.MaxPorts {
		return fmt.Errorf("too many")
	}
	seen := map[int]bool{}
	for _, n := range ports {
		if n < 1 || n > 65535 || seen[n] {
			return fmt.Errorf("%d", n)
		}
		seen[n] = true
	}
	return nil
}

func TestPortsAreHeldAgainAfterAnEpoch(t *testing.T) {
	p, j := openTestPorts(t, 3)
	first := j.s.node.Ports
	var offered []int
	p.offer = func(ports []int) { offered = ports }
	p.start(&launcher.StartRequest{})

	// A server of a worker leaves a connection behind that waits for its end: not everybody could listen there.
	l, err := listenOn(t, first[0])
	require.NoError(t, err)
	far, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	near, err := l.Accept()
	require.NoError(t, err)
	require.NoError(t, near.Close())
	require.NoError(t, l.Close())
	require.NoError(t, far.Close())
	other, err := listenOn(t, first[1])
	require.NoError(t, err)
	defer other.Close()

	p.stop(launcher.StopRequest{Early: true})
	require.Nil(t, offered, "the workers still run")
	p.stop(launcher.StopRequest{})
	require.Len(t, offered, 3)
	require.NotEqual(t, first[0], offered[0])
	require.NotEqual(t, first[1], offered[1], "somebody has it")
	require.Equal(t, first[2], offered[2])
	require.NoError(t, rendezvousTakes(offered))
	for _, n := range offered {
		_, err := listenOn(t, n)
		require.ErrorContains(t, err, "address already in use")
	}
	list := fmt.Sprintf("DLROVER_PORTS=%d,%d,%d", offered[0], offered[1], offered[2])
	require.Equal(t, list, p.environ()[0])
}

func TestWorldFile(t *testing.T) {
	p, _ := openTestPorts(t, 1)
	p.start(&launcher.StartRequest{Epoch: launcher.Epoch{World: []job.Member{
		{Node: "a", Addr: "10.0.0.1", Slots: 2, Role: "default", Ports: []int{4000, 4001}},
		{GroupRank: 1, Node: "b", Addr: "10.0.0.2", RankBase: 2, Slots: 2, Role: "default"},
	}}})
	path, _ := strings.CutPrefix(p.environ()[1], "DLROVER_WORLD_FILE=")
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t,
		`[{"group_rank":0,"node":"a","addr":"10.0.0.1","rank_base":0,"slots":2,"role":"default","ports":[4000,4001]},`+
			`{"group_rank":1,"node":"b","addr":"10.0.0.2","rank_base":2,"slots":2,"role":"default","ports":[]}]`+"\n",
		string(data))
	for name, mode := range map[string]fs.FileMode{path: 0o600, filepath.Dir(path): fs.ModeDir | 0o700} {
		info, err := os.Stat(name)
		require.NoError(t, err)
		require.Equal(t, mode, info.Mode())
	}
	entries, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, entries, 1)
	require.NoError(t, p.close())
	require.NoDirExists(t, filepath.Dir(path))
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
	require.NoError(t, rendezvousTakes(append(append([]int{}, first[0].Ports...), first[1].Ports...)),
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
