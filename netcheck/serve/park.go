package serve

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
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
// While nodes are expected, new connections come here before their server has them: the first request of most nodes is
// as that of another one, too.
//
// A few goroutines, the hands, wait for the requests of all connections, read them, and write the answers.
type lot struct {
	hub    *Hub
	until  atomic.Int64 // nodes are expected; Unix time, ns
	most   atomic.Int64 // of firsts
	firsts atomic.Int64 // connections that their server has not had yet
	heads  heads
	hands  sync.WaitGroup
	wg     sync.WaitGroup // of everything else: servers, answers

	mu       sync.Mutex // the last that is taken
	homes    map[*http.Server]*home
	poll     *poller            // nil: nothing was taken yet
	conns    map[uint64]*parked // all that were taken and not given back
	last     uint64             // number of a connection
	sweeper  *time.Timer        // nil: none is idle
	counting time.Time          // since when those who are expected are counted
	queue    []outgoing
	reading  int  // hands that will look at the queue soon
	writing  bool // somebody is at it
	closed   bool
}

// parked is a connection that was taken out of a server.
type parked struct {
	net.Conn
	origin
	raw    syscall.RawConn // of the socket
	id     uint64
	home   *home
	known  *knownHead // of its last request; nil: none
	said   [2]string  // ID and Visit of that
	member *member    // whose last request it was; nil: nobody's. Of the run's lock
	first  bool       // its server has not had it yet
	last   bool       // it is closed after the answer
	ended  bool       // its other end says no more; of the hand that has it

	// Of the lot's lock:
	idle  bool
	since time.Time // that it is
	news  bool      // there was some while it was not
}

// origin is what the server has accepted requests by.
type origin struct {
	run, uri string
	token    string // the Authorization that came with them
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
	// idleTime is how long a connection waits for the next request.
	idleTime = time.Minute
	// firstTime is the same before the first one.
	firstTime = 10 * time.Second
	// maxFirsts is how many may wait so, or twice the nodes of which Expect has told within expectTime when those are
	// fewer. Who bounds connections may have closed some of them, which is found out only after firstTime.
	maxFirsts = 16384
	// sweepTime is how often is looked for those whose time is over.
	sweepTime = 2 * time.Second
	// expectTime is how long after they were told so nodes are expected to come.
	expectTime = time.Minute
)

func newLot(h *Hub) *lot {
	return &lot{hub: h, homes: map[*http.Server]*home{}, conns: map[uint64]*parked{}}
}

// expect prepares for n more nodes that will come soon.
func (l *lot) expect(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if now.Sub(l.counting) > expectTime {
		l.counting = now
		l.most.Store(0)
	}
	l.most.Store(min(l.most.Load()+2*int64(n), maxFirsts))
	l.until.Store(now.Add(expectTime).UnixNano())
}

func (l *lot) expecting() bool {
	until := l.until.Load()
	return until != 0 && time.Now().UnixNano() <= until
}

// meet keeps a new connection of a server until it says something; false: the server has to.
func (l *lot) meet(nc net.Conn, srv *http.Server) bool {
	if !l.expecting() || l.firsts.Load() >= l.most.Load() {
		return false
	}
	h := l.homeOf(srv)
	if h == nil {
		return false
	}
	spare(nc) // a hand may have it as soon as it is added
	if l.add(&parked{Conn: nc, home: h, first: true, idle: true, since: time.Now()}) != nil {
		prove(nc, false)
		return false
	}
	l.firsts.Add(1)
	return true
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
	o := origin{req.PathValue("run"), req.RequestURI, req.Header.Get("Authorization")}
	l.heads.accepted(conn, o)
	p := &parked{Conn: conn, origin: o, home: h, last: req.Close || rw.Reader.Buffered() > 0}
	if !p.last {
		p.last = l.add(p) != nil
	}
	return p
}

var errNoSocket = errors.New("not a socket")

// add has the next requests of a connection waited for.
func (l *lot) add(p *parked) error {
	if p.raw = rawOf(p.Conn); p.raw == nil {
		return errNoSocket
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || p.home.over {
		return net.ErrClosed
	}
	l.last++
	p.id = l.last
	if err := l.poll.add(p.raw, p.id); err != nil {
		return err
	}
	l.conns[p.id] = p
	l.sweepLaterLocked()
	return nil
}

// rawOf is the socket below a connection, or nil. What is between them must have read nothing ahead.
func rawOf(conn net.Conn) syscall.RawConn {
	for {
		if b, ok := conn.(interface{ Buffered() int }); ok && b.Buffered() > 0 {
			return nil
		}
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
		l.writing = true
		l.wg.Go(func() { l.write(newWriter()) })
	}
}

// write empties the queue. It is for who has set l.writing.
func (l *lot) write(w *writer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.queue) > 0 {
		batch := l.queue
		l.queue = nil
		l.mu.Unlock()
		for i := range batch {
			l.answer(w, &batch[i])
		}
		l.mu.Lock()
	}
	l.writing = false
}

// answer writes an answer, and lets the next request be waited for. It does not wait for the peer.
func (l *lot) answer(w *writer, o *outgoing) {
	p := o.to
	w.put(o)
	rest := w.write(p.raw)
	if len(rest) == 0 {
		l.finish(p, nil)
		return
	}
	rest = bytes.Clone(rest)
	go func() { l.finish(p, l.push(p, rest)) }()
}

// push writes what a socket did not take at once. It may have another descriptor afterwards.
func (l *lot) push(p *parked, rest []byte) error {
	if !p.last {
		_ = l.poll.remove(p.raw)
	}
	_ = p.SetWriteDeadline(time.Now().Add(writeTime))
	_, err := p.Write(rest)
	_ = p.SetWriteDeadline(time.Time{})
	if err == nil && !p.last {
		err = l.poll.add(p.raw, p.id)
	}
	return err
}

// finish is the end of an answer that was written, or could not be.
func (l *lot) finish(p *parked, err error) {
	defer l.wg.Done()
	if err != nil || p.last || !l.rest(p) {
		l.drop(p)
	}
}

// writer writes what a socket takes at once.
type writer struct {
	body []byte
	text []byte
	n    int
	try  func(fd uintptr) bool
}

func newWriter() *writer {
	w := &writer{}
	w.try = func(fd uintptr) bool {
		w.n, _ = unix.Write(int(fd), w.text) // an error comes again
		return true
	}
	return w
}

// write returns what is left of the text.
func (w *writer) write(raw syscall.RawConn) []byte {
	w.n = 0
	if raw != nil {
		_ = raw.Write(w.try)
	}
	return w.text[max(w.n, 0):]
}

// put makes w.text the answer as it goes over the wire.
func (w *writer) put(o *outgoing) {
	status := w.putBody(o)
	o.to.last = o.to.last || errors.Is(o.err, ErrClosed)
	b := append(w.text[:0], "HTTP/1.1 "...)
	b = strconv.AppendInt(b, int64(status), 10)
	b = append(b, ' ')
	b = append(b, http.StatusText(status)...)
	b = append(b, "\r\nContent-Type: application/json\r\nContent-Length: "...)
	b = strconv.AppendInt(b, int64(len(w.body)), 10)
	if o.to.last {
		b = append(b, "\r\nConnection: close"...)
	}
	b = append(b, "\r\n\r\n"...)
	w.text = append(b, w.body...)
}

// putBody makes w.body the JSON of the answer, and returns its status.
func (w *writer) putBody(o *outgoing) (status int) {
	var code string
	if o.err != nil {
		status, code = statusOf(o.err)
		w.body, _ = json.Marshal(errorBody{Code: code, Error: o.err.Error()})
		return status
	}
	var err error
	if w.body, err = appendJSON(w.body[:0], &o.a); err != nil {
		w.body = append(w.body[:0], `{"code":"internal","error":"the answer is no JSON"}`...)
		return http.StatusInternalServerError
	}
	return http.StatusOK
}

// rest lets a connection wait for its next request; false: there is nobody to give it back to.
func (l *lot) rest(p *parked) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || p.home.over {
		return false
	}
	p.idle, p.since = true, time.Now()
	if p.news {
		p.news = false
		_ = l.poll.again(p.raw, p.id)
	}
	l.sweepLaterLocked()
	return true
}

func (l *lot) sweepLaterLocked() {
	if l.sweeper == nil {
		l.sweeper = time.AfterFunc(sweepTime, l.sweep)
	}
}

// sweep closes the connections that were idle for too long.
func (l *lot) sweep() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	idle := false
	for _, p := range l.conns {
		if !p.idle { // a hand may have it
			continue
		}
		most := idleTime
		if p.first {
			most = firstTime
		}
		if time.Since(p.since) < most {
			idle = true
			continue
		}
		l.closeLocked(p)
	}
	l.sweeper = nil
	if idle {
		l.sweepLaterLocked()
	}
}

// closeLocked closes an idle connection.
func (l *lot) closeLocked(p *parked) {
	p.idle = false
	l.removeLocked(p)
	_ = p.Close()
}

func (l *lot) removeLocked(p *parked) {
	delete(l.conns, p.id)
	if p.first {
		p.first = false
		l.firsts.Add(-1)
	}
}

// drop closes a connection that is not idle.
func (l *lot) drop(p *parked) {
	l.mu.Lock()
	l.removeLocked(p)
	l.mu.Unlock()
	_ = p.Close()
}

// giveBack lets the server read what has come, after the bytes that were read of it.
func (l *lot) giveBack(p *parked, read []byte) {
	if p.first {
		prove(p.Conn, false)
	}
	l.mu.Lock()
	l.removeLocked(p)
	_ = l.poll.remove(p.raw)
	l.mu.Unlock()
	if !p.home.give(unread(p.Conn, read)) {
		_ = p.Close()
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

// prove tells a connection, which may count those of strangers, whether its peer is none.
func prove(c net.Conn, ok bool) {
	if p, can := c.(interface{ Prove(bool) }); can {
		p.Prove(ok)
	}
}

// spare tells it that it is waited for here.
func spare(c net.Conn) {
	for {
		switch b := c.(type) {
		case interface{ Spare() }:
			b.Spare()
			return
		case syscall.Conn:
			return
		case interface{ NetConn() net.Conn }:
			c = b.NetConn()
		default:
			return
		}
	}
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
	if l.closed || l.startLocked() != nil {
		return nil
	}
	h := l.homes[srv]
	if h == nil {
		h = &home{lot: l, conns: make(chan net.Conn), done: make(chan struct{})}
		l.homes[srv] = h
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
	for _, p := range h.lot.conns {
		if p.home == h && p.idle {
			h.lot.closeLocked(p)
		}
	}
}

// Addr implements net.Listener.
func (h *home) Addr() net.Addr { return &net.UnixAddr{Name: "parked connections", Net: "unix"} }

// startLocked starts the hands.
func (l *lot) startLocked() (err error) {
	if l.poll != nil {
		return nil
	}
	if l.poll, err = newPoller(); err != nil {
		return err
	}
	for range max(runtime.GOMAXPROCS(0), 2) { // one may have to wait for its server
		l.hands.Go(newHand(l).work)
	}
	return nil
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
	if l.sweeper != nil {
		l.sweeper.Stop()
	}
	l.mu.Unlock()
	l.wg.Wait()
	if first && l.poll != nil {
		l.poll.close()
	}
	l.hands.Wait()
}
