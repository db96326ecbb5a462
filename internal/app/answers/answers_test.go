package answers

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/hang"
	"dlrover-run/internal/app/describe"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

var now = time.Unix(1700000000, 0)

// training are the Facts of a run of two nodes that trains.
func training() Facts {
	return Facts{Now: now, Run: api.RunStatus{Run: "job",
		Status: rendezvous.Status{Phase: "running", Round: 1, WorldSize: 4, Members: 2,
			Params: rendezvous.Params{Min: 2, Max: 2, MaxRestarts: 3}},
		Nodes: []rendezvous.NodeStatus{{Name: "gpu-01", State: "member", Slots: 2}, {Name: "gpu-02", State: "member",
			GroupRank: 1, Slots: 2}}},
		Events: []api.Event{{Seq: 1, At: now.Add(-time.Hour), Note: rendezvous.Note{Event: job.EventRun}}}}
}

// said is the text of the answer with the ID.
func said(t *testing.T, all []Answer, id string) string {
	t.Helper()
	for _, a := range all {
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
		harm func(*Facts)
		Tone Tone
		want map[string]string
	}{
		{"none", func(*Facts) {}, Good, map[string]string{
			"moving": "Yes: 4 workers run, since 1h0m.", "waits": "For nobody.", "why": "Nothing has failed.",
			"next": "Nothing.",
			"risk": "Unknown: no checkpoints are saved through checkpointd.\n0.0667 worker-hours a minute."}},
		{"a hung rank", func(f *Facts) {
			f.Hang = hang.Picture{Spec: "action=restart", State: hang.StateWaiting, Since: now.Add(-20 * time.Second),
				Verdict: hang.Verdict{Deadline: 30 * time.Second, Line: "rank 3 (node 1 gpu-02) hung for 20 s",
					Suspects: []hang.Suspect{{Rank: 3, Node: "gpu-02", Doing: "asleep"}}}}
		}, Bad, map[string]string{
			"moving": "No step for 20s, although 4 workers run.", "waits": "Rank 3 on gpu-02: asleep.",
			"why":  "rank 3 (node 1 gpu-02) hung for 20 s",
			"next": "\nthe workers are started anew, unless there is a step 10s"}},
		{"none, and steps are counted", func(f *Facts) {
			f.Hang.Pace = &hang.Pace{Epoch: job.EpochID{Term: 5, Round: 1}, Steps: 1204, StepTime: 312345 * time.Microsecond}
		}, Good, map[string]string{"moving": "Yes: 4 workers run, since 1h0m.\n" +
			"At least 1204 steps since the start of the workers; a usual one takes 0.312 s."}},
		{"none, and earlier workers had steps", func(f *Facts) {
			f.Hang.Pace = &hang.Pace{Epoch: job.EpochID{Round: 1, Epoch: 4}, Steps: 1204}
		}, Good, map[string]string{"moving": "Yes: 4 workers run, since 1h0m."}},
		{"a missing node", func(f *Facts) {
			f.Run.Phase, f.Run.Members, f.Run.Waiting, f.Run.Nodes = "forming", 0, 1, f.Run.Nodes[:1]
			f.Run.Cause = &job.Cause{Kind: job.CauseLoss, Text: "node 1 (gpu-02) is gone: its launcher was killed"}
			f.Run.Waits = []string{"1 of 2 nodes", "gpu-02 (node 1), gone 40s ago: its launcher was killed"}
			f.Run.Due = []rendezvous.Due{{At: now.Add(time.Minute), Text: "the run fails, unless enough nodes are there"}}
		}, Waits, map[string]string{
			"moving": "No: waiting for nodes.",
			"waits":  "For 1 of 2 nodes.\nFor gpu-02 (node 1), gone 40s ago: its launcher was killed.",
			"why":    "node 1 (gpu-02) is gone: its launcher was killed",
			"next":   "\nthe run fails, unless enough nodes are there 1m0s"}},
		{"a full disk", func(f *Facts) {
			f.Saved = &describe.Checkpoint{MemoryStep: 40, MemoryAt: now.Add(-time.Second), DiskStep: 10,
				DiskAt: now.Add(-time.Hour)}
			f.Unsaved = "The save of step 40 has failed: /ckpt: no space left on device."
		}, Good, map[string]string{
			"risk": "The steps since the newest checkpoint: step 40 in memory, 1s old; step 10 on disk, 1h0m old.\n" +
				"The save of step 40 has failed: /ckpt: no space left on device.\n0.0667 worker-hours a minute."}},
		{"a crash loop", func(f *Facts) {
			f.Run.Phase, f.Run.Restarts = "forming", 3
			f.Run.Budget = &rendezvous.BudgetStatus{Streak: 3, Limit: 5, BackoffUntil: now.Add(8 * time.Second)}
			f.Verdict = &service.Verdict{Round: 1, Epoch: 3, Line: "rank 1 failed first: KeyError: 'lr'"}
		}, Bad, map[string]string{
			"moving": "It fails again and again: 3 restarts in a row without progress.\nNo: waiting for nodes.\n" +
				"Restarts: 3 of 3.",
			"why":  "Round 1, epoch 3: rank 1 failed first: KeyError: 'lr'",
			"next": "Budget: 3 of 5 restarts in a row without progress; the next start is in 8s."}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := training()
			c.harm(&f)
			all := f.All()
			require.Equal(t, c.Tone, all[0].Tone)
			for id, want := range c.want {
				require.Equal(t, want, said(t, all, id), id)
			}
		})
	}
}

// A run that has failed says why it is not started once more, besides what has failed first.
func TestTheEndIsExplained(t *testing.T) {
	f := training()
	f.Run.Phase, f.Run.Outcome = "finished", string(job.Failed)
	f.Run.Cause = &job.Cause{Text: "workers have failed 5 times in a row before their first step"}
	f.Run.Budget = &rendezvous.BudgetStatus{Streak: 4}
	f.Verdict = &service.Verdict{Round: 1, Epoch: 4, Line: "rank 1 failed first: KeyError: 'lr'"}
	all := f.All()
	require.Equal(t, "The run has failed, "+describe.Age(now.Sub(f.Run.EndedAt))+" ago.", said(t, all, "moving"))
	require.Equal(t, f.Run.Cause.Text+"\nRound 1, epoch 4: rank 1 failed first: KeyError: 'lr'", said(t, all, "why"))
}

// A node whose storage is full is named by the ages that it reports.
func TestFullStorageIsNamed(t *testing.T) {
	f := training()
	f.Keep(coordinator.Summary{Ages: []coordinator.Age{{Rank: 1}, {Rank: 2, Trouble: "storage is full: /ckpt"}}})
	require.Contains(t, said(t, f.All(), "risk"), "No save gets to disk from gpu-02 (rank 2): storage is full: /ckpt.")
	f.Run.Nodes = f.Run.Nodes[:1]
	require.Equal(t, "a node that has left", f.home(2))
}

func TestSlowNodesAreNamed(t *testing.T) {
	f := training()
	const slow = `{"slow":[{"group_rank":1,"node":"gpu-02","text":"rank 3 is 40 % late"}]}`
	require.NoError(t, json.Unmarshal([]byte(slow), &f.Hang))
	all := f.All()
	require.Equal(t, Waits, all[0].Tone)
	require.Contains(t, said(t, all, "moving"), "Node 1 (gpu-02) is slow: rank 3 is 40 % late.")

	const slowed = `{"slowed":[{"group_rank":1,"node":"gpu-02","ranks":"2-3","all":true,"share":0.2,` +
		`"doing":"computing"}],` +
		`"slow":[{"node":"gpu-01","text":"steps of 1s until 12:03:00, 1.25s since"}]}`
	require.NoError(t, json.Unmarshal([]byte(slowed), &f.Hang))
	const want = `(?m)^Ranks 2-3 \(all of node 1 gpu-02\) slow the job: 1\.2x since .*, computing, 20 % of every step\.$`
	require.Regexp(t, want, said(t, f.All(), "moving"))
	require.Equal(t, map[string]bool{"gpu-02": true}, f.SlowNodes(), "the others wait for it")

	checked := func(name, text string) api.Event {
		n := rendezvous.Note{Event: job.EventCheckVerdict, Node: name, Text: text}
		return api.Event{At: now.Add(-time.Minute), Note: n}
	}
	f = training()
	f.Events = append(f.Events, checked("gpu-01", "slow: eth0 sends 19 Mbit/s"), checked("gone", "slow: it was"),
		checked("gpu-02", "slow: it was"), checked("gpu-02", "path: it is not"))
	all = f.All()
	require.Equal(t, Waits, all[0].Tone)
	require.Equal(t, "Yes: 4 workers run, since 1h0m.\nNode gpu-01 is slow, by its check 1m0s ago: eth0 sends 19 Mbit/s.",
		said(t, all, "moving"))
}

func TestWhatCanBePressed(t *testing.T) {
	kinds := func(f Facts) (ks []string) {
		for _, p := range f.Presses() {
			require.True(t, Pressable(p.Kind))
			require.NotEmpty(t, p.Cost)
			ks = append(ks, string(p.Kind))
		}
		return ks
	}
	f := training()
	require.Equal(t, []string{"restart", "pause", "drain", "bar"}, kinds(f))
	f.Run.Bars = map[string]job.Cause{"gpu-02": {}}
	f.Run.Paused = &job.Cause{}
	require.Equal(t, []string{"resume", "drain", "bar", "unbar"}, kinds(f))
	f.Run.Outcome = "failed"
	require.Empty(t, kinds(f))
}
