package ctl

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"

	"dlrover-run/internal/app/describe"
	"dlrover-run/internal/table"
	"dlrover-run/rendezvous/api"
)

func (c *call) listRuns() error {
	runs, err := c.daemon.client.Runs(c)
	if err != nil {
		return err
	}
	slices.SortFunc(runs, func(a, b api.RunStatus) int { return cmp.Compare(a.Run, b.Run) })
	if c.args.Bool("json") {
		return c.json(runs)
	}
	if len(runs) == 0 {
		fmt.Fprintf(c.stdout, "the daemon at %s keeps no run\n", c.daemon.addr)
		return nil
	}
	t := table.New(c.stdout, "RUN", "NODES", "WANTED", "WORKERS", "ROUND", "EPOCH", "RESTARTS", "STATE")
	for _, r := range runs {
		t.Row(runRow(r)...)
	}
	return t.Flush()
}

func runRow(r api.RunStatus) []string {
	nodes := r.Members + r.Waiting
	if r.Outcome != "" {
		nodes = len(r.Ended)
	}
	return []string{r.Run, strconv.Itoa(nodes), describe.Size(r.Params), strconv.Itoa(describe.Workers(r.Status)),
		strconv.Itoa(r.Round), strconv.Itoa(r.Epoch), describe.Restarts(r.Status), describe.Phase(r.Status)}
}
