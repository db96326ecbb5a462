package service

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous"
)

// Finding is what a launcher has found in the output of its own workers: the body of POST /v1/runs/{run}/findings.
type Finding struct {
	ID   string `json:"id"` // the launcher's, which nobody else is told
	Text string `json:"text"`
}

// Found takes a finding into the run's timeline: as device-fault, with what is broken before the text, if it tells of
// broken hardware, else as log-rule. What is more than its quota is dropped. rendezvous.ErrUnknownNode: the launcher is
// not in the run.
func (s *Service) Found(run string, f Finding) error {
	node := s.Hub.Names(run, []string{f.ID})[f.ID]
	if node == "" {
		return fmt.Errorf("%w: findings are told by launchers that have joined run %q", rendezvous.ErrUnknownNode, run)
	}
	event, text := "log-rule", orderText(f.Text)
	if verdict.IsHardware(text) {
		event, text = "device-fault", fault(text)+": "+text
	}
	if !s.quota.take(time.Now(), run, f.ID, event) {
		s.cfg.Log.Debug("a finding is more than its node or its run may tell now", "run_id", run, "node", node, "text", text)
		return nil
	}
	return s.Hub.Annotate(run, event, node, text)
}

// fault is what is broken by a text about hardware.
func fault(text string) string {
	if strings.Contains(strings.ToLower(text), "ecc") {
		return "ecc"
	}
	return "xid"
}

// Bounds of the findings of one event in quotaTime, so that they leave room for everything else in a timeline.
const (
	quotaTime = 10 * time.Minute
	quotaNode = 8
	quotaRun  = 64
)

// quota counts findings. The zero value is ready for use.
type quota struct {
	mu    sync.Mutex
	begun time.Time
	taken map[[3]string]int // by run, launcher ("" for all of the run) and event
}

func (q *quota) take(now time.Time, run, id, event string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.taken == nil || now.Sub(q.begun) >= quotaTime {
		q.begun, q.taken = now, map[[3]string]int{}
	}
	node, all := [3]string{run, id, event}, [3]string{run, "", event}
	if q.taken[node] >= quotaNode || q.taken[all] >= quotaRun {
		return false
	}
	q.taken[node]++
	q.taken[all]++
	return true
}
