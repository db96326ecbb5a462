package ctl

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/app/answers/remote"
	"dlrover-run/internal/app/describe"
	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous/api"
)

const eventsAbout = "A line has time, round.epoch, event and text. With --json it is an object."

func followOption() cli.Flag {
	return &cli.BoolFlag{Name: "follow", Aliases: []string{"f"}, Usage: "go on until the run has ended"}
}

const (
	// awayFor is how long a known daemon may be unreachable, and askAgain is the interval between attempts.
	awayFor  = time.Minute
	askAgain = 500 * time.Millisecond
)

// showEvents prints the events that the daemon keeps of a run and, with --follow, those from then on.
func (c *call) showEvents() error {
	if c.args.Bool("follow") {
		return c.followEvents()
	}
	es, err := c.daemon.kept(c)
	c.printEvents(es)
	return err
}

// kept are the events that the daemon stores.
func (d *daemon) kept(ctx context.Context) (api.Events, error) {
	return remote.Events(ctx, d.client, d.run)
}

// followEvents ends with the run, or when the daemon remains unreachable.
func (c *call) followEvents() error {
	var lost time.Time // when the daemon first did not answer
	var after uint64
	for {
		es, err := c.daemon.client.Events(c, c.run(), after)
		switch {
		case err == nil:
			c.printEvents(es)
			if after = es.Next; ended(es.Events) {
				return nil
			}
		case errors.Is(err, api.ErrNothingNew):
		case c.Err() != nil:
			return nil // enough
		case after == 0 || !c.mayComeBack(err, &lost):
			return err
		}
		if err == nil || errors.Is(err, api.ErrNothingNew) {
			lost = time.Time{}
		}
	}
}

// mayComeBack waits a little for a daemon that has disappeared, or for the run to join one that was started again.
func (c *call) mayComeBack(err error, lost *time.Time) bool {
	if api.Final(err) {
		return false
	}
	if lost.IsZero() {
		*lost = time.Now()
		fmt.Fprintf(c.stderr, "dlroverctl: the daemon at %s is away, or has lost the run; waiting for it\n", c.daemon.addr)
	}
	select {
	case <-time.After(askAgain):
	case <-c.Done():
	}
	return time.Since(*lost) < awayFor
}

// ended reports whether a run's last event was its end.
func ended(es []api.Event) (end bool) {
	for _, e := range es {
		switch e.Event {
		case job.EventSucceeded, job.EventFailed:
			end = true
		case job.EventJoin, job.EventSeal:
			end = false
		}
	}
	return end
}

func (c *call) printEvents(es api.Events) {
	if es.Dropped {
		fmt.Fprintln(c.stderr, "dlroverctl: older events are not kept any more")
	}
	for _, e := range es.Events {
		if c.args.Bool("json") {
			_ = c.json(e)
			continue
		}
		fmt.Fprintf(c.stdout, "%s  %3d.%-3d %-14s  %s\n",
			e.At.Local().Format(time.DateTime), e.Round, e.Epoch, text.EscapeLine(string(e.Event)),
			text.EscapeLine(describe.Event(e)))
	}
}
