package hang

import (
	"bytes"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
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

func trace(t *testing.T, w World, ev []Evidence, v Verdict) (out traced) {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, WriteTrace(&b, w, ev, v))
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
	page := func(seq uint64, since time.Duration) *Page {
		return &Page{
			Steps: 41, LastStep: 900 * time.Millisecond,
			StepTimes: []time.Duration{700 * time.Millisecond, 800 * time.Millisecond, 900 * time.Millisecond},
			Spans:     []Span{{PhaseInit, 100 * time.Millisecond, 600 * time.Millisecond}, {PhaseEval, 5, 3}},
			Phase:     PhaseTrain, PhaseSince: 600 * time.Millisecond,
			Groups: []GroupState{{ID: 9, Seq: seq, Since: since}},
		}
	}
	e := Evidence{
		Worker: Worker{Rank: 3}, Node: "n", Groups: []Group{{ID: 9, Name: "0", Desc: "default_pg"}},
		Samples: []Sample{
			{At: time.Second, Page: page(7, 850*time.Millisecond)}, {At: 2 * time.Second},
			{At: 3 * time.Second, Page: page(8, 2500*time.Millisecond)},
		},
		Flight: &Flight{Entries: []FlightEntry{
			{Group: "0", Desc: "default_pg", Seq: 8, Op: "all_reduce", State: "started"}, {Group: "0", Seq: 7,
				State: "completed"},
		}},
	}
	tr := trace(t, world(4), []Evidence{{Worker: Worker{Rank: 1}}, e}, Verdict{})
	train, initial := PhaseTrain.String(), PhaseInit.String()
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
	at := func(rank int, node string, boot time.Duration) Evidence {
		p := &Page{Steps: 2, StepTimes: []time.Duration{boot + time.Second, boot + 2*time.Second}}
		return Evidence{Worker: Worker{Rank: rank}, Node: node, Samples: []Sample{{At: boot + 3*time.Second, Page: p}}}
	}
	tr := trace(t, world(2), []Evidence{at(0, "a", 0), at(1, "b", 1000*time.Hour)}, Verdict{})
	require.Equal(t, []string{"0 step 2 -2000+1000"}, tr.spans(0))
	require.Equal(t, tr.spans(0), tr.spans(1))
}

func TestTraceIsBounded(t *testing.T) {
	var ev []Evidence
	for r := range 3000 {
		ev = append(ev, Evidence{Worker: Worker{Rank: r}, Samples: []Sample{{
			At: time.Second, Page: &Page{StepTimes: []time.Duration{1, 2}, Steps: 5},
		}}})
	}
	tr := trace(t, world(3000), ev, Verdict{Suspects: []Suspect{{Rank: 2999}}})
	require.Len(t, tr.spans(2999), 1)
	require.Len(t, tr.spans(1022), 1)
	require.Empty(t, tr.spans(1023))
	require.EqualValues(t, MaxTraceRanks, tr.OtherData["ranks_shown"])
	require.EqualValues(t, 3000, tr.OtherData["ranks_with_pages"])
}

func FuzzTraceOfAnyPage(f *testing.F) {
	f.Add(int64(1), int64(2), uint64(3), uint8(4), "name")
	f.Fuzz(func(t *testing.T, a, b int64, n uint64, phase uint8, name string) {
		p := &Page{Steps: n, StepTimes: []time.Duration{time.Duration(a), time.Duration(b)}, LastStep: time.Duration(b),
			Phase: Phase(phase), PhaseSince: time.Duration(a), Groups: []GroupState{{ID: n, Seq: n, Since: time.Duration(a)}}}
		e := Evidence{Node: name, Groups: []Group{{ID: n, Name: name}}, Samples: []Sample{{At: time.Duration(b), Page: p}}}
		trace(t, world(1), []Evidence{e}, Verdict{Line: name})
	})
}
