package pyproto

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/pickle"
)

// master answers DLRover's own client in the dialect of the request.
type master struct {
	mu    sync.Mutex
	kv    map[string][]byte
	heard map[string]Caller
	last  map[string]*Message
	uid   string // that was named last
}

func (m *master) note(from Caller, q *Message) {
	m.heard[q.Class.Name], m.last[q.Class.Name] = from, q
}

func (m *master) Admit(_ context.Context, uid string) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.uid = uid
	return true, nil
}

func (m *master) Report(_ context.Context, from Caller, q *Message) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.note(from, q)
	if q.Class.Name == "KeyValuePair" {
		m.kv[q.Str("key")] = BytesOf(q.Get("value"))
	}
	return true, nil
}

func (m *master) Get(_ context.Context, from Caller, q *Message) (Answer, error) {
	data, err := m.get(from, q)
	return Answer{Encoded: data}, err
}

func (m *master) get(from Caller, q *Message) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.note(from, q)
	d := DialectOf(q)
	switch q.Class.Name {
	case "JoinRendezvousRequest", "WaitingNodeNumRequest", "CommWorldRequest":
		world := &Dict{Pairs: []Pair{pair(1, 8), pair(0, 4)}}
		return pickle.Encode(d.New("RendezvousState",
			Field{"world", world}, Field{"waiting_num", -1}, Field{"round", 3}, Field{"group", 0})), nil
	case "KeyValuePair":
		if n := q.Int("value"); n > 0 {
			return pickle.Encode(d.New("KeyValuePair", Field{"key", q.Str("key")}, Field{"value", n + 1})), nil
		}
		return pickle.Encode(d.New("KeyValuePair", Field{"key", q.Str("key")}, Field{"value", m.kv[q.Str("key")]})), nil
	case "KeyValuePairs":
		kvs := &Dict{}
		for _, p := range q.Dict("kvs").Pairs {
			kvs.Pairs = append(kvs.Pairs, pair(p.Key, m.kv[p.Key.(string)]))
		}
		return pickle.Encode(d.New("KeyValuePairs", Field{"kvs", kvs})), nil
	case "HeartBeat":
		action := d.New("DiagnosisAction", Field{"action_cls", "NoAction"}, Field{"action_content", "{}"})
		return pickle.Encode(d.New("HeartbeatResponse", Field{"action", action})), nil
	case "RunningNodesRequest":
		node := d.New("NodeMeta", Field{"type", "worker"}, Field{"id", 7})
		return pickle.Encode(d.New("RunningNodes", Field{"nodes", &List{Items: []any{node, node}}})), nil
	case "ElasticRunConfigRequest":
		configs := &Dict{Pairs: []Pair{pair("network_check", "true")}}
		return pickle.Encode(d.New("ElasticRunConfig", Field{"configs", configs})), nil
	}
	return nil, errors.New("a message that nobody sends")
}

func TestDLRoverAsClient(t *testing.T) {
	packages(t)
	script, err := filepath.Abs("testdata/client.py")
	require.NoError(t, err)
	for _, c := range []struct{ version, transport string }{
		{"0.6.1", "grpc"}, {"0.6.1", "http"}, {"0.5.1", "grpc"}, {"0.5.1", "http"}, {"0.4.0", "grpc"},
	} {
		t.Run(c.version+" "+c.transport, func(t *testing.T) {
			m := &master{
				kv: map[string][]byte{"big": make([]byte, 8<<20)}, heard: map[string]Caller{}, last: map[string]*Message{},
			}
			cmd := python(t, c.version, script)
			cmd.Env = append(cmd.Env, "DLROVER_MASTER_ADDR="+serve(t, Handler(m)), "NODE_ID=3", "NODE_TYPE=worker",
				"JOB_UID=uid", "DLROVER_MASTER_SERVICE_TYPE="+c.transport, "NODE_IP=10.0.0.9")
			text, err := cmd.CombinedOutput()
			require.NoError(t, err, string(text))
			_, answer, ok := strings.Cut(string(text), "ANSWER ")
			require.True(t, ok, string(text))
			var got map[string]any
			require.NoError(t, json.NewDecoder(strings.NewReader(answer)).Decode(&got))
			require.Equal(t, []any{3.0, 0.0, []any{[]any{1.0, 8.0}, []any{0.0, 4.0}}}, got["world"])
			require.Equal(t, 3.0, got["round"])
			require.Equal(t, -1.0, got["waiting"])
			require.Equal(t, true, got["params"])
			require.Equal(t, "00ff", got["get"])
			require.Equal(t, 2.0, got["nodes"])
			require.Equal(t, map[string]any{"network_check": "true"}, got["config"])
			require.EqualValues(t, 8<<20, got["big"])
			require.Equal(t, map[bool]string{true: "uid"}[c.version == "0.6.1"], m.uid)
			want := Caller{NodeID: 3, NodeType: "worker"}
			if c.version != "0.4.0" {
				require.Equal(t, 6.0, got["add"])
				require.Equal(t, map[string]any{"größe": "00ff"}, got["multi"])
				name := map[string]string{"grpc": "GrpcMasterClient", "http": "HttpMasterClient"}[c.transport]
				require.Equal(t, name, got["client"])
			}
			for _, name := range []string{"JoinRendezvousRequest", "RendezvousParams", "NodeFailure", "ResourceStats"} {
				require.Equal(t, want, m.heard[name], name)
			}
			require.Equal(t, "no such file �", m.last["NodeFailure"].Str("error_data"))
			require.Equal(t, "10.0.0.9", m.last["JoinRendezvousRequest"].Str("node_ip"))
			require.Equal(t, 0.5, m.last["ResourceStats"].Float("cpu"))
		})
	}
}

// startMaster starts the local master of a version for two nodes, and returns its address when it listens.
func startMaster(t *testing.T, version string, args ...string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := l.Addr().String()
	require.NoError(t, l.Close())
	_, port, _ := net.SplitHostPort(addr)
	cmd := python(t, version, append([]string{"-m", "dlrover.python.master.main", "--platform", "local", "--port", port,
		"--node_num", "2", "--job_name", "x"}, args...)...)
	var text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &text, &text
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { stop(cmd) })
	for range 600 {
		nc, err := net.DialTimeout("tcp", addr, time.Second)
		if err == nil {
			_ = nc.Close()
			return addr
		}
		time.Sleep(100 * time.Millisecond)
	}
	stop(cmd)
	require.Fail(t, "the master does not listen", text.String())
	return ""
}

func stop(cmd *exec.Cmd) {
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // its own group
	_ = cmd.Wait()
}

func TestDLRoverAsMaster(t *testing.T) {
	packages(t)
	for _, v := range []struct {
		version string
		speak   Dialect
		http    bool
	}{{"0.6.1", Comm, false}, {"0.6.1", Comm, true}, {"0.5.1", Comm, false}, {"0.4.0", Grpc, false}} {
		t.Run(fmt.Sprintf("%s http %v", v.version, v.http), func(t *testing.T) {
			var args []string
			if v.http {
				args = []string{"--service_type", "http"}
			}
			addr := startMaster(t, v.version, args...)
			var dialed atomic.Int64
			clients := make([]*Client, 2)
			for i := range clients {
				clients[i] = client(t, ClientConfig{Addr: addr, HTTP: v.http, Speak: v.speak,
					Caller: Caller{i, "worker", "uid"}, Dialed: func(net.Addr) { dialed.Add(1) }})
			}
			useMaster(t, clients, v.speak)
			require.EqualValues(t, len(clients), dialed.Load(), "connections are used again")
			other := client(t, ClientConfig{Addr: addr, HTTP: !v.http, Speak: v.speak})
			_, err := other.Get(soon(t), other.New("RunningNodesRequest"))
			require.ErrorIs(t, err, ErrNoMaster, "the other transport")
		})
	}
}

func useMaster(t *testing.T, clients []*Client, speak Dialect) {
	t.Helper()
	get := func(c *Client, name string, fields ...Field) *Message {
		t.Helper()
		m, err := c.Get(soon(t), c.New(name, fields...))
		require.NoError(t, err)
		return m
	}
	const run = "elastic-training"
	c := clients[0]
	require.NoError(t, c.Report(soon(t), c.New("RendezvousParams", Field{"min_nodes", 2}, Field{"max_nodes", 2},
		Field{"waiting_timeout", 30}, Field{"node_unit", 1}, Field{"join_timeout", 600})))
	for i, c := range clients {
		state := get(c, "JoinRendezvousRequest", Field{"node_id", i}, Field{"node_rank", i}, Field{"local_world_size", 8},
			Field{"rdzv_name", run}, Field{"node_ip", "127.0.0.1"})
		require.Equal(t, "RendezvousState", state.Class.Name)
		require.Equal(t, speak, DialectOf(state))
	}
	require.Equal(t, 2, get(c, "WaitingNodeNumRequest", Field{"rdzv_name", run}).Int("waiting_num"))
	for i, c := range clients {
		state := get(c, "CommWorldRequest", Field{"node_id", i}, Field{"rdzv_name", run})
		require.Equal(t, []Pair{pair(int64(0), int64(8)), pair(int64(1), int64(8))}, state.Dict("world").Pairs)
	}
	require.Zero(t, get(c, "WaitingNodeNumRequest", Field{"rdzv_name", run}).Int("waiting_num"))

	value := bytes.Repeat([]byte("\x00\xff"), 1<<20)
	set := c.New("KeyValuePair", Field{"key", "größe"}, Field{"value", value}, Field{"op", "set"})
	require.NoError(t, c.Report(soon(t), set))
	got := get(clients[1], "KeyValuePair", Field{"key", "größe"}, Field{"value", []byte{}}, Field{"op", "get"})
	require.True(t, bytes.Equal(value, BytesOf(got.Get("value"))))
	if speak == Comm {
		for i := range 3 {
			got = get(c, "KeyValuePair", Field{"key", "n"}, Field{"value", 5}, Field{"op", "add"})
			require.Equal(t, 5*(i+1), got.Int("value"))
		}
	}
	action := get(c, "HeartBeat", Field{"timestamp", time.Now().Unix()}).Object("action")
	require.Equal(t, "NoAction", action.Str("action_cls"))
	unknown, err := c.Get(soon(t), c.New("NoSuchMessage"))
	require.NoError(t, err)
	require.Nil(t, unknown)
	require.ErrorIs(t, c.Report(soon(t), c.New("NoSuchMessage")), errRefused)
}
