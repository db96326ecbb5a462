package page

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"dlrover-run/hang"
	"dlrover-run/internal/app/describe"
	"dlrover-run/internal/app/marks"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// facts are everything known about a run at one moment.
type facts struct {
	now      time.Time
	run      api.RunStatus
	events   []api.Event
	verdict  *service.Verdict // nil: no epoch has ended
	hang     hang.Picture
	saved    *describe.Checkpoint // nil: it saves nothing
	unsaved  string               // why the newest save has failed, or ""
	machines marks.Known
}

func (p *Page) factsOf(run string) (f facts, err error) {
	f.now = time.Now()
	if f.run, err = p.cfg.Service.Hub.Run(run); err != nil {
		return f, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	es, err := p.cfg.Service.Hub.Events(ctx, run, 0)
	if err != nil && !errors.Is(err, context.DeadlineExceeded) { // a run has events from its first join on
		return f, err
	}
	f.events = es.Events
	if v, err := p.cfg.Service.Verdict(run); err == nil {
		f.verdict = &v
	}
	f.hang, _ = p.cfg.Service.Hangs.Picture(ctx, run, false) // without reports there is none
	saves := p.cfg.Service.Checkpoints.Summary(run)
	f.saved = describe.CheckpointOf(saves.Ages)
	if n := len(saves.Saves); n > 0 && saves.Saves[n-1].Error != "" {
		f.unsaved = fmt.Sprintf("The save of step %d has failed: %s.", saves.Saves[n-1].Step, saves.Saves[n-1].Error)
	}
	if p.cfg.Machines != nil {
		f.machines = p.cfg.Machines()
	}
	return f, nil
}

// tone says how bad a state is, for its colour. The words next to it say the same.
type tone string

const (
	good  tone = "good"
	waits tone = "waits"
	bad   tone = "bad"
	plain tone = "plain"
)

// answer is one of the questions that a page of a run answers.
type answer struct {
	ID, Question string
	Tone         tone
	Lines        []string
	// Due are times that the browser counts down to.
	Due []rendezvous.Due
}

// view is a page of a run.
type view struct {
	Run      string
	Path     string // of the page
	Headline string
	Tone     tone
	Answers  []answer
	Presses  []press
	Events   []eventRow
	Older    int // events that are not shown
	Nodes    []nodeRow
	Grid     *grid
	Evidence []string
	At       time.Time
}

func runView(f facts) view {
	v := view{Run: f.run.Run, Path: pathOf(f.run.Run), At: f.now, Presses: f.presses(), Evidence: f.evidence()}
	moves := f.moving()
	v.Headline, v.Tone = moves.Lines[0], moves.Tone
	v.Answers = []answer{moves, f.waitsFor(), f.why(), f.next(), f.atRisk(), f.spent()}
	v.Events, v.Older = eventRows(f.events)
	v.Nodes = f.nodes()
	v.Grid = gridOf(f.run)
	return v
}

// stands reports whether the workers run, and some make no progress.
func (f facts) stands() bool {
	return f.run.Phase == "running" && f.hang.State != "" && f.hang.State != hang.StateIdle &&
		f.hang.State != hang.StateCollecting
}

// moving answers the first question.
func (f facts) moving() answer {
	a := answer{ID: "moving", Question: "Is it moving?"}
	s := f.run
	switch {
	case s.Outcome == string(job.Succeeded):
		a.Tone, a.Lines = good, []string{fmt.Sprintf("The run has succeeded, %s ago.", describe.Age(f.now.Sub(s.EndedAt)))}
	case s.Outcome != "":
		a.Tone, a.Lines = bad, []string{fmt.Sprintf("The run has failed, %s ago.", describe.Age(f.now.Sub(s.EndedAt)))}
	case s.Paused != nil || s.Hold != nil && s.Phase == "running":
		a.Tone, a.Lines = waits, []string{"No: it is " + describe.Phase(s.Status)}
	case f.stands():
		a.Tone, a.Lines = bad, []string{fmt.Sprintf("No step for %s, although %d workers run.",
			describe.Age(f.now.Sub(f.hang.Since)), s.WorldSize)}
	case s.Phase == "running":
		a.Tone = good
		a.Lines = []string{fmt.Sprintf("Yes: %d workers run%s.", s.WorldSize, f.since(job.EventRun, ", since "))}
	default:
		a.Tone, a.Lines = waits, []string{fmt.Sprintf("No: %s%s.", describe.Phase(s.Status),
			f.since(job.EventBreak, ", no workers since "))}
	}
	for _, n := range f.hang.Slow {
		a.Tone = waits
		a.Lines = append(a.Lines, fmt.Sprintf("Node %d (%s) is slow: %s.", n.GroupRank, n.Node, n.Text))
	}
	if s.Restarts > 0 {
		a.Lines = append(a.Lines, fmt.Sprintf("Restarts: %s.", describe.Restarts(s.Status)))
	}
	return a
}

// since is the age of the newest event of a kind, after some words, or "".
func (f facts) since(event job.Event, words string) string {
	for _, e := range slices.Backward(f.events) {
		if e.Event == event {
			return words + describe.Age(f.now.Sub(e.At))
		}
	}
	return ""
}

// maxNamed bounds the names in one answer.
const maxNamed = 8

// waitsFor names the nodes or ranks that the run waits for.
func (f facts) waitsFor() answer {
	a := answer{ID: "waits", Question: "For whom does it wait?", Tone: plain}
	s := f.run
	switch {
	case s.Outcome != "" || s.Phase == "running" && !f.stands():
		a.Lines = []string{"For nobody."}
	case f.stands():
		a.Tone = bad
		for _, suspect := range f.hang.Verdict.Suspects[:min(len(f.hang.Verdict.Suspects), maxNamed)] {
			a.Lines = append(a.Lines, fmt.Sprintf("Rank %d on %s: %s.", suspect.Rank, suspect.Node, suspect.Doing))
		}
		for _, n := range f.hang.Suspicions[:min(len(f.hang.Suspicions), maxNamed)] {
			if len(f.hang.Verdict.Suspects) == 0 {
				a.Lines = append(a.Lines, fmt.Sprintf("Perhaps rank %d on %s: %s.", n.Rank, n.Node, n.Why))
			}
		}
	default:
		a.Tone = waits
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
func (f facts) why() answer {
	a := answer{ID: "why", Question: "Why?", Tone: plain}
	if f.stands() && f.hang.Verdict.Line != "" {
		a.Tone, a.Lines = bad, []string{f.hang.Verdict.Line}
	}
	if c := f.run.Cause; c != nil && f.run.Outcome == "" {
		a.Lines = append(a.Lines, c.Text)
	}
	if v := f.verdict; v != nil {
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
func (f facts) history(node string) string {
	machine := node
	for _, n := range slices.Concat(f.run.Nodes, f.run.Ended) {
		if n.Name == node && n.Machine != "" {
			machine = n.Machine
		}
	}
	for _, n := range f.machines.Nodes {
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
func (f facts) next() answer {
	a := answer{ID: "next", Question: "What happens by itself?", Tone: plain, Due: f.run.Due}
	if v := f.hang.Verdict; f.stands() && v.Deadline > 0 && f.hang.State != hang.StateDecided {
		spec, err := hang.ParseSpec(f.hang.Spec)
		does := "it is reported as a hang"
		switch {
		case err == nil && spec.Action == hang.ActRestart:
			does = "the workers are started anew"
		case err == nil && spec.Action == hang.ActStop:
			does = "the run is stopped"
		}
		a.Due = append(slices.Clone(a.Due), rendezvous.Due{At: f.hang.Since.Add(v.Deadline),
			Text: does + ", unless there is a step"})
	}
	if b := f.run.Budget; b != nil && f.run.Outcome == "" {
		a.Lines = append(a.Lines, "Budget: "+describe.Budget(*b, f.now)+".")
	}
	if len(a.Due)+len(a.Lines) == 0 {
		a.Lines = []string{"Nothing."}
	}
	return a
}

// atRisk is the cost of a failure now.
func (f facts) atRisk() answer {
	a := answer{ID: "risk", Question: "What would be lost?", Tone: plain}
	switch {
	case f.run.Outcome != "":
		a.Lines = []string{"Nothing: the run has ended."}
		return a
	case f.saved == nil:
		a.Lines = []string{"Unknown: no checkpoints are saved through checkpointd."}
	default:
		a.Lines = []string{"The steps since the newest checkpoint: " + f.saved.Text(f.now) + "."}
	}
	if f.unsaved != "" {
		a.Tone, a.Lines = bad, append(a.Lines, f.unsaved)
	}
	if n := describe.Workers(f.run.Status); n > 0 || f.run.WorldSize > 0 {
		a.Lines = append(a.Lines, fmt.Sprintf("%.3g worker-hours a minute.", float64(max(n, f.run.WorldSize))/60))
	}
	return a
}

// spent answers where the time of the run went.
func (f facts) spent() answer {
	a := answer{ID: "time", Question: "Where did the time go?", Tone: plain, Lines: []string{"It has just begun."}}
	if l := f.run.Ledger; l != nil && l.String() != "" {
		a.Lines = []string{l.String() + "."}
	}
	return a
}

// evidence are the reports of hangs, the newest first.
func (f facts) evidence() (lines []string) {
	for _, told := range slices.Backward(f.hang.Verdicts) {
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
