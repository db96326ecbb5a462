package agents

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// syncs has an agent ask for the common port, with those that are free on its node, until it knows it.
func (m *model) syncs(free ...int) (port, asked int) {
	for from := 0; ; time.Sleep(5 * time.Second) {
		i := 0
		for free[i] < from {
			i++
		}
		answer, err := m.get(context.Background(), m.msg("SyncTrainingPort", f("port", free[i])))
		require.NoError(m.r.t, err)
		if port := answer.Int("port"); port > 0 || asked > 100 {
			return port, asked
		}
		from = answer.Int("newport")
		asked++
	}
}

// begin has agents of a run of two agree on a port, and then train.
func (r *rig) begin(ms ...*model) {
	for _, m := range ms {
		require.NoError(r.t, m.report(context.Background(), m.rules()))
	}
	found := make(chan int)
	go func() {
		port, _ := ms[0].syncs(60000, 60016)
		found <- port
	}()
	port, _ := ms[1].syncs(60016)
	require.Equal(r.t, []int{60016, 60016}, []int{port, <-found})
	r.goAll(ms...)
	time.Sleep(time.Minute)
}

// A node in the place of another one gets the port that the rest of the job has, whatever is free on it, at once.
func TestPortOfAReplacedNode(t *testing.T) {
	for name, free := range map[string][]int{"the same": {60016}, "a lower one, too": {60000, 60016}, "others": {60032}} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(r *rig) {
				ms := r.world(2, nil)
				r.begin(ms...)
				ms[1].dies()
				port, asked := r.agent(2, 1).syncs(free...)
				require.Equal(t, 60016, port)
				require.LessOrEqual(t, asked, 1)
			})
		})
	}
}

// What a node has offered that died before there was a port counts no more, and the next job has a port of its own.
func TestPortsThatCountNoMore(t *testing.T) {
	bubble(t, func(r *rig) {
		dead := r.agent(9, 1)
		require.NoError(t, dead.report(context.Background(), dead.rules()))
		_, err := dead.get(context.Background(), dead.msg("SyncTrainingPort", f("port", 60032)))
		require.NoError(t, err)
		time.Sleep(time.Second)
		ms := r.world(2, nil)
		for _, m := range ms {
			require.NoError(t, m.report(context.Background(), m.rules()))
		}
		found := make(chan int)
		go func() {
			port, _ := ms[0].syncs(60000, 60016, 60032, 60048)
			found <- port
		}()
		port, _ := ms[1].syncs(60016, 60048)
		require.Equal(t, []int{60048, 60048}, []int{port, <-found})
		r.goAll(ms...)
		requireEnds(t, ended, ms...)
		r.begin(r.agent(3, 0), r.agent(4, 1))
	})
}
