package page

import (
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"dlrover-run/internal/app/answers"
	"dlrover-run/netcheck"
	"dlrover-run/netcheck/checkview"
)

// Bounds of the page of a check. The API has the rest.
const (
	maxCells    = 1 << 16 // the worst ones
	maxPairRows = 100
)

// checkPage is the page of a run's check of its nodes: their verdicts, and the rates between them.
type checkPage struct {
	Run, Path    string
	Summary      []string
	Nodes        int
	Rows         []checkRow
	Matrix       string // a JSON object for the script's picture; "": nothing was measured
	Pairs        []checkview.Direction
	More, Others int // directions and nodes that are not shown
	At           time.Time
}

type checkRow struct {
	checkview.Row
	Tone answers.Tone
}

// matrix is the data of the script's picture: a cell is sender, receiver, rate and problem.
type matrix struct {
	Names  []string `json:"names"`
	Median float64  `json:"median"`
	Cells  [][4]any `json:"cells"`
}

func checkView(run string, p netcheck.Picture, now time.Time) checkPage {
	v := checkPage{Run: run, Path: pathOf(run), Summary: append([]string{p.Summary}, p.Paths...), Nodes: len(p.Nodes),
		At: now}
	for _, r := range checkview.Rows(p) {
		if len(v.Rows) == maxNodeRows {
			v.Others = len(p.Nodes) - maxNodeRows
			break
		}
		tones := []answers.Tone{answers.Good, answers.Waits, answers.Waits, answers.Bad, answers.Bad}
		v.Rows = append(v.Rows, checkRow{r, tones[r.Serious]})
	}
	ds := checkview.Directions(p)
	if len(ds) == 0 {
		return v
	}
	m := matrix{Names: checkview.Names(p), Median: p.Median}
	for _, d := range ds[:min(len(ds), maxCells)] {
		m.Cells = append(m.Cells, [4]any{d.From, d.To, d.Mbps, d.Problem})
	}
	data, _ := json.Marshal(m) // plain values
	v.Matrix, v.Pairs = string(data), ds[:min(len(ds), maxPairRows)]
	v.More = len(ds) - len(v.Pairs)
	if p.Median > 0 {
		v.Summary = append(v.Summary, fmt.Sprintf("Median %.0f Mbit/s, line %.0f Mbit/s.", p.Median, p.Line))
	}
	return v
}

// check shows the newest check of a run.
func (p *Page) check(w http.ResponseWriter, req *http.Request) {
	run := req.PathValue("run")
	found, err := p.cfg.Source.Check(req.Context(), run)
	if err != nil {
		p.fail(w, run, err)
		return
	}
	p.show(w, req, "check", checkView(run, found, time.Now()))
}
