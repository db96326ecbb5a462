package run

import (
	"log/slog"

	"dlrover-run/internal/app/run/events"
	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/console"
	"dlrover-run/internal/eventlog"
)

func eventLogFeature() row {
	var path string
	var onConsole bool
	return row{
		name: "event log",
		settings: func(o *options, s *settings) error {
			path, onConsole = o.String("event-log"), o.String("event-log-handler") == "console"
			return nil
		},
		open: func(j *nodeJob) (*feature.Opened, error) {
			run, host := slog.String("run_id", j.s.runID), slog.String("host", j.s.node.Name)
			switch {
			case path != "":
				l, err := eventlog.Open(path)
				if err != nil {
					return nil, feature.Unusable(err)
				}
				j.events = events.To(l.With(run, host))
			case onConsole:
				j.events = events.To(eventlog.New(console.Stderr).With(run))
			default:
				return nil, nil
			}
			return &feature.Opened{Observe: j.events.Observe, Close: j.events.Close}, nil
		},
	}
}
