package ctl

import (
	"errors"
	"fmt"

	"dlrover-run/internal/app/service"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous/api"
)

func (c *call) showVerdict() error {
	var v service.Verdict
	err := c.daemon.client.Mounted(c, c.run(), "verdict", &v)
	if errors.Is(err, api.ErrNothingNew) {
		return &foundError{fmt.Errorf("run %q has no verdict: none of its epochs has ended", c.run())}
	}
	if err != nil {
		return err
	}
	if c.args.Bool("json") {
		return c.json(v)
	}
	fmt.Fprintf(c.stdout, "round %d, epoch %d: %s\n", v.Round, v.Epoch, text.EscapeLine(v.Line))
	return nil
}
