package streamhub_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/app/guarded"
	"dlrover-run/internal/app/streamhub"
	"dlrover-run/internal/job"
	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/streams"
	"dlrover-run/launcher/streams/node"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

func TestMain(m *testing.M) {
	if _, watch, _ := guarded.Role(); watch != nil { // the shelter of a command
		proc.EndLeftovers(watch, io.Discard)
		os.Exit(watch.Follow())
	}
	goleak.VerifyTestMain(m)
}

// rig is a daemon and the launcher of a run "r" with the ranks 0 and 1 on the node "n0". There is one at a time: it
// supervises all children of the process.
type rig struct {
	t      *testing.T
	hub    *streamhub.Hub
	client *api.Client
	logs   *logs.Logs
	node   *node.Node

	mu    sync.Mutex
	nodes []rendezvous.Member
	notes []string
	mute  bool // launchers hear nothing
}

func newRig(t *testing.T, secure, allowed bool) *rig {
	t.Helper()
	can := []rendezvous.Ability{rendezvous.CanNotice, rendezvous.CanStream, rendezvous.CanProfile}
	r := &rig{t: t, nodes: []rendezvous.Member{{ID: "id0", Name: "n0", Can: can, Slots: 2}}}
	quiet := slog.New(slog.DiscardHandler)
	procs, err := proc.New(proc.Config{Logger: quiet, NoCgroup: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, procs.Close()) })
	r.logs, err = logs.New(logs.Config{Dir: "/dev/null", Stdout: io.Discard, Stderr: io.Discard, Logger: quiet})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.logs.Close()) })
	r.hub = streamhub.New(streamhub.Config{Secure: secure, Nodes: r.who, Notify: r.notify, Note: r.note, Log: quiet})
	server := httptest.NewServer(r.hub.Handler())
	t.Cleanup(server.Close)
	r.client = api.NewClient(strings.TrimPrefix(server.URL, "http://"), "")
	t.Cleanup(r.client.Close)
	r.node = node.New(node.Config{
		Logs: r.logs, Log: quiet, Exec: allowed, Start: procs.Start,
		Connect: func(ctx context.Context, id string) (io.ReadWriteCloser, error) {
			return r.client.Open(ctx, "r", "streams/feed?"+url.Values{"id": {id}, "node": {"id0"}}.Encode(), streams.Protocol)
		},
		Worker: func(rank int) (node.Worker, error) {
			if rank > 1 {
				return node.Worker{}, fmt.Errorf("rank %d does not run", rank)
			}
			env := []string{fmt.Sprint("RANK=", rank), "PATH=/usr/bin:/bin"}
			return node.Worker{LocalRank: rank, Env: env, PID: os.Getpid()}, nil
		},
		Began: func(node.Command) {}, Ended: func(node.Command, streams.Exit) {}, Profile: r.record,
	})
	t.Cleanup(func() { r.node.End(0) })
	t.Cleanup(r.hub.Close)
	return r
}

func (r *rig) who(run string) ([]rendezvous.Member, error) {
	if run != "r" {
		return nil, api.ErrUnknownRun
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.nodes, nil
}

func (r *rig) notify(_, _, body string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.mute {
		id := strings.TrimSuffix(strings.TrimPrefix(body, `{"id":"`), `"}`)
		r.node.Invite(id)
	}
	return nil
}

func (r *rig) note(_ string, event job.Event, node, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.notes = append(r.notes, string(event)+" "+node+" "+text)
}

// worker runs a shell command as a worker, until it has ended.
func (r *rig) worker(rank int, script string) {
	r.t.Helper()
	a, err := r.logs.Begin(0)
	require.NoError(r.t, err)
	w, err := a.Worker(logs.WorkerID{LocalRank: rank, Rank: rank})
	require.NoError(r.t, err)
	cmd := exec.Command("/bin/sh", "-c", script)
	cmd.Stdout, cmd.Stderr = w.Stdout(), w.Stderr()
	err = cmd.Start()
	w.Started()
	require.NoError(r.t, err)
	_ = cmd.Wait() // the supervisor may have taken its status
	w.Drain(time.Minute)
}

func (r *rig) open(name string) (io.ReadWriteCloser, error) {
	return r.client.Open(r.t.Context(), "r", "streams/"+name, streams.Protocol)
}

// rest reads frames up to one of the kind, and returns it and all output before it.
func rest(t *testing.T, nc io.Reader, until streams.Kind) (string, streams.Frame) {
	t.Helper()
	var out bytes.Buffer
	in := streams.NewReader(nc)
	for {
		f, err := in.Next()
		require.NoError(t, err)
		if f.Kind == streams.KindOutput {
			out.Write(f.Data)
		}
		if f.Kind == until {
			return out.String(), f
		}
	}
}

func TestLogs(t *testing.T) {
	r := newRig(t, false, false)
	r.worker(0, "echo a; echo b; echo c")
	r.worker(1, "echo other")
	nc, err := r.open("logs?tail=2&rank=0")
	require.NoError(t, err)
	out, _ := rest(t, nc, streams.KindEnd)
	require.Equal(t, "b\nc\n", out)
	require.NoError(t, nc.Close())
	follower, err := r.open("logs?follow=true&tail=1&rank=1")
	require.NoError(t, err)
	defer follower.Close()
	_, _ = rest(t, follower, streams.KindNode)
	_, f := rest(t, follower, streams.KindOutput)
	require.Equal(t, "other\n", string(f.Data))
	r.worker(1, "echo more")
	_, f = rest(t, follower, streams.KindOutput)
	require.Equal(t, "more\n", string(f.Data))
	r.hub.Happened("r", "succeeded")
	r.node.End(5 * time.Second)
	_, f = rest(t, follower, streams.KindEnd)
	require.Equal(t, "the run has succeeded", string(f.Data))
}

func TestRefusals(t *testing.T) {
	r := newRig(t, false, false)
	for name, want := range map[string]string{
		"logs?rank=2": "no rank 2; it has ranks 0 to 1", "logs?node=x": `no node "x"`, "logs?rank=x": "need a number",
		"exec?rank=0": "job token", "exec": "need a rank", "feed?id=x&node=id0": "nobody wants",
	} {
		_, err := r.open(name)
		require.ErrorContains(t, err, want, name)
	}
	_, err := r.client.Open(t.Context(), "other", "streams/logs", streams.Protocol)
	require.ErrorIs(t, err, api.ErrUnknownRun)
	_, err = r.client.Open(t.Context(), "r", "streams/logs", "websocket")
	require.ErrorContains(t, err, "needs Upgrade")
	r.mu.Lock()
	r.nodes[0].Can = nil
	r.mu.Unlock()
	_, err = r.open("logs")
	require.ErrorContains(t, err, "without streams")
}

func TestStreamsAreBounded(t *testing.T) {
	r := newRig(t, false, false)
	r.mute = true
	for range 8 {
		nc, err := r.open("logs?follow=true")
		require.NoError(t, err)
		defer nc.Close()
	}
	_, err := r.open("logs?follow=true")
	require.ErrorContains(t, err, "too many streams")
}

// execute sends a command and returns the connection.
func (r *rig) execute(rank int, timeout time.Duration, args ...string) io.ReadWriteCloser {
	r.t.Helper()
	nc, err := r.open(fmt.Sprint("exec?rank=", rank))
	require.NoError(r.t, err)
	req := streams.Request{Rank: rank, Args: args, Timeout: timeout}
	_, err = nc.Write(streams.Frame{Kind: streams.KindRequest, Data: streams.JSON(req)}.Append(nil))
	require.NoError(r.t, err)
	return nc
}

func (r *rig) exit(nc io.Reader) (string, streams.Exit) {
	r.t.Helper()
	out, f := rest(r.t, nc, streams.KindExit)
	var e streams.Exit
	require.NoError(r.t, f.Decode(&e))
	return out, e
}

func TestExec(t *testing.T) {
	r := newRig(t, true, true)
	nc := r.execute(1, 0, "sh", "-c", "echo $RANK; cat; exit 7")
	_, _ = rest(t, nc, streams.KindNode)
	_, err := nc.Write(streams.Frame{Kind: streams.KindInput, Data: []byte("in")}.Append(nil))
	require.NoError(t, err)
	_, err = nc.Write(streams.Frame{Kind: streams.KindInputEnd}.Append(nil))
	require.NoError(t, err)
	out, e := r.exit(nc)
	require.Equal(t, streams.Exit{Code: 7}, e)
	require.Equal(t, "1\nin", out)
	require.NoError(t, nc.Close())
	for _, c := range []struct {
		args    []string
		timeout time.Duration
		code    int
		why     string
	}{
		{[]string{"nosuch"}, 0, 127, "not found"},
		{[]string{"/etc"}, 0, 126, ""},
		{[]string{"sh", "-c", "kill -9 $$"}, 0, 137, ""},
		{[]string{"sleep", "1000"}, 50 * time.Millisecond, 124, "50ms"},
		{[]string{""}, 0, 125, "no command"},
	} {
		nc := r.execute(0, c.timeout, c.args...)
		_, e := r.exit(nc)
		require.Equal(t, c.code, e.Code, "%q: %s", c.args, e.Error)
		require.Contains(t, e.Error, c.why)
		require.NoError(t, nc.Close())
	}
	r.requireNoted(`^exec n0 rank 1, from 127\.0\.0\.1:.*sh -c echo \$RANK; cat; exit 7`)
	r.requireNoted(`^exec-ended n0 rank 1.*exit code 7`)
}

// requireNoted waits for a note, which may come after what the caller hears.
func (r *rig) requireNoted(pattern string) {
	r.t.Helper()
	want := regexp.MustCompile(pattern)
	require.Eventually(r.t, func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return slices.ContainsFunc(r.notes, want.MatchString)
	}, 20*time.Second, time.Millisecond)
}

// hidden are what commands start that is hard to find: each prints its pid.
var hidden = map[string]string{
	"a session of its own":     "(setsid sh -c 'echo $$; exec sleep 1000' &)",
	"an orphan's child":        "(setsid sh -c 'sleep 1000 & echo $!; wait' &)",
	"an empty environment":     "env -i sh -c 'echo $$; exec sleep 1000' &",
	"all of it":                "(setsid env -i sh -c 'echo $$; exec sleep 1000' &)",
	"all of it, by two forks":  "(setsid env -i sh -c '(setsid sh -c \"echo \\$\\$; exec sleep 1000\" &)' &)",
	"all of it, deaf":          "(setsid env -i sh -c 'trap \"\" TERM HUP; echo $$; while :; do sleep 1; done' &)",
	"all of it, and a stopped": "(setsid env -i sh -c 'echo $$; kill -STOP $$; sleep 1000' &)",
}

func requireGone(t *testing.T, pid string) {
	t.Helper()
	n, err := strconv.Atoi(strings.TrimSpace(pid))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return syscall.Kill(n, 0) == syscall.ESRCH }, 20*time.Second, 20*time.Millisecond)
}

// Whatever the command has started is gone when the caller is, or when its time is over.
func TestCallerGoesAway(t *testing.T) {
	for name, script := range hidden {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, true, true)
			nc := r.execute(0, 0, "sh", "-c", script+"\nsleep 1000")
			_, f := rest(t, nc, streams.KindOutput)
			require.NoError(t, nc.Close())
			requireGone(t, string(f.Data))
		})
	}
	r := newRig(t, true, true)
	out, e := r.exit(r.execute(0, time.Second, "sh", "-c", hidden["all of it"]+"\nsleep 1000"))
	require.Equal(t, streams.CodeTimeout, e.Code)
	requireGone(t, out)
}

// Nothing of a command outlives its end.
func TestCommandLeavesNothing(t *testing.T) {
	for name, script := range hidden {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, true, true)
			out, e := r.exit(r.execute(0, 0, "sh", "-c", script+"\nsleep 0.5; exit 7"))
			require.Equal(t, streams.Exit{Code: 7}, e)
			requireGone(t, out)
		})
	}
}

func TestExecNotAllowed(t *testing.T) {
	r := newRig(t, true, false)
	nc := r.execute(0, 0, "id")
	defer nc.Close()
	_, e := r.exit(nc)
	require.Equal(t, streams.CodeRefused, e.Code)
	require.Contains(t, e.Error, "--allow-exec")
}

// record is the worker that is profiled: rank 1 has none.
func (r *rig) record(ctx context.Context, rank int, last time.Duration, to string) (string, error) {
	info, err := os.Stat(filepath.Dir(to))
	require.NoError(r.t, err)
	require.Equal(r.t, os.FileMode(0o700), info.Mode().Perm(), "no other user reads a trace")
	r.note("", "recorded", filepath.Dir(to), "")
	switch {
	case rank == 1:
		return "", errors.New("a profile needs PyTorch 2.7 or newer")
	case last == 2*time.Second:
		<-ctx.Done()
		return "", ctx.Err()
	}
	return "5.0 s with 9 steps", os.WriteFile(to, bytes.Repeat([]byte("trace "), 1<<20), 0o600)
}

// profile asks for a profile, and returns the trace, the note and the end.
func (r *rig) profile(query string) (trace, note string, exit streams.Exit) {
	r.t.Helper()
	nc, err := r.client.Open(r.t.Context(), "r", "streams/profile?"+query, streams.Protocol)
	require.NoError(r.t, err)
	defer nc.Close()
	var out bytes.Buffer
	in := streams.NewReader(nc)
	for {
		f, err := in.Next()
		require.NoError(r.t, err)
		switch f.Kind {
		case streams.KindOutput:
			out.Write(f.Data)
		case streams.KindNote:
			note = string(f.Data)
		case streams.KindExit:
			require.NoError(r.t, f.Decode(&exit))
			if out.Len() == 0 {
				return "", note, exit
			}
			zip, err := gzip.NewReader(&out)
			require.NoError(r.t, err)
			text, err := io.ReadAll(zip)
			require.NoError(r.t, err)
			return string(text), note, exit
		}
	}
}

// left reports whether a trace lies about.
func (r *rig) left() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(r.notes, func(n string) bool {
		dir, recorded := strings.CutPrefix(n, "recorded ")
		_, err := os.Stat(strings.TrimSpace(dir))
		return recorded && err == nil
	})
}

func TestProfile(t *testing.T) {
	r := newRig(t, false, false) // it executes nothing of the caller's: no token, no --allow-exec
	trace, note, exit := r.profile("rank=0&seconds=5")
	require.Equal(t, strings.Repeat("trace ", 1<<20), trace)
	require.Equal(t, "5.0 s with 9 steps", note)
	require.Zero(t, exit)
	require.Eventually(t, func() bool { return !r.left() }, 10*time.Second, 10*time.Millisecond)
	_, _, exit = r.profile("rank=1&seconds=5")
	require.Equal(t, "there is no profile of rank 1: a profile needs PyTorch 2.7 or newer", exit.Error)
	r.mu.Lock()
	require.Regexp(t, `exec n0 rank 0, from \S+: a profile of 5s`, strings.Join(r.notes, "\n"))
	r.mu.Unlock()
}

// A caller in the hub's process has the same, and its end is the end of the recording.
func TestProfileForAPage(t *testing.T) {
	r := newRig(t, false, false)
	in, err := r.hub.Profile("r", 0, 5*time.Second, "a visitor")
	require.NoError(t, err)
	var out bytes.Buffer
	note, err := streams.CopyTrace(&out, in)
	require.NoError(t, err)
	require.Equal(t, "5.0 s with 9 steps", note)
	zip, err := gzip.NewReader(&out)
	require.NoError(t, err)
	trace, err := io.ReadAll(zip)
	require.NoError(t, err)
	require.Len(t, trace, len("trace ")<<20)
	require.NoError(t, in.Close())
	r.mu.Lock()
	require.Contains(t, strings.Join(r.notes, "\n"), "exec n0 rank 0, from a visitor: a profile of 5s")
	r.mu.Unlock()

	in, err = r.hub.Profile("r", 1, 5*time.Second, "a visitor")
	require.NoError(t, err)
	_, err = streams.CopyTrace(io.Discard, in)
	require.EqualError(t, err, "there is no profile of rank 1: a profile needs PyTorch 2.7 or newer")
	require.NoError(t, in.Close())
	in, err = r.hub.Profile("r", 0, 2*time.Second, "a visitor")
	require.NoError(t, err)
	require.Eventually(t, r.left, 10*time.Second, 10*time.Millisecond)
	require.NoError(t, in.Close())
	require.Eventually(t, func() bool { return !r.left() }, 10*time.Second, 10*time.Millisecond)
	_, err = r.hub.Profile("r", 7, time.Second, "a visitor")
	require.ErrorContains(t, err, "has no rank 7")
}

// Nothing records on when the caller has gone.
func TestProfileOfACallerThatGoes(t *testing.T) {
	r := newRig(t, false, false)
	nc, err := r.client.Open(t.Context(), "r", "streams/profile?rank=0&seconds=2", streams.Protocol)
	require.NoError(t, err)
	require.Eventually(t, r.left, 10*time.Second, 10*time.Millisecond)
	require.NoError(t, nc.Close())
	require.Eventually(t, func() bool { return !r.left() }, 10*time.Second, 10*time.Millisecond)
}

func TestProfilesThatAreRefused(t *testing.T) {
	r := newRig(t, false, false)
	refused := func(query, why string) {
		t.Helper()
		_, err := r.client.Open(t.Context(), "r", "streams/profile?"+query, streams.Protocol)
		require.ErrorContains(t, err, why)
	}
	for _, query := range []string{"", "rank=0", "rank=-1&seconds=1", "rank=0&seconds=0", "rank=0&seconds=61"} {
		refused(query, "need a rank, and 1 to 60 seconds")
	}
	refused("rank=7&seconds=1", "has no rank 7")
	r.nodes[0].Can = r.nodes[0].Can[:2]
	refused("rank=0&seconds=1", `without profiles: node "n0"; start it with this version`)
}
