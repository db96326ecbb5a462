package coordinator

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Participation lists the agreements in which a node takes part, by key, out of those of a round (term.round) or of an
// epoch (term.round.epoch). Other nodes do not wait for it in the rest. A dead node has no keys. Holdings that it sends
// all the same count.
type Participation struct {
	Of   string   `json:"of"`
	Node int      `json:"node"`
	Keys []string `json:"keys"`
}

// participants are the known keys of the nodes of a round or an epoch.
type participants struct {
	barrier
	keys map[int][]string
}

func (r *participants) said(node int) bool {
	_, said := r.keys[node]
	return said
}

func (s Participation) check() error {
	long := func(key string) bool { return len(key) > maxKey }
	switch {
	case s.Of == "" || long(s.Of) || slices.ContainsFunc(s.Keys, long):
		return fmt.Errorf("%w: keys of %.80q: need 1 to %d bytes", errBadRequest, s.Of, maxKey)
	case len(s.Keys) > maxKeys:
		return fmt.Errorf("%w: node %d speaks under %d keys, at most %d are possible", ErrLimit, s.Node, len(s.Keys),
			maxKeys)
	case s.Node < 0 || s.Node >= maxShards:
		return fmt.Errorf("%w: node %d: need 0 to %d", errBadRequest, s.Node, maxShards-1)
	}
	return nil
}

func (s Participation) step(st *state, now time.Time) (topics []topic, _ error) {
	r := st.participants[s.Of]
	if r == nil {
		if err := evictFor(st, st.participants); err != nil {
			return nil, err
		}
		r = &participants{barrier: barrier{open: true}, keys: map[int][]string{}}
	}
	more := keyBytes(s.Keys)
	if old, again := r.keys[s.Node]; again {
		more -= keyBytes(old)
	}
	if err := st.reserve(more, "agreements of "+s.Of); err != nil {
		return nil, err
	}
	r.bytes += more
	r.keys[s.Node], r.heard = s.Keys, now
	st.participants[s.Of] = r
	for key, a := range st.agreements {
		if a.open || !slices.Contains(a.of[:], s.Of) {
			continue
		}
		if a.expect(s.Node, s.Keys); a.complete() {
			st.agree(a)
			topics = append(topics, topic{agreed, key})
		}
	}
	return topics, nil
}

func keyBytes(keys []string) int64 {
	n := int64(64)
	for _, key := range keys {
		n += int64(16 + len(key))
	}
	return n
}

// expect records whether a node with these keys takes part.
func (a *agreement) expect(node int, keys []string) {
	if _, spoke := a.held[node]; spoke || node >= a.nodes || slices.Contains(keys, a.key) {
		delete(a.absent, node)
		return
	}
	a.absent[node] = true
}

// applyParticipants marks the nodes that do not take part in a new agreement.
func (st *state) applyParticipants(a *agreement) {
	for _, of := range []string{a.of[1], a.of[0]} { // a node that is dead in the round takes no part in its epochs
		if r := st.participants[of]; r != nil {
			for node, keys := range r.keys {
				a.expect(node, keys)
			}
		}
	}
}

// roundAndEpoch returns the round and the epoch in the key of an agreement, which is "word.term.round.epoch.more". Both
// are empty for other keys.
func roundAndEpoch(key string) (of [2]string) {
	if parts := strings.SplitN(key, ".", 5); len(parts) > 3 {
		of[0] = parts[1] + "." + parts[2]
		of[1] = of[0] + "." + parts[3]
	}
	return of
}
