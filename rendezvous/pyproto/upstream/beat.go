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
		if err := s.beatOnce(); err != nil {
			s.cfg.Log.Debug("a heartbeat has not reached the master", "err", err)
		}
		select {
		case <-t.C:
		case <-s.ctx.Done():
			return
		}
	}
}

// beatOnce: to 0.3 a heartbeat was a report, and had no answer.
func (s *Service) beatOnce() error {
	m := s.master.client.New("HeartBeat", pyproto.Field{Name: "timestamp", Value: int(time.Now().Unix())})
	if s.master.client.Old() {
		return s.master.client.Report(s.ctx, m)
	}
	answer, err := s.master.client.Get(s.ctx, m)
	if err == nil {
		s.obey(answer.Object("action"))
	}
	return err
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
