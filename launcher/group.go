package launcher

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/verdict"
)

// group is the workers of one epoch on this node.
type group struct {
	epoch      Epoch
	attempt    *logs.Attempt
	workers    []*worker
	path       string        // of the executed program
	meanwhile  *proc.Process // of --hold; nil: none
	sides      []*side       // side processes
	env        [][]string    // of the workers, by local rank; nil once all have been started
	left       int           // workers that have not exited
	succeeded  int           // workers that have exited with 0
	stopping   bool
	stopSignal syscall.Signal
	signaledAt atomic.Pointer[time.Time] // when stopSignal was sent; nil: not yet, though stopping
	hurry      context.CancelFunc        // ends the examination before the stop; nil without one
	oomKills   int64                     // of this container when the group started
	failures   []verdict.Failure
	reported   policy.Action // the strongest that the rendezvous has received
	timers     timers

	endWatch context.CancelFunc // of the parts' Run; nil without any
	watchers sync.WaitGroup
	faults   chan fault  // from the parts' Run
	again    atomic.Bool // workers are to follow these, as far as it is known
	fault    string      // why a part has ended the epoch
}

type worker struct {
	id    logs.WorkerID
	proc  *proc.Process
	out   *logs.Worker
	timer string // the file timer that it was killed for
}

// pids lists the workers' process ids by local rank.
func (g *group) pids() []int {
	pids := make([]int, len(g.workers))
	for i, w := range g.workers {
		pids[i] = w.proc.PID()
	}
	return pids
}

// exited is the event that a worker of a group has ended.
type exited struct {
	g *group
	w *worker
}

// drainBudget is how long the output of a failed worker is waited for: it ends at
// once unless a grandchild holds the pipe open.
const drainBudget = 50 * time.Millisecond

// onExit books one exit. The first one that is not a success decides the epoch.
func (a *Agent) onExit(e exited) {
	g, w := e.g, e.w
	g.left--
	exit := w.proc.Exit()
	info := ExitInfo{Worker: w.id, PID: w.proc.PID(), ExitCode: exit.Code, Stopped: g.signaledAt.Load() != nil}
	a.cfg.observe(info)
	if why := a.excuse(g, info); why != "" {
		a.failExcused(g, w, exit, why)
		return
	}
	switch {
	case g.stopping && exit.Code == 0:
	case g.stopping:
		a.failToo(g, w, exit)
	case a.letRun != nil:
		if g.left == 0 {
			a.stop(g, syscall.SIGTERM) // only orphans may be left
		}
	case exit.Code == 0:
		g.succeeded++
		a.oneSucceeded(g, w.id.Rank)
	default:
		a.failFirst(g, w, exit)
	}
}

// excuse returns why the end of a worker may be a fault of ours; "": it is not.
func (a *Agent) excuse(g *group, info ExitInfo) string {
	if a.cfg.Excuse == nil || g.stopping || a.letRun != nil {
		return ""
	}
	return a.cfg.Excuse(info.Worker.LocalRank, info.PID, info.ExitCode)
}

// failFirst acts on the first failure of an epoch, or on one that the others outlive.
func (a *Agent) failFirst(g *group, w *worker, exit proc.Exit) {
	w.out.Drain(drainBudget)
	f := a.failures.describe(g, w, exit)
	act := a.failures.decide(g, w, &f)
	if g.epoch.Rules.Tolerate && act != policy.Fail || g.beside(f, act) {
		a.tolerate(g, f, act)
		return
	}
	a.fail(g, f, act)
}

// failExcused is failFirst for an end that is not charged, and why.
func (a *Agent) failExcused(g *group, w *worker, exit proc.Exit, why string) {
	w.out.Drain(drainBudget)
	f := a.failures.describe(g, w, exit)
	a.log.Warn("a worker's end is not charged to the job", "rank", f.Rank, "why", why)
	f.Message = cmp.Or(f.Message, why)
	a.fail(g, f, policy.RestartFree)
}

// fail reports the first failure of the group and stops its siblings meanwhile.
func (a *Agent) fail(g *group, f verdict.Failure, act policy.Action) {
	g.failures = append(g.failures, f)
	attrs := []any{"rank", f.Rank, "local_rank", f.LocalRank, "pid", f.PID, "why", f.Reason()}
	if f.Policy != "" {
		attrs = append(attrs, "action", act.String(), "policy", f.Policy)
	}
	a.log.Warn("worker failed", attrs...)
	a.report(g, act)
	a.stopFailed(g, f, "")
}

// failToo books a failure after the first one. A worker that ended by itself may have failed in a way that no restart
// helps, while the first failure was only its consequence.
func (a *Agent) failToo(g *group, w *worker, exit proc.Exit) {
	f := a.failures.describe(g, w, exit)
	if g.blamed(f) {
		return
	}
	act := policy.RestartCharged
	if !f.Stopped {
		act = a.failures.decide(g, w, &f)
	}
	if act == policy.Fail && g.beside(f, act) {
		act = policy.RestartCharged
	}
	g.failures = append(g.failures, f)
	if act > max(g.reported, policy.RestartCharged) {
		a.log.Warn("another worker had failed as well", "rank", f.Rank, "why", f.Reason(), "action", act.String(),
			"policy", f.Policy)
		a.report(g, act)
	}
}

// report sends the failures so far to the rendezvous.
func (a *Agent) report(g *group, act policy.Action) {
	g.reported = act
	g.failed(act)
	d, fs := g.epoch.Directive, own(g.failures)
	a.bg.call("report the failure", func(ctx context.Context) error { return a.cfg.Rendezvous.Failing(ctx, d, act, fs) })
}

// oneSucceeded reports the success of a worker: that of the node, if no other worker is left.
func (a *Agent) oneSucceeded(g *group, rank int) {
	d := g.epoch.Directive
	switch {
	case g.left == 0:
		a.succeed(g)
	case d.Rules.Success == "rank0" && rank == 0, d.Rules.Success == "any" && g.succeeded == 1:
		a.bg.call("report success", func(ctx context.Context) error { return a.cfg.Rendezvous.RankSucceeded(ctx, d, rank) })
	}
}

// beside reports whether the run can succeed without the failed worker, so that the others may outlive it. They do not
// if a rule forbids it.
func (g *group) beside(f verdict.Failure, act policy.Action) bool {
	switch r := g.epoch.Rules; {
	case !r.Alone || act == policy.Fail && f.Policy != "":
		return false
	case r.Success == "rank0":
		return f.Rank != 0
	}
	return g.epoch.Place.RankBase != 0 // node 0 is the first one that has workers
}

// tolerate reports the failure of a worker that the others outlive, or may outlive if the run can succeed without it.
func (a *Agent) tolerate(g *group, f verdict.Failure, act policy.Action) {
	g.failures = append(g.failures, f)
	what := "worker failed; the others go on"
	if !g.epoch.Rules.Tolerate {
		what = "worker failed; the rendezvous decides whether all restart or the others go on"
	}
	a.log.Warn(what, "rank", f.Rank, "local_rank", f.LocalRank, "pid", f.PID, "why", f.Reason(), "left", g.left)
	if g.left == 0 && g.succeeded > 0 && g.epoch.Rules.Tolerate {
		a.succeed(g)
		return
	}
	d, fs, left := g.epoch.Directive, own([]verdict.Failure{f}), g.left
	a.bg.call("report the failure", func(ctx context.Context) error {
		return a.cfg.Rendezvous.RankFailed(ctx, d, act, fs, left)
	})
	if left == 0 {
		a.stop(g, syscall.SIGTERM) // only orphans may be left
	}
}

func (a *Agent) succeed(g *group) {
	a.success = true
	a.cfg.observe(SuccessInfo{g.epoch})
	a.stop(g, syscall.SIGTERM) // only orphans may be left
	d := g.epoch.Directive
	a.bg.call("report success", func(ctx context.Context) error { return a.cfg.Rendezvous.Success(ctx, d) })
}

// stop ends the group in the background; the loop is notified through a.stopped.
func (a *Agent) stop(g *group, sig syscall.Signal) { a.stopAfter(g, sig, nil) }

// stopAfter is stop with something to be done before the signal; nil is nothing.
func (a *Agent) stopAfter(g *group, sig syscall.Signal, first func()) {
	if g.stopping {
		return
	}
	g.stopping, g.stopSignal = true, sig
	if first == nil {
		g.signaledNow()
	}
	g.timers.end()
	if g.endWatch != nil {
		g.endWatch()
	}
	a.cfg.Rendezvous.Running(nil)
	ps := make([]*proc.Process, len(g.workers))
	for i, w := range g.workers {
		ps[i] = w.proc
	}
	if g.meanwhile != nil {
		ps = append(ps, g.meanwhile)
	}
	grace, kept := a.leaver.grace(), a.success || a.letRun != nil
	a.bg.Go(func() {
		if first != nil {
			first()
			g.signaledNow()
		}
		force, end := a.patience(g)
		err := a.cfg.Processes.Stop(ps, sig, grace, force)
		end()
		for _, w := range g.workers {
			w.out.Drain(drainBudget)
		}
		g.watchers.Wait()
		if !kept {
			err = errors.Join(err, endSides(&a.cfg, g.sides, grace, a.bg.force))
			g.sides = nil
		}
		post(a.bg, a.stopped, stopResult{g, err})
	})
}

func (g *group) signaledNow() {
	t := now()
	g.signaledAt.Store(&t)
}

type stopResult struct {
	g   *group
	err error
}
