package ctl

import (
	"errors"
	"fmt"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/text"
	"dlrover-run/rendezvous/api"
)

func (p *program) forget() *cli.Command {
	return &cli.Command{Name: "forget", Category: ofRun, ArgsUsage: "RUN",
		Usage: "drop a run that has ended, so that a new one can use its name", Flags: connection(),
		Action: p.ask((*call).forget)}
}

func (c *call) forget() error {
	err := c.daemon.client.Forget(c, c.run())
	if errors.Is(err, api.ErrNotEnded) {
		return &foundError{fmt.Errorf("run %q has not ended; to end it: dlroverctl stop %[1]s", c.run())}
	}
	if err != nil {
		return err
	}
	return c.did(fmt.Sprintf("run %s is forgotten; its name is free", text.EscapeLine(c.run())))
}
