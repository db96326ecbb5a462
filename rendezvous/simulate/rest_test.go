package simulate

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// Rest ends all faults: each run must reach an end, or a running world, or lack the nodes for one. In the end nothing
// is left of the runs.
func (m *model) Rest() {
	m.plane.moment()
	m.endOld()
	m.plane.store.breaks(fine)
	for _, n := range m.live(nil) {
		m.plane.moment()
		n.link.heal()
	}
	for range 4 {
		m.checksPass()
		for _, c := range m.clusters() {
			m.order(c, "resume", "")
			m.unbars(c)
		}
		m.checksPass()
		m.pass(time.Minute)
	}
	m.checksPass()
	m.hold()
	for _, c := range m.clusters() {
		m.rested(c)
	}
	m.nothingIsLeft()
}

// checksPass lets time pass, and all checks.
func (m *model) checksPass() {
	for range 20 {
		m.pass(5 * time.Second)
		checks := m.live(func(n *node) bool { return n.hear(nil).Kind == job.Check })
		for _, n := range checks {
			m.plane.moment()
			m.tell(n, "check", "pass")
		}
		if len(checks) == 0 {
			return
		}
	}
}

func (m *model) unbars(c *cluster) {
	s, err := m.plane.running().hub.Run(c.run)
	if err != nil {
		return
	}
	for name := range s.Bars {
		m.order(c, "unbar", name)
	}
}

// rested holds what is true of a run that nothing disturbs.
func (m *model) rested(c *cluster) {
	t := m.t
	live := m.live(func(n *node) bool {
		_, works := n.running()
		return n.c == c && (works || !c.params.Static || !n.rival) // else its rank may be taken, and it tries again
	})
	s, err := m.plane.running().hub.Run(c.run)
	if len(live) == 0 {
		return
	}
	require.NoError(t, err, m.State())
	switch {
	case s.Outcome != "":
		require.Fail(t, "all hear of the end", m.State())
	case s.Phase == "running":
		for _, n := range live {
			e, works := n.running()
			member := n.hear(nil).Kind == job.Run
			ended := n.over.Round > 0 && n.over == n.ran().EpochID
			require.True(t, !member || works || n.held || ended, "%s has no workers\n%s", n.id, m.State())
			require.True(t, member || !works, "%s has workers, and no place\n%s", n.id, m.State())
			require.True(t, !works || e.Round == s.Round && e.Epoch == s.Epoch, "%s runs another epoch\n%s", n.id, m.State())
		}
	case s.Phase == "forming":
		m.forms(c, live)
	default:
		require.Fail(t, "stuck", m.State())
	}
}

// forms holds what is true where nodes are missing: all that wait because a check has failed are told so.
func (m *model) forms(c *cluster, live []*node) {
	possible, ranks := 0, map[int]bool{}
	failed := !c.params.Static && slices.ContainsFunc(live, func(n *node) bool {
		d := n.hear(nil)
		return d.Kind == job.Bar && d.Cause != nil && d.Cause.Kind == job.CauseCheck
	})
	for _, n := range live {
		d := n.hear(nil)
		require.Contains(m.t, []job.Kind{job.Wait, job.Bar}, d.Kind, "%s\n%s", n.id, m.State())
		told := d.Cause != nil && d.Cause.Text != ""
		require.True(m.t, told || d.Kind == job.Wait && !failed, "%s is not told why\n%s", n.id, m.State())
		if d.Kind == job.Wait {
			possible++
			ranks[n.self.Rank] = true
		}
	}
	if c.params.Static {
		possible = len(ranks)
	}
	possible = min(possible, c.params.Max) / c.params.Unit * c.params.Unit
	require.Less(m.t, possible, c.params.Min, "there are nodes for a world\n%s", m.State())
}

// nothingIsLeft has all launchers end, and time pass until nobody needs the runs.
func (m *model) nothingIsLeft() {
	m.plane.moment()
	for _, c := range m.clusters() {
		c.off()
	}
	m.pass(max(20*time.Minute, 2*m.plane.keep))
	hub := m.plane.running().hub
	require.NoError(m.t, hub.Join(context.Background(), probe, rendezvous.Join{
		Node: rendezvous.Node{ID: probe, Name: probe, Rank: -1, Slots: 1}, Params: rendezvous.Params{Min: 1, Max: 1}}))
	runs := hub.Runs(true)
	require.True(m.t, len(runs) == 1 && runs[0].Run == probe, "runs that have ended stay: %+v", runs)
	m.pass(time.Second)
	for _, key := range m.plane.store.keys() {
		require.True(m.t, strings.HasPrefix(key, "runs/"+probe+"/"), "the store still has %s", key)
	}
}
