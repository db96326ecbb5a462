package serve

import (
	"bytes"
	"crypto/sha256"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
)

// heads are what the server has understood and accepted, by all of a request's head but the length of its body. Those
// of all nodes of a run are mostly the same. As the token is a part of them, they are kept and compared as digests.
type heads struct {
	known atomic.Pointer[map[headKey]*origin] // is never written to, but replaced

	mu    sync.Mutex
	asked map[net.Conn]question
}

type headKey [sha256.Size]byte

// question is a request that was given to the server.
type question struct {
	key  headKey
	data []byte
}

// maxHeads bounds both.
const maxHeads = 64

// get returns nil for a head that is not known.
func (k *heads) get(key headKey) *origin {
	if known := k.known.Load(); known != nil {
		return (*known)[key]
	}
	return nil
}

// learn notes a head that was accepted. One with two lengths must not be known.
func (k *heads) learn(key headKey, head []byte, o origin) {
	if bytes.Count(bytes.ToLower(head), []byte("content-length")) != 1 {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	all := map[headKey]*origin{key: &o}
	if old := k.known.Load(); old != nil {
		if len(*old) >= maxHeads {
			return
		}
		for key, o := range *old {
			all[key] = o
		}
	}
	k.known.Store(&all)
}

// ask notes the first request of a connection, of which the server may be the one to know.
func (k *heads) ask(nc net.Conn, key headKey, data []byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.asked == nil {
		k.asked = map[net.Conn]question{}
	}
	for c := range k.asked { // any one: most are answered at once
		if len(k.asked) < maxHeads {
			break
		}
		delete(k.asked, c)
	}
	k.asked[nc] = question{key, bytes.Clone(data)}
}

// accepted: the server has accepted a request of a connection.
func (k *heads) accepted(nc net.Conn, o origin) {
	k.mu.Lock()
	q, ok := k.asked[nc]
	delete(k.asked, nc)
	k.mu.Unlock()
	head, body, _ := bytes.Cut(q.data, []byte("\r\n\r\n"))
	if p := (&parked{origin: o}); ok && p.accepts(q.data, len(body)) && !p.last {
		k.learn(q.key, head, o)
	}
}

// keyOf is the key of a head, and the length of the body; -1: it is not where it can be cut out.
func (h *hand) keyOf(head []byte) (headKey, int) {
	before, after, found := bytes.Cut(head, []byte("\r\nContent-Length: "))
	digits, after, _ := bytes.Cut(after, []byte("\r\n"))
	n, err := strconv.ParseUint(string(digits), 10, 16)
	if !found || err != nil {
		return headKey{}, -1
	}
	h.text = append(append(append(h.text[:0], before...), "\n\n"...), after...) // which neither of them has
	return sha256.Sum256(h.text), int(n)
}
