package rendezvous

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"dlrover-run/internal/duration"
	"dlrover-run/internal/job"
)

// admission decides which launchers may join the run.
type admission struct {
	cfg     *Config
	params  *Params
	members *members
	epoch   *epoch
	orders  *orders

	works []string    // Join.Work of the run's nodes, each once
	over  job.EpochID // the newest epoch of the run by this name that has ended before
}

// Bounds of sameJob.
const (
	sameJobFor = 10 * time.Minute // Kubernetes replaces a pod that is gone within this time
	maxWorks   = 64               // of one run
)

// admit holds a newcomer against the run's rules.
func (a *admission) admit(e Join) error {
	if err := a.check(e); err != nil {
		return fmt.Errorf("%w: %w", ErrRefused, err)
	}
	if !a.params.Static || a.epoch.fresh() && len(a.members.nodes) == 0 {
		return nil
	}
	if o := a.members.wisher(e.Node.Rank); o != nil && !o.supersededBy(e.Node) {
		if e.Resume != nil && e.Stopped != e.Resume.EpochID {
			return fmt.Errorf("%w: %s has taken over node rank %d while this launcher was cut off; its workers must end",
				ErrRefused, o.Name, e.Node.Rank)
		}
		return fmt.Errorf("%w: %d by %s; give every node its own --node-rank", ErrTaken, e.Node.Rank, o.Name)
	}
	return nil
}

func (a *admission) check(e Join) error {
	p := e.Params.WithDefaults()
	if err := p.Validate(); err != nil {
		return err
	}
	if a.members.left[e.Node.ID] {
		return fmt.Errorf("node %q has left the run", e.Node.Name)
	}
	if e.Seen.Round > 0 && !e.Seen.Newer(a.over) {
		return fmt.Errorf("the run of node %q has ended, and another one by its name has begun", e.Node.Name)
	}
	if len(e.Work) > MaxName {
		return fmt.Errorf("work: %d bytes; need at most %d", len(e.Work), MaxName)
	}
	if e.Node.ID == "" || e.Node.Slots < 0 {
		return fmt.Errorf("node %q needs an id and no fewer than 0 slots, has %d", e.Node.Name, e.Node.Slots)
	}
	if err := e.Node.validate(); err != nil {
		return err
	}
	if len(a.members.nodes) > 0 || !a.epoch.fresh() {
		if err := a.conflict(e); err != nil {
			return err
		}
	}
	if len(a.members.nodes) >= 2*p.Max+1000 {
		return fmt.Errorf("%d nodes are already here for at most %d", len(a.members.nodes), p.Max)
	}
	if rank := e.Node.Rank; p.Static && (rank < 0 || rank >= p.Max) {
		return fmt.Errorf("node rank %d: the static rendezvous of %d nodes needs --node-rank from 0 to %d",
			rank, p.Max, p.Max-1)
	}
	return nil
}

// conflict names the option, of those that all nodes must share, in which a newcomer differs from the run. A newcomer
// that cannot gate is of a version without checks, and counts as cleared.
func (a *admission) conflict(e Join) error {
	p := e.Params.WithDefaults()
	if !e.Node.can(CanGate) {
		p.Check = a.params.Check
	}
	return cmp.Or(p.conflict(*a.params), a.orders.cannotFollow(e.Node))
}

// learn records the work of the run's nodes.
func (a *admission) learn(e Join) {
	if e.Work != "" && len(a.works) < maxWorks && !slices.Contains(a.works, e.Work) {
		a.works = append(a.works, e.Work)
	}
}

// sameJob reports whether a node that joins a run which has succeeded is of the same job, such as a recreated pod. A
// node with other work, or one that comes later, is of another job by the same name.
func (a *admission) sameJob(now time.Time, e Join) bool {
	return a.epoch.outcome == job.Succeeded && a.cfg.Run != "" && now.Sub(a.epoch.finishedAt) < sameJobFor &&
		slices.Contains(a.works, e.Work) && a.check(e) == nil
}

// late is the directive of a node that comes to a run which had succeeded before: it is done.
func (a *admission) late(now time.Time) Directive {
	ago := duration.Text(now.Sub(a.epoch.finishedAt).Round(time.Second))
	text := fmt.Sprintf("run %s has succeeded, %s ago: nothing is started; to do it again, give another --rdzv-id or, "+
		"first, dlroverctl forget %s", a.cfg.Run, ago, a.cfg.Run)
	return Directive{Kind: job.Done, Cause: &job.Cause{Kind: job.CauseEnded, Text: text}}
}
