package upstream

import (
	"context"
	"encoding/json"
	"math"
	"sync"
	"time"

	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/pyproto"
)

// master calls the procedures of DLRover's master for one node.
type master struct {
	client *pyproto.Client
	rank   int // NODE_RANK
	// tested: nodes test each other before they train, and so come to the check first.
	tested bool
	kv     kvStore

	mu   sync.Mutex
	node rendezvous.Node // itself
}

func newMaster(cfg Config) *master {
	return &master{client: cfg.Client, rank: cfg.Rank, tested: cfg.Check.Test != nil, kv: kvStore{cfg.Client, cfg.Log}}
}

// introduce sends the rules of the run to the master. The first node's count, until the master is started again:
// without rules it would make a world of all nodes that join within 30 s.
func (m *master) introduce(ctx context.Context, p rendezvous.Params) error {
	return m.client.Report(ctx, m.client.New("RendezvousParams",
		pyproto.Field{Name: "min_nodes", Value: p.Min}, pyproto.Field{Name: "max_nodes", Value: p.Max},
		pyproto.Field{Name: "waiting_timeout", Value: seconds(p.LastCall)},
		pyproto.Field{Name: "node_unit", Value: p.Unit},
		pyproto.Field{Name: "join_timeout", Value: seconds(p.JoinTimeout)}))
}

// seconds rounds up: the master counts whole ones, and replaces a join timeout of 0 by its own.
func seconds(d time.Duration) int { return int(math.Ceil(d.Seconds())) }

// become sets the node that calls.
func (m *master) become(n rendezvous.Node) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.node = n
}

func (m *master) self() rendezvous.Node {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.node
}

// join announces that this node wants to be in the next world of a rendezvous, and returns the number of the last one.
func (m *master) join(ctx context.Context, name string) (round int, err error) {
	n := m.self()
	id := m.client.Caller().NodeID
	if m.client.Old() {
		id = m.rank // to 0.3 there was no node_rank
	}
	fields := []pyproto.Field{
		{Name: "node_id", Value: id}, {Name: "local_world_size", Value: n.Slots},
		{Name: "rdzv_name", Value: name}, {Name: "node_rank", Value: m.rank}, {Name: "node_ip", Value: n.IP},
	}
	answer, err := m.client.Get(ctx, m.client.New("JoinRendezvousRequest", fields...))
	return answer.Int("round"), err
}

func (m *master) request(kind, name string) *pyproto.Message {
	return m.client.New(kind, pyproto.Field{Name: "node_id", Value: m.rank},
		pyproto.Field{Name: "local_world_size", Value: m.self().Slots}, pyproto.Field{Name: "rdzv_name", Value: name})
}

// world asks for the world of a rendezvous; mine: this node is in it.
func (m *master) world(ctx context.Context, name string) (w world, mine bool, err error) {
	answer, err := m.client.Get(ctx, m.request("CommWorldRequest", name))
	if err != nil {
		return w, false, err
	}
	return readWorld(answer, m.rank)
}

// waiting is the master's count of nodes that want to be in the next world; -1: the job is ending. Where nodes are
// checked they come to the check first.
func (m *master) waiting(ctx context.Context) (int, error) {
	n, err := m.waitingFor(ctx, training)
	if err != nil || n != 0 || !m.tested {
		return n, err
	}
	return m.waitingFor(ctx, checking)
}

func (m *master) waitingFor(ctx context.Context, name string) (int, error) {
	answer, err := m.client.Get(ctx, m.request("WaitingNodeNumRequest", name))
	return answer.Int("waiting_num"), err
}

// heartbeat returns the action that the master asks for. To 0.3 a heartbeat was a report, and had no answer.
func (m *master) heartbeat(ctx context.Context) (action *pyproto.Message, err error) {
	beat := m.client.New("HeartBeat", pyproto.Field{Name: "timestamp", Value: int(time.Now().Unix())})
	if m.client.Old() {
		return nil, m.client.Report(ctx, beat)
	}
	answer, err := m.client.Get(ctx, beat)
	return answer.Object("action"), err
}

// failure reports one to the master.
func (m *master) failure(ctx context.Context, level, data string, restarts int) error {
	return m.client.Report(ctx, m.client.New("NodeFailure", pyproto.Field{Name: "error_data", Value: data},
		pyproto.Field{Name: "restart_count", Value: restarts}, pyproto.Field{Name: "level", Value: level}))
}

// event reports a change of this node's state to the master.
func (m *master) event(ctx context.Context, kind string) error { return m.eventTook(ctx, kind, 0) }

// eventTook is event for something that has taken seconds.
func (m *master) eventTook(ctx context.Context, kind string, seconds float64) error {
	c, n := m.client, m.self()
	meta := c.New("NodeMeta", pyproto.Field{Name: "type", Value: c.Caller().NodeType},
		pyproto.Field{Name: "addr", Value: n.Addr}, pyproto.Field{Name: "memory", Value: 0},
		pyproto.Field{Name: "cpu", Value: 0.0}, pyproto.Field{Name: "gpu", Value: 0},
		pyproto.Field{Name: "gpu_type", Value: ""}, pyproto.Field{Name: "id", Value: c.Caller().NodeID},
		pyproto.Field{Name: "rank", Value: m.rank}, pyproto.Field{Name: "status", Value: ""})
	return c.Report(ctx, c.New("NodeEvent", pyproto.Field{Name: "event_type", Value: kind},
		pyproto.Field{Name: "event_message", Value: ""},
		pyproto.Field{Name: "event_time", Value: float64(time.Now().Unix())},
		pyproto.Field{Name: "event_elapsed_time", Value: seconds}, pyproto.Field{Name: "node", Value: meta}))
}

// timedOut reports to the master that a rendezvous has formed no world.
func (m *master) timedOut(ctx context.Context, name, text string, after time.Duration) error {
	data, err := json.Marshal(map[string]any{"rdzv_name": name, "node_rank": m.rank, "err_type": joinTimeout,
		"err_message": text, "elapsed_time": seconds(after)})
	if err != nil {
		return err
	}
	return m.failure(ctx, rdzvError, string(data), 0)
}
