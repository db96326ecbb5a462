package run

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dlrover-run/internal/app/run/anymaster"
	"dlrover-run/internal/app/run/elector"
	"dlrover-run/internal/app/run/failover"
	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/run/preflight"
	"dlrover-run/internal/app/run/storeacl"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/app/token"
	"dlrover-run/internal/conns"
	"dlrover-run/internal/secure"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/pyproto/upstream"
	"dlrover-run/rendezvous/tcpstore"
)

// endpoint is this node's side of the rendezvous: the client or server of the service, and the workers' store. When
// this node serves the rendezvous for others, both share the endpoint's port.
type endpoint struct {
	svc      api.Service
	where    string
	store    *tcpstore.Server
	port     int
	served   *service.Service   // when it is served here
	client   *api.Client        // when it is not
	master   *anymaster.Service // when the daemon dlrover-master serves it
	life     *api.Lifeline      // then: its end shows the daemon at once that this launcher was killed
	second   bool               // another launcher on this host serves it
	done     chan error
	acl      *storeacl.ACL
	own      *rendezvous.Node
	local    bool                   // the rendezvous stays inside this process
	elector  *elector.Elector       // nil: nobody is elected
	failover *failover.Failover     // when launchers of the job can serve it one after the other
	first    *failover.Server       // then: this one does from its start
	tls      *secure.Layer          // of the rendezvous; nil: none
	serving  atomic.Pointer[func()] // called once this launcher is elected
}

// dataShards is the prefix of the keys with which workers distribute shards of data, after the slash that PyTorch
// puts before every key. Restarted workers continue with the remaining shards.
const dataShards = "/dlrover_shards/"

// Reset and Port make an endpoint the launcher's Store.
func (e *endpoint) Reset(again bool) {
	if again {
		e.store.Reset()
	} else {
		e.store.ResetAll()
	}
}

func (e *endpoint) Port() int { return e.port }

// order sends an order to a run of the rendezvous, on this node or elsewhere.
func (e *endpoint) order(ctx context.Context, run string, o rendezvous.Order) error {
	if served := e.Served(); served != nil {
		return served.Hub.Order(run, o)
	}
	if p := e.master.Upstream(); p != nil {
		return p.Order(ctx, o)
	}
	return e.Client().Order(ctx, run, o)
}

// observer is called with every note of the runs that are served here.
type observer = func(run string, n rendezvous.Note)

// openEndpoint binds the servers of this node. Nothing is sent yet. Lines of runsLog name their run themselves.
func openEndpoint(
	ctx context.Context, s *settings, h hostFacts, log, runsLog *slog.Logger, observe observer,
) (*endpoint, error) {
	g := storeacl.New(s.auth.insecure, s.size.slots)
	store := tcpstore.New(tcpstore.Config{Logger: log, Allow: g.Allow, Silent: g.Silent, Keep: dataShards})
	e := &endpoint{acl: g, store: store, own: &s.node, local: s.rdzv.backend == local,
		where: net.JoinHostPort(s.rdzv.host, strconv.Itoa(s.rdzv.port))}
	var err error
	if e.tls, err = s.auth.layer(s.rdzv.backend, log); err != nil {
		return nil, feature.Unusable(err)
	}
	if s.rdzv.serves(s.node.Rank, h) {
		err = e.serve(ctx, s, log, runsLog, observe)
		if errors.Is(err, syscall.EADDRINUSE) && s.mayBeServedByAnother() {
			log.Debug("the endpoint's port is taken; joining whoever serves it", "endpoint", e.where)
			e.second = true
			err = e.join(ctx, s, reachable(s), log, runsLog, observe)
		}
	} else {
		err = e.join(ctx, s, s.rdzv.host, log, runsLog, observe)
	}
	if err != nil {
		e.close()
		return nil, err
	}
	if s.rdzv.addrWhy != "" && !token.Loopback(s.node.Addr) {
		log.Info(s.rdzv.addrWhy)
		s.rdzv.addrWhy = "" // this may be tried again
	}
	return e, nil
}

// mayBeServedByAnother reports whether a second launcher on the endpoint's host is an ordinary node. It is, unless
// the user made this one the host.
func (s *settings) mayBeServedByAnother() bool {
	return s.rdzv.backend == c10d && s.rdzv.isHost == nil && s.nodes() > 1
}

// reachable is the address of a launcher on the same host that serves.
func reachable(s *settings) string {
	if !s.auth.networked() && !token.Loopback(s.rdzv.host) {
		return "127.0.0.1"
	}
	return s.rdzv.host
}

// takenByStranger is the error if the endpoint's port was taken on this host all the time. err ended the node's wait
// for the rendezvous.
func (e *endpoint) takenByStranger(err error, s *settings) error {
	return fmt.Errorf("port %d of this host is taken%s, and no rendezvous is served at %s after %s; "+
		"end what has the port, or give all nodes another one (%w)",
		s.rdzv.port, preflight.Holder(os.DirFS("/"), reachable(s), s.rdzv.port), e.where, s.rdzv.connect,
		cmp.Or(errors.Unwrap(err),
			err))
}

func whyNotServed(err error) string {
	if errors.Is(err, syscall.EADDRINUSE) {
		return "; end what listens there, or give all nodes another port"
	}
	return ""
}

func (e *endpoint) serve(ctx context.Context, s *settings, log, runsLog *slog.Logger, observe observer) error {
	cfg := e.service(s, log, runsLog, observe)
	s.node.Serve = 0 // of an earlier try to join
	if s.succeeds() {
		e.client = s.auth.client(e.where).Over(e.tls)
		e.failover = e.newFailover(s, nil, log, runsLog, observe)
		e.first = failover.NewServer(s.runID, e.failover)
		cfg.Standby, cfg.Vote = e.first.Standby, e.first.Vote()
	}
	served, err := service.New(cfg)
	if err != nil {
		return feature.Unusable(err)
	}
	l, err := api.Listen(ctx, e.bindAddr(s))
	if err != nil {
		served.Close(0)
		e.failover, e.first, e.client = nil, nil, nil
		if s.rdzv.backend == static && s.params.Max > 1 {
			return fmt.Errorf("serve the rendezvous at %s: %w "+
				"(node rank 0 serves it; does another launcher here have --node-rank=0, too?)", e.where, err)
		}
		return fmt.Errorf("serve the rendezvous at %s: %w%s", e.where, err, whyNotServed(err))
	}
	l = e.limit(l, s, log)
	e.port = l.Addr().(*net.TCPAddr).Port
	e.where = net.JoinHostPort(s.rdzv.host, strconv.Itoa(e.port))
	if l.Addr().(*net.TCPAddr).IP.IsLoopback() && !token.Loopback(s.node.Addr) {
		s.node.Addr = "127.0.0.1" // no node reaches the workers' store by another address
	}
	e.served, e.svc = served, served.Hub
	if e.first != nil {
		e.first.Of(served.Hub, s.node.ID, s.node.Addr, e.port)
		e.svc = e.first
	}
	if s.rdzv.backend == local && s.auth.token == "" && s.rdzv.page == nil {
		e.background(func() error { return e.store.Serve(l) })
		return nil
	}
	serve := e.served.Serve
	if s.rdzv.backend == local {
		serve = e.served.ServeRarely
	}
	e.background(func() error { return serve(tcpstore.Split(l, e.store)) })
	log.Info("serving the rendezvous", "addr", l.Addr().String(), "token", s.auth.token != "")
	return nil
}

// service describes a service in this process.
func (e *endpoint) service(s *settings, log, runsLog *slog.Logger, observe observer) service.Config {
	return service.Config{
		Token: s.auth.token, Accepted: s.auth.accepted(), Insecure: s.auth.insecure, TLS: e.tls, Name: s.rdzv.host,
		Self: s.node.ID, TopologyFile: s.rdzv.topology, Observe: observe, Log: runsLog, Peers: s.newPeers(log),
		Page: s.rdzv.visitors(),
	}
}

// succeeds reports whether launchers of this job can serve the rendezvous one after the other. Those of one replica
// group cannot elect for the others.
func (s *settings) succeeds() bool {
	return s.replicas.count == 0 && (s.rdzv.backend == c10d || s.rdzv.backend == static) && s.params.Max > 1
}

// newFailover makes this launcher's part in the election; with a listener it can be elected.
func (e *endpoint) newFailover(
	s *settings, l net.Listener, log, runsLog *slog.Logger, observe observer,
) *failover.Failover {
	return failover.New(failover.Config{
		Run: s.runID, ID: s.node.ID, Client: e.client, Listener: l, Log: log,
		Endpoint: net.JoinHostPort(reachable(s), strconv.Itoa(s.rdzv.port)), Alone: s.rdzv.alone,
		Won: func() {
			if serving := e.serving.Load(); serving != nil {
				(*serving)()
			}
		},
		Serve: func(standby func() error, vote http.Handler) (*service.Service, error) {
			cfg := e.service(s, log, runsLog, observe)
			cfg.Standby, cfg.Vote = standby, vote
			svc, err := service.New(cfg)
			if err == nil || cfg.TopologyFile == "" {
				return svc, err
			}
			// Only the node that serves from the start needs the file, and votes for this one must have an answer.
			log.Warn("if this launcher is elected to serve the rendezvous, it does so without the topology file", "err", err)
			cfg.TopologyFile, cfg.Peers = "", s.newPeers(log)
			return service.New(cfg)
		},
	})
}

// newPeers returns nil if no peer is admitted by the name of its host.
func (s *settings) newPeers(log *slog.Logger) *api.Peers {
	if s.rdzv.backend == local || len(s.auth.peers.Names) == 0 {
		return nil
	}
	return api.NewPeers(api.PeersConfig{Names: s.auth.peers.Names, Text: s.auth.peers.String(), Log: log})
}

// Descriptors that connections leave free: for the launcher's own files, and for each worker.
const (
	reservedFiles  = 128
	filesForWorker = 16
)

// limit reserves the descriptors that the start of workers needs.
func (e *endpoint) limit(l net.Listener, s *settings, log *slog.Logger) net.Listener {
	return conns.Listen(l, conns.Below(conns.OpenFiles(), reservedFiles+filesForWorker*s.size.slots+len(s.node.Ports)),
		log)
}

// bindAddr is the address to listen on. Without a token, and without known hosts, it is on loopback.
func (e *endpoint) bindAddr(s *settings) string {
	host := ""
	if s.rdzv.backend == local || token.Loopback(s.rdzv.host) || !s.auth.networked() {
		host = "127.0.0.1"
	}
	if s.rdzv.host == "::1" {
		host = "::1"
	}
	return net.JoinHostPort(host, strconv.Itoa(s.rdzv.port))
}

// join prepares the connection to a rendezvous elsewhere. The workers' store gets its own port, which the world uses
// while this node is rank 0.
func (e *endpoint) join(
	ctx context.Context, s *settings, daemon string, log, runsLog *slog.Logger, observe observer,
) error {
	if token.Loopback(daemon) && !token.Loopback(s.node.Addr) && e.second {
		s.node.Addr = "127.0.0.1"
	}
	host := ""
	// else other nodes may join
	if token.Loopback(s.node.Addr) && !(s.rdzv.backend == master && (s.auth.token != "" || s.auth.insecure)) {
		host = s.node.Addr
	}
	if host == "localhost" {
		host = "127.0.0.1"
	}
	l, err := api.Listen(ctx, net.JoinHostPort(host, "0"))
	if err != nil {
		return fmt.Errorf("bind a port for the workers' store: %w", err)
	}
	l = e.limit(l, s, log)
	e.port = l.Addr().(*net.TCPAddr).Port
	if e.where = s.rdzv.where(); s.rdzv.backend != master {
		e.where = net.JoinHostPort(daemon, strconv.Itoa(s.rdzv.port))
	}
	if e.client = s.auth.client(e.where); s.rdzv.backend == etcd {
		e.where = "the node elected in etcd " + s.rdzv.where()
		e.client = s.auth.renewing(api.NewFollower(s.rdzv.leader, s.auth.token))
	}
	e.client.Over(e.tls)
	e.svc = e.client
	if s.succeeds() {
		e.failover = e.newFailover(s, tcpstore.Split(l, e.store), log, runsLog, observe)
		s.node.Serve = e.port
	} else {
		e.background(func() error { return e.store.Serve(l) })
	}
	if s.rdzv.backend == master {
		e.master = anymaster.New(anymaster.Config{
			Client: e.client, Where: e.where, Rank: s.node.Rank, OursOnly: e.tls != nil, Log: log,
			Bare: s.auth.token == "" && !s.auth.insecure && !token.Loopback(s.rdzv.host),
		})
		e.svc = e.master
	}
	if e.life, err = api.ListenForLife(ctx, host); err != nil {
		log.Debug("the end of this launcher is noticed later", "err", err)
		return nil
	}
	s.node.Life = e.life.Life()
	return nil
}

// Served implements feature.Rendezvous.
func (e *endpoint) Served() *service.Service {
	if e.first != nil && e.first.Moved() != "" {
		return nil
	}
	return e.served
}

// Client implements feature.Rendezvous.
func (e *endpoint) Client() *api.Client {
	if e.served != nil && e.Served() != nil {
		return nil
	}
	return e.client
}

// Upstream implements feature.Rendezvous.
func (e *endpoint) Upstream() *upstream.Service { return e.master.Upstream() }

// Store implements feature.Rendezvous.
func (e *endpoint) Store() *tcpstore.Server { return e.store }

// Daemons implements feature.Rendezvous.
func (e *endpoint) Daemons() string {
	switch {
	case e.local || e.master.Upstream() != nil: // DLRover's master does not support our checkpoint daemons
		return ""
	case e.elector != nil:
		return e.elector.Leader()
	case e.Served() != nil:
		return net.JoinHostPort("127.0.0.1", strconv.Itoa(e.port))
	case e.failover != nil:
		return e.failover.Servers()
	}
	return e.where
}

// FollowDaemons implements feature.Rendezvous.
func (e *endpoint) FollowDaemons(move func(addr string)) {
	switch {
	case e.elector != nil:
		e.elector.Follow(move)
	case e.failover != nil:
		e.failover.Follow(move)
	}
}

// WhenServing implements feature.Rendezvous.
func (e *endpoint) WhenServing(serving func(addr string)) {
	host := "127.0.0.1"
	if token.Loopback(e.own.Addr) && e.own.Addr != "localhost" {
		host = e.own.Addr
	}
	serve := sync.OnceFunc(func() { serving(net.JoinHostPort(host, strconv.Itoa(e.port))) })
	e.serving.Store(&serve)
	if e.Served() != nil || e.failover.Serving() != nil {
		serve()
	}
}

// LendStore implements feature.Rendezvous: there are no workers during a check.
func (e *endpoint) LendStore(others []string) (addr string, end func()) {
	addrs := slices.Concat(others, e.own.Addrs, []string{e.own.Addr})
	return net.JoinHostPort(e.own.Addr, strconv.Itoa(e.port)), e.acl.Lend(addrs)
}

func (e *endpoint) background(f func() error) {
	e.done = make(chan error, 1)
	go func() { e.done <- f() }() // close waits for it
}

// linger keeps serving until every other node has received the end of the job, or a signal stops it.
func (e *endpoint) linger(budget time.Duration, enough <-chan os.Signal) {
	served := cmp.Or(e.failover.Serving(), e.Served())
	if served == nil {
		return
	}
	end := time.NewTimer(budget)
	defer end.Stop()
	look := time.NewTicker(5 * time.Millisecond)
	defer look.Stop()
	for !served.Hub.Idle() {
		select {
		case <-look.C:
		case <-end.C:
			return
		case <-enough:
			return
		}
	}
}

// How long a launcher that a signal ends serves on, so that its job can do without it.
const (
	handOverBudget = 5 * time.Second        // for the world without this node
	handOverTime   = 250 * time.Millisecond // for the members to hear who serves next
)

// handOver serves a run that goes on without this node until its world has formed anew: its members elect another
// launcher then, and no worker is stopped again.
func (e *endpoint) handOver(run string, enough <-chan os.Signal) {
	served := cmp.Or(e.failover.Serving(), e.Served())
	if e.failover == nil || served == nil {
		return
	}
	var runs time.Time
	for end := time.Now().Add(handOverBudget); time.Now().Before(end); {
		s, err := served.Hub.Run(run)
		switch {
		case err != nil, s.Members+s.Waiting == 0, !runs.IsZero() && time.Since(runs) > handOverTime:
			return
		case s.Phase != "running":
			runs = time.Time{}
		case runs.IsZero():
			runs = time.Now()
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-enough:
			return
		}
	}
}

func (e *endpoint) close() {
	if e.first != nil {
		e.first.Close()
	}
	e.failover.Close()
	if e.served != nil {
		e.served.Streams.Finish("the launcher that serves the run has ended")
		e.served.Close(0)
	}
	_ = e.store.Close()
	if e.life != nil {
		_ = e.life.Close()
	}
	e.master.Close()
	if e.client != nil {
		e.client.Close()
	}
	if e.done != nil {
		<-e.done
	}
}
