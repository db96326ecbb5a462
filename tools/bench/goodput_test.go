package main

import (
	"fmt"
	"math"
	"strings"
	"testing"
)

// Steps take 50 ms, a killed rank 200 ms more and the repetition of a step, the node 2 s.
func TestCostOfFailuresIsTheTimeBeyondQuietSteps(t *testing.T) {
	const part, first = 10, 6
	var log strings.Builder
	at := int64(0)
	pid := 100
	for step := first; step <= first+goodputParts*part; step++ {
		at += 50e6
		for rank := range goodputRanks {
			fmt.Fprintf(&log, "step %d 0 %d %d %d 0x1p+0\n", rank, pid+rank, at, step)
		}
		switch i, rest := (step-first)/part, (step-first)%part; {
		case rest != 0 || i == 0 || i == goodputParts:
		case i == goodputLoss:
			at += 2e9
		case i%2 == 1:
			at += 150e6
			pid += 10
			fmt.Fprintf(&log, "begun 0 1 %d %d -1 0x0p+0\n", pid, at)
			at += 50e6 // the step once more
			for rank := range goodputRanks {
				fmt.Fprintf(&log, "step %d 1 %d %d %d 0x1p+0\n", rank, pid+rank, at, step)
			}
		}
	}
	text := log.String()
	s := &progressed{from: strings.NewReader(text[:1001]), pids: map[int]int{}, ranks: map[int]map[int]bool{},
		at: map[int]int64{}}
	for _, rest := range []string{"", text[1001:]} {
		if rest != "" {
			s.from = strings.NewReader(rest)
		}
		if err := s.read(); err != nil {
			t.Fatal(err)
		}
	}
	if s.newest != first+goodputParts*part || s.pids[goodputRanks-1] != pid+goodputRanks-1 {
		t.Errorf("newest step %d, process %d of the last rank", s.newest, s.pids[goodputRanks-1])
	}
	want := []float64{100 * 2.8 / (0.05 * goodputSteps), 0.2, 2, 0.05}
	for i, v := range s.lost(first, part) {
		if math.Abs(v-want[i]) > 1e-9 {
			t.Errorf("value %d: %v, want %v", i, v, want[i])
		}
	}
}

func TestScaledRunHasAllFailures(t *testing.T) {
	if full, scaled := goodputPart(options{slow: true}), goodputPart(options{}); goodputParts*full != goodputSteps ||
		scaled*5 != full*2 {
		t.Errorf("parts of %d and %d steps", full, scaled)
	}
}
