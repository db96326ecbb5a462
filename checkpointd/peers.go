package checkpointd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/replica"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/plainhttp"
	"dlrover-run/internal/stable"
)

// anyRank is the rank of a copy that every rank can load: each holder has the full state.
const anyRank = -1

// Times for nodes whose daemon does not answer: it may be started again and listen elsewhere.
const (
	awayFirst     = 250 * time.Millisecond // until a copy is tried again; doubles
	awayMost      = 8 * time.Second        // up to this
	fetchFirst    = 100 * time.Millisecond // until a fetch is tried again; doubles
	fetchTries    = 5                      // then the fetch fails
	renewPatience = 2 * time.Second        // for a coordinator that has lost its memory
	pinPatience   = time.Second            // for a writer that is about to unlock its segment
)

// peers keeps copies of our shards on other nodes, and theirs here.
//
// For each epoch it asks the coordinator once for the addresses of all nodes (exchange), and again for a node that
// cannot be reached (renew). Until the answer arrives key is "", there are no partners, and pending copies wait. Only
// the newest save of every origin is copied. It is pending until all partners have it or have refused it, and copied
// afterwards, so that new partners get it, too.
type peers struct {
	cfg    *Config
	life   *lifetime
	log    *slog.Logger
	count  *counters
	segs   *segments
	nodes  int // that hold each shard, this one included
	server *replica.Server
	client *replica.Client
	port   int
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	wake   chan struct{}

	mu             sync.Mutex
	world          World              // the present epoch
	key            string             // of the epoch that known belongs to
	known          []coordinator.Peer // all nodes of the epoch
	partners       []replica.Peer
	pending        map[origin]pendingCopy // newest save to be copied
	copied         map[origin]pendingCopy // newest save that all partners have, or do not want
	unreachable    map[int]backoff        // partners that could not be reached, by node
	cancelExchange context.CancelFunc     // ends the exchange of the epoch
}

// newPeers listens for the copies of other nodes.
func newPeers(c *copies, nodes int) (*peers, error) {
	if c.cfg.Remote == nil || c.cfg.Addr == "" {
		return nil, errors.New("copies need a rendezvous that all nodes reach: use --rdzv-backend=c10d or dlrover-master")
	}
	if err := c.cfg.TLS.Serves(); err != nil {
		return nil, fmt.Errorf("copies of other nodes: %w", err)
	}
	host := c.cfg.Addr
	if c.cfg.Token != "" && net.ParseIP(host) == nil {
		host = "" // a name may be a loopback address here, and another one elsewhere
	}
	ln, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		return nil, fmt.Errorf("listen for copies of other nodes: %w", err)
	}
	p := &peers{cfg: c.cfg, life: c.life, log: c.log, count: c.count, segs: c.segs, nodes: nodes,
		port: ln.Addr().(*net.TCPAddr).Port, wake: make(chan struct{}, 1),
		pending: map[origin]pendingCopy{}, copied: map[origin]pendingCopy{}, unreachable: map[int]backoff{},
		cancelExchange: func() {},
		client:         &replica.Client{Token: c.cfg.Token, TLS: c.cfg.TLS}}
	if c.cfg.Accepted != nil {
		p.client.Tokens = plainhttp.NewTokens(c.cfg.Accepted)
	}
	p.server = replica.NewServer(c.cfg.Token, replicaStore{c.segs}, c.log)
	p.server.Accepted, p.server.TLS = c.cfg.Accepted, c.cfg.TLS
	p.ctx, p.cancel = context.WithCancel(c.life.ctx)
	p.wg.Go(func() { _ = p.server.Serve(ln) }) // ends with Close
	p.wg.Go(p.push)
	return p, nil
}

// knows reports whether the nodes of an epoch are known.
func (p *peers) knows(w World) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.key == w.Key()
}

func (p *peers) close() {
	p.cancel()
	p.server.Close()
	p.wg.Wait()
}

// exchange asks, in the background, for the other nodes of the epoch and their holdings.
func (p *peers) exchange(w World) {
	p.mu.Lock()
	p.world, p.key, p.known, p.partners = w, "", nil, nil // they belong to another epoch
	clear(p.unreachable)
	clear(p.copied)
	for _, a := range p.pending {
		clear(a.done)
	}
	p.cancelExchange()
	ctx, cancel := context.WithCancel(p.ctx)
	p.cancelExchange = cancel
	p.mu.Unlock()
	if w.GroupWorldSize < 2 || p.ctx.Err() != nil {
		return
	}
	p.wg.Go(func() {
		all, err := p.ask(ctx, w, peersPatience)
		if err != nil {
			if ctx.Err() == nil {
				p.log.Warn("cannot learn the addresses of the other nodes: no copies in this epoch", "err", err)
			}
			return
		}
		p.setNodes(w, all)
	})
}

// ask sends the coordinator the address and the holdings of this node, and returns those of all nodes.
func (p *peers) ask(ctx context.Context, w World, patience time.Duration) ([]coordinator.Peer, error) {
	self := coordinator.Peer{Node: w.GroupRank, Addr: net.JoinHostPort(p.cfg.Addr, strconv.Itoa(p.port)),
		Switch: p.cfg.Switch, Copies: p.segs.holds()}
	return p.cfg.Remote.Peers(ctx, w.Key(), self, w.GroupWorldSize, patience)
}

// setNodes records the nodes that the coordinator knows. Nodes that it has forgotten, because it has lost its memory,
// keep their addresses.
func (p *peers) setNodes(w World, all []coordinator.Peer) {
	p.mu.Lock()
	if p.world != w {
		p.mu.Unlock()
		return // the answer came late: there is another epoch
	}
	first := p.key != w.Key()
	if !first {
		all = mergeNodes(p.known, all)
	}
	as := make([]replica.Peer, len(all))
	for i, a := range all {
		as[i] = replica.Peer{Node: a.Node, Addr: a.Addr, Switch: a.Switch}
	}
	p.key, p.known, p.partners = w.Key(), all, replica.Partners(w.GroupRank, as, p.nodes-1)
	p.mu.Unlock()
	p.life.notify()
	if first { // the partners may be others
		p.segs.each(func(name string, _ *segment, h shm.Header, m shm.Meta) {
			if ours(name) {
				p.enqueue(h.Saved, m)
			}
		})
	}
	p.wakePush()
}

// mergeNodes returns the nodes of known and news, in order, as the latter has them.
func mergeNodes(known, news []coordinator.Peer) []coordinator.Peer {
	byNode := map[int]coordinator.Peer{}
	for _, peer := range slices.Concat(known, news) {
		byNode[peer.Node] = peer
	}
	return stable.Sorted(maps.Values(byNode), func(a, b coordinator.Peer) int { return a.Node - b.Node })
}

func (p *peers) wakePush() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// renew asks the coordinator where the nodes of the epoch are now, and returns the address of one; "" if it is not
// known.
func (p *peers) renew(ctx context.Context, node int) string {
	p.mu.Lock()
	w := p.world
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, 2*renewPatience)
	defer cancel()
	if all, err := p.ask(ctx, w, renewPatience); err == nil {
		p.setNodes(w, all)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, peer := range p.known {
		if peer.Node == node && p.key == w.Key() {
			return peer.Addr
		}
	}
	return ""
}
