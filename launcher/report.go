package launcher

import (
	"cmp"
	"context"
	"slices"
	"time"

	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/verdict"
)

// reporter books the ends of a group's workers, and reports them to the rendezvous.
type reporter struct {
	cfg      *Config
	bg       *background
	failures *failures
}

// aftermath is the consequence of an end for the whole group; zero is none.
type aftermath struct {
	succeeded bool             // all workers have succeeded
	failed    *verdict.Failure // the group is to be stopped for this failure
	stop      bool             // the group is to be stopped: only orphans may be left
}

// drainBudget is how long the output of a failed worker is waited for: it ends at
// once unless a grandchild holds the pipe open.
const drainBudget = 50 * time.Millisecond

// exited books one exit. The first one that is not a success decides the epoch. letRun: the job has succeeded, and its
// workers run to their end.
func (r *reporter) exited(g *group, w *worker, letRun bool) aftermath {
	g.left--
	exit := w.proc.Exit()
	info := ExitInfo{Worker: w.id, PID: w.proc.PID(), ExitCode: exit.Code, Stopped: g.signaledAt.Load() != nil}
	r.cfg.observe(info)
	if why := r.excuse(g, info, letRun); why != "" {
		return r.failExcused(g, w, exit, why)
	}
	switch {
	case g.stopping && exit.Code == 0:
		return aftermath{}
	case g.stopping:
		r.failToo(g, w, exit)
		return aftermath{}
	case letRun:
		return aftermath{stop: g.left == 0}
	case exit.Code == 0:
		g.succeeded++
		return r.oneSucceeded(g, w.id.Rank)
	}
	return r.failFirst(g, w, exit)
}

// excuse returns why the end of a worker may be a fault of ours; "": it is not.
func (r *reporter) excuse(g *group, info ExitInfo, letRun bool) string {
	if r.cfg.Excuse == nil || g.stopping || letRun {
		return ""
	}
	return r.cfg.Excuse(info.Worker.LocalRank, info.PID, info.ExitCode)
}

// failFirst acts on the first failure of an epoch, or on one that the others outlive.
func (r *reporter) failFirst(g *group, w *worker, exit proc.Exit) aftermath {
	w.out.Drain(drainBudget)
	f := r.failures.describe(g, w, exit)
	act := r.failures.decide(g, w, &f)
	if g.epoch.Rules.Tolerate && act != policy.Fail || g.beside(f, act) {
		return r.tolerate(g, f, act)
	}
	return r.fail(g, f, act)
}

// failExcused is failFirst for an end that is not charged, and why.
func (r *reporter) failExcused(g *group, w *worker, exit proc.Exit, why string) aftermath {
	w.out.Drain(drainBudget)
	f := r.failures.describe(g, w, exit)
	r.cfg.Logger.Warn("a worker's end is not charged to the job", "rank", f.Rank, "why", why)
	f.Message = cmp.Or(f.Message, why)
	return r.fail(g, f, policy.RestartFree)
}

// fail reports the first failure of the group. Its workers are to be stopped meanwhile.
func (r *reporter) fail(g *group, f verdict.Failure, act policy.Action) aftermath {
	g.failures = append(g.failures, f)
	attrs := []any{"rank", f.Rank, "local_rank", f.LocalRank, "pid", f.PID, "why", f.Reason()}
	if f.Policy != "" {
		attrs = append(attrs, "action", act.String(), "policy", f.Policy)
	}
	r.cfg.Logger.Warn("worker failed", attrs...)
	r.report(g, act)
	return aftermath{failed: &f}
}

// failToo books a failure after the first one. A worker that ended by itself may have failed in a way that no restart
// helps, while the first failure was only its consequence.
func (r *reporter) failToo(g *group, w *worker, exit proc.Exit) {
	f := r.failures.describe(g, w, exit)
	if g.blamed(f) {
		return
	}
	act := policy.RestartCharged
	if !f.Stopped {
		act = r.failures.decide(g, w, &f)
	}
	if act == policy.Fail && g.beside(f, act) {
		act = policy.RestartCharged
	}
	g.failures = append(g.failures, f)
	if act > max(g.reported, policy.RestartCharged) {
		r.cfg.Logger.Warn("another worker had failed as well", "rank", f.Rank, "why", f.Reason(), "action", act.String(),
			"policy", f.Policy)
		r.report(g, act)
	}
}

// report sends the failures so far to the rendezvous.
func (r *reporter) report(g *group, act policy.Action) {
	g.reported = act
	g.failed(act)
	d, fs := g.epoch.Directive, own(g.failures)
	r.bg.call("report the failure", func(ctx context.Context) error { return r.cfg.Rendezvous.Failing(ctx, d, act, fs) })
}

// oneSucceeded reports the success of a worker: that of the node, if no other worker is left.
func (r *reporter) oneSucceeded(g *group, rank int) aftermath {
	d := g.epoch.Directive
	switch {
	case g.left == 0:
		return aftermath{succeeded: true}
	case d.Rules.Success == "rank0" && rank == 0, d.Rules.Success == "any" && g.succeeded == 1:
		r.bg.call("report success", func(ctx context.Context) error { return r.cfg.Rendezvous.RankSucceeded(ctx, d, rank) })
	}
	return aftermath{}
}

// tolerate reports the failure of a worker that the others outlive, or may outlive if the run can succeed without it.
func (r *reporter) tolerate(g *group, f verdict.Failure, act policy.Action) aftermath {
	g.failures = append(g.failures, f)
	what := "worker failed; the others go on"
	if !g.epoch.Rules.Tolerate {
		what = "worker failed; the rendezvous decides whether all restart or the others go on"
	}
	r.cfg.Logger.Warn(what, "rank", f.Rank, "local_rank", f.LocalRank, "pid", f.PID, "why", f.Reason(), "left", g.left)
	if g.left == 0 && g.succeeded > 0 && g.epoch.Rules.Tolerate {
		return aftermath{succeeded: true}
	}
	d, fs, left := g.epoch.Directive, own([]verdict.Failure{f}), g.left
	r.bg.call("report the failure", func(ctx context.Context) error {
		return r.cfg.Rendezvous.RankFailed(ctx, d, act, fs, left)
	})
	return aftermath{stop: left == 0}
}

// fault handles a failure from outside as the failure of a worker.
func (r *reporter) fault(g *group, f fault, letRun bool) aftermath {
	if g.stopping {
		ignoreFault(r.cfg.Logger, f)
		return aftermath{}
	}
	if letRun { // no failure counts, but a hung worker does not end
		r.cfg.Logger.Warn("stopping what was left to run", "part", f.part, "why", f.failure.Message)
		return aftermath{stop: true}
	}
	if f.action == policy.Succeed {
		f.action = policy.RestartCharged
	}
	r.failures.complete(g, &f.failure)
	f.failure.Permanent = f.action == policy.Fail
	g.failures, g.fault = append(g.failures, f.failure), f.failure.Reason()
	r.cfg.Logger.Warn("ending the epoch as failed", "part", f.part, "rank", f.failure.Rank, "local_rank",
		f.failure.LocalRank, "pid", f.failure.PID, "why", g.fault, "action", f.action.String())
	r.cfg.observe(FaultInfo{g.epoch, f.part, f.failure, f.action})
	r.report(g, f.action)
	return aftermath{failed: &f.failure}
}

// noWorld reports that the workers of e cannot be started.
func (r *reporter) noWorld(e Epoch, err error) verdict.Failure {
	f := r.failures.ofWorld(e, err)
	r.cfg.Logger.Error("cannot start the workers", "why", f.Message)
	r.bg.call("report the failure", func(ctx context.Context) error {
		return r.cfg.Rendezvous.Failing(ctx, e.Directive, policy.RestartCharged, []verdict.Failure{f.Compact()})
	})
	return f
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

// blamed reports whether f is only the end of a worker that was stopped because a part had found it to have failed.
func (g *group) blamed(f verdict.Failure) bool {
	return f.Stopped && g.fault != "" && slices.ContainsFunc(g.failures,
		func(o verdict.Failure) bool { return o.Rank == f.Rank })
}
