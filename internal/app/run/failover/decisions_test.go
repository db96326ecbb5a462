package failover

import (
	"maps"
	"reflect"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// decision is one kind of decision of a run.
type decision struct {
	of  []string // fields of rendezvous.Kept, in which a store would have it
	set func(c *api.SessionConfig)
	// take has server A take it.
	take func(j *inherited)
	// is what is known of it, and the next server knows the same.
	is func(k rendezvous.Kept) any
	// known is for those that are not the same afterwards: their effect is, or they are lost, as
	// docs/tasks/without-a-master.md says.
	known func(j *inherited, before, after rendezvous.Kept)
}

// inherited is a run of server A that server B takes over from the launchers alone.
type inherited struct {
	*electorate
	t     *testing.T
	a, b  *member
	dead  bool     // a is
	again *api.Hub // of a launcher that was started at the endpoint then; nil: b serves
	end   func()   // lets workers end; nil: they do
}

// hub is that of the launcher that serves.
func (j *inherited) hub() *api.Hub {
	switch {
	case j.again != nil:
		return j.again
	case j.dead:
		return j.b.Serving().Hub
	}
	return j.a.Serving().Hub
}

func (j *inherited) kept() rendezvous.Kept {
	k, exists := j.hub().Kept("r", 0, 0)
	require.True(j.t, exists)
	return k.Round
}

func (j *inherited) order(o rendezvous.Order) {
	j.t.Helper()
	if o.Text == "" {
		o.Text = "by hand"
	}
	require.NoError(j.t, j.hub().Order("r", o))
}

// hears waits until b knows of an order: one that no launcher has heard of is lost.
func (j *inherited) hears(of func(d *rendezvous.Directive) bool) {
	j.t.Helper()
	require.Eventually(j.t, func() bool { return of(j.b.last.Load()) }, 10*time.Second, time.Millisecond)
}

// fails has workers of a launcher fail.
func (j *inherited) fails(m *member, d rendezvous.Decision) {
	j.t.Helper()
	failure := job.Failure{Text: "exit code 1", Fingerprint: "x"}
	require.NoError(j.t, m.session.Report(j.t.Context(), rendezvous.Failing{ID: m.cfg.ID, EpochID: *m.ran.Load(),
		Decision: d, Failures: []job.Failure{failure}, Progress: job.Progress{Stepping: true}}))
}

// settles waits until all launchers know that the run goes on, or rests.
func (j *inherited) settles() {
	j.t.Helper()
	require.Eventually(j.t, func() bool {
		s, err := j.hub().Run("r")
		epoch, _, _ := j.hub().Crew("r")
		return err == nil && len(j.hub().IDs("r")) == j.size() && j.all(func(m *member) bool {
			switch d := m.last.Load(); {
			case d == nil:
				return false
			case d.Kind == job.Bar:
				return true
			case s.Paused != nil:
				return d.Paused != nil && (d.Kind == job.Wait || d.Kind == job.Run)
			default:
				return d.Kind == job.Run && d.EpochID == epoch
			}
		})
	}, 10*time.Second, time.Millisecond, "the run does not settle")
}

// dies kills server A, and waits for the next one.
func (j *inherited) dies() {
	j.t.Helper()
	rests := j.kept().Paused != nil
	j.a.end()
	if j.dead = true; rests { // nobody has a vote
		j.again = j.found()
		require.Nil(j.t, j.b.Serving())
	} else {
		require.Eventually(j.t, func() bool { return j.b.Serving() != nil }, 10*time.Second, time.Millisecond)
	}
	if j.end != nil {
		j.end()
	}
}

func inherit(t *testing.T, set func(c *api.SessionConfig)) *inherited {
	e := newElectorate(t, func(c *api.SessionConfig) {
		c.Params.MaxRestarts, c.Params.Budget.BackoffMax = 5, -1
		if set != nil {
			set(c)
		}
	})
	j := &inherited{electorate: e, t: t, a: e.join("a", newHost(t), nil)}
	require.Eventually(t, func() bool { return e.all(func(m *member) bool { return m.knows("a") }) }, 10*time.Second,
		time.Millisecond)
	e.vacate()
	require.Eventually(t, func() bool { return j.a.Serving() != nil }, 10*time.Second, time.Millisecond)
	j.mu.Lock()
	j.server = j.a.cfg.Listener.Addr().String()
	j.mu.Unlock()
	j.b = e.join("b", newHost(t), nil)
	require.Eventually(t, func() bool { return e.all(func(m *member) bool { return m.knows("b") }) }, 10*time.Second,
		time.Millisecond)
	j.settles()
	return j
}

var command = &job.Command{Program: []string{"other.py"}}

// decisions are all kinds of them.
func decisions() map[string]decision {
	all := map[string]decision{}
	maps.Copy(all, spending())
	maps.Copy(all, ordering())
	maps.Copy(all, learning())
	return all
}

// restart has workers of a launcher fail, and waits for the next world.
func restart(voter int, d rendezvous.Decision) func(j *inherited) {
	return func(j *inherited) {
		j.fails(j.voters[voter], d)
		j.settles()
	}
}

// spending are those of policies, and what they cost.
func spending() map[string]decision {
	return map[string]decision{
		"a restart that is charged": {of: []string{"Restarts"}, take: restart(0, rendezvous.RestartCharged),
			is: func(k rendezvous.Kept) any { return k.Restarts }},
		"a restart that is free": {of: []string{"Spent"}, take: restart(0, rendezvous.RestartFree),
			is: func(k rendezvous.Kept) any { return k.Spent.Streak }},
		"all that is spent": {of: []string{"Spent"}, take: func(j *inherited) {
			restart(0, rendezvous.RestartCharged)(j)
			restart(1, rendezvous.RestartFree)(j)
		}, set: func(c *api.SessionConfig) {
			b := &c.Params.Budget
			b.Sum, b.Deadline, b.NoProgress = true, time.Hour, 9
			b.Windows[0] = rendezvous.Window{Scope: "job", Max: 9, Per: time.Hour}
		}, known: func(j *inherited, before, after rendezvous.Kept) {
			x, y := before.Spent, after.Spent
			require.WithinDuration(j.t, x.Since, y.Since, time.Millisecond)
			require.Len(j.t, y.Recent, 2)
			x.Since, y.Since, x.Recent, y.Recent = time.Time{}, time.Time{}, nil, nil
			x.Same, x.Alike = 0, "" // the loss of a node is another reason to start again
			require.Equal(j.t, x, y)
			require.Equal(j.t, 2, y.Sum)
		}},
		"a restart elsewhere": {of: []string{"Restarts", "Bars"}, take: restart(2, rendezvous.RestartElsewhere),
			is: func(k rendezvous.Kept) any { return []any{k.Restarts, k.Bars} }},
		"a smaller world": {of: []string{"Restarts"}, take: restart(2, rendezvous.Shrink),
			is: func(k rendezvous.Kept) any { return k.Restarts }},
		"a policy's hold": {of: []string{"Paused"}, take: restart(0, rendezvous.Hold),
			is: func(k rendezvous.Kept) any { return []any{k.Spent.Held, k.Paused} }},
		"a failure under way": {of: []string{"Broken", "Unrun"}, take: func(j *inherited) {
			j.end = j.stall()
			j.fails(j.voters[0], rendezvous.RestartCharged)
			require.Eventually(j.t, func() bool { return j.kept().Broken != nil }, 10*time.Second, time.Millisecond)
		}, known: func(j *inherited, before, after rendezvous.Kept) {
			require.True(j.t, after.Epoch.Newer(before.Epoch), "the workers start again")
			require.Nil(j.t, after.Broken)
			require.Zero(j.t, after.Restarts, "a node was lost meanwhile, which explains the failure")
		}},
	}
}

// ordering are those of people.
func ordering() map[string]decision {
	held := func(c *api.SessionConfig) { c.Params.Hold = true }
	order := func(os ...rendezvous.Order) func(j *inherited) {
		return func(j *inherited) {
			for _, o := range os {
				j.order(o)
				j.settles()
			}
		}
	}
	const kind = rendezvous.OrderBar
	return map[string]decision{
		"a pause": {of: []string{"Paused"}, take: order(rendezvous.Order{Kind: rendezvous.OrderPause}),
			is: func(k rendezvous.Kept) any { return k.Paused }},
		"since when": {of: []string{"PausedAt"}, take: order(rendezvous.Order{Kind: rendezvous.OrderPause}),
			set: func(c *api.SessionConfig) { c.Params.Budget.Deadline = time.Hour },
			known: func(j *inherited, before, after rendezvous.Kept) {
				require.WithinDuration(j.t, before.PausedAt, after.PausedAt, time.Millisecond)
			}},
		"the end of a pause": {of: []string{"Unpaused"},
			take: order(rendezvous.Order{Kind: rendezvous.OrderPause}, rendezvous.Order{Kind: rendezvous.OrderResume}),
			known: func(j *inherited, before, after rendezvous.Kept) {
				require.NotZero(j.t, before.Unpaused)
				require.Nil(j.t, after.Paused)
			}},
		"a hold": {of: []string{"Hold"}, set: held, is: func(k rendezvous.Kept) any { return k.Hold != nil }},
		"the end of a hold": {of: []string{"Unheld"}, set: held, take: order(rendezvous.Order{Kind: rendezvous.OrderResume}),
			known: func(j *inherited, before, after rendezvous.Kept) {
				require.NotZero(j.t, before.Unheld)
				require.Nil(j.t, after.Hold)
			}},
		"a command": {of: []string{"Command"}, take: order(rendezvous.Order{Kind: rendezvous.OrderRestart, Command: command}),
			is: func(k rendezvous.Kept) any { return k.Command }},
		"a command in advance": {of: []string{"OnResume"}, set: func(c *api.SessionConfig) { c.OnResume = command },
			is: func(k rendezvous.Kept) any { return k.OnResume }},
		"a bar of a node that is away": {of: []string{"Bars"}, take: func(j *inherited) {
			j.order(rendezvous.Order{Kind: kind, Node: "x"})
			j.hears(func(d *rendezvous.Directive) bool { return d.Bars != nil })
		},
			known: func(j *inherited, before, after rendezvous.Kept) { require.Contains(j.t, after.Bars, "x") }},
		"a bar of a node that is here": {of: []string{"Bars"}, take: order(rendezvous.Order{Kind: kind, Node: "voter2"}),
			is: func(k rendezvous.Kept) any { return k.Bars }},
		"a drain": {of: []string{"Bars"}, take: order(rendezvous.Order{Kind: rendezvous.OrderDrain, Node: "voter2"}),
			is: func(k rendezvous.Kept) any { return k.Bars }},
		"the end of a bar": {of: []string{"Unbarred"}, take: func(j *inherited) {
			j.order(rendezvous.Order{Kind: kind, Node: "x"})
			j.order(rendezvous.Order{Kind: rendezvous.OrderUnbar, Node: "x"})
			j.hears(func(d *rendezvous.Directive) bool { return d.Bars != nil && len(d.Bars.Names) == 0 })
		}, known: func(j *inherited, before, after rendezvous.Kept) {
			require.NotEmpty(j.t, before.Unbarred)
			require.Empty(j.t, after.Bars)
		}},
		"a restart under way": {of: []string{"Restart"}, take: func(j *inherited) {
			j.end = j.stall()
			j.order(rendezvous.Order{Kind: rendezvous.OrderRestart, Charge: true})
			require.NotNil(j.t, j.kept().Restart)
		}, known: func(j *inherited, before, after rendezvous.Kept) {
			require.True(j.t, after.Epoch.Newer(before.Epoch), "the workers start again")
			require.Zero(j.t, after.Restarts, "a node was lost meanwhile")
		}},
	}
}

// learning are what was learned about the run and its nodes.
func learning() map[string]decision {
	return map[string]decision{
		"a term": {of: []string{"Term", "Epoch"}, known: func(j *inherited, before, after rendezvous.Kept) {
			require.True(j.t, after.Epoch.Newer(before.Epoch))
			require.Greater(j.t, after.Term, before.Term)
		}},
		"the run's options": {of: []string{"Params"}, is: func(k rendezvous.Kept) any { return k.Params }},
		"the nodes of the world": {of: []string{"World", "Works"}, known: func(j *inherited, before, after rendezvous.Kept) {
			require.ElementsMatch(j.t, before.World.Names, append(after.World.Names, "a"))
			require.ElementsMatch(j.t, before.Works, append(after.Works, "a"))
		}},
		"passes of checks": {of: []string{"Passes"}, set: func(c *api.SessionConfig) { c.Params.Gate = true },
			take: func(j *inherited) { j.all(func(m *member) bool { m.checks.Store(0); return true }) },
			known: func(j *inherited, before, after rendezvous.Kept) {
				require.Len(j.t, before.Passes, voters+2)
				require.Len(j.t, after.Passes, voters+1)
				require.True(j.t, j.all(func(m *member) bool { return m.checks.Load() == 1 }), "lost: all are checked again")
			}},
		"the ledger": {of: []string{"Ledger"}, known: func(j *inherited, before, after rendezvous.Kept) {
			require.True(j.t, after.Ledger.Since.After(before.Ledger.Since), "lost: it begins anew")
		}},
	}
}

// TestDecisionsInTheLaunchers: the launchers bring all to the next server that was decided, but for that which is said
// to be lost.
func TestDecisionsInTheLaunchers(t *testing.T) {
	of := []string{"End", "Over"} // TestEndedRunHasNoServer
	for name, d := range decisions() {
		of = append(of, d.of...)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := inherit(t, d.set)
			if d.take != nil {
				d.take(j)
			}
			before := j.kept()
			j.dies()
			j.settles()
			after := j.kept()
			if d.known != nil {
				d.known(j, before, after)
				return
			}
			require.NotZero(t, d.is(before))
			require.Equal(t, d.is(before), d.is(after))
		})
	}
	for f := range reflect.TypeFor[rendezvous.Kept]().Fields() {
		require.Contains(t, of, f.Name, "a store keeps it, so the launchers bring it along, or it is said to be lost")
	}
}

// TestTimelineIsLost: the events of a run, and the evidence about its failures, are with the launcher that serves.
func TestTimelineIsLost(t *testing.T) {
	t.Parallel()
	j := inherit(t, nil)
	restart(0, rendezvous.RestartCharged)(j)
	last, _ := j.hub().Kept("r", 0, 0)
	proof := func() []string {
		k, _ := j.hub().Kept("r", 0, 0)
		var texts []string
		for _, p := range k.Line.Proofs {
			for _, f := range p.Evidence.Failures {
				texts = append(texts, f.Text)
			}
		}
		return texts
	}
	require.NotEmpty(t, last.Line.Events)
	require.Equal(t, []string{"exit code 1"}, proof())
	j.dies()
	j.settles()
	first, _ := j.hub().Kept("r", 0, 0)
	require.True(t, first.Line.Events[0].At.After(last.Line.Events[len(last.Line.Events)-1].At))
	require.Empty(t, proof())
}

// TestEndedRunHasNoServer: all launchers hear of the end from the server, and elect nobody after it. A launcher that
// comes later opens the run anew, because nobody knows of the end.
func TestEndedRunHasNoServer(t *testing.T) {
	t.Parallel()
	j := inherit(t, nil)
	j.all(func(m *member) bool {
		require.NoError(t, m.session.Report(t.Context(), rendezvous.Success{ID: m.cfg.ID, EpochID: *m.ran.Load()}))
		return true
	})
	require.Eventually(t, func() bool {
		return j.all(func(m *member) bool { return m.last.Load().Kind == job.Done })
	}, 10*time.Second, time.Millisecond)
	require.NotNil(t, j.kept().End)
	j.a.end()
	require.False(t, j.b.Failover.Lost(t.Context(), errLost))
	require.Nil(t, j.b.Serving())
	j.all(func(m *member) bool { m.end(); return true })
	hub := j.found()
	j.join("late", nil, nil)
	_, exists := hub.Kept("r", 0, 0)
	require.True(t, exists)
	s, err := hub.Run("r")
	require.NoError(t, err)
	require.Equal(t, "forming", s.Phase)
}

// TestSpareFollows: a launcher that has had no place yet finds the one that others have elected.
func TestSpareFollows(t *testing.T) {
	t.Parallel()
	j := inherit(t, func(c *api.SessionConfig) { c.Params.Max = voters + 2 })
	spare := j.join("spare", nil, nil)
	require.Eventually(t, func() bool {
		d := spare.last.Load()
		return d != nil && d.Kind == job.Wait
	}, 10*time.Second, time.Millisecond)
	j.dies()
	require.Eventually(t, func() bool { return spare.last.Load().Kind == job.Run }, 5*time.Second, time.Millisecond)
}
