package main

import (
	"math"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/torchpython"
)

var python = torchpython.Path()

// TestCheckpointRows runs the real programs with a small state; ours must have a value
// in every line, torch.save one in each row.
func TestCheckpointRows(t *testing.T) {
	b := smallBench(t)
	for _, r := range ckptRows(b.options) {
		t.Run(r.id, func(t *testing.T) {
			if why := r.missing(b, b.ours, 0); why != "" {
				t.Skip("NOT tested: " + why)
			}
			rs := b.measure(t.Context(), r)
			require.Empty(t, rs[0].Ours.Errors)
			for _, res := range rs {
				require.Len(t, res.Ours.Values, 1, res.What)
				require.Equal(t, cell{Side: dlroverSide, Missing: res.Peers[1].Missing}, res.Peers[1])
			}
			if r.noPeer == "" {
				require.Empty(t, rs[0].Peers[0].Errors)
				require.Len(t, rs[0].Peers[0].Values, 1)
			}
		})
	}
	left, err := filepath.Glob(filepath.Join(sharedMemory, ownMemory()+"*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

func smallBench(t *testing.T) *bench {
	bin := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "build", "-o", bin,
		"dlrover-run/cmd/dlrover-run", "dlrover-run/cmd/dlrover-master", "dlrover-run/cmd/checkpointd")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	require.NoError(t, prepareProcess())
	t.Chdir("../..")
	t.Setenv(dlroverPython, "")
	b, err := newBench(t.Context(), options{n: 1, peerN: 1, bin: bin, python: python, state: 24, inner: 1})
	require.NoError(t, err)
	t.Cleanup(b.close)
	return b
}

func TestCheckpointPeers(t *testing.T) {
	b := testBench(t)
	b.peerN, b.peer.missing = 2, "no PyTorch"
	b.findCkptPeers()
	require.Equal(t, "no PyTorch", b.byHand.missing)
	require.Equal(t, "BENCH_DLROVER_PYTHON is not set", b.dlrover.missing)
	t.Setenv(dlroverPython, "/opt/dlrover/bin/python")
	b.findCkptPeers()
	require.Equal(t, side{name: "DLRover", peer: true, command: []string{"/opt/dlrover/bin/python"}, reps: 2}, b.dlrover)
	require.Equal(t, []side{b.ours, b.byHand, b.dlrover}, b.sides(row{ckpt: true}))
	require.Equal(t, []side{b.ours, b.peer}, b.sides(row{}))
}

func TestRowOfTooMuchMemorySaysSo(t *testing.T) {
	b := testBench(t)
	r := row{memory: 1 << 60, lines: []line{{}}}
	require.Contains(t, r.missing(b, b.ours, 0), "needs 1099511627776 MiB of memory, /dev/shm has ")
}

func TestValuesOf(t *testing.T) {
	got, err := valuesOf([]byte(`{"b": 2, "a": 1.5}`), []string{"a", "none", "b"})
	require.NoError(t, err)
	require.True(t, math.IsNaN(got[1]))
	require.Equal(t, []float64{1.5, 2}, []float64{got[0], got[2]})
	_, err = valuesOf([]byte(`{"a": 1, "b": 2}`), []string{"a"})
	require.ErrorContains(t, err, "more than the row has lines for: map[b:2]")
	_, err = valuesOf([]byte(`{"a":`), nil)
	require.ErrorContains(t, err, `the worker's values "{\"a\":"`)
}

func FuzzValuesOf(f *testing.F) {
	f.Add([]byte(`{"a": 1}`))
	f.Add([]byte(`{"a": "1"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		keys := []string{"a", "b"}
		if got, err := valuesOf(data, keys); err == nil && len(got) != len(keys) {
			t.Fatalf("%v of %q", got, data)
		}
	})
}
