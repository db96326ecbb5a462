package agents

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/pyproto"
)

// The keys that mean something here, below a world's prefix.
const (
	masterAddr    = "MASTER_ADDR"
	masterPort    = "MASTER_PORT"
	roleInfo      = "torchelastic/role_info/"
	assignedRanks = "torchelastic/assigned_ranks/"
	terminalState = "torchelastic/agent/terminal_state"
	numMembers    = terminalState + "/num_members"
)

// Bounds of the store, in bytes: of a key, of a value, and of all.
const (
	maxKey   = 4 << 10
	maxValue = 1 << 20
	maxStore = 256 << 20
)

// store is what agents keep at the master: bytes, text or, where they count, a number.
type store struct {
	values map[string]any
	bytes  int
	sizes  map[int]int // nodes of worlds, by number
	pruned int         // worlds below have no keys any more
}

func newStore() store { return store{values: map[string]any{}, sizes: map[int]int{}} }

func weight(key string, v any) int { return len(key) + len(pyproto.BytesOf(v)) + 64 }

func (s *store) put(key string, v any) {
	if old, ok := s.values[key]; ok {
		s.bytes -= weight(key, old)
	}
	s.values[key] = v
	s.bytes += weight(key, v)
}

// forget drops the keys of worlds below a number.
func (s *store) forget(below int) {
	if below <= s.pruned {
		return
	}
	s.pruned = below
	for key, v := range s.values {
		if n, ok := worldOfKey(key); ok && n < below {
			delete(s.values, key)
			s.bytes -= weight(key, v)
		}
	}
	for n := range s.sizes {
		if n < below {
			delete(s.sizes, n)
		}
	}
}

// worldOfKey is the number of the world that a key belongs to.
func worldOfKey(key string) (int, bool) {
	rest, ok := strings.CutPrefix(key, training+"/torch.rendezvous."+training+".")
	if !ok {
		return 0, false
	}
	number, _, ok := strings.Cut(rest, ".")
	n, err := strconv.Atoi(number)
	return n, ok && err == nil
}

// set writes a key. Some tell of the agent that writes them.
func (h *Host) set(ctx context.Context, who caller, key string, v any) error {
	switch v.(type) {
	case []byte, string, int64:
	default:
		return fmt.Errorf("agents: a %T as the value of key %.100q", v, key)
	}
	h.mu.Lock()
	full := h.store.bytes+weight(key, v) > maxStore
	if len(key) > maxKey || len(pyproto.BytesOf(v)) > maxValue || full {
		h.mu.Unlock()
		return fmt.Errorf("agents: key %.100q: at most %d bytes of a key, %d of a value and %d of all are kept", key, maxKey,
			maxValue, maxStore)
	}
	h.store.put(key, v)
	a := h.agents[who]
	h.mu.Unlock()
	if a == nil {
		return nil
	}
	return h.wrote(ctx, a, key)
}

// wrote acts upon the keys by which agents tell each other how far they are.
func (h *Host) wrote(ctx context.Context, a *agent, key string) error {
	h.mu.Lock()
	number, ours := h.worlds.numbers[a.worked]
	name, below := strings.CutPrefix(key, prefix(number))
	mine := ours && below && a.works
	leads := mine && name == masterPort && a.dir.Kind == rendezvous.Lead
	h.mu.Unlock()
	switch {
	case leads:
		return h.ready(ctx, a, number)
	case mine && (name == numMembers || isArrival(name)):
		return h.succeeded(ctx, a)
	}
	return nil
}

// isArrival: a key of the barrier of torch to 1.13.
func isArrival(name string) bool {
	rank, ok := strings.CutPrefix(name, terminalState)
	_, err := strconv.ParseUint(rank, 10, 31)
	return ok && err == nil
}

// ready: the leader's agent has told where its first worker will serve the store.
func (h *Host) ready(ctx context.Context, a *agent, number int) error {
	h.mu.Lock()
	addr := string(pyproto.BytesOf(h.store.values[prefix(number)+masterAddr]))
	port, err := strconv.Atoi(string(pyproto.BytesOf(h.store.values[prefix(number)+masterPort])))
	h.store.forget(h.worlds.last - 1)
	ev := rendezvous.Ready{ID: a.node.ID, EpochID: a.worked, Addr: addr, Port: port}
	h.mu.Unlock()
	if err != nil || port < 1 || port > 65535 || addr == "" || len(addr) > rendezvous.MaxName {
		return fmt.Errorf("agents: the leader's address is %.100q, port %d", addr, port)
	}
	return h.report(ctx, ev)
}

// pair answers a question about one key: its value, or the sum after something was added.
func (h *Host) pair(ctx context.Context, who caller, m *pyproto.Message) *pyproto.Message {
	key := m.Str("key")
	var value any
	if m.Str("op") == "add" {
		value = h.add(ctx, who, key, m.Int("value"))
	} else {
		h.mu.Lock()
		value = h.store.get(key)
		h.mu.Unlock()
	}
	fields := []pyproto.Field{{Name: "key", Value: key}, {Name: "value", Value: value}}
	if m.Dialect() == pyproto.Comm {
		fields = append(fields, pyproto.Field{Name: "op", Value: ""})
	}
	return m.Dialect().New("KeyValuePair", fields...)
}

// get: what is not there is empty.
func (s *store) get(key string) any {
	if v, ok := s.values[key]; ok {
		return v
	}
	return []byte{}
}

func (h *Host) add(ctx context.Context, who caller, key string, n int) int {
	h.mu.Lock()
	sum := n
	switch v := h.store.values[key].(type) {
	case int64:
		sum += int(v)
	case []byte, string:
		old, _ := strconv.Atoi(string(pyproto.BytesOf(v)))
		sum += old
	}
	h.mu.Unlock()
	if err := h.set(ctx, who, key, int64(sum)); err != nil {
		h.cfg.Log.Warn("an agent's count is lost", "err", err)
	}
	return sum
}

// pairs answers with all keys, or with none if one is missing.
func (h *Host) pairs(m *pyproto.Message) *pyproto.Message {
	out := &pyproto.Dict{}
	h.mu.Lock()
	for _, p := range m.Dict("kvs").Pairs {
		key, _ := p.Key.(string)
		v, ok := h.store.values[key]
		if b := pyproto.BytesOf(v); !ok || b != nil && len(b) == 0 {
			out = &pyproto.Dict{}
			break
		}
		out.Pairs = append(out.Pairs, pyproto.Pair{Key: key, Value: v})
	}
	h.mu.Unlock()
	return m.Dialect().New("KeyValuePairs", pyproto.Field{Name: "kvs", Value: out}, pyproto.Field{Name: "op", Value: ""})
}
