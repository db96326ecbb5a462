package agents

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous"
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
						require.Equal(t, string(rendezvous.Succeeded), r.status().Outcome)
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
		ms[1].works = func(n int) work { return work{lasts: []time.Duration{20 * time.Second, time.Minute}[n], fails: n == 0} }
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
