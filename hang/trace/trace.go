// Package trace shows the history in the pages of workers, as a viewer of traces reads it.
package trace

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/rankset"
)

// MaxRanks is how many ranks Write shows at most.
const MaxRanks = 1024

// Write writes the history in the workers' pages as a trace in Chrome's JSON, which Perfetto shows, too. Each
// rank is a process, its tracks are the steps, the phases and one for each process group. The suspects are first;
// when there are more than MaxRanks ranks with pages, the lowest numbers are shown.
//
// The clocks of the nodes are not compared: time 0 of each is the first sample of its workers. All nodes take it when
// they are asked, so that nodes are apart by some tenths of a second.
func Write(w io.Writer, world hang.World, ev []hang.Evidence, v hang.Verdict) error {
	t := &tracer{w: bufio.NewWriter(w), zero: zeros(ev)}
	traced := tracedRanks(ev, v)
	t.start(world, len(traced), withPages(ev), v)
	for i, e := range traced {
		t.rank(e, i)
	}
	_, _ = t.w.WriteString("\n]}\n") // Flush reports it
	return t.w.Flush()
}

// zeros are the first samples of the nodes, by name.
func zeros(ev []hang.Evidence) map[string]time.Duration {
	zero := map[string]time.Duration{}
	for _, e := range ev {
		if len(e.Samples) == 0 {
			continue
		}
		if at, ok := zero[e.Node]; !ok || e.Samples[0].At < at {
			zero[e.Node] = e.Samples[0].At
		}
	}
	return zero
}

func tracedRanks(ev []hang.Evidence, v hang.Verdict) []*hang.Evidence {
	suspects := v.SuspectRanks()
	var all []*hang.Evidence
	for i := range ev {
		if ev[i].Page() != nil {
			all = append(all, &ev[i])
		}
	}
	slices.SortStableFunc(all, func(a, b *hang.Evidence) int {
		return cmp.Or(cmp.Compare(order(suspects, a.Rank), order(suspects, b.Rank)), cmp.Compare(a.Rank, b.Rank))
	})
	return all[:min(len(all), MaxRanks)]
}

func order(first rankset.Set, rank int) int {
	if first.Has(rank) {
		return 0
	}
	return 1
}

func withPages(ev []hang.Evidence) (n int) {
	for i := range ev {
		if ev[i].Page() != nil {
			n++
		}
	}
	return n
}

// Tracks of a rank; the tracks of its process groups follow.
const (
	stepTrack = iota
	phaseTrack
	groupTracks
)

type tracer struct {
	w      *bufio.Writer
	zero   map[string]time.Duration
	any    bool // an event has been written
	rankOf int  // the process of the present events
	now    time.Duration
	from   time.Duration
}

// start writes the metadata. Viewers ignore fields that they do not know.
func (t *tracer) start(w hang.World, ranks, of int, v hang.Verdict) {
	about := map[string]any{
		"epoch": w.Epoch, "ranks": w.Ranks().Len(), "ranks_shown": ranks, "ranks_with_pages": of, "verdict": v.Line,
		"clocks": "time 0 of each node is the first sample of its workers; nodes are some tenths of a second apart",
	}
	text, _ := json.Marshal(about)
	fmt.Fprintf(t.w, `{"displayTimeUnit":"ms","otherData":%s,"traceEvents":[`, text)
}

func (t *tracer) rank(e *hang.Evidence, place int) {
	p := e.Page()
	t.rankOf, t.from, t.now = e.Rank, t.zero[e.Node], e.Samples[len(e.Samples)-1].At
	t.meta("process_name", 0, "name", fmt.Sprintf("rank %d (%s)", e.Rank, e.Node))
	t.meta("process_sort_index", 0, "sort_index", place)
	t.meta("thread_name", stepTrack, "name", "steps")
	t.meta("thread_name", phaseTrack, "name", "phases")
	t.steps(p)
	t.phases(p)
	t.groups(e)
}

func (t *tracer) steps(p *hang.Page) {
	last := len(p.StepTimes) - 1
	for i := 1; i <= last; i++ {
		t.span(stepTrack, "step "+strconv.FormatUint(p.Steps-uint64(last-i), 10), p.StepTimes[i-1], p.StepTimes[i], nil)
	}
	if p.LastStep > 0 {
		t.span(stepTrack, "step "+strconv.FormatUint(p.Steps+1, 10)+", not ended", p.LastStep, t.now, nil)
	}
}

func (t *tracer) phases(p *hang.Page) {
	for _, s := range p.Spans {
		t.span(phaseTrack, s.Phase.String(), s.From, s.To, nil)
	}
	t.span(phaseTrack, p.Phase.String()+", not ended", p.PhaseSince, t.now, nil)
}

// groups shows for each process group which collectives the samples have seen, and since when each was the newest.
func (t *tracer) groups(e *hang.Evidence) {
	for i, g := range e.Page().Groups {
		track := groupTracks + i
		name := groupName(e.Groups, g.ID)
		t.meta("thread_name", track, "name", "collectives of "+name)
		begun := hang.GroupState{}
		for _, s := range e.Samples {
			now, ok := s.Page.Group(g.ID)
			if !ok || now.Seq == begun.Seq && begun.Since > 0 {
				continue
			}
			t.span(track, "#"+strconv.FormatUint(begun.Seq, 10), begun.Since, now.Since, nil)
			begun = now
		}
		t.span(track, "#"+strconv.FormatUint(begun.Seq, 10)+", the newest", begun.Since, t.now, recorded(e.Flight, name))
	}
}

func groupName(groups []hang.Group, id uint64) string {
	i := slices.IndexFunc(groups, func(g hang.Group) bool { return g.ID == id })
	switch {
	case i < 0:
		return fmt.Sprintf("group %x", id)
	case groups[i].Desc != "":
		return groups[i].Desc
	}
	return groups[i].Name
}

// recorded are the entries of the flight recorder that have not completed, by their number.
func recorded(f *hang.Flight, group string) map[string]any {
	if f == nil {
		return nil
	}
	args := map[string]any{}
	for _, e := range f.Entries {
		if e.State != "completed" && (e.Group == group || e.Desc == group) && len(args) < 16 {
			args[fmt.Sprintf("%s #%d", e.Op, e.Seq)] = e.State
		}
	}
	return args
}

// traceEvent is a line of the trace; times are in microseconds.
type traceEvent struct {
	Name  string          `json:"name"`
	Phase string          `json:"ph"`
	PID   int             `json:"pid"`
	TID   int             `json:"tid"`
	TS    json.RawMessage `json:"ts,omitempty"`
	Dur   json.RawMessage `json:"dur,omitempty"`
	Args  map[string]any  `json:"args,omitempty"`
}

func (t *tracer) meta(what string, track int, key string, value any) {
	t.event(traceEvent{Name: what, Phase: "M", TID: track, Args: map[string]any{key: value}})
}

// span leaves out spans without a beginning, or with an end before it: a page may hold anything.
func (t *tracer) span(track int, name string, from, to time.Duration, args map[string]any) {
	if from <= 0 || to < from {
		return
	}
	t.event(traceEvent{
		Name: name, Phase: "X", TID: track, TS: micros(from - t.from), Dur: micros(to - from), Args: args,
	})
}

func (t *tracer) event(e traceEvent) {
	e.PID = t.rankOf
	text, err := json.Marshal(e)
	if err != nil {
		return // of strings and numbers: it cannot fail
	}
	if t.any {
		_ = t.w.WriteByte(',')
	}
	t.any = true
	_ = t.w.WriteByte('\n')
	_, _ = t.w.Write(text)
}

func micros(d time.Duration) json.RawMessage {
	return strconv.AppendFloat(nil, float64(d)/float64(time.Microsecond), 'f', 3, 64)
}
