package upstream

import (
	"context"
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/pickle"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/pyproto"
)

// theirCheck is the check of nodes as DLRover's master has it (NetworkCheckRendezvousManager): whoever joins makes the
// round void that others are in.
type theirCheck struct {
	model *model
	waits map[int]int
	world map[int]int // of the round
	round int
	done  map[int]bool // have reported, with what they have in any round of the check
	fine  map[int]bool
	lost  map[string]int // of node 1: how often a message, or the answer to it, is lost yet
}

func newTheirCheck(t *testing.T) *theirCheck {
	c := &theirCheck{model: newModel(t), lost: map[string]int{}}
	c.model.checks = c
	c.forget()
	return c
}

func (c *theirCheck) forget() {
	c.waits, c.world, c.round = map[int]int{}, nil, 0
	c.done, c.fine = map[int]bool{}, map[int]bool{}
}

// lose is asked before a message is heard, and before it is answered.
func (c *theirCheck) lose(id int, what string) error {
	if c == nil || id != 1 || c.lost[what] == 0 {
		return nil
	}
	c.lost[what]--
	return errors.New("unavailable")
}

// get answers what is about the check, and reports whether it is.
func (c *theirCheck) get(q *pyproto.Message) ([]byte, bool) {
	if c == nil {
		return nil, false
	}
	about := q.Str("rdzv_name") == checking
	state := func(fields ...pyproto.Field) ([]byte, bool) {
		return pickle.Encode(pyproto.Comm.New("RendezvousState", fields...)), true
	}
	field := func(name string, value any) pyproto.Field { return pyproto.Field{Name: name, Value: value} }
	switch name := q.Class.Name; {
	case name == "JoinRendezvousRequest" && about:
		if rank := q.Int("node_rank"); c.waits[rank] == 0 {
			c.waits[rank], c.world = q.Int("local_world_size"), nil
		}
		return state(field("world", &pyproto.Dict{}), field("round", c.round))
	case name == "WaitingNodeNumRequest" && about:
		return state(field("world", &pyproto.Dict{}), field("waiting_num", len(c.waits)))
	case name == "CommWorldRequest" && about:
		c.seal()
		world := &pyproto.Dict{}
		for _, rank := range slices.Sorted(maps.Keys(c.world)) {
			world.Pairs = append(world.Pairs, pyproto.Pair{Key: rank, Value: c.world[rank]})
		}
		return state(field("world", world), field("round", c.round), field("group", 0))
	case name == "NetworkReadyRequest", name == "StragglerExistRequest":
		nodes, reason := c.verdict(name == "NetworkReadyRequest")
		return pickle.Encode(pyproto.Comm.New("NetworkCheckResult", field("nodes", nodes), field("reason", reason))), true
	case name == "RunningNodesRequest":
		nodes := &pyproto.List{Items: []any{0, 1, 2, 3}} // many enough for a second round
		return pickle.Encode(pyproto.Comm.New("RunningNodes", field("nodes", nodes))), true
	}
	return nil, false
}

func (c *theirCheck) seal() {
	if c.world != nil || len(c.waits) != c.model.max {
		return
	}
	c.world, c.waits, c.done = c.waits, map[int]int{}, map[int]bool{}
	if c.round%2 == 0 {
		clear(c.fine)
	}
	c.round++
}

func (c *theirCheck) verdict(faults bool) (nodes *pyproto.List, reason string) {
	nodes = &pyproto.List{}
	switch {
	case c.world == nil && faults:
		return nodes, "Not Initialized"
	case len(c.done) < len(c.world):
		return nodes, "Waiting node"
	case !faults:
		return nodes, ""
	}
	for rank := range c.world {
		if !c.fine[rank] {
			nodes.Items, reason = append(nodes.Items, rank), "Node Failure"
		}
	}
	if reason == "" {
		c.round = (c.round + 1) / 2 * 2
	}
	return nodes, reason
}

func (c *theirCheck) report(q *pyproto.Message) {
	if kind := q.Str("event_type"); c != nil && (kind == "NODE_CHECK_SUCCEEDED" || kind == "NODE_CHECK_FAILED") {
		rank := q.Object("node").Int("rank")
		c.done[rank], c.fine[rank] = true, c.fine[rank] || kind == "NODE_CHECK_SUCCEEDED"
	}
}

// nodes are two that have come to be checked. tested says how often each has been, and what its test finds.
func (c *theirCheck) nodes(test func(rank, times int) error) (nodes []*node, tested [2]*int) {
	for rank := range 2 {
		times := new(int)
		n := c.model.node(rank, rank, rendezvous.Params{Min: 2, Max: 2, JoinTimeout: time.Minute})
		n.every.round, n.every.ask = 0, 3*time.Second
		n.cfg.Port = func() (int, error) { return 30000 + rank, nil }
		n.cfg.Check.Test = func(context.Context, Group) (float64, error) {
			*times++
			return 1, test(rank, *times)
		}
		nodes, tested[rank] = append(nodes, n.join()), times
	}
	return nodes, tested
}

// A call that fails is made again, and the check goes on: nobody is tested twice, and nobody waits for a verdict that
// cannot come.
func TestACheckSurvivesLostCalls(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"JoinRendezvousRequest", "CommWorldRequest", "KeyValuePair", "NodeEvent",
		"NetworkReadyRequest", "StragglerExistRequest", "RunningNodesRequest"} {
		for _, lost := range []string{what, "answer to " + what} {
			t.Run(lost, func(t *testing.T) {
				t.Parallel()
				c := newTheirCheck(t)
				c.lost[lost] = 2
				nodes, tested := c.nodes(func(rank, times int) error {
					if what == "RunningNodesRequest" && rank == 0 && times == 1 {
						return errors.New("the link is down")
					}
					return nil
				})
				run(nodes...)
				want := map[bool]int{false: 1, true: 2}[what == "RunningNodesRequest"]
				require.Equal(t, []int{want, want}, []int{*tested[0], *tested[1]})
			})
		}
	}
}

// A master that was started again has forgotten the check, which begins anew, wherever the nodes are.
func TestACheckBeginsAnewWithTheMaster(t *testing.T) {
	t.Parallel()
	t.Run("while a node waits", func(t *testing.T) {
		t.Parallel()
		c := newTheirCheck(t)
		n := c.model.node(0, 0, two)
		n.cfg.Check.Test = func(context.Context, Group) (float64, error) { return 1, nil }
		n.cfg.Port = func() (int, error) { return 30000, nil }
		waits := func() bool {
			c.model.mu.Lock()
			defer c.model.mu.Unlock()
			return len(c.waits) == 1
		}
		n.join()
		eventually(t, "it waits", waits)
		c.model.restart()
		eventually(t, "it waits again", waits)
	})
	t.Run("while both test", func(t *testing.T) {
		t.Parallel()
		c := newTheirCheck(t)
		began := make(chan int, 9)
		ready := make(chan struct{})
		nodes, tested := c.nodes(func(rank, _ int) error {
			began <- rank
			<-ready
			return nil
		})
		<-began
		<-began
		c.model.restart()
		close(ready)
		run(nodes...)
		atLeast(t, 2, 2, tested)
	})
	t.Run("before one knows where to meet", func(t *testing.T) {
		t.Parallel()
		c := newTheirCheck(t)
		c.lost["KeyValuePair"] = 2
		nodes, tested := c.nodes(func(rank, times int) error {
			if rank == 0 && times == 1 {
				c.model.restart()
			}
			return nil
		})
		run(nodes...)
		atLeast(t, 2, 1, tested)
	})
}

// A leader that dies before it has told where to meet, and that nobody replaces, is as a partner that dies in the test:
// the round goes on with this node's failure.
func TestALeaderThatDoesNotTellWhereToMeet(t *testing.T) {
	t.Parallel()
	c := newTheirCheck(t)
	n := c.model.node(1, 1, two)
	n.every.leader = time.Second
	n.cfg.Check.Test = func(context.Context, Group) (float64, error) {
		t.Error("it has nobody to meet")
		return 0, nil
	}
	c.model.mu.Lock()
	c.waits[0] = 1
	c.model.mu.Unlock()
	n.join()
	eventually(t, "it asks for the verdict", func() bool { return len(c.model.told("NetworkReadyRequest", 1)) > 0 })
	told := c.model.told("NodeEvent", 1)
	require.Equal(t, []string{"NODE_CHECK_FAILED"}, c.model.events(1))
	require.InDelta(t, failedTime, told[0].Float("event_elapsed_time"), 0)
}

// The place of a node that has gone to be checked, once more, completes a world without it. Who waits there for its
// leader meets it where both train, and not in a further check, which the leader would join for its part.
func TestALeaderThatIsLateIsNotChecked(t *testing.T) {
	t.Parallel()
	c := newTheirCheck(t)
	c.model.mu.Lock()
	c.model.join(0, 1)
	c.model.mu.Unlock()
	nodes, tested := c.nodes(func(rank, _ int) error {
		if rank == 1 { // which is the first to train
			eventually(t, "the other one has reported", func() bool { return len(c.model.told("NetworkReadyRequest", 0)) > 0 })
		}
		return nil
	})
	run(nodes...)
	require.Equal(t, []int{1, 1}, []int{*tested[0], *tested[1]})
}

// atLeast: a node that is late on a busy machine makes the round void that the other one is in, and both test again.
func atLeast(t *testing.T, first, second int, tested [2]*int) {
	t.Helper()
	require.GreaterOrEqual(t, *tested[0], first)
	require.GreaterOrEqual(t, *tested[1], second)
}

// A node that was away has missed the verdict, and the next round has begun: it takes part in that one, and what it has
// passed before counts.
func TestTheNextRoundHasBegun(t *testing.T) {
	t.Parallel()
	c := newTheirCheck(t)
	c.lost["NetworkReadyRequest"] = 2
	nodes, tested := c.nodes(func(rank, times int) error {
		if rank == 0 && times == 1 || rank == 1 && times == 2 {
			return errors.New("the link is down")
		}
		return nil
	})
	run(nodes...)
	atLeast(t, 2, 2, tested)
	require.NotContains(t, c.model.events(1), "NODE_CHECK_FAILED")
}

// A world that was sealed with a node is not made void by its second attempt to join.
func TestTheAnswerToAJoinIsLost(t *testing.T) {
	t.Parallel()
	c := newTheirCheck(t)
	a := c.model.node(0, 0, two).join()
	eventually(t, "one waits", func() bool { return c.model.count() == 1 })
	c.lost["answer to JoinRendezvousRequest"] = 1
	run(a, c.model.node(1, 1, two).join())
	require.Equal(t, 1, c.model.round)
}
