package page

import (
	"context"
	"errors"
	"time"

	"dlrover-run/internal/app/answers"
)

func (p *Page) factsOf(run string) (f answers.Facts, err error) {
	f.Now = time.Now()
	if f.Run, err = p.cfg.Service.Hub.Run(run); err != nil {
		return f, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	es, err := p.cfg.Service.Hub.Events(ctx, run, 0)
	if err != nil && !errors.Is(err, context.DeadlineExceeded) { // a run has events from its first join on
		return f, err
	}
	f.Events = es.Events
	if v, err := p.cfg.Service.Verdict(run); err == nil {
		f.Verdict = &v
	}
	f.Hang, _ = p.cfg.Service.Hangs.Picture(ctx, run, false) // without reports there is none
	f.Keep(p.cfg.Service.Checkpoints.Summary(run))
	if p.cfg.Machines != nil {
		f.Machines = p.cfg.Machines()
	}
	return f, nil
}

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
	At       time.Time
}

func runView(f answers.Facts) view {
	v := view{Run: f.Run.Run, Path: pathOf(f.Run.Run), At: f.Now, Presses: f.Presses(), Evidence: f.Evidence(),
		Answers: f.All(), Nodes: nodesOf(f.Run), Grid: gridOf(f.Run)}
	v.Headline, v.Tone = v.Answers[0].Lines[0], v.Answers[0].Tone
	v.Events, v.Older = eventRows(f.Events)
	return v
}
