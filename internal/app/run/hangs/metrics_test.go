package hangs

import (
	"testing"

	"dlrover-run/hang"
	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/run/feature/featuretest"
)

func TestMetricsAreWellNamed(t *testing.T) {
	m := newHangMetrics(jobJ())
	m.looked([]hang.Sample{{Page: &hang.Page{Groups: []hang.GroupState{{ID: 1}}}}}, nil)
	m.verdict(hang.Ask{Kind: hang.KindStopped})
	featuretest.WellNamed(t, m.tell, 0)
}

// jobJ is a job with an id.
func jobJ() *feature.Job {
	j := featuretest.Job()
	j.RunID = "j"
	return &j
}
