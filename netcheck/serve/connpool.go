package serve

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"dlrover-run/netcheck"
)

// connPool keeps the connections of requests that are held. While net/http holds a request it costs 25 kB and two
// goroutines, more than all else that a node needs here. So the connection is taken out of its server and answered when
// there is an answer. It goes back to the server with the next request, unless that is as the one before.
//
// A connection is, in turn, in the hands of its server, held (a waiter of its node has it), in queue, and idle.
type connPool struct {
	hub *Hub
	wg  sync.WaitGroup

	mu        sync.Mutex // the last that is taken
	listeners map[*http.Server]*returnListener
	idle      map[*heldConn]struct{} // that wait for the next request
	queue     []outgoing
	writing   bool // a goroutine empties the queue
	closed    bool
}

// heldConn is a connection that was taken out of a server.
type heldConn struct {
	net.Conn
	origin
	listener *returnListener
	last     bool // it is closed after the answer
}

// origin has the properties by which the server has accepted requests.
type origin struct {
	run, uri string
	token    string // the Authorization that came with them
}

// outgoing is an answer that is to be written.
type outgoing struct {
	to  *heldConn
	a   netcheck.Assignment
	err error
}

const (
	// writeTime is how long a peer may take to accept an answer. Nearly always there is room for it at once.
	writeTime = 5 * time.Second
	// idleTime is how long a connection waits for the next request.
	idleTime = time.Minute
	// large is the size from which an answer may not fit into the socket's buffer, and keeps no others waiting. Requests
	// of that size are their server's.
	large = 8 << 10
)

func newConnPool(h *Hub) *connPool {
	return &connPool{hub: h, listeners: map[*http.Server]*returnListener{}, idle: map[*heldConn]struct{}{}}
}

// take takes the connection of a request out of its server; nil: it cannot be.
func (l *connPool) take(w http.ResponseWriter, req *http.Request) *heldConn {
	srv, _ := req.Context().Value(http.ServerContextKey).(*http.Server)
	if srv == nil || !req.ProtoAtLeast(1, 1) || req.ProtoMajor != 1 {
		return nil
	}
	h := l.listenerOf(srv)
	if h == nil {
		return nil
	}
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return nil
	}
	if r, ok := conn.(*returned); ok {
		conn = r.Conn // its bytes have been read
	}
	o := origin{req.PathValue("run"), req.RequestURI, req.Header.Get("Authorization")}
	return &heldConn{Conn: conn, origin: o, listener: h, last: req.Close || rw.Reader.Buffered() > 0}
}

// send answers on a held connection. It does not block. A connection that was held while the pool was closed gets no
// answer.
func (l *connPool) send(to *heldConn, a netcheck.Assignment, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		_ = to.Close()
		return
	}
	l.queue = append(l.queue, outgoing{to, a, err})
	if !l.writing {
		l.writing = true
		l.wg.Go(l.write)
	}
}

// write empties the queue.
func (l *connPool) write() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.queue) > 0 {
		batch := l.queue
		l.queue = nil
		l.mu.Unlock()
		for _, o := range batch {
			if text := o.text(); len(text) < large {
				l.finish(o.to, text)
			} else {
				l.wg.Go(func() { l.finish(o.to, text) })
			}
		}
		l.mu.Lock()
	}
	l.writing = false
}

// text is the answer as it goes over the wire.
func (o *outgoing) text() []byte {
	status, body := http.StatusOK, any(o.a)
	if o.err != nil {
		code := ""
		status, code = statusOf(o.err)
		body = errorBody{Code: code, Error: o.err.Error()}
	}
	data, err := json.Marshal(body)
	if err != nil {
		status, data = http.StatusInternalServerError, []byte(`{"code":"internal","error":"the answer is no JSON"}`)
	}
	o.to.last = o.to.last || errors.Is(o.err, errClosed)
	ends := ""
	if o.to.last {
		ends = "Connection: close\r\n"
	}
	return fmt.Appendf(nil, "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n%s",
		status, http.StatusText(status), len(data), ends, data)
}

// finish writes an answer, and starts to wait for the next request.
func (l *connPool) finish(p *heldConn, text []byte) {
	_ = p.SetWriteDeadline(time.Now().Add(writeTime))
	_, err := p.Write(text)
	_ = p.SetWriteDeadline(time.Time{})
	if err != nil || p.last || !l.rest(p) {
		_ = p.Close()
	}
}

// rest lets a connection wait for its next request; false: its server is closed.
func (l *connPool) rest(p *heldConn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || p.listener.over {
		return false
	}
	l.idle[p] = struct{}{}
	l.wg.Go(func() { l.await(p) })
	return true
}

// await holds the next request of a connection, or gives the connection back to its server. It needs little memory
// while it waits.
func (l *connPool) await(p *heldConn) {
	_ = p.SetReadDeadline(time.Now().Add(idleTime))
	first := make([]byte, 1)
	if n, _ := p.Read(first); n == 0 {
		l.begins(p)
		_ = p.Close()
		return
	}
	l.receive(p, first)
}

// begins takes the connection out of idle and reports whether it may be used again.
func (l *connPool) begins(p *heldConn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.idle, p)
	return !l.closed && !p.listener.over
}

var readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, large) }}

// receive reads the data that came with the first byte of a request.
func (l *connPool) receive(p *heldConn, first []byte) {
	r := readers.Get().(*bufio.Reader)
	defer readers.Put(r)
	defer r.Reset(nil)
	r.Reset(&returned{p.Conn, first})
	_, _ = r.Peek(2)
	data, _ := r.Peek(r.Buffered())
	goes := l.begins(p) && p.SetReadDeadline(time.Time{}) == nil
	if req, ok := p.next(r, data); goes && ok {
		l.hub.serveHeld(p, req)
	} else if !goes || !p.listener.give(unread(p.Conn, bytes.Clone(data))) {
		_ = p.Close()
	}
}

// next is the request in data, which r has read. It must be one whole request and nothing more, with the path and the
// token that the server has accepted on this connection before. It must request nothing but an answer.
func (p *heldConn) next(r *bufio.Reader, data []byte) (req Request, ok bool) {
	if !bytes.Contains(data, []byte("\r\n\r\n")) {
		return req, false
	}
	head, err := http.ReadRequest(r)
	if err != nil || head.Method != http.MethodPost || head.RequestURI != p.uri ||
		head.Header.Get("Authorization") != p.token || head.Header.Get("Expect") != "" ||
		!head.ProtoAtLeast(1, 1) || head.ContentLength != int64(r.Buffered()) {
		return req, false
	}
	body, _ := r.Peek(r.Buffered())
	req, err = decode(body)
	p.last = head.Close
	return req, err == nil
}

// unread is c with its first bytes put back. If c itself can take them back, it keeps its type, by which its server may
// know it.
func unread(c net.Conn, read []byte) net.Conn {
	if u, ok := c.(interface{ Unread([]byte) }); ok {
		u.Unread(read)
		return c
	}
	return &returned{Conn: c, first: read}
}

// returned is a connection whose first bytes have been read.
type returned struct {
	net.Conn
	first []byte
}

// Read returns these first.
func (r *returned) Read(b []byte) (int, error) {
	if len(r.first) > 0 && len(b) > 0 {
		n := copy(b, r.first)
		r.first = r.first[n:]
		return n, nil
	}
	return r.Conn.Read(b)
}

// Prove passes the proof to the connection below, which may count unproved ones.
func (r *returned) Prove(ok bool) {
	if p, is := r.Conn.(interface{ Prove(bool) }); is {
		p.Prove(ok)
	}
}

// returnListener is a net.Listener through which a server gets its connections back.
type returnListener struct {
	pool  *connPool
	conns chan net.Conn
	done  chan struct{}
	over  bool // done is closed; of the pool's lock
}

// listenerOf is that of a server, a new one if need be, and nil when the pool is closed.
func (l *connPool) listenerOf(srv *http.Server) *returnListener {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	h := l.listeners[srv]
	if h == nil {
		h = &returnListener{pool: l, conns: make(chan net.Conn), done: make(chan struct{})}
		l.listeners[srv] = h
		l.wg.Go(func() {
			_ = srv.Serve(h) // until either is closed
			_ = h.Close()
			l.mu.Lock()
			defer l.mu.Unlock()
			delete(l.listeners, srv)
		})
	}
	return h
}

// give hands a connection to the server.
func (h *returnListener) give(c net.Conn) bool {
	select {
	case h.conns <- c:
		return true
	case <-h.done:
		return false
	}
}

// Accept implements net.Listener.
func (h *returnListener) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener. Connections that wait for a request are closed, too; held requests are answered first.
func (h *returnListener) Close() error {
	h.pool.mu.Lock()
	defer h.pool.mu.Unlock()
	h.closeLocked()
	return nil
}

func (h *returnListener) closeLocked() {
	if h.over {
		return
	}
	h.over = true
	close(h.done)
	for p := range h.pool.idle {
		if p.listener == h {
			_ = p.Close()
		}
	}
}

// Addr implements net.Listener.
func (h *returnListener) Addr() net.Addr {
	return &net.UnixAddr{Name: "parked connections", Net: "unix"}
}

// close ends all connections but those that still have an answer to come, and waits for these. All held requests have
// been answered.
func (l *connPool) close() {
	l.mu.Lock()
	l.closed = true
	for _, h := range l.listeners {
		h.closeLocked()
	}
	l.mu.Unlock()
	l.wg.Wait()
}
