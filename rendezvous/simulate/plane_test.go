package simulate

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/keeper"
	"dlrover-run/rendezvous/lead"
)

// plane is the control plane of all runs: daemons, of which one leads, and what they keep.
type plane struct {
	t    rapid.TB
	keep time.Duration // of runs that have ended

	mu    sync.Mutex
	lead  *daemon // nil: there is none
	store *decisions
	runs  map[string]*cluster
	leaks []string // notes of runs that nobody has begun
}

// daemon is what a dlrover-master has besides its server.
type daemon struct {
	hub    *api.Hub
	keeper *keeper.Keeper
	gone   atomic.Bool
}

func newPlane(t rapid.TB, keep time.Duration) *plane {
	return &plane{t: t, keep: keep, store: &decisions{records: map[string][]byte{}}, runs: map[string]*cluster{}}
}

// boot starts a daemon, which goes on with what is kept. One that leads is deposed by that, and does not know.
func (p *plane) boot() (deposed *daemon) {
	p.moment()
	ctx := context.Background()
	term := p.store.elect()
	k, err := keeper.Load(ctx, p.store, term, slog.New(slog.DiscardHandler))
	require.NoError(p.t, err)
	d := &daemon{keeper: k}
	d.hub = api.NewHub(api.HubConfig{Keeper: k, Keep: p.keep, Observe: p.observe})
	k.Follow(d.hub, func(string) []byte { return nil })
	p.mu.Lock()
	defer p.mu.Unlock()
	deposed, p.lead = p.lead, d
	return deposed
}

func (p *plane) observe(run string, n rendezvous.Note) {
	p.mu.Lock()
	c := p.runs[run]
	if c == nil && run != probe {
		p.leaks = append(p.leaks, run+": "+string(n.Event))
	}
	p.mu.Unlock()
	if c != nil {
		c.mark("note " + string(n.Event))
		c.rules.noted(n)
	}
}

// crash ends the daemon at once.
func (p *plane) crash() {
	p.moment()
	p.store.elect() // it writes nothing more
	p.mu.Lock()
	d := p.lead
	p.lead = nil
	p.mu.Unlock()
	d.end()
}

// shutDown ends the daemon, which writes its decisions.
func (p *plane) shutDown() {
	p.moment()
	p.mu.Lock()
	d := p.lead
	p.lead = nil
	p.mu.Unlock()
	d.end()
}

func (d *daemon) end() {
	if d != nil {
		d.gone.Store(true)
		d.hub.Close()
		d.keeper.Close()
	}
}

// forget loses all records of the daemons.
func (p *plane) forget() { p.store.clear() }

func (p *plane) running() *daemon {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lead
}

// moment waits for a time at which no node does anything.
func (p *plane) moment() { time.Sleep(slot(time.Now(), 0, maxNode-1, troubles)) }

// decisions keep records in memory, for the leader of the newest term.
type decisions struct {
	mu      sync.Mutex
	term    lead.Term
	records map[string][]byte
	fault   string // of writes: one of faults
}

// What may be wrong with writes.
const (
	fine    = "fine"
	refuses = "refuses" // they fail
	loses   = "loses"   // they succeed, and fail
	hangs   = "hangs"   // they never end
	slow    = "slow"    // they take longer than anybody waits for them
	full    = "full"    // nothing more is taken
)

var errStore = errors.New("the store cannot be reached")

// elect begins a term. Leaders of earlier ones write nothing more.
func (s *decisions) elect() lead.Term {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.term++
	return s.term
}

func (s *decisions) breaks(fault string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = fault
}

func (s *decisions) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.records)
}

// now is the fault that a leader of a term meets.
func (s *decisions) now(term lead.Term) (fault string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if term != s.term {
		return "", lead.ErrDeposed
	}
	return s.fault, nil
}

func (s *decisions) Append(ctx context.Context, term lead.Term, records ...lead.Record) error {
	fault, err := s.now(term)
	for ; fault == hangs && err == nil && ctx.Err() == nil; fault, err = s.now(term) {
		time.Sleep(20 * time.Millisecond)
	}
	if err == nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		return err
	}
	if fault == slow {
		time.Sleep(300 * time.Millisecond)
	}
	time.Sleep(time.Millisecond)
	err = s.write(term, records)
	time.Sleep(time.Millisecond)
	return err
}

func (s *decisions) write(term lead.Term, records []lead.Record) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case term != s.term:
		return lead.ErrDeposed
	case s.fault == refuses:
		return errStore
	case s.fault == full && slices.ContainsFunc(records, func(r lead.Record) bool { return r.Value != nil }):
		return lead.ErrFull
	}
	for _, r := range records {
		if s.records[r.Key] = r.Value; r.Value == nil {
			delete(s.records, r.Key)
		}
	}
	if s.fault == loses {
		return errStore
	}
	return lead.Validate(records)
}

func (s *decisions) Load(_ context.Context, term lead.Term) (all []lead.Record, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if term != s.term {
		return nil, lead.ErrDeposed
	}
	for _, key := range slices.Sorted(maps.Keys(s.records)) {
		all = append(all, lead.Record{Key: key, Value: s.records[key]})
	}
	return all, nil
}

// keys are those of all records.
func (s *decisions) keys() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.records))
}
