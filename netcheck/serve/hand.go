package serve

import (
	"bufio"
	"bytes"
	"net/http"
	"time"

	"golang.org/x/sys/unix"
)

// hand does what there is to do.
type hand struct {
	*lot
	writer  *writer
	waiting waiting
	ready   []*parked // which have news
	buf     []byte
	n       int // what try has read into it
	err     error
	try     func(fd uintptr) bool
}

const (
	// largeRequest is the size from which requests are their server's.
	largeRequest = 8 << 10
	// crowdSize is the number of connections from which a hand pauses after each look, so that more has come at the next
	// one: for every single request it would have to be woken.
	crowdSize  = 256
	crowdPause = 8 * time.Millisecond
)

func newHand(l *lot) *hand {
	h := &hand{lot: l, writer: newWriter(), buf: make([]byte, largeRequest)}
	h.try = func(fd uintptr) bool {
		h.n, h.err = unix.Read(int(fd), h.buf)
		return true
	}
	return h
}

// work serves until the lot is closed.
func (h *hand) work() {
	for {
		all, err := h.poll.wait(&h.waiting)
		if err != nil {
			return
		}
		h.begins(all)
		for _, p := range h.ready {
			h.read(p)
		}
		if h.ends() {
			time.Sleep(crowdPause)
		}
	}
}

// begins sets h.ready. Nobody else has them then.
func (h *hand) begins(all []news) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.reading++
	h.ready = h.ready[:0]
	for _, n := range all {
		switch p := h.conns[n.socket]; {
		case p == nil: // it was closed meanwhile
		case !p.idle:
			p.news = true
		default:
			p.idle, p.ended = false, n.ended
			h.ready = append(h.ready, p)
		}
	}
}

// ends writes the answers that there are by now, unless somebody else does. It reports whether there is a crowd.
func (h *hand) ends() bool {
	h.mu.Lock()
	h.reading--
	crowd := len(h.conns) >= crowdSize
	write := !h.writing && len(h.queue) > 0
	h.writing = h.writing || write
	h.mu.Unlock()
	if write {
		h.write(h.writer)
	}
	return crowd
}

// read takes what has come on a connection: a request, or what its server is to read.
func (h *hand) read(p *parked) {
	data, err := h.receive(p)
	switch {
	case err == unix.EAGAIN && h.rest(p):
	case err != nil:
		h.drop(p)
	default:
		req, ok := h.request(p, data)
		if !ok {
			h.giveBack(p, bytes.Clone(data))
			return
		}
		p.last = p.last || p.ended
		h.hub.park(p, req)
	}
}

// receive reads what there is. The connection above the socket hears itself of its end, which may mean something to it.
func (h *hand) receive(p *parked) ([]byte, error) {
	if !p.ended {
		h.n, h.err = 0, nil
		if err := p.raw.Read(h.try); err != nil {
			return nil, err
		}
		if h.n > 0 || h.err == unix.EAGAIN {
			return h.buf[:max(h.n, 0)], h.err
		}
	}
	n, err := p.Read(h.buf)
	if n > 0 {
		err = nil
	}
	return h.buf[:n], err
}

// request is the one in data: a whole one, nothing more, with the path and the token that the server has accepted on
// this connection before, or on its first one a head that it has accepted on another, and without a wish for anything
// but an answer.
func (h *hand) request(p *parked, data []byte) (req Request, ok bool) {
	head, body, whole := bytes.Cut(data, []byte("\r\n\r\n"))
	if !whole || len(data) == len(h.buf) { // there may be more of it
		return req, false
	}
	c := cutLength(head)
	known := p.known
	if !known.is(c) {
		known = h.lot.heads.get(c)
	}
	switch {
	case known != nil && c.n == len(body) && (p.first || known.origin == p.origin):
	case p.first:
		if c.n == len(body) {
			h.lot.heads.ask(p.Conn, data)
		}
		return req, false
	case !p.accepts(data, len(body)):
		return req, false
	case c.n == len(body) && !p.last:
		known = h.lot.heads.learn(c, p.origin)
	}
	p.known = known
	req, err := decode(body, p.said[:]...)
	p.said = [...]string{req.ID, req.Visit}
	if err == nil && p.first {
		return req, h.welcome(p, req.ID)
	}
	return req, err == nil
}

// welcome makes a connection one that the server has accepted requests of. Only a node that is told to check itself may
// hold what answers others.
func (h *hand) welcome(p *parked, id string) bool {
	if !h.hub.expects(p.known.run, id) {
		return false
	}
	p.origin, p.first = p.known.origin, false
	h.firsts.Add(-1)
	prove(p.Conn, true)
	return true
}

// accepts parses a request with a body of n bytes.
func (p *parked) accepts(data []byte, n int) bool {
	if uri, post := bytes.CutPrefix(data, []byte("POST ")); !post || !bytes.HasPrefix(uri, []byte(p.uri)) {
		return false // what is for others is not read twice
	}
	rest := bytes.NewReader(data)
	r := bufio.NewReader(rest)
	head, err := http.ReadRequest(r)
	if err != nil || head.RequestURI != p.uri ||
		head.Header.Get("Authorization") != p.token || head.Header.Get("Expect") != "" ||
		!head.ProtoAtLeast(1, 1) || head.ContentLength != int64(n) ||
		r.Buffered()+rest.Len() != n { // a line end without \r has ended the head before
		return false
	}
	p.last = head.Close
	return true
}
