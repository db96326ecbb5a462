package service

import (
	"fmt"
	"strings"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous"
)

// Finding is a match in the output of a launcher's own workers: the body of POST /v1/runs/{run}/findings.
type Finding struct {
	ID   string `json:"id"` // the launcher's, which is not passed on
	Text string `json:"text"`
}

// Found adds a finding to the run's timeline. It is a device-fault, with the device before the text, if it is about
// broken hardware, else a log-rule. The error is rendezvous.ErrUnknownNode if the launcher is not in the run.
func (s *Service) Found(run string, f Finding) error {
	node := s.Hub.Names(run, []string{f.ID})[f.ID]
	if node == "" {
		return fmt.Errorf("%w: findings are told by launchers that have joined run %q", rendezvous.ErrUnknownNode, run)
	}
	event, text := job.EventLogRule, orderText(f.Text)
	if verdict.IsHardware(text) {
		event, text = job.EventDeviceFault, fault(text)+": "+text
	}
	return s.Hub.Told(run, event, node, text)
}

// fault returns the device that a text about hardware blames.
func fault(text string) string {
	if strings.Contains(strings.ToLower(text), "ecc") {
		return "ecc"
	}
	return "xid"
}
