package run

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/launcher"
	"dlrover-run/launcher/policy"
	"dlrover-run/rendezvous"
)

func TestWhereALauncherListens(t *testing.T) {
	for name, c := range map[string]struct {
		s           settings
		bind, joins string
	}{
		"one node": {settings{rdzv: rdzvSettings{backend: local, host: "127.0.0.1"}}, "127.0.0.1:0", "127.0.0.1"},
		"loopback": {settings{rdzv: rdzvSettings{backend: c10d, host: "localhost", port: 29400}},
			"127.0.0.1:29400", "localhost"},
		"IPv6 loopback": {settings{rdzv: rdzvSettings{backend: c10d, host: "::1", port: 29400}}, "[::1]:29400", "::1"},
		"network, no token": {settings{rdzv: rdzvSettings{backend: c10d, host: "node0", port: 29400}},
			"127.0.0.1:29400", "127.0.0.1"},
		"network with token": {settings{rdzv: rdzvSettings{backend: c10d, host: "node0", port: 29400},
			auth: auth{token: testToken}}, ":29400", "node0"},
		"network, insecurely": {settings{rdzv: rdzvSettings{backend: c10d, host: "node0", port: 29400},
			auth: auth{insecure: true}}, ":29400", "node0"},
		"static, with a token": {settings{rdzv: rdzvSettings{backend: static, host: "node0", port: 29500},
			auth: auth{token: testToken}}, ":29500", "node0"},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, c.bind, (&endpoint{}).bindAddr(&c.s))
			require.Equal(t, c.joins, reachable(&c.s))
		})
	}
}

func TestWhoMayJoinInsteadOfServing(t *testing.T) {
	host, two := true, rendezvous.Params{Min: 1, Max: 2}
	for _, c := range []struct {
		s    settings
		want bool
	}{
		{settings{rdzv: rdzvSettings{backend: c10d}, params: two}, true},
		{settings{rdzv: rdzvSettings{backend: c10d, isHost: &host}, params: two}, false},
		{settings{rdzv: rdzvSettings{backend: c10d}, params: rendezvous.Params{Min: 1, Max: 1}}, false},
		{settings{rdzv: rdzvSettings{backend: static}, params: two}, false},
	} {
		require.Equal(t, c.want, c.s.mayBeServedByAnother())
	}
}

// opened is an endpoint of the settings on this machine.
func openedEndpoint(t *testing.T, s *settings) (*endpoint, error) {
	t.Helper()
	h := hostFacts{owns: func(host string) bool { return host == "127.0.0.1" }}
	log := slog.New(slog.DiscardHandler)
	e, err := openEndpoint(t.Context(), s, h, log, log, func(string, rendezvous.Note) {})
	if err == nil {
		t.Cleanup(e.close)
	}
	return e, err
}

func c10dSettings(port int) *settings {
	return &settings{rdzv: rdzvSettings{backend: c10d, host: "127.0.0.1", port: port}, size: size{slots: 1},
		params: rendezvous.Params{Min: 1, Max: 2}, node: rendezvous.Node{Addr: "127.0.0.1"}}
}

func healthy(t *testing.T, addr string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addr+"/healthz", nil)
	require.NoError(t, err)
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(body)
}

// The second launcher at an endpoint is a node like any other.
func TestASecondLauncherJoinsTheFirst(t *testing.T) {
	first, err := openedEndpoint(t, c10dSettings(0))
	require.NoError(t, err)
	require.NotNil(t, first.served)
	require.Equal(t, "ok\n", healthy(t, first.where))

	s := c10dSettings(first.port)
	second, err := openedEndpoint(t, s)
	require.NoError(t, err)
	require.True(t, second.second)
	require.Nil(t, second.served)
	require.NotEqual(t, first.port, second.port, "its store has a port of its own")
	require.Equal(t, first.where, second.where)
	require.Equal(t, first.where, second.Daemons())
	second.linger(time.Hour, nil) // serves nobody: returns at once
}

func TestTwoFirstNodesOfAStaticJob(t *testing.T) {
	first, err := openedEndpoint(t, c10dSettings(0))
	require.NoError(t, err)
	s := c10dSettings(first.port)
	s.rdzv.backend = static
	_, err = openedEndpoint(t, s)
	require.ErrorContains(t, err, "does another launcher here have --node-rank=0, too?")
	s.params.Min, s.params.Max = 1, 1
	_, err = openedEndpoint(t, s)
	require.ErrorContains(t, err, "; end what listens there, or give all nodes another port")
}

func TestOneNodeServesNoRendezvous(t *testing.T) {
	s := &settings{
		rdzv: rdzvSettings{backend: local, host: "127.0.0.1"}, size: size{slots: 1}, params: rendezvous.Params{Min: 1,
			Max: 1},
		node: rendezvous.Node{Addr: "10.0.0.1"},
	}
	e, err := openedEndpoint(t, s)
	require.NoError(t, err)
	require.Empty(t, e.Daemons())
	require.Equal(t, "127.0.0.1", s.node.Addr, "nobody reaches the store by another address")
	nc, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(e.Port())))
	require.NoError(t, err)
	defer nc.Close()
	_, err = io.WriteString(nc, "GET /healthz HTTP/1.0\r\n\r\n")
	require.NoError(t, err)
	answer, _ := io.ReadAll(nc)
	require.NotContains(t, string(answer), "HTTP")
}

func TestAnUnusableTopologyIsAWrongOption(t *testing.T) {
	s := c10dSettings(0)
	s.rdzv.topology = "/nowhere"
	_, err := openedEndpoint(t, s)
	var why *launcher.ReasonError
	require.True(t, errors.As(err, &why))
	require.Equal(t, policy.Usage, why.Reason)
}

// A node that may serve next may lack the topology file, which only the node that serves needs: it takes votes, too.
func TestADeputyWithoutTheTopologyFile(t *testing.T) {
	s, host := c10dSettings(29400), false
	s.rdzv.topology, s.rdzv.isHost, s.node.ID = "/nowhere", &host, "a"
	e, err := openedEndpoint(t, s)
	require.NoError(t, err)
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(s.node.Serve))
	e.failover.Told(rendezvous.Directive{Kind: job.Run, Failover: &rendezvous.Failover{
		Deputies: []rendezvous.Deputy{{ID: "a", Addr: addr}},
	}})
	require.Equal(t, "ok\n", healthy(t, addr))
}

// Without a token the endpoint of a named host is on loopback, where a new launcher will be, too.
func TestLaunchersLookForTheEndpointOnLoopback(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	s := c10dSettings(l.Addr().(*net.TCPAddr).Port)
	s.rdzv.host = "node0"
	log := slog.New(slog.DiscardHandler)
	e, err := openEndpoint(t.Context(), s, hostFacts{owns: func(string) bool { return true }}, log, log, nil)
	require.NoError(t, err)
	defer e.close()
	require.True(t, e.second)
	world := rendezvous.Directive{Kind: job.Run, EpochID: job.EpochID{Round: 1}, Failover: &rendezvous.Failover{
		Server: l.Addr().String(), Deputies: []rendezvous.Deputy{{ID: "b", Addr: "127.0.0.1:1"}},
	}}
	e.failover.Told(world)
	require.NoError(t, l.Close())
	require.False(t, e.failover.Lost(t.Context(), net.ErrClosed), "the only deputy is dead, too")
	require.Equal(t, l.Addr().String(), e.client.Addr())
}

// Some stores of logs refuse objects that name a field twice.
func TestALineOfTheLogNamesItsRunOnce(t *testing.T) {
	b := newBench(t)
	l := b.run(b.sh("exit 0", "--standalone")...)
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Contains(t, l.err.String(), `"msg":"world"`)
	for line := range strings.Lines(l.err.String()) {
		require.LessOrEqual(t, strings.Count(line, `"run_id":`), 1, line)
	}
}
