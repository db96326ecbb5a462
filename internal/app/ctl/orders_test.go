package ctl

import (
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// kind is what the run's newest directive tells a node, and cause why.
func (d *served) directive(run, id string) rendezvous.Directive {
	d.t.Helper()
	n, err := d.hub.Watch(d.t.Context(), run, id, api.Cursor{})
	require.NoError(d.t, err)
	return n.Directive
}

// stopped has the nodes do as they are told: end their workers and join again.
func (d *served) stopped(run string, e job.EpochID, ids ...string) {
	d.t.Helper()
	for _, id := range ids {
		require.Equal(d.t, job.Stop, d.directive(run, id).Kind)
		require.NoError(d.t, d.hub.Join(d.t.Context(), run, rendezvous.Join{
			Node: rendezvous.Node{
				ID: id, Name: id, Rank: -1, Addr: "10.0.0.1", Slots: 2,
				Can: []rendezvous.Ability{rendezvous.CanGate, rendezvous.CanNotice},
			},
			Params:  rendezvous.Params{Min: len(ids), Max: len(ids), MaxRestarts: 3},
			Stopped: e,
		}))
	}
}

func TestRestart(t *testing.T) {
	d := newServed(t)
	d.join("job", "n0", 2)
	d.fails(1, `run "job" has no workers that could be started anew \(it is now: waiting for nodes\)`, "restart", "job")
	d.join("job", "n1", 2)
	e := d.start("job", "n0")
	d.env["USER"] = "ann"
	require.Equal(t, "run job: its workers are stopped and started anew\n", d.ok("restart", "job", "--reason", "new data"))
	cause := d.directive("job", "n1").Cause
	require.Equal(t, job.CauseOperator, cause.Kind)
	require.Regexp(t, `^new data \(restart by dlroverctl on \S+ as ann\)$`, cause.Text)
	require.Regexp(t, `(?m)break +new data`, d.ok("events", "job"))
	d.stopped("job", e, "n0", "n1")
	require.Contains(t, d.ok("runs"), "0 of 3", "nothing is charged")

	e = d.start("job", "n0")
	require.Contains(t, d.ok("restart", "job", "--charge"), "if a restart is left")
	d.stopped("job", e, "n0", "n1")
	require.Contains(t, d.ok("runs"), "1 of 3")
}

func TestStop(t *testing.T) {
	d := newServed(t)
	d.join("job", "n0", 2)
	require.Contains(t, d.ok("stop", "job", "--reason=bad data"), "stopped; its workers and launchers end")
	require.Contains(t, d.ok("runs"), "failed: bad data (stop by dlroverctl")
	require.Contains(t, d.ok("events", "job"), "bad data")
	for _, order := range []string{"restart", "stop", "pause", "resume"} {
		d.fails(1, `run "job" has ended: `+order+` does nothing any more`, order, "job")
	}
}

func TestPauseAndResume(t *testing.T) {
	d := newServed(t)
	d.join("job", "n0", 1)
	d.fails(1, `run "job" is not paused or held: there is nothing to resume`, "resume", "job")
	e := d.start("job", "n0")
	require.Contains(t, d.ok("pause", "job"), "to go on: dlroverctl resume job")
	d.stopped("job", e, "n0")
	require.Contains(t, d.ok("status", "job"), "paused: pause by dlroverctl")
	require.Regexp(t, `(?m)^- +n0 .*waiting$`, d.ok("status", "job"), "its rank was that of the last world")
	require.Equal(t, job.Wait, d.directive("job", "n0").Kind)
	require.Equal(t, "run job: goes on\n", d.ok("resume", "job"))
	e = d.start("job", "n0")

	d.ok("pause", "job") // and nobody is left
	d.stopped("job", e, "n0")
	_, err := d.hub.Leave(t.Context(), "job", rendezvous.Leave{ID: "n0", Reason: "preempted"})
	require.NoError(t, err)
	require.Regexp(t, `(?m)^job +0 +- `, d.ok("runs"), "what it wants is not known")
	require.Regexp(t, `(?m)^nodes +0 in the world, 0 waiting$`, d.ok("status", "job"))
}

func TestBarAndUnbar(t *testing.T) {
	d := newServed(t)
	d.join("job", "n0", 2)
	out := d.ok("bar", "job", "n0")
	require.Contains(t, out, "node n0 gets no workers any more; to end it: dlroverctl unbar job n0")
	require.Contains(t, d.ok("bar", "job", "n8", "--reason=fan"), "no node of that name is here now")
	status := d.ok("status", "job")
	require.Regexp(t, `(?m)^barred +n0: bar by dlroverctl`, status)
	require.Regexp(t, `(?m)^barred +n8: fan`, status)
	require.Regexp(t, `(?m)^- +n0 .*barred: bar by dlroverctl`, status)
	d.fails(1, `run "job" does not bar node "n7"; it bars n0, n8`, "unbar", "job", "n7")
	require.Contains(t, d.ok("unbar", "job", "n0"), "node n0 may get workers again")
	d.ok("unbar", "job", "n8")
	require.Contains(t, d.ok("bar", "job", "RUN-7"), "node RUN-7 gets")
	d.ok("unbar", "job", "RUN-7")
	require.NotContains(t, d.ok("status", "job"), "barred")
}

func TestLogLevel(t *testing.T) {
	d := newServed(t)
	d.join("job", "n0", 2)
	d.join("job", "n1", 2)
	n0, err := d.hub.Watch(t.Context(), "job", "n0", api.Cursor{WithNotices: true})
	require.NoError(t, err)
	n1, err := d.hub.Watch(t.Context(), "job", "n1", api.Cursor{WithNotices: true})
	require.NoError(t, err)
	require.Equal(t, "run job: all launchers of the run are told to log from level debug on\n",
		d.ok("log-level", "job", "DEBUG"))
	require.Contains(t, d.ok("log-level", "job", "Warning", "--node", "n1"), "the launcher of node n1 is told")
	notices := func(id string, after uint64) (bodies []string) {
		n, err := d.hub.Watch(t.Context(), "job", id, api.Cursor{WithNotices: true, Notices: after})
		require.NoError(t, err)
		for _, x := range n.Notices {
			require.Equal(t, "log-level", x.Topic)
			bodies = append(bodies, x.Body)
		}
		return bodies
	}
	require.Equal(t, []string{"debug"}, notices("n0", n0.NoticeSeq))
	require.Equal(t, []string{"debug", "warn"}, notices("n1", n1.NoticeSeq))
}
