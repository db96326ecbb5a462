package upstream

import (
	"encoding/json"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous/pyproto"
)

// beat sends the master a heartbeat, and carries out the action in the answer.
func (s *Service) beat() {
	t := time.NewTicker(s.every.heartbeat)
	defer t.Stop()
	for {
		if action, err := s.master.heartbeat(s.ctx); err != nil {
			s.cfg.Log.Debug("a heartbeat has not reached the master", "err", err)
		} else {
			s.obey(action)
		}
		select {
		case <-t.C:
		case <-s.ctx.Done():
			return
		}
	}
}

// obey carries out an action of the master's diagnosis.
func (s *Service) obey(a *pyproto.Message) {
	var c struct {
		ActionType string `json:"action_type"`
		Reason     string `json:"reason"`
	}
	kind := a.Str("action_cls")
	if kind == "" || kind == "NoAction" {
		return
	}
	_ = json.Unmarshal([]byte(a.Str("action_content")), &c) // missing fields are empty
	cause := job.Cause{Kind: job.CauseOperator, Text: "the master asks for it: " + kind}
	if c.Reason != "" {
		cause.Text += " (" + c.Reason + ")"
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	works := s.at.phase == running || s.at.phase == ending
	switch {
	case s.at.phase == over:
	case kind == "NodeAction" && c.ActionType == "restart_worker" && works:
		s.stop(cause)
	case kind == "NodeAction" && c.ActionType == "relaunch_worker", kind == "JobRestartAction",
		kind == "JobAbortionAction":
		s.fail(cause)
	default:
		s.cfg.Log.Info("the master asks for what this launcher does not do", "action", kind)
	}
}
