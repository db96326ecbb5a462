package coordinator

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"time"
)

// peersEvent is a node that looks for its peers.
type peersEvent struct {
	Key      string        `json:"key"`
	Self     Peer          `json:"self"`
	Nodes    int           `json:"nodes"`
	Patience time.Duration `json:"patience"` // ns
}

// exchange collects the addresses and copies of nodes. Unlike an agreement it continues after it has opened: late nodes
// are added, and a node's later data replaces its earlier data.
type exchange struct {
	barrier
	peers  map[int]Peer
	sorted []Peer // nil: peers have changed
	wire   []byte // sorted as a reply: encoded once for all nodes
}

func (h peersEvent) check() error {
	for _, c := range h.Self.Copies {
		if len(c.Dir) > maxPath || c.Dir != "" && !filepath.IsAbs(c.Dir) {
			return fmt.Errorf("%w: checkpoint directory %.80q of a copy of save %.64q is not an absolute path",
				errBadRequest, c.Dir, c.Save)
		}
	}
	return checkBarrier(h.Key, h.Self.Node, h.Nodes, h.Patience)
}

func (h peersEvent) step(st *state, now time.Time) ([]topic, error) {
	x := st.exchanges[h.Key]
	if x == nil {
		if err := evictFor(st, st.exchanges); err != nil {
			return nil, err
		}
		x = &exchange{barrier: barrier{nodes: h.Nodes, due: now.Add(h.Patience)}, peers: map[int]Peer{}}
	}
	if err := x.arrive(h.Key, h.Nodes, now); err != nil {
		return nil, err
	}
	share(h.Self.Copies)
	old, again := x.peers[h.Self.Node]
	if !again || !samePeer(old, h.Self) {
		more := peerBytes(h.Self)
		if again {
			more -= peerBytes(old)
		}
		if err := st.reserve(more, "peers "+h.Key); err != nil {
			return nil, err
		}
		x.bytes += more
		x.peers[h.Self.Node] = h.Self
		x.sorted, x.wire = nil, nil
	}
	st.exchanges[h.Key] = x
	if x.open || len(x.peers) < x.nodes && now.Before(x.due) {
		return nil, nil
	}
	x.open = true
	return []topic{{peersKnown, h.Key}}, nil
}

func samePeer(a, b Peer) bool {
	return a.Node == b.Node && a.Addr == b.Addr && a.Switch == b.Switch && slices.Equal(a.Copies, b.Copies)
}

// share keeps one string for the directory of several copies, as peerBytes counts them.
func share(cs []Copy) {
	for i := 1; i < len(cs); i++ {
		if cs[i].Dir == cs[i-1].Dir {
			cs[i].Dir = cs[i-1].Dir
		}
	}
}

func peerBytes(p Peer) int64 {
	n := int64(160 + len(p.Addr) + len(p.Switch))
	for i, c := range p.Copies {
		n += int64(80 + len(c.Save))
		if i == 0 || c.Dir != p.Copies[i-1].Dir {
			n += int64(len(c.Dir))
		}
	}
	return n
}

// Peers are those of an exchange, in order of nodes; false as long as they wait for each other.
func (st *state) Peers(key string) ([]Peer, bool) {
	x := st.exchanges[key]
	if x == nil || !x.open {
		return nil, false
	}
	if x.sorted == nil {
		for _, node := range slices.Sorted(maps.Keys(x.peers)) {
			x.sorted = append(x.sorted, x.peers[node])
		}
	}
	return x.sorted, true
}

// peersReply is Peers as the body of a reply.
func (st *state) peersReply(key string) ([]byte, bool, error) {
	ps, ok := st.Peers(key)
	if !ok {
		return nil, false, nil
	}
	x := st.exchanges[key]
	if x.wire == nil {
		var err error
		if x.wire, err = json.Marshal(peersReply{ps}); err != nil {
			return nil, false, fmt.Errorf("peers %s: %w", key, err)
		}
	}
	return x.wire, true, nil
}
