package rendezvous

import (
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous/ledger"
)

// The rules that no history may break, besides those of what launchers are told. Those of sim hold for one daemon, the
// others for all together.

// hold holds the rules between two commands.
func (m *model) hold() {
	m.lead.check()
	r := m.lead.r
	for _, p := range m.procs {
		n := r.members.nodes[p.ID]
		if !p.works || p.home != m.lead || n == nil || n.dir.Seq != p.dir.Seq {
			continue // it has not heard of the newest world
		}
		require.Equal(m.t, r.epoch.id, p.last.EpochID, "%s runs another epoch", p.ID)
	}
	waits := len(r.members.nodes) > 0 && r.epoch.collecting() && r.orders.paused == nil && r.members.stopping == 0
	if waits {
		require.False(m.t, r.Next().IsZero(), "nothing ends the wait of the nodes")
	}
}

// booked is the account of the run's time, at a moment of the daemon's clock.
type booked struct {
	ledger.Report
	now  time.Time
	lead *daemon
}

func (m *model) booked() booked {
	now := m.now.Add(m.lead.skew)
	return booked{LedgerOf(m.lead.r, now), now, m.lead}
}

// holdTimes: each moment of the run is in one class, none is negative, and all but training, saves and pauses is the
// cost of a stop.
func (m *model) holdTimes(before booked, line string) {
	got := m.booked()
	var all, stops time.Duration
	for class, d := range got.Times {
		require.Positive(m.t, d, "%s", class)
		if all += d; class != ledger.Training && class != ledger.Saving && class != ledger.Paused {
			stops += d
		}
	}
	for _, row := range got.Rows {
		for class, d := range row.Times {
			require.Positive(m.t, d, "%s of %s", class, row.Cause)
			stops -= d
		}
	}
	require.Equal(m.t, got.At.Sub(got.Since), all)
	require.Zero(m.t, stops)
	passed := got.now.Sub(before.now)
	switch ended := before.Class == "" || got.Class == ""; {
	case before.Since.IsZero():
	case got.lead != before.lead:
		if strings.HasPrefix(line, "daemon ended") && passed == 0 {
			require.Equal(m.t, before.Times, got.Times, "the next daemon has other times")
		}
	case !ended && got.Since.Equal(before.Since):
		require.Equal(m.t, passed, all-before.Times.Sum(), "time is lost")
	}
}

// Rest ends all faults: the run must reach an end, or a running world, or lack the nodes for one.
func (m *model) Rest() {
	m.pass(time.Second, false) // for the deposed one
	for range 4 {
		m.settleWell() // a launcher may bring an order
		m.order(OrderResume, "")
		for _, name := range sortedKeys(m.lead.r.orders.bars) {
			m.order(OrderUnbar, name)
		}
		m.settleWell()
		m.pass(defaultLastCall+silentGrace, false)
	}
	m.settleWell()
	m.hold()
	r := m.lead.r
	working := m.alive(func(p *process) bool { return p.works })
	switch r.epoch.phase {
	case finished:
		require.Empty(m.t, m.alive(func(*process) bool { return true }), "all hear of the end")
	case forming:
		require.Empty(m.t, working, "there is no world")
		require.Zero(m.t, r.members.stopping, "a node is waited for")
		require.Less(m.t, m.p.WithDefaults().floor(r.members.possible()), m.p.Min, "there are nodes for a world")
	case running:
		for _, n := range r.epoch.world {
			p := m.procs[n.ID]
			held := p.last.EpochID == r.epoch.id && p.last.Hold
			require.True(m.t, n.state != member || p.works || held, "%s has no workers", n.ID)
		}
		for _, id := range working {
			require.Equal(m.t, r.epoch.id, m.procs[id].last.EpochID, "%s runs another epoch", id)
		}
	default:
		require.Fail(m.t, "stuck", "phase %s", r.epoch.phase)
	}
}

// settleWell is settle where all hosts speak, and all checks pass.
func (m *model) settleWell() {
	for range 20 {
		for _, p := range m.procs {
			p.silent = false
		}
		m.settle()
		checks := m.alive(func(p *process) bool { return p.dir.Kind == job.Check })
		for _, id := range checks {
			m.checked(m.procs[id], "pass")
		}
		if len(checks) == 0 {
			return
		}
	}
}

// check holds the rules of one daemon between two events.
func (s *sim) check() {
	r := s.r
	counts := map[nodeState]int{}
	seconds := 0
	for _, n := range r.members.nodes {
		counts[n.state]++
		if n.state == checking && n.bar != nil || n.state == barred && n.again {
			seconds++
		}
		s.checkNode(n)
	}
	if r.epoch.phase != finished {
		require.Equal(s.t, counts[pending], r.members.stopping)
		require.Equal(s.t, counts[waiting], r.members.waiting)
		require.Equal(s.t, seconds, r.members.again)
		require.Equal(s.t, counts[checking]+counts[barred], r.members.checking+r.members.again+r.members.barred)
	}
	s.checkPasses()
	if r.epoch.phase == gating {
		require.Zero(s.t, r.members.stopping)
		require.NotZero(s.t, r.members.checking+r.members.again, "an answer is awaited")
	}
	if r.orders.paused != nil {
		require.Equal(s.t, forming, r.epoch.phase)
	}
	if r.epoch.phase == running || r.epoch.phase == releasing {
		s.checkWorld()
	}
}

// checkWorld: ranks are dense and unique, the size is allowed, and the numbers are right.
func (s *sim) checkWorld() {
	e, p, working := s.r.epoch, s.r.params, 0
	size := len(e.world)
	require.True(s.t, size >= p.Min && size <= p.Max && size%p.Unit == 0, "world of %d under %+v", size, p)
	for i, n := range e.world {
		require.Equal(s.t, i, n.rank)
		working += min(n.Slots, 1)
	}
	require.Equal(s.t, working, e.working)
}

// checkPasses holds what is kept about checks, and that it is acted upon in time.
func (s *sim) checkPasses() {
	r := s.r
	for _, n := range r.members.nodes {
		require.False(s.t, n.optional && n.state != leaving && (n.state != waiting || n.dir.Kind != job.Check),
			"%s has an optional check: %s", n.ID, n.state)
		require.Equal(s.t, s.awaited[n.ID], s.member(n.ID).Asked, "what checks node %s knows when it shall not", n.ID)
		require.False(s.t, n.unpaired && !n.cleared, "node %s has passed alone, and has not", n.ID)
	}
	free := r.orders.paused == nil && r.memory.rebuild == nil && r.account.failPendingAt.IsZero()
	if !r.gate.failAt.IsZero() && r.epoch.phase != finished && free {
		require.True(s.t, s.now.Before(r.gate.failAt), "the run should have ended")
	}
	if r.epoch.phase == running || r.epoch.phase == releasing {
		require.Nil(s.t, r.shortage.lacking)
		require.False(s.t, r.epoch.sealedAt.IsZero(), "the clocks of the members' passes run")
	}
}

func (s *sim) checkNode(n *node) {
	r := s.r
	if r.memory.rebuild != nil || r.epoch.phase == finished || n.state == leaving {
		return
	}
	out := r.orders.bars[n.Name] != nil || n.bar != nil
	switch {
	case out && (n.state == member || n.state == waiting):
		require.Fail(s.t, "a barred node has workers, or may get some", "%s: %s", n.ID, n.state)
	case !out && n.state == barred:
		require.Fail(s.t, "a node is barred by nobody", n.ID)
	case r.orders.paused != nil && n.dir.Paused == nil:
		require.Fail(s.t, "a node is not told that the run is paused", n.ID)
	case r.orders.paused != nil && (n.dir.Kind == job.Run || n.dir.Kind == job.Lead || n.dir.Kind == job.Check):
		require.Fail(s.t, "the run is paused", "%s: %s", n.ID, n.dir.Kind)
	case !r.params.Gate && n.state == checking:
		require.Fail(s.t, "the run has no gate", n.ID)
	case n.state == waiting && n.dir.Kind == job.Wait && r.shortage.lacking != nil && n.dir.Cause == nil:
		require.Fail(s.t, "a node that waits is not told why", n.ID)
	}
}
