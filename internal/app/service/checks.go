package service

import (
	"context"
	"fmt"
	"slices"

	"dlrover-run/internal/job"
	"dlrover-run/netcheck"
	"dlrover-run/netcheck/serve"
	"dlrover-run/rendezvous"
)

// newChecks connects the checks of nodes to the rendezvous: runs with a Check in their Params.
func (s *Service) newChecks() *serve.Hub {
	return serve.New(serve.Config{
		Spec: s.checkSpec, Names: s.Hub.Names, Topology: s.switchOf, Bar: s.excludeSilent, Note: s.annotate, Log: s.cfg.Log,
		Keep: func(run string) bool {
			_, err := s.Hub.Params(run)
			return err == nil
		},
	})
}

// gate has nodes checked on request of the rendezvous; without a Check in the run's Params the nodes answer alone.
// Nodes that cannot be checked here are let through, with a note in the run's timeline.
func (s *Service) gate(run string, subjects, helpers []string) {
	p, err := s.Hub.Params(run)
	if err != nil || p.Check == "" {
		return
	}
	err = s.Checks.Expect(run, subjects, helpers)
	if err == nil {
		return
	}
	s.annotate(run, job.Note{
		Event: job.EventCheckEnded, Text: fmt.Sprintf("%d nodes are not checked: %v", len(subjects), err),
	})
	for _, id := range slices.Concat(subjects, helpers) {
		_ = s.Hub.Report(context.Background(), run, rendezvous.Cleared{ID: id, Unchecked: true}) // it may have left
	}
}

// released ends the checks of nodes that have got other directives meanwhile.
func (s *Service) released(run string, ids []string) {
	for _, id := range ids {
		s.Checks.Gone(run, id)
	}
}

func (s *Service) checkSpec(run string) (netcheck.Spec, error) {
	p, err := s.Hub.Params(run)
	if err != nil {
		return netcheck.Spec{}, err
	}
	return netcheck.ParseSpec(p.Check)
}

func (s *Service) excludeSilent(run, id, aspect, reason string) {
	b := rendezvous.Barred{ID: id, Reason: reason, Aspect: aspect}
	_ = s.Hub.Report(context.Background(), run, b) // it may have left
}

func (s *Service) annotate(run string, n job.Note) {
	_ = s.Hub.Annotate(run, n.Event, n.Node, n.Text) // the run may be over
}

// switchOf is the switch of a node by the topology file, "" without.
func (s *Service) switchOf(n netcheck.Node) string {
	topo := *s.topology.Load()
	if sw := topo[n.Addr]; sw != "" {
		return sw
	}
	for _, nic := range n.NICs {
		if sw := topo[nic.Addr]; sw != "" {
			return sw
		}
	}
	return ""
}
