package ctl

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"dlrover-run/internal/table"
	"dlrover-run/rendezvous/ledger"
)

const costAbout = `A stop costs the time until the workers make steps again, and the steps that they repeat.
Shares are of the time without pauses.`

func (c *call) showCost() error {
	s, err := c.daemon.status(c)
	if err != nil {
		return err
	}
	if s.Ledger == nil {
		return &foundError{errors.New("nothing is booked: no node has joined, or the daemon is of an older version")}
	}
	if c.args.Bool("json") {
		return c.json(s.Ledger)
	}
	l := *s.Ledger
	if line := l.String(); line != "" {
		fmt.Fprintln(c.stdout, line)
		fmt.Fprintln(c.stdout)
	}
	whole := l.Times.Sum() - l.Times[ledger.Paused]
	slices.SortStableFunc(l.Rows, func(a, b ledger.Row) int { return cmp.Compare(b.Times.Sum(), a.Times.Sum()) })
	t := table.New(c.stdout, "CAUSE", "NODE", "COUNT", "TIME", "SHARE")
	for _, r := range l.Rows {
		d := r.Times.Sum()
		t.Row(r.Cause, cmp.Or(r.Node, "-"), strconv.Itoa(r.Count), ledger.Span(d), ledger.Percent(d, whole))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(c.stdout)
	t = table.New(c.stdout, "CLASS", "TIME", "SHARE")
	for _, class := range ledger.Classes() {
		d, share := l.Times[class], "-"
		if class != ledger.Paused {
			share = ledger.Percent(d, whole)
		}
		if d > 0 {
			t.Row(string(class), ledger.Span(d), share)
		}
		if class == ledger.Training && l.Slowed > 0 {
			t.Row("- slowed", ledger.Span(l.Slowed), ledger.Percent(l.Slowed, whole))
		}
	}
	return t.Flush()
}
