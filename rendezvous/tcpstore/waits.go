package tcpstore

import (
	"cmp"
	"container/list"
	"net/netip"
	"slices"
	"time"

	"dlrover-run/internal/stable"
)

// Wait is an unset key that clients wait for.
//
// Many keys of PyTorch name the rank that should set them, counted within its process group; N below. They have been
// seen with PyTorch 1.13 and 2.15 and gloo. 1.13 puts /worker/attempt_0 and the like before them, and all begin with as
// many slashes as there are prefixes.
//
//	default_pg/0/0/N, default_pg/0/0/rank_N     1.13, init_process_group: rank N has not come
//	default_pg/G/0/N, default_pg/G/0/rank_N     1.13, new_group: G is the group's number
//	default_pg/0//cpu//0/N                      2.15, init_process_group
//	default_pg/0//G//cpu//0/N                   2.15, new_group
//	default_pg/G/SEQ_NUM_STORE_KEY              1.13: the group's rank 0 has not come as far as the others
//
// In the default group N is the rank. In others it is not: with new_group([0, 1, 3]), 2 is rank 3. A rank waits for the
// others of its group one after the other, each time for a single key and in one WAIT for all the remaining time. So
// Since is when it began, and further missing ranks are not named. Where PyTorch has NCCL, default_pg/0//cuda//I is the
// id of the group's communicator number I, which its rank 0 sets. Collectives after that do not touch the store.
type Wait struct {
	Key   string
	Since time.Time        // when the longest present wait began
	Peers []netip.AddrPort // their ends of the connections, longest wait first; IPv4 is never mapped to IPv6
	More  int              // how many peers are not in Peers
}

// Bounds of the work and the result of Waits.
const (
	maxWaits     = 64
	maxWaitPeers = 64
	maxWaitKeys  = 64 << 10
)

// Waits returns the keys that are waited for in the present namespace, those with the oldest waits first: 64 at most,
// each with 64 peers at most. A call takes time in proportion to the keys that are waited for (65,536 are looked at),
// and holds up requests meanwhile.
func (s *Server) Waits() []Wait {
	s.mu.Lock()
	sp := s.space
	s.mu.Unlock()
	sp.mu.Lock()
	defer sp.mu.Unlock()
	if sp.ended {
		return nil
	}
	waits := sp.store.oldest()
	for i := range waits {
		sp.addPeersLocked(&waits[i])
	}
	return waits
}

// oldest returns up to maxWaits keys without their peers.
func (s *store) oldest() []Wait {
	waits := make([]Wait, 0, min(len(s.waiters), maxWaitKeys))
	for key, queue := range s.waiters {
		if len(waits) == maxWaitKeys {
			break
		}
		waits = append(waits, Wait{Key: key, Since: waiter(queue.Front()).since})
	}
	stable.Sort(waits, func(a, b Wait) int { return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Key, b.Key)) })
	return slices.Clone(waits[:min(len(waits), maxWaits)])
}

func waiter(e *list.Element) *wait { return e.Value.(*place).wait }

func (sp *space) addPeersLocked(w *Wait) {
	queue := sp.store.waiters[w.Key]
	e := queue.Front()
	for range min(queue.Len(), maxWaitPeers) {
		if peer, ok := sp.peerLocked(waiter(e).conn); ok {
			w.Peers = append(w.Peers, peer)
		}
		e = e.Next()
	}
	w.More = queue.Len() - len(w.Peers)
}

// peerLocked returns the address of a connection, if it is one of IP.
func (sp *space) peerLocked(id connID) (netip.AddrPort, bool) {
	c := sp.conns[id]
	if c == nil {
		return netip.AddrPort{}, false
	}
	return c.peer, c.peer.IsValid()
}
