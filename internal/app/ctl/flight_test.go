package ctl

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/hang/report"
)

// A hung job has six ranks on three nodes. Two of the ranks have not answered.
func TestFlightsAreMerged(t *testing.T) {
	entry := func(group string, seq uint64, state string) hang.FlightEntry {
		return hang.FlightEntry{Group: group, Desc: "of \x1b", Seq: seq, Op: "all_reduce", State: state, Sizes: "3x2",
			DType: "Float"}
	}
	of := func(rank int, entries ...hang.FlightEntry) hang.Evidence {
		return hang.Evidence{Worker: hang.Worker{Rank: rank}, Node: "n", Flight: &hang.Flight{Entries: entries}}
	}
	page := []hang.Sample{{Page: &hang.Page{}}}
	f := flightsOf(report.Incident{
		Job: "j", World: hang.World{Nodes: []hang.WorldNode{{Name: "n0", Slots: 3}, {Name: "n1", RankBase: 3, Slots: 2},
			{Name: "n2", RankBase: 5, Slots: 1}}},
		Evidence: []hang.Evidence{
			of(0, entry("0", 12, "completed"), entry("0", 13, "started"), entry("0", 14, "scheduled")),
			of(1, entry("0", 12, "completed"), entry("0", 13, "started"), entry("2", 7, "completed")),
			of(2, entry("0", 12, "completed")),
			{Worker: hang.Worker{Rank: 3}}, {Worker: hang.Worker{Rank: 4}, Samples: page},
		},
	})
	var out strings.Builder
	require.NoError(t, f.writeText(&out))
	require.Equal(t, `3 of 6 ranks answered
  no answer of ranks 4: it has no process group of torch.distributed
  no answer of ranks 5: node n2 has not answered in time
  no answer of ranks 3: nothing of ours is in it: its launcher was not given --hang=auto, or it has not begun to train

process group 0 of \x1b
  ranks 2: #12 all_reduce 3x2 Float, completed
  ranks 0-1: #13 all_reduce 3x2 Float, started

process group 2 of \x1b
  ranks 1: #7 all_reduce 3x2 Float, completed
`, out.String())
	out.Reset()
	require.NoError(t, f.writeJSON(&out))
	var back flights
	require.NoError(t, json.Unmarshal([]byte(out.String()), &back))
	require.Equal(t, f.Lanes, back.Lanes)
	require.Len(t, back.Recorder[0].Entries, 3)
}
