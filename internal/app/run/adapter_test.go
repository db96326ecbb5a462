package run

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/run/storeacl"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/job"
	"dlrover-run/launcher"
	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// toldDaemon is an api.Service that says what the test wants and writes down what it is told.
type toldDaemon struct {
	news  chan api.News
	world []job.Member
	err   error // of reports and World

	mu   sync.Mutex
	told []rendezvous.Event
}

func (d *toldDaemon) tell(ev rendezvous.Event) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.told = append(d.told, ev)
	return d.err
}

func (d *toldDaemon) Join(_ context.Context, _ string, ev rendezvous.Join) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	ev.Node.Uptime = 0
	d.told = append(d.told, ev)
	return nil
}

func (d *toldDaemon) Watch(ctx context.Context, run, _ string, after api.Cursor) (api.News, error) {
	if after.Join != nil {
		_ = d.Join(ctx, run, *after.Join) // nil
	}
	select {
	case n := <-d.news:
		return n, nil
	case <-ctx.Done():
		return api.News{}, ctx.Err()
	}
}

func (d *toldDaemon) Report(_ context.Context, _ string, ev rendezvous.Event) error {
	return d.tell(ev)
}

func (d *toldDaemon) Leave(_ context.Context, _ string, ev rendezvous.Leave) (job.Evidence, error) {
	return job.Evidence{Restarts: 2, Failures: ev.Failures}, d.tell(ev)
}

func (d *toldDaemon) World(context.Context, string) ([]job.Member, error) {
	return d.world, d.err
}

// newest is what the daemon was told last.
func (d *toldDaemon) newest() rendezvous.Event {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.told[len(d.told)-1]
}

// adapted calls f in a bubble with the adapter of a node "id" that has joined at the daemon.
func adapted(t *testing.T, f func(t *testing.T, a *adapter, d *toldDaemon)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		d := &toldDaemon{news: make(chan api.News)}
		s, err := api.Open(t.Context(), d,
			api.SessionConfig{Run: "run", Node: rendezvous.Node{ID: "id"}, Params: rendezvous.Params{MaxRestarts: 3}})
		require.NoError(t, err)
		a := newAdapter(s, storeacl.New(false, 2))
		defer a.close()
		f(t, a, d)
	})
}

func TestAdapterTranslatesDirectives(t *testing.T) {
	adapted(t, func(t *testing.T, a *adapter, d *toldDaemon) {
		id := job.EpochID{Term: 7, Round: 2, Epoch: 1}
		place := job.Place{
			GroupRank: 1, GroupWorldSize: 2, RankBase: 4, WorldSize: 8, RoleRankBase: 3, RoleWorldSize: 5, RestartCount: 6,
			MasterAddr: "a", MasterPort: 9,
		}
		all := launcher.Rules{Success: "all"}
		d.news <- api.News{Directive: rendezvous.Directive{Seq: 1, Kind: job.Run, EpochID: id, Place: &place}}
		require.Equal(t, launcher.Directive{
			Kind: job.Run, EpochID: id, MaxRestarts: 3, Rules: all, Place: place,
		}, <-a.Directives())
		d.news <- api.News{
			Directive: rendezvous.Directive{
				Seq: 2, Kind: job.Bar, Cause: &job.Cause{Kind: job.CauseHang, Text: "stuck"},
			},
		}
		require.Equal(t, launcher.Directive{
			Kind: job.Bar, Cause: job.Cause{Kind: job.CauseHang, Text: "stuck"}, MaxRestarts: 3, Rules: all,
		}, <-a.Directives())
		order := &job.Cause{Text: "ordered"}
		for i, c := range []struct {
			d    rendezvous.Directive
			want bool
		}{
			{rendezvous.Directive{Kind: job.Run, Paused: order}, true},
			{rendezvous.Directive{Kind: job.Run, Barred: order}, true},
			{rendezvous.Directive{Kind: job.Stop, Paused: order, Barred: order}, false},
		} {
			c.d.Seq = uint64(3 + i)
			d.news <- api.News{Directive: c.d}
			require.Equal(t, c.want, (<-a.Directives()).Confirms, "%+v", c.d)
		}
	})
}

// The rendezvous hears of the last saves before the success, from the node of rank 0, and of nothing where nothing is
// known.
func TestAdapterReportsProgress(t *testing.T) {
	adapted(t, func(t *testing.T, a *adapter, d *toldDaemon) {
		saved := job.Progress{Saving: true, Checkpoint: 7, Kept: time.Second}
		a.progress = func() job.Progress { return saved }
		before := len(d.told)
		require.NoError(t, a.Success(t.Context(), launcher.Directive{}))
		require.NoError(t, a.Success(t.Context(), launcher.Directive{Place: job.Place{RankBase: 1}}))
		saved = job.Progress{Stepping: true}
		require.NoError(t, a.Success(t.Context(), launcher.Directive{}))
		success := rendezvous.Success{ID: "id"}
		require.Equal(t, []rendezvous.Event{rendezvous.Stepped{
			ID: "id", Progress: job.Progress{Saving: true, Checkpoint: 7, Kept: time.Second},
		}, success, success, success}, d.told[before:])
		saved.Step, d.err = 1, api.ErrBadRequest
		require.Error(t, a.Success(t.Context(), launcher.Directive{}))
		require.Equal(t, success, d.newest(), "in spite of an older daemon that refuses the news")
	})
}

// The first step is told soon, and then what is new of checkpoints, every ten seconds at most; steps alone are no news.
func TestTellsProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		plan := func(at time.Duration) (p job.Progress) {
			if at > 3200*time.Millisecond {
				p.Step, p.Stepping = int64(at/time.Second), true
			}
			if at > 20*time.Second {
				p.Saving, p.Checkpoint, p.Blocked = true, int64(min(at, 41*time.Second)/(5*time.Second)), time.Second
			}
			return p
		}
		var told []time.Duration
		tell := &teller{first: stepLook, measure: func() job.Progress { return plan(time.Since(began)) }}
		tell.tell = func(_ context.Context, _ launcher.Directive, p job.Progress) error {
			require.Equal(t, plan(time.Since(began)), p)
			told = append(told, time.Since(began))
			return nil
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		other := launcher.Directive{Place: job.Place{RankBase: 1}}
		tell.run(ctx, launcher.RunRequest{Epoch: launcher.Epoch{Directive: other}})
		require.Zero(t, time.Since(began), "another node tells it")
		tell.run(ctx, launcher.RunRequest{})
		s := func(seconds float64) time.Duration { return time.Duration(seconds * float64(time.Second)) }
		require.Equal(t, []time.Duration{s(3.5), s(23.5), s(33.5), s(43.5)}, told)
	})
}

func TestAdapterReports(t *testing.T) {
	at := time.Unix(1700000000, 0)
	e := launcher.Directive{EpochID: job.EpochID{Term: 7, Round: 2, Epoch: 1}}
	id := job.EpochID{Term: 7, Round: 2, Epoch: 1}
	adapted(t, func(t *testing.T, a *adapter, d *toldDaemon) {
		for name, tt := range map[string]struct {
			report func(ctx context.Context) error
			want   rendezvous.Event
		}{
			"success": {func(ctx context.Context) error { return a.Success(ctx, e) },
				rendezvous.Success{ID: "id", EpochID: id}},
			"cleared": {func(ctx context.Context) error {
				return a.Cleared(ctx, launcher.CheckResult{Until: at, Domain: "rack 7", Covered: []string{"network"}})
			}, rendezvous.Cleared{ID: "id", Until: at, Domain: "rack 7", Covered: []string{"network"}}},
			"doubt": {func(ctx context.Context) error { return a.Doubt(ctx, "link_downed") },
				rendezvous.Doubt{ID: "id", Reason: "link_downed"}},
			"cleared forever": {func(ctx context.Context) error { return a.Cleared(ctx, launcher.CheckResult{}) },
				rendezvous.Cleared{ID: "id"}},
			"barred": {func(ctx context.Context) error {
				return a.Barred(ctx, launcher.CheckResult{Reason: "slow", Again: true, Aspect: "network"})
			}, rendezvous.Barred{ID: "id", Reason: "slow", Again: true, Aspect: "network"}},
			"free": {func(ctx context.Context) error { return a.Failing(ctx, e, policy.RestartFree, nil) },
				rendezvous.Failing{ID: "id", EpochID: id, Decision: rendezvous.RestartFree, Failures: []job.Failure{}}},
			"charged": {func(ctx context.Context) error { return a.Failing(ctx, e, policy.RestartCharged, nil) },
				rendezvous.Failing{ID: "id", EpochID: id, Decision: rendezvous.RestartCharged, Failures: []job.Failure{}}},
			"permanent": {func(ctx context.Context) error { return a.Failing(ctx, e, policy.Fail, nil) },
				rendezvous.Failing{ID: "id", EpochID: id, Decision: rendezvous.Permanent, Failures: []job.Failure{}}},
		} {
			require.NoError(t, tt.report(t.Context()), name)
			require.Equal(t, tt.want, d.newest(), name)
		}
	})
}

// A daemon that was started again and has not heard of this node says by its directives how to go on.
func TestReportToADaemonThatForgotIsNoError(t *testing.T) {
	adapted(t, func(t *testing.T, a *adapter, d *toldDaemon) {
		d.err = rendezvous.ErrUnknownNode
		require.NoError(t, a.Success(t.Context(), launcher.Directive{}))
		require.NoError(t, a.Barred(t.Context(), launcher.CheckResult{Reason: "slow"}))
		require.NoError(t, a.Doubt(t.Context(), "carrier"))
		require.NoError(t, a.Ready(t.Context(), launcher.Directive{Place: job.Place{GroupWorldSize: 2}}, "10.0.0.1", 9))
		_, err := a.World(t.Context())
		require.ErrorIs(t, err, rendezvous.ErrUnknownNode, "an epoch cannot start without its world")
	})
}

// Whoever leads admits the nodes of the new world to its store before they are told of it.
func TestReadyAdmitsTheWorld(t *testing.T) {
	adapted(t, func(t *testing.T, a *adapter, d *toldDaemon) {
		d.world = []job.Member{{Addr: "10.0.0.1", Slots: 2}, {Addr: "10.0.0.2", Slots: 2}}
		two := launcher.Directive{EpochID: job.EpochID{Round: 1}, Place: job.Place{GroupWorldSize: 2}}
		require.NoError(t, a.Ready(t.Context(), two, "10.0.0.1", 9))
		require.Equal(t, rendezvous.Ready{ID: "id", EpochID: job.EpochID{Round: 1}, Addr: "10.0.0.1", Port: 9},
			d.newest())
		require.True(t, a.acl.Allow(netip.MustParseAddr("10.0.0.2")))

		require.NoError(t, a.Ready(t.Context(), launcher.Directive{Place: job.Place{GroupWorldSize: 1}}, "10.0.0.1", 9))
		require.False(t, a.acl.Allow(netip.MustParseAddr("10.0.0.2")), "it is not in the newest world")
		require.True(t, a.acl.Allow(netip.MustParseAddr("10.0.0.1")))
	})
}

func TestFailuresSurviveTheJourney(t *testing.T) {
	adapted(t, func(t *testing.T, a *adapter, _ *toldDaemon) {
		f := verdict.Failure{
			Node: 1, NodeName: "b", Rank: 5, LocalRank: 1, PID: 42, ExitCode: 1, At: time.Unix(1700000000, 0).UTC(),
			Message: "ValueError: bad batch",
		}
		e, err := a.Leave(t.Context(), "over", []verdict.Failure{f})
		require.NoError(t, err)
		require.Equal(t, verdict.Evidence{RestartsUsed: 2, Failures: []verdict.Failure{f}}, e)
	})
}

func TestErrorsOfTheRendezvousHaveReasons(t *testing.T) {
	require.NoError(t, classify(nil))
	for err, want := range map[error]policy.Reason{
		api.ErrUnauthorized:      policy.TokenRefused,
		rendezvous.ErrRefused:    policy.RendezvousClosed,
		api.ErrBadRequest:        policy.RendezvousClosed,
		context.DeadlineExceeded: policy.MasterUnreachable,
		api.ErrAway:              policy.MasterUnreachable,
		errors.New("other"):      policy.Unclassified,
	} {
		got := classify(fmt.Errorf("join: %w", err))
		require.ErrorIs(t, got, err)
		require.Equal(t, want, reasonOf(got), "%v", err)
	}
}

// idle is a launcher.Processes and launcher.Store of a node that never gets workers.
type idle struct{ launcher.Processes }

// A launcher whose workers do not end keeps its node's name, not only itself, from getting others.
func TestNodeBarsItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hub := api.NewHub(api.HubConfig{})
		defer hub.Close()
		node := rendezvous.Node{ID: "id", Name: "node-x", Rank: -1, Slots: 1, Can: []rendezvous.Ability{rendezvous.CanGate}}
		params := rendezvous.Params{Min: 2, Max: 2}
		s, err := api.Open(t.Context(), hub, api.SessionConfig{Run: "run", Node: node, Params: params})
		require.NoError(t, err)
		a := newAdapter(s, storeacl.New(false, 1))
		defer a.close()
		j := &nodeJob{s: &settings{runID: "run", node: node}, endpoint: &endpoint{served: &service.Service{Hub: hub}}}
		a.bar = j.barSelf
		require.NoError(t, a.Bar(t.Context(), "stop the workers: pid 7 survived SIGKILL\n"+strings.Repeat("x", 5000)))
		for d := range a.Directives() {
			if d.Kind == job.Bar {
				require.Contains(t, d.Cause.Text, "pid 7 survived SIGKILL")
				require.Equal(t, job.CauseHang, d.Cause.Kind)
				return
			}
		}
	})
}

func (idle) Reset(bool) {}
func (idle) Port() int  { return 1 }

// slow is a part whose check does not pass.
var slow = launcher.Part{
	Name: "speed",
	Check: func(context.Context, launcher.CheckRequest) (launcher.CheckResult, error) {
		return launcher.CheckResult{Reason: "GPU 3 is slow"}, nil
	},
}

// The whole way of a check that does not pass: gate, directive, part, report, bar, and the end of the launcher.
func TestNodeThatDoesNotPassTheGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hub := api.NewHub(api.HubConfig{})
		defer hub.Close()
		node := rendezvous.Node{ID: "id", Name: "node-x", Rank: -1, Slots: 2, Can: []rendezvous.Ability{rendezvous.CanGate}}
		params := rendezvous.Params{Min: 1, Max: 1, Gate: true, JoinTimeout: time.Minute}
		s, err := api.Open(t.Context(), hub, api.SessionConfig{Run: "run", Node: node, Params: params})
		require.NoError(t, err)
		a := newAdapter(s, storeacl.New(false, 2))
		defer a.close()
		agent, err := launcher.New(launcher.Config{
			Slots: 2, Path: "/bin/false", Rendezvous: a, Store: idle{}, Processes: idle{}, Logs: &logs.Logs{},
			Parts: []launcher.Part{slow},
		})
		require.NoError(t, err)
		res := agent.Run()
		require.Equal(t, policy.NodeCheckFailed, res.Reason)
		require.EqualError(t, res.Err,
			"this node has not passed its check and is left out of the job: speed: GPU 3 is slow")
	})
}
