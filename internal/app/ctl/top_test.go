package ctl

import (
	"context"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/ctl/top"
	"dlrover-run/internal/text"
)

func TestTopOnce(t *testing.T) {
	d := newServed(t)
	d.join("job", "gpu-01", 2)
	require.Regexp(t, `^1 runs  \d\d:\d\d:\d\d\nRUN .*\njob +1 +2 +0 +0 of 3 +waiting for nodes\n$`, d.ok("top", "--once"))
	out := d.ok("top", "job", "--once")
	require.Contains(t, out, "For whom does it wait?   For 1 of 2 nodes.\n")
	require.Regexp(t, `What happens by itself\? +in \d+m\d+s: the run fails, unless enough nodes are there\n`, out)
	require.Regexp(t, `\n- +gpu-01 +2 +10.0.0.1 +waiting\n`, out)
	require.Regexp(t, `\n\d\d:\d\d:\d\d +0\.0 +join +gpu-01: 2 slots\n`, out)
	d.fails(1, `keeps no run "other"; it keeps job`, "top", "other", "--once")
	d.fails(2, "json", "top", "--json")
	d.close(0)
	d.fails(1, "no daemon answers", "top")
}

// Without a terminal there is a line for each change.
func TestTopWithoutATerminal(t *testing.T) {
	d := newServed(t)
	d.join("job", "gpu-01", 2)
	ctx, cancel := context.WithCancel(t.Context())
	out := &output{written: make(chan struct{})}
	done := make(chan result)
	go func() { done <- d.ctlTo(ctx, out, "top") }()
	<-out.written
	d.join("job", "gpu-02", 2)
	time.Sleep(2*looks + looks/2)
	cancel()
	r := <-done
	require.Zero(t, r.code, r.err)
	require.Regexp(t, `^\S+  job: waiting for nodes; 1 nodes, 0 workers, 0 of 3 restarts
\S+  job: starting; 2 nodes, 4 workers, 0 of 3 restarts\n$`, r.out)
}

// Names and texts of others do nothing to the terminal, and stay on their lines.
func TestTopIsClean(t *testing.T) {
	for _, open := range []string{"", hostile} {
		var seen top.Seen
		fill(reflect.ValueOf(&seen).Elem(), true, 3)
		s := top.New(open).Told(time.Unix(5000, 0), seen, nil)
		for _, s := range []top.State{s, s.Said(hostile), s.Show(hostile)} {
			for line := range strings.SplitSeq(s.View(), "\n") {
				require.True(t, text.Printable(line), "%q", line)
			}
		}
	}
}
