// Package agents lets the agents of DLRover, which are written in Python, take part in a run of our rendezvous: every
// agent is a node of the Hub. The last directive of its node answers its polls, and its reports become events of the
// Round. So agents and our launchers can be in one world.
//
// Agents lack some features of our launchers: they are not informed why they wait, they are not held, drained or given
// commands, and each counts its restarts by itself.
//
// Goroutines: one for every present agent, and one that looks for silent agents, until Close.
package agents

import (
	"cmp"
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"sync"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/pickle"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/pyproto"
)

// DLRover's names of its two rendezvous.
const (
	training = "elastic-training"
	checking = "network-check"
)

// silence is how long an agent may send nothing: three of its heartbeats.
const silence = 45 * time.Second

// Config describes the one run that all agents belong to.
type Config struct {
	Service api.Service
	Run     string
	// JobUID must come with every request. Open serves those that name none, too, and any without a JobUID.
	JobUID string
	Open   bool
	Log    *slog.Logger
	// Trust, if it is not nil, hears of requests that name the JobUID.
	Trust func(ctx context.Context)
	// Note adds a line to the run's timeline, which may begin with it; it may be nil. Machine is that of the node, "" if
	// it is unknown.
	Note func(event job.Event, node, machine, text string)
	// Machine returns an agent's machine by its NODE_TYPE, NODE_ID and NODE_IP ("" if it sends none): agents do not report
	// it themselves. The agent waits for the answer, "" for unknown; nil: all are unknown.
	Machine func(ctx context.Context, kind string, id int, ip string) string
	// Others is the number of nodes of the run that are no agents, and do not take part in the agents' checks; nil: there
	// are none.
	Others func() int
}

// others are the nodes of the run that no agent has; never ask while a Host is locked.
func (c *Config) others() int {
	if c.Others == nil {
		return 0
	}
	return max(0, c.Others())
}

// report sends an event to the run. A node that the run does not know learns that from its next poll.
func (c *Config) report(ctx context.Context, ev rendezvous.Event) error {
	err := c.Service.Report(ctx, c.Run, ev)
	if errors.Is(err, rendezvous.ErrUnknownNode) {
		return nil
	}
	return err
}

// sealed reports whether the run has had a world, by which it is known whether there are enough nodes.
func (c *Config) sealed(ctx context.Context) bool {
	world, err := c.Service.World(ctx, c.Run)
	return err == nil && len(world) > 0
}

// Host implements pyproto.Backend. Close ends it.
type Host struct {
	cfg    Config
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	joins chan struct{} // joins of training come one after the other

	mu     sync.Mutex // never held while the Service is called
	reg    registry
	worlds worlds
	store  store
	check  check
	ports  ports
	said   onceLog
	begun  bool // the search for silent agents runs
}

// caller is an agent's identity, which is part of each of its requests.
type caller struct {
	kind string
	id   int
}

// New returns a Host without agents.
func New(cfg Config) *Host {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Note == nil {
		cfg.Note = func(job.Event, string, string, string) {}
	}
	if cfg.Machine == nil {
		cfg.Machine = func(context.Context, string, int, string) string { return "" }
	}
	h := &Host{
		joins: make(chan struct{}, 1),
		cfg:   cfg, reg: newRegistry(), ports: ports{offers: map[caller]offer{}}, check: newCheck(),
		worlds: newWorlds(), store: newStore(),
	}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	return h
}

// Close ends the work for the agents. Their nodes stay in the run.
func (h *Host) Close() {
	h.mu.Lock()
	h.cancel() // nothing is started from here on
	h.mu.Unlock()
	h.wg.Wait()
}

// Nodes is how many agents are nodes of the run.
func (h *Host) Nodes() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.reg.agents)
}

// Admit implements pyproto.Backend. Agents of DLRover before 0.6 name no job.
func (h *Host) Admit(ctx context.Context, uid string) (known bool, err error) {
	switch {
	case h.cfg.JobUID != "" && subtle.ConstantTimeCompare([]byte(uid), []byte(h.cfg.JobUID)) == 1:
		if h.cfg.Trust != nil {
			h.cfg.Trust(ctx)
		}
		return true, nil
	case h.cfg.Open && (uid == "" || h.cfg.JobUID == ""):
		return false, nil
	case uid == "":
		if h.said.first("without job_uid") {
			h.cfg.Log.Warn("a caller is refused: " + errNoUID.Error())
		}
		return false, errNoUID
	}
	return false, pyproto.ErrJobUID
}

var errNoUID = fmt.Errorf("%w: the request names none; set JOB_UID of the agents to the master's --job-uid, or serve "+
	"agents that name none, as those of DLRover before 0.6, with --python-agents=open", pyproto.ErrJobUID)

// Get implements pyproto.Backend.
func (h *Host) Get(ctx context.Context, from pyproto.Caller, m *pyproto.Message) (a pyproto.Answer, err error) {
	who := h.heard(from)
	switch name := m.Class.Name; {
	case name == "WaitingNodeNumRequest":
		a.Encoded = numbered(pyproto.DialectOf(m), h.waiting(who, m.Str("rdzv_name")))
	case name == "CommWorldRequest" && m.Str("rdzv_name") == training:
		a.Encoded, err = h.commWorld(ctx, who, pyproto.DialectOf(m))
	default:
		a.Message, err = h.answer(ctx, who, m)
	}
	return a, err
}

// answer makes the answer to an agent's request, nil for one that is not supported.
func (h *Host) answer(ctx context.Context, who caller, m *pyproto.Message) (*pyproto.Message, error) {
	d := pyproto.DialectOf(m)
	switch m.Class.Name {
	case "JoinRendezvousRequest":
		return h.join(ctx, who, m)
	case "CommWorldRequest":
		return h.checkWorld(d, who, m.Int("node_id")), nil
	case "KeyValuePair":
		return h.pair(ctx, who, m), nil
	case "KeyValuePairs":
		return h.pairs(m), nil
	case "HeartBeat":
		return d.New("HeartbeatResponse", pyproto.Field{Name: "action", Value: d.New("DiagnosisAction",
			pyproto.Field{Name: "action_cls", Value: "NoAction"}, pyproto.Field{Name: "action_content", Value: "{}"})}), nil
	case "PreCheckRequest":
		return d.New("PreCheckResponse", pyproto.Field{Name: "status", Value: "PASS"},
			pyproto.Field{Name: "reason", Value: ""}), nil
	case "ElasticRunConfigRequest":
		return d.New("ElasticRunConfig", pyproto.Field{Name: "configs", Value: &pyproto.Dict{}}), nil
	case "NetworkReadyRequest":
		return h.findings(d, (*check).faults), nil
	case "StragglerExistRequest":
		return h.findings(d, (*check).stragglers), nil
	case "RunningNodesRequest":
		return h.running(d), nil
	case "SyncTrainingPort":
		return h.syncPort(who, m), nil
	case "ParallelConfigRequest", "CheckHardwareResetRequest":
		return parallel(d), nil
	}
	h.cannot(m)
	return nil, nil
}

// cannot logs an unsupported request once.
func (h *Host) cannot(m *pyproto.Message) {
	name := fmt.Sprintf("%.100s", m.Class.Name)
	if h.said.first(chosen + name) {
		h.cfg.Log.Warn("agents ask for what only DLRover's own master has", "message", name)
	}
}

// onceLog knows the reasons that have been logged.
type onceLog struct {
	mu   sync.Mutex
	said map[string]bool
}

// chosen begins a reason with a name that a caller chose: there may be any number of them.
const chosen = "message "

// first reports whether a reason is to be logged now.
func (o *onceLog) first(reason string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.said[reason] || strings.HasPrefix(reason, chosen) && len(o.said) >= 64 {
		return false
	}
	if o.said == nil {
		o.said = map[string]bool{}
	}
	o.said[reason] = true
	return true
}

// numbered is an answer with a number of waiting nodes and without a world. All agents poll it all the time, so that
// the answers are made once. They are read-only.
func numbered(d pyproto.Dialect, waiting int) []byte {
	if b, ok := common[numberKey{d, waiting}]; ok {
		return b
	}
	return pickle.Encode(rendezvousState(d, &pyproto.Dict{}, waiting, 0, 0))
}

type numberKey struct {
	dialect pyproto.Dialect
	waiting int
}

var common = func() map[numberKey][]byte {
	m := map[numberKey][]byte{}
	for _, d := range pyproto.Dialects() {
		for n := -1; n <= 1; n++ {
			m[numberKey{d, n}] = pickle.Encode(rendezvousState(d, &pyproto.Dict{}, n, 0, 0))
		}
	}
	return m
}()

func rendezvousState(d pyproto.Dialect, world *pyproto.Dict, waiting, round, group int) *pyproto.Message {
	return d.New("RendezvousState", pyproto.Field{Name: "world", Value: world},
		pyproto.Field{Name: "waiting_num", Value: waiting}, pyproto.Field{Name: "round", Value: round},
		pyproto.Field{Name: "group", Value: group})
}

// parallel: nothing is tuned, and agents shall not restart for new hardware.
func parallel(d pyproto.Dialect) *pyproto.Message {
	loader := d.New("DataLoaderConfig", pyproto.Field{Name: "version", Value: 0},
		pyproto.Field{Name: "dataloader_name", Value: ""}, pyproto.Field{Name: "last_batch_size", Value: 0},
		pyproto.Field{Name: "batch_size", Value: 0}, pyproto.Field{Name: "num_workers", Value: 0},
		pyproto.Field{Name: "pin_memory", Value: false})
	optimizer := d.New("OptimizerConfig", pyproto.Field{Name: "version", Value: 0},
		pyproto.Field{Name: "optimizer_name", Value: ""}, pyproto.Field{Name: "learning_rate", Value: 0.0},
		pyproto.Field{Name: "weight_decay", Value: 0.0})
	return d.New("ParallelConfig", pyproto.Field{Name: "dataloader", Value: loader},
		pyproto.Field{Name: "optimizer", Value: optimizer}, pyproto.Field{Name: "restart", Value: false})
}

// Report implements pyproto.Backend.
func (h *Host) Report(ctx context.Context, from pyproto.Caller, m *pyproto.Message) (bool, error) {
	who := h.heard(from)
	switch m.Class.Name {
	case "RendezvousParams":
		return true, h.brings(who, m)
	case "NodeEvent":
		return true, h.event(ctx, who, m)
	case "NetworkStatus": // to 0.3
		h.checked(who, m.Int("rank"), m.Str("status") == "succeeded", m.Float("elasped_time"))
		return true, nil
	case "NodeFailure":
		return true, h.failed(ctx, who, m)
	case "KeyValuePair":
		return true, h.set(ctx, who, m.Str("key"), m.Get("value"))
	case "KeyValuePairs":
		for _, p := range m.Dict("kvs").Pairs {
			key, _ := p.Key.(string) // "" is refused
			if err := h.set(ctx, who, key, p.Value); err != nil {
				return false, err
			}
		}
		return true, nil
	case "NodeCheckpointState":
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.reg.sameStep(who, m.Int("step")), nil
	case "GlobalStep":
		return true, h.stepped(ctx, who)
	case "HeartBeat", "ResourceStats", "AtorchEvent", "DiagnosisReportData", "Event", "ModelInfo", "NodeAddress",
		"ParallelConfig": // ignored
		return true, nil
	}
	h.cannot(m)
	return false, nil
}

// heard notes a sign of life.
func (h *Host) heard(from pyproto.Caller) caller {
	who := caller{from.NodeType, from.NodeID}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.reg.heard(time.Now(), who)
	return who
}

// brings keeps the rules that an agent will join with.
func (h *Host) brings(who caller, m *pyproto.Message) error {
	p := rendezvous.Params{
		Min: m.Int("min_nodes"), Max: m.Int("max_nodes"), Unit: m.Int("node_unit"), MaxRestarts: rendezvous.Unlimited,
		LastCall: seconds(m.Float("waiting_timeout")), JoinTimeout: seconds(m.Float("join_timeout")),
		Budget: rendezvous.Budget{SameFailures: -1}, // agents count their restarts themselves, and have no such option
	}
	if m.Get("waiting_timeout") != nil {
		p.LastCall = cmp.Or(p.LastCall, time.Millisecond) // 0 is no default
	}
	if err := p.Validate(); err != nil {
		h.cfg.Log.Error("an agent brings rules that cannot be", "node_id", who.id, "err", err)
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.reg.bring(who, p)
	h.check.rules(p, who.id)
	return nil
}

// seconds is a time of at most a century; -1 is none, which no rules have.
func seconds(s float64) time.Duration {
	if math.IsNaN(s) || s < 0 {
		return -1
	}
	return time.Duration(min(s, 3e9) * float64(time.Second))
}

// running are the nodes that train or wait, for this or for a test: agents count them.
func (h *Host) running(d pyproto.Dialect) *pyproto.Message {
	h.mu.Lock()
	defer h.mu.Unlock()
	nodes := &pyproto.List{}
	add := func(kind, ip string, id, rank int) {
		nodes.Items = append(nodes.Items, d.New("NodeMeta", pyproto.Field{Name: "type", Value: kind},
			pyproto.Field{Name: "addr", Value: ip}, pyproto.Field{Name: "memory", Value: 0},
			pyproto.Field{Name: "cpu", Value: 0.0}, pyproto.Field{Name: "gpu", Value: 0},
			pyproto.Field{Name: "gpu_type", Value: ""}, pyproto.Field{Name: "id", Value: id},
			pyproto.Field{Name: "rank", Value: rank}, pyproto.Field{Name: "status", Value: "Running"}))
	}
	for _, rank := range sortedRanks(h.reg.ranks) {
		a := h.reg.ranks[rank]
		add(a.who.kind, a.node.IP, a.who.id, rank)
	}
	for rank, t := range h.check.nodes() {
		if h.reg.ranks[rank] == nil { // it has not come to train yet
			add("worker", "", t.id, rank)
		}
	}
	return d.New("RunningNodes", pyproto.Field{Name: "nodes", Value: nodes})
}
