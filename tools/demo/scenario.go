package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Limits of the waits; each is many times the duration on a slow machine.
const (
	startLimit = 2 * time.Minute // until new workers have done a step
	trainLimit = 2 * time.Minute // between two of the scenario's steps
	exitLimit  = time.Minute
)

// plan is how long the training is.
type plan struct {
	steps, checkpointEvery int
	stepTime               time.Duration // so that one can follow it
}

// at is the step at a fraction of the training.
func (p plan) at(percent int) int { return p.steps * percent / 100 }

// scenario causes the faults and shows their effects. One goroutine runs it and reads all records.
type scenario struct {
	*screen
	plan    plan
	cluster *cluster
	ctx     context.Context // ends with the first signal
	records []record

	victims  map[string]bool // launchers that we killed
	prepared map[string]bool // launchers that have imported the modules of their next workers
	starting []record        // "start" of the newest epoch, one for each node so far
	leader   string          // node with rank 0
	home     map[int]record  // newest "up" of each rank
	last     record          // newest step
	fresh    bool            // no step since the last fault
	trained  record
	told     int // last step that was shown
}

func newScenario(ctx context.Context, s *screen, p plan, c *cluster) *scenario {
	return &scenario{screen: s, plan: p, cluster: c, ctx: ctx, victims: map[string]bool{},
		prepared: map[string]bool{}, home: map[int]record{}}
}

// run is the whole scenario. An error means that it broke off.
func (s *scenario) run() error {
	for _, act := range []func() error{s.begin, s.killWorker, s.killNode, s.addNode, s.finish} {
		if err := act(); err != nil {
			return err
		}
	}
	return nil
}

func (s *scenario) begin() error {
	s.fault("two nodes start", "node-a and node-b: dlrover-run --nnodes=1:2 --nproc-per-node=2 train.py")
	for _, name := range []string{"node-a", "node-b"} {
		if err := s.cluster.startNode(name); err != nil {
			return err
		}
	}
	return s.recovered()
}

// killWorker takes the last rank: its node is not the one that serves the store.
func (s *scenario) killWorker() error {
	if err := s.reach(16); err != nil {
		return err
	}
	latest := s.plan.at(60)
	if err := s.await("warm workers", trainLimit, func(record) bool {
		return s.prepared["node-a"] && s.prepared["node-b"] || s.last.Step >= latest
	}); err != nil {
		return err
	}
	w := s.home[s.last.WorldSize-1]
	s.fault("a worker is killed", "kill -9 %d: worker rank %d on %s", w.PID, w.Rank, w.From)
	if err := syscall.Kill(w.PID, syscall.SIGKILL); err != nil {
		return fmt.Errorf("kill worker rank %d (pid %d): %w", w.Rank, w.PID, err)
	}
	return s.recovered()
}

// killNode takes the node that hurts most: rank 0 and the workers' store live there.
func (s *scenario) killNode() error {
	if err := s.reach(41); err != nil {
		return err
	}
	n := s.cluster.nodes[s.leader]
	s.fault("a node is killed", "kill -9 %d: the launcher of %s, and so the whole node, with rank 0",
		n.cmd.Process.Pid, n.name)
	s.victims[n.name] = true
	if err := n.cmd.Process.Kill(); err != nil {
		return fmt.Errorf("kill %s: %w", n.name, err)
	}
	return s.recovered()
}

func (s *scenario) addNode() error {
	if err := s.reach(66); err != nil {
		return err
	}
	s.fault("a new node starts", "node-c: a new node starts the same command")
	if err := s.cluster.startNode("node-c"); err != nil {
		return err
	}
	return s.recovered()
}

// finish waits for the end of the training, and ends the daemon.
func (s *scenario) finish() error {
	if err := s.ended(); err != nil {
		return err
	}
	if err := s.cluster.daemon.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("stop dlrover-master: %w", err)
	}
	return s.await("the end of dlrover-master", exitLimit,
		func(r record) bool { return r.Event == evExit && r.From == "master" })
}

// ended waits for the end of the training and of every launcher that lives.
func (s *scenario) ended() error {
	if err := s.await("the last step of the training", trainLimit,
		func(r record) bool { return r.Event == evTrained }); err != nil {
		return err
	}
	s.tell(s.trained.Time, "trained: all %d steps, %.1f %% of the points classified right",
		s.trained.Step, 100*s.trained.Accuracy)
	ended := func(record) bool {
		for _, n := range s.cluster.nodes {
			if n.running() {
				return false
			}
		}
		return true
	}
	return s.await("the end of every launcher", exitLimit, ended)
}

// fault announces a fault and records its time.
func (s *scenario) fault(what, format string, args ...any) {
	s.fresh = true
	r := record{Time: time.Now(), Event: evFault, What: what}
	s.records = append(s.records, r)
	s.tell(r.Time, "%s", s.paint(bold, fmt.Sprintf(format, args...)))
}

// recovered waits until new workers have done a step.
func (s *scenario) recovered() error {
	return s.await("the first step of the new workers", startLimit, func(record) bool { return !s.fresh })
}

// reach waits for a fraction of the training.
func (s *scenario) reach(percent int) error {
	step := s.plan.at(percent)
	return s.await(fmt.Sprintf("step %d", step), trainLimit, func(record) bool { return s.last.Step >= step })
}

// await follows the records until the condition holds.
func (s *scenario) await(what string, limit time.Duration, holds func(record) bool) error {
	late := time.NewTimer(limit)
	defer late.Stop()
	move := time.NewTicker(200 * time.Millisecond)
	defer move.Stop()
	for {
		select {
		case r := <-s.cluster.records:
			if err := s.follow(r); err != nil {
				return err
			}
			if holds(r) {
				return nil
			}
		case <-move.C:
		case <-late.C:
			return fmt.Errorf("waited %s for %s", limit, what)
		case <-s.ctx.Done():
			return context.Cause(s.ctx)
		}
		s.showStatus()
	}
}

func (s *scenario) showStatus() {
	if s.fresh {
		s.status("%s  ... Python imports torch, connects and loads the checkpoint", s.clock(time.Now()))
		return
	}
	s.status("%s  step %d of %d, loss %.3f, %d workers",
		s.clock(time.Now()), s.last.Step, s.plan.steps, s.last.Loss, s.last.WorldSize)
}

// follow keeps a record and shows the important ones.
func (s *scenario) follow(r record) error {
	s.records = append(s.records, r)
	switch r.Event {
	case evStart:
		s.started(r)
	case evWorkerExit:
		if r.ExitCode < 0 && !r.Stopped {
			s.tell(r.Time, "%s: worker rank %d has ended by signal %d", r.From, r.Rank, -r.ExitCode)
		}
	case evPrepared:
		s.prepared[r.From] = true
		s.tell(r.Time, "%s: new workers need not import torch: a process has, and forks them", r.From)
	case evUp:
		s.home[r.Rank] = r
	case evStep:
		s.stepped(r)
	case evTrained:
		s.trained = r
	case evExit:
		return s.exited(r)
	}
	return nil
}

// started shows a new world once all its launchers have started their workers.
func (s *scenario) started(r record) {
	if r.Node == 0 {
		s.leader = r.From
	}
	s.starting = append(slices.DeleteFunc(s.starting,
		func(o record) bool { return o.Round != r.Round || o.Epoch != r.Epoch }), r)
	if len(s.starting) < r.Nodes {
		return
	}
	var nodes []string
	for _, o := range s.starting {
		nodes = append(nodes, o.From)
	}
	slices.Sort(nodes)
	s.tell(r.Time, "%s: new workers, world size %d", strings.Join(nodes, " and "), r.WorldSize)
	if r.Cause != "" {
		s.line("          because %s", r.Cause)
	}
}

func (s *scenario) stepped(r record) {
	before := s.last
	s.last = r
	if r.PID != before.PID {
		s.fresh = false
		took := r.Time.Sub(s.lastFault().Time).Seconds()
		if before.Step == 0 {
			s.tell(r.Time, "%s step %d, loss %.3f, %d workers", s.paint(green, "training:"), r.Step, r.Loss, r.WorldSize)
		} else {
			s.tell(r.Time, "%s after %.2f s: step %d (had done %d), loss %.3f, %d workers",
				s.paint(green, "training again"), took, r.Step, before.Step, r.Loss, r.WorldSize)
		}
		s.told = r.Step
		return
	}
	if r.Step >= s.told+s.plan.at(10) {
		s.told = r.Step
		s.tell(r.Time, "step %d of %d, loss %.3f", r.Step, s.plan.steps, r.Loss)
	}
}

func (s *scenario) lastFault() record {
	for _, r := range slices.Backward(s.records) {
		if r.Event == evFault {
			return r
		}
	}
	return record{}
}

// exited refuses the end of a process that was not expected.
func (s *scenario) exited(r record) error {
	switch {
	case s.victims[r.From]:
		return nil
	case r.ExitCode != 0:
		return fmt.Errorf("%s ended with code %d", r.From, r.ExitCode)
	case s.trained.Step == 0:
		return fmt.Errorf("%s ended with code 0 before the training was over", r.From)
	}
	if strings.HasPrefix(r.From, "node") {
		s.tell(r.Time, "%s: dlrover-run ended with code 0", r.From)
	}
	return nil
}
