package page

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"dlrover-run/internal/app/answers"
	"dlrover-run/internal/app/answers/remote"
	"dlrover-run/internal/app/marks"
	"dlrover-run/internal/app/service"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// Source is the server whose runs a Page shows. Events waits as Hub.Events does.
type Source interface {
	Runs(ctx context.Context) ([]api.RunStatus, error)
	Facts(ctx context.Context, run string) (answers.Facts, error)
	Events(ctx context.Context, run string, after uint64) (api.Events, error)
	Order(ctx context.Context, run string, o rendezvous.Order) error
	// Machines are those with findings or marks; false: nothing is kept about machines.
	Machines(ctx context.Context) (known marks.Known, kept bool)
}

// own is a server in this process.
type own struct {
	*service.Service
	machines func() marks.Known
}

// Own is the Source of a server in this process. machines is nil where nothing is kept about them.
func Own(s *service.Service, machines func() marks.Known) Source { return own{s, machines} }

// Runs implements Source.
func (o own) Runs(context.Context) ([]api.RunStatus, error) { return o.Hub.Runs(false), nil }

// Facts implements Source.
func (o own) Facts(ctx context.Context, run string) (f answers.Facts, err error) {
	f.Now = time.Now()
	if f.Run, err = o.Hub.Run(run); err != nil {
		return f, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	es, err := o.Hub.Events(ctx, run, 0)
	if err != nil && !errors.Is(err, context.DeadlineExceeded) { // a run has events from its first join on
		return f, err
	}
	f.Events = es.Events
	if v, err := o.Verdict(run); err == nil {
		f.Verdict = &v
	}
	f.Hang, _ = o.Hangs.Picture(ctx, run, false) // without reports there is none
	f.Keep(o.Checkpoints.Summary(run))
	f.Machines, _ = o.Machines(ctx)
	return f, nil
}

// Events implements Source.
func (o own) Events(ctx context.Context, run string, after uint64) (api.Events, error) {
	return o.Hub.Events(ctx, run, after)
}

// Order implements Source.
func (o own) Order(_ context.Context, run string, order rendezvous.Order) error {
	return o.Hub.Order(run, order)
}

// Machines implements Source.
func (o own) Machines(context.Context) (marks.Known, bool) {
	if o.machines == nil {
		return marks.Known{}, false
	}
	return o.machines(), true
}

// elsewhere is a server that is asked over its API. Its list of runs, which is megabytes for 10,000 nodes, is asked for
// no more than a tenth of the time.
type elsewhere struct {
	*api.Client
	mu    sync.Mutex
	runs  []api.RunStatus
	until time.Time // the list is fresh
}

// Elsewhere is the Source of a server in another process.
func Elsewhere(c *api.Client) Source { return &elsewhere{Client: c} }

// leastFresh is how long a list of runs is used at least.
const leastFresh = 100 * time.Millisecond

// Runs implements Source. Visitors who come meanwhile wait for the same answer.
func (e *elsewhere) Runs(ctx context.Context) ([]api.RunStatus, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if began := time.Now(); began.After(e.until) {
		runs, err := e.Client.Runs(ctx)
		if err != nil {
			return nil, err
		}
		now := time.Now()
		e.runs, e.until = runs, now.Add(max(leastFresh, 9*now.Sub(began)))
	}
	return append([]api.RunStatus(nil), e.runs...), nil
}

// Facts implements Source.
func (e *elsewhere) Facts(ctx context.Context, run string) (answers.Facts, error) {
	runs, err := e.Runs(ctx)
	if err != nil {
		return answers.Facts{}, err
	}
	for _, r := range runs {
		if r.Run == run {
			return remote.Facts(ctx, e.Client, answers.Facts{Now: time.Now(), Run: r}, 0)
		}
	}
	return answers.Facts{}, fmt.Errorf("%w: %q", api.ErrUnknownRun, run)
}

// Machines implements Source.
func (e *elsewhere) Machines(ctx context.Context) (known marks.Known, kept bool) {
	err := e.Global(ctx, "nodes", nil, &known)
	return known, err == nil
}
