package rendezvous

import (
	"fmt"
	"time"

	"dlrover-run/internal/job"
)

// sealer forms a world from the nodes that wait: it decides when, of which nodes, and with which ranks.
type sealer struct {
	cfg      *Config
	params   *Params
	members  *members
	epoch    *epoch
	account  *account
	orders   *orders
	shortage *shortage
	checks   *checks
	gate     *gate
	out      *outbox

	short      bool      // the world has been below Min since the last seal
	lastCallAt time.Time // the last call ends then at the latest
	cameAt     time.Time // the newest node did
	growAt     time.Time // a running world is restarted then for newcomers
}

// form seals a world if that is possible, and returns why the run fails if it has waited for that too long. A wait for
// members of an older history holds the seal.
func (s *sealer) form(now time.Time, holding bool) (failed *job.Cause) {
	if !s.trySeal(now, holding) {
		return s.checkJoinTimeout(now, holding)
	}
	return nil
}

// trySeal seals a world, or brings the gate nearer to it.
func (s *sealer) trySeal(now time.Time, holding bool) bool {
	if s.blocked(now, holding) {
		if s.members.stopping == 0 {
			s.checks.epochOver(now)
		}
		s.gate.leave(now)
		return false
	}
	s.checks.epochOver(now)
	s.gate.endSecondOpinions(now)
	candidates := s.members.possible()
	if s.params.fit(candidates) < s.params.Min {
		return s.tooFew(now)
	}
	if s.outvoted() {
		return s.tooFew(now)
	}
	s.shortage.over()
	calls := s.epoch.phase != gating && candidates < s.params.Max && (s.epoch.fresh() || s.short)
	if calls && !s.lastCallOver(now, candidates) {
		return false
	}
	size, open := s.gate.pass(now)
	if open {
		s.seal(now, size)
	}
	if s.epoch.phase == forming { // checks have been given up
		return s.tooFew(now)
	}
	return open
}

// blocked reports whether no world may be sealed now, however many nodes wait.
func (s *sealer) blocked(now time.Time, holding bool) bool {
	return s.members.stopping > 0 || s.orders.paused != nil || holding || s.account.backingOff(now, s.epoch.elastic)
}

// tooFew reacts to too few nodes for a world.
func (s *sealer) tooFew(now time.Time) (sealed bool) {
	s.lastCallAt, s.short = time.Time{}, true
	s.gate.leave(now)
	s.shortage.tell()
	return false
}

// checkJoinTimeout: the time that members take to stop their workers does not count; their launchers bound it. Nor
// does a pause, the wait for members of an older history, or the time in the gate (gate.leave).
func (s *sealer) checkJoinTimeout(now time.Time, holding bool) *job.Cause {
	if s.blocked(now, holding) {
		s.epoch.formingAt = now
		return nil
	}
	if s.epoch.phase == forming && !now.Before(s.epoch.formingAt.Add(s.params.JoinTimeout)) {
		return s.shortage.cause()
	}
	return nil
}

// lastCallOver starts the last call when the world first could be sealed. A world that merely lost nodes skips it: all
// known nodes are here.
func (s *sealer) lastCallOver(now time.Time, candidates int) bool {
	if p := s.params; s.lastCallAt.IsZero() {
		s.lastCallAt = now.Add(p.LastCall)
		text := fmt.Sprintf("%d of %d:%d nodes; sealing in %s", candidates, p.Min, p.Max, p.LastCall)
		switch {
		case p.Quiet > 0 && candidates < min(p.Promised, p.Max):
			text += fmt.Sprintf(" at the latest, or %s after the last of the %d that are promised", p.Quiet,
				min(p.Promised, p.Max))
		case p.Quiet > 0:
			text += fmt.Sprintf(" at the latest, or %s after the newest node", p.Quiet)
		}
		s.out.note(job.EventLastCall, "", text)
	}
	return !now.Before(s.lastCallEnd(candidates))
}

// lastCallEnd is when the last call is over, unless another node comes.
func (s *sealer) lastCallEnd(candidates int) time.Time {
	p := s.params
	if p.Quiet == 0 || candidates < min(p.Promised, p.Max) {
		return s.lastCallAt
	}
	quiet := s.lastCallAt.Add(-p.LastCall) // from its beginning
	if s.cameAt.After(quiet) {
		quiet = s.cameAt
	}
	return earlier(quiet.Add(p.Quiet), s.lastCallAt)
}

// next is when time alone opens the gate, seals a world, or fails the run because there is none; zero: it never does.
// No world is sealed before holdAt.
func (s *sealer) next(holdAt time.Time) time.Time {
	switch {
	case s.epoch.phase == gating:
		return s.gate.until
	case len(s.members.nodes) == 0:
		return time.Time{}
	case !holdAt.IsZero():
		return holdAt // also in a pause, which may be that of another run
	case s.orders.paused != nil || s.members.stopping > 0:
		return time.Time{}
	case !s.account.backoffAt.IsZero() && !s.epoch.elastic:
		return s.account.backoffAt
	}
	at := s.epoch.formingAt.Add(s.params.JoinTimeout)
	if !s.lastCallAt.IsZero() {
		return earlier(s.lastCallEnd(s.members.possible()), at)
	}
	return at
}

// cancel forgets a last call, and a growth that is due.
func (s *sealer) cancel() { s.lastCallAt, s.growAt = time.Time{}, time.Time{} }

// seal forms the world of the size, and has its rank 0 lead.
func (s *sealer) seal(now time.Time, size int) {
	s.out.ended()
	chosen := choose(s.members.candidates(size), size, s.suspect)
	ranked := rank(chosen, s.cfg.Topology, s.params.Static)
	s.epoch.next(now, ranked)
	s.orders.restart = nil
	s.account.book(now, s.epoch.elastic)
	places := s.epoch.places(s.account.restarts)
	for i, n := range ranked {
		s.members.become(n, member)
		n.rank, n.rankBase, n.optional, n.failed, n.starts = i, places[i].RankBase, false, false, n.starts+1
		n.leaf = s.cfg.Topology.leafOf(n)
	}
	s.epoch.forget()
	s.short = false
	s.cancel()
	clear(s.shortage.gone)
	s.gate.failAt = time.Time{}
	s.out.direct(ranked[0], Directive{Kind: job.Lead, Place: &places[0], Cause: s.epoch.cause})
	if s.params.Gate {
		s.gate.endChecks()
		if s.members.checking == 1 {
			s.checks.findPartners(now)
		}
	}
	s.out.note(job.EventSeal, ranked[0].Name, "").Members = s.epoch.table()
	s.noteAddresses()
}

// suspect reports whether others are preferred to a node.
func (s *sealer) suspect(n *node) bool {
	return s.cfg.Suspect != nil && s.cfg.Suspect(n.machine())
}

// noteAddresses notes the nodes of a new world whose address in the world differs from the announced one.
func (s *sealer) noteAddresses() {
	o := overviewOf(s.epoch.world)
	for _, n := range s.epoch.world {
		addr := o.reach(n, n.Addr)
		if addr == n.Addr {
			continue
		}
		why := "where its connection comes from"
		if n.host() == "" {
			why = "by which " + o.by + " has reached its host"
		}
		s.out.note(job.EventAddress, n.Name, fmt.Sprintf(
			"it announces %s, which other hosts cannot reach; they are told %s, %s; "+
				"give it --local-addr for another one", n.Addr, addr, why))
	}
}

// grow returns why a running world is restarted for newcomers, or nil: they would not make it larger, or not yet.
func (s *sealer) grow(now time.Time) *job.Cause {
	newcomers := s.checks.newcomers()
	size := s.params.fit(len(s.epoch.world) + newcomers)
	if newcomers == 0 || size <= len(s.epoch.world) || s.epoch.done > 0 {
		s.growAt = time.Time{}
		return nil
	}
	if s.growAt.IsZero() {
		s.growAt = now.Add(s.params.GrowthDelay)
	}
	if size < s.params.Max && now.Before(s.growAt) {
		return nil
	}
	if s.checks.askAll(now) > 0 {
		s.checks.findPartners(now)
		s.growAt = time.Time{} // a pass has run out meanwhile
		return nil
	}
	text := fmt.Sprintf("the world grows from %d to %d nodes", len(s.epoch.world), size)
	return &job.Cause{Kind: job.CauseGrowth, Text: text}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
