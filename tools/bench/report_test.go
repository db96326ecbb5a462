package main

import (
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestFormat(t *testing.T) {
	for _, tt := range []struct {
		unit  unit
		value float64
		want  string
	}{
		{duration, 0.0082, "8.2 ms"},
		{duration, 1.128, "1.13 s"},
		{duration, 45.31, "45.3 s"},
		{size, 12.34e6, "12.3 MB"},
		{size, 38_200, "38.2 kB"},
		{percent, 0.0123, "0.012 %"},
		{yesno, 1, "yes"},
		{yesno, 0, "no"},
		{yesno, 0.5, "50 % yes"},
		{speed, 18.236, "18.2 GiB/s"},
		{share, 92.4, "92.4 %"},
		{count, 0, "0"},
		{count, 2.5, "2.5"},
	} {
		t.Run(tt.want, func(t *testing.T) { require.Equal(t, tt.want, tt.unit.format(tt.value)) })
	}
}

func TestMedian(t *testing.T) {
	require.Equal(t, 2.0, median([]float64{1, 2, 9}))
	require.Equal(t, 1.5, median([]float64{1, 2}))
	require.Equal(t, 7.0, median([]float64{7}))
}

func TestAddSkipsWhatCouldNotBeTaken(t *testing.T) {
	var c cell
	c.add(math.NaN())
	c.add(3)
	require.Equal(t, []float64{3}, c.Values)
}

// testReport has every kind of cell.
func testReport() report {
	rep := report{
		Machine: machine{
			Date: time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC), CPU: "a CPU", Cores: 2, MemoryGiB: 24, OpenFiles: 1024,
			Kernel: "6.1", Go: "go1.26", Launcher: "dlrover-run v1", Torch: "1.13", LoadAtStart: "0.10", LoadAtEnd: "0.20",
		},
		Results: []result{
			{ID: "start", What: "both have values", Unit: duration, Goal: 0.025,
				Ours: cell{Values: []float64{0.030, 0.010, 0.020}}, Peers: []cell{{Values: []float64{1, 2}}}},
			{ID: "slow", What: "goal missed, peer not run", Unit: duration, Goal: 0.010, Ours: cell{Values: []float64{0.011}},
				Peers: []cell{{Missing: "not run (-slow)"}}},
			{ID: "daemon", What: "one no among the yes", Unit: yesno, Goal: 1, Ours: cell{Values: []float64{1, 0}},
				Peers: []cell{{Values: []float64{0}}}},
			{ID: "broken", What: "no value", Unit: size, Goal: 1e6,
				Ours: cell{Errors: []string{"no such process\n  and its output"}}, Peers: []cell{{}}},
			{ID: "ckpt", What: "more is better, two peers", Unit: speed, Goal: 24, Ours: cell{Values: []float64{25}},
				Peers: []cell{{Values: []float64{0.5}}, {Values: []float64{50}}}},
			{ID: "ckpt", What: "too little", Unit: share, Goal: 90, Ours: cell{Values: []float64{89.9}}, Peers: []cell{{}, {}}},
			{ID: "ckpt", What: "counts have no ratio", Unit: count, Ours: cell{Values: []float64{6}},
				Peers: []cell{{}, {Values: []float64{2}}}},
		},
	}
	for i := range rep.Results {
		r := &rep.Results[i]
		r.Ours.Side = "dlrover-run"
		names := []string{"torchrun"}
		if r.ID == "ckpt" {
			names = []string{handSide, dlroverSide}
		}
		for i, name := range names {
			r.Peers[i].Side = name
		}
		r.finish()
	}
	return rep
}

func TestMarkdownGolden(t *testing.T) {
	rep := testReport()
	got, path := rep.markdown(), filepath.Join("testdata", "report.md")
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), got)
}

func TestFailedNamesOurRowsOnly(t *testing.T) {
	rep := testReport()
	require.EqualError(t, rep.failed(), "row broken: 1 repetitions failed")
	rep.Results[3].Ours.Errors, rep.Results[3].Peers[0].Errors = nil, []string{"the peer's"}
	require.NoError(t, rep.failed())
}
