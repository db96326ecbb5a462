package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var began = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func after(ms int) time.Time { return began.Add(time.Duration(ms) * time.Millisecond) }

func fault(ms int, what string) record { return record{Time: after(ms), Event: evFault, What: what} }

func start(ms int, from string, node, nodes, round, epoch int, cause string) record {
	return record{
		Time: after(ms), Event: evStart, From: from, Node: node, Nodes: nodes, WorldSize: 2 * nodes, Round: round,
		Epoch: epoch, Cause: cause,
	}
}

func step(ms, pid, world, n int, loss float64) record {
	return record{Time: after(ms), Event: evStep, PID: pid, WorldSize: world, Step: n, Loss: loss}
}

// run100 is a whole run of 100 steps with one of each fault.
func run100() []record {
	return []record{
		fault(0, "two nodes start"),
		start(30, "node-a", 0, 2, 1, 0, ""), start(20, "node-b", 1, 2, 1, 0, ""),
		step(2000, 11, 4, 1, 0.7), step(3000, 11, 4, 24, 0.6),
		fault(3010, "a worker is killed"),
		{Time: after(3012), Event: evWorkerExit, From: "node-b", Rank: 3, ExitCode: -9},
		{Time: after(3015), Event: evWorkerExit, From: "node-b", Rank: 2, ExitCode: -15, Stopped: true},
		start(3020, "node-a", 0, 2, 1, 1, "rank 3 failed"), start(3040, "node-b", 1, 2, 1, 1, "rank 3 failed"),
		step(5010, 21, 4, 21, 0.6), step(6000, 21, 4, 45, 0.5),
		fault(6010, "a node is killed"),
		start(6510, "node-b", 0, 1, 2, 0, "node 0 (node-a) is gone"),
		step(7510, 31, 2, 41, 0.5), step(8000, 31, 2, 65, 0.4),
		fault(8010, "a new node starts"),
		start(8050, "node-b", 0, 2, 3, 0, "the world grows"), start(8055, "node-c", 1, 2, 3, 0, "the world grows"),
		step(10010, 41, 4, 61, 0.4), step(11000, 41, 4, 100, 0.2),
		{Time: after(11001), Event: evTrained, Step: 100, Accuracy: 0.995},
	}
}

func TestRecoveries(t *testing.T) {
	tests := []struct {
		name string
		rs   []record
		want []recovery
		err  string
	}{
		{name: "every kind of fault", rs: run100(), want: []recovery{
			{"two nodes start", after(0), 30 * time.Millisecond, 2 * time.Second, 0, 4, 0, 1, 1},
			{"a worker is killed", after(3010), 30 * time.Millisecond, 2 * time.Second, 4, 4, 24, 21, 1},
			{"a node is killed", after(6010), 500 * time.Millisecond, 1500 * time.Millisecond, 4, 2, 45, 41, 1},
			{"a new node starts", after(8010), 45 * time.Millisecond, 2 * time.Second, 2, 4, 65, 61, 1},
		}},
		{name: "a line of the old rank 0 arrives late",
			rs: []record{
				step(0, 1, 4, 8, 1), fault(10, "f"), step(11, 1, 4, 9, 1), start(20, "a", 0, 1, 2, 0, ""), step(50, 2, 2, 8, 1),
			},
			want: []recovery{
				{"f", after(10), 10 * time.Millisecond, 40 * time.Millisecond, 4, 2, 9, 8, 1},
			}},
		{name: "it took two worlds, and a launcher was slow to be read",
			rs: []record{step(0, 1, 4, 9, 1), fault(10, "f"), start(20, "a", 0, 2, 1, 1, ""), start(90, "a", 0, 1, 2, 0, ""),
				start(25, "b", 1, 2, 1, 1, ""), step(99, 2, 2, 8, 1)},
			want: []recovery{
				{"f", after(10), 80 * time.Millisecond, 89 * time.Millisecond, 4, 2, 9, 8, 2},
			}},
		{name: "no training again", rs: []record{step(0, 1, 4, 9, 1), fault(10, "a node is killed"), step(11, 1, 4, 10, 1)},
			err: "no training after: a node is killed"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := recoveries(tt.rs)
			if tt.err != "" {
				require.EqualError(t, err, tt.err)
				return
			}
			require.NoError(t, err)
			require.Equal(t, tt.want, got)
		})
	}
}

func TestChecks(t *testing.T) {
	tests := []struct {
		name   string
		change func(rs []record) []record
		left   []process
		want   string // the check that fails
	}{
		{name: "all is well", change: func(rs []record) []record { return rs }},
		{name: "went on too far back", change: with(10, func(r *record) { r.Step = 11 }),
			want: "after each fault the training went on from its checkpoint (one every 10 steps)"},
		{name: "started anew", change: with(10, func(r *record) { r.Step = 1 }),
			want: "after each fault the training went on from its checkpoint (one every 10 steps)"},
		{name: "did not shrink", change: with(14, func(r *record) { r.WorldSize = 4 }),
			want: "the world sizes were 4, 4, 4, 4"},
		{name: "ended early", change: with(21, func(r *record) { r.Step = 99 }), want: "99 of 100 steps are done"},
		{name: "learned nothing", change: with(20, func(r *record) { r.Loss = 0.69 }),
			want: "the loss fell from 0.700 to 0.690"},
		{name: "left a worker", change: func(rs []record) []record { return rs }, left: []process{{pid: 7, name: "python3"}},
			want: "no process is left, but python3 (pid 7)"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			rs := tt.change(run100())
			recs, err := recoveries(rs)
			require.NoError(t, err)
			var failed []string
			for _, c := range checks(rs, recs, plan{steps: 100, checkpointEvery: 10}, tt.left) {
				if !c.ok {
					failed = append(failed, c.what)
				}
			}
			if tt.want == "" {
				require.Empty(t, failed)
				return
			}
			require.Equal(t, []string{tt.want}, failed)
		})
	}
}

func with(i int, change func(*record)) func([]record) []record {
	return func(rs []record) []record { change(&rs[i]); return rs }
}

// TestStory replays a run through what tells it and holds the text against a file.
func TestStory(t *testing.T) {
	var out bytes.Buffer
	s := newScenario(t.Context(), &screen{w: &out, began: began}, plan{steps: 100, checkpointEvery: 10}, nil)
	for _, r := range run100() {
		if r.Event == evFault {
			s.fresh = true
			s.tell(r.Time, "%s", r.What)
		}
		require.NoError(t, s.follow(r))
	}
	require.NoError(t, s.follow(record{Time: after(11500), Event: evExit, From: "node-b"}))
	recs, err := recoveries(s.records)
	require.NoError(t, err)
	s.line("\n%s", table(recs, began))
	golden(t, "testdata/scenario.golden", out.Bytes())
	require.Equal(t, "node-b", s.leader)
}

func golden(t *testing.T, path string, got []byte) {
	t.Helper()
	if *update {
		require.NoError(t, os.WriteFile(path, got, 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), string(got))
}

func TestUnexpectedEnd(t *testing.T) {
	tests := []struct {
		name    string
		r       record
		trained bool
		err     string
	}{
		{name: "the node that we killed", r: record{From: "node-a", ExitCode: -9}},
		{name: "another one", r: record{From: "node-b", ExitCode: -9}, err: "node-b ended with code -9"},
		{name: "too early", r: record{From: "node-b"}, err: "node-b ended with code 0 before the training was over"},
		{name: "in time", r: record{From: "node-b"}, trained: true},
		{name: "in time but with an error", r: record{From: "master", ExitCode: 1}, trained: true,
			err: "master ended with code 1"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := newScenario(t.Context(), &screen{w: &bytes.Buffer{}}, plan{}, nil)
			s.victims["node-a"] = true
			if tt.trained {
				s.trained.Step = 1
			}
			tt.r.Event = evExit
			err := s.follow(tt.r)
			if tt.err == "" {
				require.NoError(t, err)
				return
			}
			require.EqualError(t, err, tt.err)
		})
	}
}

func TestAwait(t *testing.T) {
	never := func(record) bool { return false }
	synctest.Test(t, func(t *testing.T) {
		s := newScenario(t.Context(), &screen{w: &bytes.Buffer{}}, plan{}, &cluster{records: make(chan record)})
		require.EqualError(t, s.await("step 7", time.Minute, never), "waited 1m0s for step 7")
	})
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		s := newScenario(ctx, &screen{w: &bytes.Buffer{}}, plan{}, &cluster{records: make(chan record)})
		stopped := errors.New("Ctrl-C")
		time.AfterFunc(time.Second, func() { cancel(stopped) })
		require.ErrorIs(t, s.await("step 7", time.Minute, never), stopped)
	})
}

func TestStatusMovesOnTerminalsOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var pipe bytes.Buffer
		s := &screen{w: &pipe}
		s.line("line")
		s.status("a")
		time.Sleep(maxSilence)
		s.status("b")
		s.status("c")
		require.Equal(t, "line\nb\n", pipe.String(), "a line after a silence alone")
	})
	var tty bytes.Buffer
	s := &screen{w: &tty, tty: true, colour: true}
	s.status("a")
	s.line("%s", s.paint(green, "b"))
	require.Equal(t, "\r\x1b[Ka\r\x1b[K\x1b[32mb\x1b[0m\n", tty.String())
}

func TestServedAt(t *testing.T) {
	log := t.TempDir() + "/log"
	require.Empty(t, servedAt(log))
	require.NoError(t, os.WriteFile(log,
		[]byte("{\"msg\":\"other\",\"addr\":\"x\"}\n{\"msg\":\"serving\",\"addr\":\"127.0.0.1:4\"}\n"), 0o600))
	require.Equal(t, "127.0.0.1:4", servedAt(log))
}

func TestEnvironment(t *testing.T) {
	t.Setenv("PET_NNODES", "4")
	t.Setenv("WORLD_SIZE", "8")
	t.Setenv("DEMO_OTHER", "kept")
	env := environment()
	require.Contains(t, env, "DEMO_OTHER=kept")
	require.NotContains(t, env, "PET_NNODES=4")
	require.NotContains(t, env, "WORLD_SIZE=8")
}

func TestLastLine(t *testing.T) {
	require.Equal(t, "b c", lastLine([]byte("a\nb c\n\n")))
	require.Equal(t, "50%", lastLine([]byte("10%\r50%")))
	require.Empty(t, lastLine(nil))
}

func TestDescendants(t *testing.T) {
	all := []process{{1, 0, "init"}, {10, 1, "demo"}, {11, 10, "dlrover-run"}, {12, 11, "python3"},
		{13, 10, "orphan"}, {14, 1, "other"}}
	require.ElementsMatch(t, []process{{11, 10, "dlrover-run"}, {12, 11, "python3"}, {13, 10, "orphan"}},
		descendants(all, 10))
	require.Empty(t, descendants(all, 12))
}

func TestParseStat(t *testing.T) {
	p, ok := parseStat([]byte("12 (a) b (c) S 3 12 12 0"))
	require.True(t, ok)
	require.Equal(t, process{12, 3, "a) b (c"}, p)
	_, ok = parseStat([]byte("12 (python3) Z 3 12 12 0"))
	require.False(t, ok, "a zombie has ended")
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte("12 (a) b (c) S 3 12 12 0"))
	f.Add([]byte(")("))
	f.Fuzz(func(t *testing.T, data []byte) {
		if p, ok := parseStat(data); ok {
			require.Contains(t, string(data), "("+p.name+")")
		}
	})
}

func FuzzParseRecord(f *testing.F) {
	f.Add([]byte(`{"time":"2026-01-02T03:04:05Z","event":"start","node":1,"cause":"x"}`))
	f.Add([]byte(`{"event": "step", "pid": 7, "loss": 0.5}`))
	f.Add([]byte(`{"event": "step", "loss": NaN}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		r, ok := parseRecord(line)
		require.Equal(t, ok, r.Event != "")
	})
}

// Every fault is in a run of its own, and one that the script knows.
func TestFaultsAreKnown(t *testing.T) {
	runs := map[string]bool{"": true}
	for _, x := range allFaults {
		require.False(t, runs[x.run], x.run)
		runs[x.run] = true
		if x.script != "none" {
			require.Contains(t, string(faultsPy), `fault == "`+x.script+`"`)
		}
	}
}
