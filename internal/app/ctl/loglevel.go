package ctl

import (
	"fmt"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/text"
)

func nodeOption() cli.Flag { return &cli.StringFlag{Name: "node", Usage: "`NAME`: only this node"} }

// levels are the ones that launchers support.
func levels() []string { return []string{"debug", "info", "warn", "error"} }

// setLogLevel sets the log level of launchers, until they end.
func (c *call) setLogLevel() error {
	word, node := c.args.Args().Get(1), c.args.String("node")
	level := strings.ToLower(word)
	if level == "warning" {
		level = "warn" // as $LOGLEVEL has it
	}
	if !slices.Contains(levels(), level) {
		return &usageError{fmt.Errorf("log-level %q: need one of %s", word, strings.Join(levels(), ", "))}
	}
	s, err := c.daemon.status(c)
	if err == nil && s.Outcome != "" {
		return &foundError{fmt.Errorf("run %q has ended%s", c.run(), c.daemon.present(c))}
	}
	if err == nil {
		err = c.daemon.client.Notify(c, c.run(), node, "log-level", level)
	}
	if err != nil {
		return err
	}
	whom := "all launchers of the run are"
	if node != "" {
		whom = "the launcher of node " + text.EscapeLine(node) + " is"
	}
	return c.did(fmt.Sprintf("run %s: %s told to log from level %s on", text.EscapeLine(c.run()), whom, level))
}
