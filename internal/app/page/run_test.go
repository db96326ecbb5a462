package page

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/internal/app/describe"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

var now = time.Unix(1700000000, 0)

// training are the facts of a run of two nodes that trains.
func training() facts {
	return facts{now: now, run: api.RunStatus{Run: "job",
		Status: rendezvous.Status{Phase: "running", Round: 1, WorldSize: 4, Members: 2,
			Params: rendezvous.Params{Min: 2, Max: 2, MaxRestarts: 3}},
		Nodes: []rendezvous.NodeStatus{{Name: "gpu-01", State: "member", Slots: 2}, {Name: "gpu-02", State: "member",
			GroupRank: 1, Slots: 2}}},
		events: []api.Event{{Seq: 1, At: now.Add(-time.Hour), Note: rendezvous.Note{Event: job.EventRun}}}}
}

// said is the text of the answer with the ID.
func said(t *testing.T, v view, id string) string {
	t.Helper()
	for _, a := range v.Answers {
		if a.ID != id {
			continue
		}
		text := strings.Join(a.Lines, "\n")
		for _, d := range a.Due {
			text += "\n" + d.Text + " " + d.At.Sub(now).String()
		}
		return text
	}
	t.Fatalf("no answer %s", id)
	return ""
}

// The culprit of each fault is named on the page alone.
func TestFaultsAreNamed(t *testing.T) {
	for _, c := range []struct {
		name string
		harm func(*facts)
		tone tone
		want map[string]string
	}{
		{"none", func(*facts) {}, good, map[string]string{
			"moving": "Yes: 4 workers run, since 1h0m.", "waits": "For nobody.", "why": "Nothing has failed.",
			"next": "Nothing.",
			"risk": "Unknown: no checkpoints are saved through checkpointd.\n0.0667 worker-hours a minute."}},
		{"a hung rank", func(f *facts) {
			f.hang = hang.Picture{Spec: "action=restart", State: hang.StateWaiting, Since: now.Add(-20 * time.Second),
				Verdict: hang.Verdict{Deadline: 30 * time.Second, Line: "rank 3 (node 1 gpu-02) hung for 20 s",
					Suspects: []hang.Suspect{{Rank: 3, Node: "gpu-02", Doing: "asleep"}}}}
		}, bad, map[string]string{
			"moving": "No step for 20s, although 4 workers run.", "waits": "Rank 3 on gpu-02: asleep.",
			"why":  "rank 3 (node 1 gpu-02) hung for 20 s",
			"next": "\nthe workers are started anew, unless there is a step 10s"}},
		{"a missing node", func(f *facts) {
			f.run.Phase, f.run.Members, f.run.Waiting, f.run.Nodes = "forming", 0, 1, f.run.Nodes[:1]
			f.run.Cause = &job.Cause{Kind: job.CauseLoss, Text: "node 1 (gpu-02) is gone: its launcher was killed"}
			f.run.Waits = []string{"1 of 2 nodes", "gpu-02 (node 1), gone 40s ago: its launcher was killed"}
			f.run.Due = []rendezvous.Due{{At: now.Add(time.Minute), Text: "the run fails, unless enough nodes are there"}}
		}, waits, map[string]string{
			"moving": "No: waiting for nodes.",
			"waits":  "For 1 of 2 nodes.\nFor gpu-02 (node 1), gone 40s ago: its launcher was killed.",
			"why":    "node 1 (gpu-02) is gone: its launcher was killed",
			"next":   "\nthe run fails, unless enough nodes are there 1m0s"}},
		{"a full disk", func(f *facts) {
			f.saved = &describe.Checkpoint{MemoryStep: 40, MemoryAt: now.Add(-time.Second), DiskStep: 10,
				DiskAt: now.Add(-time.Hour)}
			f.unsaved = "The save of step 40 has failed: /ckpt: no space left on device."
		}, good, map[string]string{
			"risk": "The steps since the newest checkpoint: step 40 in memory, 1s old; step 10 on disk, 1h0m old.\n" +
				"The save of step 40 has failed: /ckpt: no space left on device.\n0.0667 worker-hours a minute."}},
		{"a crash loop", func(f *facts) {
			f.run.Phase, f.run.Restarts = "forming", 3
			f.run.Budget = &rendezvous.BudgetStatus{Streak: 3, Limit: 5, BackoffUntil: now.Add(8 * time.Second)}
			f.verdict = &service.Verdict{Round: 1, Epoch: 3, Line: "rank 1 failed first: KeyError: 'lr'"}
		}, waits, map[string]string{
			"moving": "No: waiting for nodes.\nRestarts: 3 of 3.",
			"why":    "Round 1, epoch 3: rank 1 failed first: KeyError: 'lr'",
			"next":   "Budget: 3 of 5 restarts in a row without progress; the next start is in 8s."}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := training()
			c.harm(&f)
			v := runView(f)
			require.Equal(t, c.tone, v.Tone)
			for id, want := range c.want {
				require.Equal(t, want, said(t, v, id), id)
			}
		})
	}
}

func TestSlowNodesAreNamed(t *testing.T) {
	f := training()
	const slow = `{"slow":[{"group_rank":1,"node":"gpu-02","text":"rank 3 is 40 % late"}]}`
	require.NoError(t, json.Unmarshal([]byte(slow), &f.hang))
	v := runView(f)
	require.Equal(t, waits, v.Tone)
	require.Contains(t, said(t, v, "moving"), "Node 1 (gpu-02) is slow: rank 3 is 40 % late.")
}

func TestRowsAreBounded(t *testing.T) {
	f := training()
	for i := range 1000 {
		f.events = append(f.events, api.Event{Seq: uint64(i + 2)})
		f.run.Nodes = append(f.run.Nodes, f.run.Nodes[0])
	}
	v := runView(f)
	require.Len(t, v.Events, maxEventRows)
	require.Equal(t, 1001-maxEventRows, v.Older)
	require.Len(t, v.Nodes, maxNodeRows)
	require.Equal(t, 1002, v.Grid.Nodes)
	require.Equal(t, 2004, v.Grid.Workers)
}

func TestWhatCanBePressed(t *testing.T) {
	kinds := func(f facts) (ks []string) {
		for _, p := range f.presses() {
			require.True(t, pressable(p.Kind))
			require.NotEmpty(t, p.Cost)
			ks = append(ks, string(p.Kind))
		}
		return ks
	}
	f := training()
	require.Equal(t, []string{"restart", "pause", "drain", "bar"}, kinds(f))
	f.run.Bars = map[string]job.Cause{"gpu-02": {}}
	f.run.Paused = &job.Cause{}
	require.Equal(t, []string{"resume", "drain", "bar", "unbar"}, kinds(f))
	f.run.Outcome = "failed"
	require.Empty(t, kinds(f))
}
