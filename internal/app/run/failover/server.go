package failover

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// Server is the service of a launcher that serves from its start. It is an api.Service for the launcher itself. If it
// replaces a launcher that has died, members of the run may have elected another one: when that one says so, this
// launcher and all that come to it move there.
type Server struct {
	run      string
	deputies *Failover
	hub      *api.Hub // set by Of

	mu    sync.Mutex
	term  uint64
	to    string // where the elected launcher serves; "": there is none
	moved context.Context
	move  context.CancelCauseFunc
}

// NewServer makes the service of a launcher; deputies has no listener.
func NewServer(run string, deputies *Failover) *Server {
	s := &Server{run: run, deputies: deputies, term: first}
	s.moved, s.move = context.WithCancelCause(context.Background())
	return s
}

// first is the term of a launcher that was not elected.
const first = 1

// Of completes the service, before its first use, with its hub and the launcher that serves it.
func (s *Server) Of(hub *api.Hub, id, host string, port int) {
	s.hub, s.deputies.own = hub, net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	api.ServedBy(hub, rendezvous.Server{ID: id, Host: host, Port: port, Term: first, Alone: s.deputies.cfg.Alone})
}

// Close releases what waits for a move.
func (s *Server) Close() { s.move(nil) }

// Moved is where the launcher that was elected serves; "": this one serves.
func (s *Server) Moved() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.to
}

// Standby redirects requests after a move.
func (s *Server) Standby() error {
	if to := s.Moved(); to != "" {
		return &api.MovedError{To: to}
	}
	return nil
}

// Vote hears of the election. A launcher that serves does not stand in one.
func (s *Server) Vote() http.Handler {
	return api.Ask(func(run string, m message) (any, error) {
		if run != s.run || m.Addr == "" {
			return struct{}{}, nil
		}
		if _, _, err := net.SplitHostPort(m.Addr); err != nil {
			return nil, fmt.Errorf("%w: the address of an elected launcher: %w", api.ErrBadRequest, err)
		}
		s.giveWay(m)
		return struct{}{}, nil
	})
}

func (s *Server) giveWay(m message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m.Term <= s.term {
		return
	}
	s.term, s.to = m.Term, m.Addr
	s.deputies.follow(m.Addr)
	if s.moved.Err() == nil {
		s.deputies.cfg.Log.Warn("the members of this run have elected another launcher to serve the rendezvous; joining it",
			"addr", m.Addr, "term", m.Term)
		s.move(&api.MovedError{To: m.Addr})
		s.hub.Close()
	}
}

// ask has the present server do f. A request that a move interrupts ends with a MovedError.
func (s *Server) ask(ctx context.Context, f func(context.Context, api.Service) error) error {
	if s.Moved() != "" {
		return f(ctx, s.deputies.cfg.Client)
	}
	until, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.moved, func() { cancel(context.Cause(s.moved)) })()
	err := f(until, s.hub)
	if err != nil && s.Moved() != "" {
		return s.Standby()
	}
	return err
}

// Join implements api.Service.
func (s *Server) Join(ctx context.Context, run string, ev rendezvous.Join) error {
	return s.ask(ctx, func(ctx context.Context, svc api.Service) error { return svc.Join(ctx, run, ev) })
}

// Watch implements api.Service.
func (s *Server) Watch(ctx context.Context, run, id string, after api.Cursor) (n api.News, err error) {
	err = s.ask(ctx, func(ctx context.Context, svc api.Service) error {
		n, err = svc.Watch(ctx, run, id, after)
		return err
	})
	return n, err
}

// Report implements api.Service.
func (s *Server) Report(ctx context.Context, run string, ev rendezvous.Event) error {
	return s.ask(ctx, func(ctx context.Context, svc api.Service) error { return svc.Report(ctx, run, ev) })
}

// Leave implements api.Service.
func (s *Server) Leave(ctx context.Context, run string, ev rendezvous.Leave) (e job.Evidence, err error) {
	err = s.ask(ctx, func(ctx context.Context, svc api.Service) error {
		e, err = svc.Leave(ctx, run, ev)
		return err
	})
	return e, err
}

// World implements api.Service.
func (s *Server) World(ctx context.Context, run string) (ms []job.Member, err error) {
	err = s.ask(ctx, func(ctx context.Context, svc api.Service) error {
		ms, err = svc.World(ctx, run)
		return err
	})
	return ms, err
}
