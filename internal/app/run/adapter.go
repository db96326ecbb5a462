package run

import (
	"context"
	"errors"
	"sync"
	"time"

	"dlrover-run/internal/app/run/anymaster"
	"dlrover-run/internal/app/run/deathnotice"
	"dlrover-run/internal/app/run/findings"
	"dlrover-run/internal/app/run/storeacl"
	"dlrover-run/internal/job"
	"dlrover-run/launcher"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// adapter implements the launcher's Rendezvous by an api.Session: the two packages do not import each other.
type adapter struct {
	session *api.Session
	out     chan launcher.Directive
	end     chan struct{}
	wg      sync.WaitGroup
	acl     *storeacl.ACL
	bar     func(ctx context.Context, reason string) error
	// notice is dropped once this node has left the run itself. It may be nil.
	notice *deathnotice.Notice
	// progress returns the progress of this node's workers. It is nil if the progress is not known.
	progress func() job.Progress
	// findings are sent before this node leaves.
	findings *findings.Queue
}

func newAdapter(s *api.Session, g *storeacl.ACL) *adapter {
	a := &adapter{session: s, out: make(chan launcher.Directive), end: make(chan struct{}), acl: g}
	a.wg.Go(a.translate)
	return a
}

// close stops the session. It does not leave the run.
func (a *adapter) close() {
	close(a.end)
	a.notice.Drop()
	a.session.Close()
	a.wg.Wait()
}

func (a *adapter) translate() {
	defer close(a.out)
	for d := range a.session.Directives() {
		select {
		case a.out <- directive(d, a.session.Params()):
		case <-a.end:
			return
		}
	}
}

func directive(d rendezvous.Directive, p rendezvous.Params) launcher.Directive {
	l := launcher.Directive{EpochID: d.EpochID, Kind: d.Kind, Hold: d.Hold, Confirms: d.Confirms(), Command: d.Command,
		MaxRestarts: p.MaxRestarts}
	l.Rules = launcher.Rules{
		Success: string(p.Budget.Success), LetRun: p.Budget.CleanUp == rendezvous.CleanNone, Tolerate: p.Budget.Tolerate,
		Alone: p.Budget.Alone,
	}
	if d.Place != nil {
		l.Place = *d.Place
	}
	if d.Leave != nil {
		l.Leave = d.Leave.Text
	}
	if d.Cause != nil {
		l.Cause = *d.Cause
	}
	return l
}

// Directives implements launcher.Rendezvous.
func (a *adapter) Directives() <-chan launcher.Directive { return a.out }

// Err implements launcher.Rendezvous.
func (a *adapter) Err() error { return classify(a.session.Err()) }

// Running implements launcher.Rendezvous.
func (a *adapter) Running(d *launcher.Directive) {
	if d == nil {
		a.session.Running(nil)
		return
	}
	a.session.Running(&rendezvous.Resume{EpochID: d.EpochID, Place: d.Place, Hold: d.Hold})
}

// Rejoin implements launcher.Rendezvous.
func (a *adapter) Rejoin(ctx context.Context, stopped launcher.Directive, fs []verdict.Failure) error {
	a.session.Achieved(a.achieved())
	return classify(a.session.Rejoin(ctx, stopped.EpochID, verdict.Pack(fs)))
}

// Ready implements launcher.Rendezvous.
func (a *adapter) Ready(ctx context.Context, d launcher.Directive, addr string, port int) error {
	if d.Place.WorkerStore {
		return a.readyWorker(ctx, d, addr)
	}
	if d.Place.GroupWorldSize > 1 { // the workers of one node connect by loopback or from our own address
		world, err := a.session.World(ctx)
		if errors.Is(err, rendezvous.ErrUnknownNode) {
			return nil // a new daemon without this world; its directives decide
		}
		if err != nil {
			return classify(err)
		}
		a.acl.Admit(world)
	} else {
		a.acl.Admit([]job.Member{{Addr: addr, Slots: a.acl.Slots}})
	}
	return a.report(ctx, rendezvous.Ready{ID: a.session.ID(), EpochID: d.EpochID, Addr: addr, Port: port})
}

// readyWorker reports where the first worker will serve the store.
func (a *adapter) readyWorker(ctx context.Context, d launcher.Directive, addr string) error {
	port, err := anymaster.WorkerPort()
	if err != nil {
		return err
	}
	return a.report(ctx, rendezvous.Ready{ID: a.session.ID(), EpochID: d.EpochID, Addr: addr, Port: port})
}

// Failing implements launcher.Rendezvous.
func (a *adapter) Failing(ctx context.Context, d launcher.Directive, act policy.Action, fs []verdict.Failure) error {
	return a.report(ctx, a.failing(d, act, fs))
}

func (a *adapter) failing(d launcher.Directive, act policy.Action, fs []verdict.Failure) rendezvous.Failing {
	return rendezvous.Failing{ID: a.session.ID(), EpochID: d.EpochID, Decision: decision(act),
		Failures: verdict.Pack(fs),
		Progress: a.achieved()}
}

func (a *adapter) achieved() job.Progress {
	if a.progress == nil {
		return job.Progress{}
	}
	return a.progress()
}

// RankFailed implements launcher.Rendezvous.
func (a *adapter) RankFailed(
	ctx context.Context, d launcher.Directive, act policy.Action, fs []verdict.Failure, left int,
) error {
	ev := a.failing(d, act, fs)
	ev.Tolerated, ev.Beside, ev.Left = d.Rules.Tolerate, !d.Rules.Tolerate, left
	return a.report(ctx, ev)
}

// RankSucceeded implements launcher.Rendezvous.
func (a *adapter) RankSucceeded(ctx context.Context, d launcher.Directive, rank int) error {
	return a.report(ctx, rendezvous.Success{ID: a.session.ID(), EpochID: d.EpochID, Ranks: []int{rank}})
}

// Success implements launcher.Rendezvous. The rendezvous hears of the last saves before.
func (a *adapter) Success(ctx context.Context, d launcher.Directive) error {
	if p := a.achieved(); d.Place.RankBase == 0 && moved(p) {
		_ = a.stepped(ctx, d, p) // an older daemon may refuse it
	}
	return a.report(ctx, rendezvous.Success{ID: a.session.ID(), EpochID: d.EpochID})
}

// report delivers an event. A daemon that has forgotten this node answers through the directives, so that is no
// error.
func (a *adapter) report(ctx context.Context, ev rendezvous.Event) error {
	err := a.session.Report(ctx, ev)
	if errors.Is(err, rendezvous.ErrUnknownNode) {
		return nil
	}
	return classify(err)
}

func decision(a policy.Action) rendezvous.Decision {
	switch a {
	case policy.RestartFree:
		return rendezvous.RestartFree
	case policy.RestartCharged:
		return rendezvous.RestartCharged
	case policy.RestartElsewhere:
		return rendezvous.RestartElsewhere
	case policy.Shrink:
		return rendezvous.Shrink
	case policy.Hold:
		return rendezvous.Hold
	}
	return rendezvous.Permanent
}

// Cleared implements launcher.Rendezvous.
func (a *adapter) Cleared(ctx context.Context, r launcher.CheckResult) error {
	c := rendezvous.Cleared{ID: a.session.ID(), Until: r.Until, Domain: r.Domain, Covered: r.Covered}
	return a.report(ctx, c)
}

// Barred implements launcher.Rendezvous.
func (a *adapter) Barred(ctx context.Context, r launcher.CheckResult) error {
	return a.report(ctx, rendezvous.Barred{ID: a.session.ID(), Reason: r.Reason, Again: r.Again, Aspect: r.Aspect})
}

// Doubt implements launcher.Rendezvous. A daemon of an older version does not support it, and continues without.
func (a *adapter) Doubt(ctx context.Context, reason string) error {
	err := a.report(ctx, rendezvous.Doubt{ID: a.session.ID(), Reason: reason})
	if errors.Is(err, api.ErrBadRequest) {
		return nil
	}
	return err
}

// Bar implements launcher.Rendezvous.
func (a *adapter) Bar(ctx context.Context, reason string) error { return a.bar(ctx, reason) }

// World implements launcher.Rendezvous.
func (a *adapter) World(ctx context.Context) ([]job.Member, error) {
	world, err := a.session.World(ctx)
	return world, classify(err)
}

// Notices implements launcher.Rendezvous.
func (a *adapter) Notices() <-chan job.Notice { return a.session.Notices() }

// Leaving implements launcher.Rendezvous.
func (a *adapter) Leaving(ctx context.Context, reason string, grace time.Duration) error {
	return a.session.Report(ctx, rendezvous.Leaving{ID: a.session.ID(), Reason: reason, Grace: grace})
}

// Leave implements launcher.Rendezvous.
func (a *adapter) Leave(ctx context.Context, reason string, fs []verdict.Failure) (verdict.Evidence, error) {
	a.findings.Flush()
	e, err := a.session.Leave(ctx, reason, verdict.Pack(fs))
	a.notice.Drop()
	return verdict.Unpack(e), classify(err)
}

// classify gives an error of the rendezvous the reason for the exit status.
func classify(err error) error {
	reason := policy.Unclassified
	switch {
	case err == nil:
		return nil
	case errors.Is(err, api.ErrUnauthorized):
		reason = policy.TokenRefused
	case errors.Is(err, rendezvous.ErrRefused), errors.Is(err, api.ErrBadRequest):
		reason = policy.RendezvousClosed
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, api.ErrAway):
		reason = policy.MasterUnreachable
	}
	return &launcher.ReasonError{Reason: reason, Err: err}
}

// stepped reports how far the workers of an epoch have come, which have made a step or a checkpoint.
func (a *adapter) stepped(ctx context.Context, d launcher.Directive, p job.Progress) error {
	return a.report(ctx, rendezvous.Stepped{ID: a.session.ID(), EpochID: d.EpochID, Progress: p})
}
