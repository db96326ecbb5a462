package netcheck

import (
	"time"

	"dlrover-run/internal/job"
)

// pairs is the present phase of pairs.
func (c *Check) pairs() *pairPhase { return c.pairPhases[len(c.pairPhases)-1] }

// ready lets the other end dial.
func (c *Check) ready(ev Ready) {
	n := c.roster.byID[ev.ID]
	if n == nil {
		return
	}
	if n == c.comm.first && n.busy {
		for _, o := range c.comm.ready(ev, c.now) {
			c.out.assign(o.to, o.Assignment)
		}
		return
	}
	t := n.test
	if t == nil || t.id != ev.Test || t.ends[0].n != n || t.ready || t.reported[0] {
		return
	}
	c.timers.set(t, t.start.Add(t.limit()+reportTime))
	c.out.assign(t.ends[1].n, t.dial(ev.Addrs, c.now))
}

// report takes the report of one end about its running test.
func (c *Check) report(ev Report) {
	n := c.roster.byID[ev.ID]
	if n == nil {
		return
	}
	c.notice(n, ev.Result.Findings)
	if n.busy {
		c.reportAlone(n, &ev.Result)
		return
	}
	t := n.test
	if t == nil || t.id != ev.Result.Test {
		return
	}
	end := t.end(n.member)
	if t.reported[end] || end == 1 && !t.ready {
		return
	}
	t.absorb(&c.pairs().judge.rates, end, &ev.Result)
	switch {
	case t.reported[1-end] || !t.ready:
		c.finish(t)
	case t.class[end] != OK && !(t.told && end == 1): // the other end will hardly have a better one
		c.timers.set(t, earlier(t.deadline, c.now.Add(reportTime)))
	}
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// finish frees both ends of a test and hands it to its phase.
func (c *Check) finish(t *test) {
	t.ended = true
	for i, m := range t.ends {
		m.n.test = nil
		if !t.reported[i] && m.n.present() && (i == 0 || t.ready) {
			c.out.assign(m.n, Assignment{Duty: Rest}) // it may still be at it
		}
	}
	s := c.pairs()
	s.end(t)
	c.perform(s)
}

// perform carries out the effects of a phase.
func (c *Check) perform(s *pairPhase) {
	started, out := s.queue.started, s.out
	s.queue.started, s.out = nil, effects{}
	if out.baseEnded {
		c.out.note(job.EventCheckRound, "", "%s: %s", c.phase, s.judge.baseResult())
	}
	for _, t := range started {
		t.id, t.start = c.out.testName(), c.now
		c.round = max(c.round, t.round)
		t.told = t.early(c.now)
		server := t.ends[0].n
		c.out.assign(server, t.part(Serve, c.now))
		if t.told {
			c.timers.set(t, c.now.Add(t.limit()+reportTime))
			c.out.assign(t.ends[1].n, t.dial(server.listens, c.now))
		} else { // the other end gets its order once this one listens
			c.timers.set(t, c.now.Add(t.readyTime()))
		}
		server.listens = nil // they are for one test
	}
	for _, m := range out.released {
		c.decide(m.n, s.report.fine(m))
	}
}

// beginHost tests pairs by TCP, if that is requested and there are two nodes.
func (c *Check) beginHost() {
	nodes := c.roster.here(func(*node) bool { return true })
	if c.cfg.Spec.Level == LevelLocal || len(nodes) < 2 {
		c.afterHost()
		return
	}
	c.phase = inHost
	c.beginPairs(nodes, c.hostNorms, c.cfg.Spec.Level == LevelHost || c.roster.withHelpers())
}

func (c *Check) beginPairs(nodes []*node, usual norms, final bool) *pairPhase {
	s := newPairPhase(c.cfg, c.rng, nodes, usual, c.phase == inTorch, final)
	c.pairPhases = append(c.pairPhases, s)
	c.round = 1
	s.begin()
	c.perform(s)
	return s
}

// advancePairs ends the present phase when it is over, or its time is.
func (c *Check) advancePairs() {
	s := c.pairs()
	if s.step != allDone && reached(c.hard, c.now) {
		c.abort(s)
	}
	if s.step != allDone {
		return
	}
	c.closePairs(s)
	if c.phase == inHost {
		c.hostNorms = s.judge.rates.norms
		c.afterHost()
	} else {
		c.torchNorms = s.judge.rates.norms
		c.beginComm()
	}
}

// abort ends a phase whose time is over: running tests count no more.
func (c *Check) abort(s *pairPhase) {
	inBase := s.step == inBase
	s.step, s.report.aborted = allDone, true
	for _, m := range s.judge.members {
		m.queue = nil // of all, before any is free for the next one
	}
	for _, m := range s.judge.members {
		if m.n.test != nil {
			m.n.test.cancel()
			c.finish(m.n.test)
		}
	}
	if inBase {
		s.weighBase()
	}
}

// closePairs decides the nodes that have not passed, and frees the others.
func (c *Check) closePairs(s *pairPhase) {
	s.report.helped = c.roster.withHelpers()
	s.report.rule()
	c.results.hear(&s.report)
	for _, m := range s.judge.members {
		if !m.n.present() {
			continue
		}
		v := s.report.verdict(m)
		m.n.member = nil
		m.n.torched = s.torch && m.certified(reach)
		v = m.n.verdict.and(v)
		if v.State == StateOK || v.State == StatePath {
			m.n.verdict = v
		} else {
			c.decide(m.n, v)
		}
	}
}

// conclude decides all present nodes with the evidence so far.
func (c *Check) conclude() {
	for _, n := range c.roster.here(func(*node) bool { return true }) {
		v := n.verdict
		if n.slow.State != "" {
			v = v.and(n.slow)
		}
		if v.State == "" {
			v = Verdict{State: StateOK, Reason: unpaired}
		}
		c.decide(n, v)
	}
	c.phase = closing
}
