package top

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/answers"
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.Local)

// training is the picture of a run that trains, opened, and of one that has failed.
func training(nodes int) Seen {
	r := api.RunStatus{Run: "job", Status: rendezvous.Status{Phase: "running", WorldSize: 2 * nodes, Members: nodes,
		Params: rendezvous.Params{Min: nodes, Max: nodes, MaxRestarts: 3}}}
	for i := range nodes {
		r.Nodes = append(r.Nodes, rendezvous.NodeStatus{Name: fmt.Sprintf("gpu-%02d", i), State: "member", GroupRank: i,
			Slots: 2, Addr: "10.0.0.1"})
	}
	f := answers.Facts{Now: now, Run: r}
	for i := range 20 {
		f.Events = append(f.Events, api.Event{Seq: uint64(i + 1), At: now, Note: rendezvous.Note{Event: job.EventRun,
			Round: i}})
	}
	failed := api.RunStatus{Run: "failed", Status: rendezvous.Status{Outcome: "failed"}}
	return Seen{Runs: []api.RunStatus{failed, r}, Facts: f}
}

func press(s State, keys ...string) (State, Want) {
	var w Want
	for _, k := range keys {
		s, w = s.Press(k)
	}
	return s, w
}

func TestList(t *testing.T) {
	s := New("").Told(now, training(2), nil)
	require.Equal(t, `2 runs  03:04:05
RUN     NODES  WANTED  WORKERS  RESTARTS  STATE
job     2      2       4        0 of 3    running
failed  0      -       0        0 of 0    failed`, s.View())

	s, w := press(s, "down", "down", "enter")
	require.Equal(t, "failed", s.Open())
	require.True(t, w.Look)
	require.Equal(t, "failed  03:04:05", s.View(), "its facts are not there yet")
	require.Empty(t, s.Events())
	s, _ = press(s, "esc", "up", "enter")
	require.Equal(t, "job", s.Open())
	require.Contains(t, s.View(), "Is it moving?            Yes: 4 workers run")
	require.Len(t, s.Events(), 20)

	s = s.Told(now.Add(time.Hour), Seen{}, errors.New("gone"))
	require.Contains(t, s.View(), "03:04:05  NO ANSWER: gone", "the last picture stays")
}

func TestOrdersNeedAYes(t *testing.T) {
	s := New("job").Told(now, training(2), nil)
	for _, c := range []struct {
		keys, question string
		want           rendezvous.Order
	}{
		{"j d", "drain gpu-01 in job? Stops 4 workers. The node saves,", rendezvous.Order{Kind: "drain", Node: "gpu-01"}},
		{"b", "bar gpu-00 in job? The node gets no workers", rendezvous.Order{Kind: "bar", Node: "gpu-00"}},
		{"r", "Restart of job? Stops 4 workers. Steps since", rendezvous.Order{Kind: "restart"}},
		{"p", "Pause of job? Stops 4 workers.", rendezvous.Order{Kind: "pause"}},
	} {
		asked, w := press(s, strings.Fields(c.keys)...)
		require.Zero(t, w)
		require.Contains(t, asked.View(), c.question)
		for _, no := range []string{"n", "esc", "enter", "q", "d"} {
			after, w := press(asked, no)
			require.Zero(t, w, no)
			require.Contains(t, after.View(), "Nothing was ordered.")
		}
		after, w := press(asked, "y")
		c.want.Cause = job.CauseOperator
		require.Equal(t, Want{Order: &c.want}, w)
		_, w = press(after, "y")
		require.Zero(t, w, "one yes is one order")
	}
	after, w := press(s, "c")
	require.Zero(t, w)
	require.Contains(t, after.View(), "No resume is possible now.")
	after, w = press(New("").Told(now, training(2), nil), "d", "y")
	require.Zero(t, w)
	require.NotContains(t, after.View(), "?")
}

// A drained node has left. It is shown, so that it can be unbarred.
func TestBarredNodesStay(t *testing.T) {
	seen := training(1)
	seen.Facts.Run.Bars = map[string]job.Cause{"gpu-07": {Text: "drained"}}
	s := New("job").Told(now, seen, nil)
	require.Contains(t, s.View(), "barred: drained")
	_, w := press(s, "end", "u", "y")
	require.Equal(t, "gpu-07", w.Order.Node)
}

func TestStacks(t *testing.T) {
	s, w := press(New("job").Told(now, training(1), nil), "s")
	require.Equal(t, Want{Stacks: true}, w)
	require.Contains(t, s.View(), "being collected")
	s.Columns, s.Rows = 80, 5
	s = s.Show("1\n2\n3\n4\n5\n6\n7\n")
	require.Equal(t, "1\n2\n3\n4\nup, down: more   esc: back   q: quit", s.View())
	s, _ = press(s, "end")
	require.Contains(t, s.View(), "4\n5\n6\n7\n")
	s, w = press(s, "d", "esc")
	require.Zero(t, w)
	require.Contains(t, s.View(), "job: Yes")
	_, w = press(s, "q")
	require.True(t, w.Quit)
}

func TestKeysAreListed(t *testing.T) {
	s, _ := press(New(""), "?")
	for _, k := range orderKeys {
		require.Contains(t, s.View(), "\n"+k.key+" ")
	}
}

// A picture fits a terminal of any size, and shows the chosen row.
func TestSizes(t *testing.T) {
	for _, c := range []struct{ columns, rows int }{{1, 1}, {20, 3}, {40, 10}, {80, 24}, {300, 100}} {
		for _, open := range []string{"", "job"} {
			s := New(open).Told(now, training(1000), nil)
			s.Columns, s.Rows = c.columns, c.rows
			for _, keys := range []string{"x", "end", "d", "n ?"} {
				s, _ = press(s, strings.Fields(keys)...)
				lines := strings.Split(s.View(), "\n")
				if c.rows >= 10 {
					require.Len(t, lines, c.rows, "%v %s %s", c, open, keys)
				}
				for _, l := range lines {
					require.LessOrEqual(t, len([]rune(l)), c.columns, "%v %s %s", c, open, keys)
				}
				if keys == "end" && c.rows >= 24 && open != "" {
					require.Contains(t, s.View(), "gpu-999")
				}
			}
		}
	}
}
