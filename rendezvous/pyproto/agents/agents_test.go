package agents

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/pyproto"
)

// TestAgentsMeetRunAndEnd: worlds of every size, in both barriers and both dialects.
func TestAgentsMeetRunAndEnd(t *testing.T) {
	for n := 1; n <= 4; n++ {
		for _, states := range []bool{false, true} {
			for _, d := range pyproto.Dialects() {
				t.Run(fmt.Sprint(n, states, d), func(t *testing.T) {
					bubble(t, func(r *rig) {
						ms := r.world(n, func(m *model) { m.states, m.d, m.slots = states, d, m.rank+1 })
						for i := range ms {
							ms[len(ms)-1-i].goes()
							time.Sleep(time.Second)
						}
						requireEnds(t, ended, ms...)
						sameWorlds(t, 0, ms...)
						var ranks, slots []int
						for i := range n {
							ranks, slots = append(ranks, i), append(slots, i+1)
						}
						s := ms[0].begun()[0]
						require.Equal(t, ranks, s.ranks, "by NODE_RANK, not by arrival")
						require.Equal(t, slots, s.slots)
						require.Equal(t, 1, s.round)
						require.Equal(t, "10.0.0.0:23450", s.master)
						time.Sleep(time.Minute)
						require.Equal(t, string(job.Succeeded), r.status().Outcome)
						require.Zero(t, r.status().Members+r.status().Waiting, "all have left")
						require.Len(t, r.events("seal"), 1)
						require.Empty(t, r.events("node-loss"))
					})
				})
			}
		}
	}
}

// TestAWorkerFails: the others are told, the failure is kept, and the next world has a number and keys of its own.
func TestAWorkerFails(t *testing.T) {
	bubble(t, func(r *rig) {
		ms := r.world(3, nil)
		ms[1].works = func(n int) work { return failsFirst(20*time.Second, n) }
		r.goAll(ms...)
		requireEnds(t, ended, ms...)
		for n := range 2 {
			sameWorlds(t, n, ms...)
			require.Equal(t, n+1, ms[0].begun()[n].round)
		}
		require.True(t, hasText(r.events("break"), "rank 3 (node worker-1, local rank 1) failed: exit code 7, boom"))
		require.Zero(t, r.status().Restarts, "agents count by themselves")
	})
}

// TestConcurrentRequests: what agents send at once, they may send twice.
func TestConcurrentRequests(t *testing.T) {
	t.Run("counts are not lost", func(t *testing.T) {
		bubble(t, func(r *rig) {
			m := r.agent(0, 0)
			var wg sync.WaitGroup
			for range 50 {
				wg.Go(func() {
					for range 20 {
						q := m.msg("KeyValuePair", f("key", "n"), f("value", 1), f("op", "add"))
						_, _ = r.host.Get(context.Background(), m.from, q)
					}
				})
			}
			wg.Wait()
			a, err := m.get(context.Background(), m.msg("KeyValuePair", f("key", "n"), f("value", 0), f("op", "add")))
			require.NoError(t, err)
			require.Equal(t, 1000, a.Int("value"))
		})
	})
	t.Run("a join that is sent again is one node", func(t *testing.T) {
		bubble(t, func(r *rig) {
			m := r.agent(0, 0)
			require.NoError(t, m.report(context.Background(), m.rules()))
			var wg sync.WaitGroup
			for range 20 {
				wg.Go(func() {
					_, err := r.host.Get(context.Background(), m.from, m.joins())
					require.NoError(t, err)
				})
			}
			wg.Wait()
			require.Equal(t, 1, r.status().Waiting)
		})
	})
}

// TestAWorldNamesTheAgentThatSealsIt: a world is told to an agent as soon as it is sealed, and names all agents in it
// also while the join that sealed it has not returned yet.
func TestAWorldNamesTheAgentThatSealsIt(t *testing.T) {
	bubble(t, func(r *rig) {
		slow := &slowService{Service: r.hub, node: "worker-1"}
		r.host.cfg.Service = slow
		ms := r.world(2, nil)
		r.goAll(ms...)
		requireEnds(t, ended, ms...)
		require.Equal(t, []int{0, 1}, ms[0].begun()[0].ranks)
	})
}

// slowService is a Hub whose answer to the join of a node takes long.
type slowService struct {
	api.Service
	node string
}

func (s *slowService) Join(ctx context.Context, run string, ev rendezvous.Join) error {
	err := s.Service.Join(ctx, run, ev)
	if ev.Node.Name == s.node {
		time.Sleep(12 * time.Second)
	}
	return err
}

// TestKilledAgents: a pod that is killed and the one that takes its place.
func TestKilledAgents(t *testing.T) {
	t.Run("replaced at once by a later NODE_ID", func(t *testing.T) {
		bubble(t, func(r *rig) {
			ms := r.world(3, nil)
			r.goAll(ms...)
			time.Sleep(20 * time.Second)
			ms[0].dies() // NODE_ID 0 is the oldest there is
			late := r.agent(7, 0)
			late.min, late.max = 3, 3
			at := time.Now()
			late.goes()
			requireEnds(t, ended, late, ms[1], ms[2])
			require.Equal(t, []int{0, 1, 2}, late.begun()[0].ranks)
			require.Less(t, late.begun()[0].at.Sub(at), silence/2)
			require.True(t, hasText(r.events("node-loss"), "worker-0: replaced by node 7"))
		})
	})
	t.Run("silent", func(t *testing.T) {
		bubble(t, func(r *rig) {
			ms := r.world(3, func(m *model) { m.min, m.lastCall = 2, time.Second })
			for _, m := range ms {
				m.works = func(int) work { return work{lasts: 5 * time.Minute} }
			}
			r.goAll(ms...)
			time.Sleep(20 * time.Second)
			ms[2].dies()
			requireEnds(t, ended, ms[0], ms[1])
			require.Equal(t, []int{0, 1}, ms[0].begun()[1].ranks)
			require.True(t, hasText(r.events("node-loss"), "worker-2: its agent has given no sign of life for 45s"))
		})
	})
	t.Run("its container is started again", func(t *testing.T) {
		for _, before := range []time.Duration{0, 20 * time.Second} { // while it waits, and while it trains
			bubble(t, func(r *rig) {
				ms := r.world(2, nil)
				ms[0].goes()
				if before > 0 {
					ms[1].goes()
				}
				time.Sleep(before + 2*time.Second)
				ms[0].dies()
				again := r.agent(0, 0)
				again.slots = 4 // it may have been given more devices
				again.goes()
				if before == 0 {
					ms[1].goes()
				}
				requireEnds(t, ended, again, ms[1])
				last := again.begun()[len(again.begun())-1]
				require.Equal(t, []int{4, 2}, last.slots)
			})
		}
	})
	t.Run("it comes back after it was given up while it waits", func(t *testing.T) {
		bubble(t, func(r *rig) {
			ms := r.world(2, nil)
			var cut atomic.Bool
			down := New(Config{Service: r.hub, Run: "nowhere"})
			defer down.Close()
			ms[0].host = func() *Host {
				if cut.Load() {
					return down
				}
				return r.current()
			}
			ms[0].goes()
			time.Sleep(time.Minute)
			cut.Store(true)
			time.Sleep(2 * time.Minute)
			require.Len(t, r.events("node-loss"), 1)
			cut.Store(false)
			ms[1].goes()
			at := time.Now()
			requireEnds(t, ended, ms...)
			require.Less(t, ms[0].begun()[0].at.Sub(at), time.Minute)
		})
	})
	t.Run("it comes back after it was given up while its workers run", func(t *testing.T) {
		bubble(t, func(r *rig) {
			long := func(int) work { return work{lasts: 10 * time.Minute} }
			ms := r.world(3, func(m *model) { m.min, m.lastCall, m.works = 2, time.Second, long })
			var cut atomic.Bool
			down := New(Config{Service: r.hub, Run: "nowhere"})
			defer down.Close()
			ms[2].host = func() *Host {
				if cut.Load() {
					return down
				}
				return r.current()
			}
			r.goAll(ms...)
			time.Sleep(time.Minute)
			cut.Store(true)
			time.Sleep(2 * time.Minute)
			cut.Store(false)
			requireEnds(t, ended, ms...)
			require.Len(t, ms[2].begun(), 2)
			require.Equal(t, []int{0, 1, 2}, ms[0].begun()[2].ranks)
		})
	})
	t.Run("two with one NODE_ID", func(t *testing.T) {
		bubble(t, func(r *rig) {
			ms := r.world(2, nil)
			ms[1].from.NodeID = 0
			r.goAll(ms[0])
			time.Sleep(time.Second)
			r.goAll(ms[1])
			require.Equal(t, refusedBy, ms[1].result())
			require.ErrorContains(t, ms[1].err, "two agents with NODE_ID=0, of node ranks 0 and 1")
			ms[0].dies()
		})
	})
	t.Run("two with one NODE_RANK", func(t *testing.T) {
		bubble(t, func(r *rig) {
			a, b := r.agent(5, 0), r.agent(4, 0)
			a.goes()
			time.Sleep(time.Second)
			b.goes()
			require.Equal(t, refusedBy, b.result())
			require.ErrorContains(t, b.err, "NODE_RANK=0")
			a.dies()
		})
	})
}

// TestSuccess in all the moments at which it may come.
func TestSuccess(t *testing.T) {
	t.Run("in the barrier while another fails", func(t *testing.T) {
		for _, states := range []bool{false, true} {
			bubble(t, func(r *rig) {
				ms := r.world(3, func(m *model) { m.states, m.min, m.lastCall = states, 2, time.Second })
				ms[1].works = func(n int) work { return work{lasts: 90 * time.Second, fails: n == 0} }
				ms[2].works = func(n int) work { return work{lasts: 90*time.Second + 100*time.Second*time.Duration(1-n)} }
				at := time.Now()
				r.goAll(ms...)
				requireEnds(t, ended, ms...)
				require.Less(t, time.Since(at), 5*time.Minute, "nobody waits for the end of the barrier")
				require.Len(t, ms[0].begun(), 1)
				require.Equal(t, []int{1, 2}, ms[1].begun()[1].ranks)
			})
		}
	})
	t.Run("it overtakes the order to stop", func(t *testing.T) {
		bubble(t, func(r *rig) {
			ms := r.world(3, func(m *model) { m.min, m.lastCall = 2, time.Second })
			ms[0].works = func(n int) work { return work{lasts: 30 * time.Second} }
			ms[0].interval = 20 * time.Second
			ms[1].works = func(n int) work { return failsFirst(28*time.Second, n) }
			at := time.Now()
			r.goAll(ms...)
			requireEnds(t, ended, ms...)
			require.Less(t, time.Since(at), 5*time.Minute)
			require.Len(t, ms[0].begun(), 1)
		})
	})
	t.Run("it is told without a barrier", func(t *testing.T) {
		bubble(t, func(r *rig) {
			ms := r.world(2, nil)
			r.goAll(ms...)
			time.Sleep(30 * time.Second)
			for _, m := range ms {
				m.exits(context.Background(), true)
			}
			synctest.Wait()
			require.Equal(t, string(job.Succeeded), r.status().Outcome)
			for _, m := range ms {
				m.dies()
			}
		})
	})
	t.Run("of an agent that has no workers", func(t *testing.T) {
		bubble(t, func(r *rig) {
			m := r.agent(0, 0)
			m.goes()
			time.Sleep(30 * time.Second)
			m.exits(context.Background(), true)
			m.dies()
			synctest.Wait()
			require.Zero(t, r.status().Waiting)
		})
	})
}

// TestFailures: what agents tell is evidence, and the run goes on.
func TestFailures(t *testing.T) {
	for name, c := range map[string]struct {
		w    work
		want string
		left int
	}{
		"cut": {work{text: `{"3": {"local_rank": 1, "exitcode": 7, "mess`},
			`: {"3": {"local_rank": 1, "exitcode": 7, "mess`, 2},
		"not told":      {work{silent: true}, "a worker of node 1 (worker-1) failed", 2},
		"other ranks":   {work{text: `{"-1": {"exitcode": 3}, "2147483648": {}, "x": {}}`}, `"exitcode": 3`, 2},
		"no object":     {work{text: `[]`}, ": []", 2},
		"by two":        {work{text: `{"3":{"local_rank":1,"exitcode":-9},"2":{"local_rank":0,"exitcode":1}}`}, "rank 2", 2},
		"ends for good": {work{exits: true}, "rank 3 (node worker-1, local rank 1) failed: exit code 7, boom", 1},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(r *rig) {
				ms := r.world(3, func(m *model) { m.min, m.lastCall = 2, time.Second })
				ms[1].works = func(n int) work {
					if n > 0 {
						return work{lasts: time.Minute}
					}
					c.w.lasts, c.w.fails = 20*time.Second, true
					return c.w
				}
				r.goAll(ms...)
				if c.left == 2 {
					requireEnds(t, ended, ms...)
					require.Equal(t, []int{0, 1, 2}, ms[0].begun()[1].ranks)
				} else {
					requireEnds(t, ended, ms[0], ms[2])
					require.Equal(t, broken, ms[1].result())
				}
				require.True(t, hasText(r.events("break"), c.want), "%q", r.events("break"))
			})
		})
	}
	t.Run("two at once", func(t *testing.T) {
		bubble(t, func(r *rig) {
			ms := r.world(4, nil)
			for _, m := range ms[1:3] {
				m.works = func(n int) work { return failsFirst(20*time.Second, n) }
			}
			r.goAll(ms...)
			requireEnds(t, ended, ms...)
			sameWorlds(t, 1, ms...)
			require.Len(t, r.events("break"), 1)
		})
	})
	t.Run("again and again", func(t *testing.T) {
		bubble(t, func(r *rig) {
			ms := r.world(2, nil)
			for _, m := range ms {
				m.works = func(n int) work { return work{lasts: time.Duration(20+m.rank) * time.Second, fails: n < 12} }
			}
			r.goAll(ms...)
			requireEnds(t, ended, ms...)
			for n := range 13 {
				sameWorlds(t, n, ms...)
				require.Equal(t, n+1, ms[0].begun()[n].round)
			}
			require.LessOrEqual(t, len(r.host.worlds.numbers), 2)
			require.LessOrEqual(t, len(r.host.worlds.answers), 2)
			for key := range r.host.store.values {
				n, ok := worldOfKey(training, key)
				require.True(t, ok)
				require.GreaterOrEqual(t, n, 12, key)
			}
		})
	})
	t.Run("of what saves checkpoints", func(t *testing.T) {
		bubble(t, func(r *rig) {
			ms := r.world(2, nil)
			r.goAll(ms...)
			time.Sleep(30 * time.Second)
			require.NoError(t, ms[1].report(context.Background(), ms[1].msg("NodeFailure", f("level", processError),
				f("error_data", `{"local_rank": 1, "exitcode": -1, "message": "Async checkpoint saver got failure:disk"}`))))
			requireEnds(t, ended, ms...)
			require.Empty(t, r.events("break"))
		})
	})
}

// TestWhereAgentsAre: whoever knows it is asked with what agents tell, also by one that has not joined.
func TestWhereAgentsAre(t *testing.T) {
	hub := api.NewHub(api.HubConfig{})
	defer hub.Close()
	var asked, noted []string
	h := New(Config{Service: hub, Run: testRun,
		Machine: func(_ context.Context, kind string, id int, ip string) string {
			asked = append(asked, fmt.Sprint(kind, id, " ", ip))
			return fmt.Sprint("gpu-0", id)
		},
		Note: func(_ job.Event, node, machine, text string) { noted = append(noted, node+" on "+machine+": "+text) },
	})
	defer h.Close()
	says := func(id int, name string, fields ...pyproto.Field) *pyproto.Message {
		return pyproto.Comm.New(name, append(fields, f("node_rank", id), f("node_ip", fmt.Sprint("10.0.0.", id)))...)
	}
	worker := func(id int) pyproto.Caller { return pyproto.Caller{NodeType: "worker", NodeID: id} }
	fails := func(id int) {
		_, err := h.Report(t.Context(), worker(id), says(id, "NodeFailure", f("error_data", "bad"), f("level", nodeError)))
		require.NoError(t, err)
	}
	joins := func(id int, name string) {
		_, err := h.Get(t.Context(), worker(id), says(id, "JoinRendezvousRequest", f("rdzv_name", name),
			f("local_world_size", 1)))
		require.NoError(t, err)
	}
	_, err := h.Report(t.Context(), worker(1), says(1, "RendezvousParams", f("min_nodes", 2), f("max_nodes", 2)))
	require.NoError(t, err)
	fails(3)
	joins(2, checking)
	fails(2)
	joins(1, training)
	require.Equal(t, []string{"worker2 10.0.0.2", "worker1 10.0.0.1"}, asked, "not for who takes no part")
	require.Equal(t, []string{"worker-2 on gpu-02: bad"}, noted)
	require.Equal(t, "gpu-01", hub.Runs(true)[0].Nodes[0].Machine)
}
