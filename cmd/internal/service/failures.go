package service

import (
	"net/http"
	"slices"

	"dlrover-run/rendezvous"
)

// failures answers with the evidence of the run's last epochs, the newest last: whose workers have failed, with the
// ends of their output. GET /v1/runs/{run}/failures is for those who look into a run later.
func (s *Service) failures(req *http.Request) (any, error) {
	epochs, err := s.Hub.Evidences(req.PathValue("run"))
	if err != nil {
		return nil, err
	}
	return slices.Concat([]rendezvous.EpochEvidence{}, epochs), nil
}
