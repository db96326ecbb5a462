package upstream

import (
	"context"
	"fmt"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// The levels of DLRover's TrainingExceptionLevel that a launcher uses, and the word by which its master knows a check
// of a node that has failed.
const (
	processError = "process_error"
	nodeError    = "node_error"
	rdzvError    = "rdzv_error"
	checkFailure = "CheckFailure"
)

// maxErrorData is the part of a failure that a master keeps, in bytes; it truncates longer ones, and with them the
// JSON.
const maxErrorData = 2048

// fault reports to the master that this node is at fault, and ends the run here. The master then replaces the node.
// A second caller waits for the answer to the first: in Kubernetes that takes seconds, in which the master creates
// another pod.
func (s *Service) fault(ctx context.Context, kind, reason string) error {
	text := kind
	if reason != "" {
		text += ": " + reason
	}
	s.faulty.Lock()
	defer s.faulty.Unlock()
	s.mu.Lock()
	spent, told := s.spent, s.told
	s.mu.Unlock()
	if told {
		return nil
	}
	if err := s.master.failure(ctx, nodeError, text[:min(len(text), maxErrorData)], spent); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.told = true // DLRover's agents send no FAILED_EXITED after this
	s.at.enter(over)
	cause := job.Cause{Kind: job.CauseCheck, Node: s.master.self().Name, Text: reason}
	s.outcome, s.cause = job.Failed, &cause
	s.direct(rendezvous.Directive{Kind: job.Bar, Cause: &cause})
	return nil
}

// Order is api's Hub.Order for this node: only a launcher's bar of its own node is supported here.
func (s *Service) Order(ctx context.Context, o rendezvous.Order) error {
	if o.Kind != rendezvous.OrderBar {
		return fmt.Errorf("%w: a master of DLRover takes no order %q", api.ErrBadRequest, o.Kind)
	}
	return s.fault(ctx, "NodeFault", o.Text)
}

// failing reports failed workers to the master, and decides on the next step: restarts are counted here.
func (s *Service) failing(ctx context.Context, e rendezvous.Failing) error {
	waiting, _ := s.master.waiting(ctx) // an error here is one of the report below, too
	s.mu.Lock()
	current := e.EpochID == s.dir.EpochID && (s.at.phase == running || s.at.phase == ending)
	if e.EpochID == s.dir.EpochID {
		s.failures.add(e.Failures)
	}
	if len(e.Failures) > 0 { // before the decision becomes visible
		blame := current && !follow(e.Failures, s.cfg.Follows)
		s.reports.add(unsent{e.EpochID, processErrors(e.Failures), s.spent, s.world, blame})
	}
	if current && !e.Tolerated {
		s.settle(e, waiting > 0)
	}
	s.mu.Unlock()
	return s.reports.send(ctx, s.master)
}

// settle decides on the next step after a failure, with s locked. Where another node waits for a new world already, the
// failure is a consequence of its failure or loss, and costs this node nothing.
func (s *Service) settle(e rendezvous.Failing, follows bool) {
	cause := job.Cause{Kind: job.CauseFailure, Node: s.master.self().Name, Text: "a worker failed"}
	if len(e.Failures) > 0 {
		cause.Text = e.Failures[0].Text
	}
	switch {
	case e.Decision == rendezvous.RestartFree, e.Decision == rendezvous.RestartCharged && follows:
		s.stop(cause)
	case e.Decision == rendezvous.RestartCharged && len(s.world.nodes) > 1 && follow(e.Failures, s.cfg.Follows):
		s.pendingCharge = pendingCharge{since: time.Now(), world: s.world}
		s.stop(cause)
	case e.Decision == rendezvous.RestartCharged && s.spent < s.params.MaxRestarts:
		s.spent++
		s.stop(cause)
	default: // the master replaces the node, or not; another place or a smaller world are its to decide
		s.fail(cause)
	}
}

// joinTimeout is the master's word for a rendezvous that has timed out; 0.6 puts it into an event. Earlier ones keep
// the text unchanged.
const joinTimeout = "join-timeout"

// succeeded begins to wait for the other nodes.
func (s *Service) succeeded(e rendezvous.Success) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.EpochID == s.dir.EpochID && s.at.phase == running && len(e.Ranks) == 0 {
		s.at.enter(ending)
	}
}

// meet waits at the end of an epoch for the others.
func (s *Service) meet(ctx context.Context, t turn) error {
	s.mu.Lock()
	late := time.Since(s.at.since) > barrierTime
	s.mu.Unlock()
	all, err := s.barrier.passed(ctx)
	if err != nil {
		return err
	}
	if !all && !late {
		return s.askMembers(ctx, t) // its workers have failed after ours had succeeded: the epoch starts anew
	}
	if err := s.master.event(ctx, "SUCCEEDED_EXITED"); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.lasts() {
		s.succeed()
	}
	return nil
}

// succeed ends the run for this node. s is locked.
func (s *Service) succeed() {
	s.at.enter(over)
	s.told, s.outcome = true, job.Succeeded
	s.direct(rendezvous.Directive{Kind: job.Done})
}
