package coordinator

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/commit"
)

var start = time.Unix(1_000_000, 0)

func TestStateForgetsTheSilent(t *testing.T) {
	st := newState()
	step := func(at time.Duration, ev event) {
		_, err := st.step(start.Add(at), ev)
		require.NoError(t, err)
	}
	s := Save{ID: "a", Step: 1, Shards: 2}
	step(0, reportEvent{report(s, Prepared, 1)})
	step(0, agreeEvent{Key: "k", Nodes: 2, Holdings: []Holding{holding("a", 1, 1, 0, 1)}, Patience: time.Hour})
	step(0, peersEvent{Key: "k", Nodes: 2})
	step(0, agesEvent{"", 0, []Age{{Rank: 1}}})
	step(0, Participation{"7.1", 3, []string{"k"}})
	require.Positive(t, st.bytes)
	step(forgetAfter-time.Second, reportEvent{report(s, Prepared, 1)}) // its daemon still waits
	step(forgetAfter+sweepEvery, tick{})
	require.Len(t, st.saves, 1)
	require.Empty(t, st.agreements)
	require.Len(t, st.exchanges, 1, "when there last were ages it was")
	require.Empty(t, st.ages)
	require.Empty(t, st.participants)
	step(2*forgetAfter+sweepEvery, tick{})
	require.True(t, st.empty())
	require.Zero(t, st.bytes)
}

func TestStateLimits(t *testing.T) {
	saves := func(n int) *state {
		st := newState()
		for i := range n {
			_, err := st.step(start, reportEvent{report(Save{ID: fmt.Sprint(i), Shards: 2}, Prepared, 1)})
			require.NoError(t, err)
		}
		return st
	}
	fat := report(Save{ID: "fat", Shards: 9}, Prepared, 1)
	fat.Entries[0].Files[0].Path = strings.Repeat("x", maxBytes)
	keys := newState()
	for i := range maxKeys {
		_, err := keys.step(start, agreeEvent{Key: fmt.Sprint(i), Nodes: 2, Patience: time.Hour})
		require.NoError(t, err)
	}
	for name, c := range map[string]struct {
		l    *state
		ev   event
		want string
	}{
		"saves in flight": {saves(maxSaves), reportEvent{report(Save{ID: "x", Shards: 2}, Prepared, 1)},
			"64 saves are in flight"},
		"bytes":  {newState(), reportEvent{fat}, "64 MiB"},
		"shards": {newState(), reportEvent{report(Save{ID: "x", Shards: maxShards + 1}, Prepared, 1)}, "at most 100000"},
		"keys":   {keys, agreeEvent{Key: "x", Nodes: 2}, "64 keys"},
		"nodes":  {newState(), peersEvent{Key: "x", Nodes: maxShards + 1}, "at most 100000"},
	} {
		t.Run(name, func(t *testing.T) {
			bytes, n := c.l.bytes, len(c.l.saves)+len(c.l.agreements)
			_, err := c.l.step(start, c.ev)
			require.ErrorIs(t, err, ErrLimit)
			require.ErrorContains(t, err, c.want)
			require.Equal(t, bytes, c.l.bytes)
			require.Equal(t, n, len(c.l.saves)+len(c.l.agreements))
		})
	}
}

// Participation is remembered for the newest rounds and epochs only.
func TestStateForgetsOldRounds(t *testing.T) {
	st := newState()
	for i := range 2 * maxKeys {
		for range 2 {
			_, err := st.step(start.Add(time.Duration(i)), Participation{Of: fmt.Sprint("7.", i), Node: 1})
			require.NoError(t, err)
		}
	}
	require.Equal(t, maxKeys, len(st.participants))
	require.Contains(t, st.participants, fmt.Sprint("7.", 2*maxKeys-1))
	require.NotContains(t, st.participants, "7.0")
	require.EqualValues(t, maxKeys*64, st.bytes)
}

// Saves that are over make room for others, and so do agreements that are answered.
func TestStateDropsFinishedSaves(t *testing.T) {
	st := newState()
	for i := range 20 * maxSaves {
		_, err := st.step(start.Add(time.Duration(i)),
			reportEvent{report(Save{ID: fmt.Sprint(i), Step: int64(i), Shards: 1}, Published, 0)})
		require.NoError(t, err)
		_, err = st.step(start.Add(time.Duration(i)),
			agreeEvent{Key: fmt.Sprint(i), Nodes: 1, Holdings: []Holding{holding("a", 1, 1, 0, 1)}})
		require.NoError(t, err)
	}
	require.Len(t, st.saves, 4*maxSaves)
	require.Len(t, st.agreements, maxKeys)
	require.NotNil(t, st.saves[fmt.Sprint(20*maxSaves-1)])
}

func TestStateRefusesAnotherSaveOfTheName(t *testing.T) {
	st := newState()
	_, err := st.step(start, reportEvent{report(Save{ID: "a", Step: 1, Shards: 2}, Prepared, 1)})
	require.NoError(t, err)
	_, err = st.step(start, reportEvent{report(Save{ID: "a", Step: 2, Shards: 2}, Prepared, 1)})
	require.ErrorIs(t, err, errBadRequest)
}

// An empty state learns a later phase, and the earlier ones that it implies, from any node.
func TestStateIsRebuilt(t *testing.T) {
	s := Save{ID: "a", Step: 1, Shards: 2}
	for name, c := range map[string]struct {
		first, then Report
		done        bool
	}{
		"intent of the leader":    {report(s, Intent, 0), report(s, Prepared, 1), true},
		"placed of the leader":    {report(s, Placed, 0), report(s, Prepared, 1), true},
		"placed of another":       {report(s, Placed, 1), report(s, Prepared, 1), true},
		"placed is not published": {report(s, Placed, 0), report(s, Placed, 1), false},
		"published":               {report(s, Published, 0), report(s, Placed, 1), true},
		"prepared of the leader":  {report(s, Prepared, 0), report(s, Prepared, 1), false},
	} {
		t.Run(name, func(t *testing.T) {
			st := newState()
			for _, r := range []Report{c.first, c.then} {
				_, err := st.step(start, reportEvent{r})
				require.NoError(t, err)
			}
			_, done, err := st.reply(c.then)
			require.NoError(t, err)
			require.Equal(t, c.done, done)
		})
	}
}

// Two thousand nodes with eight shards each save again and again: four wake-ups a save, and memory only for saves in
// flight.
func TestStateOfManyNodes(t *testing.T) {
	const nodes, per, saves = 2000, 8, 5
	st, now := newState(), start
	var most int64
	for i := range saves {
		s := Save{ID: fmt.Sprint(i), Step: int64(i), Shards: nodes * per}
		var topics []topic
		all := func(p Phase) {
			for node := nodes - 1; node >= 0; node-- {
				r := Report{Save: s, Phase: p}
				for k := range per {
					r.Shards = append(r.Shards, node*per+k)
					if p == Prepared {
						r.Entries = append(r.Entries, entry(node*per+k))
					}
				}
				now = now.Add(time.Millisecond)
				ts, err := st.step(now, reportEvent{r})
				require.NoError(t, err)
				topics = append(topics, ts...)
			}
		}
		all(Prepared)
		es, ok, err := st.reply(report(s, Prepared, 0))
		require.NoError(t, err)
		require.True(t, ok)
		require.Len(t, es, nodes*per)
		most = max(most, st.bytes)
		for _, p := range []Phase{Intent, Published} {
			if p == Published {
				all(Placed)
			}
			ts, err := st.step(now, reportEvent{report(s, p, 0)})
			require.NoError(t, err)
			topics = append(topics, ts...)
		}
		require.Equal(t, []topic{{allPrepared, s.ID}, {hasIntent, s.ID}, {allPlaced, s.ID}, {isPublished, s.ID}},
			topics)
	}
	require.Less(t, most, int64(8<<20), "one save at a time")
	require.Zero(t, st.bytes)
}

// node is one daemon in a simulation: it repeats its report until it is answered.
type node struct {
	shard   int
	phase   Phase
	retold  []Report // messages for a new hub
	aborted bool
	done    bool
}

// Messages may be lost, repeated or reordered: no node passes the intent before all are prepared, the outcome is the
// same for all, and all nodes finish.
func TestStateInARoughWorld(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		s := Save{ID: "s", Step: 1, Shards: 1 + rng.IntN(5)}
		nodes := make([]*node, s.Shards)
		for i := range nodes {
			nodes[i] = &node{shard: i, phase: "writing"}
		}
		failing := -1
		if rng.IntN(2) == 0 {
			failing = rng.IntN(s.Shards)
		}
		st := newState()
		for round := 0; ; round++ {
			require.Less(t, round, 20000, "seed %d does not come to rest", seed)
			if rng.IntN(20) == 0 && round < 2000 {
				st = newState()
			}
			nodes[rng.IntN(len(nodes))].act(t, rng, st, s, nodes, failing)
			if over(nodes) {
				break
			}
		}
		for _, n := range nodes {
			require.Equal(t, failing >= 0, n.aborted, "seed %d", seed)
		}
	}
}

func over(nodes []*node) bool {
	for _, n := range nodes {
		if !n.done {
			return false
		}
	}
	return true
}

// act sends one request of the node. Its answer may be lost.
func (n *node) act(t *testing.T, rng *rand.Rand, st *state, s Save, nodes []*node, failing int) {
	for _, r := range n.retold {
		_, err := st.step(start, reportEvent{r})
		require.NoError(t, err)
	}
	if n.done {
		return
	}
	if n.phase == "writing" {
		n.phase = Prepared
		if n.shard == failing {
			n.phase = Failed
		}
	}
	r := report(s, n.phase, n.shard)
	_, err := st.step(start, reportEvent{r})
	require.NoError(t, err)
	es, ok, err := st.reply(r)
	if !ok || rng.IntN(4) == 0 {
		return
	}
	if err != nil {
		require.ErrorIs(t, err, ErrAborted)
		n.aborted, n.done = true, true
		return
	}
	n.advance(t, r, es, nodes)
}

func (n *node) advance(t *testing.T, r Report, es []commit.Entry, nodes []*node) {
	leads := n.shard == 0
	switch n.phase {
	case Failed:
		n.aborted, n.done, n.retold = true, true, []Report{r}
	case Prepared:
		for _, o := range nodes {
			require.Contains(t, []Phase{Prepared, Intent, Placed, Published}, o.phase,
				"past a shard that is not prepared")
			require.False(t, o.aborted)
		}
		n.phase = Placed
		if leads {
			require.Len(t, es, len(nodes))
			n.phase = Intent
		}
	case Intent:
		n.phase = Placed
	case Placed:
		n.phase = Published
		n.done = !leads
	case Published:
		n.done, n.retold = true, []Report{r}
	}
}
