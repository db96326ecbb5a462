package upstream

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/pyproto"
)

// TestLife: three nodes of different sizes meet, work and end, by both dialects.
func TestLife(t *testing.T) {
	t.Parallel()
	for _, v04 := range []bool{false, true} {
		t.Run(fmt.Sprintf("v0.4=%v", v04), func(t *testing.T) {
			m := newModel(t)
			m.v04 = v04
			three := rendezvous.Params{Min: 3, Max: 3}
			nodes := []*node{m.node(2, 7, three).join(), m.node(0, 5, three).join(), m.node(1, 6, three).join()}
			run(nodes...)
			for _, n := range nodes {
				d := n.seen
				require.Equal(t, job.Place{
					GroupRank: n.rank, GroupWorldSize: 3, RankBase: []int{0, 1, 3}[n.rank], WorldSize: 6,
					RoleRankBase: []int{0, 1, 3}[n.rank], RoleWorldSize: 6,
					MasterAddr: "10.0.0.0", MasterPort: 20000, WorkerStore: true,
				}, *d.Place)
			}
			require.Equal(t, "20000", m.key("MASTER_PORT"))
			require.Equal(t, nodes[1].seen.EpochID, nodes[0].seen.EpochID, "one name for it")
			require.Equal(t, nodes[1].seen.EpochID, nodes[2].seen.EpochID)
			world, err := nodes[0].World(t.Context(), "job")
			require.NoError(t, err)
			require.Equal(t, "10.0.0.1", world[1].Addr)
			require.Equal(t, job.Member{GroupRank: 2, Node: "n2", Addr: "10.0.0.2", RankBase: 3, Slots: 3}, world[2])

			nodes[0].succeeds()
			nodes[1].succeeds()
			nodes[0].quiet() // one still works
			nodes[2].succeeds()
			for _, n := range nodes {
				n.until(job.Done)
				require.Equal(t, job.Succeeded, n.leave().Outcome)
				events := m.events(n.rank + 5)
				require.Equal(t, "SUCCEEDED_EXITED", events[len(events)-1])
				require.NotContains(t, events, "FAILED_EXITED")
			}
		})
	}
}

// What cannot act under a Python master is named; --hold, which must not be passed over, is refused.
func TestOptionsThatCannotAct(t *testing.T) {
	t.Parallel()
	acting := rendezvous.Params{Min: 1, Max: 2, MaxRestarts: 3, Unit: 1, Gate: true, Check: "x", Hang: "y"}
	require.Empty(t, inertParams(acting))
	p := rendezvous.Params{Min: 1, Max: 2, GrowthDelay: 7 * time.Second, Always: true}
	require.Equal(t, "--restart-policy=Always: true growth_delay=7", inertParams(p))
	p.Hold = true
	require.ErrorIs(t, newModel(t).node(0, 0, p).tryJoin(), rendezvous.ErrRefused)
}

// Of the options of a check, too, and once however often the node joins.
func TestOptionsOfACheckThatCannotAct(t *testing.T) {
	t.Parallel()
	for growth, want := range map[time.Duration]string{
		0:               `options="in tests with other nodes: --check-timeout=30s"`,
		7 * time.Second: `options="growth_delay=7; in tests with other nodes: --check-timeout=30s"`,
	} {
		var log bytes.Buffer
		n := newModel(t).node(0, 0, rendezvous.Params{Min: 1, Max: 2, GrowthDelay: growth})
		n.cfg.Check.Inert, n.cfg.Log = "--check-timeout=30s", slog.New(slog.NewTextHandler(&log, nil))
		n.join().join()
		n.Close()
		require.Equal(t, 1, strings.Count(log.String(), want), log.String())
		require.Equal(t, 1, strings.Count(log.String(), "no effect"))
	}
}

// The master counts whole seconds, and 0 would mean something else to it than a part of one.
func TestTimesAreRoundedUp(t *testing.T) {
	t.Parallel()
	m := newModel(t)
	p := rendezvous.Params{Min: 1, Max: 2, LastCall: 500 * time.Millisecond, JoinTimeout: 2100 * time.Millisecond}
	m.node(0, 0, p).join()
	told := m.told("RendezvousParams", 0)[0]
	require.Equal(t, []int{1, 3}, []int{told.Int("waiting_timeout"), told.Int("join_timeout")})
}

func TestHTTP(t *testing.T) {
	t.Parallel()
	m := newModel(t)
	c, err := pyproto.Find(t.Context(), pyproto.ClientConfig{Addr: m.addr, HTTP: true})
	require.NoError(t, err)
	n := &node{t: t, slots: 1, params: rendezvous.Params{Min: 1, Max: 1}, Service: New(Config{Client: c})}
	t.Cleanup(n.Close)
	n.join().until(job.Run)
	n.succeeds()
	n.until(job.Done)
}

// TestFailureIsCharged: the node pays, the other one does not; without a restart left the run ends for the node.
func TestFailureIsCharged(t *testing.T) {
	t.Parallel()
	m := newModel(t)
	a, b := m.pair()
	b.fails(rendezvous.RestartCharged)
	stop := b.until(job.Stop)
	require.Equal(t, job.Cause{Kind: job.CauseFailure, Node: "n1", Text: "it broke"}, *stop.Cause)
	b.join()
	stop = a.until(job.Stop)
	require.Equal(t, job.CauseGrowth, stop.Cause.Kind)
	a.join()
	require.Zero(t, a.until(job.Run).Place.RestartCount)
	run := b.until(job.Run)
	require.Equal(t, 1, run.Place.RestartCount)
	require.Equal(t, 2, run.Epoch)
	require.Equal(t, "it broke", run.Cause.Text)

	b.fails(rendezvous.RestartCharged)
	b.until(job.Fail)
	e := b.leave()
	require.Equal(t, job.Failed, e.Outcome)
	require.Equal(t, []int{1, 1, 4}, []int{e.Restarts, e.MaxRestarts, 5 - len(e.Failures)})
	require.Equal(t, "FAILED_EXITED", m.events(1)[1])
	told := m.told("NodeFailure", 1)
	require.Len(t, told, 2)
	require.Equal(t, processError, told[1].Str("level"))
	require.Equal(t, 1, told[1].Int("restart_count"))
	require.JSONEq(t, fmt.Sprintf(`{"1":{"local_rank":0,"exitcode":3,"message":"why","datetime":%q}}`,
		e.Failures[0].At.UTC().Format(time.DateTime)), told[1].Str("error_data"))
}

func TestDecisions(t *testing.T) {
	t.Parallel()
	for decision, want := range map[rendezvous.Decision]job.Kind{
		rendezvous.RestartFree: job.Stop, rendezvous.RestartCharged: job.Stop,
		rendezvous.Permanent: job.Fail, rendezvous.RestartElsewhere: job.Fail,
		rendezvous.Shrink: job.Fail, rendezvous.Hold: job.Fail,
	} {
		t.Run(string(decision), func(t *testing.T) {
			t.Parallel()
			m := newModel(t)
			n := m.node(0, 0, rendezvous.Params{Min: 1, Max: 1, MaxRestarts: 1}).join()
			n.until(job.Run)
			n.fails(decision)
			n.until(want)
			if want == job.Stop {
				restarts := n.join().until(job.Run).Place.RestartCount
				require.Equal(t, decision == rendezvous.RestartCharged, restarts == 1)
			}
		})
	}
}

// TestConsequenceIsFree: workers fail because another node's have, which waits for a new world already.
func TestConsequenceIsFree(t *testing.T) {
	t.Parallel()
	m := newModel(t)
	a, b := m.pair()
	b.fails(rendezvous.RestartCharged)
	b.until(job.Stop)
	a.mu.Lock() // its own question comes later than the failure
	a.at.turns.Add(1)
	a.mu.Unlock()
	b.join()
	eventually(t, "b waits", func() bool { return m.count() == 1 })
	a.fails(rendezvous.RestartCharged)
	run(a, b)
	require.Zero(t, a.leave().Restarts)
}

// TestPeersFailTogether: workers of both nodes fail before the master can tell of either.
func TestPeersFailTogether(t *testing.T) {
	t.Parallel()
	pair := func(t *testing.T, restarts int, blame time.Duration) (a, b *node) {
		m := newModel(t)
		p := rendezvous.Params{Min: 2, Max: 2, MaxRestarts: restarts}
		a, b = m.node(0, 0, p), m.node(1, 1, p)
		a.every.blame, b.every.blame = blame, blame
		run(a.join(), b.join())
		return a, b
	}
	t.Run("the cause pays", func(t *testing.T) {
		t.Parallel()
		a, b := pair(t, 1, time.Hour)
		for epoch := range 2 { // the second has no restart left, and ends
			a.failsBy(rendezvous.RestartCharged, gone)
			require.Equal(t, job.Stop, a.next(patience).Kind)
			a.join()
			b.fails(rendezvous.RestartCharged)
			if epoch == 0 {
				run(a, b)
			}
		}
		b.until(job.Fail)
		eventually(t, "the first waits for a node in its place", func() bool {
			a.mu.Lock()
			defer a.mu.Unlock()
			return a.at.phase == forming
		})
		require.Equal(t, []int{0, 1}, []int{a.leave().Restarts, b.leave().Restarts})
	})
	t.Run("both failed by themselves", func(t *testing.T) {
		t.Parallel()
		a, b := pair(t, 1, time.Hour)
		a.fails(rendezvous.RestartCharged)
		b.fails(rendezvous.RestartCharged)
		run(a, b)
		require.Equal(t, []int{1, 1}, []int{a.leave().Restarts, b.leave().Restarts})
	})
	t.Run("one of the node's own is found later", func(t *testing.T) {
		t.Parallel()
		a, b := pair(t, 1, time.Hour)
		a.failsBy(rendezvous.RestartCharged, gone)
		b.failsBy(rendezvous.RestartCharged, gone)
		a.until(job.Stop)
		require.NoError(t, a.Join(t.Context(), "job", rendezvous.Join{Params: two, Node: a.Service.master.self(),
			Failures: []job.Failure{{Rank: 0, Text: "it broke", At: time.Now()}}}))
		run(a, b)
		require.Equal(t, []int{1, 0}, []int{a.leave().Restarts, b.leave().Restarts})
	})
	t.Run("neither is to blame", func(t *testing.T) { // the restarts of a job whose network fails come to an end
		t.Parallel()
		a, b := pair(t, 0, 100*time.Millisecond)
		a.failsBy(rendezvous.RestartCharged, gone)
		b.failsBy(rendezvous.RestartCharged, gone)
		failed := 0
		for _, n := range []*node{a, b} {
			n.until(job.Stop)
			n.join()
		}
		eventually(t, "one ends, the other one waits", func() bool {
			failed = 0
			waits := 0
			for _, n := range []*node{a, b} {
				n.mu.Lock()
				failed += map[bool]int{true: 1}[n.outcome == job.Failed]
				waits += map[bool]int{true: 1}[n.at.phase == forming]
				n.mu.Unlock()
			}
			return failed == 1 && waits == 1
		})
	})
}

func TestFailureOfAnOldEpoch(t *testing.T) {
	t.Parallel()
	m := newModel(t)
	a, b := m.pair()
	old := a.seen
	b.fails(rendezvous.RestartFree)
	b.until(job.Stop)
	b.join()
	a.until(job.Stop)
	a.join()
	run(a, b)
	now := a.seen
	a.seen = old
	a.fails(rendezvous.Permanent)
	a.seen = now
	a.quiet()
	require.Len(t, m.told("NodeFailure", 0), 1, "the master hears of it")
}

// TestMasterRestart: the master loses its memory in each phase, and the world comes about, or stays.
func TestMasterRestart(t *testing.T) {
	t.Parallel()
	t.Run("joining", func(t *testing.T) {
		t.Parallel()
		m := newModel(t)
		a, b := m.node(0, 0, two), m.node(1, 1, two)
		m.stop()
		require.Error(t, a.tryJoin(), "for the session to try again")
		m.start()
		run(a.join(), b.join())
	})
	t.Run("forming", func(t *testing.T) {
		t.Parallel()
		m := newModel(t)
		a := m.node(0, 0, two).join()
		eventually(t, "it waits", func() bool { return m.count() == 1 })
		m.restart()
		eventually(t, "it waits again", func() bool { return m.count() == 1 })
		m.mu.Lock()
		require.Equal(t, 2, m.min, "a master without rules makes a world of one")
		m.mu.Unlock()
		run(a, m.node(1, 1, two).join())
	})
	t.Run("forming, unnoticed", func(t *testing.T) { // as a late node's join, too, makes a world void
		t.Parallel()
		m := newModel(t)
		a := m.node(0, 0, two).join()
		eventually(t, "it waits", func() bool { return m.count() == 1 })
		m.mu.Lock()
		clear(m.waits)
		m.mu.Unlock()
		eventually(t, "it waits again", func() bool { return m.count() == 1 })
		run(a, m.node(1, 1, two).join())
	})
	t.Run("forming, a void world", func(t *testing.T) {
		t.Parallel()
		m := newModel(t)
		a := m.node(0, 0, two)
		a.every.ask = time.Hour
		a.join()
		eventually(t, "it waits", func() bool { return m.count() == 1 })
		m.mu.Lock() // the other one has joined, was told the world, and has come back
		m.waits, m.round = map[int]int{1: 1}, m.round+1
		m.mu.Unlock()
		a.until(job.Run)
	})
	t.Run("leading", func(t *testing.T) {
		t.Parallel()
		m := newModel(t)
		a, b := m.node(0, 0, two).join(), m.node(1, 1, two).join()
		a.until(job.Lead)
		m.restart()
		a.ready()
		run(a, b)
	})
	t.Run("following", func(t *testing.T) {
		t.Parallel()
		m := newModel(t)
		a := m.node(0, 0, two).join()
		m.mu.Lock() // the other one has joined, and asks late
		m.waits[1] = 2
		m.mu.Unlock()
		a.until(job.Run)
		m.mu.Lock()
		world, round := m.world, m.round
		m.mu.Unlock()
		m.restart()
		m.mu.Lock()
		m.world, m.round = world, round
		m.mu.Unlock()
		b := m.node(1, 1, two)
		b.ctx = t.Context()
		b.params = two.WithDefaults()
		b.master.become(rendezvous.Node{Slots: 2})
		b.mu.Lock()
		b.sealed(wantWorld(t, m, 1))
		b.mu.Unlock()
		eventually(t, "the address is there again", func() bool { return m.key("MASTER_ADDR") != "" })
		require.NoError(t, b.askAddress(t.Context(), turn{b.at, b.at.turns.Load(), b.noticeOutage}))
		require.Equal(t, job.Run, b.dir.Kind)
	})
	t.Run("running", func(t *testing.T) {
		t.Parallel()
		m := newModel(t)
		a, b := m.pair()
		m.restart()
		a.quiet()
		b.quiet()
		b.fails(rendezvous.RestartFree)
		b.until(job.Stop)
		b.join()
		a.until(job.Stop)
		run(a.join(), b)
	})
	for name, dies := range map[string]bool{"the leader leads again": false, "another one leads": true} {
		// Its new round has the number of the old one.
		t.Run("running, and "+name, func(t *testing.T) {
			t.Parallel()
			m := newModel(t)
			a, b := m.pair()
			m.restart()
			eventually(t, "the leader tells the new master", func() bool { return m.nextKey("MASTER_ADDR") != "" })
			b.fails(rendezvous.RestartFree)
			b.until(job.Stop)
			if dies {
				a.Close()
				a = m.node(0, 2, two)
			}
			b.join()
			if !dies {
				a.until(job.Stop)
			}
			a.join().until(job.Lead)
			b.until(job.Wait)
			require.Nil(t, b.next(500*time.Millisecond), "the next address is not there yet")
			require.Equal(t, dies, m.key("MASTER_ADDR") != "", "who leaves a world takes its address back")
			a.ready()
			run(a, b)
			require.Equal(t, a.seen.EpochID, b.seen.EpochID)
		})
	}
	t.Run("ending", func(t *testing.T) {
		t.Parallel()
		m := newModel(t)
		a, b := m.pair()
		a.succeeds()
		eventually(t, "it has arrived", func() bool { return m.key(numMembers) == "1" })
		m.mu.Lock()
		round := m.round
		m.mu.Unlock()
		m.restart()
		m.mu.Lock()
		m.round = round // only for key
		m.mu.Unlock()
		eventually(t, "it has arrived anew", func() bool { return m.key(numMembers) == "1" })
		b.succeeds()
		a.until(job.Done)
		b.until(job.Done)
	})
}

func wantWorld(t *testing.T, m *model, rank int) world {
	m.mu.Lock()
	defer m.mu.Unlock()
	w, mine, err := readWorld(pyproto.Comm.New("RendezvousState", pyproto.Field{Name: "round", Value: int64(m.round)},
		pyproto.Field{Name: "world", Value: &pyproto.Dict{Pairs: []pyproto.Pair{{Key: int64(0), Value: int64(1)},
			{Key: int64(1), Value: int64(2)}}}}), rank)
	require.NoError(t, err)
	require.True(t, mine)
	return w
}

// TestMasterDoesNotComeBack: nodes without workers end within the join timeout, and those whose workers are done.
func TestMasterDoesNotComeBack(t *testing.T) {
	t.Parallel()
	p := two
	p.JoinTimeout = time.Second
	t.Run("forming", func(t *testing.T) {
		t.Parallel()
		m := newModel(t)
		p := p
		p.JoinTimeout = 3 * time.Second
		a := m.node(0, 0, p).join()
		eventually(t, "it waits", func() bool { return m.count() == 1 })
		m.stop()
		require.Regexp(t, "^no master for ", a.until(job.Fail).Cause.Text)
		m.start()
	})
	t.Run("ending", func(t *testing.T) {
		t.Parallel()
		m := newModel(t)
		a, b := m.node(0, 0, p).join(), m.node(1, 1, p).join()
		run(a, b)
		a.succeeds()
		m.stop()
		a.until(job.Done)
		b.quiet() // it works
		m.start()
	})
}

// TestLeaderDies before it has told where the workers meet.
func TestLeaderDies(t *testing.T) {
	t.Parallel()
	t.Run("and is replaced", func(t *testing.T) {
		t.Parallel()
		m := newModel(t)
		a, b := m.node(0, 0, two).join(), m.node(1, 1, two).join()
		a.until(job.Lead)
		a.Close()
		c := m.node(0, 2, two).join()
		require.Equal(t, 20000, c.until(job.Run).Place.MasterPort)
		b.until(job.Run)
	})
	t.Run("for good", func(t *testing.T) {
		t.Parallel()
		m := newModel(t)
		p := two
		p.JoinTimeout = 2 * time.Second
		a, b := m.node(0, 0, p).join(), m.node(1, 1, p).join()
		a.until(job.Lead)
		a.Close()
		require.Equal(t, noLeader, b.until(job.Fail).Cause.Text)
		eventually(t, "the master hears of it", func() bool { return len(m.told("NodeFailure", 1)) == 1 })
	})
}

// TestBarrier: other agents have two styles of it, and 0.4 may lose a count.
func TestBarrier(t *testing.T) {
	t.Parallel()
	alone := func(t *testing.T) (*model, *node) {
		m := newModel(t)
		m.waits[1] = 1 // an agent
		a := m.node(0, 0, two).join()
		a.until(job.Run)
		return m, a
	}
	t.Run("count, the agent first", func(t *testing.T) {
		t.Parallel()
		m, a := alone(t)
		m.put(numMembers, "1")
		a.succeeds()
		a.until(job.Done)
		require.NotEmpty(t, m.key(lastMember), "the agent waits for it")
	})
	t.Run("count, the agent last", func(t *testing.T) {
		t.Parallel()
		m, a := alone(t)
		a.succeeds()
		eventually(t, "it has arrived", func() bool { return m.key(numMembers) == "1" })
		a.quiet()
		m.put(lastMember, "<val_ignored>")
		a.until(job.Done)
	})
	t.Run("a key for every member", func(t *testing.T) {
		t.Parallel()
		m, a := alone(t)
		a.succeeds()
		eventually(t, "the agent sees it", func() bool { return m.key(terminalState+"0.FIN") != "" })
		require.NotEmpty(t, m.key(terminalState+"0"))
		a.quiet()
		m.put(terminalState+"1", "1")
		a.until(job.Done)
	})
	t.Run("lost counts", func(t *testing.T) {
		t.Parallel()
		m := newModel(t)
		m.forgets = true
		a, b := m.pair()
		a.succeeds()
		b.succeeds()
		a.until(job.Done)
		b.until(job.Done)
	})
	t.Run("the other one fails", func(t *testing.T) {
		t.Parallel()
		m := newModel(t)
		a, b := m.pair()
		a.succeeds()
		b.fails(rendezvous.RestartFree)
		b.until(job.Stop)
		b.join()
		run(a, b)
		a.succeeds()
		b.succeeds()
		a.until(job.Done)
		b.until(job.Done)
	})
	t.Run("the other one is silent", func(t *testing.T) {
		t.Parallel()
		_, a := alone(t)
		a.succeeds()
		a.quiet()
		a.mu.Lock()
		a.at.since = a.at.since.Add(-barrierTime)
		a.mu.Unlock()
		a.until(job.Done)
	})
}

func TestJoinTimeout(t *testing.T) {
	t.Parallel()
	m := newModel(t)
	p := two
	p.JoinTimeout = time.Second
	a := m.node(0, 0, p).join()
	fail := a.until(job.Fail)
	require.Equal(t, job.Cause{Kind: job.CauseTimeout, Text: "too few nodes within 1s: need 2 to 2"},
		*fail.Cause)
	eventually(t, "the master hears of it", func() bool { return len(m.told("NodeFailure", 0)) == 1 })
	requireTimedOut(t, training, m.told("NodeFailure", 0)[0])
	a.leave()
	require.Equal(t, "FAILED_EXITED", m.events(0)[1])
}

// requireTimedOut wants a rendezvous of node rank 0 to have ended after a second, in the words that the master knows.
func requireTimedOut(t *testing.T, name string, told *pyproto.Message) {
	t.Helper()
	require.Equal(t, rdzvError, told.Str("level"))
	var why struct {
		Name    string `json:"rdzv_name"`
		Rank    *int   `json:"node_rank"`
		Kind    string `json:"err_type"`
		Elapsed int    `json:"elapsed_time"`
	}
	require.NoError(t, json.Unmarshal([]byte(told.Str("error_data")), &why))
	require.Equal(t, []any{name, 0, "join-timeout", 1}, []any{why.Name, *why.Rank, why.Kind, why.Elapsed})
}

// TestSpare: the master's world has no place for this node, which waits without limit.
func TestSpare(t *testing.T) {
	t.Parallel()
	m := newModel(t)
	p := rendezvous.Params{Min: 2, Max: 2, JoinTimeout: 2 * time.Second}
	a, b := m.node(0, 0, p).join(), m.node(1, 1, p).join()
	run(a, b)
	m.mu.Lock()
	m.waits[5] = 1 // no node asks for it
	m.waits[5], m.world = 1, []pyproto.Pair{{Key: 0, Value: 1}, {Key: 1, Value: 2}}
	m.mu.Unlock()
	spare := m.node(5, 5, p).join()
	require.Equal(t, job.Wait, spare.next(patience).Kind)
	require.Nil(t, spare.next(3*time.Second))
}

func TestStoppingJob(t *testing.T) {
	t.Parallel()
	m := newModel(t)
	a, b := m.pair()
	m.mu.Lock()
	m.stopping = true
	m.mu.Unlock()
	a.quiet()
	b.fails(rendezvous.RestartFree)
	b.until(job.Stop)
	b.join()
	require.Equal(t, "the master is ending the job", b.until(job.Fail).Cause.Text)
	a.succeeds()
	m.put(lastMember, "x")
	a.until(job.Done)
}

func TestActions(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		class, content string
		want           job.Kind
	}{
		{"NodeAction", `{"action_type":"restart_worker","reason":"a hang"}`, job.Stop},
		{"NodeAction", `{"action_type":"relaunch_worker","reason":"a hang"}`, job.Fail},
		{"JobAbortionAction", `{"reason":"a hang"}`, job.Fail},
		{"JobRestartAction", `{"reason":"a hang"}`, job.Fail},
		{"NodeAction", `{"action_type":"collect_metric"}`, ""},
		{"EventAction", `{"event_type":"x"}`, ""},
		{"NoAction", `{}`, ""},
		{"NodeAction", `no JSON`, ""},
	} {
		t.Run(c.class+c.content, func(t *testing.T) {
			t.Parallel()
			m := newModel(t)
			n := m.node(0, 3, rendezvous.Params{Min: 1, Max: 1}).join()
			n.until(job.Run)
			m.ask(3, c.class, c.content)
			if c.want == "" {
				n.quiet()
				return
			}
			d := n.until(c.want)
			require.Equal(t, job.CauseOperator, d.Cause.Kind)
			require.Contains(t, d.Cause.Text, c.class+" (a hang)")
			if c.want == job.Stop {
				m.ask(3, c.class, c.content)
				n.quiet() // there is nothing to restart
				require.Zero(t, n.join().until(job.Run).Place.RestartCount)
				return
			}
			n.leave()
			require.Equal(t, "FAILED_EXITED", m.events(3)[1])
		})
	}
}

// TestActionAfterTheEnd changes nothing.
func TestActionAfterTheEnd(t *testing.T) {
	t.Parallel()
	m := newModel(t)
	n := m.node(0, 3, rendezvous.Params{Min: 1, Max: 1}).join()
	n.until(job.Run)
	n.succeeds()
	n.until(job.Done)
	m.ask(3, "JobAbortionAction", `{}`)
	n.quiet()
	require.Equal(t, job.Succeeded, n.leave().Outcome)
}

func TestNodeError(t *testing.T) {
	t.Parallel()
	m := newModel(t)
	a, b := m.pair()
	require.NoError(t, a.Report(t.Context(), "job", rendezvous.Barred{Reason: "slow"}))
	require.Equal(t, job.CauseCheck, a.until(job.Bar).Cause.Kind)
	require.NoError(t, b.Order(t.Context(), rendezvous.Order{Kind: rendezvous.OrderBar, Text: "unkillable"}))
	b.until(job.Bar)
	require.Error(t, b.Order(t.Context(), rendezvous.Order{Kind: rendezvous.OrderPause}))
	for id, text := range []string{"CheckFailure: slow", "NodeFault: unkillable"} {
		told := m.told("NodeFailure", id)
		require.Len(t, told, 1)
		require.Equal(t, []string{nodeError, text}, []string{told[0].Str("level"), told[0].Str("error_data")})
	}
	a.leave()
	require.NotContains(t, m.events(0), "FAILED_EXITED", "as DLRover's agents")
}

// TestNodeErrorIsToldOnce: in Kubernetes the master answers when it has asked for another pod, and two tell of a check.
func TestNodeErrorIsToldOnce(t *testing.T) {
	t.Parallel()
	m := newModel(t)
	a, _ := m.pair()
	m.slow = make(chan struct{})
	done := make(chan error, 2)
	tell := func() { done <- a.Report(t.Context(), "job", rendezvous.Barred{Reason: "slow"}) }
	go tell()
	eventually(t, "the master hears of it", func() bool { return len(m.told("NodeFailure", 0)) == 1 })
	go tell()
	close(m.slow)
	require.NoError(t, <-done)
	require.NoError(t, <-done)
	require.Len(t, m.told("NodeFailure", 0), 1)
}

// TestLeaveTellsOfFailures: what the master does not know yet when the launcher leaves it hears first, whether the call
// that tells it goes on or not.
func TestLeaveTellsOfFailures(t *testing.T) {
	t.Parallel()
	for _, ends := range []bool{false, true} {
		m := newModel(t)
		_, b := m.pair()
		m.slow = make(chan struct{})
		ctx, end := context.WithCancel(t.Context())
		done := make(chan error)
		ev := b.failing(rendezvous.Permanent, "it broke")
		go func() { done <- b.Report(ctx, "job", ev) }()
		b.until(job.Fail)
		eventually(t, "the master hears of it", func() bool { return len(m.told("NodeFailure", 1)) == 1 })
		answer := func() { close(m.slow) }
		if ends {
			end()
			require.Error(t, <-done)
			answer()
		} else {
			time.AfterFunc(20*time.Millisecond, answer)
		}
		b.leave()
		if !ends {
			require.NoError(t, <-done)
		}
		end()
		told := m.told("NodeFailure", 1)
		require.Len(t, told, map[bool]int{false: 1, true: 2}[ends], "it may not have read the first one")
		require.Equal(t, told[0].Str("error_data"), told[len(told)-1].Str("error_data"))
		both := m.told("NodeFailure,NodeEvent", 1)
		require.Equal(t, "FAILED_EXITED", both[len(both)-1].Str("event_type"))
	}
}

// TestLeaveWithoutAJoin tells nobody; one while the workers are being restarted is a failure.
func TestLeave(t *testing.T) {
	t.Parallel()
	m := newModel(t)
	n := m.node(0, 0, rendezvous.Params{Min: 1, Max: 1})
	n.leave()
	require.Empty(t, m.events(0))
	n = m.node(0, 1, rendezvous.Params{Min: 1, Max: 1}).join()
	n.until(job.Run)
	n.fails(rendezvous.RestartFree)
	n.until(job.Stop)
	n.leave()
	require.Equal(t, []string{"WAIT_PRE_CHECK", "FAILED_EXITED"}, m.events(1))
}

// TestPreCheck: the node waits for the master's check, and says so once.
func TestPreCheck(t *testing.T) {
	t.Parallel()
	m := newModel(t)
	m.check = "CHECKING"
	n := m.node(0, 0, rendezvous.Params{Min: 1, Max: 1}).join()
	eventually(t, "questions", func() bool { return len(m.told("PreCheckRequest", 0)) > 3 })
	require.Equal(t, job.Wait, n.next(patience).Kind)
	require.Equal(t, []string{"WAIT_PRE_CHECK"}, m.events(0))
	m.mu.Lock()
	m.check = "PASS"
	m.mu.Unlock()
	n.until(job.Run)
	require.Equal(t, []string{"WAIT_PRE_CHECK"}, m.events(0))
}

// TestProcessErrors: the master's json.loads reads it whatever the workers have said, and it loses nothing of the form.
func TestProcessErrors(t *testing.T) {
	t.Parallel()
	var many []job.Failure
	for rank := range 64 {
		many = append(many, job.Failure{Rank: rank, Text: strings.Repeat("\x01ü\"", 800), At: time.Now()})
	}
	for n := range many {
		text := processErrors(many[:n])
		require.LessOrEqual(t, len(text), maxErrorData)
		require.True(t, utf8.ValidString(text))
		var all map[string]map[string]any
		require.NoError(t, json.Unmarshal([]byte(text), &all))
		if n > 0 {
			require.Contains(t, all, "0")
		}
	}
}

func TestReadWorldRefuses(t *testing.T) {
	t.Parallel()
	for _, slots := range []int64{0, -1, maxSlots + 1} {
		_, _, err := readWorld(pyproto.Comm.New("RendezvousState", pyproto.Field{Name: "world",
			Value: &pyproto.Dict{Pairs: []pyproto.Pair{{Key: int64(0), Value: slots}}}}), 0)
		require.ErrorContains(t, err, fmt.Sprintf("gives node rank 0 %d workers", slots))
	}
}
