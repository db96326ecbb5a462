package simulate

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// cluster is one run: its launchers and the network between them and the control plane. All goroutines are of one
// bubble.
type cluster struct {
	*plane
	run    string
	params rendezvous.Params
	played bool       // commands end checks, and errors end launchers
	paused bool       // by an order, which was confirmed
	rnd    *rand.Rand // of the story alone
	rules  *rules
	began  time.Time
	all    []*node // of the story: those that live, as far as it knows
	ending []*node // of the story: those that end

	mu    sync.Mutex
	nodes map[string]*node
	made  int // nodes
	first int // the index of the first node
	marks map[string]int
}

// newCluster returns a run without nodes, and a control plane of its own.
func newCluster(t rapid.TB, seed uint64, p rendezvous.Params) *cluster {
	c := newPlane(t, 0).cluster("job", p)
	c.rnd = rand.New(rand.NewPCG(seed, 1))
	c.boot()
	return c
}

// cluster adds a run.
func (p *plane) cluster(run string, params rendezvous.Params) *cluster {
	c := &cluster{plane: p, run: run, params: params.WithDefaults(), began: time.Now(), nodes: map[string]*node{},
		marks: map[string]int{}}
	c.rules = newRules(c)
	p.mu.Lock()
	defer p.mu.Unlock()
	c.first = len(p.runs) * maxNode / 2
	p.runs[run] = c
	return c
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
		id := fmt.Sprintf("%06d", c.made)
		n := c.node(id, "node-"+id)
		n.stops = time.Duration(10+c.rnd.IntN(200)) * time.Millisecond
		n.sick = c.params.Gate && c.rnd.IntN(30) == 0
		go n.live(time.Duration(c.rnd.Int64N(int64(within) + 1)))
	}
}

// node adds a node that is switched off.
func (c *cluster) node(id, name string) *node {
	n := &node{c: c, index: (c.first + c.made) % (maxNode - 1), id: id, faults: make(chan func() error, 4),
		done: make(chan struct{})}
	n.self = rendezvous.Node{
		ID: id, Name: name, Rank: -1, Addr: fmt.Sprintf("10.%d.%d.%d", n.index>>16, n.index>>8&255, n.index&255),
		Slots: slots, Role: "default", Can: []rendezvous.Ability{rendezvous.CanGate, rendezvous.CanHold, rendezvous.CanLeave},
	}
	n.link = newLink(c, n.index)
	n.power, n.kill = context.WithCancel(context.Background())
	c.made++
	c.mu.Lock()
	c.nodes[id] = n
	c.mu.Unlock()
	c.all = append(c.all, n)
	return n
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

// off kills all nodes.
func (c *cluster) off() {
	for _, n := range c.nodes {
		n.kill()
	}
	for _, n := range c.nodes {
		<-n.done
	}
}

func (c *cluster) close() {
	c.off()
	c.crash()
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
