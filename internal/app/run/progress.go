package run

import (
	"context"
	"log/slog"
	"time"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/job"
	"dlrover-run/launcher"
)

// Intervals of the looks at the workers: before their first step, where steps are counted, and otherwise.
const (
	stepLook = time.Second / 2
	saveLook = 10 * time.Second
)

// progressFeature tells the rendezvous of the first step of an epoch and of its checkpoints, from the node of rank 0.
// It is off where no feature knows of either.
func progressFeature() row {
	return row{name: "progress", open: func(j *nodeJob) (*feature.Opened, error) {
		t := &teller{measure: j.progress, log: j.log}
		t.tell = func(ctx context.Context, d launcher.Directive, p job.Progress) error {
			return j.adapter.stepped(ctx, d, p)
		}
		for _, o := range j.opened {
			switch {
			case o.Steps != nil:
				t.first = stepLook
			case o.Saves != nil && t.first == 0:
				t.first = saveLook
			}
		}
		if t.first == 0 {
			return nil, nil
		}
		return &feature.Opened{Part: launcher.Part{Run: t.run}}, nil
	}}
}

// progress is that of the workers, as far as features measure it.
func (j *nodeJob) progress() (p job.Progress) {
	for _, o := range j.opened {
		for _, measure := range []func() job.Progress{o.Steps, o.Saves} {
			if measure != nil {
				p = p.With(measure())
			}
		}
	}
	return p
}

// teller tells news of the workers. first is the interval of the looks before there are any.
type teller struct {
	measure func() job.Progress
	tell    func(context.Context, launcher.Directive, job.Progress) error
	first   time.Duration
	log     *slog.Logger
}

func (t *teller) run(ctx context.Context, r launcher.RunRequest) {
	if r.Epoch.Place.RankBase != 0 {
		return
	}
	tick := time.NewTicker(t.first)
	defer tick.Stop()
	for told := (job.Progress{}); ; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		p := t.measure()
		if !moved(p) || p.Checkpoint == told.Checkpoint && p.Blocked == told.Blocked && (p.Step == 0 || told.Step > 0) {
			continue
		}
		if err := t.tell(ctx, r.Epoch.Directive, p); err != nil && ctx.Err() == nil {
			t.log.Warn("cannot tell the rendezvous how far the workers are", "err", err)
			return
		}
		told = p
		tick.Reset(saveLook)
	}
}

// moved: the workers have made a step or a checkpoint.
func moved(p job.Progress) bool { return p.Step > 0 || p.Saving }
