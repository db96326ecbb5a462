package probe

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// BenchmarkThroughput is what `iperf3 -c 127.0.0.1 -t 1 -P 4` measures with two processes.
func BenchmarkThroughput(b *testing.B) {
	sum := 0.0
	for b.Loop() {
		rate, err := throughput(b.Context(), plan{warm: quickPlan.warm, measure: time.Second})
		require.NoError(b, err)
		sum += rate
	}
	b.ReportMetric(sum/float64(b.N), "Mbit/s")
}
