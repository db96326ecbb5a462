package netcheck

import "time"

// stage is the present one.
func (c *Check) stage() *stage { return c.stages[len(c.stages)-1] }

// startTrial orders the serving end of t to listen. The other end gets its order once the serving end listens.
func (c *Check) startTrial(t *trial) {
	t.id, t.start = c.testName(), c.now
	c.round = max(c.round, t.round)
	c.timers.set(t, c.now.Add(t.readyTime()))
	c.assign(t.ends[0].n, c.part(t, Serve, t.ends[1].n))
}

// part is the assignment of one end of t.
func (c *Check) part(t *trial, duty Duty, other *node) Assignment {
	return Assignment{Duty: duty, Round: t.round, Test: t.id, Quick: t.quick, Torch: t.torch,
		Left: t.start.Add(t.limit()).Sub(c.now),
		Peer: Peer{ID: other.ID, Name: other.name(), Addr: other.Addr, NICs: other.NICs}}
}

// limit is how long the test itself may take.
func (t *trial) limit() time.Duration {
	switch {
	case t.torch:
		return torchTime
	case t.quick:
		return quickTime
	}
	return trialTime
}

func (t *trial) readyTime() time.Duration {
	if t.torch {
		return torchReady
	}
	return readyTime
}

// ready lets the other end dial.
func (c *Check) ready(ev Ready) {
	n := c.byID[ev.ID]
	if n == nil {
		return
	}
	if n == c.comm.first && n.busy {
		c.readyComm(ev)
		return
	}
	t := n.trial
	if t == nil || t.id != ev.Test || t.ends[0].n != n || t.ready || t.reported[0] {
		return
	}
	t.ready = true
	c.timers.set(t, t.start.Add(t.limit()+reportTime))
	a := c.part(t, Dial, n)
	a.Peer.Addrs = ev.Addrs[:min(len(ev.Addrs), maxRails)]
	c.assign(t.ends[1].n, a)
}

// report takes the report of one end about its running test.
func (c *Check) report(ev Report) {
	n := c.byID[ev.ID]
	if n == nil {
		return
	}
	c.notice(n, ev.Result.Findings)
	if n.busy {
		c.reportAlone(n, &ev.Result)
		return
	}
	t := n.trial
	if t == nil || t.id != ev.Result.Test {
		return
	}
	end := t.end(n.member)
	if t.reported[end] || end == 1 && !t.ready {
		return
	}
	t.absorb(&c.stage().judge.rates, end, &ev.Result)
	switch {
	case t.reported[1-end] || !t.ready:
		c.finish(t)
	case t.class[end] != OK: // the other end will hardly have a better one
		c.timers.set(t, earlier(t.deadline, c.now.Add(reportTime)))
	}
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// expireTrial ends a test that took too long. An end that has not reported in time is silent. After one end has
// reported a failure, the wait for the other is shorter, and that end does not count as silent.
func (c *Check) expireTrial(t *trial) {
	switch {
	case !t.ready:
		t.class[0] = Silent
	case t.start.Add(t.limit() + reportTime).After(c.now): // one end has reported a failure
	default:
		for i := range t.ends {
			if !t.reported[i] {
				t.class[i] = Silent
			}
		}
	}
	c.finish(t)
}

// void ends a test without a result.
func (c *Check) void(t *trial) {
	t.class = [2]Class{Canceled, Canceled}
	c.finish(t)
}

// finish frees both ends of a test and hands it to its stage.
func (c *Check) finish(t *trial) {
	t.ended = true
	for i, m := range t.ends {
		m.n.trial = nil
		if !t.reported[i] && m.n.present() && (i == 0 || t.ready) {
			c.assign(m.n, Assignment{Duty: Rest}) // it may still be at it
		}
	}
	s := c.stage()
	s.end(t)
	c.perform(s)
}

// perform carries out the effects of a stage.
func (c *Check) perform(s *stage) {
	started, out := s.queue.started, s.out
	s.queue.started, s.out = nil, effects{}
	if out.baseEnded {
		c.noteBase(s)
	}
	for _, t := range started {
		c.startTrial(t)
	}
	for _, m := range out.released {
		c.decide(m.n, s.report.fine(m))
	}
}

// beginHost tests pairs by TCP, if that is requested and there are two nodes.
func (c *Check) beginHost() {
	nodes := c.here(func(*node) bool { return true })
	if c.cfg.Spec.Level == LevelLocal || len(nodes) < 2 {
		c.afterHost()
		return
	}
	c.phase = inHost
	c.beginStage(nodes, c.hostNorms, c.cfg.Spec.Level == LevelHost || c.withWitnesses())
}

func (c *Check) beginStage(nodes []*node, usual norms, final bool) *stage {
	s := newStage(c.cfg, c.rng, nodes, usual, c.phase == inTorch, final)
	c.stages = append(c.stages, s)
	c.round = 1
	s.begin()
	c.perform(s)
	return s
}

// here are the nodes that have come and are not decided, and fit.
func (c *Check) here(fit func(*node) bool) (nodes []*node) {
	for _, n := range c.nodes {
		if n.present() && fit(n) {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// advanceStage ends the present stage when it is over, or its time is.
func (c *Check) advanceStage() {
	s := c.stage()
	if s.phase != stageOver && reached(c.hard, c.now) {
		c.abort(s)
	}
	if s.phase != stageOver {
		return
	}
	c.closeStage(s)
	if c.phase == inHost {
		c.hostNorms = s.judge.rates.norms
		c.afterHost()
	} else {
		c.torchNorms = s.judge.rates.norms
		c.beginComm()
	}
}

// abort ends a stage whose time is over: running trials count no more.
func (c *Check) abort(s *stage) {
	inBase := s.phase == inBase
	s.phase, s.report.aborted = stageOver, true
	for _, m := range s.judge.members {
		m.queue = nil // of all, before any is free for the next one
	}
	for _, m := range s.judge.members {
		if m.n.trial != nil {
			c.void(m.n.trial)
		}
	}
	if inBase {
		s.weighBase()
	}
}

// closeStage decides the nodes that have not passed, and frees the others.
func (c *Check) closeStage(s *stage) {
	s.report.helped = c.withWitnesses()
	s.report.rule()
	c.hear(&s.report)
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
	for _, n := range c.here(func(*node) bool { return true }) {
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
