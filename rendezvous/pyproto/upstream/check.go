package upstream

import (
	"context"
	"errors"
	"fmt"
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
	askPause    = 250 * time.Millisecond
	insistPause = 5 * time.Second // at most, between two attempts at the same
)

// before is the phase in which a node that joins begins, with s locked.
func (s *Service) before() phase {
	switch c := s.cfg.Check; {
	case c.Local && !s.cleared.holds(time.Now()):
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

// clear goes on with a node whose launcher has found no fault.
func (s *Service) clear(e rendezvous.Cleared) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cleared = clearance{true, e.Until}
	if s.phase == examining {
		s.enter(s.before())
		s.direct(rendezvous.Directive{Kind: job.Wait})
	}
}

var (
	// errAside ends a check that is no longer needed.
	errAside = errors.New("upstream: the check is over")
	// errNext: other nodes have begun the next round.
	errNext = errors.New("upstream: the round is over")
	// errAnew: the master was started again, or another check has begun.
	errAnew = errors.New("upstream: the master has forgotten the check")
	// errNoLeader: the test has failed without a beginning.
	errNoLeader = errors.New("upstream: the leader of the group has not told where to meet")
)

// test takes part in the master's check, and goes on to train if this node is sound.
func (s *Service) test(ctx context.Context, turn int) error {
	var faults, slow []int
	passed := false
	for round := range checkRounds {
		var err error
		faults, slow, err = s.testOnce(ctx, turn, &passed)
		if errors.Is(err, errNext) && round < checkRounds-1 {
			continue
		}
		if err != nil {
			return s.asideIs(err)
		}
		if len(faults) == 0 && (len(slow) == 0 || !s.cfg.Check.ExcludeStraggler) {
			break
		}
		if err := s.few(ctx, turn, faults, slow); err != nil || round == checkRounds-1 {
			if err != nil {
				return s.asideIs(err)
			}
			break
		}
		if err := s.wait(ctx, turn, s.every.round); err != nil {
			return s.asideIs(err)
		}
	}
	return s.conclude(ctx, turn, slices.Contains(faults, s.cfg.Rank), slices.Contains(slow, s.cfg.Rank))
}

// asideIs drops errors that are not the master's: the check is no longer needed, or it begins anew, as it does where
// the phase is still inCheck.
func (s *Service) asideIs(err error) error {
	if errors.Is(err, errAside) || errors.Is(err, errNext) || errors.Is(err, errAnew) {
		return nil
	}
	return err
}

// few ends the check of a small job, in which no node is left to find out which node is at fault.
func (s *Service) few(ctx context.Context, turn int, faults, slow []int) error {
	var m *pyproto.Message
	err := s.insist(ctx, turn, func() (err error) {
		m, err = s.master.client.Get(ctx, s.master.client.New("RunningNodesRequest"))
		return err
	})
	if err != nil || len(m.List("nodes")) > 3 || s.cfg.Check.ReportOnly {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if turn == s.turn {
		s.fail(job.Cause{Kind: job.CauseCheck, Text: fmt.Sprintf(
			"the check of the nodes has failed (node ranks at fault: %v, slow: %v), and %d nodes are too few to find out whose "+
				"fault it is", faults, slow, len(m.List("nodes")))})
	}
	return errAside
}

// conclude goes on to train, or ends.
func (s *Service) conclude(ctx context.Context, turn int, fault, slow bool) error {
	if fault && !s.cfg.Check.ReportOnly {
		return s.asideIs(s.insist(ctx, turn, func() error {
			return s.NodeError(ctx, checkFailure, "its test with other nodes has failed twice")
		}))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case turn != s.turn:
	case slow && s.cfg.Check.ExcludeStraggler && !s.cfg.Check.ReportOnly:
		s.fail(job.Cause{Kind: job.CauseCheck, Node: s.master.self().Name,
			Text: "its test took more than twice the median of all nodes (--exclude-straggler)"})
	default:
		if fault || slow {
			s.cfg.Log.Warn("this node trains in spite of the master's check", "fault", fault, "slow", slow)
		}
		s.enter(joining)
	}
	return nil
}

// testOnce is one round: a test with other nodes, and the master's verdict. A success in any round counts, as DLRover
// has it.
func (s *Service) testOnce(ctx context.Context, turn int, passed *bool) (faults, slow []int, err error) {
	w, err := s.group(ctx, turn)
	var seconds float64
	switch {
	case err == nil:
		seconds, err = s.testIn(ctx, w)
	case !errors.Is(err, errNoLeader):
		return nil, nil, err
	}
	if ctx.Err() != nil {
		return nil, nil, ctx.Err()
	}
	kind := "NODE_CHECK_SUCCEEDED"
	if *passed = *passed || err == nil; !*passed {
		kind = "NODE_CHECK_FAILED"
	}
	if err != nil {
		seconds = failedTime
		s.cfg.Log.Warn("the test with other nodes has failed", "err", err)
	}
	if err := s.insist(ctx, turn, func() error { return s.master.eventTook(ctx, kind, seconds) }); err != nil {
		return nil, nil, err
	}
	if faults, err = s.verdict(ctx, turn, w, "NetworkReadyRequest"); err == nil {
		slow, err = s.verdict(ctx, turn, w, "StragglerExistRequest")
	}
	return faults, slow, err
}

// testIn tests this node with its group.
func (s *Service) testIn(ctx context.Context, w world) (seconds float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, testTime)
	defer cancel()
	return s.cfg.Check.Test(ctx, Group{w.own, w.base(w.own), w.size, w.addr, w.port})
}

// group joins the check and learns this node's group, and their meeting place.
func (s *Service) group(ctx context.Context, turn int) (w world, err error) {
	if err = s.enlist(ctx, turn, checking, -1); err != nil {
		return w, err
	}
	end := time.Now().Add(s.params.JoinTimeout)
	for mine := false; !mine; {
		if err = s.wait(ctx, turn, askPause); err != nil {
			return w, err
		}
		var forgotten bool
		if w, mine, forgotten, err = s.askGroup(ctx, turn); err != nil {
			return w, err
		}
		if !mine && time.Now().After(end) {
			return w, s.late(ctx, turn)
		}
		if forgotten {
			if err = s.enlist(ctx, turn, checking, w.round); err != nil {
				return w, err
			}
		}
	}
	w.name = checking
	if w.own == 0 {
		return s.lead(ctx, turn, w)
	}
	return s.leader(ctx, turn, w)
}

// askGroup asks for this node's group, and whether the master still knows that it waits for one.
func (s *Service) askGroup(ctx context.Context, turn int) (w world, mine, forgotten bool, err error) {
	err = s.insist(ctx, turn, func() (err error) {
		waiting := 1
		if time.Since(s.joined) > s.every.ask {
			if waiting, err = s.master.waitingFor(ctx, checking); err != nil {
				return err
			}
		}
		w, mine, err = s.master.world(ctx, checking)
		forgotten = s.forgotten(w, waiting)
		return err
	})
	return w, mine, forgotten, err
}

// late ends a check that was never formed, and blames no node.
func (s *Service) late(ctx context.Context, turn int) error {
	text := fmt.Sprintf("too few nodes for the check within %s: need %d to %d",
		s.params.JoinTimeout, s.params.Min, s.params.Max)
	s.mu.Lock()
	if turn == s.turn {
		s.fail(job.Cause{Kind: job.CauseTimeout, Text: text})
	}
	s.mu.Unlock()
	if err := s.master.timedOut(ctx, checking, text, s.params.JoinTimeout); err != nil {
		return err
	}
	return errAside
}

// lead publishes the meeting place to the other nodes of the group.
func (s *Service) lead(ctx context.Context, turn int, w world) (world, error) {
	w.addr = s.master.self().Addr
	err := s.insist(ctx, turn, func() (err error) {
		if w.port == 0 {
			w.port, err = s.cfg.Port()
		}
		if err == nil {
			err = s.master.kv.set(ctx, w.key(masterAddr), []byte(w.addr))
		}
		if err == nil {
			err = s.master.kv.set(ctx, w.key(masterPort), []byte(strconv.Itoa(w.port)))
		}
		return err
	})
	return w, err
}

// leader asks where to meet. One that has died is replaced, which makes the round void, or not.
func (s *Service) leader(ctx context.Context, turn int, w world) (world, error) {
	for end := time.Now().Add(s.every.leader); time.Now().Before(end); {
		asked := time.Now()
		err := s.insist(ctx, turn, func() (err error) {
			w.addr, w.port, err = s.master.kv.address(ctx, w)
			return err
		})
		if err == nil && w.port == 0 {
			err = s.void(ctx, turn, w)
		}
		if err != nil || w.port > 0 {
			return w, err
		}
		end = end.Add(time.Since(asked)) // time without the master does not count
		if err := s.wait(ctx, turn, askPause); err != nil {
			return w, err
		}
	}
	return w, errNoLeader
}

// void is why a round is over for the master that is none for this node; nil if it is one for both.
func (s *Service) void(ctx context.Context, turn int, w world) error {
	var now world
	err := s.insist(ctx, turn, func() (err error) {
		now, _, err = s.master.world(ctx, checking)
		return err
	})
	switch {
	case err != nil:
	case now.round != w.round:
		err = errAnew
	case len(now.seats) == 0:
		err = errNext
	}
	return err
}

// verdict asks for the node ranks that the master blames, until all nodes have reported.
func (s *Service) verdict(ctx context.Context, turn int, w world, question string) (ranks []int, err error) {
	for end := time.Now().Add(verdictTime); time.Now().Before(end); {
		asked := time.Now()
		var m *pyproto.Message
		err := s.insist(ctx, turn, func() (err error) {
			m, err = s.master.client.Get(ctx, s.master.client.New(question))
			return err
		})
		if err != nil {
			return nil, err
		}
		end = end.Add(time.Since(asked)) // time without the master does not count
		switch m.Str("reason") {
		case "Not Initialized": // some node has joined since
			if err := s.void(ctx, turn, w); err != nil {
				return nil, err
			}
		case "Waiting node":
		default:
			for _, v := range m.List("nodes") {
				ranks = append(ranks, pickle.IntOf(v))
			}
			return ranks, nil
		}
		if err := s.wait(ctx, turn, askPause); err != nil {
			return nil, err
		}
	}
	s.cfg.Log.Warn("not all nodes have told the master how their tests went", "within", verdictTime.String())
	return nil, nil
}

// wait pauses, as long as the check is needed.
func (s *Service) wait(ctx context.Context, turn int, pause time.Duration) error {
	s.sleep(turn, pause)
	s.mu.Lock()
	defer s.mu.Unlock()
	if turn != s.turn {
		return errAside
	}
	return ctx.Err()
}
