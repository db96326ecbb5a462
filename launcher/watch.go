package launcher

import (
	"cmp"
	"context"
	"log/slog"
	"time"

	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/verdict"
)

// partGrace is how long a part may take to return after its context has ended.
const partGrace = time.Second

// attend calls f in a goroutine of its own and waits for it. An f that has not returned partGrace after ctx ended is
// left behind: it can hold up neither the workers nor the end of the launcher.
func (c *Config) attend(ctx context.Context, part string, f func()) {
	c.attendFor(ctx, partGrace, part, f)
}

// attendFor is attend with another grace.
func (c *Config) attendFor(ctx context.Context, grace time.Duration, part string, f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
		return
	case <-ctx.Done():
	}
	late := time.NewTimer(grace)
	defer late.Stop()
	select {
	case <-done:
	case <-late.C:
		c.Logger.Warn("a part of the launcher does not return when it is told to; going on without it", "part", part)
	}
}

// fault is a failure that a part has found.
type fault struct {
	part    string
	failure verdict.Failure
	action  policy.Action
}

// control is the Control of one part in one epoch.
type control struct {
	log    *slog.Logger
	ctx    context.Context // ends with the epoch
	part   string
	faults chan<- fault // of the group, with room for the one that counts
	// workers are the group's, which are all there before any Run.
	workers []*worker
}

// Output implements Control.
func (c *control) Output(localRank int) string {
	if localRank < 0 || localRank >= len(c.workers) {
		return ""
	}
	stdout, stderr := c.workers[localRank].out.Tail()
	return cmp.Or(tailText(stderr), tailText(stdout))
}

// Fail implements Control.
func (c *control) Fail(f verdict.Failure, act policy.Action) {
	if c.ctx.Err() == nil {
		select {
		case c.faults <- fault{c.part, f, act}:
			return
		default:
		}
	}
	ignoreFault(c.log, fault{c.part, f, act})
}

func ignoreFault(log *slog.Logger, f fault) {
	log.Debug("a failure of an epoch that is over, or has failed before, is ignored", "part", f.part,
		"why", f.failure.Message)
}

// faultsFound carries the findings of the parts that watch a group; nil, which is never ready, without any.
func (g *group) faultsFound() <-chan fault {
	if g == nil {
		return nil
	}
	return g.faults
}
