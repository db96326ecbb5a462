package service

import (
	"bytes"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// slowRun is a run of nodes with two ranks each. All wait for one rank.
type slowRun struct {
	t     *testing.T
	s     *Service
	nodes []string // that are here, by ID and name
	log   bytes.Buffer
	sum   map[string]hang.Looks // of the ranks of the newest epoch
	steps uint64
}

// inSlowRun runs f with the nodes n0, n1 ... of a run. The last ones may be spares.
func inSlowRun(t *testing.T, p rendezvous.Params, nodes int, self string, f func(*slowRun)) {
	synctest.Test(t, func(t *testing.T) {
		r := &slowRun{t: t}
		var err error
		r.s, err = New(Config{Log: slog.New(slog.NewTextHandler(&r.log, nil)), Self: self})
		require.NoError(t, err)
		defer r.s.Close(0)
		p.Hang, p.NodeTimeout = hang.Spec{Action: hang.ActReport, Slow: hang.Action(p.Hang)}.String(), 24*time.Hour
		for i := range nodes {
			r.join(fmt.Sprintf("n%d", i), p, job.EpochID{})
		}
		time.Sleep(time.Minute)
		r.start()
		f(r)
	})
}

func (r *slowRun) join(id string, p rendezvous.Params, stopped job.EpochID) {
	j := joining(id, "10.0.0.1")
	j.Params, j.Node.Slots, j.Stopped = p, 2, stopped
	j.Node.Can = []rendezvous.Ability{rendezvous.CanLeave, rendezvous.CanNotice}
	require.NoError(r.t, r.s.Hub.Join(r.t.Context(), "r", j))
	if stopped == (job.EpochID{}) {
		r.nodes = append(r.nodes, id)
	}
}

// start has the world that was sealed run.
func (r *slowRun) start() {
	for _, id := range r.nodes {
		if seat, err := r.s.Hub.Seat("r", id); err == nil {
			require.NoError(r.t, r.s.Hub.Report(r.t.Context(), "r", rendezvous.Ready{ID: id, EpochID: seat.EpochID,
				Addr: "10.0.0.1", Port: 1}))
		}
	}
	r.sum, r.steps = map[string]hang.Looks{}, 0
}

// train has the nodes report for a time, with a rank that is late in each of its steps; -1: none is.
func (r *slowRun) train(late int, took time.Duration) {
	for ; took > 0; took -= 10 * time.Second {
		r.steps += 100
		for _, id := range r.nodes {
			seat, err := r.s.Hub.Seat("r", id)
			if err != nil {
				continue // a spare
			}
			s := &hang.Summary{Steps: 1}
			for rank := 2 * seat.GroupRank; rank < 2*seat.GroupRank+2; rank++ {
				s.Looks = append(s.Looks, r.looks(rank, late))
			}
			// there are none once the world has ended
			_, _ = r.s.Hangs.Post(r.t.Context(), "r", hang.Report{ID: id, Epoch: seat.EpochID, Summary: s})
		}
		time.Sleep(10 * time.Second)
	}
}

func (r *slowRun) looks(rank, late int) hang.RankLooks {
	position := 0.1
	if rank == late {
		position = -0.2
	}
	const steps, unit = 100, 1 << 16
	sum := r.sum[fmt.Sprint(rank)].Plus(hang.Looks{Steps: steps, Positions: uint64(steps * unit * (1 + position)),
		Squares: uint64(steps * unit * (position*position + 0.01))})
	r.sum[fmt.Sprint(rank)] = sum
	return hang.RankLooks{Rank: rank, Steps: r.steps, Watched: 100 * r.steps, Busy: 90 * r.steps,
		Groups: []hang.GroupLooks{{ID: 1, Begun: r.steps, Looks: sum}}}
}

// stopped has nodes obey after one was drained, and reports which one left.
func (r *slowRun) stopped() (left string) {
	p, err := r.s.Hub.Params("r")
	require.NoError(r.t, err)
	var rest []string
	for _, id := range r.nodes {
		d, err := r.s.Hub.Watch(r.t.Context(), "r", id, api.Cursor{})
		require.NoError(r.t, err)
		switch {
		case d.Leave != nil:
			require.Empty(r.t, left, "one at a time")
			left = id
			_, err := r.s.Hub.Leave(r.t.Context(), "r", rendezvous.Leave{ID: id})
			require.NoError(r.t, err)
			continue
		case d.Kind == job.Stop:
			r.join(id, p, d.EpochID)
		}
		rest = append(rest, id)
	}
	r.nodes = rest
	if left != "" {
		time.Sleep(time.Minute)
		r.start()
	}
	return left
}

func TestANodeThatSlowsTheJobLeaves(t *testing.T) {
	drain := string(hang.ActDrain)
	for name, c := range map[string]struct {
		p     rendezvous.Params
		nodes int
		self  string
		want  string // who leaves
		why   string // nobody does
	}{
		"a spare takes its place":  {rendezvous.Params{Min: 2, Max: 2, Hang: drain}, 3, "", "n1", ""},
		"fewer do more without it": {rendezvous.Params{Min: 2, Max: 4, Hang: drain}, 4, "n0", "n1", ""},
		"fewer do less":            {rendezvous.Params{Min: 1, Max: 3, Hang: drain}, 3, "", "", "2 nodes, and 3 are needed"},
		"MIN forbids it":           {rendezvous.Params{Min: 2, Max: 2, Hang: drain}, 2, "", "", "1 nodes, and 2 are needed"},
		"it serves":                {rendezvous.Params{Min: 2, Max: 2, Hang: drain}, 3, "n1", "", "n1 serves the rendezvous"},
		"only report":              {rendezvous.Params{Min: 2, Max: 2}, 3, "", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			inSlowRun(t, c.p, c.nodes, c.self, func(r *slowRun) {
				r.train(3, 5*time.Minute)
				require.Empty(t, r.stopped(), "it has not lasted for five minutes")
				r.train(3, 2*time.Minute)
				require.Contains(t, r.log.String(), "slow-found: rank 3 (node 1 n1) slows the job: 1.4x")
				require.Equal(t, c.want, r.stopped())
				if c.want == "" {
					require.Equal(t, c.why != "", bytes.Contains(r.log.Bytes(), []byte("nodes that slow the job stay")))
					require.Contains(t, r.log.String(), c.why)
					r.train(3, 10*time.Minute)
					require.Empty(t, r.stopped())
					require.LessOrEqual(t, bytes.Count(r.log.Bytes(), []byte("slow the job stay")), 1, "once")
					return
				}
				st, err := r.s.Hub.Run("r")
				require.NoError(t, err)
				require.InDelta(t, 270*time.Second, st.Ledger.Slowed, float64(30*time.Second), "from the finding on")
				require.Equal(t, job.CauseSlow, st.Bars["n1"].Kind)
				require.Zero(t, st.Restarts, "nothing is charged")
			})
		})
	}
}

// The rank that was slow is slow again on another node: it is the program. Another rank's node leaves an hour later.
func TestNotTwiceForTheSameRanks(t *testing.T) {
	p := rendezvous.Params{Min: 2, Max: 2, Hang: string(hang.ActDrain)}
	inSlowRun(t, p, 4, "", func(r *slowRun) {
		r.train(3, 8*time.Minute)
		require.Equal(t, "n1", r.stopped())
		r.train(3, 2*time.Hour)
		require.Empty(t, r.stopped())
		require.Contains(t, r.log.String(), "rank 3 of node n2 was slow on node n1, which has left for it")

		require.NoError(t, r.s.Hub.Order("r", rendezvous.Order{Kind: rendezvous.OrderUnbar, Node: "n1"}))
		r.train(3, 2*time.Minute)
		require.Equal(t, "n2", r.stopped(), "the operator has allowed it")
	})
	inSlowRun(t, p, 4, "", func(r *slowRun) {
		r.train(3, 8*time.Minute)
		require.Equal(t, "n1", r.stopped())
		r.train(1, 55*time.Minute)
		require.Empty(t, r.stopped(), "one an hour")
		r.train(1, 10*time.Minute)
		require.Equal(t, "n0", r.stopped())
	})
}

// The key of a test of links goes to the node alone that it is for.
func TestAsksToOneNode(t *testing.T) {
	inSlowRun(t, rendezvous.Params{Min: 2, Max: 2}, 2, "", func(r *slowRun) {
		heard := func(id string) string {
			d, err := r.s.Hub.Watch(t.Context(), "r", id, api.Cursor{WithNotices: true, Notices: 1})
			require.NoError(t, err)
			return fmt.Sprint(d.Notices)
		}
		r.s.askNodes("r", hang.Ask{What: hang.AskFacts, Nodes: []int{0, 1}})
		r.s.askNodes("r", hang.Ask{What: hang.AskLink, To: "n1", Link: &hang.Link{Test: "secret"}})
		require.Contains(t, heard("n1"), `"what":"link","link":{"test":"secret"`)
		require.Contains(t, heard("n0"), `"what":"facts","nodes":[0,1]`)
		require.NotContains(t, heard("n0"), "secret")
	})
}
