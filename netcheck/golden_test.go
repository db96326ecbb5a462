package netcheck

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the golden file of histories")

// TestHistoriesAreAsBefore: every assignment, note, verdict and picture of many checks. What changes any of them is to
// be meant; -update then writes them anew.
func TestHistoriesAreAsBefore(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("SKIPPED: HISTORIES OF CHECKS ARE NOT COMPARED on " + runtime.GOARCH + ": its sums of floats may differ")
	}
	const file = "testdata/histories.txt"
	got := histories(t)
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(strings.Join(got, "")), 0o644))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	for i, line := range strings.SplitAfter(string(want), "\n") {
		if line != "" {
			require.Equal(t, line, got[i])
		}
	}
}

// histories are lines of a name and a digest.
func histories(t *testing.T) (lines []string) {
	for seed := range uint64(60) {
		lines = append(lines, history(fmt.Sprintf("events %d", seed), func(e *json.Encoder) {
			w := newWatcher(seeded{t, seed}, chanceConfig(seed))
			w.story = e
			w.live(seed, 250)
		}))
	}
	for seed := range uint64(90) {
		lines = append(lines, history(fmt.Sprintf("faults %d", seed), func(e *json.Encoder) {
			s := mixed(seed)
			s.early = false
			s.story = e
			s.run()
			_ = e.Encode(s.check.Picture())
		}))
	}
	return lines
}

func history(name string, tell func(*json.Encoder)) string {
	h := sha256.New()
	tell(json.NewEncoder(h))
	return fmt.Sprintf("%s %s\n", name, hex.EncodeToString(h.Sum(nil)[:8]))
}

// mixed is a check of few or many nodes with a choice of all faults.
func mixed(seed uint64) *sim {
	s := newSim(seed, 1+int(seed)*3%24)
	spec := chanceConfig(seed).Spec
	s.check = New(Config{Spec: spec, Seed: seed, Topology: leaves(seed)})
	s.spurious, s.disturbed, s.compute = float64(seed%4)/100, float64(seed%3)/20, simLatency
	s.commFails = seed%11 == 0
	if seed%6 == 0 {
		s.helpers = len(s.nodes) / 3
	}
	for _, x := range s.nodes {
		x.afflict(s.rng.IntN(40), spec)
	}
	if seed%5 == 0 {
		s.slowPath = func(a, b int) float64 { return []float64{1, 0.4}[(a+b)%7/6] }
	}
	if seed%7 == 0 {
		s.badPath = func(a, b int) bool { return a*b%9 == 2 }
	}
	return s
}

// leaves has four nodes at a switch, for one seed in three.
func leaves(seed uint64) func(Node) string {
	if seed%3 != 0 {
		return nil
	}
	return func(n Node) string {
		i, _ := strconv.Atoi(strings.TrimPrefix(n.ID, "n"))
		return fmt.Sprintf("leaf%d", i/4)
	}
}

// afflict gives a node the fault of a number; most numbers have none.
func (x *simNode) afflict(fault int, spec Spec) {
	if spec.Level == LevelFull {
		x.node.Torch = true
	}
	switch fault {
	case 0:
		x.dead = true
	case 1:
		x.fails = 1
	case 2:
		x.fails = 0.5
	case 3:
		x.tx = 0.5
	case 4:
		x.rx = 0.5
	case 5:
		x.matmul = 0.6
	case 6:
		x.torchFails = true
	case 7:
		x.absent = true
	case 8:
		x.loss = 0.05
	case 9:
		x.broken = Failed
	case 10:
		x.matmul = 1.7
	}
}
