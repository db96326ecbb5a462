package marks

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/internal/app/nodehealth"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/job"
	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// job is a run on a service with a Manager.
type aJob struct {
	t     *testing.T
	k     *Manager
	s     *service.Service
	dir   string
	notes told
}

// inJob runs f with a run of nodes on the machines m0, m1 ...; n0 and so on are their names.
func inJob(t *testing.T, size int, f func(*aJob)) {
	synctest.Test(t, func(t *testing.T) {
		j := &aJob{t: t, dir: t.TempDir()}
		cfg := in(t, j.dir)
		cfg.Annotate = func(run string, event job.Event, node, text string) {
			j.notes.annotate(run, event, node, text)
			_ = j.s.Hub.Annotate(run, event, node, text)
		}
		j.k = open(t, cfg)
		var err error
		j.s, err = service.New(service.Config{Log: quiet(), Observe: j.k.Hear, Cleared: j.k.Cleared})
		require.NoError(t, err)
		j.k.Follow(j.s)
		for i := range size {
			j.join("n"+string(rune('0'+i)), size)
		}
		j.settle()
		f(j)
		require.NoError(t, j.k.Close())
		j.s.Close(0)
	})
}

var network = []string{"host", "network"}

func (j *aJob) settle() {
	time.Sleep(2 * time.Second)
	synctest.Wait()
}

func (j *aJob) join(name string, size int) {
	j.t.Helper()
	require.NoError(j.t, j.s.Hub.Join(j.t.Context(), "r", rendezvous.Join{
		Node: rendezvous.Node{ID: name, Name: name, Machine: "m" + name[1:], Rank: -1, Slots: 1, Addr: "10.0.0.1",
			Can: []rendezvous.Ability{rendezvous.CanGate}},
		Params: rendezvous.Params{Min: 1, Max: size, MaxRestarts: 100, Gate: true},
	}))
}

func (j *aJob) report(ev rendezvous.Event) {
	j.t.Helper()
	require.NoError(j.t, j.s.Hub.Report(j.t.Context(), "r", ev))
}

func TestABarredNodeIsMarkedAndACheckThatPassesClearsIt(t *testing.T) {
	inJob(t, 3, func(j *aJob) {
		j.report(rendezvous.Barred{ID: "n1", Reason: "its link is slow", Aspect: "network"})
		require.Empty(t, names(j.k), "findings are collected")
		j.settle()
		require.Equal(t, []string{"m1"}, names(j.k))
		m := j.k.List().Nodes[0].Mark
		require.Equal(t, nodehealth.CheckFailed, m.Kind)
		require.Equal(t, "its link is slow", m.Evidence)
		require.Equal(t, []string{"r: node-marked m1"}, j.notes.take())
		es, err := j.s.Hub.Events(t.Context(), "r", 0)
		require.NoError(t, err)
		require.Equal(t, job.EventNodeMarked, es.Events[len(es.Events)-1].Event)

		for name, ev := range map[string]rendezvous.Cleared{
			"alone":          {ID: "n1", Until: time.Now().Add(-time.Second), Covered: network},
			"unchecked":      {ID: "n1", Unchecked: true},
			"another node":   {ID: "n0", Covered: network},
			"another aspect": {ID: "n1", Covered: []string{"health", "devices"}},
		} {
			j.report(ev)
			j.settle()
			require.Equal(t, []string{"m1"}, names(j.k), name)
		}
		j.report(rendezvous.Cleared{ID: "n1", Until: time.Now().Add(time.Hour), Covered: network})
		j.settle()
		require.Empty(t, names(j.k))
		require.Equal(t, []string{"r: node-unmarked m1"}, j.notes.take())
	})
}

// Two checks that pass one after the other count both, also when they are heard of together.
func TestChecksThatPassTogetherCountTogether(t *testing.T) {
	inJob(t, 3, func(j *aJob) {
		j.report(rendezvous.Barred{ID: "n1", Reason: "its link is slow", Aspect: "network"})
		j.settle()
		require.Equal(t, []string{"m1"}, names(j.k))
		j.report(rendezvous.Cleared{ID: "n1", Covered: network})
		j.report(rendezvous.Cleared{ID: "n1", Covered: []string{"devices"}})
		j.settle()
		require.Empty(t, names(j.k))
	})
}

// As the launchers of dlrover-run --check-only do.
func TestACheckThatPassesCountsThoughTheNodeLeavesAtOnce(t *testing.T) {
	inJob(t, 3, func(j *aJob) {
		j.report(rendezvous.Barred{ID: "n1", Reason: "its link is slow", Aspect: "network"})
		j.settle()
		require.Equal(t, []string{"m1"}, names(j.k))
		j.report(rendezvous.Cleared{ID: "n1", Covered: network})
		_, err := j.s.Hub.Leave(t.Context(), "r", rendezvous.Leave{ID: "n1"})
		require.NoError(t, err)
		j.settle()
		require.Empty(t, names(j.k))
	})
}

// What launchers find in their workers' output is kept, and marks where it tells of broken hardware.
func TestFindingsOfLogRules(t *testing.T) {
	inJob(t, 3, func(j *aJob) {
		find := func(id, text string) {
			require.NoError(t, j.s.Found("r", service.Finding{ID: id, Text: text}))
		}
		for i := range 5 {
			find("n0", fmt.Sprintf("rank 0: log rule loss: nan is no number in \"step %d loss=nan\"", i))
		}
		find("n1", `rank 1: log rule gpu: it says "NVRM: Xid (PCI:0000:3b:00): 79, pid=7"`)
		j.report(rendezvous.Cleared{ID: "n0"})
		j.settle()
		require.Equal(t, []string{"m1"}, names(j.k))
		list := j.k.List().Nodes
		require.Equal(t, nodehealth.LogRule, list[0].Findings[0].Kind)
		require.Nil(t, list[0].Mark)
		m := list[1].Mark
		require.Equal(t, nodehealth.Xid, m.Kind)
		require.Equal(t, `rank 1: log rule gpu: it says "NVRM: Xid (PCI:0000:3b:00): 79, pid=7"`, m.Evidence)
		find("n2", "uncorrectable ECC error encountered")
		j.settle()
		require.Equal(t, nodehealth.ECC, j.k.List().Nodes[2].Mark.Kind)
	})
}

// A node that is slow for one job is not marked, however often it is found; three jobs' findings mark it.
func TestRanksThatSlowTheJob(t *testing.T) {
	inJob(t, 3, func(j *aJob) {
		find := func(run string) {
			for i := range 4 {
				text := fmt.Sprintf("rank 1 (node 1 n1) slows the job: 1.%dx since 14:02:11, computing, 23 %% of every step", i)
				if run == "r" {
					require.NoError(j.t, j.s.Hub.Annotate(run, job.EventSlowFound, "n1", text))
				} else {
					j.k.Place(run, "pod-"+run, "m1")
					j.k.Hear(run, rendezvous.Note{Event: job.EventSlowFound, Node: "pod-" + run, Text: text})
				}
				j.settle()
			}
		}
		find("r")
		require.NoError(j.t, j.s.Hub.Annotate("r", job.EventSlowOver, "n1", "rank 1 slows the job no more"))
		find("s")
		require.Empty(t, names(j.k))
		list := j.k.List().Nodes
		require.Len(t, list, 1)
		require.Len(t, list[0].Findings, 2, "one of each run")
		require.Equal(t, nodehealth.Slow, list[0].Findings[0].Kind)
		require.Contains(t, list[0].Findings[0].Text, "1.3x", "the newest")
		require.NoError(t, j.s.Hub.Annotate("r", job.EventSlowChecked, "n1", "rank 1 (node 1 n1): GPU 3 is hot"))
		j.settle()
		require.Len(t, j.k.List().Nodes[0].Findings, 2, "the cause is no further finding")
		require.Contains(t, j.k.List().Nodes[0].Findings[0].Text+j.k.List().Nodes[0].Findings[1].Text, "GPU 3 is hot")

		find("t")
		require.Equal(t, []string{"m1"}, names(j.k))
		require.Equal(t, "3 findings of the last days, the newest slow", j.k.List().Nodes[0].Mark.Reason)
	})
}

func TestMarksExpireInTheDaemon(t *testing.T) {
	inJob(t, 3, func(j *aJob) {
		j.report(rendezvous.Barred{ID: "n1", Reason: "slow"})
		j.settle()
		require.Equal(t, []string{"m1"}, names(j.k))
		time.Sleep(4 * time.Hour)
		synctest.Wait()
		require.Empty(t, names(j.k))
	})
}

// The daemon ends before what was heard has settled, with the service or after it.
func TestWhatWasHeardLastOutlivesTheDaemon(t *testing.T) {
	for _, closed := range []bool{false, true} {
		inJob(t, 3, func(j *aJob) {
			j.report(rendezvous.Barred{ID: "n1", Reason: "its link is slow", Aspect: "network"})
			if closed {
				j.s.Close(0)
			}
			require.Empty(t, names(j.k))
			require.NoError(t, j.k.Close())
			k := open(j.t, in(j.t, j.dir))
			require.Equal(t, []string{"m1"}, names(k))
			require.NoError(t, k.Close())
		})
	}
}

// Nodes whose launchers leave at once after a check that all have failed.
func TestAMassVerdictIsSeenToBeOne(t *testing.T) {
	inJob(t, 4, func(j *aJob) {
		for _, n := range []string{"n0", "n1", "n2"} {
			j.report(rendezvous.Barred{ID: n, Reason: "the switch is gone"})
			_, err := j.s.Hub.Leave(t.Context(), "r", rendezvous.Leave{ID: n})
			require.NoError(t, err)
		}
		j.settle()
		require.Empty(t, names(j.k))
		require.Equal(t, []string{"r: node-mark-held m0", "r: node-mark-held m1", "r: node-mark-held m2"}, j.notes.take())
	})
}

func TestUnkillableWorkers(t *testing.T) {
	inJob(t, 3, func(j *aJob) {
		order := func(node string, cause job.CauseKind) {
			require.NoError(t, j.s.Hub.Order("r", rendezvous.Order{Kind: rendezvous.OrderBar, Node: node, Cause: cause,
				Text: "stop the workers: 42 survived SIGKILL"}))
			j.settle()
		}
		order("n0", job.CauseOperator)
		require.Empty(t, names(j.k), "an operator's bar is of this run alone")
		order("n1", job.CauseHang)
		require.Equal(t, []string{"m1"}, names(j.k))
		require.Equal(t, nodehealth.Unkillable, j.k.List().Nodes[0].Mark.Kind)
	})
}

// fail has a worker of the node fail in the world that runs, and starts the next one.
func (j *aJob) fail(name string, rank int, output string) {
	j.t.Helper()
	all := []string{"n0", "n1", "n2"}
	for _, n := range all {
		if err := j.s.Hub.Report(j.t.Context(), "r", rendezvous.Cleared{ID: n}); err != nil {
			require.ErrorIs(j.t, err, rendezvous.ErrUnknownNode)
		}
	}
	j.settle()
	var id job.EpochID
	for _, n := range all {
		d, err := j.s.Hub.Watch(j.t.Context(), "r", n, api.Cursor{})
		require.NoError(j.t, err)
		if d.Kind == job.Lead {
			j.report(rendezvous.Ready{ID: n, EpochID: d.EpochID, Addr: "10.0.0.1", Port: 1})
		}
		id = d.EpochID
	}
	f := verdict.Failure{NodeName: name, Rank: rank, Node: rank, PID: 42, ExitCode: 1, At: time.Now(), LastLines: output}
	failing := rendezvous.Failing{ID: name, EpochID: id, Decision: rendezvous.RestartCharged,
		Failures: verdict.Pack([]verdict.Failure{f})}
	j.report(failing)
	for _, n := range all {
		e := rendezvous.Join{Stopped: id, Node: rendezvous.Node{ID: n, Name: n, Machine: "m" + n[1:], Rank: -1, Slots: 1,
			Addr: "10.0.0.1", Can: []rendezvous.Ability{rendezvous.CanGate}},
			Params: rendezvous.Params{Min: 1, Max: 3, MaxRestarts: 100, Gate: true}}
		require.NoError(j.t, j.s.Hub.Join(j.t.Context(), "r", e))
	}
	j.settle()
}

func TestTheEndsOfEpochsAreJudged(t *testing.T) {
	inJob(t, 3, func(j *aJob) {
		j.fail("n1", 1, "RuntimeError: shape mismatch")
		require.Empty(t, j.k.List().Nodes)
		j.fail("n1", 1, "RuntimeError: CUDA error: unspecified launch failure")
		list := j.k.List().Nodes
		require.Len(t, list, 1)
		require.Equal(t, "m1", list[0].Name)
		require.Equal(t, nodehealth.Device, list[0].Findings[0].Kind)
		require.False(t, j.k.Suspect("m1"))
		j.fail("n1", 1, "RuntimeError: shape mismatch")
		require.True(t, j.k.Suspect("m1"))
		require.Empty(t, names(j.k))
		j.fail("n2", 2, "RuntimeError: CUDA error: uncorrectable ECC error encountered")
		require.Equal(t, []string{"m2"}, names(j.k))
	})
}

func TestRunsThatAreOverAreForgotten(t *testing.T) {
	inJob(t, 3, func(j *aJob) {
		require.Equal(t, []string{"r"}, j.k.registry.RunsOf("m1"))
		for _, n := range []string{"n0", "n1", "n2"} {
			_, err := j.s.Hub.Leave(t.Context(), "r", rendezvous.Leave{ID: n})
			require.NoError(t, err)
		}
		j.settle()
		require.Empty(t, j.k.registry.RunsOf("m1"))
	})
}

func TestWhomTheEndOfAnEpochBlames(t *testing.T) {
	one := 1
	lost := func(silent bool) rendezvous.EpochEvidence {
		e := job.Evidence{Losses: []job.Loss{{Node: "n1", Silent: silent}}}
		return rendezvous.EpochEvidence{Evidence: e}
	}
	hung := func(c hang.Confidence) service.Verdict {
		return service.Verdict{Rule: verdict.WasHung, RootNode: "n1", Line: "hung", Hang: &hang.Verdict{Confidence: c,
			Line: "n1 and n2 hung", Suspects: []hang.Suspect{{Node: "n1"}, {Node: "n1"}, {Node: "n2"}}}}
	}
	worker := func(c verdict.Class) service.Verdict {
		return service.Verdict{Rule: verdict.FirstExit, Class: c, RootRank: &one, RootNode: "n1", Line: "exit code 1"}
	}
	for name, c := range map[string]struct {
		e    rendezvous.EpochEvidence
		v    service.Verdict
		want map[string][]nodehealth.Kind // findings after three ends like it
	}{
		"a silent loss": {lost(true), service.Verdict{Rule: verdict.NodeLost, RootNode: "n1", Line: "silent"},
			map[string][]nodehealth.Kind{"m1": {nodehealth.Repeated, nodehealth.Silent}}},
		"a good-bye": {lost(false), service.Verdict{Rule: verdict.NodeLost, RootNode: "n1"}, map[string][]nodehealth.Kind{}},
		"a hang": {v: hung(hang.High),
			want: map[string][]nodehealth.Kind{"m1": {nodehealth.Repeated, nodehealth.Hang}, "n2": {nodehealth.Hang}}},
		"perhaps a hang":       {v: hung(hang.Low), want: map[string][]nodehealth.Kind{}},
		"a hang, as was heard": {v: service.Verdict{Rule: verdict.WasHung}, want: map[string][]nodehealth.Kind{}},
		"a worker": {v: worker(verdict.Segfault),
			want: map[string][]nodehealth.Kind{"m1": {nodehealth.Repeated}}},
		"the command line": {v: worker(verdict.UsageError), want: map[string][]nodehealth.Kind{}},
		"nobody":           {v: service.Verdict{Rule: verdict.NoCause}, want: map[string][]nodehealth.Kind{}},
	} {
		t.Run(name, func(t *testing.T) {
			k := open(t, Config{})
			l := &listener{mgr: k}
			for range 3 {
				l.blame("r", &known{machines: map[string]string{"n1": "m1"}}, c.e, c.v)
			}
			got := map[string][]nodehealth.Kind{}
			for _, n := range k.List().Nodes {
				for _, f := range n.Findings {
					got[n.Name] = append(got[n.Name], f.Kind)
				}
			}
			require.Equal(t, c.want, got)
			require.NoError(t, k.Close())
		})
	}
}

// The node that is to blame is asked about by its name, and its machine has the finding. Only the program is to blame
// for a wrong command line.
func TestDevicesOfWhomTheEndOfAnEpochBlames(t *testing.T) {
	var asked []string
	k := open(t, Config{Devices: func(_ context.Context, node string) []string {
		asked = append(asked, node)
		return []string{"GPU-7 is Unhealthy"}
	}})
	one, l := 1, &listener{mgr: k}
	for _, class := range []verdict.Class{verdict.UsageError, verdict.Segfault} {
		l.blame("r", &known{machines: map[string]string{"n1": "m1"}}, rendezvous.EpochEvidence{},
			service.Verdict{Rule: verdict.FirstExit, Class: class, RootRank: &one, RootNode: "n1", Line: "exit code 1"})
	}
	require.NoError(t, k.Close())
	require.Equal(t, []string{"n1"}, asked)
	nodes := k.List().Nodes
	require.Len(t, nodes, 1)
	require.Equal(t, "m1", nodes[0].Name)
	require.Equal(t, []string{"GPU-7 is Unhealthy"}, []string{nodes[0].Findings[0].Text})
}

// The ends of epochs that an earlier leader has kept with their run count once.
func TestEpochsOfAnEarlierLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := open(t, Config{})
		s, err := service.New(service.Config{Log: quiet(), Observe: k.Hear})
		require.NoError(t, err)
		e := rendezvous.EpochEvidence{EpochID: job.EpochID{Term: 1, Round: 1},
			Evidence: job.Evidence{Losses: []job.Loss{{Node: "n1", Silent: true}}}}
		require.NoError(t, s.Hub.Restore("r", api.KeptRun{Line: api.KeptLine{Base: 1, Proofs: []api.Proof{
			{N: 1, At: time.Now(), EpochEvidence: e}}}}))
		k.Follow(s)
		j := &aJob{t: t, k: k, s: s}
		j.join("n0", 2)
		j.settle()
		require.Empty(t, k.List().Nodes)
		require.NoError(t, k.Close())
		s.Close(0)
	})
}
