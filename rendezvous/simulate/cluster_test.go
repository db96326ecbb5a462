package simulate

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/keeper"
	"dlrover-run/rendezvous/lead"
)

const runName = "job"

// cluster is one run: its daemon, its launchers and the network between them. All goroutines are of one bubble.
type cluster struct {
	t      *testing.T
	params rendezvous.Params
	rnd    *rand.Rand // of the story alone
	rules  *rules
	began  time.Time
	all    []*node // of the story: those that live, as far as it knows
	ending []*node // of the story: those that end

	mu     sync.Mutex
	daemon *daemon // nil: there is none
	store  *decisions
	nodes  map[string]*node
	made   int // nodes
	marks  map[string]int
}

// daemon is what a dlrover-master has besides its server.
type daemon struct {
	hub    *api.Hub
	keeper *keeper.Keeper
}

func newCluster(t *testing.T, seed uint64, p rendezvous.Params) *cluster {
	c := &cluster{t: t, params: p.WithDefaults(), rnd: rand.New(rand.NewPCG(seed, 1)), began: time.Now(),
		store: &decisions{}, nodes: map[string]*node{}, marks: map[string]int{}}
	c.rules = newRules(c)
	c.boot()
	return c
}

// boot starts a daemon, which goes on with what is kept.
func (c *cluster) boot() {
	c.moment()
	k, err := keeper.Load(c.t.Context(), c.store, 1, slog.New(slog.DiscardHandler))
	require.NoError(c.t, err)
	d := &daemon{keeper: k}
	d.hub = api.NewHub(api.HubConfig{Keeper: k, Observe: func(_ string, n rendezvous.Note) {
		c.mark("note " + string(n.Event))
		c.rules.noted(n)
	}})
	k.Follow(d.hub, func(string) []byte { return nil })
	c.mu.Lock()
	defer c.mu.Unlock()
	c.daemon = d
}

// crash ends the daemon at once.
func (c *cluster) crash() {
	c.moment()
	c.mu.Lock()
	d := c.daemon
	c.daemon = nil
	c.store = c.store.fenced()
	c.mu.Unlock()
	if d != nil {
		d.hub.Close()
		d.keeper.Close()
	}
}

// forget loses what the daemons have kept.
func (c *cluster) forget() { c.store = &decisions{} }

func (c *cluster) running() *daemon {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.daemon
}

func (c *cluster) byID(id string) *node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.nodes[id]
}

// mark books that a situation was met.
func (c *cluster) mark(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.marks[what]++
}

// sometimes fails the test if a run has not met all of the situations.
func (c *cluster) sometimes(all ...string) {
	for _, what := range all {
		require.NotZero(c.t, c.marks[what], "sometimes: %s; met: %v", what, c.marks)
	}
}

func (c *cluster) clock() time.Duration { return time.Since(c.began) }

// start switches on so many new nodes within a time.
func (c *cluster) start(count int, within time.Duration) {
	for range count {
		n := &node{c: c, index: c.made % (maxNode - 1), id: fmt.Sprintf("%06d", c.made), faults: make(chan func() error, 4),
			done: make(chan struct{}), stops: time.Duration(10+c.rnd.IntN(200)) * time.Millisecond}
		n.sick = c.params.Gate && c.rnd.IntN(30) == 0
		n.link = newLink(c, n.index)
		n.power, n.kill = context.WithCancel(context.Background())
		c.made++
		c.mu.Lock()
		c.nodes[n.id] = n
		c.mu.Unlock()
		c.all = append(c.all, n)
		go n.live(time.Duration(c.rnd.Int64N(int64(within) + 1)))
	}
}

// pick chooses different nodes that live.
func (c *cluster) pick(count int) []*node {
	c.sweep()
	ns := slices.Clone(c.all)
	for i := range min(count, len(ns)) {
		j := i + c.rnd.IntN(len(ns)-i)
		ns[i], ns[j] = ns[j], ns[i]
	}
	ns = ns[:min(count, len(ns))]
	slices.SortFunc(ns, func(a, b *node) int { return a.index - b.index })
	return ns
}

// sweep forgets the nodes that were switched off.
func (c *cluster) sweep() {
	c.all = slices.DeleteFunc(c.all, func(n *node) bool {
		if !n.killed() && !n.hasLeft() {
			return false
		}
		c.ending = append(c.ending, n)
		return true
	})
	c.ending = slices.DeleteFunc(c.ending, func(n *node) bool {
		select {
		case <-n.done:
		default:
			return false
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.nodes, n.id)
		return true
	})
}

// each does something to nodes, to each in a moment of its own, which are in one period.
func (c *cluster) each(ns []*node, f func(*node)) {
	at := time.Now().Truncate(period).Add(period)
	for _, n := range ns {
		time.Sleep(time.Until(at.Add(time.Duration(n.index*lanes + troubles))))
		f(n)
	}
}

// moment waits for a time at which no node does anything.
func (c *cluster) moment() { time.Sleep(slot(time.Now(), 0, maxNode-1, troubles)) }

func (c *cluster) close() {
	for _, n := range c.nodes {
		n.kill()
	}
	for _, n := range c.nodes {
		<-n.done
	}
	c.crash()
}

// decisions keep records in memory.
type decisions struct {
	mu      sync.Mutex
	records map[string][]byte
	deposed bool
}

func (s *decisions) Append(_ context.Context, _ lead.Term, records ...lead.Record) error {
	time.Sleep(2 * time.Millisecond)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.deposed {
		return lead.ErrDeposed
	}
	if s.records == nil {
		s.records = map[string][]byte{}
	}
	for _, r := range records {
		if s.records[r.Key] = r.Value; r.Value == nil {
			delete(s.records, r.Key)
		}
	}
	return lead.Validate(records)
}

func (s *decisions) Load(context.Context, lead.Term) (all []lead.Record, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, value := range s.records {
		all = append(all, lead.Record{Key: key, Value: value})
	}
	slices.SortFunc(all, func(a, b lead.Record) int { return cmp.Compare(a.Key, b.Key) })
	return all, nil
}

// fenced are the records for the next daemon: this one writes no more.
func (s *decisions) fenced() *decisions {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deposed = true
	return &decisions{records: s.records}
}

// epochOf is the newest epoch with workers, and how many nodes of it work.
func (r *rules) epochOf() (e job.EpochID, size, works int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if w := r.worlds[r.newest]; w != nil {
		return r.newest, w.size, w.works
	}
	return r.newest, 0, 0
}
