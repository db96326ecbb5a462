package page

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"time"

	"dlrover-run/internal/app/describe"
	"dlrover-run/internal/app/marks"
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// Bounds of the rows of a page. The API has the rest.
const (
	maxEventRows = 40
	maxNodeRows  = 200
)

// press is a button, and its cost.
type press struct {
	Kind        rendezvous.OrderKind
	Label, Cost string
	Node        bool // it asks for the name of a node
}

// pressable reports whether the page gives orders of a kind.
func pressable(kind rendezvous.OrderKind) bool {
	return slices.Contains([]rendezvous.OrderKind{rendezvous.OrderRestart, rendezvous.OrderPause, rendezvous.OrderResume,
		rendezvous.OrderDrain, rendezvous.OrderBar, rendezvous.OrderUnbar}, kind)
}

// presses are the orders that make sense now.
func (f facts) presses() (ps []press) {
	s := f.run
	if s.Outcome != "" {
		return nil
	}
	lost := "Steps since the newest checkpoint are repeated."
	if f.saved != nil {
		lost = "Steps are repeated since: " + f.saved.Text(f.now) + "."
	}
	workers := fmt.Sprintf("Stops %d workers. ", s.WorldSize)
	if s.Paused != nil || s.Hold != nil {
		ps = append(ps, press{Kind: rendezvous.OrderResume, Label: "Resume", Cost: "Starts the workers."})
	}
	if s.Phase == "running" && s.Paused == nil && s.Hold == nil {
		ps = append(ps, press{Kind: rendezvous.OrderRestart, Label: "Restart", Cost: workers + lost})
	}
	if s.Paused == nil {
		ps = append(ps, press{Kind: rendezvous.OrderPause, Label: "Pause",
			Cost: workers + lost + " Nothing runs until Resume."})
	}
	ps = append(ps,
		press{Kind: rendezvous.OrderDrain, Label: "Drain a node", Node: true,
			Cost: workers + "The node saves, leaves and gets no workers; the others go on if enough are left."},
		press{Kind: rendezvous.OrderBar, Label: "Bar a node", Node: true,
			Cost: "The node gets no workers from the next start on; if it has some, they are stopped with all others."})
	if len(s.Bars) > 0 {
		ps = append(ps, press{Kind: rendezvous.OrderUnbar, Label: "Unbar a node", Node: true,
			Cost: "The node may get workers again."})
	}
	return ps
}

// eventRow is a line of the timeline.
type eventRow struct {
	At           time.Time
	Where, Event string
	Text         string
	Tone         tone
}

// eventRows are the newest events, the newest first, and how many more there are.
func eventRows(es []api.Event) (rows []eventRow, older int) {
	for _, e := range slices.Backward(es) {
		if len(rows) == maxEventRows {
			break
		}
		rows = append(rows, eventRow{At: e.At, Where: fmt.Sprintf("%d.%d", e.Round, e.Epoch), Event: string(e.Event),
			Text: describe.Event(e), Tone: toneOf(e.Event)})
	}
	return rows, len(es) - len(rows)
}

func toneOf(e job.Event) tone {
	switch e {
	case job.EventRun, job.EventSucceeded, job.EventCleared, job.EventResumed, job.EventNodeUnmarked:
		return good
	case job.EventFailed, job.EventNodeLoss, job.EventBreak, job.EventHangDecided, job.EventNodeMarked,
		job.EventRankFailed, job.EventDeviceFault, job.EventTooFew:
		return bad
	case job.EventSuspect, job.EventBackOff, job.EventHeld, job.EventGate, job.EventHangSuspected, job.EventHangVerdict,
		job.EventBarred, job.EventLeaving:
		return waits
	}
	return plain
}

// nodeRow is a node of a run.
type nodeRow struct {
	Rank, Name, Addr, Machine, State string
	Workers                          int
	Tone                             tone
}

func (f facts) nodes() (rows []nodeRow) {
	all := f.run.Nodes
	if f.run.Outcome != "" && len(all) == 0 {
		all = f.run.Ended
	}
	for _, n := range all[:min(len(all), maxNodeRows)] {
		rows = append(rows, nodeRow{Rank: describe.Rank(n), Name: n.Name, Addr: n.Addr, Machine: n.Machine,
			State: describe.Node(n), Workers: n.Slots, Tone: nodeTone(n)})
	}
	return rows
}

func nodeTone(n rendezvous.NodeStatus) tone {
	switch {
	case n.State == "failed" || n.State == "barred":
		return bad
	case n.Suspect || n.State != "member" && n.State != "succeeded":
		return waits
	}
	return good
}

// grid is the picture of all workers, drawn by the script: a column for each node, a cell for each of its ranks.
type grid struct {
	Nodes, Workers int
	Cells          string // a JSON list: of each node its name, workers and state
}

// cell is a node in a grid.
type cell struct {
	Name  string `json:"n"`
	Slots int    `json:"w"`
	Base  int    `json:"r"` // its first rank; -1: none
	Tone  tone   `json:"t"`
	State string `json:"s"`
}

// gridOf is nil for a run without nodes.
func gridOf(s api.RunStatus) *grid {
	all := s.Nodes
	if s.Outcome != "" && len(all) == 0 {
		all = s.Ended
	}
	if len(all) == 0 {
		return nil
	}
	g, cells, base := &grid{Nodes: len(all)}, make([]cell, 0, len(all)), 0
	for _, n := range all {
		c := cell{Name: n.Name, Slots: n.Slots, Base: -1, Tone: nodeTone(n), State: describe.Node(n)}
		if n.GroupRank >= 0 {
			c.Base = base
			base += n.Slots
		}
		g.Workers += n.Slots
		cells = append(cells, c)
	}
	data, _ := json.Marshal(cells) // plain values
	g.Cells = string(data)
	return g
}

// runsPage is the page of all runs.
type runsPage struct {
	Rows []runRow
	At   time.Time
}

type runRow struct {
	Run, Path, Nodes, Wanted, Restarts, State string
	Workers                                   int
	Tone                                      tone
}

// pathOf is the path of a run's page.
func pathOf(run string) string { return "/ui/runs/" + url.PathEscape(run) }

// runsView has the runs that have not ended first.
func runsView(runs []api.RunStatus, now time.Time) runsPage {
	slices.SortStableFunc(runs, func(a, b api.RunStatus) int {
		return cmp.Or(cmp.Compare(len(a.Outcome), len(b.Outcome)), cmp.Compare(a.Run, b.Run))
	})
	out := runsPage{At: now}
	for _, r := range runs {
		row := runRow{Run: r.Run, Path: pathOf(r.Run), Nodes: fmt.Sprint(r.Members + r.Waiting),
			Wanted: describe.Size(r.Params), Workers: describe.Workers(r.Status), Restarts: describe.Restarts(r.Status),
			State: describe.Phase(r.Status),
			Tone:  waits}
		switch {
		case r.Outcome == string(job.Failed):
			row.Tone = bad
		case r.Outcome != "" || r.Phase == "running" && r.Paused == nil:
			row.Tone = good
		}
		out.Rows = append(out.Rows, row)
	}
	return out
}

// machinesPage is the page of machines with findings or marks.
type machinesPage struct {
	Kept bool // findings are kept
	Rows []machineRow
	At   time.Time
}

type machineRow struct {
	Name, Mark string
	Runs       int
	Findings   []string
	Until      time.Time
	Tone       tone
}

func machinesView(known marks.Known, kept bool, now time.Time) machinesPage {
	out := machinesPage{Kept: kept, At: now}
	for _, n := range known.Nodes {
		row := machineRow{Name: n.Name, Runs: n.Runs, Mark: "none", Tone: waits}
		if n.Mark != nil {
			row.Mark, row.Until, row.Tone = n.Mark.Reason, n.Mark.Until, bad
		} else if n.Held != nil {
			row.Mark = "held back: " + n.Held.Why
		}
		for _, f := range n.Findings[:min(len(n.Findings), maxNamed)] {
			row.Findings = append(row.Findings, fmt.Sprintf("%s ago, %s: %s",
				describe.Age(time.Duration(f.Age*float64(time.Second))), f.Kind, f.Text))
		}
		out.Rows = append(out.Rows, row)
	}
	return out
}
