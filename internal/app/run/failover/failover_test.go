package failover

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/app/service"
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/successor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const token = "0123456789abcdef0123456789abcdef"

var errLost = errors.New("cut off")

// peers are launchers of a world whose server listens, but is none of them.
type peers struct {
	t        *testing.T
	server   net.Listener
	plan     *rendezvous.Failover
	listen   map[string]net.Listener
	all      map[string]*Failover
	epoch    job.EpochID
	endpoint string
}

// newPeers makes launchers of which the first are deputies.
func newPeers(t *testing.T, deputies int, names ...string) *peers {
	p := &peers{t: t, server: listen(t, "127.0.0.1:0"), all: map[string]*Failover{}, listen: map[string]net.Listener{},
		epoch: job.EpochID{Term: 1, Round: 1}}
	p.endpoint = p.server.Addr().String()
	p.plan = &rendezvous.Failover{Term: 1, Server: p.endpoint, Voters: len(names)}
	for i, name := range names {
		l := listen(t, "127.0.0.1:0")
		p.listen[name] = l
		if i < deputies {
			p.plan.Deputies = append(p.plan.Deputies, rendezvous.Deputy{ID: name, Name: name, Addr: l.Addr().String()})
		}
	}
	for _, name := range names {
		c := api.NewClient(p.endpoint, token)
		h := New(Config{Run: "r", ID: name, Client: c, Endpoint: p.endpoint, Listener: p.listen[name],
			Serve: serve, Log: slog.New(slog.DiscardHandler)})
		t.Cleanup(c.Close)
		t.Cleanup(h.Close)
		p.all[name] = h
		h.Told(rendezvous.Directive{Kind: job.Run, EpochID: p.epoch, Failover: p.plan})
	}
	return p
}

func serve(standby func() error, vote http.Handler) (*service.Service, error) {
	return service.New(service.Config{Token: token, Standby: standby, Vote: vote, Log: slog.New(slog.DiscardHandler)})
}

func listen(t *testing.T, addr string) net.Listener {
	l, err := net.Listen("tcp", addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// die closes the server's port, as its kernel does when it is killed.
func (p *peers) die() { require.NoError(p.t, p.server.Close()) }

// lost has launchers notice the loss, in turn, until all of them follow another server.
func (p *peers) lost(names ...string) {
	p.t.Helper()
	left := map[string]bool{}
	for _, name := range names {
		left[name] = true
	}
	for end := time.Now().Add(30 * time.Second); len(left) > 0; {
		require.True(p.t, time.Now().Before(end), "%v follow nobody", left)
		for _, name := range names {
			if left[name] && p.all[name].Lost(p.t.Context(), syscall.ETIMEDOUT) {
				delete(left, name)
			}
		}
	}
}

// runs asks the server that a launcher follows.
func (p *peers) runs(name string) error {
	_, err := p.all[name].cfg.Client.Runs(p.t.Context())
	return err
}

func TestMembersElectTheFirstHeir(t *testing.T) {
	p := newPeers(t, 2, "a", "b", "c", "d")
	for range 3 {
		require.False(t, p.all["a"].Lost(t.Context(), errLost), "the server lives")
	}
	require.False(t, p.all["a"].Bound())
	p.die()
	require.False(t, p.all["b"].Lost(t.Context(), errLost))
	require.False(t, p.all["b"].Bound(), "the deputy does not know of the loss, and counts no vote")
	require.False(t, p.all["a"].Lost(t.Context(), errLost))
	require.True(t, p.all["a"].Bound())
	require.ErrorIs(t, p.all["a"].Parting(p.epoch, func() error { return nil }), api.ErrBound)
	require.False(t, p.all["b"].Lost(t.Context(), errLost))
	require.Nil(t, p.all["a"].Serving(), "two of four are no majority")
	p.lost("c", "b", "a", "d")
	require.NotNil(t, p.all["a"].Serving())
	for name := range p.all {
		require.NoError(t, p.runs(name))
		require.False(t, p.all[name].Bound())
	}
}

// The next deputy serves if the first is dead, too; and a successor has successors.
func TestHeirsOfHeirs(t *testing.T) {
	p := newPeers(t, 3, "a", "b", "c", "d", "e")
	p.die()
	p.all["a"].Close()
	p.lost("b", "c", "d", "e")
	require.NotNil(t, p.all["b"].Serving())
	p.all["b"].Close()
	p.lost("c", "d", "e")
	require.NotNil(t, p.all["c"].Serving())
}

// noHost is an address for documentation.
const noHost = "[2001:db8::1]:1"

// silence has the server's host give no sign of life.
func (p *peers) silence(plan rendezvous.Failover) {
	plan.Server, plan.Deputies = noHost, p.plan.Deputies
	p.plan = &plan
	for name := range p.all {
		p.told(name)
	}
	p.die()
}

func (p *peers) told(name string) {
	p.all[name].Told(rendezvous.Directive{Kind: job.Run, EpochID: p.epoch, Failover: p.plan})
}

// A server of an older version may seal another world while it is silent.
func TestSilenceOfAnOlderServer(t *testing.T) {
	t.Parallel()
	p := newPeers(t, 1, "a")
	p.silence(rendezvous.Failover{Term: 1, Voters: 1})
	require.False(t, p.all["a"].Lost(t.Context(), syscall.ETIMEDOUT))
	require.False(t, p.all["a"].Bound())
}

// More than half of the whole world replace a silent server. One that answers again before has its members back.
func TestMajorityReplacesASilentServer(t *testing.T) {
	t.Parallel()
	p := newPeers(t, 2, "a", "b", "c", "d")
	p.silence(rendezvous.Failover{Term: 1, Voters: 4, Members: 5})
	require.False(t, p.all["a"].Lost(t.Context(), syscall.ETIMEDOUT))
	require.False(t, p.all["b"].Lost(t.Context(), syscall.ETIMEDOUT))
	require.True(t, p.all["b"].Bound())
	require.Nil(t, p.all["a"].Serving(), "two of five")
	s := p.restarted()
	require.False(t, p.all["a"].Lost(t.Context(), errLost))
	require.False(t, p.all["a"].Bound())
	require.False(t, p.all["b"].Lost(t.Context(), syscall.ETIMEDOUT))
	require.False(t, p.all["b"].Bound(), "its vote is back")
	s.Close()
}

func TestMajorityWithoutASilentDeputy(t *testing.T) {
	t.Parallel()
	p := newPeers(t, 2, "a", "b", "c", "d")
	p.plan.Deputies[0].Addr = noHost
	p.silence(rendezvous.Failover{Term: 1, Voters: 4, Members: 5})
	p.lost("b", "c", "d")
	require.NotNil(t, p.all["b"].Serving())
	a := p.all["a"]
	require.True(t, a.Lost(t.Context(), syscall.ETIMEDOUT), "it finds the later deputy that serves")
	require.Nil(t, a.Serving())
	// A later server replaces that one, too, and tells it.
	m := message{Vote: successor.Vote{Term: 9}, Addr: "10.0.0.9:1"}
	require.NoError(t, a.cfg.Client.Call(t.Context(), "r", api.Vote, m, nil))
	require.Nil(t, p.all["b"].Serving())
	require.Equal(t, &api.MovedError{To: "10.0.0.9:1"}, p.all["b"].standby())
}

// The user may take silence for death.
func TestAloneByTheUsersWord(t *testing.T) {
	t.Parallel()
	p := newPeers(t, 1, "a")
	p.silence(rendezvous.Failover{Term: 1, Voters: 1, Members: 2})
	require.False(t, p.all["a"].Lost(t.Context(), syscall.ETIMEDOUT), "one of two")
	p.plan.Alone = true
	require.True(t, p.all["a"].Lost(t.Context(), syscall.ETIMEDOUT))
}

// A deputy that has asked for a place in the next world does not serve this one.
func TestDeputyWithoutAVoteIsPassedOver(t *testing.T) {
	p := newPeers(t, 2, "a", "b", "c", "d", "e")
	p.die()
	require.NoError(t, p.all["a"].Parting(p.epoch, func() error { return nil }))
	p.lost("b", "c", "d", "e")
	require.NotNil(t, p.all["b"].Serving())
}

// A world of two: the survivor serves alone.
func TestSurvivorOfTwo(t *testing.T) {
	p := newPeers(t, 1, "a")
	p.die()
	require.True(t, p.all["a"].Lost(t.Context(), errLost))
	require.NoError(t, p.runs("a"))
}

// A launcher that was started again in the place of the dead one serves, if nobody has been elected.
func TestCandidacyEnds(t *testing.T) {
	p := newPeers(t, 1, "a", "b", "c")
	p.die()
	require.False(t, p.all["a"].Lost(t.Context(), errLost))
	require.True(t, p.all["a"].Bound())
	other := listen(t, p.endpoint)
	require.False(t, p.all["a"].Lost(t.Context(), errLost))
	require.True(t, p.all["a"].Bound(), "something else listens there, which does not answer")
	require.NoError(t, other.Close())
	p.restarted()
	require.False(t, p.all["a"].Lost(t.Context(), errLost))
	require.False(t, p.all["a"].Bound())
	p.plan.Voters = 1 // so that its own vote is enough
	require.False(t, p.all["a"].Lost(t.Context(), errLost))
	require.Nil(t, p.all["a"].Serving(), "a request that fails is no proof that the new launcher is dead, too")
}

// restarted is a new launcher at the endpoint.
func (p *peers) restarted() *Server {
	p.t.Helper()
	client := api.NewClient(p.endpoint, token)
	p.t.Cleanup(client.Close)
	own := New(Config{Run: "r", ID: "n", Client: client, Endpoint: p.endpoint,
		Log: slog.New(slog.DiscardHandler)})
	p.t.Cleanup(own.Close)
	s := NewServer("r", own)
	p.t.Cleanup(s.Close)
	svc, err := serve(s.Standby, s.Vote())
	require.NoError(p.t, err)
	s.Of(svc.Hub, "n", "127.0.0.1", 1)
	l, served := listen(p.t, p.endpoint), make(chan error, 1)
	go func() { served <- svc.Serve(l) }()
	p.t.Cleanup(func() { svc.Close(0); <-served })
	return s
}

// Whoever has asked for a place in the next world has no vote, unless nobody has heard it.
func TestPartingEndsTheVote(t *testing.T) {
	p := newPeers(t, 1, "a")
	p.die()
	h := p.all["a"]
	refused := fmt.Errorf("dial: %w", syscall.ECONNREFUSED)
	require.ErrorIs(t, h.Parting(p.epoch, func() error { return refused }), syscall.ECONNREFUSED)
	require.True(t, h.voter.Member())
	require.Error(t, h.Parting(p.epoch, func() error { return errors.New("cut off") }))
	require.False(t, h.Lost(t.Context(), errLost))
	require.Nil(t, h.Serving())
}

// A launcher without a vote follows the one that the others have elected, and looks for nobody at the endpoint.
func TestLauncherWithoutAVoteFollows(t *testing.T) {
	p := newPeers(t, 2, "a", "b", "c", "d")
	d := p.all["d"]
	require.Error(t, d.Parting(p.epoch, func() error { return errors.New("cut off") }))
	p.die()
	require.False(t, d.Lost(t.Context(), errLost), "nobody serves yet")
	p.lost("a", "b", "c")
	require.True(t, d.Lost(t.Context(), errLost))
	require.NoError(t, p.runs("d"))
	require.Nil(t, d.Serving())
}

// A launcher that has had no world yet goes back to the endpoint from a dead one to which it was redirected.
func TestLauncherWithoutAWorldReturns(t *testing.T) {
	p := newPeers(t, 1, "a")
	c := p.all["a"].cfg
	to := listen(t, "127.0.0.1:0")
	c.ID, c.Listener, c.Client = "b", nil, api.NewClient(to.Addr().String(), token)
	t.Cleanup(c.Client.Close)
	h := New(c)
	t.Cleanup(h.Close)
	require.False(t, h.Lost(t.Context(), errLost))
	require.Equal(t, to.Addr().String(), c.Client.Addr(), "it lives")
	require.NoError(t, to.Close())
	require.False(t, h.Lost(t.Context(), errLost))
	require.Equal(t, p.endpoint, c.Client.Addr())
}

// Workers fail while their launcher looks for a deputy: it asks for a place first, and has no vote any more.
func TestPartingWhileDeputiesAreAsked(t *testing.T) {
	p := newPeers(t, 2, "a", "b", "c")
	p.die()
	require.False(t, p.all["a"].Lost(t.Context(), errLost))
	b, c := p.all["b"], p.all["c"]
	for _, h := range []*Failover{b, c} {
		h.connect = func(addr string) *api.Client {
			require.NoError(t, h.Parting(p.epoch, func() error { return nil }))
			return h.cfg.Client.To(addr)
		}
	}
	require.False(t, c.Lost(t.Context(), errLost))
	require.False(t, p.all["a"].Lost(t.Context(), errLost))
	require.Nil(t, p.all["a"].Serving(), "c has no vote")
	p.all["a"].Close()
	require.False(t, b.Lost(t.Context(), errLost))
	require.Zero(t, b.candidacy(), "it does not stand")
}

// Without a vote a launcher goes to the endpoint, but not from a server to which it was redirected there.
func TestRedirectedLauncherStays(t *testing.T) {
	p := newPeers(t, 1, "a")
	h := p.all["a"]
	require.Error(t, h.Parting(p.epoch, func() error { return errors.New("cut off") }))
	p.die()
	to := listen(t, "127.0.0.1:0")
	h.cfg.Client.Move(to.Addr().String())
	require.False(t, h.Lost(t.Context(), errLost))
	require.Equal(t, to.Addr().String(), h.cfg.Client.Addr())
	require.NoError(t, to.Close())
	require.False(t, h.Lost(t.Context(), errLost))
	require.Equal(t, p.endpoint, h.cfg.Client.Addr())
}

// The elected launcher finds the one that replaces the dead one at the endpoint. That one comes, with its own node and
// all others that ask it.
func TestNewLauncherAtTheEndpointJoinsTheElected(t *testing.T) {
	p := newPeers(t, 1, "a", "b")
	p.die()
	s := p.restarted()
	join := rendezvous.Join{Node: rendezvous.Node{ID: "n", Name: "n", Rank: -1, Slots: 1},
		Params: rendezvous.Params{Min: 2, Max: 2}}
	require.NoError(t, s.Join(t.Context(), "r", join))
	waits := make(chan error, 1)
	go func() {
		_, err := s.Watch(t.Context(), "r", "n", api.Cursor{})
		for err == nil { // a directive to wait
			_, err = s.Watch(t.Context(), "r", "n", api.Cursor{Directive: 1 << 63})
		}
		waits <- err
	}()
	a := p.all["a"]
	a.mu.Lock()
	a.tally.Stand(successor.Vote{Term: 2, Epoch: p.epoch, ID: "a"}, 2)
	a.mu.Unlock()
	require.NoError(t, p.vote("b", "a")) // a member that has seen the death, too
	err := <-waits
	require.False(t, api.Final(err), err)
	require.Equal(t, p.plan.Deputies[0].Addr, s.Moved())
	_, err = s.Watch(t.Context(), "r", "n", api.Cursor{})
	require.ErrorIs(t, err, rendezvous.ErrUnknownNode)
	require.NoError(t, s.Join(t.Context(), "r", join))
	late := api.NewClient(p.endpoint, token)
	t.Cleanup(late.Close)
	join.Node.ID, join.Node.Name = "m", "m"
	require.NoError(t, late.Join(t.Context(), "r", join))
	require.Len(t, a.Serving().Hub.Runs(true)[0].Nodes, 2)
}

// The processes of a launcher that serves stay with it, at an address that always leads to it, until it has moved.
func TestOwnProcessesOfTheServer(t *testing.T) {
	p := newPeers(t, 1, "a", "b")
	p.die()
	s := p.restarted()
	var told []string
	s.deputies.Follow(func(servers string) { told = append(told, servers) })
	require.Equal(t, "127.0.0.1:1", s.deputies.Servers())
	s.deputies.Told(rendezvous.Directive{Kind: job.Run, EpochID: p.epoch, Failover: p.plan})
	deputy := p.plan.Deputies[0].Addr
	require.Equal(t, []string{"127.0.0.1:1," + deputy}, told)
	s.giveWay(message{Vote: successor.Vote{Term: 2}, Addr: deputy})
	require.Equal(t, []string{"127.0.0.1:1," + deputy, deputy}, told)
}

// vote sends the vote of one launcher to another.
func (p *peers) vote(from, to string) error {
	deputy := rendezvous.Deputy{ID: to, Addr: p.listen[to].Addr().String()}
	_, err := p.all[from].ask(p.t.Context(), deputy, successor.Vote{Term: 2, Epoch: p.epoch, ID: from})
	return err
}

// Storage that does not answer keeps no directive back. The launcher is a deputy once it does.
func TestADirectiveDoesNotWaitForStorage(t *testing.T) {
	p := newPeers(t, 1, "a")
	answers := make(chan struct{})
	c := p.all["a"].cfg
	c.ID, c.Listener = "b", listen(t, "127.0.0.1:0")
	c.Serve = func(standby func() error, vote http.Handler) (*service.Service, error) {
		<-answers
		return serve(standby, vote)
	}
	h := New(c)
	t.Cleanup(h.Close)
	plan := &rendezvous.Failover{Term: 1, Server: p.endpoint, Voters: 1,
		Deputies: []rendezvous.Deputy{{ID: "b", Addr: c.Listener.Addr().String()}}}
	p.die()
	h.Told(rendezvous.Directive{Kind: job.Run, EpochID: p.epoch, Failover: plan})
	require.False(t, h.Lost(t.Context(), errLost))
	close(answers)
	require.Eventually(t, func() bool { return h.Lost(t.Context(), errLost) }, 10*time.Second, time.Millisecond)
	require.NotNil(t, h.Serving())
}

// Before it is a deputy, a launcher takes no connection.
func TestDoorIsClosed(t *testing.T) {
	l := listen(t, "127.0.0.1:0")
	h := New(Config{Run: "r", ID: "a", Listener: l, Log: slog.New(slog.DiscardHandler)})
	t.Cleanup(h.Close)
	c := api.NewClient(l.Addr().String(), token)
	t.Cleanup(c.Close)
	require.Error(t, c.Call(t.Context(), "r", api.Vote, message{}, nil))
}
