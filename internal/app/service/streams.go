package service

import (
	"dlrover-run/internal/app/streamhub"
	"dlrover-run/internal/job"
	"dlrover-run/launcher/streams"
)

// newStreams connects the followers of output, and the callers that execute commands, to the rendezvous.
func (s *Service) newStreams() *streamhub.Hub {
	return streamhub.New(streamhub.Config{
		Secure: s.cfg.Token != "", Nodes: s.Hub.Roster, Log: s.cfg.Log,
		Notify: func(run, node, body string) error { return s.Hub.Notify(run, node, streams.Topic, body) },
		Note: func(run string, event job.Event, node, text string) {
			_ = s.Hub.Annotate(run, event, node, text) // the run may be over
		},
	})
}
