package service

import (
	"net/http"

	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/pyproto"
	"dlrover-run/rendezvous/pyproto/agents"
)

// newAgents makes nodes of DLRover's agents.
func (s *Service) newAgents() *agents.Host {
	run := s.cfg.Agents.Run
	return agents.New(agents.Config{
		Service: s.Hub, Run: run, JobUID: s.cfg.Agents.JobUID, Log: s.cfg.Log, Trust: api.Trust,
		Note: func(event, node, text string) { _ = s.Hub.Annotate(run, event, node, text) }, // the run may be over
	})
}

// python serves them, if anybody is to be served.
func (s *Service) python() http.Handler {
	if s.agents == nil {
		return nil
	}
	return pyproto.Handler(s.agents)
}
