package serve

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/netcheck"
)

// lot keeps the connections of requests that are held. While net/http holds a request it costs 25 kB and two
// goroutines, more than all else that a node needs here; so the connection is taken out of its server, answered when
// there is an answer, and given back to the server when the next request comes in on it.
//
// A connection is, in turn, in the hands of its server, parked (a waiter of its node has it), in queue, and idle. When
// the next request is as the one before, it is parked again without a visit to the server, which costs more than all
// else that is done for a request.
//
// A few goroutines, the hands, read these requests and write the answers: in a new one for each request the stack would
// have to grow, which takes as long as the rest.
type lot struct {
	park  func(*parked, Request) // answers a request, now or later
	begun chan begun
	wake  chan struct{} // there are answers, and no hand that will find them
	over  chan struct{} // ends the hands
	hands sync.WaitGroup
	wg    sync.WaitGroup // of everything else: idle connections, servers, what is read, answers

	mu      sync.Mutex // the last that is taken
	homes   map[*http.Server]*home
	idle    map[*parked]struct{} // that wait for the next request
	queue   []outgoing
	reading int  // hands that will look at the queue soon
	writing bool // one is at it
	started bool // the hands
	closed  bool
}

// parked is a connection that was taken out of a server.
type parked struct {
	net.Conn
	raw   syscall.RawConn // of the socket; nil: it cannot be waited for without a buffer
	home  *home
	run   string
	uri   string    // of its requests
	token string    // the Authorization that came with the first one
	last  bool      // it is closed after the answer
	until time.Time // its read deadline
}

// begun is the beginning of a request, mostly all of it.
type begun struct {
	p   *parked
	buf *[largeAnswer]byte
	n   int
}

// outgoing is an answer that is to be written.
type outgoing struct {
	to  *parked
	a   netcheck.Assignment
	err error
}

const (
	// writeTime is how long a peer may take to accept an answer. Nearly always there is room for it at once.
	writeTime = 5 * time.Second
	// idleTime is how long a connection waits for the next request, and twice that at most: a deadline costs as much as a
	// read, and is not set for each wait.
	idleTime = time.Minute
	// largeAnswer is the size from which an answer may not fit into the socket's buffer, and keeps no others waiting.
	// Requests of that size are their server's.
	largeAnswer = 8 << 10
)

func newLot(park func(*parked, Request)) *lot {
	return &lot{
		park: park, begun: make(chan begun), wake: make(chan struct{}, 1), over: make(chan struct{}),
		homes: map[*http.Server]*home{}, idle: map[*parked]struct{}{},
	}
}

// take takes the connection of a request out of its server; nil: it cannot be.
func (l *lot) take(w http.ResponseWriter, req *http.Request) *parked {
	srv, _ := req.Context().Value(http.ServerContextKey).(*http.Server)
	if srv == nil || !req.ProtoAtLeast(1, 1) || req.ProtoMajor != 1 {
		return nil
	}
	h := l.homeOf(srv)
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
	return &parked{Conn: conn, raw: rawOf(conn), home: h, run: req.PathValue("run"), uri: req.RequestURI,
		token: req.Header.Get("Authorization"), last: req.Close || rw.Reader.Buffered() > 0}
}

// rawOf is the socket below a connection, or nil. What is between them must have read nothing ahead.
func rawOf(conn net.Conn) syscall.RawConn {
	for {
		switch c := conn.(type) {
		case *tls.Conn:
			return nil
		case syscall.Conn:
			raw, _ := c.SyscallConn()
			return raw
		case interface{ NetConn() net.Conn }:
			conn = c.NetConn()
		default:
			return nil
		}
	}
}

// send answers on a parked connection. It does not block. Who was parked while the lot was closed gets no answer.
func (l *lot) send(to *parked, a netcheck.Assignment, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		_ = to.Close()
		return
	}
	l.wg.Add(1)
	l.queue = append(l.queue, outgoing{to, a, err})
	if !l.writing && l.reading == 0 {
		select {
		case l.wake <- struct{}{}:
		default:
		}
	}
}

// hand does what there is to do.
type hand struct {
	*lot
	text  []byte // of an answer
	r     *bufio.Reader
	known map[string]bool // heads, by key, that need not be parsed again
	key   []byte
}

// maxKnown bounds the heads that a hand knows. Those of all nodes of a run are mostly the same.
const maxKnown = 64

func (h *hand) work() {
	for {
		select {
		case c := <-h.begun:
			h.read(c)
		case <-h.wake:
			h.write(0)
		case <-h.over:
			return
		}
	}
}

// write empties the queue, unless another hand does, after some requests have been read.
func (h *hand) write(read int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.reading -= read
	if h.writing {
		return
	}
	h.writing = true
	for len(h.queue) > 0 {
		batch := h.queue
		h.queue = nil
		h.mu.Unlock()
		for i := range batch {
			h.answer(&batch[i])
		}
		h.mu.Lock()
	}
	h.writing = false
}

func (h *hand) answer(o *outgoing) {
	h.text = o.appendTo(h.text[:0])
	if len(h.text) < largeAnswer {
		h.finish(o.to, h.text)
		h.wg.Done()
		return
	}
	text := h.text
	h.text = nil
	go func() {
		defer h.wg.Done()
		h.finish(o.to, text)
	}()
}

// appendTo appends the answer as it goes over the wire.
func (o *outgoing) appendTo(b []byte) []byte {
	status, body := o.body()
	o.to.last = o.to.last || errors.Is(o.err, ErrClosed)
	b = append(b, "HTTP/1.1 "...)
	b = strconv.AppendInt(b, int64(status), 10)
	b = append(b, ' ')
	b = append(b, http.StatusText(status)...)
	b = append(b, "\r\nContent-Type: application/json\r\nContent-Length: "...)
	b = strconv.AppendInt(b, int64(len(body)), 10)
	if o.to.last {
		b = append(b, "\r\nConnection: close"...)
	}
	b = append(b, "\r\n\r\n"...)
	return append(b, body...)
}

// body is the JSON of the answer, and its status.
func (o *outgoing) body() (status int, data []byte) {
	if o.err != nil {
		status, code := statusOf(o.err)
		data, _ = json.Marshal(errorBody{Code: code, Error: o.err.Error()})
		return status, data
	}
	data, err := json.Marshal(&o.a)
	if err != nil {
		return http.StatusInternalServerError, []byte(`{"code":"internal","error":"the answer is no JSON"}`)
	}
	return http.StatusOK, data
}

// finish writes an answer, and lets the next request be waited for.
func (l *lot) finish(p *parked, text []byte) {
	_ = p.SetWriteDeadline(time.Now().Add(writeTime))
	if _, err := p.Write(text); err != nil || p.last || !l.rest(p) {
		_ = p.Close()
	}
}

// rest lets a connection wait for its next request; false: there is nobody to give it back to.
func (l *lot) rest(p *parked) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || p.home.over {
		return false
	}
	l.idle[p] = struct{}{}
	l.wg.Go(func() { l.await(p) })
	return true
}

var buffers = sync.Pool{New: func() any { return new([largeAnswer]byte) }}

// await reads what begins the next request of a connection. It needs little memory while it waits.
func (l *lot) await(p *parked) {
	if now := time.Now(); p.until.Sub(now) < idleTime {
		p.until = now.Add(2 * idleTime)
		_ = p.SetReadDeadline(p.until)
	}
	if p.readable() == nil {
		buf := buffers.Get().(*[largeAnswer]byte)
		if n, _ := p.Read(buf[:]); n > 0 {
			l.wg.Add(1)
			l.begun <- begun{p, buf, n}
			return
		}
		buffers.Put(buf)
	}
	l.ends(p)
	_ = p.Close()
}

// readable waits until a read would not have to wait.
func (p *parked) readable() error {
	if p.raw == nil {
		return nil
	}
	looked := false
	return p.raw.Read(func(fd uintptr) bool {
		if looked {
			return true
		}
		looked = true
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n != 0 || err != nil
	})
}

// ends: a connection is not idle any more.
func (l *lot) ends(p *parked) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.idle, p)
}

// begins: the same, and its next request is read now; false: it may not be used again.
func (l *lot) begins(p *parked) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.idle, p)
	ok := !l.closed && !p.home.over
	if ok {
		l.reading++
	}
	return ok
}

// read takes what has come on an idle connection: a request, or what its server is to read.
func (h *hand) read(c begun) {
	defer h.wg.Done()
	defer buffers.Put(c.buf)
	data := c.buf[:c.n]
	if !h.begins(c.p) {
		_ = c.p.Close()
		return
	}
	defer h.write(1)
	if req, ok := h.request(c.p, data); ok {
		h.park(c.p, req)
		return
	}
	_ = c.p.SetDeadline(time.Time{})
	if !c.p.home.give(unread(c.p.Conn, bytes.Clone(data))) {
		_ = c.p.Close()
	}
}

// request is the one in data: a whole one, nothing more, with the path and the token that the server has accepted on
// this connection before, and without a wish for anything but an answer.
func (h *hand) request(p *parked, data []byte) (req Request, ok bool) {
	head, body, whole := bytes.Cut(data, []byte("\r\n\r\n"))
	if !whole {
		return req, false
	}
	if n := h.keyOf(p, head); n != len(body) || !h.known[string(h.key)] {
		if !h.accepts(p, data, len(body)) {
			return req, false
		}
		h.learn(p)
	}
	req, err := decode(body)
	return req, err == nil
}

// accepts parses a request with a body of n bytes.
func (h *hand) accepts(p *parked, data []byte, n int) bool {
	rest := bytes.NewReader(data)
	h.r.Reset(rest)
	head, err := http.ReadRequest(h.r)
	if err != nil || head.Method != http.MethodPost || head.RequestURI != p.uri ||
		head.Header.Get("Authorization") != p.token || head.Header.Get("Expect") != "" ||
		!head.ProtoAtLeast(1, 1) || head.ContentLength != int64(n) ||
		h.r.Buffered()+rest.Len() != n { // a line end without \r has ended the head before
		return false
	}
	p.last = head.Close
	return true
}

// keyOf makes h.key of all that decides whether a request is accepted, but for the length of its body, which it
// returns; -1: it is not where it can be cut out.
func (h *hand) keyOf(p *parked, head []byte) int {
	before, after, found := bytes.Cut(head, []byte("\r\nContent-Length: "))
	digits, after, _ := bytes.Cut(after, []byte("\r\n"))
	n, err := strconv.ParseUint(string(digits), 10, 16)
	if !found || err != nil {
		h.key = h.key[:0]
		return -1
	}
	h.key = h.key[:0]
	for _, part := range [][]byte{[]byte(p.uri), []byte(p.token), before, after} {
		h.key = append(append(h.key, part...), '\n', '\n') // which none of them has
	}
	return int(n)
}

// learn keeps the key of a request that was accepted. One that is the last of its connection need not be known, and
// one with two lengths must not be.
func (h *hand) learn(p *parked) {
	if len(h.key) > 0 && !p.last && len(h.known) < maxKnown &&
		!bytes.Contains(bytes.ToLower(h.key), []byte("content-length")) {
		h.known[string(h.key)] = true
	}
}

// unread is c with the bytes that were read of it. One that can take them back stays what it is, as its server may know
// it by its type.
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

// Prove tells the connection below, which may count those of strangers.
func (r *returned) Prove(ok bool) {
	if p, is := r.Conn.(interface{ Prove(bool) }); is {
		p.Prove(ok)
	}
}

// home is a net.Listener through which a server gets its connections back.
type home struct {
	lot   *lot
	conns chan net.Conn
	done  chan struct{}
	over  bool // done is closed; of the lot's lock
}

// homeOf is that of a server, a new one if need be, and nil when the lot is closed.
func (l *lot) homeOf(srv *http.Server) *home {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	h := l.homes[srv]
	if h == nil {
		h = &home{lot: l, conns: make(chan net.Conn), done: make(chan struct{})}
		l.homes[srv] = h
		l.startLocked()
		l.wg.Go(func() {
			_ = srv.Serve(h) // until either is closed
			_ = h.Close()
			l.mu.Lock()
			defer l.mu.Unlock()
			delete(l.homes, srv)
		})
	}
	return h
}

// give hands a connection to the server.
func (h *home) give(c net.Conn) bool {
	select {
	case h.conns <- c:
		return true
	case <-h.done:
		return false
	}
}

// Accept implements net.Listener.
func (h *home) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener. Connections that wait for a request end, too; those of held requests are answered
// first.
func (h *home) Close() error {
	h.lot.mu.Lock()
	defer h.lot.mu.Unlock()
	h.closeLocked()
	return nil
}

func (h *home) closeLocked() {
	if h.over {
		return
	}
	h.over = true
	close(h.done)
	for p := range h.lot.idle {
		if p.home == h {
			_ = p.Close()
		}
	}
}

// Addr implements net.Listener.
func (h *home) Addr() net.Addr { return &net.UnixAddr{Name: "parked connections", Net: "unix"} }

// startLocked starts the hands.
func (l *lot) startLocked() {
	if l.started {
		return
	}
	l.started = true
	for range max(runtime.GOMAXPROCS(0), 2) { // one may have to wait for a peer
		l.hands.Go((&hand{lot: l, r: bufio.NewReader(nil), known: map[string]bool{}}).work)
	}
}

// close ends all connections but those that still have an answer to come, and waits for these. All held requests have
// been answered.
func (l *lot) close() {
	l.mu.Lock()
	first := !l.closed
	l.closed = true
	for _, h := range l.homes {
		h.closeLocked()
	}
	l.mu.Unlock()
	l.wg.Wait()
	if first {
		close(l.over)
	}
	l.hands.Wait()
}
