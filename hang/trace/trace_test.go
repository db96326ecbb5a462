package trace

import (
	"bytes"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
)

// traced is a trace as a viewer reads it.
type traced struct {
	OtherData   map[string]any
	TraceEvents []struct {
		Name, Ph string
		Pid, Tid int
		Ts, Dur  float64
		Args     map[string]any
	}
}

func written(t *testing.T, w hang.World, ev []hang.Evidence, v hang.Verdict) (out traced) {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, Write(&b, w, ev, v))
	require.NoError(t, json.Unmarshal(b.Bytes(), &out), b.String())
	return out
}

// spans are "track name from+duration" in milliseconds.
func (tr traced) spans(rank int) (out []string) {
	for _, e := range tr.TraceEvents {
		if e.Ph == "X" && e.Pid == rank {
			out = append(out, fmt.Sprintf("%d %s %g+%g", e.Tid, e.Name, e.Ts/1000, e.Dur/1000))
		}
	}
	return out
}

func TestTraceShowsStepsPhasesAndCollectives(t *testing.T) {
	page := func(seq uint64, since time.Duration) *hang.Page {
		return &hang.Page{
			Steps: 41, LastStep: 900 * time.Millisecond,
			StepTimes: []time.Duration{700 * time.Millisecond, 800 * time.Millisecond, 900 * time.Millisecond},
			Spans: []hang.Span{
				{Phase: hang.PhaseInit, From: 100 * time.Millisecond, To: 600 * time.Millisecond},
				{Phase: hang.PhaseEval, From: 5, To: 3},
			},
			Phase: hang.PhaseTrain, PhaseSince: 600 * time.Millisecond,
			Groups: []hang.GroupState{{ID: 9, Seq: seq, Since: since}},
		}
	}
	e := hang.Evidence{
		Worker: hang.Worker{Rank: 3}, Node: "n", Groups: []hang.Group{{ID: 9, Name: "0", Desc: "default_pg"}},
		Samples: []hang.Sample{
			{At: time.Second, Page: page(7, 850*time.Millisecond)}, {At: 2 * time.Second},
			{At: 3 * time.Second, Page: page(8, 2500*time.Millisecond)},
		},
		Flight: &hang.Flight{Entries: []hang.FlightEntry{
			{Group: "0", Desc: "default_pg", Seq: 8, Op: "all_reduce", State: "started"}, {Group: "0", Seq: 7,
				State: "completed"},
		}},
	}
	tr := written(t, world(4), []hang.Evidence{{Worker: hang.Worker{Rank: 1}}, e}, hang.Verdict{})
	train, initial := hang.PhaseTrain.String(), hang.PhaseInit.String()
	require.Equal(t, []string{
		"0 step 40 -300+100", "0 step 41 -200+100", "0 step 42, not ended -100+2100",
		"1 " + initial + " -900+500", "1 " + train + ", not ended -400+2400",
		"2 #7 -150+1650", "2 #8, the newest 1500+500",
	}, tr.spans(3))
	last := tr.TraceEvents[len(tr.TraceEvents)-1]
	require.Equal(t, map[string]any{"all_reduce #8": "started"}, last.Args)
	require.Empty(t, tr.spans(1))
	require.Equal(t, map[string]any{"name": "rank 3 (n)"}, tr.TraceEvents[0].Args)
	require.EqualValues(t, 1, tr.OtherData["ranks_with_pages"])
}

// Each node has a clock of its own.
func TestNodesAreAlignedByTheirFirstSamples(t *testing.T) {
	at := func(rank int, node string, boot time.Duration) hang.Evidence {
		p := &hang.Page{Steps: 2, StepTimes: []time.Duration{boot + time.Second, boot + 2*time.Second}}
		look := hang.Sample{At: boot + 3*time.Second, Page: p}
		return hang.Evidence{Worker: hang.Worker{Rank: rank}, Node: node, Samples: []hang.Sample{look}}
	}
	tr := written(t, world(2), []hang.Evidence{at(0, "a", 0), at(1, "b", 1000*time.Hour)}, hang.Verdict{})
	require.Equal(t, []string{"0 step 2 -2000+1000"}, tr.spans(0))
	require.Equal(t, tr.spans(0), tr.spans(1))
}

func TestTraceIsBounded(t *testing.T) {
	var ev []hang.Evidence
	for r := range 3000 {
		ev = append(ev, hang.Evidence{Worker: hang.Worker{Rank: r}, Samples: []hang.Sample{{
			At: time.Second, Page: &hang.Page{StepTimes: []time.Duration{1, 2}, Steps: 5},
		}}})
	}
	tr := written(t, world(3000), ev, hang.Verdict{Suspects: []hang.Suspect{{Rank: 2999}}})
	require.Len(t, tr.spans(2999), 1)
	require.Len(t, tr.spans(1022), 1)
	require.Empty(t, tr.spans(1023))
	require.EqualValues(t, MaxRanks, tr.OtherData["ranks_shown"])
	require.EqualValues(t, 3000, tr.OtherData["ranks_with_pages"])
}

func FuzzTraceOfAnyPage(f *testing.F) {
	f.Add(int64(1), int64(2), uint64(3), uint8(4), "name")
	f.Fuzz(func(t *testing.T, a, b int64, n uint64, phase uint8, name string) {
		p := &hang.Page{Steps: n, StepTimes: []time.Duration{time.Duration(a), time.Duration(b)}, LastStep: time.Duration(b),
			Phase: hang.Phase(phase), PhaseSince: time.Duration(a),
			Groups: []hang.GroupState{{ID: n, Seq: n, Since: time.Duration(a)}}}
		e := hang.Evidence{Node: name, Groups: []hang.Group{{ID: n, Name: name}},
			Samples: []hang.Sample{{At: time.Duration(b), Page: p}}}
		written(t, world(1), []hang.Evidence{e}, hang.Verdict{Line: name})
	})
}

func world(ranks int) hang.World {
	return hang.World{Nodes: []hang.WorldNode{{Name: "n", Slots: ranks}}}
}
