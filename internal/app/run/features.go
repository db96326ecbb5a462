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
	settings func(*resolver) error
	// plan adds to the --dry-run output.
	plan func(*plan)
	// open prepares everything that can fail, before any other node is contacted. It returns nil for a feature that was
	// not requested.
	open func(*nodeJob) (launcher.Part, error)
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

// The part of a feature may implement these, in addition to launcher.Observer and the interfaces of launcher.Part.
type (
	// configurer changes how workers are run.
	configurer interface{ configure(*launcher.Config) }
	// tapper gets the workers' output, from a worker's start on. A part that reads it only now and then follows the
	// logs.
	tapper interface {
		tap(id logs.WorkerID, stream logs.Std) logs.Tap
	}
	// sideTapper gets the output of the side processes.
	sideTapper interface{ sideTap(name string) logs.Tap }
	// joiner acts when this node has joined its run.
	joiner interface{ joined(*nodeJob) }
	// releaser frees the resources of workers and side processes when all of them have ended.
	releaser interface{ release() }
	// closer frees the rest, when the other nodes have been notified as well.
	closer interface{ close() error }
)

func (r *resolver) features() error {
	for _, f := range r.s.features {
		if f.settings == nil {
			continue
		}
		if err := f.settings(r); err != nil {
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
		part, err := f.open(j)
		if err != nil {
			return err
		}
		if part != nil {
			j.parts = append(j.parts, part)
		}
	}
	return nil
}

// forParts calls do with the parts that implement T, in order.
func forParts[T any](parts []launcher.Part, do func(T)) {
	for _, p := range parts {
		if t, ok := p.(T); ok {
			do(t)
		}
	}
}

func (j *nodeJob) releaseFeatures() {
	forParts(j.backwards(), func(p releaser) { p.release() })
}

func (j *nodeJob) closeFeatures() {
	for _, p := range j.backwards() {
		if c, ok := p.(closer); ok {
			j.closing("close the "+p.Name(), c.close())
		}
	}
}

func (j *nodeJob) backwards() []launcher.Part {
	parts := slices.Clone(j.parts)
	slices.Reverse(parts)
	return parts
}
