package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
	"dlrover-run/launcher/argv"
	"dlrover-run/rendezvous"
)

func reasonOption() cli.Flag {
	return &cli.StringFlag{Name: "reason", Category: runOptions,
		Usage: "`TEXT`: restart, stop, pause, resume, start, bar, unbar, drain, node mark, node clear: why; " +
			"shown in the log, the status and the verdict of the run, and by nodes"}
}

func chargeOption() cli.Flag {
	return &cli.BoolFlag{Name: "charge", Category: runOptions,
		Usage: "restart: spend one of the run's --max-restarts; with none left the run fails"}
}

func commandOption() cli.Flag {
	return &cli.StringFlag{Name: "command", Category: runOptions,
		Usage: "`COMMAND`: restart, pause, resume, start: what the workers execute from their next start on, a program or " +
			"a .py file, with arguments if wanted; quoted as for a shell"}
}

// command is what the workers shall execute, nil if nothing is said of that.
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

func nodeOption() cli.Flag {
	return &cli.StringFlag{Name: "node", Category: runOptions, Usage: "`NAME`: log-level, logs: of this node only"}
}

// orders are the commands that act on a run. None asks back: scripts use them.
func (p *program) orders() []*cli.Command {
	run := func(name string, kind rendezvous.OrderKind, done string, options ...cli.Flag) *cli.Command {
		return p.onDaemon(name, "RUN", func(c *call) error {
			command, err := c.command()
			if err != nil {
				return err
			}
			o := rendezvous.Order{Kind: kind, Charge: c.args.Bool("charge"), Command: command}
			if o.Charge {
				return c.order(o, "its workers are stopped and, if a restart is left, started anew")
			}
			return c.order(o, strings.ReplaceAll(done, "RUN", text.EscapeLine(c.run())))
		}, append(options, reasonOption())...)
	}
	node := func(name string, kind rendezvous.OrderKind, done func(c *call) string) *cli.Command {
		return p.onDaemon(name, "RUN NODE", func(c *call) error {
			return c.order(rendezvous.Order{Kind: kind, Node: c.node()}, done(c))
		}, reasonOption())
	}
	return []*cli.Command{
		run("restart", rendezvous.OrderRestart, "its workers are stopped and started anew", chargeOption(), commandOption()),
		run("stop", rendezvous.OrderStop, "stopped; its workers and launchers end"),
		run("pause", rendezvous.OrderPause,
			"paused; its workers are stopped, its launchers stay; to go on: dlroverctl resume RUN", commandOption()),
		run("resume", rendezvous.OrderResume, "goes on", commandOption()),
		run("start", rendezvous.OrderResume, "its workers are started", commandOption()),
		node("bar", rendezvous.OrderBar, (*call).barred),
		node("unbar", rendezvous.OrderUnbar, func(c *call) string {
			return "node " + text.EscapeLine(c.node()) + " may get workers again"
		}),
		node("drain", rendezvous.OrderDrain, (*call).drained),
		p.onDaemon("log-level", "RUN LEVEL", (*call).logLevel, nodeOption()),
	}
}

// order gives an order and says what it has done.
func (c *call) order(o rendezvous.Order, done string) error {
	o.Cause, o.Text = job.CauseOperator, c.reason(o.Kind)
	if err := c.client.Order(c, c.run(), o); err != nil {
		return c.refused(o, err)
	}
	fmt.Fprintf(c.stdout, "run %s: %s\n", text.EscapeLine(c.run()), done)
	return nil
}

// barred says what a bar does, and whether it concerns anybody who is here.
func (c *call) barred() string {
	run, node := text.EscapeLine(c.run()), text.EscapeLine(c.node())
	text := fmt.Sprintf("node %s gets no workers any more", node)
	named := func(n rendezvous.NodeStatus) bool { return n.Name == c.node() }
	if s, err := c.status(); err == nil && !slices.ContainsFunc(s.Nodes, named) {
		text += "; no node of that name is here now"
	}
	return fmt.Sprintf("%s; to end it: dlroverctl unbar %s %s", text, run, node)
}

// drained says what a drain does.
func (c *call) drained() string {
	run, node := text.EscapeLine(c.run()), text.EscapeLine(c.node())
	return fmt.Sprintf("node %s leaves, after a save; its launcher ends, and no other one of that name gets workers "+
		"until: dlroverctl unbar %s %s", node, run, node)
}

// reason is what the operator says, and who has given which order: launchers show nothing else of it.
func (c *call) reason(kind rendezvous.OrderKind) string {
	by := string(kind) + " by " + c.who()
	if text := c.args.String("reason"); text != "" {
		return text + " (" + by + ")"
	}
	return by
}

// who is the operator, for others.
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

// refused says why an order has no effect.
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
		return &foundError{c.unknownNode(o.Node)}
	case errors.Is(err, rendezvous.ErrUnknownNode):
		why = fmt.Sprintf("does not bar node %q; it bars %s", o.Node, c.bars())
	default:
		return err
	}
	return &foundError{fmt.Errorf("run %q %s%s", c.run(), why, c.present())}
}

// bars names the nodes that get no workers.
func (c *call) bars() string {
	s, err := c.status()
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

// present is what the run is doing instead, for an error.
func (c *call) present() string {
	s, err := c.status()
	if err != nil {
		return ""
	}
	return " (it is now: " + phase(s.Status) + ")"
}

// levels are what launchers understand.
func levels() []string { return []string{"debug", "info", "warn", "error"} }

// logLevel tells launchers how much to log. They forget it when they end.
func (c *call) logLevel() error {
	word, node := c.args.Args().Get(1), c.args.String("node")
	level := strings.ToLower(word)
	if level == "warning" {
		level = "warn" // as $LOGLEVEL has it
	}
	if !slices.Contains(levels(), level) {
		return &usageError{fmt.Errorf("log-level %q: need one of %s", word, strings.Join(levels(), ", "))}
	}
	s, err := c.status()
	if err == nil && s.Outcome != "" {
		return &foundError{fmt.Errorf("run %q has ended%s", c.run(), c.present())}
	}
	if err == nil {
		err = c.client.Notify(c, c.run(), node, "log-level", level)
	}
	if err != nil {
		return err
	}
	whom := "all launchers of the run are"
	if node != "" {
		whom = "the launcher of node " + text.EscapeLine(node) + " is"
	}
	fmt.Fprintf(c.stdout, "run %s: %s told to log from level %s on\n", text.EscapeLine(c.run()), whom, level)
	return nil
}
