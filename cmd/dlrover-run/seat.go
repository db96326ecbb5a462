package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"dlrover-run/launcher"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// seat makes an api.Session the launcher's Rendezvous: the two packages do not know
// each other.
type seat struct {
	session *api.Session
	out     chan launcher.Directive
	end     chan struct{}
	wg      sync.WaitGroup
	guests  *guests
}

func newSeat(s *api.Session, g *guests) *seat {
	t := &seat{session: s, out: make(chan launcher.Directive), end: make(chan struct{}), guests: g}
	t.wg.Go(t.translate)
	return t
}

// close stops the session. It does not leave the run.
func (t *seat) close() {
	close(t.end)
	t.session.Close()
	t.wg.Wait()
}

func (t *seat) translate() {
	defer close(t.out)
	for d := range t.session.Directives() {
		select {
		case t.out <- directive(d, t.session.Params()):
		case <-t.end:
			return
		}
	}
}

func directive(d rendezvous.Directive, p rendezvous.Params) launcher.Directive {
	l := launcher.Directive{Kind: launcher.Kind(d.Kind), Term: d.Term, Round: d.Round, Epoch: d.Epoch, MaxRestarts: p.MaxRestarts}
	if d.Place != nil {
		l.Place = launcher.Place(*d.Place)
	}
	if d.Cause != nil {
		l.Cause, l.CauseKind = d.Cause.Text, string(d.Cause.Kind)
	}
	return l
}

func epochOf(d launcher.Directive) rendezvous.EpochID {
	return rendezvous.EpochID{Term: d.Term, Round: d.Round, Epoch: d.Epoch}
}

// Directives implements launcher.Rendezvous.
func (t *seat) Directives() <-chan launcher.Directive { return t.out }

// Err implements launcher.Rendezvous.
func (t *seat) Err() error { return classify(t.session.Err()) }

// Running implements launcher.Rendezvous.
func (t *seat) Running(d *launcher.Directive) {
	if d == nil {
		t.session.Running(nil)
		return
	}
	t.session.Running(&rendezvous.Resume{EpochID: epochOf(*d), Place: rendezvous.Place(d.Place)})
}

// Rejoin implements launcher.Rendezvous.
func (t *seat) Rejoin(ctx context.Context, stopped launcher.Directive, fs []verdict.Failure) error {
	return classify(t.session.Rejoin(ctx, epochOf(stopped), wireFailures(fs)))
}

// Ready implements launcher.Rendezvous.
func (t *seat) Ready(ctx context.Context, d launcher.Directive, addr string, port int) error {
	if d.Place.GroupWorldSize > 1 { // the workers of one node come by loopback or from our own address
		world, err := t.session.World(ctx)
		if errors.Is(err, rendezvous.ErrUnknownNode) {
			return nil // a new daemon without this world; its directives say how to go on
		}
		if err != nil {
			return classify(err)
		}
		t.guests.admit(world)
	} else {
		t.guests.admit([]rendezvous.Member{{Addr: addr, Slots: t.guests.slots}})
	}
	return t.report(ctx, rendezvous.Ready{ID: t.session.ID(), EpochID: epochOf(d), Addr: addr, Port: port})
}

// Failing implements launcher.Rendezvous.
func (t *seat) Failing(ctx context.Context, d launcher.Directive, a policy.Action, fs []verdict.Failure) error {
	return t.report(ctx, rendezvous.Failing{ID: t.session.ID(), EpochID: epochOf(d), Decision: decision(a), Failures: wireFailures(fs)})
}

// Success implements launcher.Rendezvous.
func (t *seat) Success(ctx context.Context, d launcher.Directive) error {
	return t.report(ctx, rendezvous.Success{ID: t.session.ID(), EpochID: epochOf(d)})
}

// report delivers; a daemon that does not know this node any more will say what to
// do through the directives, so that is no error.
func (t *seat) report(ctx context.Context, ev rendezvous.Event) error {
	err := t.session.Report(ctx, ev)
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
	}
	return rendezvous.Permanent
}

// Leave implements launcher.Rendezvous.
func (t *seat) Leave(ctx context.Context, reason string, fs []verdict.Failure) (verdict.Evidence, error) {
	e, err := t.session.Leave(ctx, reason, wireFailures(fs))
	return evidence(e), classify(err)
}

// wireFailures packs the launcher's records; the rendezvous keeps them unread.
func wireFailures(fs []verdict.Failure) []rendezvous.Failure {
	out := make([]rendezvous.Failure, 0, len(fs))
	for _, f := range fs {
		detail, err := json.Marshal(f)
		if err != nil { // a Failure holds nothing that JSON cannot
			detail = nil
		}
		out = append(out, rendezvous.Failure{Rank: f.Rank, GroupRank: f.Node, At: f.At, Detail: detail,
			Text: fmt.Sprintf("rank %d (node %d %s, local rank %d) failed: %s", f.Rank, f.Node, f.NodeName, f.LocalRank, f.Reason())})
	}
	return out
}

// evidence unpacks them; the daemon's clock, to which it has shifted every node's
// times, replaces each node's own.
func evidence(e rendezvous.Evidence) verdict.Evidence {
	v := verdict.Evidence{RestartsUsed: e.Restarts, MaxRestarts: e.MaxRestarts, WorldSize: e.WorldSize}
	for _, f := range e.Failures {
		v.Failures = append(v.Failures, failure(f))
	}
	for _, l := range e.Losses {
		loss := verdict.Loss{Node: l.GroupRank, NodeName: l.Node, Reason: l.Reason, At: l.At}
		for i := range l.Slots {
			loss.Ranks = append(loss.Ranks, l.RankBase+i)
		}
		v.Losses = append(v.Losses, loss)
	}
	return v
}

func failure(f rendezvous.Failure) verdict.Failure {
	var v verdict.Failure
	if json.Unmarshal(f.Detail, &v) != nil {
		return verdict.Failure{Rank: f.Rank, Node: f.GroupRank, Message: f.Text, At: f.At, ExitCode: 1}
	}
	if !v.ErrorTime.IsZero() {
		v.ErrorTime = v.ErrorTime.Add(f.At.Sub(v.At))
	}
	v.At = f.At
	return v
}

// classify gives errors of the rendezvous the reason that the exit status shall tell.
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
