package agents

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/pyproto"
)

func lasting(d time.Duration) func(int) work { return func(int) work { return work{lasts: d} } }

// TestGrowth: nodes that come later are taken in, in whole units.
func TestGrowth(t *testing.T) {
	bubble(t, func(r *rig) {
		ms := r.world(6, func(m *model) { m.min, m.unit, m.lastCall, m.works = 2, 2, time.Second, lasting(2*time.Hour) })
		r.goAll(ms[:3]...)
		time.Sleep(time.Minute)
		require.Equal(t, []int{0, 1}, ms[0].begun()[0].ranks, "in units of two")
		require.Empty(t, ms[2].begun())
		time.Sleep(time.Hour) // longer than it waits for a first world
		r.goAll(ms[3])
		time.Sleep(time.Minute)
		sameWorlds(t, 1, ms[:2]...)
		require.Equal(t, []int{0, 1, 2, 3}, ms[0].begun()[1].ranks)
		require.Len(t, ms[3].begun(), 1)
		requireEnds(t, ended, ms[:4]...)
	})
}

// TestADeadChecker: who has joined the check and died keeps nobody from training.
func TestADeadChecker(t *testing.T) {
	bubble(t, func(r *rig) {
		dead := r.agent(7, 7)
		ms := r.world(2, nil)
		r.goAll(ms[0])
		time.Sleep(time.Minute)
		_, err := dead.get(t.Context(), dead.msg("JoinRendezvousRequest", f("node_id", 7), f("local_world_size", 2),
			f("rdzv_name", checking), f("node_rank", 7), f("node_ip", "10.0.0.7")))
		require.NoError(t, err)
		r.goAll(ms[1])
		requireEnds(t, ended, ms...)
		require.Len(t, ms[0].begun(), 1)
	})
}

// TestJoinTimeout: without enough nodes the run fails, and its agents end without waiting for their own limit.
func TestJoinTimeout(t *testing.T) {
	bubble(t, func(r *rig) {
		ms := r.world(3, func(m *model) { m.timeout = 100 * time.Second })
		ms[0].timeout = time.Hour // the agent's own would be longer
		ms[0].r = r
		ms[1].goes()
		time.Sleep(time.Second)
		ms[0].goes()
		at := time.Now()
		requireEnds(t, jobStops, ms[:2]...)
		require.Less(t, time.Since(at), 2*time.Minute)
		require.Equal(t, string(job.Failed), r.status().Outcome)
	})
}

// TestOrders: a run of agents does what an operator wants.
func TestOrders(t *testing.T) {
	order := func(r *rig, o rendezvous.Order) {
		t.Helper()
		require.NoError(t, r.hub.Order(testRun, o))
	}
	t.Run("restart, pause and resume", func(t *testing.T) {
		bubble(t, func(r *rig) {
			ms := r.world(3, func(m *model) { m.works = lasting(5 * time.Minute) })
			r.goAll(ms...)
			time.Sleep(time.Minute)
			order(r, rendezvous.Order{Kind: rendezvous.OrderRestart, Text: "why not"})
			time.Sleep(time.Minute)
			sameWorlds(t, 1, ms...)
			order(r, rendezvous.Order{Kind: rendezvous.OrderPause, Text: "later"})
			time.Sleep(5 * time.Minute)
			require.Len(t, ms[0].begun(), 2)
			order(r, rendezvous.Order{Kind: rendezvous.OrderResume})
			requireEnds(t, ended, ms...)
			sameWorlds(t, 2, ms...)
		})
	})
	for _, d := range pyproto.Dialects() {
		t.Run("a long pause before the first world, and a long bar, "+string(d), func(t *testing.T) {
			bubble(t, func(r *rig) {
				ms := r.world(3, func(m *model) { m.d, m.min, m.works = d, 2, lasting(3*time.Hour) })
				r.goAll(ms[0])
				time.Sleep(time.Minute)
				order(r, rendezvous.Order{Kind: rendezvous.OrderPause, Text: "later"})
				r.goAll(ms[1:]...)
				time.Sleep(time.Hour) // no agent waits as long for a world
				require.Empty(t, ms[0].begun())
				order(r, rendezvous.Order{Kind: rendezvous.OrderBar, Node: "worker-2", Text: "smoke"})
				order(r, rendezvous.Order{Kind: rendezvous.OrderResume})
				time.Sleep(time.Hour)
				require.Equal(t, []int{0, 1}, ms[0].begun()[0].ranks)
				order(r, rendezvous.Order{Kind: rendezvous.OrderUnbar, Node: "worker-2"})
				requireEnds(t, ended, ms...)
				require.Equal(t, []int{0, 1, 2}, ms[2].begun()[0].ranks)
			})
		})
	}
	t.Run("stop", func(t *testing.T) {
		bubble(t, func(r *rig) {
			ms := r.world(3, func(m *model) { m.works = lasting(0) })
			r.goAll(ms...)
			time.Sleep(time.Minute)
			at := time.Now()
			order(r, rendezvous.Order{Kind: rendezvous.OrderStop, Text: "enough"})
			requireEnds(t, jobStops, ms...)
			require.Less(t, time.Since(at), 10*time.Second)
		})
	})
}

// TestANewMaster: agents whose workers run notice nothing until somebody needs them.
func TestANewMaster(t *testing.T) {
	for _, checked := range []bool{false, true} {
		bubble(t, func(r *rig) {
			ms := r.world(3, func(m *model) { m.works, m.checked = lasting(10*time.Minute), checked })
			r.goAll(ms...)
			time.Sleep(time.Minute)
			r.close()
			r.open()
			time.Sleep(time.Minute)
			require.Len(t, ms[0].begun(), 1)
			ms[2].dies()
			late := r.agent(9, 2)
			late.min, late.max = 3, 3
			at := time.Now()
			late.goes()
			requireEnds(t, ended, ms[0], ms[1], late)
			require.Less(t, late.begun()[0].at.Sub(at), time.Minute)
			require.Equal(t, []int{0, 1, 2}, ms[1].begun()[1].ranks)
		})
	}
	t.Run("that nobody has told the rules", func(t *testing.T) {
		bubble(t, func(r *rig) {
			m := r.agent(0, 0)
			m.noParams = true
			m.goes()
			require.Equal(t, refusedBy, m.result())
			require.ErrorContains(t, m.err, "the rules of the run are not known: node 0 was here before this master")
		})
	})
}

// TestLaunchersOfOurs are in one world with agents.
func TestLaunchersOfOurs(t *testing.T) {
	params := func(n int) rendezvous.Params {
		return rendezvous.Params{Min: n, Max: n, MaxRestarts: 1, LastCall: 3 * time.Second}
	}
	for name, launcherFirst := range map[string]bool{"opened by an agent": false, "opened by a launcher": true} {
		t.Run(name, func(t *testing.T) {
			for _, d := range pyproto.Dialects() {
				bubble(t, func(r *rig) {
					ms := r.world(2, func(m *model) { m.min, m.max, m.d = 3, 3, d })
					l := r.launcher("ours", params(3), lasting(time.Minute))
					if launcherFirst {
						l.cfg.Node.Rank = 0 // and leads
						ms[0].rank, ms[1].rank = 1, 2
						r.goLauncher(l)
						time.Sleep(time.Second)
					}
					r.goAll(ms[0])
					time.Sleep(time.Second)
					if !launcherFirst {
						r.goLauncher(l)
						time.Sleep(time.Second)
					}
					r.goAll(ms[1])
					requireEnds(t, ended, ms...)
					<-l.closed
					require.NoError(t, l.err)
					sameWorlds(t, 0, ms...)
					runs, last := l.told()
					require.Len(t, runs, 1)
					require.Equal(t, job.Done, last.Kind)
					require.True(t, runs[0].Place.WorkerStore)
					require.Equal(t, 1, r.status().Params.MaxRestarts, "agents count by themselves")
					s := ms[0].begun()[0]
					require.Len(t, s.ranks, 3)
					if launcherFirst {
						require.Equal(t, []int{rendezvous.MaxNodes, 1, 2}, s.ranks)
						require.Equal(t, "10.1.0.1:4321", s.master)
					} else {
						require.Equal(t, s.master, "10.0.0.0:23450")
						require.Equal(t, s.master, runs[0].Place.MasterAddr+":23450")
					}
				})
			}
		})
	}
	t.Run("one fails as often as it may", func(t *testing.T) {
		bubble(t, func(r *rig) {
			ms := r.world(2, func(m *model) { m.min, m.max, m.works = 3, 3, lasting(10*time.Minute) })
			l := r.launcher("ours", params(3), func(int) work { return work{lasts: 30 * time.Second, fails: true} })
			r.goAll(ms...)
			time.Sleep(time.Second)
			r.goLauncher(l)
			requireEnds(t, jobStops, ms...)
			<-l.closed
			sameWorlds(t, 1, ms...)
			require.Equal(t, job.Failed, l.ev.Outcome)
			require.Equal(t, 1, l.ev.Restarts)
			require.Equal(t, "of a launcher", l.ev.Failures[0].Text)
		})
	})
	t.Run("one is called as an agent is", func(t *testing.T) {
		bubble(t, func(r *rig) {
			ms := r.world(2, func(m *model) { m.min, m.max = 3, 3 })
			l := r.launcher("worker-0", params(3), lasting(time.Minute))
			r.goAll(ms...)
			time.Sleep(time.Second)
			r.goLauncher(l)
			requireEnds(t, ended, ms...)
			<-l.closed
			require.Equal(t, []int{0, 1, rendezvous.MaxNodes + 2}, ms[0].begun()[0].ranks)
		})
	})
	t.Run("an agent fails", func(t *testing.T) {
		bubble(t, func(r *rig) {
			ms := r.world(2, func(m *model) { m.min, m.max = 3, 3 })
			ms[0].works = func(n int) work { return failsFirst(20*time.Second, n) }
			l := r.launcher("ours", params(3), lasting(time.Minute))
			r.goAll(ms...)
			time.Sleep(time.Second)
			r.goLauncher(l)
			requireEnds(t, ended, ms...)
			<-l.closed
			runs, _ := l.told()
			require.Len(t, runs, 2)
			require.Contains(t, runs[1].Cause.Text, "rank 1 (node worker-0, local rank 1) failed: exit code 7, boom")
			require.Zero(t, l.ev.Restarts, "what an agent does is not charged")
		})
	})
	t.Run("an agent waits in its barrier while a launcher fails", func(t *testing.T) {
		bubble(t, func(r *rig) {
			ms := r.world(2, func(m *model) { m.min, m.max, m.lastCall = 2, 3, 5*time.Second })
			ms[1].works = func(n int) work { return work{lasts: 5 * time.Minute} }
			p := params(3)
			p.Min = 2
			l := r.launcher("ours", p, func(n int) work { return work{lasts: 90 * time.Second, fails: n == 0} })
			at := time.Now()
			r.goAll(ms...)
			time.Sleep(time.Second)
			r.goLauncher(l)
			requireEnds(t, ended, ms...)
			<-l.closed
			require.Less(t, time.Since(at), 10*time.Minute)
			require.Len(t, ms[0].begun(), 1)
			require.Len(t, ms[1].begun(), 2)
		})
	})
}

// TestNodeError: the node leaves, with a note, also before it has come to train; who takes no part is not heeded.
func TestNodeError(t *testing.T) {
	bubble(t, func(r *rig) {
		ms := r.world(3, func(m *model) { m.min, m.lastCall = 2, time.Second })
		ms[1].works = func(n int) work {
			return work{lasts: 20 * time.Second, fails: true, level: nodeError, text: "GPU is \x1b[2J lost\n", exits: true}
		}
		r.goAll(ms...)
		requireEnds(t, ended, ms[0], ms[2])
		require.Equal(t, broken, ms[1].result())
		require.Equal(t, []string{"worker-1: GPU is [2J lost"}, r.events("node-error"))
		require.Equal(t, []string{"worker-1: the node is at fault: GPU is [2J lost"}, r.events("node-leave")[:1])
		require.Equal(t, []int{0, 2}, ms[0].begun()[1].ranks)
	})
	bubble(t, func(r *rig) {
		m, other := r.agent(0, 0), r.agent(1, 1)
		other.goes()
		time.Sleep(time.Second)
		q := m.msg("NodeFailure", f("level", nodeError), f("error_data", "CheckFailure"))
		require.NoError(t, m.report(context.Background(), q))
		require.Empty(t, r.events("node-error"), "it has joined nothing")
		_, err := m.get(t.Context(), m.msg("JoinRendezvousRequest", f("node_id", 0), f("local_world_size", 2),
			f("rdzv_name", checking), f("node_rank", 0), f("node_ip", "10.0.0.1")))
		require.NoError(t, err)
		for range 100 {
			require.NoError(t, m.report(context.Background(), q))
		}
		require.Len(t, r.events("node-error"), 8)
		require.Equal(t, "worker-0: CheckFailure", r.events("node-error")[0])
		for i := range 3000 {
			stranger := r.agent(100+i, 0)
			require.NoError(t, stranger.report(context.Background(), q))
		}
		require.Len(t, r.events("node-error"), 8)
		other.dies()
	})
}

// TestLeaders: one that is told to stop before it has said where it leads, and one that says it in the wrong order.
func TestLeaders(t *testing.T) {
	bubble(t, func(r *rig) {
		ms := r.world(2, func(m *model) { m.min = 1; m.lastCall = 5 * time.Second })
		r.goAll(ms[1])
		lead, ctx := ms[0], context.Background()
		require.NoError(t, lead.report(ctx, lead.rules()))
		_, err := lead.get(ctx, lead.joins())
		require.NoError(t, err)
		ask := func() *start {
			a, err := lead.get(ctx, lead.msg("CommWorldRequest", f("node_id", 0), f("rdzv_name", training)))
			require.NoError(t, err)
			return lead.startOf(a)
		}
		synctest.Wait()
		s := ask()
		require.NotNil(t, s)
		require.NoError(t, lead.set(ctx, lead.key(s, masterPort), "9"))
		require.Error(t, lead.set(ctx, lead.key(s, masterAddr), "\x00"))
		require.ErrorContains(t, lead.set(ctx, lead.key(s, masterPort), "70000"), "70000")
		require.Empty(t, ms[1].begun())
		require.NoError(t, r.hub.Order(testRun, rendezvous.Order{Kind: rendezvous.OrderRestart}))
		synctest.Wait()
		n, err := lead.waitingNum(ctx, training)
		require.NoError(t, err)
		require.Equal(t, 1, n)
		require.Nil(t, ask(), "that world has ended")
		_, err = lead.get(ctx, lead.joins())
		require.NoError(t, err)
		synctest.Wait()
		again := ask()
		require.Equal(t, s.round+1, again.round)
		require.NoError(t, errors.Join(lead.set(ctx, lead.key(again, masterPort), "9"),
			lead.set(ctx, lead.key(again, masterAddr), "h")))
		time.Sleep(10 * time.Second)
		require.Equal(t, "h:9", ms[1].begun()[0].master)
		_, err = r.host.Report(ctx, lead.from, lead.msg("NodeEvent", f("event_type", "FAILED_EXITED")))
		require.NoError(t, err)
		requireEnds(t, ended, ms[1])
	})
}
