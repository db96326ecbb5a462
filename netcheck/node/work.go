package node

import (
	"context"
	"fmt"
	"time"

	"dlrover-run/netcheck"
)

// work is an assignment that is being carried out.
type work struct {
	a      netcheck.Assignment
	cancel context.CancelFunc
	ready  chan []string
	done   chan netcheck.Result // within a second of the end of its time, or of cancel
	after  *time.Timer          // until it has lasted for longer than most
	long   bool                 // it has
}

// begin carries out a. It cancels the work after a.Left.
func begin(ctx context.Context, cfg *Config, a netcheck.Assignment) *work {
	w := &work{a: a, ready: make(chan []string, 1), done: make(chan netcheck.Result, 1), after: time.NewTimer(listenAfter)}
	if a.Left > 0 {
		ctx, w.cancel = context.WithTimeout(ctx, a.Left)
	} else {
		ctx, w.cancel = context.WithCancel(ctx)
	}
	result := make(chan netcheck.Result, 1)
	go func() { result <- carryOut(ctx, cfg, a, w.listening(ctx)) }()
	go w.await(ctx, cfg, result)
	return w
}

// await passes on the result, or reports after some grace that there is none.
func (w *work) await(ctx context.Context, cfg *Config, result <-chan netcheck.Result) {
	defer w.cancel()
	defer w.after.Stop()
	var res netcheck.Result
	select {
	case res = <-result:
	case <-ctx.Done():
		late := time.NewTimer(grace)
		defer late.Stop()
		select {
		case res = <-result:
		case <-late.C:
			what := fmt.Sprintf("%s of a test with %s", w.a.Duty, w.a.Peer.Name)
			cfg.Log.Warn("part of a node check does not return; it is left behind", "what", what)
			res = netcheck.Result{Class: netcheck.Own, Text: what + " did not return when its time was over"}
		}
	}
	res.Test = w.a.Test
	res.Findings = cfg.noticed()
	w.done <- res
}

// listening returns the callback of the serving end of a test, for the time when it listens.
func (w *work) listening(ctx context.Context) func([]string) error {
	return func(addrs []string) error {
		select {
		case w.ready <- addrs:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func carryOut(
	ctx context.Context, cfg *Config, a netcheck.Assignment, ready func([]string) error,
) netcheck.Result {
	torch := a.Torch || a.Duty == netcheck.Compute || a.Duty == netcheck.Join
	switch {
	case torch && cfg.Torch == nil:
		return own("PyTorch is not used on this node")
	case !torch && cfg.Prober == nil:
		return own("the network is not tested from this node")
	case a.Duty == netcheck.Compute:
		return cfg.Torch.Compute(ctx, a)
	case a.Duty == netcheck.Join:
		return cfg.Torch.Join(ctx, a, ready)
	case a.Duty == netcheck.Serve && torch:
		return cfg.Torch.Serve(ctx, a, ready)
	case a.Duty == netcheck.Serve:
		return cfg.Prober.Serve(ctx, a, ready)
	case a.Duty == netcheck.Dial && torch:
		return cfg.Torch.Dial(ctx, a)
	case a.Duty == netcheck.Dial:
		return cfg.Prober.Dial(ctx, a)
	}
	return own(fmt.Sprintf("this version knows no duty %.40q; use one version on all nodes", a.Duty))
}

func own(text string) netcheck.Result { return netcheck.Result{Class: netcheck.Own, Text: text} }

// Of a nil work nothing ever comes.

func (w *work) listens() <-chan []string {
	if w == nil {
		return nil
	}
	return w.ready
}

func (w *work) ended() <-chan netcheck.Result {
	if w == nil {
		return nil
	}
	return w.done
}

func (w *work) lasts() <-chan time.Time {
	if w == nil {
		return nil
	}
	return w.after.C
}
