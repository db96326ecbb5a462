package run

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
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

// masterService is the rendezvous at an address of either our daemon or DLRover's master, in Python. The first join
// decides: it tries our daemon first, and with that costs nothing more.
type masterService struct {
	*api.Client
	find   func(context.Context) (*upstream.Service, error)
	check  func(context.Context) (upstream.Check, error) // of this node before it trains; nil: none
	chosen func()                                        // is called when the master is DLRover's
	python atomic.Pointer[upstream.Service]              // nil: the master is ours, or has not answered yet
	ours   atomic.Bool
	bare   bool   // this node has no job token, and its master is on a network
	where  string // host:port
	log    *slog.Logger
}

func newMasterService(c *api.Client, s *settings, where string, log *slog.Logger) *masterService {
	m := &masterService{Client: c, chosen: func() {}, where: where, log: log,
		bare: s.auth.token == "" && !s.auth.insecure && !token.Loopback(s.rdzv.host)}
	m.find = func(ctx context.Context) (*upstream.Service, error) {
		return m.findPython(ctx, s, where, log)
	}
	return m
}

// examined is the check of this node under DLRover's master.
func (m *masterService) examined(ctx context.Context) (upstream.Check, error) {
	if m.check == nil {
		return upstream.Check{}, nil
	}
	k, err := m.check(ctx)
	if err != nil {
		err = &usageError{err}
	}
	return k, err
}

// findPython probes whether DLRover's master is at an address, and which protocol it uses.
func (m *masterService) findPython(
	ctx context.Context, s *settings, where string, log *slog.Logger,
) (*upstream.Service, error) {
	from, err := pythonCaller(os.LookupEnv)
	if err != nil {
		return nil, &usageError{err}
	}
	c, err := pyproto.Find(ctx, pyproto.ClientConfig{
		Addr: where, Caller: from, HTTP: os.Getenv("DLROVER_MASTER_SERVICE_TYPE") == "http",
	})
	if err != nil {
		return nil, err
	}
	check, err := m.examined(ctx)
	if err != nil {
		c.Close()
		return nil, err
	}
	rank := max(s.node.Rank, 0) // as DLRover's agent
	log.Info("the master is DLRover's own", "addr", where, "messages", string(c.Dialect()), "node_rank", rank)
	return upstream.New(upstream.Config{
		Client: c, Rank: rank, Check: check, Port: workerPort, Follows: verdict.Follows, Log: log,
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
func (m *masterService) svc() api.Service {
	if p := m.python.Load(); p != nil {
		return p
	}
	return m.Client
}

// Join implements api.Service.
func (m *masterService) Join(ctx context.Context, run string, ev rendezvous.Join) error {
	err := m.svc().Join(ctx, run, ev)
	if err == nil || m.ours.Load() || m.python.Load() != nil || !strange(err) {
		return m.judged(err)
	}
	p, none := m.find(ctx)
	if none != nil {
		return m.neither(err, none)
	}
	m.python.Store(p)
	m.chosen()
	return p.Join(ctx, run, ev)
}

// judged is the answer of our daemon, or a later one of DLRover's master, to a join.
func (m *masterService) judged(err error) error {
	switch {
	case m.bare && errors.Is(err, api.ErrUnauthorized):
		return &tokenError{m.where}
	case err == nil && m.python.Load() == nil && m.ours.CompareAndSwap(false, true) && m.bare:
		m.log.Warn("the rendezvous daemon asks for no job token (it was started with --insecure): whoever reaches it can "+
			"end this job; give it and every node the same "+tokenSources, "daemon", m.where)
	}
	return err
}

// tokenSources lists the sources of a job token.
const tokenSources = "DLROVER_TOKEN (openssl rand -hex 16), DLROVER_TOKEN_FILE or --token-file"

// tokenError is the error of a node without a job token if the daemon needs one.
type tokenError struct{ where string }

func (e *tokenError) Error() string {
	return fmt.Sprintf("the rendezvous daemon at %s needs a job token, and this node has none: give it the daemon's %s",
		e.where, tokenSources)
}

func (e *tokenError) Unwrap() error { return api.ErrUnauthorized }

// neither is the error if the master is neither a daemon of ours nor a DLRover master that is ready.
func (m *masterService) neither(ours, python error) error {
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
func (m *masterService) Watch(ctx context.Context, run, id string, after api.Cursor) (api.News, error) {
	return m.svc().Watch(ctx, run, id, after)
}

// Report implements api.Service.
func (m *masterService) Report(ctx context.Context, run string, ev rendezvous.Event) error {
	return m.svc().Report(ctx, run, ev)
}

// Leave implements api.Service.
func (m *masterService) Leave(ctx context.Context, run string, ev rendezvous.Leave) (job.Evidence, error) {
	return m.svc().Leave(ctx, run, ev)
}

// World implements api.Service.
func (m *masterService) World(ctx context.Context, run string) ([]job.Member, error) {
	return m.svc().World(ctx, run)
}

// close closes the client of a Python master.
func (m *masterService) close() {
	if m == nil {
		return
	}
	if p := m.python.Load(); p != nil {
		p.Close()
	}
}

// python is DLRover's own master, nil if the rendezvous is ours.
func (e *endpoint) python() *upstream.Service {
	if e.master == nil {
		return nil
	}
	return e.master.python.Load()
}

// workerPort is a free port for the first worker, which will serve the store. It is one of HOST_PORTS if set, else
// one of the ports that DLRover's agents take.
func workerPort() (int, error) {
	ports := os.Getenv("HOST_PORTS")
	if ports == "" {
		return anyWorkerPort()
	}
	for text := range strings.SplitSeq(ports, ",") {
		if n, err := strconv.Atoi(strings.TrimSpace(text)); err == nil && free(n) {
			return n, nil
		}
	}
	return 0, fmt.Errorf("HOST_PORTS=%s: none of these ports is free", ports)
}

func anyWorkerPort() (int, error) {
	const first, last, tries = 20000, 30000, 100
	for range tries {
		if n := first + rand.IntN(last-first); free(n) {
			return n, nil
		}
	}
	return 0, fmt.Errorf("no free port from %d to %d", first, last)
}

// free reports whether a worker can bind the port, as it will, on all addresses.
func free(port int) bool {
	l, err := net.Listen("tcp", ":"+strconv.Itoa(port))
	if err != nil {
		return false
	}
	_ = l.Close()
	return true
}
