package service

import (
	"slices"

	"dlrover-run/rendezvous"
)

// Failures returns the evidence of the run's last epochs, newest last: the failed workers, with the ends of their
// output. GET /v1/runs/{run}/failures serves later analysis of a run.
func (s *Service) Failures(run string) ([]rendezvous.EpochEvidence, error) {
	epochs, err := s.Hub.Evidences(run)
	if err != nil {
		return nil, err
	}
	return slices.Concat([]rendezvous.EpochEvidence{}, epochs), nil
}
