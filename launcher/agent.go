package launcher

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"syscall"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/verdict"
)

// leaveBudget bounds the good-bye: the daemon may be gone.
const leaveBudget = 3 * time.Second

// Agent runs one node's part of a job: it receives the events, and carries out their consequences. Its components own
// the state of one task each, and do not know the agent.
type Agent struct {
	cfg Config
	log *slog.Logger
	bg  *background

	checks   checks  // before this node gets workers
	worlds   worlds  // before their start
	around   around  // what precedes and follows them
	starter  starter // of workers
	holder   holder  // in place of workers
	reporter reporter
	stopper  stopper
	kept     keptSides
	leaver   leaver

	exits     chan exited
	sideExits chan sideExit
	notices   <-chan job.Notice // nil if nothing wants them

	last    Directive  // the newest epoch with started workers
	led     Directive  // the newest epoch that this node had to lead
	group   *group     // nil when nothing of a group is left
	pending *Directive // to be applied when the group is gone or the check is over
	letRun  *Directive // the Done of a job that lets the workers of this node run to their end
	fails   []verdict.Failure
	success bool // the workers of this epoch succeeded; the others are waited for
	result  *Result

	unknown unknownKinds
}

func now() time.Time { return time.Now() }

// New returns an Agent that has not started anything.
func New(cfg Config) (*Agent, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	a := &Agent{
		cfg: cfg, log: cfg.Logger, bg: newBackground(), exits: make(chan exited), sideExits: make(chan sideExit),
	}
	c, bg := &a.cfg, a.bg
	a.checks = checks{cfg: c, bg: bg, done: make(chan *check)}
	a.worlds = worlds{cfg: c, bg: bg, fetched: make(chan *fetch)}
	a.around = around{c, bg, make(chan *group), make(chan struct{})}
	a.starter = starter{c, bg, a.exits, a.sideExits}
	a.holder = holder{cfg: c, bg: bg}
	a.reporter = reporter{c, bg, newFailures(c)}
	a.stopper = stopper{c, bg, make(chan stopResult)}
	a.kept = keptSides{cfg: c, bg: bg, ended: make(chan error)}
	a.leaver = leaver{cfg: c, bg: bg, announced: make(chan error)}
	if len(cfg.OnNotice) > 0 {
		a.notices = cfg.Rendezvous.Notices()
	}
	return a, nil
}

// Run follows the rendezvous until the job or this node's part in it is over. On
// return no worker is left. It may be called once.
func (a *Agent) Run() Result {
	for a.result == nil {
		a.next()
	}
	if err := a.kept.end(a.result.Reason == policy.Success, a.leaver.grace); err != nil {
		a.result.Err = errors.Join(a.result.Err, err)
	}
	a.bg.end()
	a.holder.close()
	a.result.Signal = a.leaver.signal
	return *a.result
}

// next handles one thing that happened.
func (a *Agent) next() {
	select {
	case d, ok := <-a.cfg.Rendezvous.Directives():
		if !ok {
			a.expelled(a.cfg.Rendezvous.Err())
			return
		}
		a.onDirective(d)
	case e := <-a.exits:
		a.onExit(e)
	case s := <-a.stopper.stopped:
		a.onStopped(s)
	case e := <-a.sideExits:
		a.onSideExit(e)
	case err := <-a.kept.ended:
		a.onSidesGone(err)
	case sig := <-a.cfg.Signals:
		a.onSignal(sig)
	case err := <-a.leaver.announced:
		a.onAnnounced(err)
	case why := <-a.cfg.Leaves:
		a.onLeave(why)
	case r := <-a.cfg.Timers:
		a.group.onTimer(r, a.log)
	case <-a.group.alarm():
		a.group.timers.onAlarm(&a.cfg)
	case f := <-a.group.faultsFound():
		a.onFault(f)
	case c := <-a.checks.done:
		a.onChecked(c)
	case f := <-a.worlds.fetched:
		a.onWorld(f)
	case g := <-a.around.passed:
		a.start(g)
	case <-a.around.ended:
		a.ended()
	case n, ok := <-a.notices:
		if !ok { // it closes with the directives
			a.notices = nil
			return
		}
		a.cfg.notify(n)
	case err := <-a.bg.errs:
		a.expelled(err)
	}
}

// onDirective applies a duty, after the workers of another epoch have ended, or the check of this node.
func (a *Agent) onDirective(d Directive) {
	if a.unknown.strange(d.Kind, a.log) || d.Kind == job.Run && same(d, a.last) {
		return // a daemon that was started again confirms the running or finished workers
	}
	if d.Confirms {
		d.Kind = job.Wait
	}
	if d.Leave != "" {
		a.onLeave("drained: " + d.Leave)
		if a.group == nil {
			return
		}
	}
	waits := a.kept.drop(d, a.leaver.grace())
	if a.group == nil && a.checks.now == nil && !waits {
		a.apply(d)
		return
	}
	a.pending = &d
	switch {
	case waits:
	case a.checks.now != nil:
		a.checks.now.cancel()
	case !a.group.stopping && d.Kind == job.Done && d.Rules.LetRun && a.group.left > 0:
		a.letRun = &d
		a.log.Info("the job has succeeded; the workers that are left run to their end, which does not count",
			"left", a.group.left)
	case !a.group.stopping:
		cause := d.Cause.Text
		if d.Kind == job.Done {
			cause = cmp.Or(cause, "the job has succeeded")
		}
		a.success = d.Kind == job.Done && len(a.group.workers) == 0 // side processes may end by themselves
		a.log.Info("stopping the workers", "round", d.Round, "epoch", d.Epoch, "cause", cause)
		a.stopFor(a.group, d)
	}
}

// stopFor stops a group because of a directive.
func (a *Agent) stopFor(g *group, d Directive) {
	g.again.Store(d.restarts() && !a.leaver.leaving())
	if d.Cause.Kind == job.CauseFailure {
		a.stopper.stopFailed(g, a.stopOrder(syscall.SIGTERM), verdict.Failure{}, d.Cause.Text)
		return
	}
	if d.Cause.Kind == job.CauseLeave && !g.stopping { // all nodes save in one step
		a.cfg.stopParts(g, a.stopRequest(g, true))
	}
	if a.leaver.leaving() {
		a.stop(g, a.leaver.signal)
		return
	}
	a.stop(g, syscall.SIGTERM)
}

// onExit books the end of a worker.
func (a *Agent) onExit(e exited) {
	a.follow(e.g, a.reporter.exited(e.g, e.w, a.letRun != nil))
}

// onFault handles a failure that a part has found in the present group.
func (a *Agent) onFault(f fault) {
	a.follow(a.group, a.reporter.fault(a.group, f, a.letRun != nil))
}

// follow carries out the consequence of an end.
func (a *Agent) follow(g *group, end aftermath) {
	switch {
	case end.succeeded:
		a.succeed(g)
	case end.failed != nil:
		a.stopper.stopFailed(g, a.stopOrder(syscall.SIGTERM), *end.failed, "")
	case end.stop:
		a.stop(g, syscall.SIGTERM)
	}
}

func (a *Agent) succeed(g *group) {
	a.success = true
	a.cfg.observe(SuccessInfo{g.epoch})
	a.stop(g, syscall.SIGTERM) // only orphans may be left
	d := g.epoch.Directive
	a.bg.call("report success", func(ctx context.Context) error { return a.cfg.Rendezvous.Success(ctx, d) })
}

func (a *Agent) stop(g *group, sig syscall.Signal) { a.stopper.stop(g, a.stopOrder(sig)) }

func (a *Agent) stopOrder(sig syscall.Signal) stopOrder {
	return stopOrder{signal: sig, grace: a.leaver.grace(), keepSides: a.success || a.letRun != nil}
}

func same(a, b Directive) bool {
	return a.Term == b.Term && a.Round == b.Round && a.Epoch == b.Epoch
}

// onStopped: nothing of the group is left.
func (a *Agent) onStopped(s stopResult) {
	for s.err == nil && s.g.left > 0 {
		a.onExit(<-a.exits) // all have ended; the news is on its way
	}
	a.fails = s.g.failures
	a.kept.list = s.g.sides
	if s.g.attempt != nil {
		s.g.attempt.Close()
	}
	a.cfg.stopParts(s.g, a.stopRequest(s.g, false))
	if s.err != nil {
		a.group = nil
		a.unusable(fmt.Errorf("stop the workers: %w", s.err))
		return
	}
	if s.g.begun {
		a.cfg.observe(StopInfo{Epoch: s.g.epoch})
	}
	if !a.around.after(s.g, a.stopRequest(s.g, false), a.success || a.letRun != nil, &a.leaver) {
		a.ended()
	}
}

// ended goes on when nothing of the group is left to do.
func (a *Agent) ended() {
	a.group = nil
	if a.leaver.leaving() && a.letRun == nil {
		a.endLeft()
		return
	}
	a.applyPending()
}

// applyPending applies the directive that had to wait, and reports whether there is one.
func (a *Agent) applyPending() bool {
	d := a.pending
	if d == nil {
		return false
	}
	a.pending = nil
	a.apply(*d)
	return true
}

func (a *Agent) onSidesGone(err error) {
	a.kept.forget()
	if err != nil {
		a.unusable(unendedSides(err))
		return
	}
	a.applyPending()
}

// unusable ends this node's part because workers have survived SIGKILL, as in an uninterruptible wait. They still hold
// the node's devices, memory and ports, so that no other launcher of the node can do better.
func (a *Agent) unusable(err error) {
	a.end(Result{Reason: policy.Unclassified, Blame: policy.OwnHardware, Err: err})
	if a.leaver.leaving() {
		return // the job goes on nowhere, or elsewhere
	}
	ctx, cancel := context.WithTimeout(a.bg.ctx, leaveBudget)
	defer cancel()
	if barErr := a.cfg.Rendezvous.Bar(ctx, text.Clip(err.Error(), maxReason)); barErr != nil {
		a.log.Warn("cannot bar this node, whose workers do not end", "err", barErr)
	} else {
		a.log.Error("this node is barred until somebody unbars it: its workers do not end", "err", err)
	}
}

func (a *Agent) stopRequest(g *group, early bool) StopRequest {
	r := StopRequest{Epoch: g.epoch, Reason: a.whyStopped(g), Early: early, Leaving: a.leaver.leaving()}
	if a.pending != nil {
		r.CauseKind = a.pending.Cause.Kind
	}
	return r
}

// whyStopped returns in a few words why the workers have ended.
func (a *Agent) whyStopped(g *group) string {
	switch {
	case a.success || a.letRun != nil && g.left == 0:
		return "the workers have ended"
	case a.leaver.leaving():
		return a.leaver.why
	case a.pending != nil && a.pending.Cause.Text != "":
		return a.pending.Cause.Text
	case a.pending != nil && a.pending.Kind == job.Done:
		return "the job has succeeded"
	case g.fault != "":
		return g.fault
	}
	return "a worker failed"
}

// apply carries out a duty on a node without workers.
func (a *Agent) apply(d Directive) {
	a.worlds.drop()
	switch d.Kind {
	case job.Wait:
		a.wait(d)
	case job.Lead:
		a.lead(d)
	case job.Run:
		a.run(d)
	case job.Check:
		a.checks.start(d)
	case job.Bar:
		if a.checks.bar(d) {
			a.leaveBarred()
		}
	case job.Stop:
		a.rejoin(d)
	case job.Done:
		if d.Cause.Kind == job.CauseEnded {
			a.log.Warn(d.Cause.Text)
		}
		a.leave(d, "done")
	case job.Fail:
		a.leave(d, "the job failed")
	}
}

// onChecked reports the answer, unless something else is to be done by now.
func (a *Agent) onChecked(c *check) {
	a.checks.finished(c)
	if !a.applyPending() {
		a.checks.report(c.answer)
	}
}

func (a *Agent) wait(d Directive) {
	a.checks.unbar()
	if _, ordered := orderReason(d.Cause.Kind); ordered {
		a.log.Warn("waiting; no workers are started for now", "cause", d.Cause.Text, "kind", d.Cause.Kind)
		return
	}
	if d.Cause.Kind == job.CauseFailure || d.Cause.Kind == job.CauseBudget {
		a.log.Warn("the job is held after a failure; to go on: dlroverctl resume, to end it: dlroverctl stop",
			"cause", d.Cause.Text)
		return
	}
	if d.Cause.Text != "" {
		a.log.Warn("still waiting for the other nodes", "cause", d.Cause.Text)
		return
	}
	level := slog.LevelDebug
	if a.last.Round == 0 {
		level = slog.LevelInfo
	}
	a.log.Log(a.bg.ctx, level, "waiting for the other nodes")
}

// lead makes the store fresh before anyone starts a worker.
func (a *Agent) lead(d Directive) {
	a.checks.unbar()
	a.cfg.Store.Reset(d.follows(a.led))
	a.led = d
	a.bg.call("report ready", func(ctx context.Context) error {
		return a.cfg.Rendezvous.Ready(ctx, d, a.cfg.Addr, a.cfg.Store.Port())
	})
}

func (a *Agent) run(d Directive) {
	a.checks.unbar()
	a.last, a.fails, a.success = d, nil, false
	if a.cfg.NeedsWorld {
		a.worlds.fetch(d)
		return
	}
	a.begin(Epoch{Directive: d})
}

func (a *Agent) onWorld(f *fetch) {
	if f != a.worlds.now {
		return
	}
	a.worlds.drop()
	if f.err == nil {
		a.begin(f.epoch)
		return
	}
	a.fails = append(a.fails, a.reporter.noWorld(f.epoch, f.err))
}

// begin starts the workers of an epoch, once Config.Before has passed.
func (a *Agent) begin(e Epoch) {
	if e.Hold {
		a.hold(e)
		return
	}
	a.group = &group{epoch: e}
	if a.cfg.Before == nil {
		a.start(a.group)
		return
	}
	a.cfg.Rendezvous.Running(&e.Directive)
	a.around.before(a.group)
}

// start is begin for a group without Before, or one that has passed or failed by now.
func (a *Agent) start(g *group) {
	if g.stopping {
		return
	}
	if g.before != nil && g.before.failed != nil {
		a.follow(g, a.reporter.notBegun(g, *g.before.failed))
		return
	}
	g.begun = true
	err := a.starter.group(g, a.cfg.startParts(g.epoch))
	if outOfFiles(err) {
		a.expelled(noFiles(err))
		return
	}
	if err != nil {
		g.failures = append(g.failures, a.reporter.failures.cannotStart(g, err))
		a.log.Error("cannot start a worker", "err", err)
		a.reporter.report(g, answerTo(err))
		a.stop(g, syscall.SIGTERM)
		return
	}
	a.cfg.Rendezvous.Running(&g.epoch.Directive)
	a.cfg.observe(StartInfo{Epoch: g.epoch, PIDs: g.pids(), Env: g.env})
	g.env = nil
	a.starter.log(g)
	a.starter.runParts(g)
}

func (a *Agent) rejoin(d Directive) {
	fs := own(a.fails)
	a.success = false
	a.bg.call("rejoin", func(ctx context.Context) error {
		if err := a.checks.reportDoubt(); err != nil {
			return err
		}
		return a.cfg.Rendezvous.Rejoin(ctx, d, fs)
	})
}

// maxTime bounds the account of a run's time, in bytes.
const maxTime = 1000

// leave signs this node off and ends with the job's verdict.
func (a *Agent) leave(d Directive, reason string) {
	ctx, cancel := context.WithTimeout(a.bg.ctx, leaveBudget)
	defer cancel()
	ev, err := a.cfg.Rendezvous.Leave(ctx, reason, own(a.fails))
	if err != nil {
		a.log.Debug("leave", "err", err)
	}
	if ev.Time != "" {
		a.log.Info(text.Line(ev.Time, maxTime))
	}
	if d.Kind == job.Done {
		a.end(Result{Reason: policy.Success})
		return
	}
	ev.Failures = merge(ev.Failures, a.fails)
	if d.Cause.Kind == job.CauseHang {
		ev.Hung = cmp.Or(ev.Hung, d.Cause.Text)
	}
	a.end(outcome{d.Cause, verdict.Judge(ev), a.fails, a.checks.failed}.result())
}

// leaveBarred ends this node's part of the job for its check. The others go on, if they are enough.
func (a *Agent) leaveBarred() {
	ctx, cancel := context.WithTimeout(a.bg.ctx, leaveBudget)
	defer cancel()
	if _, err := a.cfg.Rendezvous.Leave(ctx, "its check has not passed", nil); err != nil {
		a.log.Debug("leave", "err", err)
	}
	why := "this node has not passed its check and is left out of the job: " + a.checks.failed
	a.end(Result{Reason: policy.NodeCheckFailed, Err: errors.New(why), Verdict: why})
}

// onSignal: the first terminating signal is passed on to the workers and ends this
// node's part; the next one allows no more grace. Other signals go to the workers.
func (a *Agent) onSignal(sig os.Signal) {
	s, ok := sig.(syscall.Signal)
	if !ok {
		return
	}
	if !a.cfg.Terminate(sig) {
		a.forward(s)
		return
	}
	if a.leaver.leaving() {
		a.again(s)
		return
	}
	a.leaver.hurryUp()
	a.leaver.warnSignal(s, a.group != nil)
	a.cfg.observe(SignalInfo{Signal: s})
	a.leaveFor(s, "received "+proc.SignalName(s))
}

func (a *Agent) forward(s syscall.Signal) {
	if a.group == nil || a.group.stopping {
		return
	}
	if s == syscall.SIGWINCH {
		a.cfg.Logs.Resize()
	}
	for _, w := range a.group.workers {
		_ = w.proc.SignalOnly(s) // it may have exited
	}
}

// expelled ends this node's part because the rendezvous will not go on with it.
func (a *Agent) expelled(err error) {
	res := Result{Reason: reasonOfErr(err), Err: err}
	if a.success && res.Reason == policy.MasterUnreachable {
		a.log.Warn("all workers of this node succeeded; how the others ended is not known", "err", err)
		res = Result{Reason: policy.Success}
	}
	if a.group == nil {
		a.end(res)
		return
	}
	if a.letRun != nil {
		a.log.Debug("the rendezvous is gone; the job has succeeded before", "err", err)
		res = Result{Reason: policy.Success}
	} else {
		a.stop(a.group, syscall.SIGTERM)
	}
	for a.group != nil {
		a.pending = nil
		select {
		case s := <-a.stopper.stopped:
			a.onStopped(s)
		case e := <-a.exits:
			a.onExit(e)
		case sig := <-a.cfg.Signals:
			a.onSignal(sig)
		case err := <-a.leaver.announced:
			a.onAnnounced(err)
		case <-a.group.alarm():
			a.group.timers.onAlarm(&a.cfg)
		case <-a.around.ended:
			a.ended()
		}
	}
	a.result = &res
}

func (a *Agent) end(r Result) {
	if a.result == nil {
		a.result = &r
	}
}

// unknownKinds are the kinds of directives of a later version of the rendezvous that have been logged.
type unknownKinds []job.Kind

// maxStrange bounds how many unknown kinds of directives are distinguished.
const maxStrange = 16

// strange reports whether k is of a later version of the rendezvous, which is logged once. Such a duty changes nothing.
func (u *unknownKinds) strange(k job.Kind, log *slog.Logger) bool {
	if slices.Contains([]job.Kind{job.Wait, job.Lead, job.Run, job.Stop, job.Done, job.Fail, job.Check, job.Bar}, k) {
		return false
	}
	if len(*u) < maxStrange && !slices.Contains(*u, k) {
		*u = append(*u, k)
		log.Warn("the rendezvous gives a directive that this version does not know; it is ignored", "directive", string(k))
	}
	return true
}
