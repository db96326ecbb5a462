package run

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// hostile clears the screen, sets the title, goes back, and turns the direction of writing.
const hostile = "x\x1b[2J\x1b]0;t\a\r\x7f\u009b31m\u202egnp"

// unharmed says that nothing in shown acts on a terminal.
func unharmed(t *testing.T, shown string) {
	t.Helper()
	require.Equal(t, text.Escape(shown), shown)
}

func TestHostileNamesAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		env, opts []string
		say       string
	}{
		"run id":     {nil, []string{"--rdzv-id=" + hostile}, "run id (--rdzv-id)"},
		"no UTF-8":   {nil, []string{"--rdzv-id=a\xffb"}, `run id (--rdzv-id) "a\xffb": need UTF-8`},
		"two lines":  {nil, []string{"--rdzv-id=a\nb"}, `"a\nb"`},
		"PET":        {[]string{"PET_RDZV_ID=" + hostile}, nil, "run id (--rdzv-id)"},
		"job name":   {[]string{"ELASTIC_JOB_NAME=" + hostile}, nil, "run id (--rdzv-id)"},
		"role":       {nil, []string{"--role=" + hostile}, "--role"},
		"pod":        {[]string{"POD_NAME=" + hostile}, nil, "$POD_NAME"},
		"value":      {nil, []string{"--nproc-per-node=" + hostile}, "unsupported nproc_per_node value"},
		"option":     {nil, []string{"--" + hostile}, ""},
		"log dir":    {nil, []string{"--log-dir=/proc/" + hostile}, "--log-dir"},
		"event log":  {nil, []string{"--event-log=/proc/" + hostile}, "event log"},
		"token file": {nil, []string{"--token-file=/proc/" + hostile}, ""},
		"metrics":    {nil, []string{"--metrics-addr=" + hostile}, ""},
		"endpoint":   {nil, []string{"--rdzv-backend=c10d", "--rdzv-endpoint=" + hostile + ":x"}, ""},
		"topology file": {nil,
			[]string{"--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:1", "--topology-file=/" + hostile}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			l := b.start("dlrover-run", c.env, b.sh(`: > $DIR/started`, append([]string{"--nnodes=1"}, c.opts...)...)...)
			require.NotEqual(t, 0, l.wait(), l.err.String())
			require.Contains(t, l.err.String(), c.say)
			require.Contains(t, l.err.String(), "error: ")
			unharmed(t, l.err.String())
			require.False(t, b.exists("started")())
		})
	}
	b := newBench(t)
	l := b.run("--no-python", "/nowhere/"+hostile)
	require.Equal(t, 1, l.wait())
	unharmed(t, l.err.String())
	l = b.start("dlroverctl", nil, "checkpoints", "ls", "/nowhere/"+hostile)
	require.Equal(t, 2, l.wait())
	unharmed(t, l.err.String())
	l = b.start("dlrover-master", nil, "--"+hostile)
	require.NotEqual(t, 0, l.wait())
	unharmed(t, l.err.String())
}

// TestHostileTexts: what workers report of themselves reaches the terminals of all nodes.
func TestHostileTexts(t *testing.T) {
	b := newBench(t)
	report, err := json.Marshal(map[string]any{"message": map[string]any{"message": "ValueError: größe 训练 " + hostile,
		"extraInfo": map[string]any{
			"py_callstack": "Traceback\n\tin größe 🚀 " + hostile + "\nValueError", "timestamp": "1700000000",
		}}})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, "report"), report, 0o600))
	raw := strings.ReplaceAll(hostile, "\r", "") + "\xff\n" // lines that go back are folded for a pipe
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, "raw"), []byte(raw), 0o600))
	program := filepath.Join(b.dir, hostile+".sh")
	require.NoError(t,
		os.WriteFile(program,
			[]byte("#!/bin/sh\n[ $GROUP_RANK = 0 ] && exec sleep 60; cat $DIR/raw; "+
				"cp $DIR/report $TORCHELASTIC_ERROR_FILE; exit 1\n"), 0o700))

	args := append(b.c10d("2", "--nproc-per-node=1", "--log-dir="+filepath.Join(b.dir, hostile)),
		"--no-python", program, hostile)
	first, second := b.run(args...), b.run(args...)
	require.Equal(t, 1, first.wait())
	require.Equal(t, 1, second.wait())
	for _, l := range []*launched{first, second} {
		unharmed(t, l.err.String())
		require.Contains(t, l.err.String(), "größe 训练 x\\x1b[2J")
	}
	require.Contains(t, first.out.String()+second.out.String(), raw, "the workers' own output stays as it is")
	require.Contains(t, first.err.String()+second.err.String(),
		"  traceback : Traceback\n  \tin größe 🚀 "+text.EscapeLine(hostile)+"\n  ValueError")

	plan := b.run(append([]string{"--dry-run"}, args...)...)
	require.Equal(t, 0, plan.wait())
	unharmed(t, plan.out.String())
	var got struct{ Workers []struct{ Argv []string } }
	require.NoError(t, json.NewDecoder(strings.NewReader(plan.out.String())).Decode(&got))
	require.Equal(t, []string{program, hostile}, got.Workers[0].Argv)
}

// TestHostileNode: another node has the token, and words of its own.
func TestHostileNode(t *testing.T) {
	b := newBench(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	master, addr := b.startDaemon("127.0.0.1:0", "DLROVER_TOKEN="+testToken)
	c := api.NewClient(addr, testToken)
	defer c.Close()
	join := rendezvous.Join{
		Node: rendezvous.Node{ID: "other", Name: "other", Rank: 1, Slots: 1}, Params: rendezvous.Params{Min: 2, Max: 2},
	}
	refused := join
	refused.Node.Name = hostile
	err := c.Join(ctx, "job", refused)
	require.ErrorIs(t, err, rendezvous.ErrRefused)
	unharmed(t, err.Error())

	require.NoError(t, c.Join(ctx, "job", join))
	l := b.start("dlrover-run", []string{"DLROVER_MASTER_ADDR=" + addr, "DLROVER_TOKEN=" + testToken, "LOGLEVEL=DEBUG"},
		b.sh(`exec sleep 60`, "--nnodes=2", "--nproc-per-node=1", "--node-rank=0", "--rdzv-id=job")...)
	d := watchFor(ctx, t, c, "other", job.Run)
	require.NoError(t,
		c.Report(ctx, "job", rendezvous.Failing{ID: "other", EpochID: d.EpochID, Decision: rendezvous.Permanent,
			Failures: []job.Failure{{Rank: 1, GroupRank: 1, Text: hostile, At: time.Now()}}}))
	watchFor(ctx, t, c, "other", job.Fail)
	require.Equal(t, 1, l.wait())
	require.Contains(t, l.err.String(), text.EscapeLine(hostile))
	for _, text := range []string{
		l.err.String(), master.err.String(), string(read(t, filepath.Join(b.dir, "events.json"))),
	} {
		unharmed(t, text)
	}
}

// watchFor watches as the node of the run "job", until it is told to do what is asked for.
func watchFor(
	ctx context.Context, t *testing.T, c *api.Client, node string, kind job.Kind,
) (d rendezvous.Directive) {
	t.Helper()
	for d.Kind != kind {
		n, err := c.Watch(ctx, "job", node, api.Cursor{Directive: d.Seq})
		if !errors.Is(err, api.ErrNothingNew) {
			require.NoError(t, err)
			d = n.Directive
		}
	}
	return d
}
