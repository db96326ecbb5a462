package ctl

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"

	"dlrover-run/internal/table"
	"dlrover-run/rendezvous"
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
		nodes := r.Members + r.Waiting
		if r.Outcome != "" {
			nodes = len(r.Ended)
		}
		t.Row(r.Run, strconv.Itoa(nodes), size(r.Params), strconv.Itoa(workers(r.Status)),
			strconv.Itoa(r.Round), strconv.Itoa(r.Epoch), restarts(r.Status), phase(r.Status))
	}
	return t.Flush()
}

// size is the value of --nnodes.
func size(p rendezvous.Params) string {
	switch {
	case p.Max == 0: // no node is here that knows it
		return "-"
	case p.Min == p.Max:
		return strconv.Itoa(p.Min)
	}
	return fmt.Sprintf("%d to %d", p.Min, p.Max)
}

func restarts(s rendezvous.Status) string {
	return fmt.Sprintf("%d of %d", s.Restarts, s.Params.MaxRestarts)
}
