package report

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/merge"
	"dlrover-run/hang/rankset"
	"dlrover-run/internal/stable"
	"dlrover-run/internal/text"
)

// Bounds of the names in the text.
const (
	maxGroups   = 64
	maxFamilies = 4 // ranks with children in the text
	topFrames   = 8
	maxWaits    = 32
	maxFlights  = 64
	maxErrors   = 64
	maxRAS      = 4 << 10 // bytes of a node
)

// WriteText writes the report for people. Its first line is for programs: HANG (STACKS where nothing hangs, SLOW for a
// straggler), then key=value, values with spaces in quotes. The verdict's line follows, then the groups of ranks that
// are in the same functions, the largest first.
func (c Incident) WriteText(to io.Writer) error {
	t := textReport{Incident: c, w: bufio.NewWriter(to)}
	t.printf("%s\n%s\n", c.firstLine(), c.headline())
	t.about()
	t.suspects()
	t.groups()
	t.children()
	t.waits()
	t.flights()
	t.ras()
	return t.w.Flush()
}

// headline is the verdict for people.
func (c Incident) headline() string {
	if c.Verdict.Line != "" {
		return plain(c.Verdict.Line)
	}
	return "no verdict: these are the stacks alone"
}

func (c Incident) firstLine() string {
	v := c.Verdict
	what := "HANG"
	switch v.Kind {
	case hang.KindNone:
		what = "STACKS"
	case hang.KindSlow:
		what = "SLOW"
	}
	suspects := v.SuspectRanks()
	e := c.World.Epoch
	fields := [][2]string{
		{"job", c.Job}, {"epoch", fmt.Sprintf("%d.%d.%d", e.Term, e.Round, e.Epoch)}, {"step", c.step()},
		{"pg", v.Group}, {"in", v.In}, {"seq", seq(v.In)}, {"stuck", strings.ReplaceAll(v.Waiting, ",", "/")},
		{"suspects", strings.ReplaceAll(suspects.String(), ",", "/")}, {"reason", string(v.Kind)},
	}
	if len(v.Suspects) > 0 {
		s := v.Suspects[0]
		fields = append(fields, [2]string{"node", s.Node}, [2]string{"at", s.Where.Source()}, [2]string{"func", s.Where.Func})
	}
	if v.Age > 0 {
		fields = append(fields, [2]string{"age", strconv.Itoa(int(v.Age/time.Second)) + "s"})
	}
	fields = append(fields, [2]string{"confidence", string(v.Confidence)},
		[2]string{"no_data", strings.ReplaceAll(c.noData().String(), ",", "/")})
	for _, f := range fields {
		if f[1] != "" {
			what += " " + f[0] + "=" + quoted(f[1])
		}
	}
	return what
}

// quoted is a value on the first line.
func quoted(s string) string {
	s = plain(s)
	if strings.ContainsAny(s, " \"'=\\") {
		return strconv.Quote(s)
	}
	return s
}

// step is the most that any rank has made; the ranks that wait are there.
func (c Incident) step() string {
	steps := uint64(0)
	for i := range c.Evidence {
		if p := c.Evidence[i].Page(); p != nil {
			steps = max(steps, p.Steps)
		}
	}
	if steps == 0 {
		return ""
	}
	return strconv.FormatUint(steps, 10)
}

// seq is the number in the name of a collective, such as all_reduce #246.
func seq(in string) string {
	_, after, _ := strings.Cut(in, "#")
	if end := strings.IndexFunc(after, func(r rune) bool { return r < '0' || r > '9' }); end >= 0 {
		after = after[:end]
	}
	return after
}

// noData are the ranks without any stack.
func (c Incident) noData() rankset.Set {
	known := rankset.Set{}
	for _, e := range c.Evidence {
		if e.Stacks != nil && slices.ContainsFunc(e.Stacks.Threads, func(t hang.Thread) bool {
			return len(t.Python)+len(t.Native) > 0
		}) {
			known.Add(e.Rank)
		}
	}
	return c.World.Ranks().Without(known)
}

// textReport is a report that is being written; Flush reports the errors.
type textReport struct {
	Incident
	w *bufio.Writer
}

func (t *textReport) printf(format string, args ...any) { fmt.Fprintf(t.w, format, args...) }

func (t *textReport) about() {
	t.printf("\n%s: %d ranks on %d nodes\n", t.At.UTC().Format(time.RFC3339), t.World.Ranks().Len(),
		t.World.Working())
	if n := t.World.Elsewhere; n > 0 {
		t.printf("not seen: %d ranks of the job, elsewhere\n", n)
	}
	if none := t.noData(); len(none) > 0 {
		t.printf("no data: ranks %s (%d)\n", none.Brief(64), none.Len())
	}
	if t.Verdict.Doubt != "" {
		t.printf("confidence %s: %s\n", plain(string(t.Verdict.Confidence)), plain(t.Verdict.Doubt))
	}
	for _, n := range t.Notes {
		t.printf("note: %s\n", plain(n))
	}
	t.errors()
}

// errors writes the errors of the ranks, each once.
func (t *textReport) errors() {
	of := map[string]*rankset.Set{}
	var order []string
	add := func(rank int, text string) {
		if of[text] == nil {
			of[text], order = &rankset.Set{}, append(order, text)
		}
		of[text].Add(rank)
	}
	for _, e := range t.Evidence {
		if e.Error != "" {
			add(e.Rank, e.Error)
		}
		if e.Stacks != nil && e.Stacks.Error != "" {
			add(e.Rank, "its stacks: "+e.Stacks.Error)
		}
	}
	for _, e := range order[:min(len(order), maxErrors)] {
		t.printf("%s: %s\n", ranks(*of[e]), plain(e))
	}
}

func (t *textReport) suspects() {
	if len(t.Verdict.Suspects) == 0 {
		return
	}
	t.printf("\nsuspects\n")
	for i, s := range t.Verdict.Suspects {
		if i == maxGroups {
			t.printf("  and %d more\n", len(t.Verdict.Suspects)-i)
			return
		}
		t.printf("  rank %d (node %d %s, pid %d): %s", s.Rank, s.GroupRank, plain(s.Node), s.PID, plain(s.Doing))
		if s.Where.Func != "" {
			t.printf(" in %s at %s", plain(s.Where.Func), plain(s.Where.Source()))
		}
		if s.Exception != "" {
			t.printf(", after its main thread has ended by %s", plain(s.Exception))
		}
		if s.Phase != hang.PhaseUnknown {
			t.printf(", phase %s", s.Phase)
		}
		t.printf("\n")
	}
}

// groups are by the Python stacks or, of programs without any, by the native ones.
func (t *textReport) groups() {
	groups := merge.Groups(t.Evidence, false)
	if len(groups) == 0 {
		groups = merge.Groups(t.Evidence, true)
	}
	suspects := t.Verdict.SuspectRanks()
	stable.Sort(groups, func(a, b merge.Group) int { // to be seen even among thousands
		return -cmp.Compare(boolean(a.Ranks.Meets(suspects)), boolean(b.Ranks.Meets(suspects)))
	})
	if len(groups) > 0 {
		t.printf("\nmain threads, innermost function first\n")
	}
	for i, g := range groups {
		if i == maxGroups {
			t.printf("  and %d groups more; %s has them\n", len(groups)-i, PythonStacks)
			return
		}
		t.group(g)
	}
}

func boolean(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (t *textReport) group(g merge.Group) {
	t.printf("  %s", ranks(g.Ranks))
	for i := range len(g.States) {
		t.printf(", %s", hang.StateName(g.States[i]))
	}
	for _, p := range g.Phases {
		if p != hang.PhaseUnknown {
			t.printf(", phase %s", p)
		}
	}
	t.printf("\n")
	t.frames(g.Frames)
	if g.Native.Func != "" && len(g.Frames) > 0 && g.Native != g.Frames[0] {
		t.printf("    native: %s at %s\n", plain(g.Native.Func), plain(merge.Foldable(g.Native.Source())))
	}
}

func (t *textReport) frames(frames []hang.Frame) {
	for i, f := range frames {
		if i == topFrames {
			t.printf("    and %d more\n", len(frames)-i)
			return
		}
		t.printf("    %s at %s\n", plain(merge.Foldable(f.Func)), plain(merge.Foldable(f.Source())))
	}
}

// visible is the more useful stack of a thread.
func visible(t hang.Thread) []hang.Frame {
	if len(t.Python) > 0 {
		return t.Python
	}
	return t.Native
}

// children writes the children of the suspects, or of the first ranks that have some.
func (t *textReport) children() {
	suspects := t.Verdict.SuspectRanks()
	shown := 0
	for _, e := range t.Evidence {
		if e.Stacks == nil || len(e.Stacks.Children) == 0 || len(suspects) > 0 && !suspects.Has(e.Rank) {
			continue
		}
		if shown++; shown > maxFamilies {
			return
		}
		t.printf("\nchildren of rank %d, innermost function first\n", e.Rank)
		for _, c := range e.Stacks.Children {
			t.printf("  pid %d %s\n", c.TID, plain(c.Name))
			t.frames(visible(c))
		}
	}
}

func (t *textReport) waits() {
	if len(t.Store) > 0 {
		t.printf("\nkeys of the workers' store that are waited for\n")
	}
	for _, w := range t.Store[:min(len(t.Store), maxWaits)] {
		t.printf("  %s: for %v by %d\n", plain(w.Key), w.Age.Round(time.Second), len(w.Waiters)+w.More)
	}
}

// ranks are 1 rank (3), or 2 ranks (0-1).
func ranks(s rankset.Set) string {
	if s.Len() == 1 {
		return "rank " + s.String()
	}
	return fmt.Sprintf("%d ranks %s", s.Len(), s.Brief(64))
}

// flights are the collectives that have not completed, each with the ranks that are in it.
func (t *textReport) flights() {
	in := map[hang.FlightEntry]*rankset.Set{}
	var order []hang.FlightEntry
	for _, e := range t.Evidence {
		if e.Flight == nil {
			continue
		}
		for _, f := range e.Flight.Entries {
			if f.State == "completed" {
				continue
			}
			if in[f] == nil {
				in[f], order = &rankset.Set{}, append(order, f)
			}
			in[f].Add(e.Rank)
		}
	}
	if len(order) > 0 {
		t.printf("\nflight recorder: collectives that have not completed\n")
	}
	for i, f := range order {
		if i == maxFlights {
			t.printf("  and %d more\n", len(order)-i)
			return
		}
		of := strings.Join(strings.Fields(fmt.Sprint("of ", cmp.Or(f.Desc, f.Group), " ", f.Sizes, " ", f.DType)), " ")
		t.printf("  %s: %s #%d %s %s\n", ranks(*in[f]), plain(f.Op), f.Seq, plain(of), plain(f.State))
	}
}

func (t *textReport) ras() {
	for _, r := range t.RAS {
		t.printf("\nNCCL's RAS\n")
		for line := range strings.Lines(r[:min(len(r), maxRAS)]) {
			t.printf("  %s\n", plain(strings.TrimRight(line, "\r\n")))
		}
	}
}

// plain is foreign text, on one line and without characters that act on a terminal.
func plain(s string) string { return text.Clean(s, '_') }
