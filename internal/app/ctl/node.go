package ctl

import (
	"errors"
	"fmt"
	"net/url"
	"strings"

	"dlrover-run/internal/app/marks"
	"dlrover-run/internal/text"
)

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
