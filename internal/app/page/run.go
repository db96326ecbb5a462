package page

import (
	"time"

	"dlrover-run/internal/app/answers"
)

// view is a page of a run.
type view struct {
	Run      string
	Path     string // of the page
	Headline string
	Tone     answers.Tone
	Answers  []answers.Answer
	Presses  []answers.Press
	Events   []eventRow
	Older    int // events that are not shown
	Nodes    []nodeRow
	Grid     *grid
	Evidence []string
	Stacks   *flame // nil: none were collected
	Running  bool
	Checked  string // the path of the page of its check; "": it makes none
	At       time.Time
}

func runView(f answers.Facts) view {
	v := view{Run: f.Run.Run, Path: pathOf(f.Run.Run), At: f.Now, Presses: f.Presses(), Evidence: f.Evidence(),
		Answers: f.All(), Nodes: nodesOf(f.Run), Grid: gridOf(f)}
	v.Running = f.Run.Phase == "running" && f.Run.Outcome == ""
	if f.Run.Params.Check != "" {
		v.Checked = v.Path + "/check"
	}
	v.Headline, v.Tone = v.Answers[0].Lines[0], v.Answers[0].Tone
	v.Events, v.Older = eventRows(f.Events)
	return v
}
