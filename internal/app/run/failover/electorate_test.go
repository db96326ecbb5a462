package failover

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/lead"
)

// electorate is a job of c10d: launchers with sessions of their own, which serve its rendezvous one after the other.
type electorate struct {
	t        *testing.T
	endpoint string
	voters   []*member // never serve

	mu      sync.Mutex
	members map[*member]bool
	names   map[string]string // by the address at which a candidate serves: that which the suite has given it
	founder func()            // ends the launcher at the endpoint, which is no candidate; nil: there is none
	server  string            // the newest
	speak   chan struct{}     // closed while nobody is muted
	stop    chan struct{}     // closed while workers end at once
	config  api.SessionConfig // of all launchers
}

const voters = 3

func newElectorate(t *testing.T, set ...func(*api.SessionConfig)) *electorate {
	e := &electorate{t: t, members: map[*member]bool{}, names: map[string]string{}, speak: make(chan struct{}),
		stop: make(chan struct{}), config: api.SessionConfig{Run: "r", Params: rendezvous.Params{Min: voters, Max: 16,
			LastCall: time.Millisecond, GrowthDelay: time.Millisecond}}}
	for _, f := range set {
		f(&e.config)
	}
	close(e.speak)
	close(e.stop)
	l := listen(t, "127.0.0.1:0")
	e.endpoint = l.Addr().String()
	require.NoError(t, l.Close())
	e.found()
	for i := range voters {
		e.voters = append(e.voters, e.join(fmt.Sprint("voter", i), nil, nil))
	}
	return e
}

// found starts a launcher at the endpoint, which serves until a candidate stands: as when nobody leads.
func (e *electorate) found() *api.Hub {
	client := api.NewClient(e.endpoint, token)
	own := New(Config{Run: "r", ID: "founder", Client: client, Endpoint: e.endpoint, Log: slog.New(slog.DiscardHandler)})
	s := NewServer("r", own)
	svc, err := serve(s.Standby, s.Vote())
	require.NoError(e.t, err)
	l, served := listen(e.t, e.endpoint), make(chan error, 1)
	s.Of(svc.Hub, "founder", "127.0.0.1", l.Addr().(*net.TCPAddr).Port)
	go func() { served <- svc.Serve(l) }()
	end := sync.OnceFunc(func() {
		svc.Close(0)
		<-served
		s.Close()
		own.Close()
		client.Close()
	})
	e.t.Cleanup(end)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.founder, e.server = end, e.endpoint
	return svc.Hub
}

// member is a launcher. Its session notices that a server is lost, and asks the next one.
type member struct {
	*Failover
	e       *electorate
	session *api.Session
	ended   chan struct{} // closed when the directives end
	ran     atomic.Pointer[job.EpochID]
	last    atomic.Pointer[rendezvous.Directive]
	checks  atomic.Int32
	leaders chan lead.Leader
}

// join starts a launcher and has it be a member of the present world. Without a listener it is never elected; leaders
// may be nil.
func (e *electorate) join(id string, l net.Listener, leaders chan lead.Leader) *member {
	e.mu.Lock()
	client := api.NewClient(e.server, token)
	e.mu.Unlock()
	m := &member{e: e, ended: make(chan struct{}), leaders: leaders, Failover: New(Config{Run: "r", ID: id,
		Client: client, Endpoint: e.endpoint, Listener: l, Serve: serve, Log: slog.New(slog.DiscardHandler)})}
	c := e.config
	c.Succession, c.Work = m, id
	c.Node = rendezvous.Node{ID: id, Name: id, Rank: -1, Slots: 1, Addr: "127.0.0.1", Can: []rendezvous.Ability{
		rendezvous.CanGate, rendezvous.CanHold, rendezvous.CanCommand, rendezvous.CanLeave}}
	if l != nil {
		c.Node.Serve = l.Addr().(*net.TCPAddr).Port
	}
	var err error
	m.session, err = api.Open(e.t.Context(), client, c)
	require.NoError(e.t, err)
	e.mu.Lock()
	e.members[m] = true
	e.mu.Unlock()
	go m.obey()
	e.t.Cleanup(m.end)
	return m
}

// obey follows directives as a launcher does, whose workers start and end at once.
func (m *member) obey() {
	defer close(m.ended)
	for d := range m.session.Directives() { // an error of a request is that of a server that has ended
		if d.Leave != nil {
			m.session.Running(nil)
			_, _ = m.session.Leave(m.ctx, d.Leave.Text, nil)
			m.e.gone(m)
			continue
		}
		switch {
		case d.Confirms():
		case d.Kind == job.Check:
			m.checks.Add(1)
			_ = m.session.Report(m.ctx, rendezvous.Cleared{ID: m.cfg.ID})
		case d.Kind == job.Lead:
			_ = m.session.Report(m.ctx, rendezvous.Ready{ID: m.cfg.ID, EpochID: d.EpochID, Port: 1})
		case d.Kind == job.Run:
			m.session.Running(&rendezvous.Resume{EpochID: d.EpochID, Place: *d.Place, Hold: d.Hold})
			m.ran.Store(&d.EpochID)
		case d.Kind == job.Stop:
			m.e.stopped(m.ctx)
			m.session.Running(nil)
			_ = m.session.Rejoin(m.ctx, d.EpochID, nil)
		}
		m.last.Store(&d)
	}
}

// end kills the launcher.
func (m *member) end() {
	m.e.gone(m)
	m.Failover.Close()
	m.session.Close()
	<-m.ended
	m.cfg.Client.Close()
}

// Lost has those who watch hear of it.
func (m *member) Lost(ctx context.Context, why error) (moved bool) {
	select {
	case <-m.e.spoken(m):
	case <-ctx.Done():
		return false
	}
	moved = m.Failover.Lost(ctx, why)
	if m.leaders == nil {
		return moved
	}
	m.mu.Lock()
	server, dead := m.server, m.dead
	m.mu.Unlock()
	switch {
	case moved:
		a, _ := m.serves(ctx, server)
		lead.Newest(m.leaders, lead.Leader{Term: lead.Term(a.Term), Addr: m.e.name(server)})
	case dead:
		lead.Newest(m.leaders, lead.Leader{})
	}
	return moved
}

// name is the address that the suite has given to the candidate at addr.
func (e *electorate) name(addr string) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.names[addr]
}

// gone: m is no member any more.
func (e *electorate) gone(m *member) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.members, m)
}

// stall has workers that are told to end go on until end is called.
func (e *electorate) stall() (end func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stop = make(chan struct{})
	return sync.OnceFunc(func() { close(e.stop) })
}

// stopped waits until workers may end.
func (e *electorate) stopped(ctx context.Context) {
	e.mu.Lock()
	stop := e.stop
	e.mu.Unlock()
	select {
	case <-stop:
	case <-ctx.Done():
	}
}

// mute keeps the voters from voting, which are most of every world.
func (e *electorate) mute() (speak func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.speak = make(chan struct{})
	return sync.OnceFunc(func() { close(e.speak) })
}

// spoken is closed while m may vote.
func (e *electorate) spoken(m *member) <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	if m.cfg.Listener != nil {
		free := make(chan struct{})
		close(free)
		return free
	}
	return e.speak
}

// knows reports whether the newest world that m knows has the launcher with the ID as a deputy.
func (m *member) knows(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(m.voter.Deputies(), func(d rendezvous.Deputy) bool { return d.ID == id })
}

func (e *electorate) size() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.members)
}

func (e *electorate) all(is func(*member) bool) bool {
	e.mu.Lock()
	members := slices.Collect(maps.Keys(e.members))
	e.mu.Unlock()
	return !slices.ContainsFunc(members, func(m *member) bool { return !is(m) })
}

// vacate kills the founder.
func (e *electorate) vacate() {
	e.mu.Lock()
	end := e.founder
	e.founder = nil
	e.mu.Unlock()
	if end != nil {
		end()
	}
}

// handOver ends a launcher, which serves on, if it does, until the world without it runs. If no other one can serve
// then, one is started at the endpoint.
func (e *electorate) handOver(m *member) error {
	svc := m.Serving()
	if svc != nil {
		e.runs(svc.Hub)
	}
	_, err := m.session.Leave(m.ctx, "SIGTERM", nil)
	e.gone(m)
	if svc != nil && err == nil {
		e.runs(svc.Hub)
	}
	m.end()
	if svc != nil && e.all(func(o *member) bool { return o.cfg.Listener == nil }) {
		e.found()
	}
	return err
}

// runs waits until all members run in the newest world of the server.
func (e *electorate) runs(h *api.Hub) {
	for late := time.Now().Add(10 * time.Second); time.Now().Before(late); time.Sleep(time.Millisecond) {
		s, err := h.Run("r")
		if err == nil && s.Phase == "running" && e.all(func(o *member) bool {
			ran := o.ran.Load()
			return ran != nil && ran.Round == s.Round && ran.Epoch == s.Epoch
		}) {
			return
		}
	}
	e.t.Error("not all launchers have a place")
}

// host is a listener whose host can fall silent.
type host struct {
	net.Listener
	mu    sync.Mutex
	conns []syscall.Conn
}

func newHost(t *testing.T) *host {
	var c net.ListenConfig
	c.SetMultipathTCP(false) // which has no filters
	l, err := c.Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	return &host{Listener: l}
}

// Accept implements net.Listener.
func (h *host) Accept() (net.Conn, error) {
	c, err := h.Listener.Accept()
	if err == nil {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.conns = append(h.conns, c.(syscall.Conn))
	}
	return c, err
}

// hush has the kernel drop all that comes from now on.
func (h *host) hush(t *testing.T) (hear func()) {
	drop := unix.SockFprog{Len: 1, Filter: &unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}}
	h.each(func(fd int) {
		require.NoError(t, unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &drop))
	})
	return func() {
		h.each(func(fd int) { _ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0) })
	}
}

func (h *host) each(f func(fd int)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range append([]syscall.Conn{h.Listener.(syscall.Conn)}, h.conns...) {
		if raw, err := c.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { f(int(fd)) })
		}
	}
}
