package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/hang"
	"dlrover-run/hang/serve"
	"dlrover-run/internal/app/describe"
	"dlrover-run/internal/table"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

func conditionsOption() cli.Flag {
	return &cli.BoolFlag{Name: "conditions", Usage: "add phase, conditions and counts in the words of training operators"}
}

func (c *call) showStatus() error {
	s, err := c.daemon.status(c)
	if errors.Is(err, api.ErrUnknownRun) {
		return c.showGroups(err)
	}
	if err != nil {
		return err
	}
	saved, err := c.daemon.checkpoint(c)
	if err != nil {
		return err
	}
	shown := runStatus{s, saved, operatorOf(s), c.daemon.slowed(c, s)}
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

// showGroups shows the replica groups of a run. Each is a run of its own. Without any it returns unknown.
func (c *call) showGroups(unknown error) error {
	groups, err := c.daemon.client.Runs(c)
	if err != nil {
		return err
	}
	groups = slices.DeleteFunc(groups, func(r api.RunStatus) bool { return r.Params.Group.Of != c.run() })
	if len(groups) == 0 {
		return unknown
	}
	slices.SortFunc(groups, func(a, b api.RunStatus) int { return a.Params.Group.Index - b.Params.Group.Index })
	if c.args.Bool("json") {
		return c.json(groups)
	}
	g := groups[0].Params.Group
	fmt.Fprintf(c.stdout, "run %s has %d replica groups, of which %d are needed; each is a run of its own\n\n",
		text.EscapeLine(c.run()), g.Count, g.Min)
	t := table.New(c.stdout, "GROUP", "RUN", "NODES", "WANTED", "WORKERS", "ROUND", "EPOCH", "RESTARTS", "STATE")
	for i := range g.Count {
		if len(groups) == 0 || groups[0].Params.Group.Index != i {
			t.Row(strconv.Itoa(i), rendezvous.GroupRun(c.run(), i), "0", "-", "0", "-", "-", "-", "no node is here")
			continue
		}
		t.Row(append([]string{strconv.Itoa(i)}, runRow(groups[0])...)...)
		groups = groups[1:]
	}
	return t.Flush()
}

// runStatus is the answer of status --json.
type runStatus struct {
	api.RunStatus
	Checkpoint *describe.Checkpoint `json:"checkpoint,omitempty"`
	// Operator is the same in the words of training operators.
	Operator operatorStatus `json:"operator"`
	// Slowed are the ranks that slow the job.
	Slowed []hang.Slowed `json:"slowed,omitempty"`
}

func (s runStatus) print(w io.Writer, now time.Time, es []api.Event) {
	t := table.New(w)
	t.Row("run", s.Run)
	t.Row("state", describe.Phase(s.Status))
	nodes := fmt.Sprintf("%d in the world, %d waiting", s.Members, s.Waiting)
	if !s.EndedAt.IsZero() {
		t.Row("ended", describe.Age(now.Sub(s.EndedAt))+" ago")
		nodes = fmt.Sprintf("%d at the end", len(s.Nodes))
	}
	if s.Params.Max > 0 {
		nodes += "; it wants " + describe.Size(s.Params)
	}
	t.Row("nodes", nodes)
	t.Row("workers", strconv.Itoa(describe.Workers(s.Status)))
	t.Row("round", fmt.Sprintf("%d, epoch %d", s.Round, s.Epoch))
	t.Row("restarts", describe.Restarts(s.Status))
	for _, thing := range s.Waits {
		t.Row("waits for", thing)
	}
	for _, d := range s.Due {
		t.Row("in "+describe.Age(d.At.Sub(now)), d.Text)
	}
	if s.Command != nil {
		t.Row("command", s.Command.String())
	}
	if s.Budget != nil {
		t.Row("budget", describe.Budget(*s.Budget, now))
	}
	if s.Ledger != nil && s.Ledger.String() != "" {
		t.Row("time", s.Ledger.String())
	}
	for i := range s.Slowed {
		t.Row("slow", s.Slowed[i].Line())
	}
	if s.Checkpoint != nil {
		t.Row("checkpoint", s.Checkpoint.Text(now))
	}
	if s.Cause != nil && s.Outcome == "" && s.Paused == nil {
		t.Row("last stop", s.Cause.Text)
	}
	if len(es) > 0 {
		e := es[len(es)-1]
		t.Row("last event", fmt.Sprintf("%s ago: %s %s", describe.Age(now.Sub(e.At)), e.Event, describe.Event(e)))
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
		t.Row(describe.Rank(n), n.Name, n.Addr, strconv.Itoa(n.Slots), describe.Node(n))
	}
	_ = t.Flush()
}

// checkpoint is nil for a run that saves nothing.
func (d *daemon) checkpoint(ctx context.Context) (*describe.Checkpoint, error) {
	var sum struct {
		Ages []coordinator.Age `json:"ages"`
	}
	if err := d.client.Mounted(ctx, d.run, "checkpoints", &sum); err != nil {
		return nil, err
	}
	return describe.CheckpointOf(sum.Ages), nil
}

// slowed are the ranks that slow a run; nil also where nobody can say.
func (d *daemon) slowed(ctx context.Context, s api.RunStatus) []hang.Slowed {
	if s.Phase != "running" {
		return nil
	}
	p, err := serve.Over(d.client).Picture(ctx, d.run, false)
	if err != nil {
		return nil // no node has reported, or the daemon is an older one
	}
	return p.Slowed
}
