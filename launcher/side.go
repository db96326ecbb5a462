package launcher

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/preset"
	"dlrover-run/launcher/proc"
)

// Side is one side process on one node: it runs with the workers and is not a rank, such as a framework's scheduler.
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

// keptSides are the side processes of workers that have succeeded.
type keptSides struct {
	cfg    *Config
	bg     *background
	ended  chan error // carries the end of all to the loop
	list   []*side
	ending chan struct{} // closed when they have ended; nil: none is being ended yet
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
		f, act := a.reporter.failures.ofSide(g, s, exit)
		a.onFault(fault{s.name, f, act})
	}
}

// endSides ends the sides after their workers have ended. Some of them may have ended before.
func endSides(cfg *Config, list []*side, grace time.Duration, force <-chan struct{}) error {
	if len(list) == 0 {
		return nil
	}
	ps := make([]*proc.Process, len(list))
	for i, s := range list {
		ps[i] = s.proc
	}
	err := cfg.Processes.Stop(ps, syscall.SIGTERM, min(grace, sideGrace), force)
	for _, s := range list {
		s.out.Close()
	}
	return err
}

// drop ends kept sides, if there are any, before d is applied. It reports whether d has to wait for that.
func (k *keptSides) drop(d Directive, grace time.Duration) bool {
	switch {
	case len(k.list) == 0, k.ending == nil && (d.Kind == job.Done || d.Kind == job.Wait):
		return false
	case k.ending != nil:
		return true
	}
	ending, list := make(chan struct{}), k.list
	k.ending = ending
	k.bg.Go(func() {
		err := endSides(k.cfg, list, grace, k.bg.force)
		close(ending)
		post(k.bg, k.ended, err)
	})
	return true
}

func (k *keptSides) forget() { k.list, k.ending = nil, nil }

// end ends kept sides together with this node's part of the job. After its success they may end by themselves.
func (k *keptSides) end(success bool, grace func() time.Duration) error {
	if k.ending != nil {
		<-k.ending
		return nil
	}
	if success && len(k.list) > 0 {
		k.await()
	}
	return unendedSides(endSides(k.cfg, k.list, grace(), k.bg.force))
}

func unendedSides(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("stop what ran beside the workers: %w", err)
}

// await waits until all have ended, or sideEnd is over, or a signal has no patience.
func (k *keptSides) await() {
	late := time.NewTimer(sideEnd)
	defer late.Stop()
	for _, s := range k.list {
		for ended := false; !ended; {
			select {
			case <-s.proc.Done():
				ended = true
			case sig := <-k.cfg.Signals:
				if k.cfg.Terminate(sig) {
					return
				}
			case <-late.C:
				k.cfg.Logger.Warn("the job has succeeded, but what ran beside the workers does not end; stopping it",
					"names", sideNames(k.list))
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
