package page

import (
	"cmp"
	"fmt"
	"net/url"
	"slices"
	"time"

	"dlrover-run/internal/app/answers"
	"dlrover-run/internal/app/describe"
	"dlrover-run/internal/app/marks"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// Bounds of the rows of a page. The API has the rest.
const (
	maxEventRows = 40
	maxNodeRows  = 200
	maxFindings  = 8 // of a machine
)

// eventRow is a line of the timeline.
type eventRow struct {
	At           time.Time
	Where, Event string
	Text         string
	Tone         answers.Tone
}

// eventRows are the newest events, the newest first, and how many more there are.
func eventRows(es []api.Event) (rows []eventRow, older int) {
	for _, e := range slices.Backward(es) {
		if len(rows) == maxEventRows {
			break
		}
		rows = append(rows, eventRow{At: e.At, Where: fmt.Sprintf("%d.%d", e.Round, e.Epoch), Event: string(e.Event),
			Text: describe.Event(e), Tone: answers.OfEvent(e.Event)})
	}
	return rows, len(es) - len(rows)
}

// nodeRow is a node of a run.
type nodeRow struct {
	Rank, Name, Addr, Machine, State string
	Workers                          int
	Tone                             answers.Tone
}

// nodesIn are the nodes of a run; of one that has ended those that it had.
func nodesIn(r api.RunStatus) []rendezvous.NodeStatus {
	if r.Outcome != "" && len(r.Nodes) == 0 {
		return r.Ended
	}
	return r.Nodes
}

func nodesOf(r api.RunStatus) (rows []nodeRow) {
	all := nodesIn(r)
	for _, n := range all[:min(len(all), maxNodeRows)] {
		rows = append(rows, nodeRow{Rank: describe.Rank(n), Name: n.Name, Addr: n.Addr, Machine: n.Machine,
			State: describe.Node(n), Workers: n.Slots, Tone: answers.OfNode(n)})
	}
	return rows
}

// runsPage is the page of all runs.
type runsPage struct {
	Rows []runRow
	At   time.Time
}

type runRow struct {
	Run, Path, Nodes, Wanted, Restarts, State string
	Workers                                   int
	Tone                                      answers.Tone
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
		out.Rows = append(out.Rows, runRow{Run: r.Run, Path: pathOf(r.Run), Nodes: fmt.Sprint(r.Members + r.Waiting),
			Wanted: describe.Size(r.Params), Workers: describe.Workers(r.Status), Restarts: describe.Restarts(r.Status),
			State: describe.Phase(r.Status), Tone: answers.OfRun(r)})
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
	Tone       answers.Tone
}

func machinesView(known marks.Known, kept bool, now time.Time) machinesPage {
	out := machinesPage{Kept: kept, At: now}
	for _, n := range known.Nodes {
		row := machineRow{Name: n.Name, Runs: n.Runs, Mark: "none", Tone: answers.Waits}
		if n.Mark != nil {
			row.Mark, row.Until, row.Tone = n.Mark.Reason, n.Mark.Until, answers.Bad
		} else if n.Held != nil {
			row.Mark = "held back: " + n.Held.Why
		}
		for _, f := range n.Findings[:min(len(n.Findings), maxFindings)] {
			row.Findings = append(row.Findings, fmt.Sprintf("%s ago, %s in %s: %s",
				describe.Age(time.Duration(f.Age*float64(time.Second))), f.Kind, cmp.Or(f.Run, "no run"), f.Text))
		}
		out.Rows = append(out.Rows, row)
	}
	return out
}
