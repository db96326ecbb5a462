package launcher

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/preset"
	"dlrover-run/launcher/proc"
)

// Side is one side process on one node: it runs with the workers and is no rank, such as a scheduler of the framework.
// It is started right before the workers and executes the same program, with an environment of its own. If it fails
// while workers run, the epoch fails. It outlives the workers of its node: once those have been stopped it is, too; if
// they have succeeded, it may run until the job has, and 10 s longer.
type Side = preset.Side

const (
	// sideGrace is the most that a side process has between the signal and SIGKILL.
	sideGrace = 2 * time.Second
	// sideEnd is how long it may take to end by itself after the job's success.
	sideEnd = 10 * time.Second
)

// side is a Side that has been started.
type side struct {
	name string
	proc *proc.Process
	out  *logs.Side
}

// sideExit is the event that a side of a group has ended.
type sideExit struct {
	g *group
	s *side
}

// sides are those of workers that have succeeded.
type sides struct {
	list []*side
	gone chan struct{} // closed when they have ended; nil: none is being ended yet
}

// onSideExit fails the epoch if its workers need the side process that has ended.
func (a *Agent) onSideExit(e sideExit) {
	g, s, exit := e.g, e.s, e.s.proc.Exit()
	switch {
	case a.group != g || g.stopping || a.letRun != nil:
		a.log.Debug("a process beside the workers has ended", "name", s.name, "exit_code", exit.Code)
	case exit.Code == 0: // a scheduler does so when its workers are done with it
		a.log.Info("a process beside the workers has ended; they run on", "name", s.name)
	default:
		f, act := a.failures.ofSide(g, s, exit)
		a.onFault(fault{s.name, f, act})
	}
}

// endSides ends the sides after their workers have ended. Some of them may have ended before.
func (a *Agent) endSides(list []*side, grace time.Duration) error {
	if len(list) == 0 {
		return nil
	}
	ps := make([]*proc.Process, len(list))
	for i, s := range list {
		ps[i] = s.proc
	}
	err := a.cfg.Processes.Stop(ps, syscall.SIGTERM, min(grace, sideGrace), a.bg.force)
	for _, s := range list {
		s.out.Close()
	}
	return err
}

// keepSides leaves the sides of workers that have succeeded to the other nodes' workers.
func (a *Agent) keepSides(list []*side) {
	if len(list) > 0 {
		a.kept = &sides{list: list}
	}
}

// dropSides ends kept sides, if there are any, before d is applied. It reports whether d has to wait for that.
func (a *Agent) dropSides(d Directive) bool {
	k := a.kept
	switch {
	case k == nil, k.gone == nil && (d.Kind == job.Done || d.Kind == job.Wait):
		return false
	case k.gone != nil:
		return true
	}
	k.gone = make(chan struct{})
	grace := a.grace()
	a.bg.Go(func() {
		err := a.endSides(k.list, grace)
		close(k.gone)
		post(a.bg, a.sidesGone, err)
	})
	return true
}

func (a *Agent) onSidesGone(err error) {
	a.kept = nil
	if err != nil {
		a.unusable(fmt.Errorf("stop what ran beside the workers: %w", err))
		return
	}
	if d := a.pending; d != nil {
		a.pending = nil
		a.apply(*d)
	}
}

// endKept ends kept sides together with this node's part of the job. After its success they may end by themselves.
func (a *Agent) endKept() {
	k := a.kept
	if k == nil {
		return
	}
	if k.gone != nil {
		<-k.gone
		return
	}
	if a.result.Reason == policy.Success {
		a.awaitSides(k.list)
	}
	if err := a.endSides(k.list, a.grace()); err != nil {
		a.result.Err = errors.Join(a.result.Err, fmt.Errorf("stop what ran beside the workers: %w", err))
	}
}

// awaitSides waits until all have ended, or sideEnd is over, or a signal has no patience.
func (a *Agent) awaitSides(list []*side) {
	late := time.NewTimer(sideEnd)
	defer late.Stop()
	for _, s := range list {
		for ended := false; !ended; {
			select {
			case <-s.proc.Done():
				ended = true
			case sig := <-a.cfg.Signals:
				if a.cfg.Terminate(sig) {
					return
				}
			case <-late.C:
				a.log.Warn("the job has succeeded, but what ran beside the workers does not end; stopping it",
					"names", sideNames(list))
				return
			}
		}
	}
}

// sideNames lists the running ones.
func sideNames(list []*side) string {
	var names []string
	for _, s := range list {
		select {
		case <-s.proc.Done():
		default:
			names = append(names, s.name)
		}
	}
	return cmp.Or(strings.Join(slices.Compact(names), ", "), "none")
}
