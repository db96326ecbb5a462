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
// of all nodes of a run are mostly the same. As the token is a part of them, what strangers say is compared by digests.
type heads struct {
	known atomic.Pointer[map[headKey]*knownHead] // is never written to, but replaced

	mu    sync.Mutex
	asked map[net.Conn][]byte // requests that were given to the server
}

type headKey [sha256.Size]byte

type knownHead struct {
	origin
	before, after string // the length
}

// maxHeads bounds both.
const maxHeads = 64

// cutHead is a head without the length of the body.
type cutHead struct {
	before, after []byte
	n             int // the length; -1: it is not where it can be cut out
}

func cutLength(head []byte) cutHead {
	before, after, found := bytes.Cut(head, []byte("\r\nContent-Length: "))
	digits, after, _ := bytes.Cut(after, []byte("\r\n"))
	n, err := strconv.ParseUint(string(digits), 10, 16)
	if !found || err != nil {
		return cutHead{n: -1}
	}
	return cutHead{before, after, int(n)}
}

func (c cutHead) key() headKey {
	text := make([]byte, 0, 1024)                                           // on the stack
	text = append(append(append(text, c.before...), "\n\n"...), c.after...) // which neither of them has
	return sha256.Sum256(text)
}

// is reports whether c is the same.
func (k *knownHead) is(c cutHead) bool {
	return k != nil && c.n >= 0 && k.before == string(c.before) && k.after == string(c.after)
}

// get returns nil for a head that is not known.
func (k *heads) get(c cutHead) *knownHead {
	known := k.known.Load()
	if known == nil || c.n < 0 {
		return nil
	}
	return (*known)[c.key()]
}

// learn notes a head that was accepted, and returns it. One with two lengths must not be known.
func (k *heads) learn(c cutHead, o origin) *knownHead {
	h := &knownHead{o, string(c.before), string(c.after)}
	for _, part := range [][]byte{c.before, c.after} {
		if bytes.Contains(bytes.ToLower(part), []byte("content-length")) {
			return nil
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	all := map[headKey]*knownHead{c.key(): h}
	if old := k.known.Load(); old != nil {
		for key, o := range *old { // any of them, when there are many
			if len(all) < maxHeads {
				all[key] = o
			}
		}
	}
	k.known.Store(&all)
	return h
}

// ask notes the first request of a connection, of which the server may be the one to know.
func (k *heads) ask(nc net.Conn, data []byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.asked == nil {
		k.asked = map[net.Conn][]byte{}
	}
	for c := range k.asked { // any one: most are answered at once
		if len(k.asked) < maxHeads {
			break
		}
		delete(k.asked, c)
	}
	k.asked[nc] = bytes.Clone(data)
}

// accepted: the server has accepted a request of a connection.
func (k *heads) accepted(nc net.Conn, o origin) {
	k.mu.Lock()
	data, ok := k.asked[nc]
	delete(k.asked, nc)
	k.mu.Unlock()
	head, body, _ := bytes.Cut(data, []byte("\r\n\r\n"))
	if p := (&parked{origin: o}); ok && p.accepts(data, len(body)) && !p.last {
		k.learn(cutLength(head), o)
	}
}
