package master

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/marks"
	"dlrover-run/internal/freeports"
	"dlrover-run/internal/testkit"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/pyproto"
)

// daemonFor runs a daemon with agents until the test ends, and returns its address.
func daemonFor(t *testing.T, args ...string) string {
	t.Helper()
	port, err := freeports.ForServer()
	require.NoError(t, err)
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- app(io.Discard).RunContext(ctx, append([]string{"dlrover-master", "--listen=" + addr}, args...))
	}()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	return addr
}

func TestAgentsAreServedBesideLaunchers(t *testing.T) {
	addr := daemonFor(t, "--python-agents", "--python-run=job", "--job-uid=u1")
	for name, c := range map[string]struct {
		http bool
		uid  string
		want error
	}{
		"gRPC":              {false, "u1", nil},
		"HTTP":              {true, "u1", nil},
		"gRPC, no uid":      {false, "", pyproto.ErrJobUID},
		"HTTP, no uid":      {true, "", pyproto.ErrJobUID},
		"gRPC, another job": {false, "u2", pyproto.ErrJobUID},
		"HTTP, another job": {true, "u2", pyproto.ErrJobUID},
	} {
		t.Run(name, func(t *testing.T) {
			client := pyproto.NewClient(pyproto.ClientConfig{Addr: addr, HTTP: c.http, Caller: pyproto.Caller{JobUID: c.uid}})
			defer client.Close()
			require.EventuallyWithT(t, func(t *assert.CollectT) {
				m, err := client.Get(context.Background(), client.New("WaitingNodeNumRequest",
					pyproto.Field{Name: "rdzv_name", Value: "elastic-training"}))
				require.ErrorIs(t, err, c.want)
				require.Equal(t, c.want == nil, m != nil)
			}, 10*time.Second, 20*time.Millisecond)
		})
	}
	runs, err := api.NewClient(addr, "").Runs(t.Context())
	require.NoError(t, err)
	require.Empty(t, runs)
}

func TestWithoutAgentsNobodySpeaksTheirProtocol(t *testing.T) {
	addr := daemonFor(t)
	require.Eventually(t, func() bool {
		_, err := api.NewClient(addr, "").Runs(t.Context())
		return err == nil
	}, 10*time.Second, 20*time.Millisecond)
	_, err := pyproto.Find(t.Context(), pyproto.ClientConfig{Addr: addr})
	require.ErrorIs(t, err, pyproto.ErrNoMaster)
}

func TestAgentsNeedAUIDOrAWord(t *testing.T) {
	t.Setenv("JOB_UID", "")
	t.Setenv("DLROVER_TOKEN", "0123456789abcdef0123456789abcdef")
	ca := testkit.NewAuthority(t, "ours")
	cert, key := ca.Issue(t.TempDir(), nil, "localhost")
	for _, c := range []struct {
		want string
		args []string
	}{
		{"give --job-uid what they have in JOB_UID, or --python-agents=open", []string{"--listen=:1", "--python-agents"}},
		{"give --job-uid", []string{"--listen=127.0.0.1:1", "--insecure", "--python-agents=true"}},
		{"need no value, or open", []string{"--python-agents=all"}},
		{"give --python-agents", []string{"--python-run=x"}},
		{"agents of DLRover speak no TLS", []string{"--python-agents=open", "--tls-cert=" + cert, "--tls-key=" + key}},
		{"--tls-ca alone is for clients", []string{"--tls-ca=" + ca.CA}},
		{"give --python-agents", []string{"--python-agents=false", "--job-uid=x"}},
		{"--python-run=\"a\\nb\"", []string{"--listen=127.0.0.1:0", "--python-agents=open", "--python-run=a\nb"}},
	} {
		require.ErrorContains(t, app(io.Discard).Run(append([]string{"dlrover-master"}, c.args...)), c.want)
	}
	addr := daemonFor(t, "--python-agents=open")
	client := pyproto.NewClient(pyproto.ClientConfig{Addr: addr, Caller: pyproto.Caller{NodeType: "worker"}})
	defer client.Close()
	require.Eventually(t, func() bool {
		_, err := client.Get(t.Context(), client.New("HeartBeat"))
		return err == nil
	}, 10*time.Second, 20*time.Millisecond)
}

// The check of agents finds a fault before anybody has joined the run.
func TestWhatAnAgentSaysOfItsNodeIsKept(t *testing.T) {
	_, c, at, end := served(t, "--python-agents=open", "--python-run=job", "--data-dir="+t.TempDir())
	defer end()
	agent := pyproto.NewClient(pyproto.ClientConfig{
		Addr: strings.TrimPrefix(at, "http://"), Caller: pyproto.Caller{NodeType: "worker", NodeID: 2},
	})
	defer agent.Close()
	_, err := agent.Get(t.Context(), agent.New("JoinRendezvousRequest", pyproto.Field{Name: "node_rank", Value: 2},
		pyproto.Field{Name: "local_world_size", Value: 8}, pyproto.Field{Name: "rdzv_name", Value: "network-check"}))
	require.NoError(t, err)
	require.NoError(t, agent.Report(t.Context(), agent.New("NodeFailure",
		pyproto.Field{Name: "error_data", Value: "CheckFailure"}, pyproto.Field{Name: "restart_count", Value: -1},
		pyproto.Field{Name: "level", Value: "node_error"})))
	require.EventuallyWithT(t, func(t *assert.CollectT) {
		var known marks.Known
		require.NoError(t, c.Global(context.Background(), "nodes", nil, &known))
		require.Equal(t, []string{"worker-2"}, known.Avoid)
		require.Equal(t, "CheckFailure", known.Nodes[0].Mark.Evidence)
		line, err := c.Events(context.Background(), "job", 0)
		require.NoError(t, err)
		require.Len(t, line.Events, 2)
		require.Equal(t, []string{"node-error", "worker-2", "CheckFailure"},
			[]string{string(line.Events[0].Event), line.Events[0].Node, line.Events[0].Text})
		require.Equal(t, []string{"node-marked", "worker-2"}, []string{string(line.Events[1].Event), line.Events[1].Node})
	}, 20*time.Second, 20*time.Millisecond)
}
