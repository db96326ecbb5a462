package ctl

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/app/describe"
	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
	"dlrover-run/launcher/argv"
	"dlrover-run/rendezvous"
)

func reasonOption() cli.Flag {
	return &cli.StringFlag{Name: "reason",
		Usage: "`TEXT`: the reason; logs, status and verdict of the run show it, and the list of machines"}
}

func commandOption() cli.Flag {
	return &cli.StringFlag{Name: "command", Usage: "`COMMAND`: have the workers execute this from their next start " +
		"on: a program or a .py file, with arguments if wanted, quoted as for a shell"}
}

// command is the command for the workers, nil if there is none.
func (c *call) command() (*job.Command, error) {
	if !c.args.IsSet("command") && c.behind == nil {
		return nil, nil
	}
	program, err := argv.Words(c.args.String("command"))
	if err == nil && c.args.IsSet("command") && len(program) == 0 {
		err = errors.New("it is empty")
	}
	if err != nil {
		return nil, &usageError{fmt.Errorf("--command=%s: %w", c.args.String("command"), err)}
	}
	return &job.Command{Program: program, Args: c.behind}, nil
}

func chargeOption() cli.Flag {
	return &cli.BoolFlag{Name: "charge", Usage: "spend one of the run's --max-restarts; if none is left, the run fails"}
}

// orderRun sends an order to a run. done describes its effect.
func orderRun(kind rendezvous.OrderKind, done string) func(*call) error {
	return func(c *call) error {
		command, err := c.command()
		if err != nil {
			return err
		}
		o := rendezvous.Order{Kind: kind, Charge: c.args.Bool("charge"), Command: command}
		if o.Charge {
			return c.order(o, "its workers are stopped and, if a restart is left, started anew")
		}
		return c.order(o, strings.ReplaceAll(done, "RUN", text.EscapeLine(c.run())))
	}
}

// orderNode sends an order about a node. done describes its effect.
func orderNode(kind rendezvous.OrderKind, done func(*call) string) func(*call) error {
	return func(c *call) error { return c.order(rendezvous.Order{Kind: kind, Node: c.node()}, done(c)) }
}

// order sends an order and prints its effect.
func (c *call) order(o rendezvous.Order, done string) error {
	o.Cause, o.Text = job.CauseOperator, c.reason(o.Kind)
	if err := c.daemon.client.Order(c, c.run(), o); err != nil {
		return c.refused(o, err)
	}
	return c.did(fmt.Sprintf("run %s: %s", text.EscapeLine(c.run()), done))
}

// barred describes the effect of a bar, and warns if no present node has that name.
func (c *call) barred() string {
	run, node := text.EscapeLine(c.run()), text.EscapeLine(c.node())
	text := fmt.Sprintf("node %s gets no workers any more", node)
	named := func(n rendezvous.NodeStatus) bool { return n.Name == c.node() }
	if s, err := c.daemon.status(c); err == nil && !slices.ContainsFunc(s.Nodes, named) {
		text += "; no node of that name is here now"
	}
	return fmt.Sprintf("%s; to end it: dlroverctl unbar %s %s", text, run, node)
}

func (c *call) unbarred() string {
	return "node " + text.EscapeLine(c.node()) + " may get workers again"
}

// drained describes the effect of a drain.
func (c *call) drained() string {
	run, node := text.EscapeLine(c.run()), text.EscapeLine(c.node())
	return fmt.Sprintf("node %s leaves, after a save; its launcher ends, and no other one of that name gets workers "+
		"until: dlroverctl unbar %s %s", node, run, node)
}

// reason is the operator's reason, with the operator and the kind of order: launchers show nothing else of it.
func (c *call) reason(kind rendezvous.OrderKind) string {
	by := string(kind) + " by " + c.who()
	if text := c.args.String("reason"); text != "" {
		return text + " (" + by + ")"
	}
	return by
}

// who is the name of the operator that others see.
func (c *call) who() string {
	by := "dlroverctl"
	if host, err := os.Hostname(); err == nil {
		by += " on " + text.EscapeLine(host)
	}
	if user, ok := c.env("USER"); ok && user != "" {
		by += " as " + text.EscapeLine(user)
	}
	return by
}

// refused explains why an order has no effect.
func (c *call) refused(o rendezvous.Order, err error) error {
	var why string
	switch {
	case errors.Is(err, rendezvous.ErrNotRunning):
		why = "has no workers that could be started anew"
	case errors.Is(err, rendezvous.ErrNotPaused):
		why = "is not paused or held: there is nothing to resume"
	case errors.Is(err, rendezvous.ErrFinished):
		why = "has ended: " + string(o.Kind) + " does nothing any more"
	case errors.Is(err, rendezvous.ErrUnknownNode) && o.Kind == rendezvous.OrderDrain:
		return &foundError{c.daemon.unknownNode(c, o.Node)}
	case errors.Is(err, rendezvous.ErrUnknownNode):
		why = fmt.Sprintf("does not bar node %q; it bars %s", o.Node, c.daemon.bars(c))
	default:
		return err
	}
	return &foundError{fmt.Errorf("run %q %s%s", c.run(), why, c.daemon.present(c))}
}

// bars names the nodes that get no workers.
func (d *daemon) bars(ctx context.Context) string {
	s, err := d.status(ctx)
	if err != nil {
		return "others"
	}
	names := slices.Collect(maps.Keys(s.Bars))
	for _, n := range s.Nodes {
		if n.Barred != nil && !slices.Contains(names, n.Name) {
			names = append(names, n.Name)
		}
	}
	return several(names)
}

// present describes the present state of the run, for an error.
func (d *daemon) present(ctx context.Context) string {
	s, err := d.status(ctx)
	if err != nil {
		return ""
	}
	return " (it is now: " + describe.Phase(s.Status) + ")"
}
