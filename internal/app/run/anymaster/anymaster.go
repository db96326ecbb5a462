// Package anymaster joins a rendezvous that either our daemon or DLRover's own master serves.
package anymaster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync/atomic"

	"dlrover-run/internal/app/token"
	"dlrover-run/internal/job"
	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/pyproto"
	"dlrover-run/rendezvous/pyproto/upstream"
)

// Service is the rendezvous at an address of either our daemon or DLRover's master, in Python. The first join
// decides: it tries our daemon first, and with that costs nothing more.
type Service struct {
	*api.Client
	find func(context.Context) (*upstream.Service, error)
	// Check is that of this node before it trains; nil: none.
	Check func(context.Context) (upstream.Check, error)
	// Chosen is called when the master is DLRover's.
	Chosen func()
	python atomic.Pointer[upstream.Service] // nil: the master is ours, or has not answered yet
	ours   atomic.Bool
	bare   bool   // this node has no job token, and its master is on a network
	only   bool   // DLRover's master is not tried
	where  string // host:port
	log    *slog.Logger
}

// Config describes this node and its master.
type Config struct {
	Client *api.Client
	Where  string // host:port
	Bare   bool   // this node has no job token, and its master is on a network
	Rank   int
	// OursOnly: DLRover's own master is not tried, because it speaks no TLS.
	OursOnly bool
	Log      *slog.Logger
}

// New returns the service of a master that has not answered yet.
func New(cfg Config) *Service {
	m := &Service{Client: cfg.Client, Chosen: func() {}, where: cfg.Where, log: cfg.Log, bare: cfg.Bare,
		only: cfg.OursOnly}
	m.find = func(ctx context.Context) (*upstream.Service, error) { return m.findPython(ctx, cfg) }
	return m
}

// examined is the check of this node under DLRover's master.
func (m *Service) examined(ctx context.Context) (upstream.Check, error) {
	if m.Check == nil {
		return upstream.Check{}, nil
	}
	k, err := m.Check(ctx)
	if err != nil {
		err = &usageError{err}
	}
	return k, err
}

// findPython probes whether DLRover's master is at an address, and which protocol it uses.
func (m *Service) findPython(ctx context.Context, cfg Config) (*upstream.Service, error) {
	from, err := pythonCaller(os.LookupEnv)
	if err != nil {
		return nil, &usageError{err}
	}
	c, err := pyproto.Find(ctx, pyproto.ClientConfig{
		Addr: cfg.Where, Caller: from, HTTP: os.Getenv("DLROVER_MASTER_SERVICE_TYPE") == "http",
	})
	if err != nil {
		return nil, err
	}
	check, err := m.examined(ctx)
	if err != nil {
		c.Close()
		return nil, err
	}
	rank := max(cfg.Rank, 0) // as DLRover's agent
	cfg.Log.Info("the master is DLRover's own", "addr", cfg.Where, "messages", string(c.Dialect()), "node_rank", rank)
	return upstream.New(upstream.Config{
		Client: c, Rank: rank, Check: check, Port: WorkerPort, Follows: verdict.Follows, Log: cfg.Log,
	}), nil
}

// usageError is a variable of the environment, or an option, that cannot be used.
type usageError struct{ error }

func (e *usageError) Unwrap() []error { return []error{e.error, api.ErrBadRequest} }

// pythonCaller identifies this node to DLRover's master, by the variables of DLRover's pods.
func pythonCaller(lookup func(string) (string, bool)) (c pyproto.Caller, err error) {
	get := func(name string) string {
		v, _ := lookup(name)
		return v
	}
	c = pyproto.Caller{NodeType: cmp.Or(get("NODE_TYPE"), "worker"), JobUID: get("JOB_UID")}
	if text := get("NODE_ID"); text != "" {
		if c.NodeID, err = strconv.Atoi(text); err != nil || c.NodeID < 0 {
			return c, fmt.Errorf("NODE_ID=%q: need a number from 0", text)
		}
	}
	return c, nil
}

// svc is the service that has answered.
func (m *Service) svc() api.Service {
	if p := m.python.Load(); p != nil {
		return p
	}
	return m.Client
}

// Join implements api.Service.
func (m *Service) Join(ctx context.Context, run string, ev rendezvous.Join) error {
	err := m.svc().Join(ctx, run, ev)
	if err == nil || m.only || m.ours.Load() || m.python.Load() != nil || !strange(err) {
		return m.judged(err)
	}
	p, none := m.find(ctx)
	if none != nil {
		return m.neither(err, none)
	}
	m.python.Store(p)
	m.Chosen()
	return p.Join(ctx, run, ev)
}

// judged is the answer of our daemon, or a later one of DLRover's master, to a join.
func (m *Service) judged(err error) error {
	switch {
	case m.bare && errors.Is(err, api.ErrUnauthorized):
		return &tokenError{m.where}
	case err == nil && m.python.Load() == nil && m.ours.CompareAndSwap(false, true) && m.bare:
		m.log.Warn("the rendezvous daemon asks for no job token (it was started with --insecure): whoever reaches it can "+
			"end this job; give it and every node the same "+token.Sources, "daemon", m.where)
	}
	return err
}

// tokenError is the error of a node without a job token if the daemon needs one.
type tokenError struct{ where string }

func (e *tokenError) Error() string {
	return fmt.Sprintf("the rendezvous daemon at %s needs a job token, and this node has none: give it the daemon's %s",
		e.where, token.Sources)
}

func (e *tokenError) Unwrap() error { return api.ErrUnauthorized }

// neither is the error if the master is neither a daemon of ours nor a DLRover master that is ready.
func (m *Service) neither(ours, python error) error {
	switch {
	case errors.Is(python, pyproto.ErrJobUID):
		return fmt.Errorf("%w: DLRover's master: %w; JOB_UID must be that of its job", api.ErrUnauthorized, python)
	case !errors.Is(python, pyproto.ErrNoMaster):
	case errors.Is(ours, api.ErrBadRequest):
		return fmt.Errorf("%w; nor is it DLRover's master (%w)", ours, python)
	case strings.Contains(ours.Error(), malformed): // a retry does not help
		return fmt.Errorf("%w: what answers is neither a rendezvous daemon nor DLRover's master; is the address right? (%w)",
			api.ErrBadRequest, python)
	}
	return python
}

// malformed is in net/http's error for an answer that is not HTTP/1.
const malformed = "malformed HTTP"

// strange reports whether a server answers, but not as our daemon does.
func strange(err error) bool {
	if errors.Is(err, api.ErrBadRequest) {
		return true
	}
	for _, text := range []string{malformed, "EOF", "connection reset", "transport connection broken"} {
		if strings.Contains(err.Error(), text) {
			return true
		}
	}
	return false
}

// Watch implements api.Service.
func (m *Service) Watch(ctx context.Context, run, id string, after api.Cursor) (api.News, error) {
	return m.svc().Watch(ctx, run, id, after)
}

// Report implements api.Service.
func (m *Service) Report(ctx context.Context, run string, ev rendezvous.Event) error {
	return m.svc().Report(ctx, run, ev)
}

// Leave implements api.Service.
func (m *Service) Leave(ctx context.Context, run string, ev rendezvous.Leave) (job.Evidence, error) {
	return m.svc().Leave(ctx, run, ev)
}

// World implements api.Service.
func (m *Service) World(ctx context.Context, run string) ([]job.Member, error) {
	return m.svc().World(ctx, run)
}

// Close closes the client of a Python master.
func (m *Service) Close() {
	if m == nil {
		return
	}
	if p := m.python.Load(); p != nil {
		p.Close()
	}
}

// Upstream is DLRover's own master; nil if the rendezvous is ours, or m is nil.
func (m *Service) Upstream() *upstream.Service {
	if m == nil {
		return nil
	}
	return m.python.Load()
}
