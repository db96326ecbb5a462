package upstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/pickle"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/pyproto"
)

// checking is the master's name for the rendezvous in which nodes test each other.
const checking = "network-check"

// Check is how this node is checked before it trains.
type Check struct {
	// Local means that the launcher first examines its own node, on a Check.
	Local bool
	// Test runs DLRover's test with the nodes of a group, as its agents do, and returns the seconds that it took; nil:
	// nodes do not test each other.
	Test func(ctx context.Context, g Group) (seconds float64, err error)
	// Inert lists the options, as a user would type them, that Test does not know.
	Inert string
	// ExcludeStraggler ends this node if it is slow.
	ExcludeStraggler bool
	// ReportOnly trains in spite of the result.
	ReportOnly bool
}

// Group is this node's place among those that test each other, and where their first worker serves their store.
type Group struct {
	GroupRank, RankBase, WorldSize int
	MasterAddr                     string
	MasterPort                     int
}

// Times of DLRover's agents in a check.
const (
	checkRounds = 2
	testTime    = 300 * time.Second // of one test, and before it for the leader of the group
	verdictTime = 360 * time.Second // for the tests of all nodes
	failedTime  = 3600.0            // the reported duration of a failed test, in seconds
)

// first is the phase in which a node that joins begins.
func (c Check) first(known clearance) phase {
	switch {
	case c.Local && !known.holds(time.Now()):
		return examining
	case c.Test != nil:
		return inCheck
	}
	return joining
}

// clearance is the result of a launcher's check of its own node.
type clearance struct {
	passed bool
	until  time.Time // zero: for its life
}

func (c clearance) holds(now time.Time) bool {
	return c.passed && (c.until.IsZero() || now.Before(c.until))
}

// clear goes on after the launcher has found no fault in its node.
func (s *Service) clear(e rendezvous.Cleared) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cleared = clearance{true, e.Until}
	if s.at.phase == examining {
		s.at.enter(s.cfg.Check.first(s.cleared))
		s.direct(rendezvous.Directive{Kind: job.Wait})
	}
}

// errNoLeader: the test has failed without a beginning.
var errNoLeader = errors.New("upstream: the leader of the group has not told where to meet")

// endError is a check that ends the run for this node.
type endError struct {
	cause job.Cause
	late  bool // no check was formed in time, which the master has to hear
}

func (e *endError) Error() string { return e.cause.Text }

// test takes part in the master's check, and goes on to train if this node is sound.
func (s *Service) test(ctx context.Context, t turn) error {
	s.mu.Lock()
	x := &exam{Check: s.cfg.Check, port: s.cfg.Port, params: s.params, every: &s.every, master: s.master,
		enrolment: &s.enrolment, turn: t, log: s.cfg.Log}
	s.mu.Unlock()
	faults, slow, err := x.test(ctx)
	if end, ok := errors.AsType[*endError](err); ok {
		return s.endCheck(ctx, t, end)
	}
	if err != nil {
		return withoutReasons(err)
	}
	return s.conclude(ctx, t, slices.Contains(faults, s.cfg.Rank), slices.Contains(slow, s.cfg.Rank))
}

func (s *Service) endCheck(ctx context.Context, t turn, end *endError) error {
	s.mu.Lock()
	if t.lasts() {
		s.fail(end.cause)
	}
	limit := s.params.JoinTimeout
	s.mu.Unlock()
	if !end.late {
		return nil
	}
	return s.master.timedOut(ctx, checking, end.cause.Text, limit)
}

// conclude goes on to train, or ends.
func (s *Service) conclude(ctx context.Context, t turn, fault, slow bool) error {
	if fault && !s.cfg.Check.ReportOnly {
		return withoutReasons(t.insist(ctx, func() error {
			return s.fault(ctx, checkFailure, "its test with other nodes has failed twice")
		}))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !t.lasts():
	case slow && s.cfg.Check.ExcludeStraggler && !s.cfg.Check.ReportOnly:
		s.fail(job.Cause{Kind: job.CauseCheck, Node: s.master.self().Name,
			Text: "its test took more than twice the median of all nodes (--exclude-straggler)"})
	default:
		if fault || slow {
			s.cfg.Log.Warn("this node trains in spite of the master's check", "fault", fault, "slow", slow)
		}
		s.at.enter(joining)
	}
	return nil
}

// exam is one check of this node with others.
type exam struct {
	Check
	port      func() (int, error)
	params    rendezvous.Params
	every     *intervals
	master    *master
	enrolment *enrolment
	turn      turn
	log       *slog.Logger
	passed    bool // in one of the rounds, which suffices as DLRover has it
}

// test returns the node ranks at fault and those that are slow, by the last round.
func (x *exam) test(ctx context.Context) (faults, slow []int, err error) {
	for round := range checkRounds {
		last := round == checkRounds-1
		faults, slow, err = x.round(ctx)
		if errors.Is(err, errNext) && !last {
			continue
		}
		if err != nil || len(faults) == 0 && (len(slow) == 0 || !x.ExcludeStraggler) {
			break
		}
		if err = x.few(ctx, faults, slow); err != nil || last {
			break
		}
		if err = x.turn.wait(ctx, x.every.round); err != nil {
			break
		}
	}
	return faults, slow, err
}

// few ends the check of a small job, in which no node is left to find out which node is at fault.
func (x *exam) few(ctx context.Context, faults, slow []int) error {
	var m *pyproto.Message
	err := x.turn.insist(ctx, func() (err error) {
		m, err = x.master.client.Get(ctx, x.master.client.New("RunningNodesRequest"))
		return err
	})
	if err != nil || len(m.List("nodes")) > 3 || x.ReportOnly {
		return err
	}
	return &endError{cause: job.Cause{Kind: job.CauseCheck, Text: fmt.Sprintf(
		"the check of the nodes has failed (node ranks at fault: %v, slow: %v), and %d nodes are too few to find out whose "+
			"fault it is", faults, slow, len(m.List("nodes")))}}
}

// round is one round: a test with other nodes, and the master's verdict.
func (x *exam) round(ctx context.Context) (faults, slow []int, err error) {
	w, err := x.group(ctx)
	var seconds float64
	switch {
	case err == nil:
		seconds, err = x.testIn(ctx, w)
	case !errors.Is(err, errNoLeader):
		return nil, nil, err
	}
	if ctx.Err() != nil {
		return nil, nil, ctx.Err()
	}
	kind := "NODE_CHECK_SUCCEEDED"
	if x.passed = x.passed || err == nil; !x.passed {
		kind = "NODE_CHECK_FAILED"
	}
	if err != nil {
		seconds = failedTime
		x.log.Warn("the test with other nodes has failed", "err", err)
	}
	if err := x.turn.insist(ctx, func() error { return x.master.eventTook(ctx, kind, seconds) }); err != nil {
		return nil, nil, err
	}
	if faults, err = x.verdict(ctx, w, "NetworkReadyRequest"); err == nil {
		slow, err = x.verdict(ctx, w, "StragglerExistRequest")
	}
	return faults, slow, err
}

// testIn tests this node with its group.
func (x *exam) testIn(ctx context.Context, w world) (seconds float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, testTime)
	defer cancel()
	return x.Test(ctx, Group{w.own, w.base(w.own), w.size, w.addr, w.port})
}

// group joins the check and learns this node's group, and their meeting place.
func (x *exam) group(ctx context.Context) (w world, err error) {
	if err = x.enrolment.enlist(ctx, x.turn, x.params, checking, -1); err != nil {
		return w, err
	}
	end := time.Now().Add(x.params.JoinTimeout)
	for mine := false; !mine; {
		if err = x.turn.wait(ctx, askPause); err != nil {
			return w, err
		}
		var forgotten bool
		if w, mine, forgotten, err = x.askGroup(ctx); err != nil {
			return w, err
		}
		if !mine && time.Now().After(end) {
			return w, x.late()
		}
		if forgotten {
			if err = x.enrolment.enlist(ctx, x.turn, x.params, checking, w.round); err != nil {
				return w, err
			}
		}
	}
	w.name = checking
	if w.own == 0 {
		return x.lead(ctx, w)
	}
	return x.leader(ctx, w)
}

// askGroup asks for this node's group, and whether the master still knows that it waits for one.
func (x *exam) askGroup(ctx context.Context) (w world, mine, forgotten bool, err error) {
	err = x.turn.insist(ctx, func() (err error) {
		waiting := 1
		if time.Since(x.enrolment.joined) > x.every.ask {
			if waiting, err = x.master.waitingFor(ctx, checking); err != nil {
				return err
			}
		}
		w, mine, err = x.master.world(ctx, checking)
		forgotten = x.enrolment.forgotten(w, waiting)
		return err
	})
	return w, mine, forgotten, err
}

// late ends a check that was never formed, and blames no node.
func (x *exam) late() error {
	return &endError{late: true, cause: job.Cause{Kind: job.CauseTimeout, Text: fmt.Sprintf(
		"too few nodes for the check within %s: need %d to %d", x.params.JoinTimeout, x.params.Min, x.params.Max)}}
}

// lead publishes the meeting place to the other nodes of the group.
func (x *exam) lead(ctx context.Context, w world) (world, error) {
	w.addr = x.master.self().Addr
	err := x.turn.insist(ctx, func() (err error) {
		if w.port == 0 {
			w.port, err = x.port()
		}
		if err == nil {
			err = x.master.kv.set(ctx, w.key(masterAddr), []byte(w.addr))
		}
		if err == nil {
			err = x.master.kv.set(ctx, w.key(masterPort), []byte(strconv.Itoa(w.port)))
		}
		return err
	})
	return w, err
}

// leader asks where to meet. One that has died is replaced, which makes the round void, or not.
func (x *exam) leader(ctx context.Context, w world) (world, error) {
	for end := time.Now().Add(x.every.leader); time.Now().Before(end); {
		asked := time.Now()
		err := x.turn.insist(ctx, func() (err error) {
			w.addr, w.port, err = x.master.kv.address(ctx, w)
			return err
		})
		if err == nil && w.port == 0 {
			err = x.void(ctx, w)
		}
		if err != nil || w.port > 0 {
			return w, err
		}
		end = end.Add(time.Since(asked)) // time without the master does not count
		if err := x.turn.wait(ctx, askPause); err != nil {
			return w, err
		}
	}
	return w, errNoLeader
}

// void is why a round is over for the master that is none for this node; nil if it is one for both.
func (x *exam) void(ctx context.Context, w world) error {
	var now world
	err := x.turn.insist(ctx, func() (err error) {
		now, _, err = x.master.world(ctx, checking)
		return err
	})
	switch {
	case err != nil:
	case now.round != w.round:
		err = errAnew
	case len(now.nodes) == 0:
		err = errNext
	}
	return err
}

// verdict asks for the node ranks that the master blames, until all nodes have reported.
func (x *exam) verdict(ctx context.Context, w world, question string) (ranks []int, err error) {
	for end := time.Now().Add(verdictTime); time.Now().Before(end); {
		asked := time.Now()
		var m *pyproto.Message
		err := x.turn.insist(ctx, func() (err error) {
			m, err = x.master.client.Get(ctx, x.master.client.New(question))
			return err
		})
		if err != nil {
			return nil, err
		}
		end = end.Add(time.Since(asked)) // time without the master does not count
		switch m.Str("reason") {
		case "Not Initialized": // some node has joined since
			if err := x.void(ctx, w); err != nil {
				return nil, err
			}
		case "Waiting node":
		default:
			for _, v := range m.List("nodes") {
				ranks = append(ranks, pickle.IntOf(v))
			}
			return ranks, nil
		}
		if err := x.turn.wait(ctx, askPause); err != nil {
			return nil, err
		}
	}
	x.log.Warn("not all nodes have told the master how their tests went", "within", verdictTime.String())
	return nil, nil
}
