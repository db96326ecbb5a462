package api

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// SessionConfig describes one launcher in one run.
type SessionConfig struct {
	Run    string
	Node   rendezvous.Node
	Params rendezvous.Params
	// OnResume is a command that is given in advance; nil is none.
	OnResume *job.Command
	// Work is a digest of the node's command, by which a run that has succeeded recognizes it; "": it does not.
	Work string
	// Where names the daemon in messages, such as host:port.
	Where string
	// Started is when this launcher process began; the zero value means now.
	Started time.Time
	// ConnectTimeout bounds the first contact with the daemon; 0 means a minute.
	ConnectTimeout time.Duration
	// Waiting receives news of the wait of this node without workers, about every WaitingEvery, and nil when it is over or
	// nothing is known. It must be quick. Nil: nobody asks.
	Waiting      func(*Waiting)
	WaitingEvery time.Duration
	// Succession finds the launcher that serves the run after another one; nil: nobody does.
	Succession Succession
	Logger     *slog.Logger
}

// Succession is a launcher's part in the election of the one that serves its run. One goroutine uses all but Bound and
// Parting.
type Succession interface {
	// Told receives every directive before the launcher does.
	Told(d rendezvous.Directive)
	// Lost is called after each request for directives that has failed, with the error. It reports whether the Service
	// asks another launcher from now on.
	Lost(ctx context.Context, why error) (moved bool)
	// Bound reports that another launcher may count on this node: until Lost knows, no server is asked.
	Bound() bool
	// Parting makes a request for a place in the next world. stopped is the newest epoch whose workers have been ended for
	// that. ErrBound means that the request must wait.
	Parting(stopped job.EpochID, join func() error) error
}

// ErrBound ends requests of a node that has voted.
var ErrBound = errors.New("this launcher has voted for another server, and waits for the result")

// Session keeps a launcher in its run: it joins, follows the directives, and comes
// back after a broken connection or a daemon that was started again.
type Session struct {
	svc      Service
	cfg      SessionConfig
	cancel   context.CancelFunc
	wg       sync.WaitGroup
	dirs     chan rendezvous.Directive
	partings chan *parting // has room for one, of the present lull
	notices  chan job.Notice
	flooded  bool  // of follow: dropped notices have been logged
	err      error // why dirs is closed; read after it is
	mu       sync.Mutex
	lulls    bool               // follow waits for a parting, or will
	resume   *rendezvous.Resume // the newest epoch that had workers here
	due      *rendezvous.Resume // an epoch whose workers are about to start here
	stopped  job.EpochID        // the newest epoch with workers that have been stopped on request
	works    bool               // workers run
	idleAt   time.Time          // since when they do not
	seen     job.EpochID        // the newest epoch heard of
	spent    int                // restarts the run had spent by then
	params   rendezvous.Params  // the run's, as far as known; sent to a restarted daemon
	paused   *job.Cause         // from the newest directive
	excluded *job.Cause         // the newest directive is a Bar, or announces one
	progress job.Progress       // of the workers of stopped, at achieved
	achieved time.Time
	used     *rendezvous.Spent // of the run's budget besides restarts, by then
	command  *job.Command      // from the newest directive
	left     atomic.Bool       // by Leave or Abandon: being unknown is then as it should be
}

// Open joins the run and starts to follow its directives. It fails when the daemon
// refuses the node, or cannot be reached within ConnectTimeout. Close must be called.
func Open(ctx context.Context, svc Service, cfg SessionConfig) (*Session, error) {
	if cfg.Started.IsZero() {
		cfg.Started = time.Now()
	}
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = time.Minute
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Session{
		svc: svc, cfg: cfg, params: cfg.Params.WithDefaults(),
		dirs: make(chan rendezvous.Directive, 1), partings: make(chan *parting, 1),
		notices: make(chan job.Notice, maxNotices),
	}
	if err := s.connect(ctx); err != nil {
		return nil, err
	}
	ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	s.wg.Go(func() { s.follow(ctx) })
	return s, nil
}

// Close stops following. It does not leave the run.
func (s *Session) Close() {
	s.cancel()
	s.wg.Wait()
}

// Directives delivers each new duty of this node; only the newest is kept for a slow
// reader. The channel closes when the daemon will not have this node any more (Err).
func (s *Session) Directives() <-chan rendezvous.Directive { return s.dirs }

// Notices delivers the notices, if the node can read them. Of those that are not read in time the oldest of more than
// 64 are dropped. The channel closes with Directives.
func (s *Session) Notices() <-chan job.Notice { return s.notices }

// Err is why Directives was closed.
func (s *Session) Err() error { return s.err }

// Running sets the epoch of the workers that run on this node; nil: none run. A restarted daemon receives it, together
// with the reports.
func (s *Session) Running(r *rendezvous.Resume) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.works, s.due = r != nil, nil
	if r != nil {
		s.resume = r
	} else {
		s.idleAt = time.Now()
	}
}

// booked keeps an event that is being reported for a daemon that has lost its memory.
func (s *Session) booked(ev rendezvous.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.resume == nil {
		return
	}
	r := *s.resume
	switch e := ev.(type) {
	case rendezvous.Success:
		switch {
		case e.EpochID != r.EpochID:
			r.Done = false
		case len(e.Ranks) == 0:
			r.Done = true
		default:
			r.Ranks = append(slices.Clone(r.Ranks), e.Ranks...)
		}
	case rendezvous.Stepped:
		r.Stepped = r.Stepped || e.EpochID == r.EpochID && e.Trains()
	case rendezvous.Failing:
		if e.EpochID == r.EpochID && e.Left == 0 {
			r.Decision, r.Failures, r.Progress = e.Decision, e.Failures, e.Progress
			r.Tolerated, r.Beside = e.Tolerated, e.Beside
		}
	}
	s.resume = &r
}

func (s *Session) working() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.works
}

// awaySince is the later of the beginning of an outage and of the end of the workers.
func (s *Session) awaySince(outage time.Time) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.idleAt.After(outage) {
		return s.idleAt
	}
	return outage
}

// patience is how long a node without workers waits for a daemon that is away. A node with running workers waits for as
// long as they run, and one of a paused run without end.
func (s *Session) patience() (limit time.Duration, endless bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.params.JoinTimeout, s.paused != nil
}

// patient ends ctx, with ErrAway, when patience is over.
func (s *Session) patient(ctx context.Context) (context.Context, context.CancelFunc) {
	limit, endless := s.patience()
	if endless {
		return context.WithCancel(ctx)
	}
	return context.WithTimeoutCause(ctx, limit, ErrAway)
}

// Params are the run's, which may differ from those that this node brought.
func (s *Session) Params() rendezvous.Params {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.params
}

// heed takes the run's parameters from a directive, and logs those that differ from ours.
func (s *Session) heed(d rendezvous.Directive) {
	if d.Params == nil {
		return // they are those that we have sent
	}
	s.mu.Lock()
	news := *d.Params != s.params
	s.params = *d.Params
	s.mu.Unlock()
	if news {
		own, theirs := s.cfg.Params.Differences(*d.Params)
		s.cfg.Logger.Warn("options of this node differ from those of the node that opened the run, and the run's count",
			"here", own, "run", theirs)
	}
}

// ErrAway: the daemon has been away for too long.
var ErrAway = errors.New("api: the rendezvous daemon does not come back")

// Achieved sets the workers' progress for the next Rejoin.
func (s *Session) Achieved(p job.Progress) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.progress, s.achieved = p, time.Now()
}

// Rejoin asks for a place in the next world, after the workers of stopped have ended.
func (s *Session) Rejoin(ctx context.Context, stopped job.EpochID, failures []job.Failure) error {
	p := &parting{failures, make(chan error, 1)}
	if s.handOver(p, stopped) {
		select {
		case err := <-p.done:
			return err
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	ctx, cancel := s.patient(ctx)
	defer cancel()
	return s.retry(ctx, "join", func(ctx context.Context) error { return s.join(ctx, failures) })
}

// parting is a Rejoin whose request follow makes, together with its own for the next directive.
type parting struct {
	failures []job.Failure
	done     chan error // has room for one
}

// ends has Rejoin return. A nil parting has none.
func (p *parting) ends(err error) {
	if p != nil {
		p.done <- err
	}
}

// handOver gives p to follow if that lulls.
func (s *Session) handOver(p *parting, stopped job.EpochID) (taken bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = stopped
	if s.lulls {
		s.lulls, taken = false, true
		s.partings <- p
	}
	return taken
}

// join asks for a place in the next world.
func (s *Session) join(ctx context.Context, failures []job.Failure) error {
	ev := s.request(failures)
	return s.part(ev, func() error { return s.svc.Join(ctx, s.cfg.Run, ev) })
}

// part makes the request ev, and gives up a vote for another server.
func (s *Session) part(ev rendezvous.Join, join func() error) error {
	if s.cfg.Succession == nil {
		return join()
	}
	return s.cfg.Succession.Parting(ev.Stopped, join)
}

// SetPorts replaces the ports that this node offers, from the next join on.
func (s *Session) SetPorts(ports []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cfg.Node.Ports = slices.Clone(ports)
}

// SetBases replaces Node.Bases, from the next join on.
func (s *Session) SetBases(ports []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cfg.Node.Bases = slices.Clone(ports)
}

// Report delivers a Ready, Failing, Success, Stepped, Cleared, Barred, Doubt or Leaving; it waits for a daemon that is
// away.
func (s *Session) Report(ctx context.Context, ev rendezvous.Event) error {
	s.booked(ev)
	began := time.Now()
	return s.retryKnown(ctx, "report", func(ctx context.Context) error {
		return s.svc.Report(ctx, s.cfg.Run, rendezvous.Aged(ev, time.Since(began)))
	})
}

// World is the table of the newest sealed world.
func (s *Session) World(ctx context.Context) (ms []job.Member, err error) {
	err = s.retryKnown(ctx, "world", func(ctx context.Context) error {
		ms, err = s.svc.World(ctx, s.cfg.Run)
		return err
	})
	return ms, err
}

// Leave takes the node out of the run and returns the evidence about its end.
func (s *Session) Leave(ctx context.Context, reason string, fs []job.Failure) (job.Evidence, error) {
	s.left.Store(true)
	return s.svc.Leave(ctx, s.cfg.Run, rendezvous.Leave{ID: s.cfg.Node.ID, Reason: reason, Failures: fs})
}

// Abandon is for a launcher that ends at once, and whose Leave another process sends. The daemon is then expected not
// to know the node any more.
func (s *Session) Abandon() { s.left.Store(true) }

// request is one for a place in the next world.
func (s *Session) request(failures []job.Failure) rendezvous.Join {
	s.mu.Lock()
	defer s.mu.Unlock()
	ev := rendezvous.Join{
		Node: s.cfg.Node, Params: s.params, Failures: failures, Stopped: s.stopped, Seen: s.seen, Restarts: s.spent,
		Resume: cmp.Or(s.due, s.resume), Paused: s.paused, Barred: s.excluded,
		Spent: s.used, Progress: s.progress.Aged(time.Since(s.achieved)), Command: s.command, OnResume: s.cfg.OnResume,
		Work: s.cfg.Work,
	}
	ev.Node.Uptime = time.Since(s.cfg.Started)
	return ev
}

// connect makes the first Join, patiently: the daemon's pod may still be starting.
func (s *Session) connect(ctx context.Context) error {
	deadline, cancel := context.WithTimeout(ctx, s.cfg.ConnectTimeout)
	defer cancel()
	var strange time.Time // since when this node is turned away
	err := s.retry(deadline, "join", func(ctx context.Context) error {
		err := s.svc.Join(ctx, s.cfg.Run, s.request(nil))
		if !errors.Is(err, errStranger) {
			strange = time.Time{}
			return err
		}
		if strange.IsZero() {
			strange = time.Now()
		}
		if time.Since(strange) >= strangersPatience {
			return &turnedAwayError{s.cfg.Where, err}
		}
		return err
	})
	if errors.Is(err, errStranger) && !Final(err) && ctx.Err() == nil {
		return &turnedAwayError{s.cfg.Where, err} // before its patience was over
	}
	if err != nil && ctx.Err() == nil && deadline.Err() != nil {
		return fmt.Errorf("no rendezvous daemon at %s within %s; is it running, and is the address right? (%w)",
			s.cfg.Where, s.cfg.ConnectTimeout, err)
	}
	return err
}

// strangersPatience is how long a pod may wait for its name.
const strangersPatience = time.Minute

// turnedAwayError: the server does not know this node's host, and will not.
type turnedAwayError struct {
	where string
	err   error
}

func (e *turnedAwayError) Error() string {
	return fmt.Sprintf("%s has turned this node away: %v", e.where, e.err)
}

func (e *turnedAwayError) Unwrap() []error { return []error{ErrUnauthorized, e.err} }

// follow watches until Close or a fatal error.
func (s *Session) follow(ctx context.Context) {
	defer close(s.notices)
	defer close(s.dirs)
	away := outage{s: s, what: "watch"}
	after := Cursor{WithNotices: slices.Contains(s.cfg.Node.Can, rendezvous.CanNotice), Waits: s.cfg.WaitingEvery}
	var p *parting
	defer func() { p.ends(cmp.Or(s.err, ctx.Err())) }()
	for ctx.Err() == nil {
		n, err := s.watch(ctx, after, p)
		if joined := err == nil || errors.Is(err, ErrNothingNew); joined {
			p.ends(nil)
			p = nil
		}
		if s.cfg.Waiting != nil {
			s.cfg.Waiting(n.Waiting)
		}
		switch {
		case err == nil:
			away.over(nil)
			if s.take(n, &after) && n.Directive.Kind == job.Stop {
				p = s.lull(ctx)
			}
		case errors.Is(err, ErrNothingNew):
			away.over(nil)
		case ctx.Err() != nil:
			return
		case s.left.Load():
			<-ctx.Done()
			return
		case errors.Is(err, rendezvous.ErrUnknownNode):
			after.Directive = 0
			err = s.introduce(ctx, &away)
		case Final(err):
		case s.cfg.Succession != nil && s.cfg.Succession.Lost(ctx, err):
			err = nil // the next one does not know this node
		default:
			err = s.outlast(ctx, &away, err)
		}
		if Final(err) || errors.Is(err, ErrAway) {
			s.err = err
			return
		}
	}
}

// watch waits for news, after the request of p if there is one.
func (s *Session) watch(ctx context.Context, after Cursor, p *parting) (n News, err error) {
	if p != nil {
		ev := s.request(p.failures)
		after.Join = &ev
		err = s.part(ev, func() error {
			n, err = s.svc.Watch(ctx, s.cfg.Run, s.cfg.Node.ID, after)
			return err
		})
		return n, err
	}
	if s.cfg.Succession != nil && s.cfg.Succession.Bound() {
		return News{}, ErrBound
	}
	return s.svc.Watch(ctx, s.cfg.Run, s.cfg.Node.ID, after)
}

// outlast waits a little for a daemon that is away; ErrAway means that patience is over.
func (s *Session) outlast(ctx context.Context, away *outage, err error) error {
	away.wait(ctx, err)
	if s.outOfPatience(away.since) {
		return fmt.Errorf("%w: %s: %w", ErrAway, s.cfg.Where, err)
	}
	return nil
}

func (s *Session) outOfPatience(outage time.Time) bool {
	limit, endless := s.patience()
	return !endless && !s.working() && time.Since(s.awaySince(outage)) > limit
}

// stopLull is how long a node that ends its workers leaves its connection to the request that follows that.
const stopLull = 2 * time.Second

// lull waits for a Rejoin, whose request is then the next one for directives, too. Else it needs a connection of its
// own: 10,000 nodes that make new ones at once overflow the daemon's queue, and some wait for seconds. It ends with a
// connection: the daemon soon gives up a node without one.
func (s *Session) lull(ctx context.Context) (p *parting) {
	var ended <-chan struct{}
	if c, ok := s.svc.(interface{ Ended() <-chan struct{} }); ok {
		ended = c.Ended()
	}
	select {
	case <-ended: // before this Stop
	default:
	}
	late := time.NewTimer(stopLull)
	defer late.Stop()
	select {
	case p = <-s.partings:
		return p
	case <-ended:
	case <-late.C:
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lulls = false
	select {
	case p = <-s.partings: // just now
	default:
	}
	return p
}

// take delivers the news in the answer of a Watch, and moves the cursor. It reports whether there is a new directive.
func (s *Session) take(n News, after *Cursor) (directed bool) {
	if directed = n.Directive.Seq != after.Directive; directed {
		s.deliver(n.Directive)
		after.Waits = 0
		if slices.Contains([]job.Kind{job.Wait, job.Check, job.Stop}, n.Kind) {
			after.Waits = s.cfg.WaitingEvery
		}
	}
	for _, notice := range n.Notices {
		s.queue(notice)
	}
	after.Directive = n.Directive.Seq
	if n.NoticeSeq != 0 { // a daemon of an older version has none
		after.Notices = n.NoticeSeq
	}
	return directed
}

// queue hands a notice to a reader, which may be slow, or missing.
func (s *Session) queue(n job.Notice) {
	select {
	case s.notices <- n:
		return
	default:
	}
	if !s.flooded {
		s.flooded = true
		s.cfg.Logger.Warn("notices of the rendezvous daemon are not read in time; the oldest are dropped", "topic", n.Topic)
	}
	select {
	case <-s.notices:
	default:
	}
	s.notices <- n // only follow sends, so there is room
}

// introduce joins again at a daemon that does not know this node: it was started
// again, or it has given this node up.
func (s *Session) introduce(ctx context.Context, away *outage) error {
	err := s.join(ctx, nil)
	if err != nil && !Final(err) {
		away.wait(ctx, err)
		return nil
	}
	if err == nil {
		s.cfg.Logger.Warn("the rendezvous daemon did not know this node; joined again",
			"daemon", s.cfg.Where, "workers_running", s.working())
	}
	return err
}

// deliver replaces an undelivered directive by a newer one.
func (s *Session) deliver(d rendezvous.Directive) {
	if s.cfg.Succession != nil {
		s.cfg.Succession.Told(d)
	}
	s.heed(d)
	s.mu.Lock()
	if d.Round > 0 { // a daemon without memory has no history
		s.seen, s.spent, s.used = d.EpochID, d.Restarts, d.Spent
	}
	s.paused, s.excluded, s.command = d.Paused, d.Barred, d.Command
	if d.Kind == job.Bar {
		s.excluded = d.Cause
	}
	s.due, s.lulls = nil, d.Kind == job.Stop
	if d.Kind == job.Run && d.Place != nil && (s.resume == nil || s.resume.EpochID != d.EpochID) {
		s.due = &rendezvous.Resume{EpochID: d.EpochID, Place: *d.Place, Hold: d.Hold}
	}
	if out := d.Kind != job.Stop && d.Kind != job.Run; out && s.resume != nil && s.resume.EpochID != s.stopped {
		s.resume = nil // the world has gone on without this node, whose workers end
	}
	s.mu.Unlock()
	select {
	case <-s.dirs:
	default:
	}
	s.dirs <- d // only follow sends, so there is room
}

// ID is this node's own id.
func (s *Session) ID() string { return s.cfg.Node.ID }
