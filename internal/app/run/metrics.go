package run

import (
	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/run/metrics"
)

func metricsFeature() row {
	var addr string
	var open bool
	return row{
		name: "metrics",
		settings: func(o *options, _ *settings) error {
			addr, open = o.String("metrics-addr"), o.Bool("open-metrics")
			return nil
		},
		open: func(j *nodeJob) (*feature.Opened, error) {
			if addr == "" {
				return nil, nil
			}
			var accepts func(token string) bool
			if secret := j.s.auth.shared(); secret.Token != "" && !open {
				accepts = secret.Accepts
			}
			m, err := metrics.Serve(addr, accepts)
			if err != nil {
				return nil, feature.Unusable(err)
			}
			j.metrics = m
			return &feature.Opened{Observe: m.Observe, Close: m.Close}, nil
		},
	}
}
