package service

import (
	"fmt"
	"strings"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous"
)

// Finding is what a launcher has found in the output of its own workers: the body of POST /v1/runs/{run}/findings.
type Finding struct {
	ID   string `json:"id"` // the launcher's, which nobody else is told
	Text string `json:"text"`
}

// Found takes a finding into the run's timeline: as device-fault, with what is broken before the text, if it tells of
// broken hardware, else as log-rule. rendezvous.ErrUnknownNode: the launcher is not in the run.
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

// fault is what is broken by a text about hardware.
func fault(text string) string {
	if strings.Contains(strings.ToLower(text), "ecc") {
		return "ecc"
	}
	return "xid"
}
