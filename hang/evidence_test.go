package hang

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A look at pages alone shows neither stacks nor what comes with them.
func TestAFurtherLookAddsToTheEvidence(t *testing.T) {
	look := func(i int) []Sample { return []Sample{{At: time.Duration(i) * time.Second}} }
	first := Evidence{Samples: look(1), Stacks: &Stacks{}, Groups: []Group{{ID: 1}}, Sockets: []string{"a:1"},
		Flight: &Flight{}, Log: "log", Exception: "ValueError", Error: "late"}
	e := first
	e.add(Evidence{Samples: look(2)})
	want := first
	want.Samples, want.Error = append(look(1), look(2)...), ""
	require.Equal(t, want, e)

	second := Evidence{Samples: look(3), Stacks: &Stacks{Interpreter: "CPython"}, Groups: []Group{{ID: 2}},
		Sockets: []string{"b:1"}, Flight: &Flight{Entries: []FlightEntry{{}}}, Log: "end", Error: "no stacks"}
	e.add(second)
	second.Samples = append(want.Samples, look(3)...)
	require.Equal(t, second, e)

	for i := range 2 * maxSamples {
		e.add(Evidence{Samples: look(4 + i)})
	}
	require.Len(t, e.Samples, maxSamples)
	require.Equal(t, look(1)[0], e.Samples[0], "the first one shows the most progress")
	require.Equal(t, look(3 + 2*maxSamples)[0], e.newest())
}

// What is known of a process says nothing of another one in its place.
func TestAnotherProcessReplacesTheEvidence(t *testing.T) {
	first := Worker{PID: 7, Start: 1}
	for now, want := range map[Worker]int{first: 2, {PID: 8, Start: 1}: 1, {PID: 7, Start: 2}: 1} {
		f := &file{world: World{Nodes: []WorldNode{{Slots: 1}}}, nodes: make([]nodeReport, 1)}
		for i, w := range []Worker{first, now} {
			e := Evidence{Worker: w, Samples: []Sample{{Worker: w, At: time.Duration(1 + i)}}}
			f.take(0, &Report{Evidence: []Evidence{e}}, false)
		}
		require.Len(t, f.of(0)[0].Samples, want)
		require.Equal(t, now, f.of(0)[0].Worker)
	}
}

func TestTheLastProgressIsThatOfNodesThatSuspect(t *testing.T) {
	var s suspicions
	s.begin(2)
	s.replace(dawn, 0, []Suspicion{{Age: 20 * time.Second}})
	s.replace(dawn, 1, []Suspicion{{Age: 5 * time.Second}})
	began := dawn.Add(-time.Minute)
	require.Equal(t, dawn.Add(-5*time.Second), s.lastProgress(began))
	s.replace(dawn, 1, nil)
	require.Equal(t, dawn.Add(-20*time.Second), s.lastProgress(began))
	s.replace(dawn, 0, nil)
	require.Equal(t, began, s.lastProgress(began))
}

// Without progress an age counts from the report before, which the newest one may be late for.
func TestAgesOfSuspicions(t *testing.T) {
	for next, want := range map[Suspicion]time.Duration{
		{Rank: 0, Age: 25 * time.Second}: 30 * time.Second, {Rank: 0, Age: 40 * time.Second}: 40 * time.Second,
		{Rank: 0, Age: 5 * time.Second}: 5 * time.Second, {Rank: 1, Age: 15 * time.Second}: 15 * time.Second,
	} {
		m := nodeState{heard: dawn, suspicions: []Suspicion{{Age: 20 * time.Second}}}
		require.Equal(t, want, m.dated(dawn.Add(10*time.Second), []Suspicion{next})[0].Age, next)
	}
}

// Of every field that takes room.
func TestSizeOfEvidence(t *testing.T) {
	size := func(e Evidence) int { return e.Size() }
	sample := size(Evidence{Samples: make([]Sample, 1)})
	page := size(Evidence{Samples: []Sample{{Page: &Page{}}}})
	for name, c := range map[string][2]int{
		"a sample":     {size(Evidence{}), sample},
		"a page":       {sample, page},
		"a group":      {page, size(Evidence{Samples: []Sample{{Page: &Page{Groups: make([]GroupState, 1)}}}})},
		"a step":       {page, size(Evidence{Samples: []Sample{{Page: &Page{StepTimes: make([]time.Duration, 1)}}}})},
		"a phase":      {page, size(Evidence{Samples: []Sample{{Page: &Page{Spans: make([]Span, 1)}}}})},
		"a collective": {size(Evidence{}), size(Evidence{Flight: &Flight{Entries: make([]FlightEntry, 1)}})},
		"output":       {size(Evidence{Log: "l"}), size(Evidence{Log: "line"})},
		"work":         {size(Evidence{}), size(Evidence{Work: workIO})},
		"a socket":     {size(Evidence{}), size(Evidence{Sockets: make([]string, 1)})},
		"an error":     {size(Evidence{}), size(Evidence{Error: "e", Exception: "e"})},
	} {
		require.Greater(t, c[1], c[0], name)
	}
}

func TestStateOfEvidence(t *testing.T) {
	_, known := (&Evidence{}).State()
	require.False(t, known)
	state, known := (&Evidence{Samples: []Sample{{Proc: Proc{State: 'S'}}, {Proc: Proc{State: 'T'}}}}).State()
	require.True(t, known)
	require.Equal(t, "T (stopped)", StateName(state))
	for state, name := range map[byte]string{0: "gone", 'R': "R (running)", 'D': "D (disk sleep)", 'Y': "Y", 0xff: "ÿ"} {
		require.Equal(t, name, StateName(state))
	}
}

func TestOnlyTheNewestPageHasRings(t *testing.T) {
	steps, spans := &Page{StepTimes: make([]time.Duration, 1)}, &Page{Spans: make([]Span, 1)}
	e := Evidence{Samples: []Sample{{Page: steps}, {}, {Page: spans}, {Page: steps}}}
	e.thin()
	require.Equal(t, []Sample{{Page: &Page{}}, {}, {Page: &Page{}}, {Page: steps}}, e.Samples)
	for _, p := range []*Page{nil, {}} {
		_, ok := p.Group(1)
		require.False(t, ok)
	}
}

func TestUseBetweenTwoLooks(t *testing.T) {
	use := useBetween(Sample{}, Sample{At: 2 * time.Second, Proc: Proc{CPU: 1e9, TreeCPU: 3e9, MainCPU: 1e9, MainWait: 5e8,
		IO: 10, TreeIO: 4, Switches: 3}})
	require.Equal(t, usage{cpu: 2, mainCPU: 0.5, wants: 0.75, io: 7, switches: 3, span: 2 * time.Second}, use)
	var w busyWork
	w.see(Sample{At: 1}, Sample{At: 1, Proc: Proc{Switches: 9}}, false)
	require.Zero(t, w, "it is one look")
}

// A node's reason for partial evidence applies to every worker that has no reason of its own.
func TestEvidenceThatIsNotWhole(t *testing.T) {
	f := &file{world: World{Nodes: []WorldNode{{Slots: 2}}}, nodes: make([]nodeReport, 1)}
	f.take(0, &Report{Partial: "late", Evidence: []Evidence{{}, {Worker: Worker{Rank: 1}, Error: "no stacks"}}}, true)
	require.Equal(t, "late", f.of(0)[0].Error)
	require.Equal(t, "no stacks", f.of(0)[1].Error)
	p := packed{text: make([]byte, 8), shared: make([]shared, 1)}
	require.Equal(t, 40, p.size())
}

func TestOldSuspicionsAreSwept(t *testing.T) {
	var s suspicions
	s.begin(1)
	s.replace(dawn, 0, []Suspicion{{}})
	require.False(t, s.sweep(s.sweepAt.Add(-1)), "it is not time for that")
	require.True(t, s.sweep(s.sweepAt))
	s.clear()
	require.False(t, s.sweep(s.sweepAt), "there is nothing to sweep")
}

// From outside a suspect's own work is a sign only if all waiters spin for their devices, which looks like work.
func TestWorkOfASuspectWithoutAPage(t *testing.T) {
	at := func(d time.Duration, switches uint64) Sample {
		return Sample{Worker: Worker{PID: 1}, At: d, Proc: Proc{Switches: switches}}
	}
	for name, c := range map[string]struct {
		stacks [2]*Stacks // of the waiters, which are ranks 1 and 2
		spin   [2]bool
		moved  bool
	}{
		"both spin":        {[2]*Stacks{onDeviceStacks(), onDeviceStacks()}, [2]bool{true, true}, true},
		"one rests":        {[2]*Stacks{onDeviceStacks(), onDeviceStacks()}, [2]bool{true, false}, false},
		"both rest":        {[2]*Stacks{inAllReduce(), inAllReduce()}, [2]bool{}, false},
		"one does more":    {[2]*Stacks{inAllReduce(), inAllReduce()}, [2]bool{true, false}, true},
		"nothing is known": {[2]*Stacks{nil, nil}, [2]bool{false, true}, true},
	} {
		f := &file{world: World{Nodes: []WorldNode{{Slots: 3}}}, nodes: make([]nodeReport, 1)}
		look := func(d time.Duration, switches ...uint64) {
			r := Report{}
			for rank, s := range append([]*Stacks{inUser("f")}, c.stacks[:]...) {
				sample := at(d, switches[rank])
				sample.Rank = rank
				r.Evidence = append(r.Evidence, Evidence{Worker: sample.Worker, Stacks: s, Samples: []Sample{sample}})
			}
			f.take(0, &r, false)
		}
		look(0, 0, 0, 0)
		f.markProgress()
		look(1, 900, uint64(900*count(c.spin[0])), uint64(900*count(c.spin[1])))
		_, moved := f.moved(Verdict{Suspects: []Suspect{{Rank: 0}}, Waiting: "1-2"})
		require.Equal(t, c.moved, moved, name)
	}
}

// Another process in its place has made progress.
func TestProgressOfAWorker(t *testing.T) {
	page := func(steps uint64) *Page { return &Page{Steps: steps} }
	a := Sample{Worker: Worker{PID: 7, Start: 1}, Page: page(3)}
	for name, c := range map[string]struct {
		change func(*Sample)
		want   bool
	}{
		"nothing":                             {func(*Sample) {}, false},
		"a step":                              {func(b *Sample) { b.Page = page(4) }, true},
		"its page is gone":                    {func(b *Sample) { b.Page = nil }, false},
		"work of its main thread":             {func(b *Sample) { b.Page, b.Proc.Switches = nil, 900 }, true},
		"work, but no step":                   {func(b *Sample) { b.Proc.Switches = 900 }, false},
		"another pid":                         {func(b *Sample) { b.PID = 8 }, true},
		"the same pid, but it is another one": {func(b *Sample) { b.Start = 2 }, true},
	} {
		b := a
		c.change(&b)
		require.Equal(t, c.want, Progressed(a, b), name)
	}
}

func TestSourceOfAFrame(t *testing.T) {
	for want, f := range map[string]Frame{"data.py:12": {File: "data.py", Line: 12}, "libc.so.6": {File: "libc.so.6"},
		"??:12": {Line: 12}, "": {Func: "f"}} {
		require.Equal(t, want, f.Source())
	}
}

func TestInnermostFrameWithAName(t *testing.T) {
	libc, poll := Frame{Func: "[libc.so.6]"}, Frame{Func: "poll"}
	require.Equal(t, poll, Innermost([]Frame{{}, libc, poll, {Func: "main"}}))
	require.Equal(t, libc, Innermost([]Frame{libc, {}}))
	require.Equal(t, Frame{}, Innermost(nil))
}

func TestSummariesOfManyNodes(t *testing.T) {
	for nodes, want := range map[int]time.Duration{
		0: SummaryEvery, 1: SummaryEvery, 2: SummaryEvery, 330: SummaryEvery, 3300: 10 * SummaryEvery,
	} {
		require.Equal(t, want, Summaries(nodes), nodes)
	}
}

func TestWhatANodeMakesOfAnAsk(t *testing.T) {
	heard := Ask{Seq: 5, Judge: 1}
	require.True(t, (&Ask{Seq: 6, Judge: 1}).Follows(&heard))
	require.False(t, (&Ask{Seq: 5, Judge: 1}).Follows(&heard), "it is the same")
	require.True(t, (&Ask{Seq: 2, Judge: 2}).Follows(&heard), "another judge counts anew")
	for _, ask := range []Ask{{Decided: true}, {Action: ActRestart}, {Action: ActStop}} {
		require.True(t, ask.Counts())
	}
	require.False(t, (&Ask{Action: ActReport}).Counts())
}
