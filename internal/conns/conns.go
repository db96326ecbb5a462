// Package conns bounds what peers may take: connections that those which are not authenticated hold open, and requests.
// Each connection is a file descriptor that may be missing when the next worker is to be started.
package conns

import (
	"container/list"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"
)

// Limits of the connections that a Listener has open at a time.
type Limits struct {
	Total    int // all; a further one replaces an unproven one, or is closed
	Unproven int // connections whose peer is not authenticated; a further one replaces one of them
}

// The share of unproven connections, and their maximum: each costs some 20 KiB once it speaks HTTP.
const (
	share        = 4
	mostUnproven = 4096
)

// OpenFiles is the limit of this process on open files. Go has raised it to the hard limit at start, and gives the one
// from before to every process that it starts.
func OpenFiles() uint64 {
	var lim syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim) != nil {
		return 0
	}
	return lim.Cur
}

// Below leaves reserve of files descriptors to others, and a half of them when they are few.
func Below(files uint64, reserve int) Limits {
	n := int(min(files, 1<<30))
	total := max(n-reserve, n/2)
	return Limits{Total: total, Unproven: min(max(total/share, 1), mostUnproven)}
}

// patience is how long an unproven connection stays however many others come: a peer that has a proof has sent it by
// then. Meanwhile the next ones wait in the kernel.
const patience = 100 * time.Millisecond

// Listener is a net.Listener that returns *Conn.
type Listener struct {
	net.Listener
	limits Limits
	log    *slog.Logger
	closed chan struct{} // by Close
	once   sync.Once
	room   chan struct{} // holds one when one may be added
	rates  *Rates        // of Origins without a proven connection

	mu       sync.Mutex
	open     int
	unproven *list.List      // of *Conn, the oldest first
	from     map[string]int  // how many of them an Origin has
	known    map[string]int  // how many others an Origin has
	refused  int             // of those without
	said     map[string]bool // which limits were reached
}

// An Origin without any connection that is proven may open so many at once, and so many in a second; of further ones
// every servedOf-th is served. To refuse one costs a tenth of an answer. Hosts of a job, and networks behind one
// address, have a proven connection after a moment, and then no such bound.
const (
	strangeBurst = 1000
	strangeRate  = 100
	servedOf     = 8
)

// Listen bounds the connections of l.
func Listen(l net.Listener, limits Limits, log *slog.Logger) *Listener {
	return &Listener{Listener: l, limits: limits, log: log, closed: make(chan struct{}), room: make(chan struct{}, 1),
		rates: NewRates(strangeRate, strangeBurst), unproven: list.New(), from: map[string]int{}, known: map[string]int{},
		said: map[string]bool{}}
}

// Accept returns the next connection, which is unproven.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		nc, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &Conn{Conn: nc, l: l, from: origin(nc.RemoteAddr())}
		if l.add(c) {
			return c, nil
		}
		_ = nc.Close()
	}
}

// Close stops listening; the connections stay.
func (l *Listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// add makes room for c. It reports false when there is none.
func (l *Listener) add(c *Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.known[c.from] == 0 && !l.rates.Allow(c.from, time.Now()) {
		l.warn("an address without the token opens connections all the time: most are closed", c)
		if l.refused++; l.refused%servedOf != 0 {
			return false
		}
	}
	for l.unproven.Len() > 0 && (l.unproven.Len() >= l.limits.Unproven || l.open >= l.limits.Total) {
		oldest := l.oldestOfMost()
		if rest := patience - time.Since(oldest.since); rest > 0 {
			if !l.await(rest) {
				return false
			}
			continue
		}
		l.warn("too many connections of peers that have not proved who they are: old ones are closed", oldest)
		_ = oldest.closeLocked()
	}
	if l.open >= l.limits.Total {
		l.warn("too many connections: new ones are closed; a job of this size may need a higher ulimit -Hn", c)
		return false
	}
	l.open++
	c.queueLocked()
	return true
}

// oldestOfMost is the oldest unproven connection of an address that has the most: an address that opens many takes none
// from others.
func (l *Listener) oldestOfMost() *Conn {
	most := 0
	for _, n := range l.from {
		most = max(most, n)
	}
	e := l.unproven.Front()
	for l.from[e.Value.(*Conn).from] < most {
		e = e.Next()
	}
	return e.Value.(*Conn)
}

// origin is that of a peer's address with a port.
func origin(a net.Addr) string {
	if host, _, err := net.SplitHostPort(a.String()); err == nil {
		return Origin(host)
	}
	return a.String()
}

// await unlocks l until one may be added, or time is up. It reports false when the listener was closed meanwhile.
func (l *Listener) await(most time.Duration) bool {
	l.mu.Unlock()
	defer l.mu.Lock()
	up := time.NewTimer(most)
	defer up.Stop()
	select {
	case <-l.room:
	case <-up.C:
	case <-l.closed:
		return false
	}
	return true
}

// warn logs once that a limit was reached: a flood of connections must not flood the log.
func (l *Listener) warn(what string, c *Conn) {
	if !l.said[what] {
		l.said[what] = true
		l.log.Warn(what+"; this is said once", "addr", l.Addr().String(), "open", l.open, "limit", l.limits.Total,
			"unproven", l.unproven.Len(), "unproven_limit", l.limits.Unproven, "peer", c.RemoteAddr().String())
	}
}

// Counts returns how many connections are open, and how many of them are unproven.
func (l *Listener) Counts() (open, unproven int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.open, l.unproven.Len()
}

// Conn is a connection of a Listener.
type Conn struct {
	net.Conn
	l     *Listener
	from  string    // the peer's Origin
	since time.Time // when it became unproven

	// Guarded by l.mu.
	queued *list.Element // among the unproven
	gone   bool
}

// Prove sets whether the peer is authenticated. A connection may become unproven again.
func (c *Conn) Prove(ok bool) {
	c.l.mu.Lock()
	defer c.l.mu.Unlock()
	switch {
	case c.gone || ok == (c.queued == nil):
	case ok:
		c.forgetLocked()
		c.l.known[c.from]++
	default:
		less(c.l.known, c.from)
		c.queueLocked()
	}
}

func (c *Conn) queueLocked() {
	c.since = time.Now()
	c.queued = c.l.unproven.PushBack(c)
	c.l.from[c.from]++
}

// NetConn is the connection below.
func (c *Conn) NetConn() net.Conn { return c.Conn }

// Detach makes the connection below the caller's, which closes it: c only counts it from then on, until its Close. It
// reports false if c is closed. The peer must be proven, and nothing else may use c.
func (c *Conn) Detach() bool {
	c.l.mu.Lock()
	defer c.l.mu.Unlock()
	if !c.gone {
		c.Conn = nil
	}
	return !c.gone
}

// Close ends the connection and makes way for another.
func (c *Conn) Close() error {
	c.l.mu.Lock()
	defer c.l.mu.Unlock()
	return c.closeLocked()
}

func (c *Conn) closeLocked() error {
	if !c.gone {
		c.gone = true
		c.l.open--
		if c.queued == nil {
			less(c.l.known, c.from)
		}
		c.forgetLocked()
	}
	if c.Conn == nil {
		return nil
	}
	return c.Conn.Close()
}

func (c *Conn) forgetLocked() {
	if c.queued != nil {
		c.l.unproven.Remove(c.queued)
		c.queued = nil
		less(c.l.from, c.from)
	}
	select {
	case c.l.room <- struct{}{}:
	default:
	}
}

// less counts one connection of an Origin less.
func less(counts map[string]int, origin string) {
	if counts[origin]--; counts[origin] <= 0 {
		delete(counts, origin)
	}
}
