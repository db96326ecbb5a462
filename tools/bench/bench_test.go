package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func testBench(t *testing.T) *bench {
	return &bench{
		dir:  t.TempDir(),
		ours: side{name: "dlrover-run", command: []string{"/bin/sh", "-c"}, reps: 3},
		peer: side{name: "torchrun", peer: true, reps: 2},
	}
}

func TestMeasureTakesTurns(t *testing.T) {
	var order []string
	r := row{id: "x", lines: []line{{what: "a", unit: duration}, {what: "b", unit: duration, oursOnly: "has none"}},
		run: func(_ context.Context, l *lab) ([]float64, error) {
			order = append(order, l.side.name)
			return []float64{float64(len(order)), 0}, nil
		}}
	got := testBench(t).measure(t.Context(), r)
	require.Equal(t, []string{"dlrover-run", "torchrun", "dlrover-run", "torchrun", "dlrover-run"}, order)
	require.Equal(t, []float64{1, 3, 5}, got[0].Ours.Values)
	require.Equal(t, []float64{2, 4}, got[0].Peers[0].Values)
	require.Equal(t, []cell{{Side: "torchrun", Missing: "has none"}}, got[1].Peers)
}

func TestMeasureKeepsErrors(t *testing.T) {
	calls := 0
	r := row{id: "x", noPeer: "no counterpart", lines: []line{{unit: duration}},
		run: func(_ context.Context, l *lab) ([]float64, error) {
			if calls++; calls == 2 {
				return nil, errors.New("lost")
			}
			return []float64{1}, nil
		}}
	got := testBench(t).measure(t.Context(), r)
	require.Equal(t, []float64{1, 1}, got[0].Ours.Values)
	require.Equal(t, []string{"lost"}, got[0].Ours.Errors)
	require.Equal(t, "no counterpart", got[0].Peers[0].Missing)
}

func TestMissing(t *testing.T) {
	lines := []line{{}}
	for _, tt := range []struct {
		name string
		row  row
		peer bool
		set  func(*bench)
		want string
	}{
		{"ours runs without PyTorch", row{}, false, func(b *bench) { b.torch = "" }, ""},
		{"gloo workers do not", row{torch: true}, false,
			func(b *bench) { b.torch, b.peer.missing = "", "no PyTorch" }, "no PyTorch"},
		{"the peer does not", row{}, true, func(b *bench) { b.torch, b.peer.missing = "", "no PyTorch" }, "no PyTorch"},
		{"peer left out", row{}, true, func(b *bench) { b.peer.reps = 0 }, "not run (-peer-n 0)"},
		{"slow peer", row{slowPeer: true}, true, nil, "not run (-slow)"},
		{"slow peer wanted", row{slowPeer: true}, true, func(b *bench) { b.slow = true }, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := testBench(t)
			b.torch, tt.row.lines = "1.13", lines
			if tt.set != nil {
				tt.set(b)
			}
			s := b.ours
			if tt.peer {
				s = b.peer
			}
			require.Equal(t, tt.want, tt.row.missing(b, s, 0))
		})
	}
}

func TestRowOfTooManyFilesSaysSo(t *testing.T) {
	b := testBench(t)
	r := row{files: 1 << 40, lines: []line{{}}}
	require.Contains(t, r.missing(b, b.ours, 0), "ulimit -n")
}

func TestSelectRows(t *testing.T) {
	all := rows(options{})
	got, err := selectRows(all, "exit,scale")
	require.NoError(t, err)
	require.Equal(t, "exit", got[0].id)
	require.Len(t, got, 6)
	_, err = selectRows(all, "start,nonsense")
	require.ErrorContains(t, err, `no row "nonsense"; there are start, exit`)
}

func TestParseRejects(t *testing.T) {
	for _, args := range [][]string{{"-n", "0"}, {"-peer-n", "-1"}, {"positional"}} {
		_, err := parse(args)
		require.Error(t, err, args)
	}
}

func TestQuickIsSmall(t *testing.T) {
	o, err := parse([]string{"-quick"})
	require.NoError(t, err)
	require.Equal(t, 2, o.n)
	for _, r := range rows(o) {
		require.LessOrEqual(t, r.files, 3000, r.id)
	}
}

// TestLabLeavesNothing: what a child leaves behind when it dies is ended as well.
func TestLabLeavesNothing(t *testing.T) {
	require.NoError(t, prepareProcess())
	b := testBench(t)
	l, err := newLab(b, b.ours)
	require.NoError(t, err)
	p, err := l.launch(`sleep 100 & echo start 1 $! $$ 0 1 > ` + l.stamps)
	require.NoError(t, err)
	ss, err := l.await(t.Context(), "the orphan", 1, started(0))
	require.NoError(t, err)
	_, err = l.exited(t.Context(), p)
	require.NoError(t, err)
	require.NoError(t, unix.Kill(ss[0].pid, 0), "the orphan is alive")
	l.close()
	require.ErrorIs(t, unix.Kill(ss[0].pid, 0), unix.ESRCH)
	require.NoDirExists(t, l.dir)
	require.Empty(t, descendants(os.Getpid()))
}

func TestUntilEndsWithItsContext(t *testing.T) {
	l := &lab{}
	ctx, cancel := context.WithTimeoutCause(t.Context(), 10*time.Millisecond, errors.New("not over within 10ms"))
	defer cancel()
	err := l.until(ctx, "nothing", func() (bool, error) { return false, nil })
	require.EqualError(t, err, "waited for nothing: not over within 10ms")
}

func TestStampWorker(t *testing.T) {
	bin, file := filepath.Join(t.TempDir(), "stamp"), filepath.Join(t.TempDir(), "stamps")
	out, err := exec.Command("go", "build", "-o", bin, "./stamp").CombinedOutput()
	require.NoError(t, err, string(out))
	before := now()
	cmd := exec.Command(bin, file, "exec", "/bin/sh", "-c", "exit 7")
	cmd.Env = []string{"RANK=3", "WORLD_SIZE=4"}
	var exit *exec.ExitError
	require.ErrorAs(t, cmd.Run(), &exit)
	require.Equal(t, 7, exit.ExitCode())
	data, err := os.ReadFile(file)
	require.NoError(t, err)
	ss, err := parseStamps(data)
	require.NoError(t, err)
	require.Len(t, ss, 1)
	require.Greater(t, ss[0].at, before)
	require.Less(t, ss[0].at, now())
	ss[0].at = 0
	require.Equal(t, stamp{event: "start", pid: cmd.Process.Pid, ppid: os.Getpid(), rank: 3, world: 4}, ss[0])
}

func TestParseStamps(t *testing.T) {
	ss, err := parseStamps([]byte("start 5 10 9 0 2\nexit 7 10 9 0 2\nstart 8 1"))
	require.NoError(t, err, "a half-written line is not an error")
	require.Equal(t, []stamp{{"start", 5, 10, 9, 0, 2}, {"exit", 7, 10, 9, 0, 2}}, ss)
	require.EqualValues(t, 5, first(ss))
	require.EqualValues(t, 7, last(ss))
	_, err = parseStamps([]byte("start five\n"))
	require.ErrorContains(t, err, `stamp "start five\n"`)
}

func FuzzParseStamps(f *testing.F) {
	f.Add([]byte("start 5 10 9 0 2\nexit 7 10 9 0 2\n"))
	f.Add([]byte("start 5 10 9  \n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		ss, err := parseStamps(data)
		if err == nil && len(ss) != strings.Count(string(data), "\n") {
			t.Fatalf("%d stamps of %q", len(ss), data)
		}
	})
}

func TestOwnProcess(t *testing.T) {
	n, err := rss(os.Getpid())
	require.NoError(t, err)
	require.Greater(t, n, 1e6)
	peak, err := memory(os.Getpid(), "status", "VmHWM")
	require.NoError(t, err)
	require.Greater(t, peak, 1e6)
	_, err = memory(os.Getpid(), "status", "Nonsense")
	require.EqualError(t, err, "/proc/"+strconv.Itoa(os.Getpid())+"/status: no Nonsense")
	busy, err := cpuSeconds(os.Getpid())
	require.NoError(t, err)
	require.Positive(t, busy)
	ppid, ok := parentOf(os.Getpid())
	require.True(t, ok)
	require.Equal(t, os.Getppid(), ppid)
}

func TestTimesOfLosses(t *testing.T) {
	log := fmt.Sprintf("    lease_test.go:80: %s: %v\n    lease_test.go:82: killed: the next master serves after 1s\n",
		"killed", []time.Duration{98 * time.Millisecond, 1200 * time.Millisecond})
	times, err := lossTimes(log, "killed")
	require.NoError(t, err)
	require.Equal(t, []float64{0.098, 1.2}, times)
	_, err = lossTimes(log, "frozen")
	require.ErrorContains(t, err, "no times")
}

func TestLeaseRowsSayWhatTheyNeed(t *testing.T) {
	t.Setenv(apiServerVariable, "")
	r := leaseRow("killed", "", 0)
	require.Contains(t, r.missing(&bench{}, side{}, 0), "NOT MEASURED: ")
	t.Setenv(apiServerVariable, "/somewhere/kube-apiserver")
	require.Empty(t, r.missing(&bench{}, side{}, 0))
}
