package service

import (
	"net/http"
	"slices"

	"dlrover-run/rendezvous"
)

// failures returns the evidence of the run's last epochs, newest last: the failed workers, with the ends of their
// output. GET /v1/runs/{run}/failures serves later analysis of a run.
func (s *Service) failures(req *http.Request) (any, error) {
	epochs, err := s.Hub.Evidences(req.PathValue("run"))
	if err != nil {
		return nil, err
	}
	return slices.Concat([]rendezvous.EpochEvidence{}, epochs), nil
}
