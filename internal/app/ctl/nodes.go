package ctl

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"dlrover-run/internal/app/describe"
	"dlrover-run/internal/app/marks"
	"dlrover-run/internal/app/nodehealth"
	"dlrover-run/internal/table"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

const nodesAbout = `With RUN: name, state, age, chief, GPUs and machine of each node. Without RUN: machines
with findings or marks, across jobs. No replacement should be placed on a marked machine.
The daemon for that is a dlrover-master with --data-dir or --node-action.`

// nodeRow is a row of the command nodes.
type nodeRow struct {
	Name   string `json:"name"`
	Status string `json:"status"`
	Age    string `json:"age,omitempty"`
	Chief  bool   `json:"is_chief"`
	GPU    int    `json:"gpu"`
	Node   string `json:"node"`
}

// nodeRows lists the nodes of a run as Arena lists the instances of a job.
func nodeRows(s api.RunStatus, now time.Time) []nodeRow {
	states := map[string]string{"creating": "Pending", "deleted": "Terminating", "failed": "Failed",
		"pending": "Pending", "running": "Running", "succeeded": "Succeeded", "unknown": "Unknown"}
	rows, chief := make([]nodeRow, 0, len(s.Nodes)), chiefOf(s.Nodes)
	for _, n := range s.Nodes {
		r := nodeRow{Name: n.Name, Status: states[replicaState(s.Status, n)], Chief: n.GroupRank == chief, GPU: n.Devices,
			Node: cmp.Or(n.Machine, n.Name)}
		if !n.Since.IsZero() {
			r.Age = describe.Age(now.Sub(n.Since))
		}
		rows = append(rows, r)
	}
	return rows
}

// chiefOf is the number of the node of rank 0. Nodes without workers may stand before it. Without a world it is a
// number that no node has.
func chiefOf(nodes []rendezvous.NodeStatus) int {
	chief := math.MaxInt
	for _, n := range nodes {
		if n.GroupRank >= 0 && n.Slots > 0 {
			chief = min(chief, n.GroupRank)
		}
	}
	return chief
}

func (c *call) showNodes() error {
	if c.args.NArg() == 0 {
		return c.listMachines()
	}
	s, err := c.daemon.status(c)
	if err != nil {
		return err
	}
	rows := nodeRows(s, c.now())
	if c.args.Bool("json") {
		return c.json(rows)
	}
	t := table.New(c.stdout, "NAME", "STATUS", "AGE", "IS_CHIEF", "GPU", "NODE")
	for _, r := range rows {
		t.Row(r.Name, r.Status, cmp.Or(r.Age, "-"), strconv.FormatBool(r.Chief), strconv.Itoa(r.GPU), r.Node)
	}
	return t.Flush()
}

func (c *call) listMachines() error {
	var known marks.Known
	if err := c.daemon.client.Global(c, "nodes", nil, &known); err != nil {
		return c.daemon.noMachines(err)
	}
	if c.args.Bool("json") {
		return c.json(known)
	}
	if len(known.Nodes) == 0 {
		fmt.Fprintf(c.stdout, "the daemon at %s knows nothing against any node\n", c.daemon.addr)
		return nil
	}
	t := table.New(c.stdout, "NODE", "MARK", "AGE", "EXPIRES", "BY", "FINDINGS", "ACTION", "WHY")
	for _, n := range known.Nodes {
		machineRow(t, c.now(), n.Node, action(known.Action, n.Record))
	}
	err := t.Flush()
	for _, n := range known.Nodes {
		if n.Record != nil && n.Record.Why != "" {
			why := fmt.Sprintf("%s: %s is %s: %s", n.Name, n.Record.Do, n.Record.State, n.Record.Why)
			fmt.Fprintln(c.stdout, text.EscapeLine(why))
		}
	}
	for _, trouble := range known.Troubles {
		fmt.Fprintf(c.stdout, "not done: %s\n", text.EscapeLine(trouble))
	}
	return err
}

// action is the action on a machine at a level, with its progress: "taint: applied", "unmark: pending".
func action(level string, d *marks.ActionRecord) string {
	switch {
	case d == nil:
		return "-"
	case d.Do == nodehealth.Remove:
		return string(d.Do) + ": " + string(d.State)
	}
	return level + ": " + string(d.State)
}

// machineRow prints one machine: its mark, or its other records, and the newest of them.
func machineRow(t table.Table, now time.Time, n nodehealth.Node, action string) {
	mark, since, until, by, why := "-", "-", "-", "-", newest(n)
	switch {
	case n.Mark != nil:
		mark, by, why = string(n.Mark.Kind), n.Mark.By, n.Mark.Reason
		if n.Mark.Evidence != "" {
			why += ": " + n.Mark.Evidence
		}
		since, until = describe.Age(now.Sub(n.Mark.Since)), "when cleared"
		if !n.Mark.Until.IsZero() {
			until = "in " + describe.Age(n.Mark.Until.Sub(now))
		}
	case n.Held != nil:
		mark, since = "held back", describe.Age(now.Sub(n.Held.Since))
		why = n.Held.Why + "; " + string(n.Held.Kind) + ": " + n.Held.Evidence
	case n.Suspect:
		mark = "suspect"
	}
	t.Row(n.Name, mark, since, until, by, strconv.Itoa(len(n.Findings)), action, why)
}

// newest is the newest finding, with its age.
func newest(n nodehealth.Node) string {
	if len(n.Findings) == 0 {
		return ""
	}
	f := n.Findings[0]
	return fmt.Sprintf("%s ago: %s: %s", describe.Age(time.Duration(f.Age*float64(time.Second))), f.Kind, f.Text)
}

// noMachines explains the error of a daemon that keeps no records of machines.
func (d *daemon) noMachines(err error) error {
	if errors.Is(err, api.ErrNotFound) {
		return &foundError{fmt.Errorf("the daemon at %s keeps nothing about nodes across jobs; start dlrover-master with "+
			"--data-dir or --node-action. For the nodes of a run: dlroverctl nodes RUN", d.addr)}
	}
	return err
}
