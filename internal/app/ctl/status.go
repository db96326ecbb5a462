package ctl

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/table"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

func conditionsOption() cli.Flag {
	return &cli.BoolFlag{Name: "conditions", Usage: "add phase, conditions and counts in the words of training operators"}
}

func (c *call) showStatus() error {
	s, err := c.daemon.status(c)
	if err != nil {
		return err
	}
	saved, err := c.daemon.checkpoint(c)
	if err != nil {
		return err
	}
	shown := runStatus{s, saved, operatorOf(s)}
	if c.args.Bool("json") {
		return c.json(shown)
	}
	es, err := c.daemon.kept(c)
	if err != nil {
		return err
	}
	shown.print(c.stdout, c.now(), es.Events)
	if c.args.Bool("conditions") {
		shown.Operator.print(c.stdout)
	}
	listNodes(c.stdout, s.Nodes)
	return nil
}

// budget describes the restarts that are left before a run ends, and the delay of the next one.
func budget(b rendezvous.BudgetStatus, now time.Time) string {
	text := fmt.Sprintf("%d restarts in a row without progress", b.Streak)
	switch {
	case b.SumCounts && b.Limit >= 0:
		text = fmt.Sprintf("%d of %d restarts in all", b.Sum, b.Limit)
	case b.SumCounts:
		text = fmt.Sprintf("%d restarts in all", b.Sum)
	case b.Limit >= 0:
		text = fmt.Sprintf("%d of %d restarts in a row without progress", b.Streak, b.Limit)
	}
	if until := b.BackoffUntil.Sub(now); until > 0 {
		text += "; the next start is in " + until.Round(time.Millisecond).String()
	} else {
		text += "; the next restart waits " + b.NextWait.Round(time.Millisecond).String()
	}
	if !b.Deadline.IsZero() {
		text += "; the deadline is in " + age(b.Deadline.Sub(now))
	}
	if !b.HeldUntil.IsZero() {
		text += "; held for another " + age(b.HeldUntil.Sub(now))
	}
	return text
}

// workers is how many run, or are being started.
func workers(s rendezvous.Status) int {
	if s.Hold == nil && (s.Phase == "running" || s.Phase == "releasing") {
		return s.WorldSize
	}
	return 0
}

// phase describes the activity of a run.
func phase(s rendezvous.Status) string {
	switch {
	case s.Outcome != "" && s.Cause != nil:
		return s.Outcome + ": " + s.Cause.Text
	case s.Outcome != "":
		return s.Outcome
	case s.Paused != nil:
		return "paused: " + s.Paused.Text
	case s.Hold != nil && s.Phase == "running":
		return "held: " + s.Hold.Text
	}
	switch s.Phase {
	case "forming":
		return "waiting for nodes"
	case "gating":
		return "checking nodes"
	case "releasing":
		return "starting"
	}
	return s.Phase
}

// runStatus is the answer of status --json.
type runStatus struct {
	api.RunStatus
	Checkpoint *checkpoint `json:"checkpoint,omitempty"`
	// Operator is the same in the words of training operators.
	Operator operatorStatus `json:"operator"`
}

func (s runStatus) print(w io.Writer, now time.Time, es []api.Event) {
	t := table.New(w)
	t.Row("run", s.Run)
	t.Row("state", phase(s.Status))
	nodes := fmt.Sprintf("%d in the world, %d waiting", s.Members, s.Waiting)
	if !s.EndedAt.IsZero() {
		t.Row("ended", age(now.Sub(s.EndedAt))+" ago")
		nodes = fmt.Sprintf("%d at the end", len(s.Nodes))
	}
	if s.Params.Max > 0 {
		nodes += "; it wants " + size(s.Params)
	}
	t.Row("nodes", nodes)
	t.Row("workers", strconv.Itoa(workers(s.Status)))
	t.Row("round", fmt.Sprintf("%d, epoch %d", s.Round, s.Epoch))
	t.Row("restarts", restarts(s.Status))
	if s.Command != nil {
		t.Row("command", s.Command.String())
	}
	if s.Budget != nil {
		t.Row("budget", budget(*s.Budget, now))
	}
	if s.Checkpoint != nil {
		t.Row("checkpoint", s.Checkpoint.describe(now))
	}
	if s.Cause != nil && s.Outcome == "" && s.Paused == nil {
		t.Row("last stop", s.Cause.Text)
	}
	if len(es) > 0 {
		e := es[len(es)-1]
		t.Row("last event", fmt.Sprintf("%s ago: %s %s", age(now.Sub(e.At)), e.Event, eventText(e)))
	}
	for _, name := range slices.Sorted(maps.Keys(s.Bars)) {
		t.Row("barred", name+": "+s.Bars[name].Text)
	}
	if len(s.Avoid) > 0 {
		t.Row("avoid", strings.Join(s.Avoid, ", ")+": replacements should go elsewhere; see dlroverctl nodes")
	}
	_ = t.Flush()
}

func listNodes(w io.Writer, nodes []rendezvous.NodeStatus) {
	if len(nodes) == 0 {
		return
	}
	fmt.Fprintln(w)
	t := table.New(w, "RANK", "NODE", "ADDRESS", "WORKERS", "STATE")
	for _, n := range nodes {
		rank := "-"
		if n.GroupRank >= 0 && !slices.Contains(outside(), n.State) {
			rank = strconv.Itoa(n.GroupRank)
		}
		t.Row(rank, n.Name, n.Addr, strconv.Itoa(n.Slots), nodeState(n))
	}
	_ = t.Flush()
}

// outside are the states of nodes that are in no world: their ranks are those of the last one.
func outside() []string { return []string{"waiting", "checking", "barred"} }

func nodeState(n rendezvous.NodeStatus) string {
	switch {
	case n.Barred != nil && n.State == "barred":
		return "barred: " + n.Barred.Text
	case n.Barred != nil:
		return n.State + ", barred: " + n.Barred.Text
	case n.Suspect:
		return n.State + ", silent"
	}
	return n.State
}

// checkpoint is the newest state that a run could restore: the oldest of the ranks' newest saves.
type checkpoint struct {
	MemoryStep int64     `json:"memory_step"`
	MemoryAt   time.Time `json:"memory_at,omitzero"`
	DiskStep   int64     `json:"disk_step"`
	DiskAt     time.Time `json:"disk_at,omitzero"`
}

// checkpoint is nil for a run that saves nothing.
func (d *daemon) checkpoint(ctx context.Context) (*checkpoint, error) {
	var sum struct {
		Ages []struct {
			MemoryStep int64     `json:"memory_step"`
			DiskStep   int64     `json:"durable_step"`
			MemoryAt   time.Time `json:"memory_at"`
			DiskAt     time.Time `json:"durable_at"`
		} `json:"ages"`
	}
	if err := d.client.Mounted(ctx, d.run, "checkpoints", &sum); err != nil || len(sum.Ages) == 0 {
		return nil, err
	}
	first := sum.Ages[0]
	out := &checkpoint{first.MemoryStep, first.MemoryAt, first.DiskStep, first.DiskAt}
	for _, a := range sum.Ages[1:] {
		if a.MemoryAt.Before(out.MemoryAt) {
			out.MemoryStep, out.MemoryAt = a.MemoryStep, a.MemoryAt
		}
		// a rank whose state another one writes has none on disk
		if out.DiskAt.IsZero() || !a.DiskAt.IsZero() && a.DiskAt.Before(out.DiskAt) {
			out.DiskStep, out.DiskAt = a.DiskStep, a.DiskAt
		}
	}
	return out, nil
}

func (s *checkpoint) describe(now time.Time) string {
	part := func(where string, step int64, at time.Time) string {
		if at.IsZero() {
			return "none " + where
		}
		return fmt.Sprintf("step %d %s, %s old", step, where, age(now.Sub(at)))
	}
	return part("in memory", s.MemoryStep, s.MemoryAt) + "; " + part("on disk", s.DiskStep, s.DiskAt)
}

// age writes a duration in its two largest units.
func age(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm%ds", d/time.Minute, d%time.Minute/time.Second)
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%dd%dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
}
