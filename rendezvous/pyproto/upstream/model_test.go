package upstream

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/job"
	"dlrover-run/internal/pickle"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/pyproto"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds what a test waits for.
const patience = 20 * time.Second

// model is what matters of DLRover's master, as its rendezvous manager and its key-value store have it.
type model struct {
	t    *testing.T
	addr string
	srv  *http.Server
	done chan struct{}
	v04  bool          // it speaks the dialect of 0.4 only
	slow chan struct{} // closed when failures are answered; nil: at once

	mu       sync.Mutex
	min, max int
	lastCall time.Duration
	called   time.Time   // the last join
	waits    map[int]int // slots by rank
	latest   []int
	world    []pyproto.Pair
	round    int
	kv       map[string]any
	stopping bool
	check    string                     // the status of the pre-check
	forgets  bool                       // it loses what is counted, as 0.4 can
	actions  map[int][]*pyproto.Message // by node ID
	heard    []said
	checks   *theirCheck // nil: it knows no checks
}

// said is a message, and who has sent it.
type said struct {
	id int
	*pyproto.Message
}

func newModel(t *testing.T) *model {
	m := &model{t: t, addr: "127.0.0.1:0", actions: map[int][]*pyproto.Message{}}
	m.start()
	t.Cleanup(m.stop)
	return m
}

// start begins without memory, at the address of before.
func (m *model) start() {
	m.t.Helper()
	m.mu.Lock()
	m.min, m.max, m.lastCall, m.round = 0, 0, 30*time.Second, 0
	m.waits, m.kv, m.check = map[int]int{}, map[string]any{}, "DISABLED"
	m.world, m.latest = nil, nil
	if m.checks != nil {
		m.checks.forget()
	}
	m.mu.Unlock()
	l, err := net.Listen("tcp", m.addr)
	require.NoError(m.t, err)
	m.addr = l.Addr().String()
	m.srv = &http.Server{Handler: pyproto.Handler(m), Protocols: new(http.Protocols)}
	m.srv.Protocols.SetHTTP1(true)
	m.srv.Protocols.SetUnencryptedHTTP2(true)
	m.done = make(chan struct{})
	go func(srv *http.Server, done chan struct{}) { _ = srv.Serve(l); close(done) }(m.srv, m.done)
}

func (m *model) stop() {
	_ = m.srv.Close()
	<-m.done
}

func (m *model) restart() {
	m.stop()
	m.start()
}

func (*model) Admit(context.Context, string) (bool, error) { return true, nil }

func (m *model) Get(_ context.Context, from pyproto.Caller, q *pyproto.Message) (a pyproto.Answer, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.checks.lose(from.NodeID, q.Class.Name); err != nil {
		return a, err
	}
	a.Encoded, err = m.get(from, q)
	if err == nil {
		err = m.checks.lose(from.NodeID, "answer to "+q.Class.Name)
	}
	return a, err
}

func (m *model) get(from pyproto.Caller, q *pyproto.Message) ([]byte, error) {
	d := pyproto.DialectOf(q)
	if m.v04 && d == pyproto.Comm {
		return nil, nil
	}
	m.heard = append(m.heard, said{from.NodeID, q})
	if answer, ok := m.checks.get(q); ok {
		return answer, nil
	}
	field := func(name string, value any) pyproto.Field { return pyproto.Field{Name: name, Value: value} }
	switch q.Class.Name {
	case "JoinRendezvousRequest":
		m.join(q.Int("node_rank"), q.Int("local_world_size"))
		return pickle.Encode(d.New("RendezvousState", field("world", &pyproto.Dict{}), field("round", m.round))), nil
	case "WaitingNodeNumRequest":
		return pickle.Encode(d.New("RendezvousState", field("world", &pyproto.Dict{}),
			field("waiting_num", m.waiting()))), nil
	case "CommWorldRequest":
		m.seal()
		return pickle.Encode(d.New("RendezvousState", field("world", &pyproto.Dict{Pairs: slices.Clone(m.world)}),
			field("round", m.round), field("group", 0))), nil
	case "KeyValuePair":
		return pickle.Encode(d.New("KeyValuePair", field("key", q.Str("key")), field("value", m.lookup(q)))), nil
	case "PreCheckRequest":
		return pickle.Encode(d.New("PreCheckResponse", field("status", m.check), field("reason", ""))), nil
	case "ElasticRunConfigRequest":
		return pickle.Encode(d.New("ElasticRunConfig", field("configs", &pyproto.Dict{}))), nil
	case "HeartBeat":
		return pickle.Encode(d.New("HeartbeatResponse", field("action", m.action(from.NodeID, d)))), nil
	}
	return nil, nil
}

func (m *model) join(rank, slots int) {
	if _, waits := m.waits[rank]; waits {
		return
	}
	m.waits[rank], m.world, m.called = slots, nil, time.Now()
}

func (m *model) waiting() int {
	if m.stopping {
		return -1
	}
	return len(m.waits)
}

func (m *model) seal() {
	n := len(m.waits)
	if n == 0 || n != m.max && (n < m.min || time.Since(m.called) < m.lastCall) {
		return
	}
	m.world, m.latest = nil, slices.Sorted(maps.Keys(m.waits))
	for _, rank := range m.latest {
		m.world = append(m.world, pyproto.Pair{Key: rank, Value: m.waits[rank]})
	}
	m.round++
	m.waits = map[int]int{}
}

func (m *model) lookup(q *pyproto.Message) any {
	key := q.Str("key")
	if q.Str("op") != "add" {
		if v, ok := m.kv[key]; ok {
			return v
		}
		return []byte{}
	}
	n := 0
	if text, ok := m.kv[key]; ok {
		n, _ = strconv.Atoi(string(pyproto.BytesOf(text)))
	}
	n += q.Int("value")
	if !m.forgets {
		m.kv[key] = []byte(strconv.Itoa(n))
	}
	return n
}

func (m *model) action(id int, d pyproto.Dialect) *pyproto.Message {
	if next := m.actions[id]; len(next) > 0 {
		m.actions[id] = next[1:]
		return next[0]
	}
	return d.New("DiagnosisAction", pyproto.Field{Name: "action_cls", Value: "NoAction"},
		pyproto.Field{Name: "action_content", Value: "{}"})
}

// ask has the next heartbeat of a node answered with an action.
func (m *model) ask(id int, class, content string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.actions[id] = append(m.actions[id], pyproto.Comm.New("DiagnosisAction",
		pyproto.Field{Name: "action_cls", Value: class}, pyproto.Field{Name: "action_content", Value: content}))
}

func (m *model) Report(_ context.Context, from pyproto.Caller, q *pyproto.Message) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.checks.lose(from.NodeID, q.Class.Name); err != nil {
		return false, err
	}
	m.heard = append(m.heard, said{from.NodeID, q})
	if q.Class.Name == "NodeFailure" && m.slow != nil {
		m.mu.Unlock()
		<-m.slow
		m.mu.Lock()
	}
	switch q.Class.Name {
	case "NodeEvent":
		m.checks.report(q)
	case "RendezvousParams":
		if m.max == 0 {
			m.min, m.max = q.Int("min_nodes"), q.Int("max_nodes")
			m.lastCall = time.Duration(q.Int("waiting_timeout")) * time.Second
		}
	case "KeyValuePair":
		m.kv[q.Str("key")] = q.Get("value")
	}
	return true, m.checks.lose(from.NodeID, "answer to "+q.Class.Name)
}

// key is what is kept at a key of the world of this round.
func (m *model) key(name string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return string(pyproto.BytesOf(m.kv[m.path(name)]))
}

// nextKey is the same of the next round.
func (m *model) nextKey(name string) string {
	m.mu.Lock()
	m.round++
	defer func() { m.round--; m.mu.Unlock() }()
	return string(pyproto.BytesOf(m.kv[m.path(name)]))
}

func (m *model) path(name string) string {
	return fmt.Sprintf("elastic-training/torch.rendezvous.elastic-training.%d.0/%s", m.round, name)
}

func (m *model) put(name, value string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.kv[m.path(name)] = []byte(value)
}

// told are the messages with one of the names, between commas, that a node has sent, in order.
func (m *model) told(names string, id int) (all []*pyproto.Message) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.heard {
		if s.id == id && slices.Contains(strings.Split(names, ","), s.Class.Name) {
			all = append(all, s.Message)
		}
	}
	return all
}

// events are the kinds of what a node has told of itself.
func (m *model) events(id int) (kinds []string) {
	for _, e := range m.told("NodeEvent", id) {
		kinds = append(kinds, e.Str("event_type"))
	}
	return kinds
}

// count is how many nodes wait.
func (m *model) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.waits)
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	require.Eventually(t, f, patience, time.Millisecond, what)
}

// node is a launcher: it does what the directives want, without workers.
type node struct {
	*Service
	t      *testing.T
	rank   int
	slots  int
	params rendezvous.Params
	seen   rendezvous.Directive
}

// two are the rules of most tests.
var two = rendezvous.Params{Min: 2, Max: 2, MaxRestarts: 1}

func (m *model) node(rank, id int, p rendezvous.Params) *node {
	m.t.Helper()
	cfg := pyproto.ClientConfig{Addr: m.addr, Caller: pyproto.Caller{NodeID: id, NodeType: "worker"}}
	if m.v04 {
		cfg.Speak = pyproto.Grpc
	}
	n := &node{t: m.t, rank: rank, slots: rank + 1, params: p,
		Service: New(Config{Client: pyproto.NewClient(cfg), Rank: rank,
			Follows: func(f job.Failure) bool { return f.Text == gone }})}
	n.every.heartbeat, n.every.ask, n.every.show = 20*time.Millisecond, 100*time.Millisecond, 50*time.Millisecond
	m.t.Cleanup(n.Close)
	return n
}

func (n *node) join() *node {
	n.t.Helper()
	require.NoError(n.t, n.tryJoin())
	return n
}

func (n *node) tryJoin() error {
	return n.Join(n.t.Context(), "job", rendezvous.Join{Params: n.params, Node: rendezvous.Node{ID: "x", Rank: n.rank,
		Name: fmt.Sprintf("n%d", n.rank), Addr: fmt.Sprintf("10.0.0.%d", n.rank), Slots: n.slots}})
}

// next is the next directive that was not seen yet, or nil within the time.
func (n *node) next(within time.Duration) *rendezvous.Directive {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), within)
	defer cancel()
	news, err := n.Watch(ctx, "job", "x", api.Cursor{Directive: n.seen.Seq})
	if err != nil {
		require.ErrorIs(n.t, err, context.DeadlineExceeded)
		return nil
	}
	n.seen = news.Directive
	return &n.seen
}

// until follows the directives up to one of a kind.
func (n *node) until(kind job.Kind) rendezvous.Directive {
	n.t.Helper()
	for {
		d := n.next(patience)
		require.NotNil(n.t, d, "node %d is not told to %s", n.rank, kind)
		if d.Kind == kind {
			return *d
		}
		n.obeys(kind)
	}
}

// obeys does what the newest directive wants, which is no end unless the test wants that.
func (n *node) obeys(want job.Kind) {
	n.t.Helper()
	switch n.seen.Kind {
	case job.Lead:
		n.ready()
	case job.Stop:
		n.join()
	case job.Wait:
	default:
		require.Equal(n.t, want, n.seen.Kind, "node %d: %+v", n.rank, n.seen)
	}
}

// run has all nodes follow their directives until the workers of all run.
func run(all ...*node) {
	for end := time.Now().Add(patience); ; {
		running := 0
		for _, n := range all {
			n.t.Helper()
			require.True(n.t, time.Now().Before(end), "node %d: %+v", n.rank, n.seen)
			if n.next(10*time.Millisecond) != nil {
				n.obeys(job.Run)
			}
			if n.seen.Kind == job.Run {
				running++
			}
		}
		if running == len(all) {
			return
		}
	}
}

// quiet wants no news for a while.
func (n *node) quiet() {
	n.t.Helper()
	d := n.next(time.Second)
	require.Nil(n.t, d)
}

func (n *node) ready() {
	n.t.Helper()
	require.NoError(n.t, n.Report(n.t.Context(), "job",
		rendezvous.Ready{EpochID: n.seen.EpochID, Addr: fmt.Sprintf("10.0.0.%d", n.rank), Port: 20000 + n.rank}))
}

func (n *node) fails(d rendezvous.Decision) { n.failsBy(d, "it broke") }

// gone is how workers fail whose peer has.
const gone = "the peer is gone"

func (n *node) failsBy(d rendezvous.Decision, text string) {
	n.t.Helper()
	require.NoError(n.t, n.Report(n.t.Context(), "job", n.failing(d, text)))
}

func (n *node) failing(d rendezvous.Decision, text string) rendezvous.Failing {
	return rendezvous.Failing{EpochID: n.seen.EpochID, Decision: d,
		Failures: []job.Failure{{Rank: n.rank, Text: text, At: time.Now(),
			Detail: json.RawMessage(`{"local_rank":0,"exit_code":3,"message":"why"}`)}}}
}

func (n *node) succeeds() {
	n.t.Helper()
	require.NoError(n.t, n.Report(n.t.Context(), "job", rendezvous.Success{EpochID: n.seen.EpochID}))
}

func (n *node) leave() job.Evidence {
	n.t.Helper()
	e, err := n.Leave(n.t.Context(), "job", rendezvous.Leave{})
	require.NoError(n.t, err)
	return e
}

// pair is a world of two nodes that run.
func (m *model) pair() (a, b *node) {
	m.t.Helper()
	a, b = m.node(0, 0, two).join(), m.node(1, 1, two).join()
	run(a, b)
	return a, b
}
