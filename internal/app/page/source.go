package page

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"dlrover-run/hang"
	"dlrover-run/internal/app/answers"
	"dlrover-run/internal/app/answers/remote"
	"dlrover-run/internal/app/bundle"
	"dlrover-run/internal/app/marks"
	"dlrover-run/internal/app/service"
	"dlrover-run/netcheck"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// Source is a server with runs for a Page to show. It has functions: templates look methods up by name, so the linker
// keeps those of every type that a Page refers to.
type Source struct {
	Runs  func(ctx context.Context) ([]api.RunStatus, error)
	Facts func(ctx context.Context, run string) (answers.Facts, error)
	// Events waits as Hub.Events does.
	Events func(ctx context.Context, run string, after uint64) (api.Events, error)
	Order  func(ctx context.Context, run string, o rendezvous.Order) error
	// Check is the newest check of a run's nodes.
	Check func(ctx context.Context, run string) (netcheck.Picture, error)
	// Collect requests the stacks of all workers of a run. Stacks are the newest that were collected, as evidence.
	Collect func(ctx context.Context, run string) error
	Stacks  func(ctx context.Context, run string) (hang.Picture, error)
	// Profile opens the stream of a profile of one worker. from says whose wish it is.
	Profile func(ctx context.Context, run string, rank int, from string) (io.ReadCloser, error)
	// Bundle has all parts of the archive of a run.
	Bundle func(run string) bundle.Source
	// Machines are those with findings or marks; false: nothing is kept about machines.
	Machines func(ctx context.Context) (known marks.Known, kept bool)
}

// Own is the Source of a server in this process. machines is nil where nothing is kept about them.
func Own(s *service.Service, machines func() marks.Known) Source {
	return Source{
		Runs: func(context.Context) ([]api.RunStatus, error) { return s.Hub.Runs(false), nil },
		Facts: func(ctx context.Context, run string) (answers.Facts, error) {
			f, err := ownFacts(ctx, s, run)
			if machines != nil {
				f.Machines = machines()
			}
			return f, err
		},
		Events:  s.Hub.Events,
		Order:   func(_ context.Context, run string, o rendezvous.Order) error { return s.Hub.Order(run, o) },
		Check:   func(_ context.Context, run string) (netcheck.Picture, error) { return s.Checks.Picture(run) },
		Collect: func(ctx context.Context, run string) error { _, err := s.Hangs.Collect(ctx, run); return err },
		Stacks:  func(ctx context.Context, run string) (hang.Picture, error) { return s.Hangs.Picture(ctx, run, true) },
		Profile: func(_ context.Context, run string, rank int, from string) (io.ReadCloser, error) {
			return s.Streams.Profile(run, rank, profileTime, from)
		},
		Bundle: func(run string) bundle.Source { return ownBundle(s, run) },
		Machines: func(context.Context) (known marks.Known, kept bool) {
			if machines != nil {
				known = machines()
			}
			return known, machines != nil
		},
	}
}

// ownBundle has the same parts as bundle.Of.
func ownBundle(s *service.Service, run string) bundle.Source {
	return bundle.Source{Run: run, Judge: s.Hangs, Parts: []bundle.Part{
		{Name: "status.json", Get: func(context.Context) (any, error) {
			r, err := s.Hub.Run(run)
			return remote.Present(r), err
		}},
		{Name: "events.json", Get: func(ctx context.Context) (any, error) { return ownEvents(ctx, s, run) }},
		{Name: "verdict.json", Get: func(context.Context) (any, error) { return s.Verdict(run) }},
		{Name: "failures.json", Get: func(context.Context) (any, error) { return s.Failures(run) }},
		{Name: "checks.json", Get: func(context.Context) (any, error) { return s.Checks.Picture(run) }},
		{Name: "checkpoints.json", Get: func(context.Context) (any, error) { return s.Checkpoints.Summary(run), nil }},
		{Name: "hangs.json", Get: func(ctx context.Context) (any, error) { return s.Hangs.Picture(ctx, run, false) }},
	}}
}

// ownEvents are those that are kept. A run has events from its first join on.
func ownEvents(ctx context.Context, s *service.Service, run string) ([]api.Event, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	es, err := s.Hub.Events(ctx, run, 0)
	if errors.Is(err, context.DeadlineExceeded) {
		err = nil
	}
	return es.Events, err
}

func ownFacts(ctx context.Context, s *service.Service, run string) (f answers.Facts, err error) {
	f.Now = time.Now()
	if f.Run, err = s.Hub.Run(run); err != nil {
		return f, err
	}
	if f.Events, err = ownEvents(ctx, s, run); err != nil {
		return f, err
	}
	if v, err := s.Verdict(run); err == nil {
		f.Verdict = &v
	}
	f.Hang, _ = s.Hangs.Picture(ctx, run, false) // without reports there is none
	f.Keep(s.Checkpoints.Summary(run))
	return f, nil
}

// Elsewhere is the Source of a server in another process, which is asked over its API.
func Elsewhere(c *api.Client) Source {
	hangs, runs := remote.Hangs(c), fresh(c.Runs)
	return Source{
		Runs: runs,
		Facts: func(ctx context.Context, run string) (answers.Facts, error) {
			all, err := runs(ctx)
			i := slices.IndexFunc(all, func(r api.RunStatus) bool { return r.Run == run })
			if err == nil && i < 0 {
				err = fmt.Errorf("%w: %q", api.ErrUnknownRun, run)
			}
			if err != nil {
				return answers.Facts{}, err
			}
			return remote.Facts(ctx, c, answers.Facts{Now: time.Now(), Run: all[i]}, 0)
		},
		Events: c.Events, Order: c.Order,
		Check: func(ctx context.Context, run string) (p netcheck.Picture, err error) {
			err = c.Mounted(ctx, run, "checks", &p)
			return p, err
		},
		Collect: func(ctx context.Context, run string) error { _, err := hangs.Collect(ctx, run); return err },
		Stacks:  func(ctx context.Context, run string) (hang.Picture, error) { return hangs.Picture(ctx, run, true) },
		Profile: func(ctx context.Context, run string, rank int, _ string) (io.ReadCloser, error) {
			return remote.Profile(ctx, c, run, rank, profileTime)
		},
		Bundle: func(run string) bundle.Source { return bundle.Of(c, run) },
		Machines: func(ctx context.Context) (known marks.Known, kept bool) {
			err := c.Global(ctx, "nodes", nil, &known)
			return known, err == nil
		},
	}
}

// leastFresh is how long a list of runs is used at least.
const leastFresh = 100 * time.Millisecond

// fresh asks for the list of all runs, which is megabytes for 10,000 nodes, no more than a tenth of the time. Visitors
// that come meanwhile wait for the same answer.
func fresh(ask func(context.Context) ([]api.RunStatus, error)) func(context.Context) ([]api.RunStatus, error) {
	var mu sync.Mutex
	var until time.Time
	var runs []api.RunStatus
	return func(ctx context.Context) ([]api.RunStatus, error) {
		mu.Lock()
		defer mu.Unlock()
		if began := time.Now(); began.After(until) {
			all, err := ask(ctx)
			if err != nil {
				return nil, err
			}
			now := time.Now()
			runs, until = all, now.Add(max(leastFresh, 9*now.Sub(began)))
		}
		return slices.Clone(runs), nil
	}
}
