package main

import (
	"cmp"
	"fmt"
	"net"
	"net/http"
	"os"

	"github.com/urfave/cli/v2"

	"dlrover-run/cmd/internal/service"
	"dlrover-run/cmd/internal/token"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/pyproto"
	"dlrover-run/rendezvous/pyproto/agents"
)

// pythonAgents reads how agents of DLRover are served, nil without them.
func (d *daemon) pythonAgents(c *cli.Context) (func(*service.Service) (http.Handler, func()), error) {
	if !c.Bool("python-agents") {
		for _, name := range []string{"python-run", "job-uid"} {
			if c.IsSet(name) {
				return nil, fmt.Errorf("--%s is for agents of DLRover: give --python-agents, too, or leave it out", name)
			}
		}
		return nil, nil
	}
	host, _, err := net.SplitHostPort(c.String("listen"))
	if err != nil {
		return nil, fmt.Errorf("--listen=%s: need host:port: %w", c.String("listen"), err)
	}
	cfg := agents.Config{
		Run:    cmp.Or(c.String("python-run"), os.Getenv("ELASTIC_JOB_NAME"), "none"),
		JobUID: cmp.Or(c.String("job-uid"), os.Getenv("JOB_UID")), Log: d.log, Trust: api.Trust,
	}
	if cfg.JobUID == "" && !c.Bool("insecure") && !token.Loopback(host) {
		return nil, fmt.Errorf("--python-agents: agents of DLRover know no job token, and --listen=%s is a network address: "+
			"give --job-uid what they have in JOB_UID, or --insecure to serve whoever comes", c.String("listen"))
	}
	if len(cfg.Run) > 256 || !rendezvous.Printable(cfg.Run) || cfg.Run == "." || cfg.Run == ".." {
		return nil, fmt.Errorf("--python-run=%.100q: %s, at most 256 bytes", cfg.Run, rendezvous.PrintableRule)
	}
	return func(s *service.Service) (http.Handler, func()) {
		cfg.Service = s.Hub
		cfg.Note = func(event, node, machine, text string) {
			if machine != "" && d.marks != nil {
				d.marks.Place(cfg.Run, node, machine)
			}
			if err := s.Hub.AnnotateEarly(cfg.Run, event, node, text); err != nil {
				d.log.Error("what an agent reports is not kept", "event", event, "node", node, "text", text, "err", err)
			}
		}
		if d.marks != nil {
			cfg.Machine = newAgentPods(d.nodes, cfg.Run, d.log).machine
		}
		var host *agents.Host
		cfg.Others = func() int { return len(s.Hub.IDs(cfg.Run)) - host.Nodes() }
		host = agents.New(cfg)
		return pyproto.Handler(host), host.Close
	}, nil
}
