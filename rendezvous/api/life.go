package api

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dlrover-run/rendezvous"
)

// Lifeline listens for as long as its process lives, so that a host that refuses connections to it says that the
// process is dead: a kernel does so at once, also when everything on its host was killed. It owns a goroutine until
// Close.
type Lifeline struct {
	l    net.Listener
	life rendezvous.Life
	done chan struct{}
}

// ListenForLife opens a free port of host, "" for all addresses.
func ListenForLife(ctx context.Context, host string) (*Lifeline, error) {
	l, err := Listen(ctx, net.JoinHostPort(host, "0"))
	if err != nil {
		return nil, fmt.Errorf("a port that tells that this launcher lives: %w", err)
	}
	return serveLife(l), nil
}

func serveLife(l net.Listener) *Lifeline {
	life := rendezvous.Life{Port: l.Addr().(*net.TCPAddr).Port, Key: rand.Text()}
	ll := &Lifeline{l: l, life: life, done: make(chan struct{})}
	go ll.serve()
	return ll
}

// Life is the part of a Join that describes the lifeline.
func (l *Lifeline) Life() rendezvous.Life { return l.life }

// serve answers with the launcher's identity. An answer is too short for a peer to block it.
func (l *Lifeline) serve() {
	defer close(l.done)
	for {
		nc, err := l.l.Accept()
		switch {
		case err == nil:
			_ = nc.SetWriteDeadline(time.Now().Add(lifeTimeout))
			_, _ = io.WriteString(nc, l.life.Key)
			_ = nc.Close()
		case errors.Is(err, net.ErrClosed):
			return
		default:
			time.Sleep(lifePause) // such as without descriptors
		}
	}
}

// Close ends it.
func (l *Lifeline) Close() error {
	err := l.l.Close()
	<-l.done
	return err
}

// How launchers are looked at.
const (
	lifeTimeout = time.Second           // for an answer
	lifePause   = 25 * time.Millisecond // between two refusals: a launcher that lives has dialed again by then
	lifeProvers = 16                    // that ask new launchers
	lifeLooks   = 64                    // at launchers after their connection has broken; more break for another reason
	lifeExams   = 256                   // of silent hosts; of more than that it is another network that is silent
	examTime    = rendezvous.UnreachableAfter - rendezvous.SuspectAfter
	examPause   = 200 * time.Millisecond // between two new connections: a lost one is tried again only after a second
)

// home is where a launcher has answered with its key: the address from which its connection comes.
type home struct {
	node string
	addr string
}

// lives finds out whether launchers live.
type lives struct {
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	unasked []func() // launchers to be asked
	provers int
	looks   int
	exams   int
}

func newLives() *lives {
	l := &lives{}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	return l
}

func (l *lives) close() {
	l.mu.Lock()
	l.cancel()
	l.unasked = nil
	l.mu.Unlock()
	l.wg.Wait()
}

// prove asks the launcher at the other end of c once, and notes where it has answered.
func (l *lives) prove(c *line, life rendezvous.Life, node string) {
	if life.Port == 0 {
		return
	}
	peer, err := netip.ParseAddrPort(c.RemoteAddr().String())
	if err != nil {
		return
	}
	addr := netip.AddrPortFrom(peer.Addr().Unmap(), uint16(life.Port)).String()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx.Err() != nil {
		return
	}
	l.unasked = append(l.unasked, func() {
		if ok, _ := l.answers(addr, life.Key, lifeTimeout); ok {
			c.home.Store(&home{node: node, addr: addr})
		}
	})
	if l.provers < lifeProvers {
		l.provers++
		l.wg.Go(l.askAll)
	}
}

func (l *lives) askAll() {
	for {
		l.mu.Lock()
		if len(l.unasked) == 0 {
			l.provers--
			l.mu.Unlock()
			return
		}
		ask := l.unasked[0]
		l.unasked = l.unasked[1:]
		l.mu.Unlock()
		ask()
	}
}

func (l *lives) dial(addr string) (net.Conn, error) {
	d := net.Dialer{Timeout: lifeTimeout}
	return d.DialContext(l.ctx, "tcp", addr)
}

// answers reports whether the owner of key listens at addr; the error is that of the dial.
func (l *lives) answers(addr, key string, within time.Duration) (bool, error) {
	nc, err := l.dial(addr)
	if err != nil {
		return false, err
	}
	defer nc.Close()
	_ = nc.SetReadDeadline(time.Now().Add(within))
	got, err := io.ReadAll(io.LimitReader(nc, int64(len(key))+1))
	return err == nil && string(got) == key, nil
}

// look calls dead if the host at addr refuses twice in a row. The port of a process that is being killed may be closed
// a little later than its connection. It drops the request if too many looks are under way.
func (l *lives) look(addr, key string, dead func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx.Err() != nil || l.looks >= lifeLooks {
		return
	}
	l.looks++
	l.wg.Go(func() {
		if l.isClosed(addr, key) {
			dead()
		}
		l.mu.Lock()
		l.looks--
		l.mu.Unlock()
	})
}

// isClosed reports whether the port at addr is closed, or will be soon. A silent host, or an unreachable one, does not
// count.
func (l *lives) isClosed(addr, key string) bool {
	for refusals, end := 0, time.Now().Add(lifeTimeout); time.Now().Before(end) && l.ctx.Err() == nil; {
		lives, err := l.answers(addr, key, lifePause)
		switch {
		case lives, err != nil && !errors.Is(err, syscall.ECONNREFUSED):
			return false
		case err == nil:
			refusals = 0 // accepted by the kernel, and perhaps for the last time
		case refusals == 1:
			return true
		default:
			refusals++
		}
		l.pause()
	}
	return false
}

// examine calls unreachable if the host at addr answers no connection for examTime, neither with a process nor with a
// refusal. It drops the request if too many examinations are under way.
func (l *lives) examine(addr string, unreachable func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx.Err() != nil || l.exams >= lifeExams {
		return
	}
	l.exams++
	l.wg.Go(func() {
		for began, late := time.Now(), true; late; began = time.Now() {
			if l.reaches(addr) || l.ctx.Err() != nil {
				break
			}
			// Where this process did not run meanwhile, an answer may have come and not have been seen.
			if late = time.Since(began) > examTime+2*examPause; !late {
				unreachable()
			}
		}
		l.mu.Lock()
		l.exams--
		l.mu.Unlock()
	})
}

// reaches reports whether a kernel answers at addr within examTime.
func (l *lives) reaches(addr string) bool {
	ctx, cancel := context.WithTimeout(l.ctx, examTime)
	defer cancel()
	var wg sync.WaitGroup
	var reached atomic.Bool
	for again := time.Tick(examPause); ctx.Err() == nil; {
		wg.Go(func() {
			var d net.Dialer
			nc, err := d.DialContext(ctx, "tcp", addr)
			if err == nil {
				_ = nc.Close()
			}
			if err == nil || errors.Is(err, syscall.ECONNREFUSED) {
				reached.Store(true)
				cancel()
			}
		})
		select {
		case <-again:
		case <-ctx.Done():
		}
	}
	wg.Wait()
	return reached.Load()
}

func (l *lives) pause() {
	select {
	case <-time.After(lifePause):
	case <-l.ctx.Done():
	}
}

func (h *Hub) lifeOf(id, node string) rendezvous.Life {
	r, err := h.member(id)
	if err != nil {
		return rendezvous.Life{}
	}
	r.Lock()
	defer r.Unlock()
	m, _ := r.round.Member(node)
	return m.Life
}

// confirm checks whether a node is dead after its connection c has broken, if its launcher has answered at c's source
// address.
func (h *Hub) confirm(c *line, r *run, node string) {
	life := h.lifeOf(r.id, node)
	if c == nil || life.Port == 0 {
		return // it has left
	}
	if at := c.home.Load(); at != nil && at.node == node {
		h.lives.look(at.addr, life.Key, func() { _ = r.step(rendezvous.Refused{ID: node}) })
	}
}
