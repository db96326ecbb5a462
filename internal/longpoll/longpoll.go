// Package longpoll keeps the connections of requests that wait for news. While net/http holds a request, it costs 30 kB
// and two goroutines; here it is 3 kB with all that the rendezvous has of a node, and none. So a handler takes the
// connection of such a request out of its server, and answers when there is an answer. Further requests of the same
// method and path are passed to the server's handler from here, and so is a POST beside that path or beside its folder.
// With any other one the connection goes back to the server.
//
// Goroutines: one that waits for all plain connections, and one for each that has TLS, at most 256 that serve requests,
// a few that write answers, and one for the way back to the server. All end with the server.
package longpoll

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"path"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/epoll"
	"dlrover-run/internal/secure"
)

const (
	// writeTime is how long a peer may take to accept an answer. Nearly always there is room for it at once.
	writeTime = 5 * time.Second
	// idleTime is how long a connection waits for its next request, from the one before; a plain one up to a quarter
	// longer. None is held for half as long.
	idleTime = 3 * time.Minute
	// large is the size from which an answer may not fit into the socket's buffer, and keeps no others waiting. Requests
	// of that size are their server's.
	large = 8 << 10
	// most is how many requests are served at a time. Of 10,000 that come at once, each with a goroutine of its own, the
	// larger stacks and the buffers would cost up to a fifth of the processor time.
	most = 256
	// spare is how many that have served a request wait for the next one: each has grown a stack for that.
	spare = 64
	// restTime is how long the rest of a request may take after its first byte. Then it is the server's.
	restTime = 100 * time.Millisecond
)

// Pool keeps the connections that were taken out of one server. The zero value is a Pool of the first server that
// serves with it.
type Pool struct {
	mu       sync.Mutex // the last that is taken
	srv      *http.Server
	back     chan net.Conn // to srv
	done     chan struct{} // closed with srv
	conns    map[uint64]*Conn
	lastID   uint64
	ready    *epoll.Set  // has the plain connections; nil: there was none yet, or the server has ended
	idle     *time.Timer // of these
	requests crew
	answers  crew
	writes   sync.WaitGroup // of answers
	closed   bool
}

// crew are goroutines that make calls in the order in which they came. A few of them stay for the next calls: they have
// the larger stacks that these take.
type crew struct {
	queue         []func()
	workers, idle int
	news          *sync.Cond // for the idle ones
}

// Conn is a connection out of its server. One request of it is under way, or it waits for the next one.
type Conn struct {
	net.Conn
	pool         *Pool
	id           uint64
	plain        *net.TCPConn    // waits in pool.ready; nil: in a goroutine, in read
	ctx          context.Context // of all its requests
	remote       string
	method, path string // of the requests that come here
	last         bool   // it is closed after the answer
	first        [1]byte
	got          int // bytes in first

	// Guarded by pool.mu.
	busy  bool          // a request is under way
	early bool          // the next one has begun before its answer
	gone  func()        // the peer has hung up; nil: no request is held
	begun time.Time     // the last request
	added bool          // to pool.ready
	turn  chan struct{} // of read; nil: it has not begun
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
	c := &Conn{Conn: nc, pool: p, plain: secure.Plain(nc), ctx: context.WithoutCancel(req.Context()),
		remote: req.RemoteAddr, method: req.Method, path: req.URL.Path, begun: time.Now(),
		last: req.Close || rw.Reader.Buffered() > 0, busy: true}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed { // meanwhile: nobody else would end it
		_ = nc.Close()
	}
	p.lastID++
	c.id = p.lastID
	p.conns[c.id] = c
	return c
}

// Hold waits for an answer by Later, or calls gone when the peer hangs up before, or its server ends. It calls gone in
// another goroutine than the caller's.
func (c *Conn) Hold(gone func()) {
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	c.gone = gone
	c.readsLocked()
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
	if p.answers.takes(func() { c.guarded(func() { c.later(f) }) }, &p.mu, runtime.GOMAXPROCS(0)) {
		p.writes.Go(func() { p.work(&p.answers) })
	}
}

// takes takes a call, and reports whether one more worker is to start. There are so many at most.
func (w *crew) takes(call func(), mu *sync.Mutex, most int) bool {
	w.queue = append(w.queue, call)
	switch {
	case w.idle > 0:
		w.idle--
		w.news.Signal()
	case w.workers < most:
		w.workers++
		w.news = cmp.Or(w.news, sync.NewCond(mu))
		return true
	}
	return false
}

// end ends the idle workers.
func (w *crew) end() {
	if w.news != nil {
		w.news.Broadcast()
	}
}

// work makes the calls of a crew.
func (p *Pool) work(w *crew) {
	p.mu.Lock()
	defer p.mu.Unlock()
	defer func() { w.workers-- }()
	for {
		for len(w.queue) > 0 {
			call := w.queue[0]
			w.queue[0] = nil
			w.queue = w.queue[1:]
			p.mu.Unlock()
			call()
			p.mu.Lock()
		}
		w.queue = nil
		if p.closed || w.idle >= spare {
			return
		}
		w.idle++
		w.news.Wait()
	}
}

func (c *Conn) later(f func(w http.ResponseWriter) (answered bool)) {
	a := c.answer()
	switch {
	case !f(a):
		a.free()
	case a.body.Len() < large:
		a.send()
	default:
		c.pool.writes.Go(a.send)
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
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	early := c.early
	c.busy, c.early = false, false
	if early {
		c.beginsLocked()
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
	c.leaveLocked()
	return !c.pool.closed
}

// leaveLocked ends the wait for the next request.
func (c *Conn) leaveLocked() {
	switch {
	case c.pool.conns[c.id] != c:
		return
	case c.turn != nil:
		close(c.turn) // read may wait for it
	case c.added:
		_ = epoll.Control(c.plain, c.pool.ready.Remove) // closed, it was removed
	}
	c.goneLocked()
	delete(c.pool.conns, c.id)
}

func (c *Conn) goneLocked() {
	if c.gone != nil {
		go c.gone()
		c.gone = nil
	}
}

// readsLocked waits for the next request, and for the end of the connection.
func (c *Conn) readsLocked() {
	switch {
	case c.pool.conns[c.id] != c:
		c.goneLocked()
	case c.plain != nil:
		if c.awaitLocked() != nil { // it is closed, or the kernel is out of memory
			go c.hungUp()
		}
	case c.turn == nil:
		_ = c.SetReadDeadline(time.Now().Add(idleTime))
		c.turn = make(chan struct{}, 1)
		go c.read()
	default:
		c.turn <- struct{}{}
	}
}

// awaitLocked has happened called once for the next request, or the end of the connection.
func (c *Conn) awaitLocked() (err error) {
	p := c.pool
	if p.closed {
		return net.ErrClosed
	}
	if p.ready == nil {
		if p.ready, err = epoll.Open(p.happened); err != nil {
			return err
		}
		p.idle = time.AfterFunc(idleTime/4, p.sweep)
	}
	await := p.ready.Await
	if !c.added {
		await, c.added = p.ready.Add, true
	}
	return epoll.Control(c.plain, func(fd int) error { return await(fd, c.id, unix.EPOLLIN|unix.EPOLLRDHUP) })
}

// happened is called for plain connections with bytes, or at their end.
func (p *Pool) happened(events []unix.EpollEvent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range events {
		c := p.conns[epoll.ID(e)]
		switch {
		case c == nil:
		case e.Events&(epoll.End|unix.EPOLLRDHUP) != 0:
			p.callLocked(func() { c.readFirst() })
		default:
			c.beginsLocked()
		}
	}
}

// sweep closes the plain connections that have waited for too long.
func (p *Pool) sweep() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		if c.added && !c.busy && time.Since(c.begun) > idleTime {
			_ = c.Close()
			c.leaveLocked()
		}
	}
	if !p.closed {
		p.idle.Reset(idleTime / 4)
	}
}

// read waits for the first byte of each request, and for the end of the connection. It needs little memory.
func (c *Conn) read() {
	for more := true; more && c.readFirst(); {
		_, more = <-c.turn
	}
}

// readFirst reads the first byte of a request. It reports false at the end of the connection.
func (c *Conn) readFirst() bool {
	if c.got, _ = c.Read(c.first[:]); c.got == 0 {
		c.hungUp()
		return false
	}
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	c.beginsLocked()
	return true
}

func (c *Conn) hungUp() {
	c.pool.mu.Lock()
	gone := c.gone
	c.gone = nil
	c.pool.mu.Unlock()
	c.close()
	if gone != nil {
		gone()
	}
}

// beginsLocked has the next request served after the answer of the one before.
func (c *Conn) beginsLocked() {
	if c.busy {
		c.early = true
		return
	}
	c.busy, c.begun = true, time.Now()
	c.pool.callLocked(c.receive)
}

// callLocked has f called soon, one of few at a time.
func (p *Pool) callLocked(f func()) {
	if p.requests.takes(f, &p.mu, most) {
		go p.work(&p.requests)
	}
}

var readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, large) }}

// receive reads the data that came with the first byte of a request.
func (c *Conn) receive() {
	r := readers.Get().(*bufio.Reader)
	defer readers.Put(r)
	defer r.Reset(nil)
	data := c.fill(r)
	if len(data) == 0 {
		c.hungUp()
		return
	}
	req := c.next(r, data)
	if req == nil {
		c.giveBack(bytes.Clone(data))
		return
	}
	c.guarded(func() { c.serve(req) })
}

// fill has r read what is there. Where a goroutine reads, the time for the next request runs from then on.
func (c *Conn) fill(r *bufio.Reader) (data []byte) {
	r.Reset(&returned{c.Conn, c.first[:c.got]})
	if c.plain == nil {
		_ = c.SetReadDeadline(time.Now().Add(restTime))
		defer func() { _ = c.SetReadDeadline(time.Now().Add(idleTime)) }()
	}
	_, _ = r.Peek(c.got + 1)
	c.got = 0
	data, _ = r.Peek(r.Buffered())
	return data
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

// expects: a request that may be held, or a POST beside it or beside its folder.
func (c *Conn) expects(method, at string) bool {
	if method == c.method && at == c.path {
		return true
	}
	beside := path.Dir(c.path)
	return method == http.MethodPost && (path.Dir(at) == beside || path.Dir(at) == path.Dir(beside))
}

// serve passes a request to the server's handler, which answers, or holds it.
func (c *Conn) serve(req *http.Request) {
	a := c.answer()
	c.pool.srv.Handler.ServeHTTP(a, req)
	if a.taken {
		a.free()
		return
	}
	a.send()
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	c.readsLocked()
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
	_ = c.SetReadDeadline(time.Time{})
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

// bodies are for ReadBody.
var bodies = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// ReadBody reads a body to its end and passes it to use, which must not keep it: bodies share their memory. The errors
// are those of r.
func ReadBody(r io.Reader, use func(body []byte)) error {
	b := bodies.Get().(*bytes.Buffer)
	_, err := b.ReadFrom(r)
	if err == nil {
		use(b.Bytes())
	}
	if b.Cap() <= large {
		b.Reset()
		bodies.Put(b)
	}
	return err
}

// answer is an answer that is being made. It implements http.ResponseWriter.
type answer struct {
	conn   *Conn
	taken  bool // by Take
	status int
	header http.Header
	body   bytes.Buffer
	text   []byte // as it goes over the wire
}

// unused are answers that have been sent.
var unused = sync.Pool{New: func() any { return &answer{header: http.Header{}} }}

func (c *Conn) answer() *answer {
	a := unused.Get().(*answer)
	a.conn = c
	return a
}

// free ends the use of a.
func (a *answer) free() {
	if a.body.Cap() > large {
		return
	}
	clear(a.header)
	a.body.Reset()
	*a = answer{header: a.header, body: a.body, text: a.text[:0]}
	unused.Put(a)
}

// send sends a, and ends its use.
func (a *answer) send() {
	a.write()
	a.conn.finish(a.text)
	a.free()
}

// Header implements http.ResponseWriter.
func (a *answer) Header() http.Header { return a.header }

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

// SetReadDeadline is that of the body, which has been read.
func (*answer) SetReadDeadline(time.Time) error { return nil }

// write makes the text.
func (a *answer) write() {
	a.WriteHeader(http.StatusOK)
	if a.header.Get("Connection") == "close" {
		a.conn.last = true
	} else if a.conn.last {
		a.header.Set("Connection", "close")
	}
	a.text = fmt.Appendf(a.text, "HTTP/1.1 %d %s\r\nDate: ", a.status, http.StatusText(a.status))
	a.text = time.Now().UTC().AppendFormat(a.text, http.TimeFormat)
	if a.status != http.StatusNoContent {
		a.text = fmt.Appendf(a.text, "\r\nContent-Length: %d", a.body.Len())
	}
	b := bytes.NewBuffer(append(a.text, "\r\n"...))
	_ = a.header.Write(b) // to memory
	b.WriteString("\r\n")
	b.Write(a.body.Bytes())
	a.text = b.Bytes()
}

// opens reports whether the pool is that of a server, which it is of the first one until that ends.
func (p *Pool) opens(srv *http.Server) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.srv == nil {
		p.srv, p.back, p.done, p.conns = srv, make(chan net.Conn), make(chan struct{}), map[uint64]*Conn{}
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
		p.requests.end()
		p.answers.end()
	}
	p.mu.Unlock()
	p.writes.Wait()
	if ready := p.end(); ready != nil {
		ready.Close()
	}
	return nil
}

// end closes all connections.
func (p *Pool) end() *epoll.Set {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
		c.leaveLocked()
	}
	ready := p.ready
	if ready != nil {
		p.idle.Stop()
		p.ready = nil
	}
	return ready
}

// Addr implements net.Listener.
func (wayBack) Addr() net.Addr { return &net.UnixAddr{Name: "held connections", Net: "unix"} }
