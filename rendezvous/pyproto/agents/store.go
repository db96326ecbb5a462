package agents

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
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

// Bounds of the store, in bytes: of a key, of a value, of all, and of those keys that are never forgotten, so that
// they leave room for the rendezvous. The keys of worldsKept worlds from the oldest on that is kept are forgotten.
const (
	maxKey     = 4 << 10
	maxValue   = 1 << 20
	maxStore   = 256 << 20
	maxLasting = maxStore / 2
	worldsKept = 3
)

// store holds the agents' values at the master: bytes, text or, where they count, a number.
type store struct {
	values  map[string]any
	bytes   int
	lasting int // of them, of keys that last

	sizes  map[int]int    // nodes of worlds that may still wait in their barrier, by number
	pruned map[string]int // by rendezvous: worlds below have no keys any more
}

func newStore() store {
	return store{values: map[string]any{}, sizes: map[int]int{}, pruned: map[string]int{}}
}

func weight(key string, v any) int { return len(key) + len(pyproto.BytesOf(v)) + 128 }

func (s *store) put(key string, v any) {
	if old, ok := s.values[key]; ok {
		s.weigh(key, -weight(key, old))
	}
	s.values[key] = v
	s.weigh(key, weight(key, v))
}

func (s *store) weigh(key string, n int) {
	s.bytes += n
	if s.lasts(key) {
		s.lasting += n
	}
}

// lasts: no present world of a rendezvous has the key, with which it would be forgotten. That changes by forget alone.
func (s *store) lasts(key string) bool {
	for _, name := range []string{training, checking} {
		if n, ok := worldOfKey(name, key); ok {
			return n >= s.pruned[name]+worldsKept
		}
	}
	return true
}

// forget drops the keys of worlds of a rendezvous below a number.
func (s *store) forget(rendezvous string, below int) {
	if below <= s.pruned[rendezvous] {
		return
	}
	s.pruned[rendezvous] = below
	s.bytes, s.lasting = 0, 0
	for key, v := range s.values {
		if n, ok := worldOfKey(rendezvous, key); ok && n < below {
			delete(s.values, key)
			continue
		}
		s.weigh(key, weight(key, v))
	}
	for n := range s.sizes {
		if rendezvous == training && n < below {
			delete(s.sizes, n)
		}
	}
}

// worldOfKey is the number of the world of a rendezvous that a key belongs to.
func worldOfKey(rendezvous, key string) (int, bool) {
	rest, ok := strings.CutPrefix(key, rendezvous+"/torch.rendezvous."+rendezvous+".")
	if !ok {
		return 0, false
	}
	number, _, ok := strings.Cut(rest, ".")
	n, err := strconv.Atoi(number)
	return n, ok && err == nil
}

// set writes a key. Some keys carry the state of the agent that writes them.
func (h *Host) set(ctx context.Context, who caller, key string, v any) error {
	h.mu.Lock()
	err := h.store.set(key, v)
	h.mu.Unlock()
	if err != nil {
		return err
	}
	return h.wrote(ctx, who, key)
}

// set is put for keys that agents write.
func (s *store) set(key string, v any) error {
	switch v.(type) {
	case []byte, string, int64:
	default:
		return fmt.Errorf("agents: a %T as the value of key %.100q", v, key)
	}
	more := weight(key, v)
	if old, ok := s.values[key]; ok {
		more -= weight(key, old)
	}
	if key == "" || len(key) > maxKey || len(pyproto.BytesOf(v)) > maxValue || s.full(key, more) {
		return fmt.Errorf("agents: key %.100q of %d bytes with a value of %d: a key has 1 to %d bytes, a value at most %d, "+
			"all together %d, and those of no rendezvous %d", key, len(key), len(pyproto.BytesOf(v)), maxKey, maxValue,
			maxStore, maxLasting)
	}
	if b, ok := v.([]byte); ok {
		v = slices.Clone(b) // it is a part of the request, which may be large
	}
	s.put(key, v)
	return nil
}

func (s *store) full(key string, more int) bool {
	return s.bytes+more > maxStore || more > 0 && s.lasts(key) && s.lasting+more > maxLasting
}

// wrote handles the keys by which agents announce their progress to each other.
func (h *Host) wrote(ctx context.Context, who caller, key string) error {
	h.mu.Lock()
	a := h.reg.agents[who]
	if a == nil || !a.works {
		h.mu.Unlock()
		return nil
	}
	number, ours := h.worlds.numbers[a.worked]
	name, below := strings.CutPrefix(key, prefix(number))
	if !ours || !below {
		h.mu.Unlock()
		return nil
	}
	if a.dir.Kind == job.Lead && (name == masterAddr || name == masterPort) {
		addr, port, err := h.store.meeting(number)
		ev := rendezvous.Ready{ID: a.node.ID, EpochID: a.worked, Addr: addr, Port: port}
		h.mu.Unlock()
		if err != nil || port == 0 {
			return err
		}
		return h.cfg.report(ctx, ev)
	}
	h.mu.Unlock()
	if name == numMembers || isArrival(name) {
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

// pair answers a question about one key: its value, or the sum after something was added.
func (h *Host) pair(ctx context.Context, who caller, m *pyproto.Message) *pyproto.Message {
	key := m.Str("key")
	var value any
	if m.Str("op") == "add" {
		h.mu.Lock()
		sum, err := h.store.add(key, m.Int("value"))
		h.mu.Unlock()
		if err == nil {
			err = h.wrote(ctx, who, key)
		}
		if err != nil {
			h.cfg.Log.Warn("an agent's count is lost", "err", err)
		}
		value = sum
	} else {
		h.mu.Lock()
		value = h.store.get(key)
		h.mu.Unlock()
	}
	fields := []pyproto.Field{{Name: "key", Value: key}, {Name: "value", Value: value}}
	if pyproto.DialectOf(m) == pyproto.Comm {
		fields = append(fields, pyproto.Field{Name: "op", Value: ""})
	}
	return pyproto.DialectOf(m).New("KeyValuePair", fields...)
}

// get returns an empty value for a missing key.
func (s *store) get(key string) any {
	if v, ok := s.values[key]; ok {
		return v
	}
	return []byte{}
}

// add counts. A value that is not a number counts as 0.
func (s *store) add(key string, n int) (sum int, err error) {
	sum = n
	switch v := s.values[key].(type) {
	case int64:
		sum += int(v)
	case []byte, string:
		old, _ := strconv.Atoi(string(pyproto.BytesOf(v)))
		sum += old
	}
	return sum, s.set(key, int64(sum))
}

// all returns nothing if one key has no value.
func (s *store) all(keys []string) (found []pyproto.Pair) {
	for _, key := range keys {
		v, ok := s.values[key]
		if b := pyproto.BytesOf(v); !ok || b != nil && len(b) == 0 {
			return nil
		}
		found = append(found, pyproto.Pair{Key: key, Value: v})
	}
	return found
}

// release ends the barrier in which the agents of a world wait for others: that of DLRover and of later versions of
// torch, and that of torch to 1.13, which has two keys for every node: that it is there, and that it has seen all
// others, for which the agent of the first one waits.
func (s *store) release(number int) {
	size := s.sizes[number]
	if size == 0 { // no agent has received it, or it is done
		return
	}
	delete(s.sizes, number)
	p := prefix(number) + terminalState
	s.put(p+"/last_member", []byte("<val_ignored>"))
	for i := range size {
		own := p + strconv.Itoa(i)
		s.put(own, []byte(strconv.Itoa(i)))
		s.put(own+".FIN", []byte("FIN"))
	}
}

// meeting is where the first worker of a world will serve the workers' store, as its agent has published it; port 0:
// nothing yet. Agents write address and port separately.
func (s *store) meeting(number int) (addr string, port int, err error) {
	addr = string(pyproto.BytesOf(s.values[prefix(number)+masterAddr]))
	digits := string(pyproto.BytesOf(s.values[prefix(number)+masterPort]))
	if addr == "" || digits == "" {
		return "", 0, nil
	}
	port, err = strconv.Atoi(digits)
	if err != nil || port < 1 || port > 65535 || len(addr) > rendezvous.MaxName || !text.Printable(addr) {
		return "", 0, fmt.Errorf("agents: the leader's address is %.100q and its port %.20q: need one from 1 to 65535", addr,
			digits)
	}
	return addr, port, nil
}

// pairs answers with all keys, each once, or with none if one is missing.
func (h *Host) pairs(m *pyproto.Message) *pyproto.Message {
	h.mu.Lock()
	found := h.store.all(keysOf(m.Dict("kvs")))
	h.mu.Unlock()
	return pyproto.DialectOf(m).New("KeyValuePairs", pyproto.Field{Name: "kvs", Value: &pyproto.Dict{Pairs: found}},
		pyproto.Field{Name: "op", Value: ""})
}

// keysOf are the keys of a question, each once.
func keysOf(d *pyproto.Dict) (keys []string) {
	asked := map[string]bool{}
	for _, p := range d.Pairs {
		if key, _ := p.Key.(string); !asked[key] {
			asked[key] = true
			keys = append(keys, key)
		}
	}
	return keys
}
