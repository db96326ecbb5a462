package ctl

import (
	"context"
	"errors"
	"fmt"

	"github.com/urfave/cli/v2"

	"dlrover-run/netcheck"
	"dlrover-run/netcheck/checkview"
	"dlrover-run/rendezvous/api"
)

func checkOptions() []cli.Flag {
	return []cli.Flag{
		&cli.BoolFlag{Name: "matrix", Usage: "print the rate of every pair of nodes"},
		&cli.BoolFlag{Name: "svg", Usage: "print the rates as a heat map, an SVG file"},
	}
}

func (c *call) showCheck() error {
	views := 0
	for _, name := range []string{"json", "matrix", "svg"} {
		if c.args.Bool(name) {
			views++
		}
	}
	if views > 1 {
		return &usageError{errors.New("--json, --matrix and --svg are different ways to print: use one of them")}
	}
	var p netcheck.Picture
	err := c.daemon.client.Mounted(c, c.run(), "checks", &p)
	switch {
	case errors.Is(err, api.ErrUnknownRun):
		return c.daemon.noCheck(c, err)
	case err != nil:
		return err
	case c.args.Bool("json"):
		return c.json(p)
	case c.args.Bool("matrix"):
		return checkview.Matrix(c.stdout, p)
	case c.args.Bool("svg"):
		return checkview.SVG(c.stdout, p)
	}
	return checkview.Table(c.stdout, p)
}

// noCheck distinguishes a run without checks from a run that the daemon does not keep.
func (d *daemon) noCheck(ctx context.Context, unknown error) error {
	if _, err := d.status(ctx); err != nil {
		return unknown
	}
	return &foundError{fmt.Errorf("run %q has made no check: none of its launchers was given --network-check, "+
		"--switchbox-check or --health-check", d.run)}
}
