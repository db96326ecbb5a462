package launcher

import (
	"context"
	"fmt"
	"slices"
	"time"

	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/preset"
	"dlrover-run/launcher/proc"
)

// starter starts the processes of a group, and the parts' Run.
type starter struct {
	cfg       *Config
	bg        *background
	exits     chan<- exited
	sideExits chan<- sideExit
}

// group starts the workers of g in rank order. When one cannot be started, the
// error names it and the group holds those before it. env is the parts', by local rank.
func (st *starter) group(g *group, env [][]string) error {
	g.oomKills = memory(st.cfg.Memory).kills()
	attempt, err := st.cfg.Logs.Begin(g.epoch.Place.RestartCount)
	if err != nil {
		return err
	}
	g.attempt = attempt
	patience := now().Add(filesPatience)
	if err := st.sides(g, patience); err != nil {
		return err
	}
	for i := range st.cfg.Slots {
		if err := st.worker(g, i, env[i], patience); err != nil {
			return err
		}
	}
	return nil
}

// worker waits until patience for file descriptors.
func (st *starter) worker(g *group, i int, env []string, patience time.Time) error {
	w := &worker{
		id: logs.WorkerID{LocalRank: i, Rank: g.epoch.Place.RankBase + i, Node: g.epoch.Place.GroupRank, Role: st.cfg.Role},
	}
	err := withFiles(patience, func() (err error) { w.out, err = g.attempt.Worker(w.id); return err })
	if err != nil {
		return fmt.Errorf("logs of rank %d: %w", w.id.Rank, err)
	}
	spec, err := st.cfg.spec(g.epoch, w.id, w.out.ErrorFile(), env)
	if g.path = spec.Path; err != nil {
		w.out.Started()
		return err
	}
	spec.Stdout, spec.Stderr = w.out.Stdout(), w.out.Stderr()
	err = withFiles(patience, func() (err error) { w.proc, err = st.spawn(spec, w.id); return err })
	w.out.Started()
	if err != nil {
		return fmt.Errorf("start rank %d: %w", w.id.Rank, err)
	}
	g.workers, g.env = append(g.workers, w), append(g.env, spec.Env)
	g.left++
	st.watch(g, w)
	return nil
}

func (st *starter) spawn(s proc.Spec, id logs.WorkerID) (*proc.Process, error) {
	if st.cfg.Spawn != nil {
		return st.cfg.Spawn(s, id)
	}
	return st.cfg.Processes.Start(s)
}

// watch notifies the loop when w is gone.
func (st *starter) watch(g *group, w *worker) {
	st.bg.Go(func() {
		<-w.proc.Done()
		post(st.bg, st.exits, exited{g, w})
	})
}

// sides starts the side processes of g.
func (st *starter) sides(g *group, patience time.Time) error {
	list, err := st.cfg.sidesOf(g)
	if err != nil {
		return err
	}
	for _, s := range list {
		if err := st.side(g, s, patience); err != nil {
			return fmt.Errorf("start the %s: %w", s.Name, err)
		}
	}
	return nil
}

func (st *starter) side(g *group, what Side, patience time.Time) error {
	path, args, err := st.cfg.program(g.epoch, st.cfg.sideVars(g))
	if g.path = path; err != nil {
		return err
	}
	s := &side{name: what.Name}
	if err := withFiles(patience, func() (err error) { s.out, err = g.attempt.Side(what.Name); return err }); err != nil {
		return err
	}
	spec := proc.Spec{
		Path: path, Args: args, Dir: st.cfg.Dir, Env: preset.MergeEnv(st.cfg.Env, what.Env), Stdout: s.out.File(),
		Stderr: s.out.File(), Helper: true, // it outlives the workers
	}
	err = withFiles(patience, func() (err error) { s.proc, err = st.cfg.Processes.Start(spec); return err })
	s.out.Started()
	if err != nil {
		s.out.Close()
		return err
	}
	g.sides = append(g.sides, s)
	st.cfg.Logger.Info("a process beside the workers has been started", "name", s.name, "pid", s.proc.PID())
	st.bg.Go(func() {
		<-s.proc.Done()
		post(st.bg, st.sideExits, sideExit{g, s})
	})
	return nil
}

// runParts starts the parts' Run for a group with running workers. They end when it is stopped.
func (st *starter) runParts(g *group) {
	runs := func(p Part) bool { return p.Run != nil }
	if len(g.workers) == 0 || !slices.ContainsFunc(st.cfg.Parts, runs) {
		return
	}
	ctx, cancel := context.WithCancel(st.bg.ctx)
	g.endWatch, g.faults = cancel, make(chan fault, 1)
	for _, p := range st.cfg.Parts {
		if !runs(p) {
			continue
		}
		c := &control{log: st.cfg.Logger, ctx: ctx, part: p.Name, faults: g.faults, workers: g.workers}
		g.watchers.Go(func() {
			st.cfg.attend(ctx, p.Name, func() { p.Run(ctx, RunRequest{g.epoch, g.pids(), c}) })
		})
	}
}

func (st *starter) log(g *group) {
	e, p := g.epoch, g.epoch.Place
	attrs := []any{"round", e.Round, "epoch", e.Epoch, "node", p.GroupRank, "nodes", p.GroupWorldSize,
		"ranks", e.ranks(st.cfg.Slots), "restarts", p.RestartCount, "executable", g.path}
	if e.Cause.Text != "" {
		attrs = append(attrs, "cause", e.Cause.Text)
	}
	if st.cfg.LogsKept {
		attrs = append(attrs, "logs", g.attempt.Dir())
	}
	st.cfg.Logger.Info("workers started", attrs...)
}
