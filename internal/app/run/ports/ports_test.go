package ports

import (
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/run/feature/featuretest"
	"dlrover-run/internal/job"
	"dlrover-run/launcher"
	"dlrover-run/rendezvous"
)

func openTestPorts(t *testing.T, n int) (*ports, *featuretest.Node) {
	t.Helper()
	t.Setenv("TMPDIR", t.TempDir())
	j := &featuretest.Node{Of: featuretest.Job(), Offer: func([]int) {}}
	p, err := open(j, n, true)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.close()) })
	return p, j
}

func TestPortsAreHeldUntilTheWorkersStart(t *testing.T) {
	p, j := openTestPorts(t, 3)
	require.Len(t, j.Of.Node.Ports, 3)
	require.NoError(t, rendezvousTakes(j.Of.Node.Ports))
	for _, n := range j.Of.Node.Ports {
		_, err := listenOn(t, n)
		require.ErrorContains(t, err, "address already in use")
		_, err = net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", n), time.Second)
		require.ErrorContains(t, err, "connection refused", "nobody serves there")
	}
	p.start(&launcher.StartRequest{})
	for _, n := range j.Of.Node.Ports {
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
	first := j.Of.Node.Ports
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

func listenOn(t *testing.T, port int) (net.Listener, error) {
	t.Helper()
	return net.Listen("tcp", fmt.Sprintf(":%d", port))
}
