// Package answers has the questions that people have about a run, and their answers, for the page of the master and for
// dlroverctl top. It is pure.
package answers

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/hang"
	"dlrover-run/hang/rankset"
	"dlrover-run/internal/app/describe"
	"dlrover-run/internal/app/marks"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/job"
	"dlrover-run/netcheck"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// Facts are everything known about a run at one moment.
type Facts struct {
	Now      time.Time
	Run      api.RunStatus
	Events   []api.Event
	Verdict  *service.Verdict // nil: no epoch has ended
	Hang     hang.Picture
	Saved    *describe.Checkpoint // nil: it saves nothing
	Unsaved  string               // why the newest save has failed, or ""
	Machines marks.Known
}

// Tone says how bad a state is, for its colour. The words next to it say the same.
type Tone string

// The tones.
const (
	Good  Tone = "good"
	Waits Tone = "waits"
	Bad   Tone = "bad"
	Plain Tone = "plain"
)

// Answer is one of the questions, answered.
type Answer struct {
	ID, Question string
	Tone         Tone
	Lines        []string
	// Due are times to count down to.
	Due []rendezvous.Due
}

// Keep adds what is saved. The run has to be known.
func (f *Facts) Keep(saves coordinator.Summary) {
	f.Saved = describe.CheckpointOf(saves.Ages)
	for _, a := range saves.Ages {
		if a.Trouble != "" {
			f.Unsaved = fmt.Sprintf("No save gets to disk from %s (rank %d): %s.", f.home(a.Rank), a.Rank, a.Trouble)
			return
		}
	}
	if n := len(saves.Saves); n > 0 && saves.Saves[n-1].Error != "" {
		f.Unsaved = fmt.Sprintf("The save of step %d has failed: %s.", saves.Saves[n-1].Step, saves.Saves[n-1].Error)
	}
}

// home is the node of a rank.
func (f Facts) home(rank int) string {
	for _, n := range f.Run.Nodes { // members come first, by rank
		if rank -= n.Slots; rank < 0 && n.GroupRank >= 0 {
			return n.Name
		}
	}
	return "a node that has left"
}

// All are the questions of a run, with their answers. The first line of the first one is a headline.
func (f Facts) All() []Answer {
	return []Answer{f.moving(), f.waitsFor(), f.why(), f.next(), f.atRisk(), f.spent()}
}

// stands reports whether the workers run, and some make no progress.
func (f Facts) stands() bool {
	return f.Run.Phase == "running" && f.Hang.State != "" && f.Hang.State != hang.StateIdle &&
		f.Hang.State != hang.StateCollecting
}

// moving answers the first question.
func (f Facts) moving() Answer {
	a := Answer{ID: "moving", Question: "Is it moving?"}
	s := f.Run
	switch {
	case s.Outcome == string(job.Succeeded):
		a.Tone, a.Lines = Good, []string{fmt.Sprintf("The run has succeeded, %s ago.", describe.Age(f.Now.Sub(s.EndedAt)))}
	case s.Outcome != "":
		a.Tone, a.Lines = Bad, []string{fmt.Sprintf("The run has failed, %s ago.", describe.Age(f.Now.Sub(s.EndedAt)))}
	case s.Paused != nil || s.Hold != nil && s.Phase == "running":
		a.Tone, a.Lines = Waits, []string{"No: it is " + describe.Phase(s.Status)}
	case f.stands():
		a.Tone, a.Lines = Bad, []string{fmt.Sprintf("No step for %s, although %d workers run.",
			describe.Age(f.Now.Sub(f.Hang.Since)), s.WorldSize)}
	case s.Phase == "running":
		a.Tone = Good
		a.Lines = []string{fmt.Sprintf("Yes: %d workers run%s.", s.WorldSize, f.since(job.EventRun, ", since "))}
	default:
		a.Tone, a.Lines = Waits, []string{fmt.Sprintf("No: %s%s.", describe.Phase(s.Status),
			f.since(job.EventBreak, ", no workers since "))}
	}
	if pace := f.pace(); pace != "" {
		a.Lines = append(a.Lines, pace)
	}
	if b := s.Budget; b != nil && b.Streak > 1 && s.Outcome == "" && s.Paused == nil && s.Hold == nil && !f.stands() {
		a.Tone, a.Lines = Bad, slices.Insert(a.Lines, 0,
			fmt.Sprintf("It fails again and again: %d restarts in a row without progress.", b.Streak))
	}
	if slow := f.slow(); len(slow) > 0 && s.Outcome == "" {
		for _, n := range slow {
			a.Lines = append(a.Lines, n.line)
		}
		if a.Tone == Good {
			a.Tone = Waits
		}
	}
	if s.Restarts > 0 {
		a.Lines = append(a.Lines, fmt.Sprintf("Restarts: %s.", describe.Restarts(s.Status)))
	}
	return a
}

// pace is how far the present workers are known to be, or "".
func (f Facts) pace() string {
	p := f.Hang.Pace
	if p == nil || !f.runs(p.Epoch) {
		return ""
	}
	text := fmt.Sprintf("At least %d steps since the start of the workers", p.Steps)
	if p.StepTime > 0 {
		text += fmt.Sprintf("; a usual one takes %.3g s", p.StepTime.Seconds())
	}
	return text + "."
}

// slowNode is a slow node, in a sentence.
type slowNode struct{ name, line string }

// slow are slow nodes, by their ranks, their steps or their newest check. If ranks slow the job, the steps of others
// are slower because of that.
func (f Facts) slow() (found []slowNode) {
	for _, s := range f.Hang.Slowed[:min(len(f.Hang.Slowed), maxNamed)] {
		line := s.Line()
		found = append(found, slowNode{s.Node, strings.ToUpper(line[:1]) + line[1:] + "."})
	}
	for _, n := range f.Hang.Slow[:min(len(f.Hang.Slow), maxNamed)] {
		if len(f.Hang.Slowed) == 0 {
			line := fmt.Sprintf("Node %d (%s) is slow: %s.", n.GroupRank, n.Node, n.Text)
			found = append(found, slowNode{n.Node, line})
		}
	}
	checked := map[string]bool{}
	for _, e := range slices.Backward(f.Events) {
		if e.Event != job.EventCheckVerdict || checked[e.Node] || len(found) >= maxNamed {
			continue
		}
		checked[e.Node] = true
		why, slow := strings.CutPrefix(e.Text, string(netcheck.StateSlow)+": ")
		if slow && slices.ContainsFunc(f.Run.Nodes, func(n rendezvous.NodeStatus) bool { return n.Name == e.Node }) {
			found = append(found, slowNode{e.Node, fmt.Sprintf("Node %s is slow, by its check %s ago: %s.", e.Node,
				describe.Age(f.Now.Sub(e.At)), strings.TrimSuffix(why, "."))})
		}
	}
	return found
}

// SlowNodes are the names of slow nodes.
func (f Facts) SlowNodes() map[string]bool {
	names := map[string]bool{}
	for _, n := range f.slow() {
		names[n.name] = true
	}
	return names
}

// Suspects are the blamed ranks of a hang; before a verdict names any, the ranks without progress.
func (f Facts) Suspects() (certain, doubtful rankset.Set) {
	if !f.stands() || !f.runs(f.Hang.Epoch) {
		return nil, nil
	}
	if certain = f.Hang.Verdict.SuspectRanks(); len(certain) > 0 {
		return certain, nil
	}
	for _, s := range f.Hang.Suspicions {
		doubtful.Add(s.Rank)
	}
	return nil, doubtful
}

// Arrivals are those of the present workers; nil: unknown.
func (f Facts) Arrivals() *hang.Arrivals {
	if !f.runs(f.Hang.Epoch) {
		return nil
	}
	return f.Hang.Arrivals
}

// runs reports whether the workers of an epoch are the present ones.
func (f Facts) runs(e job.EpochID) bool {
	return f.Run.Phase == "running" && e.Round == f.Run.Round && e.Epoch == f.Run.Epoch
}

// since is the age of the newest event of a kind, after some words, or "".
func (f Facts) since(event job.Event, words string) string {
	for _, e := range slices.Backward(f.Events) {
		if e.Event == event {
			return words + describe.Age(f.Now.Sub(e.At))
		}
	}
	return ""
}

// maxNamed bounds the names in one Answer.
const maxNamed = 8

// waitsFor names the nodes or ranks that the run waits for.
func (f Facts) waitsFor() Answer {
	a := Answer{ID: "waits", Question: "For whom does it wait?", Tone: Plain}
	s := f.Run
	switch {
	case s.Outcome != "" || s.Phase == "running" && !f.stands():
		a.Lines = []string{"For nobody."}
	case f.stands():
		a.Tone = Bad
		for _, suspect := range f.Hang.Verdict.Suspects[:min(len(f.Hang.Verdict.Suspects), maxNamed)] {
			a.Lines = append(a.Lines, fmt.Sprintf("Rank %d on %s: %s.", suspect.Rank, suspect.Node, suspect.Doing))
		}
		for _, n := range f.Hang.Suspicions[:min(len(f.Hang.Suspicions), maxNamed)] {
			if len(f.Hang.Verdict.Suspects) == 0 {
				a.Lines = append(a.Lines, fmt.Sprintf("Perhaps rank %d on %s: %s.", n.Rank, n.Node, n.Why))
			}
		}
	default:
		a.Tone = Waits
		for _, thing := range s.Waits {
			a.Lines = append(a.Lines, "For "+thing+".")
		}
	}
	if len(a.Lines) == 0 {
		a.Lines = []string{"That is being found out."}
	}
	return a
}

// why answers why the run stands still, or why it was restarted last.
func (f Facts) why() Answer {
	a := Answer{ID: "why", Question: "Why?", Tone: Plain}
	if f.stands() && f.Hang.Verdict.Line != "" {
		a.Tone, a.Lines = Bad, []string{f.Hang.Verdict.Line}
	}
	if c := f.Run.Cause; c != nil && f.Run.Outcome != string(job.Succeeded) {
		a.Lines = append(a.Lines, c.Text)
	}
	if v := f.Verdict; v != nil {
		a.Lines = append(a.Lines, fmt.Sprintf("Round %d, epoch %d: %s", v.Round, v.Epoch, v.Line))
		if history := f.history(v.RootNode); history != "" {
			a.Lines = append(a.Lines, history)
		}
	}
	if len(a.Lines) == 0 {
		a.Lines = []string{"Nothing has failed."}
	}
	return a
}

// history sums up the findings about the machine of a node.
func (f Facts) history(node string) string {
	machine := node
	for _, n := range slices.Concat(f.Run.Nodes, f.Run.Ended) {
		if n.Name == node && n.Machine != "" {
			machine = n.Machine
		}
	}
	for _, n := range f.Machines.Nodes {
		if n.Name != machine || node == "" {
			continue
		}
		text := fmt.Sprintf("Machine %s: %d findings in %d runs", n.Name, len(n.Findings), n.Runs)
		if n.Mark != nil {
			text += "; marked: " + n.Mark.Reason
		}
		return text + "."
	}
	return ""
}

// next lists the events that come without anybody's help.
func (f Facts) next() Answer {
	a := Answer{ID: "next", Question: "What happens by itself?", Tone: Plain, Due: f.Run.Due}
	if v := f.Hang.Verdict; f.stands() && v.Deadline > 0 && f.Hang.State != hang.StateDecided {
		spec, err := hang.ParseSpec(f.Hang.Spec)
		does := "it is reported as a hang"
		switch {
		case err == nil && spec.Action == hang.ActRestart:
			does = "the workers are started anew"
		case err == nil && spec.Action == hang.ActStop:
			does = "the run is stopped"
		}
		a.Due = append(slices.Clone(a.Due), rendezvous.Due{At: f.Hang.Since.Add(v.Deadline),
			Text: does + ", unless there is a step"})
	}
	if b := f.Run.Budget; b != nil && f.Run.Outcome == "" {
		a.Lines = append(a.Lines, "Budget: "+describe.Budget(*b, f.Now)+".")
	}
	if len(a.Due)+len(a.Lines) == 0 {
		a.Lines = []string{"Nothing."}
	}
	return a
}

// atRisk is the cost of a failure now.
func (f Facts) atRisk() Answer {
	a := Answer{ID: "risk", Question: "What would be lost?", Tone: Plain}
	switch {
	case f.Run.Outcome != "":
		a.Lines = []string{"Nothing: the run has ended."}
		return a
	case f.Saved == nil:
		a.Lines = []string{"Unknown: no checkpoints are saved through checkpointd."}
	default:
		a.Lines = []string{"The steps since the newest checkpoint: " + f.Saved.Text(f.Now) + "."}
	}
	if f.Unsaved != "" {
		a.Tone, a.Lines = Bad, append(a.Lines, f.Unsaved)
	}
	if n := describe.Workers(f.Run.Status); n > 0 || f.Run.WorldSize > 0 {
		a.Lines = append(a.Lines, fmt.Sprintf("%.3g worker-hours a minute.", float64(max(n, f.Run.WorldSize))/60))
	}
	return a
}

// spent answers where the time of the run went.
func (f Facts) spent() Answer {
	a := Answer{ID: "time", Question: "Where did the time go?", Tone: Plain, Lines: []string{"It has just begun."}}
	if l := f.Run.Ledger; l != nil && l.String() != "" {
		a.Lines = []string{l.String() + "."}
	}
	return a
}

// Evidence are the reports of hangs, the newest first.
func (f Facts) Evidence() (lines []string) {
	for _, told := range slices.Backward(f.Hang.Verdicts) {
		state := "reported"
		switch {
		case told.Withdrawn:
			state = "withdrawn"
		case told.Decided:
			state = "counts as a hang"
		}
		lines = append(lines, fmt.Sprintf("%s (%s)", told.Verdict.Line, state))
	}
	return lines
}

// Press is a button or a key, and its cost.
type Press struct {
	Kind        rendezvous.OrderKind
	Label, Cost string
	Node        bool // it asks for the name of a node
}

// Pressable reports whether Presses has orders of a kind.
func Pressable(kind rendezvous.OrderKind) bool {
	return slices.Contains([]rendezvous.OrderKind{rendezvous.OrderRestart, rendezvous.OrderPause, rendezvous.OrderResume,
		rendezvous.OrderDrain, rendezvous.OrderBar, rendezvous.OrderUnbar}, kind)
}

// Presses are the orders that make sense now.
func (f Facts) Presses() (ps []Press) {
	s := f.Run
	if s.Outcome != "" {
		return nil
	}
	lost := "Steps since the newest checkpoint are repeated."
	if f.Saved != nil {
		lost = "Steps are repeated since: " + f.Saved.Text(f.Now) + "."
	}
	workers := fmt.Sprintf("Stops %d workers. ", s.WorldSize)
	if s.Paused != nil || s.Hold != nil {
		ps = append(ps, Press{Kind: rendezvous.OrderResume, Label: "Resume", Cost: "Starts the workers."})
	}
	if s.Phase == "running" && s.Paused == nil && s.Hold == nil {
		ps = append(ps, Press{Kind: rendezvous.OrderRestart, Label: "Restart", Cost: workers + lost})
	}
	if s.Paused == nil {
		ps = append(ps, Press{Kind: rendezvous.OrderPause, Label: "Pause",
			Cost: workers + lost + " Nothing runs until Resume."})
	}
	ps = append(ps,
		Press{Kind: rendezvous.OrderDrain, Label: "Drain a node", Node: true,
			Cost: workers + "The node saves, leaves and gets no workers; the others go on if enough are left."},
		Press{Kind: rendezvous.OrderBar, Label: "Bar a node", Node: true,
			Cost: "The node gets no workers from the next start on; if it has some, they are stopped with all others."})
	if len(s.Bars) > 0 {
		ps = append(ps, Press{Kind: rendezvous.OrderUnbar, Label: "Unbar a node", Node: true,
			Cost: "The node may get workers again."})
	}
	return ps
}

// OfEvent is the tone of an event.
func OfEvent(e job.Event) Tone {
	switch e {
	case job.EventRun, job.EventSucceeded, job.EventCleared, job.EventResumed, job.EventNodeUnmarked, job.EventSlowOver:
		return Good
	case job.EventFailed, job.EventNodeLoss, job.EventBreak, job.EventHangDecided, job.EventNodeMarked,
		job.EventRankFailed, job.EventDeviceFault, job.EventTooFew:
		return Bad
	case job.EventSuspect, job.EventBackOff, job.EventHeld, job.EventGate, job.EventHangSuspected, job.EventHangVerdict,
		job.EventBarred, job.EventLeaving, job.EventSlowFound, job.EventSlowChecked:
		return Waits
	}
	return Plain
}

// OfNode is the tone of a node.
func OfNode(n rendezvous.NodeStatus) Tone {
	switch {
	case n.State == "failed" || n.State == "barred":
		return Bad
	case n.Suspect || n.State != "member" && n.State != "succeeded":
		return Waits
	}
	return Good
}

// OfRun is the tone of a run in a list.
func OfRun(r api.RunStatus) Tone {
	switch {
	case r.Outcome == string(job.Failed):
		return Bad
	case r.Outcome != "" || r.Phase == "running" && r.Paused == nil:
		return Good
	}
	return Waits
}
