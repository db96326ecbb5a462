package page

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/internal/app/answers"
	"dlrover-run/netcheck"
	"dlrover-run/rendezvous"
)

// The page of a check of many nodes has the worst of them.
func TestALargeCheckIsBounded(t *testing.T) {
	p := netcheck.Picture{Summary: "checked", Median: 100, Line: 75}
	const nodes = 400
	for i := range nodes {
		n := netcheck.NodePicture{Node: netcheck.Node{ID: fmt.Sprint(i)}, Verdict: netcheck.Verdict{State: "ok"}}
		if i == nodes-1 {
			n.Node.Name, n.Verdict = "<slow>", netcheck.Verdict{State: netcheck.StateSlow, Reason: "slow"}
		}
		p.Nodes = append(p.Nodes, n)
		for j := range nodes {
			p.Pairs = append(p.Pairs, netcheck.Pair{From: i, To: j, Mbps: float64(100 - i/10)})
		}
	}
	v := checkView("a/b", p, time.Now())
	require.Equal(t, "/ui/runs/a%2Fb", v.Path)
	require.Len(t, v.Rows, maxNodeRows)
	require.Equal(t, nodes-maxNodeRows, v.Others)
	require.Equal(t, "<slow>", v.Rows[0].Name)
	require.Equal(t, answers.Waits, v.Rows[0].Tone)
	require.Len(t, v.Pairs, maxPairRows)
	require.Equal(t, nodes*nodes-maxPairRows, v.More)
	require.Equal(t, 61.0, v.Pairs[0].Mbps)
	var m matrix
	require.NoError(t, json.Unmarshal([]byte(v.Matrix), &m))
	require.Len(t, m.Cells, maxCells)
	require.Equal(t, "below the line", m.Cells[0][3])
	require.Empty(t, checkView("r", netcheck.Picture{Nodes: p.Nodes}, time.Now()).Matrix, "nothing was measured")
}

// stackOf is a main thread, the innermost function first.
func stackOf(rank int, names ...string) hang.Evidence {
	t := hang.Thread{Main: true}
	for i, n := range names {
		t.Python = append(t.Python, hang.Frame{Func: n, File: "train.py", Line: 10 + i})
	}
	return hang.Evidence{Worker: hang.Worker{Rank: rank}, Stacks: &hang.Stacks{Threads: []hang.Thread{t}}}
}

func TestStacksAreMerged(t *testing.T) {
	p := hang.Picture{World: hang.World{Nodes: []hang.WorldNode{{Slots: 4}}},
		Evidence: []hang.Evidence{stackOf(0, "all_reduce", "step", "main"), stackOf(1, "all_reduce", "step", "main"),
			stackOf(2, "load_batch", "main")}, Verdict: hang.Verdict{Suspects: []hang.Suspect{{Rank: 2}}}}
	f := flameOf(p)
	require.Equal(t, "3 of 4 ranks", f.Known)
	require.Len(t, f.Frames, 1)
	main := f.Frames[0]
	require.Equal(t, "main", main.Func)
	require.Equal(t, 3, main.Stacks)
	require.Equal(t, "0-2", main.Ranks)
	require.Len(t, main.Calls, 2)
	require.Equal(t, "step", main.Calls[0].Func)
	require.Equal(t, "train.py:11", main.Calls[0].Place)
	require.Equal(t, "all_reduce", main.Calls[0].Calls[0].Func)
	require.Equal(t, frame{Func: "load_batch", Place: "train.py:10", Ranks: "2", Stacks: 1, Tone: answers.Bad},
		main.Calls[1])
	require.Zero(t, f.Left)
	require.Nil(t, flameOf(hang.Picture{}))

	p.Evidence = nil
	for rank := range 2 * maxFrames {
		p.Evidence = append(p.Evidence, stackOf(rank, fmt.Sprint("f", rank), "main"))
	}
	f = flameOf(p)
	require.Len(t, f.Frames[0].Calls, maxFrames-1)
	require.Equal(t, 2*maxFrames+1-maxFrames, f.Left)
}

// Stacks are asked for once, and again when there are others. Runs whose stacks are kept are bounded.
func TestMergedStacksAreKept(t *testing.T) {
	asked := 0
	var fail error
	p := New(Config{Source: Source{Stacks: func(context.Context, string) (hang.Picture, error) {
		asked++
		return hang.Picture{Evidence: []hang.Evidence{stackOf(0, "main")}}, fail
	}}})
	require.Nil(t, p.stacksOf(t.Context(), "run", hang.Picture{}))
	for range 3 {
		require.NotNil(t, p.stacksOf(t.Context(), "run", hang.Picture{Collection: 1}))
	}
	require.Equal(t, 1, asked)
	fail = errors.New("gone")
	require.NotNil(t, p.stacksOf(t.Context(), "run", hang.Picture{Collection: 2}), "the older ones")
	fail = nil
	p.stacksOf(t.Context(), "run", hang.Picture{Collection: 2})
	require.Equal(t, 3, asked)
	for i := range 2 * maxMerged {
		p.stacksOf(t.Context(), fmt.Sprint(i), hang.Picture{Collection: 1})
		require.LessOrEqual(t, len(p.merged.all), maxMerged)
	}
}

func TestStacksAreCollectedOnThePage(t *testing.T) {
	s := newServed(t, secret)
	s.join("job", "n0", "n1")
	auth := []string{"Authorization", "Bearer " + secret, orderHeader, "1"}
	resp, body := s.do(http.MethodPost, "/ui/runs/job/orders", `{"kind":"stacks"}`, auth...)
	require.Equal(t, http.StatusConflict, resp.StatusCode, "no node has reported anything")
	require.Contains(t, body, "job")
	resp, _ = s.do(http.MethodGet, "/ui/runs/job/check", "", auth...)
	require.Equal(t, http.StatusNotFound, resp.StatusCode, "it makes no check")
	_, body = s.do(http.MethodGet, "/ui/runs/job", "", auth...)
	require.NotContains(t, body, "/check")
	require.NoError(t, s.service.Hub.Join(t.Context(), "checked", rendezvous.Join{
		Node:   rendezvous.Node{ID: "a", Name: "a", Rank: -1, Slots: 1, Addr: "127.0.0.1"},
		Params: rendezvous.Params{Min: 2, Max: 2, Check: "network"}}))
	_, body = s.do(http.MethodGet, "/ui/runs/checked", "", auth...)
	require.Contains(t, body, `<a href="/ui/runs/checked/check">`)
}
