package bundle

import (
	"context"
	"errors"
	"fmt"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/report"
	"dlrover-run/hang/serve"
)

// Judge is the part of serve.Transport that finds stacks.
type Judge interface {
	Picture(ctx context.Context, run string, evidence bool) (hang.Picture, error)
	Collect(ctx context.Context, run string) (uint64, error)
}

// AbsentError is why a run has no stacks; its server answers.
type AbsentError struct{ error }

const (
	// collectTime is the time limit for the stacks of the nodes: they have 15 s.
	collectTime = 25 * time.Second
	askAgainFor = 200 * time.Millisecond // interval of the looks for them
)

// Collect requests the stacks of the workers of all nodes of a run, and waits for the answers.
func Collect(ctx context.Context, judge Judge, run string, now time.Time) (report.Incident, error) {
	collection, err := judge.Collect(ctx, run)
	if err == nil {
		err = await(ctx, judge, run, collection)
	}
	var p hang.Picture
	if err == nil {
		p, err = judge.Picture(ctx, run, true)
	}
	switch {
	case err != nil:
		return report.Incident{}, NoHangs(run, err)
	case len(p.Evidence) == 0:
		return report.Incident{}, &AbsentError{fmt.Errorf("no node of run %q has answered: "+
			"its launchers were given --hang=off, or are older than this program, or its workers do not run", run)}
	}
	return report.Of(run, now, p), nil
}

// NoHangs explains why the judge does not know a run that its server keeps.
func NoHangs(run string, err error) error {
	if !errors.Is(err, serve.ErrUnknownRun) {
		return err
	}
	return &AbsentError{fmt.Errorf("nothing is known of hangs of run %q: its workers do not run, or run for less than a "+
		"minute; or its launchers were given --hang=off", run)}
}

// await returns when all nodes have answered, or their time is over.
func await(ctx context.Context, judge Judge, run string, collection uint64) error {
	asking, cancel := context.WithTimeout(ctx, collectTime)
	defer cancel()
	for {
		p, err := judge.Picture(asking, run, false)
		if err != nil || p.Collected || p.Collection != collection {
			return err // a newer one has all that this one would have
		}
		select {
		case <-time.After(askAgainFor):
		case <-asking.Done():
			return ctx.Err()
		}
	}
}
