package run

import (
	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/run/metrics"
)

func metricsFeature() row {
	var addr string
	return row{
		name:     "metrics",
		settings: func(o *options, s *settings) error { addr = o.String("metrics-addr"); return nil },
		open: func(j *nodeJob) (*feature.Opened, error) {
			if addr == "" {
				return nil, nil
			}
			m, err := metrics.Serve(addr)
			if err != nil {
				return nil, feature.Unusable(err)
			}
			j.metrics = m
			return &feature.Opened{Observe: m.Observe, Close: m.Close}, nil
		},
	}
}
