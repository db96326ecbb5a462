package agents

import (
	"context"
	"encoding/binary"
	"log/slog"
	"math"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/internal/pickle"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/pyproto"
)

// Names that callers choose hide no warning of our own, and what is said may ask the Host.
func TestManyNamesHideNoWarning(t *testing.T) {
	var log strings.Builder
	h := New(Config{JobUID: "uid", Log: slog.New(slog.NewTextHandler(&log, nil))})
	defer h.Close()
	for i := range 200 {
		h.cannot(&pyproto.Message{Class: pickle.Class{Name: strconv.Itoa(i)}})
	}
	for range 2 {
		_, err := h.Admit(t.Context(), "")
		require.ErrorIs(t, err, errNoUID)
	}
	require.Equal(t, 1, strings.Count(log.String(), "a caller is refused"))
	require.Equal(t, 64, strings.Count(log.String(), "only DLRover's own master has"))
	require.Equal(t, []bool{true, false}, []bool{h.said.first("asks"), h.said.first("asks")})
}

func TestTheStoreIsBounded(t *testing.T) {
	h := New(Config{})
	defer h.Close()
	ctx, who := context.Background(), caller{"worker", 0}
	require.NoError(t, h.set(ctx, who, strings.Repeat("k", maxKey), []byte{}))
	for key, v := range map[string]any{strings.Repeat("k", maxKey+1): []byte{}, "": []byte{}, "f": 1.5, "n": nil,
		"l": &pyproto.List{}, "v": make([]byte, maxValue+1)} {
		require.Error(t, h.set(ctx, who, key, v))
	}
	value := make([]byte, maxValue)
	for i := 0; h.set(ctx, who, "big"+string(rune('A'+i)), value) == nil; i++ {
		require.Less(t, i, maxStore/maxValue)
	}
	require.LessOrEqual(t, h.store.bytes, maxLasting)
	require.NoError(t, h.set(ctx, who, "bigA", value), "what is there may be replaced")
	sums := func() {
		sum, lasting := 0, 0
		for k, v := range h.store.values {
			sum += weight(k, v)
			if h.store.lasts(k) {
				lasting += weight(k, v)
			}
		}
		require.Equal(t, []int{sum, lasting}, []int{h.store.bytes, h.store.lasting})
	}
	sums()

	// the rendezvous go on, and what fills the keys of a world is gone with that
	require.Error(t, h.set(ctx, who, prefix(worldsKept), value), "no world of now")
	for i := 0; h.set(ctx, who, prefix(1)+string(rune('A'+i)), value) == nil; i++ {
		require.Less(t, i, maxStore/maxValue)
	}
	require.Greater(t, h.store.bytes, maxStore-2*maxValue)
	require.Error(t, h.set(ctx, who, prefix(2)+masterAddr, value))
	h.store.forget(training, 2)
	require.NoError(t, h.set(ctx, who, prefix(2)+masterAddr, value))
	require.NoError(t, h.set(ctx, who, prefix(1+worldsKept)+masterAddr, value))
	sums()
	h.store.forget(training, 1+worldsKept+1)
	require.NotContains(t, h.store.values, prefix(1+worldsKept)+masterAddr)
	sums()
}

func TestTheStoreKeepsNoRequests(t *testing.T) {
	h := New(Config{})
	defer h.Close()
	body := []byte("value and much else")
	require.NoError(t, h.set(context.Background(), caller{}, "k", body[:5]))
	require.Equal(t, 5, len(h.store.get("k").([]byte)))
	body[0] = 'X'
	require.Equal(t, []byte("value"), h.store.get("k"))
}

func TestKeysOfOldChecksAreForgotten(t *testing.T) {
	s := newStore()
	for _, k := range []string{"network-check/torch.rendezvous.network-check.1.0/MASTER_ADDR",
		"network-check/torch.rendezvous.network-check.2.7/MASTER_ADDR", "network-check/torch.rendezvous.network-check.x", "k",
		prefix(1) + masterAddr} {
		s.put(k, []byte("v"))
	}
	s.forget(checking, 2)
	require.Len(t, s.values, 4)
	s.forget(training, 2)
	require.Len(t, s.values, 3)
}

// TestWhoIsAdmitted: a caller must name the job, unless all are served.
func TestWhoIsAdmitted(t *testing.T) {
	for _, c := range []struct {
		uid       string
		open      bool
		admitted  string
		refused   string
		isTrusted int
	}{
		{uid: "a", admitted: "a", refused: ",b,a ,A,aa", isTrusted: 1},
		{uid: "a", open: true, admitted: "a,", refused: "b,a ,A", isTrusted: 1},
		{open: true, admitted: ",a,b"},
		{refused: ",a"},
	} {
		trusted := 0
		h := New(Config{JobUID: c.uid, Open: c.open, Trust: func(context.Context) { trusted++ }})
		for _, uid := range strings.Split(c.admitted, ",") {
			if c.admitted != "" {
				known, err := h.Admit(t.Context(), uid)
				require.NoError(t, err, "%+v: %q", c, uid)
				require.Equal(t, c.uid != "" && uid == c.uid, known)
			}
		}
		require.Equal(t, c.isTrusted, trusted)
		for _, uid := range strings.Split(c.refused, ",") {
			if c.refused == "" {
				continue
			}
			_, err := h.Admit(t.Context(), uid)
			require.ErrorIs(t, err, pyproto.ErrJobUID, "%+v: %q", c, uid)
			require.Equal(t, uid == "", strings.Contains(err.Error(), "--python-agents=open"), err)
		}
		require.Equal(t, c.isTrusted, trusted)
		h.Close()
	}
}

// TestRulesAndJoinsThatCannotBe are refused with an error that names them, and leave nothing behind.
func TestRulesAndJoinsThatCannotBe(t *testing.T) {
	bubble(t, func(r *rig) {
		ctx, m := context.Background(), r.agent(0, 0)
		for _, change := range []pyproto.Field{f("min_nodes", -1), f("max_nodes", 1), f("max_nodes", math.MaxInt64),
			f("waiting_timeout", math.NaN()), f("waiting_timeout", -1), f("join_timeout", -5.5), f("node_unit", 9),
			f("min_nodes", "2")} {
			q := m.rules()
			q.State.Pairs = append(q.State.Pairs, pyproto.Pair{Key: change.Name, Value: change.Value})
			_, err := r.host.Report(ctx, m.from, q)
			require.Error(t, err, "%v", change)
		}
		q := m.rules()
		q.State.Pairs = append(q.State.Pairs, pyproto.Pair{Key: "join_timeout", Value: math.Inf(1)},
			pyproto.Pair{Key: "waiting_timeout", Value: int64(0)})
		_, err := r.host.Report(ctx, m.from, q)
		require.NoError(t, err)
		require.Equal(t, time.Millisecond, r.host.reg.last.LastCall)
		for _, name := range []string{training, checking, "other", ""} {
			for _, change := range []pyproto.Field{f("node_rank", 1<<31), f("node_rank", rendezvous.MaxNodes),
				f("local_world_size", 0), f("local_world_size", -4), f("local_world_size", math.MaxInt64),
				f("local_world_size", math.NaN()), f("rdzv_name", "x"), f("node_ip", strings.Repeat("1", maxAddr+1)),
				f("node_ip", "10.0.0.1\n")} {
				q := m.joins()
				q.State.Pairs = append(q.State.Pairs, pyproto.Pair{Key: "rdzv_name", Value: name},
					pyproto.Pair{Key: change.Name, Value: change.Value})
				_, err := r.host.Get(ctx, m.from, q)
				require.Error(t, err, "%v", change)
			}
		}
		require.Empty(t, r.host.reg.agents)
		require.Empty(t, r.host.check.waiting)
		require.Empty(t, r.host.reg.places)
	})
}

// get is what an agent reads of an answer, nil if there is none.
func get(ctx context.Context, h *Host, from pyproto.Caller, q *pyproto.Message) (*pyproto.Message, error) {
	a, err := h.Get(ctx, from, q)
	if a.Message != nil {
		a.Encoded = pickle.Encode(a.Message)
	}
	if err != nil || len(a.Encoded) == 0 {
		return nil, err
	}
	return pyproto.ReadMessage(a.Encoded)
}

// TestAnswersToRepeatedKeys: a key is answered once, however often it is asked for.
func TestAnswersToRepeatedKeys(t *testing.T) {
	h := New(Config{})
	defer h.Close()
	ctx := context.Background()
	for _, key := range []string{"a", "b"} {
		require.NoError(t, h.set(ctx, caller{}, key, []byte("of "+key)))
	}
	for _, c := range []struct{ asked, want string }{{"ab", "ab"}, {"baabbab", "ba"}, {"aca", ""}, {"", ""}} {
		asked := &pyproto.Dict{}
		for _, key := range c.asked {
			asked.Pairs = append(asked.Pairs, pyproto.Pair{Key: string(key), Value: ""})
		}
		m, err := get(ctx, h, pyproto.Caller{}, pyproto.Comm.New("KeyValuePairs", f("kvs", asked), f("op", "get")))
		require.NoError(t, err)
		want := []pyproto.Pair(nil)
		for _, key := range c.want {
			want = append(want, pyproto.Pair{Key: string(key), Value: []byte("of " + string(key))})
		}
		require.Equal(t, want, m.Dict("kvs").Pairs, c.asked)
	}
}

// TestCallersAreForgotten: what is kept of callers that are in no run has a bound, and the newest counts.
func TestCallersAreForgotten(t *testing.T) {
	h := New(Config{})
	defer h.Close()
	ctx := context.Background()
	for i := range maxCallers + 1 {
		who := caller{"worker", i}
		require.NoError(t, h.brings(who, pyproto.Comm.New("RendezvousParams", f("min_nodes", i%7+1), f("max_nodes", 7))))
		h.locate(ctx, who, "")
		h.reg.stray(who)
		h.syncPort(who, pyproto.Comm.New("SyncTrainingPort", f("port", 1)))
	}
	require.Equal(t, []int{1, 1, 1}, []int{len(h.reg.params), len(h.reg.places), len(h.reg.astray)})
	require.LessOrEqual(t, len(h.ports.offers), maxCallers)
}

// TestFailuresOfManyBytes are one failure: reading them as JSON would take far more memory.
func TestFailuresOfManyBytes(t *testing.T) {
	text := "{" + strings.TrimSuffix(strings.Repeat(`"1":{},`, maxErrors/7+1), ",") + "}"
	require.Len(t, failures("n", job.Place{WorldSize: 2}, text), 1)
	require.Contains(t, failures("n", job.Place{WorldSize: 2}, text)[0].Text, `{"1":{},`)
}

func TestFailuresOfOneKindHaveOneFingerprint(t *testing.T) {
	fingerprint := func(text string) string { return failures("n", job.Place{WorldSize: 2}, text)[0].Fingerprint }
	first := fingerprint(`{"1": {"exitcode": 137, "message": "no module named y, pid 12345"}}`)
	require.Equal(t, "exit code 137, no module named y, pid #", first)
	require.Equal(t, first, fingerprint(`{"0": {"exitcode": 137, "message": "no module named y, pid 6789"}}`))
}

// guard is a Service that notices when it is called with the lock held.
type guard struct {
	api.Service
	h    *Host
	held atomic.Bool
}

func (g *guard) look() {
	for range 5 {
		if g.h.mu.TryLock() {
			g.h.mu.Unlock()
			return
		}
		time.Sleep(time.Microsecond) // another goroutine may have it
	}
	g.held.Store(true)
}

func (g *guard) Join(ctx context.Context, run string, ev rendezvous.Join) error {
	g.look()
	return g.Service.Join(ctx, run, ev)
}

func (g *guard) Report(ctx context.Context, run string, ev rendezvous.Event) error {
	g.look()
	return g.Service.Report(ctx, run, ev)
}

func (g *guard) Leave(ctx context.Context, run string, ev rendezvous.Leave) (job.Evidence, error) {
	g.look()
	return g.Service.Leave(ctx, run, ev)
}

func (g *guard) World(ctx context.Context, run string) ([]job.Member, error) {
	g.look()
	return g.Service.World(ctx, run)
}

// TestTheLockIsNotHeldWhileTheServiceIsCalled in a life with all that may happen.
func TestTheLockIsNotHeldWhileTheServiceIsCalled(t *testing.T) {
	bubble(t, func(r *rig) {
		g := &guard{Service: r.hub, h: r.host}
		r.host.cfg.Service = g
		play(r, []byte("\x00\x01\x02\x03"+
			"\x00\x10\x20\x30\x04\x14\x24\x05\x06\x16\x07\x17\x08\x09\x19\x00\x10\x0a\x1a\x0b"))
		require.False(t, g.held.Load())
	})
}

// FuzzRequests plays requests of agents in random order: nothing panics, nothing waits for ever, and the bounds hold.
func FuzzRequests(f *testing.F) {
	f.Add([]byte("\x00\x10\x20\x30\x01\x11\x21\x31\x02\x12\x22\x32\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f"))
	f.Add([]byte("\x01\x11\xf0\x02\x12\xf1\x03\x04\x14\xf2\x05\x06\x16\xf3\x07\x17\xff\x08\x18"))
	f.Fuzz(func(t *testing.T, script []byte) {
		bubble(t, func(r *rig) {
			g := &guard{Service: r.hub, h: r.host}
			r.host.cfg.Service = g
			play(r, script[:min(len(script), 200)])
			require.False(t, g.held.Load())
		})
	})
}

// play sends a request for every byte of a script: the high half says whose it is or, if it is 15, that time passes;
// the low half says what it is.
func play(r *rig, script []byte) {
	ctx := context.Background()
	for i, b := range script {
		if b >= 0xF0 {
			time.Sleep(time.Duration(b&15) * 10 * time.Second)
			continue
		}
		m := r.agent(int(b>>4), int(b>>4)%4)
		m.min, m.max = 2, 3
		q, asks := requestOf(m, int(b&15), i, script)
		if asks {
			_, _ = get(ctx, r.host, m.from, q)
		} else {
			_, _ = r.host.Report(ctx, m.from, q)
		}
		synctest.Wait()
		require.LessOrEqual(r.t, len(r.host.worlds.numbers), 2)
	}
	time.Sleep(20 * time.Minute) // whoever is still here is silent
	synctest.Wait()
	for _, a := range r.host.reg.agents {
		require.True(r.t, a.exited)
	}
}

func requestOf(m *model, kind, i int, script []byte) (q *pyproto.Message, get bool) {
	number := prefix(max(m.r.host.worlds.last, 0))
	switch kind {
	case 0:
		return m.rules(), false
	case 1:
		return m.joins(), true
	case 2:
		return m.msg("CommWorldRequest", f("node_id", m.rank), f("rdzv_name", training)), true
	case 3:
		return m.msg("WaitingNodeNumRequest", f("rdzv_name", []string{training, checking}[i%2])), true
	case 4:
		return m.msg("KeyValuePairs", f("kvs", &pyproto.Dict{Pairs: []pyproto.Pair{
			{Key: number + masterPort, Value: []byte("1")}, {Key: number + masterAddr, Value: "h"}}}), f("op", "set")), false
	case 5:
		return m.msg("NodeFailure", f("level", processError), f("error_data", string(script))), false
	case 6:
		return m.msg("KeyValuePair", f("key", number+numMembers), f("value", 1), f("op", "add")), true
	case 7:
		return m.msg("NodeEvent", f("event_type", []string{"SUCCEEDED_EXITED", "FAILED_EXITED"}[i%2])), false
	case 8:
		q := m.joins()
		q.State.Pairs = append(q.State.Pairs, pyproto.Pair{Key: "rdzv_name", Value: checking})
		return q, true
	case 9:
		return m.msg("CommWorldRequest", f("node_id", m.rank), f("rdzv_name", checking)), true
	case 10:
		return m.msg("NodeEvent", f("event_type", "NODE_CHECK_FAILED"), f("event_elapsed_time", math.NaN()),
			f("node", m.msg("NodeMeta", f("rank", m.rank)))), false
	case 11:
		return m.msg([]string{"NetworkReadyRequest", "StragglerExistRequest", "RunningNodesRequest", "Nonsense"}[i%4]), true
	case 12:
		return m.msg("NodeFailure", f("level", nodeError), f("error_data", "x")), false
	case 13:
		return m.msg("NodeCheckpointState", f("step", i)), false
	case 14:
		return m.msg("SyncTrainingPort", f("port", i)), true
	}
	n := int64(i)
	if len(script) >= 8 {
		n = int64(binary.LittleEndian.Uint64(script))
	}
	return m.msg("JoinRendezvousRequest", f("node_rank", n), f("local_world_size", n), f("rdzv_name", training)), true
}

// BenchmarkPolls is what 1,000 agents ask that train or wait, without a network.
func BenchmarkPolls(b *testing.B) {
	hub := api.NewHub(api.HubConfig{})
	defer hub.Close()
	h := New(Config{Service: hub, Run: testRun})
	defer h.Close()
	ctx := context.Background()
	const n = 1000
	from := func(i int) pyproto.Caller { return pyproto.Caller{NodeID: i, NodeType: "worker"} }
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			_, err := h.Report(ctx, from(i), pyproto.Comm.New("RendezvousParams", f("min_nodes", n), f("max_nodes", n)))
			require.NoError(b, err)
			_, err = h.Get(ctx, from(i), pyproto.Comm.New("JoinRendezvousRequest", f("local_world_size", 8),
				f("rdzv_name", training), f("node_rank", i)))
			require.NoError(b, err)
		})
	}
	wg.Wait()
	for h.follows() < n {
		time.Sleep(time.Millisecond)
	}
	for name, q := range map[string]*pyproto.Message{
		"waiting": pyproto.Comm.New("WaitingNodeNumRequest", f("rdzv_name", training)),
		"world":   pyproto.Comm.New("CommWorldRequest", f("rdzv_name", training), f("node_id", 0)),
		"beat":    pyproto.Comm.New("HeartBeat", f("timestamp", 1)),
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for i := 0; pb.Next(); i++ {
					if _, err := h.Get(ctx, from(i%n), q); err != nil {
						b.Error(err)
					}
				}
			})
		})
	}
}

// follows is how many agents have been told something.
func (h *Host) follows() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, a := range h.reg.agents {
		if a.dir.Kind != "" {
			n++
		}
	}
	return n
}
