package ctl

import (
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/app/marks"
	"dlrover-run/internal/text"
)

func (p *program) node() *cli.Command {
	change := func(action, usage string) *cli.Command {
		return &cli.Command{Name: action, ArgsUsage: "NODE", Usage: usage, Flags: connection(reasonOption()),
			Action: p.ask(func(c *call) error { return c.changeMachine(action) })}
	}
	return &cli.Command{Name: "node", Category: ofMachines, ArgsUsage: "mark|clear", Usage: "mark a machine, or clear it",
		Subcommands: []*cli.Command{
			change("mark", "mark a machine until it is cleared; needs --reason"),
			change("clear", "remove the mark, and forget what was found"),
		}}
}

// changeMachine marks or clears a machine.
func (c *call) changeMachine(action string) error {
	node, reason := c.args.Args().First(), c.args.String("reason")
	if action == "mark" && strings.TrimSpace(reason) == "" {
		return &usageError{errors.New("node mark needs --reason=TEXT: others will ask why the node gets no work")}
	}
	change, done := marks.Change{Action: action, Reason: reason, By: c.who()}, marks.Changed{}
	err := c.daemon.client.Global(c, "nodes/"+url.PathEscape(node), change, &done)
	switch {
	case err != nil:
		return c.daemon.noMachines(err)
	case action == "mark":
		return c.did(fmt.Sprintf("node %s is marked; to end it: dlroverctl node clear %[1]s", text.EscapeLine(node)))
	case !done.Known:
		return &foundError{fmt.Errorf("nothing is known of node %q; dlroverctl nodes lists what is", node)}
	}
	return c.did(fmt.Sprintf("node %s is cleared", text.EscapeLine(node)))
}
