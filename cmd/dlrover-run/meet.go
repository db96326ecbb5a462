package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"syscall"
	"time"

	"dlrover-run/checkpointd/board"
	"dlrover-run/checkpointd/conns"
	"dlrover-run/cmd/internal/token"
	"dlrover-run/cmd/internal/topology"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/tcpstore"
)

// meeting is this node's side of the rendezvous: the service to speak to, and the
// workers' store. When this node serves the rendezvous for others, both share the
// endpoint's port.
type meeting struct {
	svc    api.Service
	where  string
	store  *tcpstore.Server
	port   int
	hub    *api.Hub    // when it is served here
	boards *board.Hub  // where checkpoint daemons meet, when other nodes are served here
	client *api.Client // when it is not
	server *http.Server
	second bool // another launcher on this host serves it
	done   chan error
	guests *guests
}

// Reset and Port make a meeting the launcher's Store.
func (m *meeting) Reset()    { m.store.Reset() }
func (m *meeting) Port() int { return m.port }

// meet binds what this node serves. Nothing is sent yet.
func meet(ctx context.Context, s *settings, h hostFacts, log *slog.Logger, observe func(string, rendezvous.Note)) (*meeting, error) {
	g := newGuests(s.insecure, s.slots)
	m := &meeting{guests: g, store: tcpstore.New(tcpstore.Config{Logger: log, Allow: g.allow, Silent: g.silent}), where: net.JoinHostPort(s.host, strconv.Itoa(s.port))}
	var err error
	if s.serves(h) {
		err = m.serve(ctx, s, log, observe)
		if errors.Is(err, syscall.EADDRINUSE) && s.mayBeServedByAnother() {
			log.Debug("the endpoint's port is taken; joining whoever serves it", "endpoint", m.where)
			m.second = true
			err = m.join(ctx, s, reachable(s), log)
		}
	} else {
		err = m.join(ctx, s, s.host, log)
	}
	if err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

// mayBeServedByAnother: a second launcher on the endpoint's host is a node like any
// other, unless the user made this one the host.
func (s *settings) mayBeServedByAnother() bool {
	return s.backend == c10d && s.isHost == nil && s.params.Max > 1
}

// reachable is where a launcher on the same host serves.
func reachable(s *settings) string {
	if s.token == "" && !s.insecure && !token.Loopback(s.host) {
		return "127.0.0.1" // a launcher without a token serves on loopback only
	}
	return s.host
}

func (m *meeting) serve(ctx context.Context, s *settings, log *slog.Logger, observe func(string, rendezvous.Note)) error {
	topo, err := topology.Load(s.topology)
	if err != nil {
		return unusableOption(err)
	}
	l, err := api.Listen(ctx, m.bindAddr(s))
	if err != nil {
		if s.backend == static && s.params.Max > 1 {
			return fmt.Errorf("serve the rendezvous at %s: %w (node rank 0 serves it; does another launcher here have --node-rank=0, too?)", m.where, err)
		}
		return fmt.Errorf("serve the rendezvous at %s: %w", m.where, err)
	}
	l = m.limit(l, s, log)
	m.port = l.Addr().(*net.TCPAddr).Port
	m.where = net.JoinHostPort(s.host, strconv.Itoa(m.port))
	if l.Addr().(*net.TCPAddr).IP.IsLoopback() && !token.Loopback(s.node.Addr) {
		s.node.Addr = "127.0.0.1" // nobody reaches the workers' store by another address
	}
	m.boards = board.NewHub()
	m.boards.Switches = topo
	m.hub = api.NewHub(api.HubConfig{Topology: topo, Observe: func(run string, n rendezvous.Note) {
		if n.Event == string(rendezvous.CauseLoss) && n.Rank >= 0 {
			m.boards.Lost(run, n.Term, n.Round, n.Rank)
		}
		observe(run, n)
	}})
	m.svc = m.hub
	if s.backend == local {
		m.background(func() error { return m.store.Serve(l) })
		return nil
	}
	m.server = api.NewServer(api.Handler(m.hub, api.ServerConfig{Token: s.token, Checkpoints: m.boards.Handler()}))
	m.background(func() error { return m.server.Serve(tcpstore.Split(l, m.store)) })
	log.Info("serving the rendezvous", "addr", l.Addr().String(), "token", s.token != "")
	return nil
}

// Descriptors that connections leave to everything else: what a launcher has open, and what it needs for a worker.
const (
	reservedFiles  = 128
	filesForWorker = 16
)

// limit keeps connections from taking the descriptors with which workers are started.
func (m *meeting) limit(l net.Listener, s *settings, log *slog.Logger) net.Listener {
	return conns.Listen(l, conns.Below(conns.OpenFiles(), reservedFiles+filesForWorker*s.slots), log)
}

// bindAddr: without a token nothing but this machine may speak to us.
func (m *meeting) bindAddr(s *settings) string {
	host := ""
	if s.backend == local || token.Loopback(s.host) || (s.token == "" && !s.insecure) {
		host = "127.0.0.1"
	}
	if s.host == "::1" {
		host = "::1"
	}
	return net.JoinHostPort(host, strconv.Itoa(s.port))
}

// join prepares to speak to a rendezvous elsewhere; the workers' store gets a port
// of its own, which the world uses while this node is rank 0.
func (m *meeting) join(ctx context.Context, s *settings, daemon string, log *slog.Logger) error {
	if token.Loopback(daemon) && !token.Loopback(s.node.Addr) && m.second {
		s.node.Addr = "127.0.0.1"
	}
	host := ""
	if token.Loopback(s.node.Addr) {
		host = s.node.Addr
	}
	if host == "localhost" {
		host = "127.0.0.1"
	}
	l, err := api.Listen(ctx, net.JoinHostPort(host, "0"))
	if err != nil {
		return fmt.Errorf("bind a port for the workers' store: %w", err)
	}
	l = m.limit(l, s, log)
	m.port = l.Addr().(*net.TCPAddr).Port
	m.background(func() error { return m.store.Serve(l) })
	m.where = net.JoinHostPort(daemon, strconv.Itoa(s.port))
	m.client = api.NewClient(m.where, s.token)
	m.svc = m.client
	return nil
}

// daemons is the rendezvous by which the checkpoint daemons of several nodes meet, ""
// for one node.
func (m *meeting) daemons(s *settings) string {
	switch {
	case s.backend == local:
		return ""
	case m.hub != nil: // served here
		return net.JoinHostPort("127.0.0.1", strconv.Itoa(m.port))
	}
	return m.where
}

func (m *meeting) background(f func() error) {
	m.done = make(chan error, 1)
	go func() { m.done <- f() }() // close waits for it
}

// linger keeps serving until every other node has heard how the job ended, or a
// signal says that it is enough.
func (m *meeting) linger(budget time.Duration, enough <-chan os.Signal) {
	if m.hub == nil {
		return
	}
	end := time.NewTimer(budget)
	defer end.Stop()
	look := time.NewTicker(5 * time.Millisecond)
	defer look.Stop()
	for !m.hub.Idle() {
		select {
		case <-look.C:
		case <-end.C:
			return
		case <-enough:
			return
		}
	}
}

func (m *meeting) close() {
	if m.hub != nil {
		m.hub.Close()
	}
	if m.boards != nil {
		m.boards.Close()
	}
	if m.server != nil {
		_ = m.server.Close()
	}
	_ = m.store.Close()
	if m.client != nil {
		m.client.Close()
	}
	if m.done != nil {
		<-m.done
	}
}
