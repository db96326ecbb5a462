package ctl

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// suspected is a run of one node whose two workers make no progress.
func (d *served) suspected(run, id string) {
	d.t.Helper()
	d.join(run, id, 1)
	e := d.start(run, id)
	_, err := d.hangs.Post(d.t.Context(), run, hang.Report{
		ID: id, Epoch: e, Suspicions: []hang.Suspicion{
			{Rank: 1, Age: 12 * time.Second, Limit: 10 * time.Second, Why: "no step \x1b[2J", Starved: 2 * time.Second},
		},
		Summary: &hang.Summary{Slow: "rank 1 is behind in 40 % of the steps"},
	})
	require.NoError(d.t, err)
}

func TestHang(t *testing.T) {
	d := newServed(t)
	d.suspected("job", "gpu-01")
	out := d.ok("hang", "job")
	for _, line := range []string{
		`run +job`, `action +report only`, `state +evidence is being collected: 0 of 1 nodes have answered`,
		`epoch +round 1, epoch 0`, `suspected +[0-2]s ago; nodes that suspect it now: 1`, `last progress +1[0-2]s ago`,
		`no answer +nodes 0`,
		`slow +node 0 gpu-01: rank 1 is behind in 40 % of the steps`,
		`RANK +NODE +NO PROGRESS FOR +NORMAL +WHY`,
		`1 +gpu-01 +1[2-4]s +up to 10s +no step +\[2J \(its observer did not run for 2s\)`,
	} {
		require.Regexp(t, `(?m)^`+line+`$`, out)
	}
	var p hang.Picture
	require.NoError(t, json.Unmarshal([]byte(d.ok("hang", "job", "--json")), &p))
	require.Equal(t, hang.StateAsking, p.State)
	require.NotContains(t, d.ok("hang", "job", "--json"), `"id"`, "the ID is what proves who a launcher is")
}

func TestHangThatIsJudged(t *testing.T) {
	told := hang.Told{
		Epoch: job.EpochID{Round: 1}, Action: hang.ActRestart, Verdict: hang.Verdict{
			Kind: hang.KindBehind, Confidence: hang.High, Waiting: "0,2-3", In: "all_reduce #246", NoData: "7",
			Line: "rank 1 hung",
			Suspects: []hang.Suspect{{Rank: 1, Node: "n0", PID: 77, Doing: "asleep", Where: hang.Frame{Func: "load",
				File: "data.py", Line: 12}}},
		},
	}
	for range 20 {
		told.Verdict.Suspects = append(told.Verdict.Suspects, hang.Suspect{Rank: 9, Doing: "stopped"})
	}
	withdrawn := hang.Told{Withdrawn: true, Verdict: hang.Verdict{Line: "older"}}
	out := &output{written: make(chan struct{})}
	decided := hang.Told{Decided: true, Action: hang.ActReport}
	listVerdicts(out, []hang.Told{withdrawn, decided, told})
	for _, line := range []string{
		`.*, round 1, epoch 0: rank 1 hung`, `  kind +behind, confidence high`, `  action +restart`,
		`  action +report; it counts as a hang`,
		`  suspect +rank 1, node 0 n0, pid 77: asleep in load at data.py:12`, ` +and 5 more`,
		`  waiting +ranks 0,2-3 in all_reduce #246`, `  no data +ranks 7`,
		`  action +withdrawn: the workers made progress later`,
	} {
		require.Regexp(t, `(?m)^`+line+`$`, out.String())
	}
}

// The verdict of an epoch that was ended for a hang is that of the hang.
func TestVerdictOfAHang(t *testing.T) {
	d := newServed(t)
	d.suspected("job", "gpu-01")
	require.NoError(t, d.hub.Order("job", rendezvous.Order{
		Kind: rendezvous.OrderStop, Cause: job.CauseHang, Text: "rank 1 (node 0 gpu-01) hung for 22 s: asleep",
	}))
	require.Equal(t, "round 1, epoch 0: rank 1 (node 0 gpu-01) hung for 22 s: asleep; class hang; restarts used 0 of 3\n",
		d.ok("verdict", "job"))
	require.Contains(t, d.ok("verdict", "job", "--json"), `"rule":"hang"`)
}

func TestHangErrors(t *testing.T) {
	d := newServed(t)
	d.fails(1, `keeps no run "jib"; it keeps none`, "hang", "jib")
	d.join("job", "n0", 2)
	d.fails(1, `nothing is known of hangs of run "job"`, "hang", "job")
	d.fails(2, "hang takes RUN, but was given nothing", "hang")
	d.fails(2, "hang: unknown option --svg", "hang", "job", "--svg")
}
