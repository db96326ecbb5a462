package upstream

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
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

// NodeError reports to the master that this node is at fault, and ends the run here. The master then replaces the node.
// A second caller waits for the answer to the first: in Kubernetes that takes seconds, in which the master creates
// another pod.
func (s *Service) NodeError(ctx context.Context, kind, reason string) error {
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
	return s.NodeError(ctx, "NodeFault", o.Text)
}

// failing reports failed workers to the master, and decides on the next step: restarts are counted here.
func (s *Service) failing(ctx context.Context, e rendezvous.Failing) error {
	waiting, _ := s.master.waiting(ctx) // an error here is one of the report below, too
	s.mu.Lock()
	current := e.EpochID == s.dir.EpochID && (s.at.phase == running || s.at.phase == ending)
	if e.EpochID == s.dir.EpochID {
		s.record(e.Failures)
	}
	if len(e.Failures) > 0 { // before the decision becomes visible
		s.owe(unsent{e.EpochID, processErrors(e.Failures), s.spent, s.world, current && !s.followed(e.Failures)})
	}
	if current && !e.Tolerated {
		s.settle(e, waiting > 0)
	}
	s.mu.Unlock()
	return s.pass(ctx)
}

// unsent is a failure of workers that the master does not know yet.
type unsent struct {
	epoch job.EpochID
	data  string
	spent int
	world world
	blame bool // no other node's failure has caused it
}

// owe notes a failure once, with s locked.
func (s *Service) owe(u unsent) {
	if !slices.ContainsFunc(s.unsent, func(o unsent) bool { return o.epoch == u.epoch && o.data == u.data }) {
		s.unsent = append(s.unsent, u)
	}
}

// pass sends all pending reports to the master. A launcher that leaves may do so during another call.
func (s *Service) pass(ctx context.Context) error {
	select {
	case s.passing <- struct{}{}:
		defer func() { <-s.passing }()
	case <-ctx.Done():
		return ctx.Err()
	}
	for {
		s.mu.Lock()
		all := s.unsent
		s.mu.Unlock()
		if len(all) == 0 {
			return nil
		}
		if all[0].blame {
			s.takeBlame(ctx, all[0].world)
		}
		if err := s.master.failure(ctx, processError, all[0].data, all[0].spent); err != nil {
			return err
		}
		s.mu.Lock()
		s.unsent = s.unsent[1:]
		s.mu.Unlock()
	}
}

// record keeps failures once, with s locked.
func (s *Service) record(fs []job.Failure) {
	for _, f := range fs {
		if !slices.ContainsFunc(s.failures, func(g job.Failure) bool { return g.Rank == f.Rank && g.At.Equal(f.At) }) {
			s.failures = append(s.failures, f)
		}
	}
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
	case e.Decision == rendezvous.RestartCharged && len(s.world.seats) > 1 && s.followed(e.Failures):
		s.pendingCharge = pendingCharge{since: time.Now(), world: s.world}
		s.stop(cause)
	case e.Decision == rendezvous.RestartCharged && s.spent < s.params.MaxRestarts:
		s.spent++
		s.stop(cause)
	default: // the master replaces the node, or not; another place or a smaller world are its to decide
		s.fail(cause)
	}
}

// processErrors is the format of DLRover's agent: an object by global rank, whole within maxErrorData.
func processErrors(fs []job.Failure) string {
	for limit := 1024; ; limit /= 2 {
		all := map[string]any{}
		for _, f := range fs {
			var d struct {
				LocalRank int    `json:"local_rank"`
				ExitCode  int    `json:"exit_code"`
				Message   string `json:"message"`
			}
			_ = json.Unmarshal(f.Detail, &d) // missing fields are zero
			text := d.Message
			if text == "" {
				text = f.Text
			}
			all[strconv.Itoa(f.Rank)] = map[string]any{"local_rank": d.LocalRank, "exitcode": d.ExitCode,
				"message": text[:min(len(text), limit)], "datetime": f.At.UTC().Format(time.DateTime)}
		}
		data, err := json.Marshal(all)
		if err == nil && len(data) <= maxErrorData {
			return string(data)
		}
		if limit == 0 {
			fs = fs[:len(fs)/2]
		}
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

// barrier is how far this node has come at the end of an epoch.
type barrier struct {
	counted bool // among the members that have arrived
	count   int
}

// meet waits at the end of an epoch for the others. There are two barriers, of torch up to 1.13 and of later ones, and
// of DLRover. The first has two keys for every member, for the second of which the first member waits alone. The second
// has a count and a key that the last member sets. Nodes that wait at either see our arrival.
func (s *Service) meet(ctx context.Context, t turn) error {
	s.mu.Lock()
	w, counted := s.world, s.barrier.counted
	late := time.Since(s.at.since) > barrierTime
	s.mu.Unlock()
	if !counted {
		if err := s.arrive(ctx, w); err != nil {
			return err
		}
	}
	all, err := s.everybody(ctx, w)
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

// arrive announces this node at both barriers.
func (s *Service) arrive(ctx context.Context, w world) error {
	own := strconv.Itoa(w.own)
	for _, key := range []string{terminalState + own, terminalState + own + fin} {
		if err := s.master.kv.set(ctx, w.key(key), []byte(own)); err != nil {
			return err
		}
	}
	n, err := s.master.kv.add(ctx, w.key(numMembers))
	if err != nil {
		return err
	}
	if n >= len(w.seats) {
		err = s.master.kv.set(ctx, w.key(lastMember), []byte("<val_ignored>"))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.barrier = barrier{counted: err == nil, count: n}
	return err
}

// everybody has arrived, by either barrier. A master without memory of our arrival was started again: we arrive anew.
func (s *Service) everybody(ctx context.Context, w world) (bool, error) {
	last, err := s.master.kv.text(ctx, w.key(lastMember))
	if err != nil || last != "" {
		return err == nil, err
	}
	own, err := s.master.kv.text(ctx, w.key(terminalState+strconv.Itoa(w.own)))
	if err != nil {
		return false, err
	}
	if own == "" {
		s.mu.Lock()
		s.barrier = barrier{}
		s.mu.Unlock()
		return false, nil
	}
	for i := range w.seats {
		v, err := s.master.kv.text(ctx, w.key(terminalState+strconv.Itoa(i)))
		if err != nil || v == "" {
			return false, err
		}
	}
	return true, s.master.kv.set(ctx, w.key(lastMember), []byte("<val_ignored>")) // a count can be lost; see add
}
