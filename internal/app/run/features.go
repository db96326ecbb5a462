package run

import (
	"context"
	"errors"
	"slices"

	"dlrover-run/internal/app/run/budget"
	"dlrover-run/internal/app/run/checkpoints"
	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/run/filetimer"
	"dlrover-run/internal/app/run/hangs"
	"dlrover-run/internal/app/run/hooks"
	"dlrover-run/internal/app/run/hostfile"
	"dlrover-run/internal/app/run/lighthouse"
	"dlrover-run/internal/app/run/logrules"
	"dlrover-run/internal/app/run/nodechecks"
	"dlrover-run/internal/app/run/pidfiles"
	"dlrover-run/internal/app/run/ports"
	"dlrover-run/internal/app/run/preflight"
	"dlrover-run/internal/app/run/ranklogs"
	"dlrover-run/internal/app/run/streams"
	"dlrover-run/internal/app/run/tensorboard"
	"dlrover-run/internal/app/run/trainingport"
	"dlrover-run/internal/app/run/ui"
	"dlrover-run/internal/app/run/warm"
	"dlrover-run/launcher"
	"dlrover-run/launcher/logs"
	"dlrover-run/rendezvous/pyproto/upstream"
)

// row is a feature.Feature that reaches into the settings and the node's job.
type row struct {
	name     string
	settings func(*options, *settings) error
	plan     func(*plan)
	open     func(*nodeJob) (*feature.Opened, error)
}

// of makes a row of a feature in a package of its own.
func of(f feature.Feature) row {
	r := row{name: f.Name}
	if f.Open != nil {
		r.open = func(j *nodeJob) (*feature.Opened, error) { return f.Open(featureNode{j}) }
	}
	if f.Settings != nil {
		r.settings = func(o *options, s *settings) error { return f.Settings(featureOptions{o, s}) }
	}
	if f.Plan != nil {
		r.plan = func(p *plan) { f.Plan(&p.Plan) }
	}
	return r
}

// features are opened in this order, and ended and closed in the reverse order.
func features() []row {
	return []row{
		eventLogFeature(),
		electionFeature(),
		of(budget.New()),
		metricsFeature(),
		logLevelFeature(),
		of(streams.New()),
		of(filetimer.New()),
		of(logrules.New()),
		of(ranklogs.New()),
		of(pidfiles.New()),
		of(hostfile.New()),
		of(ports.New()),
		of(trainingport.New()),
		sidesFeature(),
		of(tensorboard.New()),
		of(lighthouse.New()),
		of(ui.New()),
		of(preflight.New()),
		of(nodechecks.New()),
		of(checkpoints.New()),
		of(hangs.New()),
		holdFeature(),
		of(hooks.New()),
		of(warm.New()),
		progressFeature(), // the features before it tell it
		trainJobFeature(), // and this one
	}
}

func (s *settings) readFeatures(o *options) error {
	for _, f := range s.features {
		if f.settings == nil {
			continue
		}
		if err := f.settings(o, s); err != nil {
			return err
		}
	}
	return nil
}

// openFeatures stops at the first feature that cannot be opened.
func (j *nodeJob) openFeatures() error {
	for _, f := range j.s.features {
		if f.open == nil {
			continue
		}
		o, err := f.open(j)
		if err != nil {
			return err
		}
		if o != nil {
			o.Name = f.name
			if o.Page != nil {
				j.s.rdzv.page = o.Page
			}
			j.opened = append(j.opened, o)
		}
	}
	return nil
}

func (j *nodeJob) parts() (parts []launcher.Part) {
	for _, o := range j.opened {
		parts = append(parts, o.Part)
	}
	return parts
}

func (j *nodeJob) joinedFeatures() {
	for _, o := range j.opened {
		if o.Joined != nil {
			o.Joined()
		}
	}
}

// configureFeatures adds the features' observers, and then has the features change the configuration.
func (j *nodeJob) configureFeatures(cfg *launcher.Config) {
	for _, o := range j.opened {
		if o.Observe != nil {
			cfg.Observers = append(cfg.Observers, o.Observe)
		}
	}
	cfg.Observers = append(cfg.Observers, (&startPages{}).observe)
	for _, o := range j.opened {
		if o.Configure != nil {
			o.Configure(cfg)
		}
	}
}

func (j *nodeJob) tapFeatures(cfg *logs.Config) {
	for _, o := range j.opened {
		if o.Tap != nil {
			cfg.Tap = logs.Taps(cfg.Tap, o.Tap)
		}
		if o.SideTap != nil {
			cfg.SideTap = o.SideTap
		}
	}
}

func (j *nodeJob) releaseFeatures() {
	for _, o := range slices.Backward(j.opened) {
		if o.Release != nil {
			o.Release()
		}
	}
}

func (j *nodeJob) closeFeatures() {
	for _, o := range slices.Backward(j.opened) {
		if o.Close != nil {
			j.closing("close the "+o.Name, o.Close())
		}
	}
}

// upstreamCheck is the check of this node under DLRover's master; nil if no feature has one.
func (j *nodeJob) upstreamCheck() func(context.Context) (upstream.Check, error) {
	for _, o := range j.opened {
		if o.Upstream != nil {
			return o.Upstream
		}
	}
	return nil
}

// unsavedFeatures is why saves may not be on disk.
func (j *nodeJob) unsavedFeatures() (err error) {
	for _, o := range j.opened {
		if o.Unsaved != nil {
			err = errors.Join(err, o.Unsaved())
		}
	}
	return err
}
