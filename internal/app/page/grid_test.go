package page

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/internal/app/answers"
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// racks are the Facts of a run of nodes with two workers each, so many below each of the switches.
func racks(switches, each int) (f answers.Facts) {
	f.Run.Phase, f.Run.Round = "running", 1
	for i := range switches * each {
		f.Run.Nodes = append(f.Run.Nodes, rendezvous.NodeStatus{Name: fmt.Sprintf("n%d", i), State: "member", GroupRank: i,
			Slots: 2, Switch: fmt.Sprintf("leaf-%d", i/each)})
	}
	return f
}

// hangs has the ranks suspected in the run of f.
func hangs(f *answers.Facts, ranks ...int) {
	f.Hang = hang.Picture{State: hang.StateWaiting, Epoch: job.EpochID{Round: 1}}
	for _, r := range ranks {
		f.Hang.Verdict.Suspects = append(f.Hang.Verdict.Suspects, hang.Suspect{Rank: r})
	}
}

func TestAGridWithoutSwitchesIsOneBlock(t *testing.T) {
	require.Nil(t, gridOf(answers.Facts{}))
	f := racks(1, 2)
	g := gridOf(f)
	require.Equal(t, "0\t2\t0\t0\t\tmember\tn0\n0\t2\t2\t0\t\tmember\tn1", g.Cells)
	require.Empty(t, g.Switches+g.Rack)
	require.Empty(t, g.Rows)
	require.Zero(t, g.LateAt)
}

// Trouble of every kind is counted by switch, and one sentence says whether it is one rack.
func TestTroubleIsFoldedBySwitch(t *testing.T) {
	for _, c := range []struct {
		harm func(*answers.Facts)
		want string
	}{
		{func(*answers.Facts) {}, "No worker is in trouble."},
		{func(f *answers.Facts) { hangs(f, 5, 6) }, "All 2 workers in trouble are below one switch: leaf-1 (2 of 4)."},
		{func(f *answers.Facts) { hangs(f, 0, 5) },
			"2 workers in trouble are below 2 of 3 switches: leaf-0 (1 of 4), leaf-1 (1 of 4)."},
		{func(f *answers.Facts) { hangs(f, 0, 5, 11) }, "3 workers in trouble are below all 3 switches."},
		{func(f *answers.Facts) { hangs(f, 0); f.Hang.Epoch.Epoch = 7 }, "No worker is in trouble."},
		{func(f *answers.Facts) {
			hangs(f)
			_ = json.Unmarshal([]byte(`{"suspicions":[{"rank":8}],"slow":[{"node":"n5","text":"slow"}]}`), &f.Hang)
		}, "All 3 workers waiting, late or in doubt are below one switch: leaf-2 (3 of 4)."},
		{func(f *answers.Facts) {
			hangs(f)
			f.Hang.Arrivals = &hang.Arrivals{Late: []hang.Lateness{{Ranks: "9", Late: time.Minute, Absent: true},
				{Ranks: "0-7"}}}
		}, "All 1 workers waiting, late or in doubt are below one switch: leaf-2 (1 of 4)."},
		{func(f *answers.Facts) {
			f.Run.Nodes = f.Run.Nodes[:4]
			f.Run.Missing = []job.Loss{{Node: "n4", Slots: 2, Switch: "leaf-2"}, {Node: "n5", Slots: 2, Switch: "leaf-2"}}
		}, "All 4 workers in trouble are below one switch: leaf-2 (4 of 4)."},
	} {
		f := racks(3, 2)
		c.harm(&f)
		g := gridOf(f)
		require.Equal(t, c.want, g.Rack)
		require.Equal(t, `["leaf-0","leaf-1","leaf-2"]`, g.Switches)
		require.Len(t, g.Rows, 3)
	}
	f := racks(3, 2)
	hangs(&f, 5, 6)
	g := gridOf(f)
	require.Contains(t, g.Cells, "\n03\t2\t4\t1\t\tmember\tn2\n30\t2\t6\t1\t\tmember\tn3\n")
	require.Equal(t, leaf{Number: 1, Name: "leaf-1", Nodes: 2, Workers: 4, Red: 2}, *g.Rows[0], "the worst is the first")
	require.Equal(t, answers.Bad, g.Rows[0].Tone())
	require.Equal(t, "2 nodes, 4 workers: 2 in trouble", g.Rows[0].Text())
	require.Equal(t, "2 nodes, 4 workers: well", g.Rows[1].Text())
}

func TestLatenessIsToldByRank(t *testing.T) {
	f := racks(1, 3)
	hangs(&f)
	f.Hang.Arrivals = &hang.Arrivals{At: time.Unix(5, 0), Late: []hang.Lateness{
		{Ranks: "1", Late: 65 * time.Second, Absent: true}, {Ranks: "3", Late: 9100 * time.Millisecond},
		{Ranks: "0", Late: 400 * time.Millisecond}, {Ranks: "2,1000"}}}
	g := gridOf(f)
	require.Equal(t, "0\t2\t0\t0\t0.4,65.0+\tmember\tn0\n0\t2\t2\t0\t0.0,9.1\tmember\tn1\n"+
		"0\t2\t4\t0\t\tmember\tn2", g.Cells)
	require.Equal(t, []string{"Ranks 1 have not come, 1m5s after the first.", "Ranks 3 came 9.1 s after the first.",
		"3 ranks came with the first."}, g.Late)
	require.Equal(t, f.Hang.Arrivals.At, g.LateAt)
	f.Run.Epoch = 1
	require.Zero(t, gridOf(f).LateAt, "these are other workers")
}

func TestAGridIsBounded(t *testing.T) {
	f := racks(1000, 1)
	f.Run.Nodes[0].Name, f.Run.Nodes[0].Switch = "a\tb\nc", "x\t\"</script>"
	for i := range 20 {
		f.Run.Nodes[i].State = "failed"
	}
	g := gridOf(f)
	require.Len(t, g.Rows, maxSwitchRows)
	require.Equal(t, 1000-maxSwitchRows, g.More)
	require.Contains(t, g.Rack, "and 12 more.")
	require.Contains(t, g.Rack, "below 20 of 1000 switches")
	require.Equal(t, 999, strings.Count(g.Cells, "\n"))
	require.Equal(t, 6000, strings.Count(g.Cells, "\t"))
}
