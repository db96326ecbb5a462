package failover

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/leadtest"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/lead"
	"dlrover-run/rendezvous/successor"
)

// TestLeadership: launchers that vote for the next server elect as any other lead.Leadership does. What they decide has
// no store: TestDecisionsInTheLaunchers.
func TestLeadership(t *testing.T) {
	leadtest.RunLeadership(t, func(t *testing.T) leadtest.Elections {
		t.Parallel()
		e := newElectorate(t)
		return leadtest.Elections{
			Open:   func(*testing.T) lead.Leadership { return &candidate{e: e} },
			Word:   func(t *testing.T, p lead.Leadership, term lead.Term) error { return e.heed(t, p.(*candidate), term) },
			Stands: func(t *testing.T, p lead.Leadership) { e.know(t, p.(*candidate)) },
			Deafen: func(p lead.Leadership) (hear func()) { return p.(*candidate).host.hush(t) },
			Mute:   e.mute,
		}
	})
}

// know waits until a candidate stands: all members know it as a deputy.
func (e *electorate) know(t *testing.T, c *candidate) {
	t.Helper()
	require.Eventually(t, func() bool {
		m := c.launcher()
		return m != nil && e.all(func(o *member) bool { return o.knows(m.cfg.ID) })
	}, 10*time.Second, time.Millisecond)
}

// heed has c tell the present server that it serves in a term, and a voter ask it: they follow it, or refuse its word.
func (e *electorate) heed(t *testing.T, c *candidate, term lead.Term) error {
	t.Helper()
	v, addr := e.voters[0], c.host.Addr().String()
	require.Eventually(t, func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return v.cfg.Client.Addr() == e.server
	}, 10*time.Second, time.Millisecond)
	e.notify(message{Vote: successor.Vote{Term: uint64(term), ID: c.id}, Addr: addr})
	a, err := v.serves(t.Context(), addr)
	moved := v.answered(rendezvous.Deputy{ID: c.id, Addr: addr}, a)
	if moved || err != nil || a != (successor.Answer{Serves: true, Term: uint64(term)}) || v.cfg.Client.Addr() != addr {
		return lead.ErrDeposed
	}
	return nil
}

// notify tells the present server of another one.
func (e *electorate) notify(m message) {
	c := api.NewClient(e.voters[0].cfg.Client.Addr(), token)
	defer c.Close()
	_ = c.Call(e.t.Context(), "r", api.Vote, m, nil)
}

// candidate is a process of the suite: a new launcher for each campaign.
type candidate struct {
	e    *electorate
	mu   sync.Mutex
	m    *member // of the present campaign or leadership
	host *host   // and of an earlier one
	id   string
}

func (c *candidate) launcher() *member {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.m
}

var launchers atomic.Int64

// Campaign implements lead.Leadership.
func (c *candidate) Campaign(ctx context.Context, addr string) (lead.Term, <-chan struct{}, error) {
	h := newHost(c.e.t)
	id := fmt.Sprint(addr, "#", launchers.Add(1))
	c.e.mu.Lock()
	c.e.names[h.Addr().String()] = addr
	c.e.mu.Unlock()
	m := c.e.join(id, h, nil)
	c.mu.Lock()
	c.m, c.host, c.id = m, h, id
	c.mu.Unlock()
	for !c.e.all(func(o *member) bool { return o.knows(id) }) && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	if ctx.Err() == nil {
		c.e.vacate()
	}
	select {
	case <-m.elected.Done():
	case <-ctx.Done():
		_ = c.Resign(context.Background())
		return 0, nil, ctx.Err()
	}
	for m.cfg.Client.Addr() != h.Addr().String() { // its own session follows it
		time.Sleep(time.Millisecond)
	}
	c.e.mu.Lock()
	c.e.server = h.Addr().String()
	c.e.mu.Unlock()
	lost := make(chan struct{})
	go func() {
		defer close(lost)
		for m.standby() == nil && m.ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
	}()
	m.mu.Lock()
	defer m.mu.Unlock()
	return lead.Term(m.tally.Count(successor.Vote{}).Term), lost, nil
}

// Watch implements lead.Leadership.
func (c *candidate) Watch(ctx context.Context) <-chan lead.Leader {
	leaders := make(chan lead.Leader, 1)
	id := fmt.Sprint("watcher#", launchers.Add(1))
	leaders <- lead.Leader{} // the suite watches before anybody campaigns
	m := c.e.join(id, nil, leaders)
	context.AfterFunc(ctx, func() {
		_, _ = m.session.Leave(context.Background(), "", nil)
		m.end()
		close(leaders)
	})
	return leaders
}

// Depose implements lead.Leadership. Only the news of a later term ends the leadership of a launcher that lives.
func (c *candidate) Depose(_ context.Context, l lead.Leader) error {
	c.e.notify(message{Vote: successor.Vote{Term: uint64(l.Term), ID: "x"}, Addr: "127.0.0.1:1"})
	return nil
}

// Resign implements lead.Leadership: the launcher ends as by a signal.
func (c *candidate) Resign(context.Context) error {
	c.mu.Lock()
	m := c.m
	c.m = nil
	c.mu.Unlock()
	if m == nil {
		return nil
	}
	return c.e.handOver(m)
}
