package master

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"os"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/app/service"
	"dlrover-run/internal/job"
	"dlrover-run/internal/secure"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/pyproto"
	"dlrover-run/rendezvous/pyproto/agents"
)

// agentsMode selects the agents of DLRover that are served: none, those that name the job, or all.
type agentsMode string

const (
	agentsOff  agentsMode = ""
	agentsOfUs agentsMode = "true"
	agentsOpen agentsMode = "open"
)

// Set implements cli.Generic.
func (m *agentsMode) Set(text string) error {
	switch mode := agentsMode(text); mode {
	case "false":
		*m = agentsOff
	case agentsOfUs, agentsOpen:
		*m = mode
	default:
		return errors.New("need no value, or open")
	}
	return nil
}

// String implements cli.Generic.
func (m *agentsMode) String() string { return string(*m) }

// IsBoolFlag lets the option have no value.
func (m *agentsMode) IsBoolFlag() bool { return true }

// pythonAgents reads how agents of DLRover are served, nil without them.
func (d *daemon) pythonAgents(c *cli.Context, tls *secure.Layer) (
	func(*service.Service) (http.Handler, func()), error,
) {
	mode := *c.Generic("python-agents").(*agentsMode)
	if mode == agentsOff {
		for _, name := range []string{"python-run", "job-uid"} {
			if c.IsSet(name) {
				return nil, fmt.Errorf("--%s is for agents of DLRover: give --python-agents, too, or leave it out", name)
			}
		}
		return nil, nil
	}
	if tls != nil {
		return nil, errors.New("--python-agents: agents of DLRover speak no TLS: leave out either, or give them a master " +
			"of their own, with --tls=off")
	}
	cfg := agents.Config{
		Run:    cmp.Or(c.String("python-run"), os.Getenv("ELASTIC_JOB_NAME"), "none"),
		JobUID: cmp.Or(c.String("job-uid"), os.Getenv("JOB_UID")), Open: mode == agentsOpen, Log: d.log, Trust: api.Trust,
	}
	if cfg.JobUID == "" && !cfg.Open {
		return nil, errors.New("--python-agents: agents of DLRover know no job token: give --job-uid what they have in " +
			"JOB_UID, or --python-agents=open to serve every caller, as agents before 0.6 need it")
	}
	if len(cfg.Run) > 256 || !text.Printable(cfg.Run) || cfg.Run == "." || cfg.Run == ".." {
		return nil, fmt.Errorf("--python-run=%.100q: %s, at most 256 bytes", cfg.Run, text.PrintableRule)
	}
	return func(s *service.Service) (http.Handler, func()) {
		cfg.Service = s.Hub
		cfg.Note = func(event job.Event, node, machine, text string) {
			if machine != "" && d.marks != nil {
				d.marks.Place(cfg.Run, node, machine)
			}
			if err := s.Hub.Told(cfg.Run, event, node, text); err != nil {
				d.log.Error("what an agent reports is not kept", "event", event, "node", node, "text", text, "err", err)
			}
		}
		if d.marks != nil {
			cfg.Machine = newAgentPods(d.nodes.cluster, cfg.Run, d.log).machine
		}
		var host *agents.Host
		cfg.Others = func() int { return len(s.Hub.IDs(cfg.Run)) - host.Nodes() }
		host = agents.New(cfg)
		return pyproto.Handler(host), host.Close
	}, nil
}
