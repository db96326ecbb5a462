package agents

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
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

const testRun = "r"

// rig is a Hub with a Host in a bubble of virtual time.
type rig struct {
	t     *testing.T
	hub   *api.Hub
	host  *Host
	wg    sync.WaitGroup
	mu    sync.Mutex
	notes []rendezvous.Note
	// models are the agents that were started.
	models []*model
}

// bubble calls f with a rig whose Hub and Host are closed, and whose agents are waited for, at its end.
func bubble(t *testing.T, f func(r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t}
		r.open()
		defer func() {
			if t.Failed() {
				r.killAll()
			}
			r.wg.Wait()
			r.close()
		}()
		f(r)
	})
}

func (r *rig) current() *Host {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.host
}

func (r *rig) open() {
	hub := api.NewHub(api.HubConfig{Observe: func(_ string, n rendezvous.Note) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.notes = append(r.notes, n)
	}})
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hub = hub
	r.host = New(Config{Service: hub, Run: testRun, Note: func(event job.Event, node, _, text string) {
		_ = hub.Told(testRun, event, node, text)
	}})
}

func (r *rig) killAll() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hub.Close()
	for _, m := range r.models {
		m.kill()
	}
}

func (r *rig) close() {
	r.host.Close()
	r.hub.Close()
}

// events are the nodes and texts of the notes of a name, as "node: text".
func (r *rig) events(name job.Event) (out []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range r.notes {
		if n.Event == name {
			out = append(out, n.Node+": "+n.Text)
		}
	}
	return out
}

func (r *rig) status() rendezvous.Status {
	runs := r.hub.Runs(true)
	require.Len(r.t, runs, 1)
	return runs[0].Status
}

// start is one start of an agent's workers.
type start struct {
	at      time.Time
	round   int
	ranks   []int // of the world's agents, in order
	slots   []int
	group   int // index of the agent in it
	master  string
	stopped bool // the agent ended them, as it was told
}

// The ends of an agent.
const (
	ended     = "succeeded"
	broken    = "failed"
	timedOut  = "join timeout"
	jobStops  = "the job stops"
	killed    = "killed"
	refusedBy = "refused"
)

// failsFirst are workers that fail at their first start.
func failsFirst(after time.Duration, n int) work {
	if n > 0 {
		return work{lasts: time.Minute}
	}
	return work{lasts: after, fails: true}
}

// work is what the workers of one start do.
type work struct {
	lasts  time.Duration // 0: until they are stopped
	fails  bool
	silent bool   // the agent does not tell of the failure
	text   string // what it tells; "": as DLRover does
	exits  bool   // the agent ends then, with FAILED_EXITED
	level  string // of what it tells; "": process_error
}

// model does what an agent of DLRover does, as far as its master sees it.
type model struct {
	r         *rig
	host      func() *Host
	from      pyproto.Caller
	rank      int
	slots     int
	d         pyproto.Dialect
	min, max  int
	unit      int
	lastCall  time.Duration
	timeout   time.Duration // of a join
	interval  time.Duration // of the monitor
	states    bool          // the barrier of torch to 1.13
	checked   bool          // with --network-check: it asks about those who check
	beat      bool          // sends heartbeats
	noParams  bool          // brings none: it was here before this master
	works     func(n int) work
	beginning *start // runs already

	mu     sync.Mutex
	starts []start
	end    string
	err    error
	kill   context.CancelFunc
	exited chan struct{}
}

func (r *rig) agent(id, rank int) *model {
	return &model{
		r: r, host: r.current, from: pyproto.Caller{NodeID: id, NodeType: "worker"}, rank: rank,
		slots: 2,
		d:     pyproto.Comm, min: 2, max: 2, unit: 1, lastCall: 3 * time.Second, timeout: 600 * time.Second,
		interval: time.Second, beat: true, works: func(int) work { return work{lasts: time.Minute} },
		exited: make(chan struct{}),
	}
}

// world makes n agents of ranks and NODE_IDs from 0 on.
func (r *rig) world(n int, change func(m *model)) []*model {
	ms := make([]*model, n)
	for i := range ms {
		ms[i] = r.agent(i, i)
		ms[i].min, ms[i].max = n, n
		if change != nil {
			change(ms[i])
		}
	}
	return ms
}

func (r *rig) goAll(ms ...*model) {
	for _, m := range ms {
		m.goes()
	}
}

func (m *model) goes() {
	ctx, cancel := context.WithCancel(context.Background())
	m.kill = cancel
	m.r.mu.Lock()
	m.r.models = append(m.r.models, m)
	m.r.mu.Unlock()
	m.r.wg.Go(func() {
		defer close(m.exited)
		defer cancel()
		end, err := m.lives(ctx)
		m.mu.Lock()
		defer m.mu.Unlock()
		m.end, m.err = end, err
		if ctx.Err() != nil {
			m.end = killed
		}
	})
}

func (m *model) dies() {
	m.kill()
	<-m.exited
}

// result waits for the end of the agent.
func (m *model) result() string {
	<-m.exited
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.end
}

func (m *model) begun() []start {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.starts)
}

func (m *model) msg(name string, fs ...pyproto.Field) *pyproto.Message { return m.d.New(name, fs...) }

func f(name string, v any) pyproto.Field {
	if n, ok := v.(int); ok {
		v = int64(n) // as it comes from the wire
	}
	return pyproto.Field{Name: name, Value: v}
}

// get sends as DLRover's client does: ten times, 5 s apart.
func (m *model) get(ctx context.Context, q *pyproto.Message) (answer *pyproto.Message, err error) {
	err = m.retry(ctx, func() (err error) {
		answer, err = get(ctx, m.host(), m.from, q)
		return err
	})
	return answer, err
}

func (m *model) retry(ctx context.Context, send func() error) error {
	for i := 0; ; i++ {
		err := send()
		if err == nil || i == 9 || ctx.Err() != nil {
			return err
		}
		if !sleep(ctx, 5*time.Second) {
			return ctx.Err()
		}
	}
}

func (m *model) report(ctx context.Context, q *pyproto.Message) error {
	return m.retry(ctx, func() error {
		_, err := m.host().Report(ctx, m.from, q)
		return err
	})
}

func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

func (m *model) lives(ctx context.Context) (string, error) {
	if m.beat {
		m.r.wg.Go(func() { m.beats(ctx) })
	}
	if !m.noParams {
		if _, err := m.get(ctx, m.msg("PreCheckRequest")); err != nil {
			return broken, err
		}
		if err := m.report(ctx, m.rules()); err != nil {
			return refusedBy, err
		}
	}
	for n := 0; ; n++ {
		s := m.beginning
		if s == nil || n > 0 {
			var end string
			var err error
			if s, end, err = m.meets(ctx); s == nil {
				if end != jobStops {
					m.exits(ctx, false)
				}
				return end, err
			}
		}
		end, again := m.monitors(ctx, n, s)
		if !again {
			return end, nil
		}
	}
}

func (m *model) rules() *pyproto.Message {
	fs := []pyproto.Field{f("min_nodes", m.min), f("max_nodes", m.max), f("waiting_timeout", m.lastCall.Seconds()),
		f("node_unit", m.unit)}
	if m.d == pyproto.Comm {
		fs = append(fs, f("join_timeout", m.timeout.Seconds()))
	}
	return m.msg("RendezvousParams", fs...)
}

func (m *model) beats(ctx context.Context) {
	for {
		_, _ = m.host().Get(ctx, m.from, m.msg("HeartBeat", f("timestamp", 1)))
		if !sleep(ctx, 15*time.Second) {
			return
		}
	}
}

func (m *model) exits(ctx context.Context, succeeded bool) {
	kind := "FAILED_EXITED"
	if succeeded {
		kind = "SUCCEEDED_EXITED"
	}
	if ctx.Err() == nil {
		_ = m.report(ctx, m.msg("NodeEvent", f("event_type", kind), f("node", m.msg("NodeMeta", f("rank", m.rank)))))
	}
}

func (m *model) waitingNum(ctx context.Context, name string) (int, error) {
	a, err := m.get(ctx, m.msg("WaitingNodeNumRequest", f("node_id", m.rank), f("rdzv_name", name)))
	return a.Int("waiting_num"), err
}

// meets is the rendezvous; without a start it says how the agent ends.
func (m *model) meets(ctx context.Context) (*start, string, error) {
	for {
		s, again, end, err := m.meetsOnce(ctx)
		if !again {
			return s, end, err
		}
		if !sleep(ctx, 15*time.Second) {
			return nil, killed, nil
		}
	}
}

func (m *model) meetsOnce(ctx context.Context) (s *start, again bool, end string, err error) {
	if _, err = m.get(ctx, m.joins()); err != nil {
		return nil, false, refusedBy, err
	}
	for since := time.Now(); ; {
		n, err := m.waitingNum(ctx, checking)
		switch {
		case err != nil || ctx.Err() != nil:
			return nil, false, broken, err
		case n < 0 && m.d == pyproto.Comm: // agents to 0.4 know of no such number
			return nil, false, jobStops, nil
		case n > 0:
			return nil, true, "", nil
		}
		a, err := m.get(ctx, m.msg("CommWorldRequest", f("node_id", m.rank), f("rdzv_name", training)))
		if err != nil {
			return nil, false, broken, err
		}
		if s := m.startOf(a); s != nil {
			end, err := m.leads(ctx, s)
			if end != "" {
				return nil, false, end, err
			}
			m.mu.Lock()
			m.starts = append(m.starts, *s)
			m.mu.Unlock()
			return s, false, "", nil
		}
		if len(a.Dict("world").Pairs) > 0 { // others are in it
			since = time.Now()
		} else if time.Since(since) > m.timeout {
			_ = m.report(ctx, m.msg("NodeFailure", f("error_data", "{}"), f("level", "rdzv_error")))
			return nil, false, timedOut, nil
		}
		if !sleep(ctx, 5*time.Second) {
			return nil, false, killed, nil
		}
	}
}

func (m *model) joins() *pyproto.Message {
	return m.msg("JoinRendezvousRequest", f("node_id", m.from.NodeID), f("local_world_size", m.slots),
		f("rdzv_name", training), f("node_rank", m.rank), f("node_ip", "10.0.0."+strconv.Itoa(m.from.NodeID)))
}

func (m *model) startOf(a *pyproto.Message) *start {
	s := &start{round: a.Int("round"), at: time.Now(), group: -1}
	for i, p := range a.Dict("world").Pairs {
		s.ranks, s.slots = append(s.ranks, pickle.IntOf(p.Key)), append(s.slots, pickle.IntOf(p.Value))
		if pickle.IntOf(p.Key) == m.rank {
			s.group = i
		}
	}
	if s.group < 0 {
		return nil
	}
	return s
}

func (m *model) key(s *start, name string) string {
	return fmt.Sprintf("elastic-training/torch.rendezvous.elastic-training.%d.0/%s", s.round, name)
}

func (m *model) set(ctx context.Context, key string, v string) error {
	return m.report(ctx, m.msg("KeyValuePair", f("key", key), f("value", []byte(v)), f("op", "set")))
}

// waitFor asks for a key every 2 s.
func (m *model) waitFor(ctx context.Context, limit time.Duration, keys ...string) (map[string]string, bool) {
	for since := time.Now(); time.Since(since) < limit; {
		kvs := &pyproto.Dict{}
		for _, k := range keys {
			kvs.Pairs = append(kvs.Pairs, pyproto.Pair{Key: k, Value: []byte{}})
		}
		a, err := m.get(ctx, m.msg("KeyValuePairs", f("kvs", kvs), f("op", "get")))
		if got := a.Dict("kvs"); err == nil && len(got.Pairs) == len(keys) {
			out := map[string]string{}
			for _, p := range got.Pairs {
				out[p.Key.(string)] = string(pyproto.BytesOf(p.Value))
			}
			return out, true
		}
		if !sleep(ctx, 2*time.Second) {
			return nil, false
		}
	}
	return nil, false
}

// leads: the first node tells where its first worker listens, and all read it.
func (m *model) leads(ctx context.Context, s *start) (end string, err error) {
	if s.group == 0 {
		addr := "10.0.0." + strconv.Itoa(m.from.NodeID)
		port := strconv.Itoa(23450 + m.rank)
		err = errors.Join(m.set(ctx, m.key(s, masterAddr), addr), m.set(ctx, m.key(s, masterPort), port))
		if err != nil {
			return broken, err
		}
	}
	got, ok := m.waitFor(ctx, 300*time.Second, m.key(s, masterAddr), m.key(s, masterPort))
	if !ok {
		return broken, errors.New("no master")
	}
	s.master = got[m.key(s, masterAddr)] + ":" + got[m.key(s, masterPort)]
	return "", nil
}

// monitors watches the workers. Again: it meets the others anew.
func (m *model) monitors(ctx context.Context, n int, s *start) (end string, again bool) {
	w := m.works(n)
	for began := time.Now(); ; {
		if !sleep(ctx, m.interval) {
			return killed, false
		}
		switch {
		case w.lasts == 0 || time.Since(began) < w.lasts:
		case w.fails:
			return m.fails(ctx, w, s)
		default:
			m.waits(ctx, s)
			m.exits(ctx, true)
			return ended, false
		}
		name := training
		if m.checked {
			name = checking
		}
		if num, err := m.waitingNum(ctx, name); err == nil && num > 0 {
			m.mu.Lock()
			if len(m.starts) > 0 {
				m.starts[len(m.starts)-1].stopped = true
			}
			m.mu.Unlock()
			return "", true
		}
	}
}

func (m *model) base(s *start) (base int) {
	for i := range s.group {
		base += s.slots[i]
	}
	return base
}

func (m *model) fails(ctx context.Context, w work, s *start) (end string, again bool) {
	if !w.silent {
		text, level := w.text, w.level
		if text == "" {
			text = fmt.Sprintf(`{"%d": {"local_rank": 1, "exitcode": 7, "message": "boom", "datetime": "x"}}`, m.base(s)+1)
		}
		if level == "" {
			level = processError
		}
		_ = m.report(ctx, m.msg("NodeFailure", f("error_data", text), f("restart_count", 0), f("level", level)))
	}
	if w.exits {
		m.exits(ctx, false)
		return broken, false
	}
	return "", true
}

// waits is the barrier at the end, for at most 900 s.
func (m *model) waits(ctx context.Context, s *start) {
	if m.states {
		_ = m.set(ctx, m.key(s, terminalState+strconv.Itoa(s.group)), "done")
		var keys []string
		for i := range s.ranks {
			keys = append(keys, m.key(s, terminalState+strconv.Itoa(i)))
		}
		_, _ = m.waitFor(ctx, 900*time.Second, keys...)
		return
	}
	a, err := m.get(ctx, m.msg("KeyValuePair", f("key", m.key(s, numMembers)), f("value", 1), f("op", "add")))
	if err == nil && pickle.IntOf(a.Get("value")) == len(s.ranks) {
		_ = m.set(ctx, m.key(s, terminalState+"/last_member"), "<val_ignored>")
	}
	_, _ = m.waitFor(ctx, 900*time.Second, m.key(s, terminalState+"/last_member"))
}

// launcher is one of ours, in the same run.
type launcher struct {
	name   string
	cfg    api.SessionConfig
	works  func(n int) work
	mu     sync.Mutex
	runs   []rendezvous.Directive
	last   rendezvous.Directive
	ev     job.Evidence
	err    error
	closed chan struct{}
}

func (r *rig) launcher(name string, p rendezvous.Params, works func(n int) work) *launcher {
	l := &launcher{name: name, works: works, closed: make(chan struct{}), cfg: api.SessionConfig{
		Run: testRun, Params: p,
		Node: rendezvous.Node{ID: name + "-id", Name: name, Rank: -1, Slots: 2, Addr: "10.1.0.1", Can: []rendezvous.Ability{
			rendezvous.CanGate, rendezvous.CanNotice, rendezvous.CanHold, rendezvous.CanCommand, rendezvous.CanLeave}},
	}}
	return l
}

func (r *rig) goLauncher(l *launcher) {
	r.wg.Go(func() {
		defer close(l.closed)
		s, err := api.Open(context.Background(), r.hub, l.cfg)
		if err != nil {
			l.err = err
			return
		}
		defer s.Close()
		l.follow(s)
	})
}

func (l *launcher) follow(s *api.Session) {
	ctx := context.Background()
	var ends <-chan time.Time
	var w work
	var epoch rendezvous.Directive
	for {
		select {
		case d, ok := <-s.Directives():
			if !ok {
				l.err = s.Err()
				return
			}
			l.mu.Lock()
			l.last = d
			l.mu.Unlock()
			switch d.Kind {
			case job.Lead:
				_ = s.Report(ctx, rendezvous.Ready{ID: s.ID(), EpochID: d.EpochID, Addr: "10.1.0.1", Port: 4321})
			case job.Run:
				l.mu.Lock()
				w = l.works(len(l.runs))
				l.runs = append(l.runs, d)
				l.mu.Unlock()
				epoch = d
				if w.lasts > 0 {
					ends = time.After(w.lasts)
				}
			case job.Stop:
				ends = nil
				_ = s.Rejoin(ctx, d.EpochID, nil)
			case job.Done, job.Fail:
				l.ev, _ = s.Leave(ctx, "done", nil)
				return
			}
		case <-ends:
			ends = nil
			if w.fails {
				failure := job.Failure{Rank: epoch.Place.RankBase, GroupRank: epoch.Place.GroupRank, Text: "of a launcher"}
				_ = s.Report(ctx, rendezvous.Failing{ID: s.ID(), EpochID: epoch.EpochID, Decision: rendezvous.RestartCharged,
					Failures: []job.Failure{failure}})
			} else {
				_ = s.Report(ctx, rendezvous.Success{ID: s.ID(), EpochID: epoch.EpochID})
			}
		}
	}
}

func (l *launcher) told() (runs []rendezvous.Directive, last rendezvous.Directive) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.runs), l.last
}

// sameWorlds holds the nth start of all agents against each other.
func sameWorlds(t *testing.T, n int, ms ...*model) {
	t.Helper()
	first := ms[0].begun()
	require.Greater(t, len(first), n)
	for i, m := range ms {
		s := m.begun()
		require.Greater(t, len(s), n, "agent %d", i)
		require.Equal(t, first[n].round, s[n].round)
		require.Equal(t, first[n].ranks, s[n].ranks)
		require.Equal(t, first[n].slots, s[n].slots)
		require.Equal(t, first[n].master, s[n].master)
		require.Equal(t, slices.Index(s[n].ranks, m.rank), s[n].group)
	}
}

func requireEnds(t *testing.T, end string, ms ...*model) {
	t.Helper()
	for i, m := range ms {
		require.Equal(t, end, m.result(), "agent %d: %v", i, m.err)
	}
}

func hasText(texts []string, part string) bool {
	return slices.ContainsFunc(texts, func(s string) bool { return strings.Contains(s, part) })
}
