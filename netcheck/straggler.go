package netcheck

import (
	"fmt"
	"math"
)

// A straggler is far from the others by both measures: in a tight field the ratio alone counts, in a wide one the
// distance.
const (
	stragglerZ     = 5    // robust z-score: distance to the median by the median distance
	stragglerRatio = 1.15 // to the median
	madFloor       = 0.02 // of the median, so that equal values leave room for noise
	madToSigma     = 1.4826
	stragglersFrom = 3
)

// spread is the median of values and their robust standard deviation.
func spread(values []float64) (med, sigma float64) {
	med = median(values)
	distances := make([]float64, len(values))
	for i, v := range values {
		distances[i] = math.Abs(v - med)
	}
	return med, max(madToSigma*median(distances), madFloor*med)
}

// straggles reports whether v is far above the usual value; more is worse.
func straggles(v, med, sigma float64) bool {
	return med > 0 && v > stragglerRatio*med && v-med > stragglerZ*sigma
}

// judgeCompute decides for every node with a result whether it is much slower than the others, or than the nodes of the
// run's last check, whose median is usual. Computing needs no partner, so three nodes are enough. It returns the median
// for the next check.
func judgeCompute(nodes []*node, usual float64, exclude bool) float64 {
	var values []float64
	for _, n := range nodes {
		if n.matmul > 0 {
			values = append(values, n.matmul)
		}
	}
	med, sigma := usual, madFloor*usual
	if len(values) >= stragglersFrom {
		med, sigma = spread(values)
		usual = med
	}
	for _, n := range nodes {
		if n.matmul > 0 && straggles(n.matmul, med, sigma) {
			n.slowCompute(med, exclude)
		}
	}
	return usual
}

// slowCompute makes a straggler of n.
func (n *node) slowCompute(med float64, exclude bool) {
	text := fmt.Sprintf("a multiplication takes %.3g ms, %.2f times the median of %.3g", n.matmul, n.matmul/med, med)
	severity := Warn
	n.slow = Verdict{State: StateSlow, Kind: "compute", Confidence: 0.99, Reason: text}
	if exclude {
		severity = Fatal
		n.slow.State, n.slow.Excluded = StateFaulty, true
	}
	n.slow.Findings = []Finding{{Check: "torch", Kind: "compute", Severity: severity, Metric: "matmul", Value: n.matmul,
		Unit: "ms", Threshold: stragglerRatio * med, Median: med, Text: text}}
}
