// Package upstream is a rendezvous whose master is DLRover's, in Python: an api.Service in front of the master's
// procedures, for one launcher in one run.
//
// The master forms worlds; it knows neither epochs nor directives. Service sends it the requests of its agents, and
// makes directives of the answers. It has the master's limits. There are no spares that take over at once, every node
// counts its own restarts, and no node hears of the failures of other nodes.
//
// Goroutines: from the first Join to Close two, one that follows the world and one that sends heartbeats.
package upstream

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/pyproto"
)

// training is the master's name for the rendezvous of the job's workers.
const training = "elastic-training"

// Times of DLRover's agents, where they matter to the master.
const (
	heartbeat   = 15 * time.Second
	barrierTime = 900 * time.Second // for the nodes that still work when this one has succeeded
)

// intervals between repeated calls; tests use shorter ones than New.
type intervals struct {
	heartbeat time.Duration
	// ask: a node that waits for a world announces itself again, if the master counts no waiting node. After ten times
	// that it does so in any case, and at once if the master's round has changed. The master has forgotten the node if it
	// was started again, or has sealed a world with it that a late node then made void. A node that waits is not counted
	// twice.
	ask time.Duration
	// show: a leader publishes the workers' meeting place again. A master that was started again has forgotten it, and
	// nodes may not have asked before.
	show time.Duration
	// blame: how long a node waits for another one to blame, if its workers failed as they do after another node's
	// failure.
	blame time.Duration
	// leader: how long a node in a check waits for the first of its group to publish their meeting place.
	leader time.Duration
	// round: between the rounds of a check, in which all nodes read the verdict of one before any node begins the next.
	round time.Duration
}

// limits describes the limits of a Python master, for one line of log at the start.
const limits = "the master is DLRover's: it has no spares, counts restarts for every node by itself, tells nobody of " +
	"other nodes' failures, finds no hangs, and takes no token"

// inertParams lists the options in p, as on a command line, that have no effect under a Python master; "" if there are
// none. Those of a check are in Check.Inert.
func inertParams(p rendezvous.Params) string {
	acting := rendezvous.Params{
		Min: p.Min, Max: p.Max, Unit: p.Unit, LastCall: p.LastCall, JoinTimeout: p.JoinTimeout, MaxRestarts: p.MaxRestarts,
		Gate: p.Gate, GateTimeout: p.GateTimeout, Check: p.Check, Hang: p.Hang, // limits mentions hangs
	}
	own, _ := p.Differences(acting)
	return own
}

// Config holds the launcher's identity, and its master.
type Config struct {
	Client *pyproto.Client
	// Rank is NODE_RANK: the master knows the nodes of a world by it.
	Rank int
	// Check is how this node is checked before it trains; the zero value: not at all.
	Check Check
	// Port finds a free port for the first worker of a test; nil without Check.Test.
	Port func() (int, error)
	// Follows reports whether a failure can be the consequence of another node's; nil: none can.
	Follows func(job.Failure) bool
	Log     *slog.Logger
}

// inert lists the options that have no effect, in p or in how nodes are checked.
func (c Config) inert(p rendezvous.Params) string {
	all := inertParams(p)
	if c.Check.Inert == "" {
		return all
	}
	if all != "" {
		all += "; "
	}
	return all + "in tests with other nodes: " + c.Check.Inert
}

// Service implements api.Service. Close ends it.
type Service struct {
	cfg     Config
	master  *master
	every   intervals
	cancel  context.CancelFunc // nil before the first Join
	ctx     context.Context
	wg      sync.WaitGroup
	faulty  sync.Mutex // held while the master hears that this node is at fault
	reports reports

	mu            sync.Mutex
	news          chan struct{} // closed when there is a newer directive
	dir           rendezvous.Directive
	at            *progress
	epochs        epochs
	params        rendezvous.Params
	world         world
	spent         int // restarts of this node
	pendingCharge pendingCharge
	failures      failureLog
	outcome       job.Outcome
	cause         *job.Cause
	told          bool // the master knows how this node has ended
	cleared       clearance
	away          outage

	// Of the goroutine that follows the world alone.
	enrolment enrolment
	barrier   barrier // sealed replaces it
}

// New returns a Service, which contacts no master before Join.
func New(cfg Config) *Service {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	s := &Service{cfg: cfg, master: newMaster(cfg), at: newProgress(), news: make(chan struct{}),
		reports: reports{sending: make(chan struct{}, 1)}}
	s.enrolment = enrolment{master: s.master, every: &s.every, log: cfg.Log}
	if cfg.Follows == nil {
		s.cfg.Follows = func(job.Failure) bool { return false }
	}
	s.every = intervals{heartbeat: heartbeat, ask: 5 * time.Second, show: 10 * time.Second, blame: 3 * time.Second,
		leader: testTime, round: 5 * time.Second}
	s.epochs.term = uint64(time.Now().UnixNano())
	s.dir.Term, s.dir.Seq = s.epochs.term, s.epochs.term
	return s
}

// Close ends the background work, without a message to the master.
func (s *Service) Close() {
	s.mu.Lock()
	cancel := s.cancel
	s.at.phase = over
	s.mu.Unlock()
	if cancel != nil {
		cancel()
	}
	s.wg.Wait()
	s.master.client.Close()
}

// Join implements api.Service. The run's name is the master's own matter: it has one run.
func (s *Service) Join(ctx context.Context, _ string, ev rendezvous.Join) error {
	p := ev.Params.WithDefaults()
	if err := p.Validate(); err != nil {
		return fmt.Errorf("%w: %w", rendezvous.ErrRefused, err)
	}
	if p.Hold {
		return fmt.Errorf("%w: --hold: a master of DLRover holds no job; leave it out, or use dlrover-master",
			rendezvous.ErrRefused)
	}
	if err := s.master.introduce(ctx, p); err != nil { // the session notices an unreachable master
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.params = p
	s.master.become(ev.Node)
	s.failures.add(ev.Failures)
	s.pendingCharge.own = s.pendingCharge.own || !follow(ev.Failures, s.cfg.Follows)
	if s.at.phase == over {
		return nil // its directive is the result of the run
	}
	s.at.enter(s.cfg.Check.first(s.cleared))
	if s.at.phase == examining {
		s.direct(rendezvous.Directive{Kind: job.Check})
	} else {
		s.direct(rendezvous.Directive{Kind: job.Wait})
	}
	if s.cancel == nil {
		s.ctx, s.cancel = context.WithCancel(context.Background())
		s.wg.Go(s.follow)
		s.wg.Go(s.beat)
		s.cfg.Log.Info(limits)
		if inert := s.cfg.inert(p); inert != "" {
			s.cfg.Log.Warn("options that have no effect under a master of DLRover", "options", inert)
		}
	}
	return nil
}

// direct sends the launcher its new directive, with s locked.
func (s *Service) direct(d rendezvous.Directive) {
	d.Seq, d.EpochID, d.Restarts = s.dir.Seq+1, s.dir.EpochID, s.spent
	if d.Kind == job.Lead || d.Kind == job.Run {
		d.Place = s.world.place(s.spent)
	}
	s.dir = d
	close(s.news)
	s.news = make(chan struct{})
}

// hold is how long a Watch waits.
const hold = 20 * time.Second

// Watch implements api.Service.
func (s *Service) Watch(ctx context.Context, run, _ string, after api.Cursor) (api.News, error) {
	if after.Join != nil {
		if err := s.Join(ctx, run, *after.Join); err != nil {
			return api.News{}, err
		}
	}
	end := time.NewTimer(hold)
	defer end.Stop()
	for {
		s.mu.Lock()
		d, news := s.dir, s.news
		s.mu.Unlock()
		if d.Kind != "" && d.Seq != after.Directive {
			return api.News{Directive: d}, nil
		}
		select {
		case <-news:
		case <-end.C:
			return api.News{}, api.ErrNothingNew
		case <-ctx.Done():
			return api.News{}, ctx.Err()
		}
	}
}

// Report implements api.Service.
func (s *Service) Report(ctx context.Context, _ string, ev rendezvous.Event) error {
	switch e := ev.(type) {
	case rendezvous.Ready:
		return s.ready(ctx, e)
	case rendezvous.Failing:
		return s.failing(ctx, e)
	case rendezvous.Success:
		s.succeeded(e)
	case rendezvous.Cleared:
		s.clear(e)
	case rendezvous.Barred:
		return s.fault(ctx, checkFailure, e.Reason)
	}
	return nil // of the rest a Python master understands nothing
}

// Leave implements api.Service.
func (s *Service) Leave(ctx context.Context, _ string, ev rendezvous.Leave) (job.Evidence, error) {
	s.mu.Lock()
	s.failures.add(ev.Failures)
	e := job.Evidence{
		Outcome: s.outcome, Cause: s.cause, Failures: s.failures, Restarts: s.spent, MaxRestarts: s.params.MaxRestarts,
		WorldSize: s.world.size,
	}
	told := s.told || s.cancel == nil // it has never joined
	s.told = true
	s.at.enter(over)
	s.mu.Unlock()
	if err := s.reports.send(ctx, s.master); err != nil {
		s.cfg.Log.Debug("cannot tell the master of failed workers", "err", err)
	}
	if told {
		return e, nil
	}
	return e, s.master.event(ctx, "FAILED_EXITED")
}

// World implements api.Service: launchers have published their own entries, and the entries of others come from the
// master's data, which has no address.
func (s *Service) World(ctx context.Context, _ string) ([]job.Member, error) {
	s.mu.Lock()
	w := s.world
	s.mu.Unlock()
	if len(w.nodes) == 0 {
		return nil, rendezvous.ErrUnknownNode
	}
	return s.master.kv.members(ctx, w)
}
