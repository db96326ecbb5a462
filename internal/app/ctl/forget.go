package ctl

import (
	"errors"
	"fmt"

	"dlrover-run/internal/text"
	"dlrover-run/rendezvous/api"
)

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
