package launcher

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/preset"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/verdict"
)

// group is the workers of one epoch on this node.
type group struct {
	epoch      Epoch
	attempt    *logs.Attempt
	workers    []*worker
	left       int // workers that have not exited
	stopping   bool
	stopSignal syscall.Signal
	signaledAt atomic.Pointer[time.Time] // when stopSignal was sent; nil: not yet, though stopping
	hurry      context.CancelFunc        // ends the examination before the stop; nil without one
	oomKills   int64                     // of this container when the group started
	failures   []verdict.Failure
	timers     timers

	endWatch context.CancelFunc // of the watchers; nil without any
	watchers sync.WaitGroup
	faults   chan fault // what they find
	fault    string     // what a part has ended the epoch for
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

// exited says that a worker of a group is gone.
type exited struct {
	g *group
	w *worker
}

// startGroup starts the workers of e in rank order. When one cannot be started, the
// error names it and the group holds those before it.
func (a *Agent) startGroup(e Epoch) (*group, error) {
	g := &group{epoch: e, oomKills: a.oomKills()}
	attempt, err := a.cfg.Logs.Begin(e.Place.RestartCount)
	if err != nil {
		return g, err
	}
	g.attempt = attempt
	patience := now().Add(filesPatience)
	for i := range a.cfg.Slots {
		if err := a.startWorker(g, i, patience); err != nil {
			return g, err
		}
	}
	return g, nil
}

// startWorker waits until patience for file descriptors.
func (a *Agent) startWorker(g *group, i int, patience time.Time) error {
	w := &worker{
		id: logs.WorkerID{LocalRank: i, Rank: g.epoch.Place.RankBase + i, Node: g.epoch.Place.GroupRank, Role: a.cfg.Role},
	}
	err := withFiles(patience, func() (err error) { w.out, err = g.attempt.Worker(w.id); return err })
	if err != nil {
		return fmt.Errorf("logs of rank %d: %w", w.id.Rank, err)
	}
	spec, err := a.spec(g.epoch, w)
	if err != nil {
		w.out.Started()
		return err
	}
	err = withFiles(patience, func() (err error) { w.proc, err = a.spawn(spec, w.id); return err })
	w.out.Started()
	if err != nil {
		return fmt.Errorf("start rank %d: %w", w.id.Rank, err)
	}
	g.workers = append(g.workers, w)
	g.left++
	a.watch(g, w)
	return nil
}

func (a *Agent) spawn(s proc.Spec, id logs.WorkerID) (*proc.Process, error) {
	if a.parts.spawner != nil {
		return a.parts.spawner.Spawn(s, id)
	}
	return a.cfg.Processes.Start(s)
}

func (a *Agent) spec(e Epoch, w *worker) (proc.Spec, error) {
	vars := a.cfg.Vars(e.Place, w.id.LocalRank, w.out.ErrorFile())
	vars.MaxRestarts = e.MaxRestarts
	overlay, err := a.cfg.Preset.Environ(vars)
	if err != nil {
		return proc.Spec{}, err
	}
	for _, p := range a.parts.environers {
		overlay = append(overlay, p.Environ(e, w.id.LocalRank)...)
	}
	s := proc.Spec{
		Path: a.cfg.Path, Args: a.cfg.ArgsOf(w.id.LocalRank), Dir: a.cfg.Dir, Env: preset.MergeEnv(a.cfg.Env, overlay),
		Stdin: a.cfg.Stdin, Stdout: w.out.Stdout(), Stderr: w.out.Stderr(),
	}
	if a.cfg.CPUs != nil {
		s.CPUs = a.cfg.CPUs(w.id.LocalRank)
	}
	return s, nil
}

// ArgsOf is the argv of one worker.
func (c *Config) ArgsOf(localRank int) []string {
	args := slices.Clone(c.Args)
	for i := range args {
		args[i] = c.Substitute(args[i], localRank)
	}
	return args
}

// Vars are the values that a worker's environment is made of.
func (c *Config) Vars(p Place, localRank int, errorFile string) preset.Vars {
	return preset.Vars{
		LocalRank: localRank, LocalWorldSize: c.Slots,
		Rank: p.RankBase + localRank, WorldSize: p.WorldSize,
		GroupRank: p.GroupRank, GroupWorldSize: p.GroupWorldSize,
		Role: c.Role, RoleRank: p.RoleRankBase + localRank, RoleWorldSize: p.RoleWorldSize,
		MasterAddr: p.MasterAddr, MasterPort: p.MasterPort, AgentStore: true,
		RestartCount: p.RestartCount, MaxRestarts: c.Policy.MaxRestarts, RunID: c.RunID,
		ErrorFile: errorFile, VirtualLocalRank: c.VirtualLocalRank, OldTorch: c.OldTorch, Signals: c.SignalNames,
		Parent: lookup(c.Env),
	}
}

// lookup reads an environment block; the last of equal names wins, as in exec.
func lookup(env []string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		for _, kv := range slices.Backward(env) {
			if v, ok := strings.CutPrefix(kv, name+"="); ok {
				return v, true
			}
		}
		return "", false
	}
}

// watch tells the loop when w is gone.
func (a *Agent) watch(g *group, w *worker) {
	a.wg.Go(func() {
		<-w.proc.Done()
		select {
		case a.exits <- exited{g, w}:
		case <-a.over:
		}
	})
}

// drainBudget is how long the output of a failed worker is waited for: it ends at
// once unless a grandchild holds the pipe open.
const drainBudget = 50 * time.Millisecond

// onExit books one exit. The first one that is not a success decides the epoch.
func (a *Agent) onExit(e exited) {
	g, w := e.g, e.w
	g.left--
	exit := w.proc.Exit()
	act := a.cfg.Policy.Decide(policy.Exit{Code: exit.Code})
	info := ExitInfo{Worker: w.id, PID: w.proc.PID(), ExitCode: exit.Code, Stopped: g.signaledAt.Load() != nil}
	a.observe(func(o Observer) { o.Exited(info) })
	switch {
	case g.stopping && act == policy.Succeed:
	case g.stopping:
		if f := a.describe(g, w, exit); !g.blamed(f) {
			g.failures = append(g.failures, f)
		}
	case act == policy.Succeed && g.left == 0:
		a.succeed(g)
	case act == policy.Succeed:
	default:
		a.fail(g, w, exit, act)
	}
}

// fail reports the first failure of the group and stops its siblings meanwhile.
func (a *Agent) fail(g *group, w *worker, exit proc.Exit, act policy.Action) {
	w.out.Drain(drainBudget)
	f := a.describe(g, w, exit)
	g.failures = append(g.failures, f)
	a.log.Warn("worker failed", "rank", f.Rank, "local_rank", f.LocalRank, "pid", f.PID, "why", f.Reason())
	a.report(g, act)
	a.stopFailed(g, f, "")
}

// report tells the rendezvous what has failed so far.
func (a *Agent) report(g *group, act policy.Action) {
	d, fs := g.epoch.Directive, own(g.failures)
	a.call("report the failure", func() error { return a.cfg.Rendezvous.Failing(a.ctx, d, act, fs) })
}

func (a *Agent) succeed(g *group) {
	a.success = true
	a.observe(func(o Observer) { o.Succeeded(SuccessInfo{g.epoch}) })
	a.stop(g, syscall.SIGTERM) // nobody is left but perhaps orphans
	d := g.epoch.Directive
	a.call("report success", func() error { return a.cfg.Rendezvous.Success(a.ctx, d) })
}

// stop ends the group in the background; the loop hears of it through a.stopped.
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
	a.wg.Go(func() {
		if first != nil {
			first()
			g.signaledNow()
		}
		err := a.cfg.Processes.Stop(ps, sig, a.cfg.ShutdownTimeout, a.force)
		for _, w := range g.workers {
			w.out.Drain(drainBudget)
		}
		g.watchers.Wait()
		select {
		case a.stopped <- stopResult{g, err}:
		case <-a.over:
		}
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
