package ctl

import (
	"fmt"
	"net/url"
	"time"

	"dlrover-run/internal/app/page/ticket"
)

const openAbout = `The link logs one browser in, within a minute; the browser stays logged in for 12 hours.
A dlrover-master has the page; a launcher that serves its job has it with --ui.`

// openPage prints a link to the page of a run, or to that of all runs.
func (c *call) openPage() error {
	if _, err := c.daemon.client.Runs(c); err != nil { // which finds the master that serves
		return err
	}
	next := "/ui/"
	if c.run() != "" {
		next += "runs/" + url.PathEscape(c.run())
	}
	if c.daemon.token != "" {
		next = "/ui/login?" + ticket.Query(c.daemon.token, next, time.Now())
	}
	link := c.daemon.scheme + "://" + c.daemon.client.Addr() + next
	if c.args.Bool("json") {
		return c.json(map[string]string{"url": link})
	}
	_, err := fmt.Fprintln(c.stdout, link)
	return err
}
