// Package longpoll keeps the connections of requests that wait for news. While net/http holds a request, it costs 30 kB
// and two goroutines; here it is 6 kB with all that the rendezvous has of a node, and one goroutine. So a handler takes
// the connection of such a request out of its server, and answers when there is an answer. Further requests of the same
// method and path are passed to the server's handler from here, and so is a POST beside that path. With any other one
// the connection goes back to the server.
//
// Goroutines: one for each connection, a few that write answers, and one for the way back to the server. All end with
// the server.
package longpoll

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"log"
	"net"
	"net/http"
	"path"
	"runtime"
	"runtime/debug"
	"sync"
	"time"
)

const (
	// writeTime is how long a peer may take to accept an answer. Nearly always there is room for it at once.
	writeTime = 5 * time.Second
	// idleTime is how long a connection waits for its next request.
	idleTime = 3 * time.Minute
	// large is the size from which an answer may not fit into the socket's buffer, and keeps no others waiting. Requests
	// of that size are their server's.
	large = 8 << 10
)

// Pool keeps the connections that were taken out of one server. The zero value is a Pool of the first server that
// serves with it.
type Pool struct {
	mu      sync.Mutex // the last that is taken
	srv     *http.Server
	back    chan net.Conn // to srv
	done    chan struct{} // closed with srv
	conns   map[*Conn]struct{}
	queue   []task
	workers int
	writes  sync.WaitGroup // workers, and those who write large answers
	closed  bool
}

// task is a call that may answer a request.
type task struct {
	c *Conn
	f func(w http.ResponseWriter) (answered bool)
}

// Conn is a connection out of its server. One request of it is under way, or it waits for the next one.
type Conn struct {
	net.Conn
	pool         *Pool
	ctx          context.Context // of all its requests
	remote       string
	method, path string // of the requests that come here
	last         bool   // it is closed after the answer

	// Guarded by pool.mu.
	busy  bool   // a request is under way
	early []byte // has come before its answer
	gone  func() // the peer has hung up; nil: no request is held
}

// Take takes the connection of a request out of its server. The handler returns without an answer then, after Hold.
// Nil: it cannot be taken.
func (p *Pool) Take(w http.ResponseWriter, req *http.Request) *Conn {
	if a, ok := w.(*answer); ok {
		a.taken = true
		return a.conn
	}
	srv, _ := req.Context().Value(http.ServerContextKey).(*http.Server)
	if srv == nil || req.ProtoMajor != 1 || req.ProtoMinor < 1 || !p.opens(srv) {
		return nil
	}
	nc, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return nil
	}
	if r, ok := nc.(*returned); ok {
		nc = r.Conn // its bytes have been read
	}
	c := &Conn{Conn: nc, pool: p, ctx: context.WithoutCancel(req.Context()), remote: req.RemoteAddr,
		method: req.Method, path: req.URL.Path, last: req.Close || rw.Reader.Buffered() > 0, busy: true}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns[c] = struct{}{}
	return c
}

// Hold waits for an answer by Later, or calls gone when the peer hangs up before, or its server ends. It calls gone in
// a goroutine of its own.
func (c *Conn) Hold(gone func()) {
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	c.gone = gone
	go c.read()
}

// Later has f called soon, one of few at a time: it may answer the held request, and reports whether it has. Later does
// not block.
func (c *Conn) Later(f func(w http.ResponseWriter) (answered bool)) {
	p := c.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	p.queue = append(p.queue, task{c, f})
	if p.workers < runtime.GOMAXPROCS(0) {
		p.workers++
		p.writes.Go(p.work)
	}
}

// work empties the queue.
func (p *Pool) work() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.queue) > 0 {
		t := p.queue[0]
		p.queue[0] = task{}
		if p.queue = p.queue[1:]; len(p.queue) == 0 {
			p.queue = nil
		}
		p.mu.Unlock()
		t.c.guarded(func() { t.do() })
		p.mu.Lock()
	}
	p.workers--
}

func (t task) do() {
	a := answer{conn: t.c}
	if !t.f(&a) {
		return
	}
	if text := a.text(); len(text) < large {
		t.c.finish(text)
	} else {
		t.c.pool.writes.Go(func() { t.c.finish(text) })
	}
}

// guarded closes the connection after a panic of a handler, as net/http does.
func (c *Conn) guarded(f func()) {
	defer func() {
		if p := recover(); p != nil {
			c.pool.logf("http: panic serving %v: %v\n%s", c.remote, p, debug.Stack())
			c.close()
		}
	}()
	f()
}

// finish writes an answer, and lets the connection wait for its next request.
func (c *Conn) finish(text []byte) {
	c.pool.mu.Lock()
	c.gone = nil
	c.pool.mu.Unlock()
	_ = c.SetWriteDeadline(time.Now().Add(writeTime))
	if _, err := c.Write(text); err != nil || c.last {
		c.close()
		return
	}
	_ = c.SetReadDeadline(time.Now().Add(idleTime))
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	first := c.early
	c.busy, c.early = false, nil
	if first != nil {
		go c.receive(first)
	}
}

func (c *Conn) close() {
	c.leave()
	_ = c.Close()
}

// leave takes c out of the pool, and reports whether that still works.
func (c *Conn) leave() (open bool) {
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	delete(c.pool.conns, c)
	return !c.pool.closed
}

// read waits for the first byte of the next request, and for the end of the connection. It needs little memory.
func (c *Conn) read() {
	first := make([]byte, 1)
	n, _ := c.Read(first)
	c.pool.mu.Lock()
	busy, gone := c.busy, c.gone
	if n > 0 && busy {
		c.early = first
	}
	if n == 0 {
		c.gone = nil
	}
	c.pool.mu.Unlock()
	switch {
	case n == 0:
		c.close()
		if gone != nil {
			gone()
		}
	case !busy:
		c.receive(first)
	}
}

var readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, large) }}

// receive reads the data that came with the first byte of a request.
func (c *Conn) receive(first []byte) {
	r := readers.Get().(*bufio.Reader)
	defer readers.Put(r)
	defer r.Reset(nil)
	r.Reset(&returned{c.Conn, first})
	_, _ = r.Peek(2)
	data, _ := r.Peek(r.Buffered())
	if err := c.SetReadDeadline(time.Time{}); err != nil {
		c.close()
		return
	}
	req := c.next(r, data)
	if req == nil {
		c.giveBack(bytes.Clone(data))
		return
	}
	c.pool.mu.Lock()
	c.busy = true
	c.pool.mu.Unlock()
	c.guarded(func() { c.serve(req) })
}

// next is the request in data, which r has read; nil: it is one for the server. It must be one whole request and
// nothing more, and want nothing but an answer.
func (c *Conn) next(r *bufio.Reader, data []byte) *http.Request {
	if !bytes.Contains(data, []byte("\r\n\r\n")) {
		return nil
	}
	req, err := http.ReadRequest(r)
	if err != nil || !c.expects(req.Method, req.URL.Path) || req.Header.Get("Expect") != "" ||
		req.Header.Get("Upgrade") != "" || !req.ProtoAtLeast(1, 1) || req.ContentLength != int64(r.Buffered()) {
		return nil
	}
	c.last = req.Close
	req.RemoteAddr = c.remote
	return req.WithContext(c.ctx)
}

// expects: a request that may be held, or a POST beside it.
func (c *Conn) expects(method, at string) bool {
	return method == c.method && at == c.path || method == http.MethodPost && path.Dir(at) == path.Dir(c.path)
}

// serve passes a request to the server's handler, which answers, or holds it.
func (c *Conn) serve(req *http.Request) {
	a := answer{conn: c}
	c.pool.srv.Handler.ServeHTTP(&a, req)
	if a.taken {
		return
	}
	c.finish(a.text())
	go c.read()
}

func (p *Pool) logf(format string, args ...any) {
	if p.srv.ErrorLog != nil {
		p.srv.ErrorLog.Printf(format, args...)
	} else {
		log.Printf(format, args...)
	}
}

// giveBack gives the connection back to its server, with the bytes that were read.
func (c *Conn) giveBack(read []byte) {
	if !c.leave() {
		_ = c.Close()
		return
	}
	select {
	case c.pool.back <- unread(c.Conn, read):
	case <-c.pool.done:
		_ = c.Close()
	}
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

// answer is an answer that is being made. It implements http.ResponseWriter.
type answer struct {
	conn   *Conn
	taken  bool // by Take
	status int
	header http.Header
	body   bytes.Buffer
}

// Header implements http.ResponseWriter.
func (a *answer) Header() http.Header {
	if a.header == nil {
		a.header = http.Header{}
	}
	return a.header
}

// WriteHeader implements http.ResponseWriter.
func (a *answer) WriteHeader(status int) {
	if a.status == 0 {
		a.status = status
	}
}

// Write implements http.ResponseWriter.
func (a *answer) Write(b []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	return a.body.Write(b)
}

// text is the answer as it goes over the wire.
func (a *answer) text() []byte {
	a.WriteHeader(http.StatusOK)
	if a.Header().Get("Connection") == "close" {
		a.conn.last = true
	} else if a.conn.last {
		a.header.Set("Connection", "close")
	}
	head := fmt.Appendf(make([]byte, 0, 256+a.body.Len()), "HTTP/1.1 %d %s\r\nDate: ", a.status,
		http.StatusText(a.status))
	head = time.Now().UTC().AppendFormat(head, http.TimeFormat)
	if a.status != http.StatusNoContent {
		head = fmt.Appendf(head, "\r\nContent-Length: %d", a.body.Len())
	}
	b := bytes.NewBuffer(append(head, "\r\n"...))
	_ = a.header.Write(b) // to memory
	b.WriteString("\r\n")
	b.Write(a.body.Bytes())
	return b.Bytes()
}

// opens reports whether the pool is that of a server, which it is of the first one until that ends.
func (p *Pool) opens(srv *http.Server) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.srv == nil {
		p.srv, p.back, p.done, p.conns = srv, make(chan net.Conn), make(chan struct{}), map[*Conn]struct{}{}
		go func() { // until the server is closed
			_ = srv.Serve(wayBack{p})
			_ = wayBack{p}.Close()
		}()
	}
	return p.srv == srv && !p.closed
}

// wayBack is a net.Listener through which a server gets its connections back.
type wayBack struct{ *Pool }

// Accept implements net.Listener.
func (p wayBack) Accept() (net.Conn, error) {
	select {
	case c := <-p.back:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener. It closes all connections after the answers that are under way.
func (p wayBack) Close() error {
	p.mu.Lock()
	if !p.closed {
		p.closed = true
		close(p.done)
	}
	p.mu.Unlock()
	p.writes.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close() // its goroutine does the rest
	}
	return nil
}

// Addr implements net.Listener.
func (wayBack) Addr() net.Addr { return &net.UnixAddr{Name: "held connections", Net: "unix"} }
