package run

import (
	"slices"

	"dlrover-run/launcher"
	"dlrover-run/launcher/logs"
)

// feature is a task of the launcher apart from starting workers. It has its own file and a row in the table below.
// Its functions share the variables of the closure that made it. A nil function has nothing to do.
type feature struct {
	name string
	// settings reads and checks the feature's options.
	settings func(*options, *settings) error
	// plan adds to the --dry-run output.
	plan func(*plan)
	// open prepares everything that can fail, before any other node is contacted. It returns nil for a feature that was
	// not requested.
	open func(*nodeJob) (*opened, error)
}

// opened is a feature that was requested. A nil function has nothing to do. They are called in this order, apart from
// the part's hooks, observe and the taps, which are called while the agent runs:
//
//	open -> joined -> configure -> Part, observe, taps -> Part.End -> release -> close
type opened struct {
	launcher.Part // openFeatures names it
	// joined acts when this node has joined its run.
	joined func(*nodeJob)
	// configure changes how workers are run.
	configure func(*launcher.Config)
	// observe is notified of the events on this node.
	observe func(launcher.Event)
	// tap gets the workers' output, from a worker's start on. A feature that reads it only now and then follows the logs.
	tap func(id logs.WorkerID, stream logs.Std) logs.Tap
	// sideTap gets the output of the side processes.
	sideTap func(name string) logs.Tap
	// release frees the resources of workers and side processes when all of them have ended.
	release func()
	// close frees the rest, when the other nodes have been notified as well.
	close func() error
}

// features are opened in this order, and ended and closed in the reverse order.
func features() []feature {
	return []feature{
		eventLogFeature(),
		budgetFeature(),
		metricsFeature(),
		logLevelFeature(),
		streamsFeature(),
		fileTimerFeature(),
		logRulesFeature(),
		rankLogsFeature(),
		pidFilesFeature(),
		liveHostfileFeature(),
		portsFeature(),
		trainingPortFeature(),
		sidesFeature(),
		tensorBoardFeature(),
		preflightFeature(),
		nodeChecksFeature(),
		checkpointsFeature(),
		hangFeature(),
		holdFeature(),
		warmFeature(),
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
		if o.joined != nil {
			o.joined(j)
		}
	}
}

// configureFeatures adds the features' observers, and then has the features change the configuration.
func (j *nodeJob) configureFeatures(cfg *launcher.Config) {
	for _, o := range j.opened {
		if o.observe != nil {
			cfg.Observers = append(cfg.Observers, o.observe)
		}
	}
	cfg.Observers = append(cfg.Observers, (&startPages{}).observe)
	for _, o := range j.opened {
		if o.configure != nil {
			o.configure(cfg)
		}
	}
}

func (j *nodeJob) tapFeatures(cfg *logs.Config) {
	for _, o := range j.opened {
		if o.tap != nil {
			cfg.Tap = logs.Taps(cfg.Tap, o.tap)
		}
		if o.sideTap != nil {
			cfg.SideTap = o.sideTap
		}
	}
}

func (j *nodeJob) releaseFeatures() {
	for _, o := range slices.Backward(j.opened) {
		if o.release != nil {
			o.release()
		}
	}
}

func (j *nodeJob) closeFeatures() {
	for _, o := range slices.Backward(j.opened) {
		if o.close != nil {
			j.closing("close the "+o.Name, o.close())
		}
	}
}
