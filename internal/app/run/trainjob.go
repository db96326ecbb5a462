package run

import (
	"errors"
	"fmt"
	"slices"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/run/trainjob"
	"dlrover-run/launcher"
)

// trainJobFeature reports the steps of --total-steps to the TrainJob that the pod belongs to.
func trainJobFeature() row {
	var s *trainjob.Settings
	return row{
		name: "progress of the TrainJob",
		settings: func(o *options, _ *settings) (err error) {
			if !o.IsSet("total-steps") {
				return nil
			}
			steps := o.Int("total-steps")
			if steps < 1 {
				return fmt.Errorf("--total-steps=%s: need at least 1; leave it out if the number of steps is not known",
					o.String("total-steps"))
			}
			if s, err = trainjob.Read(o.Lookup, int64(steps)); err == nil && s == nil {
				o.Warn("--total-steps has no effect: no TrainJob asks for progress (%s is not set)",
					trainjob.URLVariable)
			}
			return err
		},
		plan: func(p *plan) {
			if s != nil {
				p.Features["trainjob"] = s
			}
		},
		open: func(j *nodeJob) (*feature.Opened, error) {
			if s == nil {
				return nil, nil
			}
			if !slices.ContainsFunc(j.opened, func(o *feature.Opened) bool { return o.Steps != nil }) {
				return nil, feature.Unusable(errors.New("--total-steps: steps are counted with --hang=auto only; leave " +
					"--hang and $DLROVER_HANG out"))
			}
			r := trainjob.New(*s, j.progress, j.log)
			return &feature.Opened{Part: launcher.Part{Run: r.Run, Stop: r.Stop, End: r.End}}, nil
		},
	}
}
