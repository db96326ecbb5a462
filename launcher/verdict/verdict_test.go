package verdict

import (
	"encoding/json"
	"flag"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// at is a time t seconds after the start of the tests' second.
func at(t float64) time.Time {
	return time.Unix(1_700_000_000, 0).UTC().Add(time.Duration(t * float64(time.Second)))
}

// exit is rank's end at t.
func exit(rank, code int, t float64) Failure {
	return Failure{Rank: rank, ExitCode: code, At: at(t)}
}

func raised(f Failure, message string, second float64) Failure {
	f.Message, f.ErrorTime, f.ErrorFile = message, at(second), "error.json"
	return f
}

func stopped(f Failure) Failure {
	f.Stopped = true
	return f
}

func oomKilled(f Failure) Failure {
	f.OOM = &OOM{Limit: 8 << 30, Peak: 8 << 30}
	return f
}

func said(f Failure, output string) Failure {
	f.LastLines = output
	return f
}

func lossOf(node int, t float64) Loss { return Loss{Node: node, At: at(t)} }

const peerGone = "RuntimeError: [../pair.cc:598] Connection closed by peer [10.0.0.2]:1935"

func TestJudge(t *testing.T) {
	type (
		failures = []Failure
		losses   = []Loss
	)
	const noRank, noNode = -1, -1
	for _, tt := range []struct {
		name     string
		failures failures
		losses   losses
		rule     Rule
		rank     int // of Root
		node     int // of Loss
	}{
		{"nothing", nil, nil, NoCause, noRank, noNode},
		{"the earliest exit", failures{exit(0, 1, 2), exit(1, 1, 1), exit(2, 1, 3)}, nil, FirstExit, 1, noNode},
		{"a tie goes to the lowest rank", failures{exit(2, 1, 1), exit(1, 1, 1)}, nil, FirstExit, 1, noNode},
		{"a tie goes to the earlier error file",
			failures{raised(exit(1, 1, 9), "ValueError: b", 8), raised(exit(2, 1, 9), "ValueError: a", 8),
				raised(exit(3, 1, 9), "ValueError: c", 7.999)},
			nil, FirstExit, 3, noNode},
		{"a tie of error files goes to the lowest rank, whatever ended first",
			failures{raised(exit(2, 1, 9), "ValueError: a", 3), raised(exit(1, 1, 10), "ValueError: b", 3)}, nil,
			FirstExit, 1, noNode},
		{"a tie goes to the one with an error file",
			failures{exit(1, 1, 9), raised(exit(2, 1, 9), "ValueError: a", 9)}, nil, FirstExit, 2, noNode},

		{"a stopped worker is no cause", failures{stopped(exit(0, -15, 0)), exit(1, 1, 1)}, nil,
			FirstExit, 1, noNode},
		{"all were stopped", failures{stopped(exit(0, -15, 1)), stopped(exit(1, -9, 2))}, nil,
			NoCause, noRank, noNode},
		{"an OOM kill after the stop is no cause", failures{exit(1, 1, 1), stopped(oomKilled(exit(0, -9, 1.5)))}, nil,
			FirstExit, 1, noNode},
		{"stopped after an error of its own",
			failures{exit(0, 1, 5), stopped(raised(exit(1, -15, 6), "ValueError: bad batch", 3))}, nil,
			FirstExit, 1, noNode},
		{"stopped after an error that came later",
			failures{exit(0, 1, 5.5), stopped(raised(exit(1, -15, 9), "ValueError: bad batch", 6))}, nil,
			FirstExit, 0, noNode},
		{"stopped after an error in the same second as another's exit: the exit is known to be first",
			failures{exit(0, -11, 5.2), stopped(raised(exit(1, -15, 5.9), "ValueError: bad batch", 5))}, nil,
			FirstExit, 0, noNode},
		{"stopped after an error in the same second as a consequence: the error explains it",
			failures{raised(exit(0, 1, 5.2), peerGone, 5), stopped(raised(exit(1, -15, 5.9), "ValueError: bad batch", 5))},
			nil, FirstExit, 1, noNode},
		{"an error that the stop itself caused",
			failures{raised(exit(0, 1, 5.2), peerGone, 5),
				stopped(raised(exit(1, 1, 5.9), "RuntimeError: DataLoader worker (pid 7) is killed by signal: Terminated.", 5))},
			nil, Consequence, 0, noNode},
		{"stopped with an error file, and nothing but stops",
			failures{stopped(raised(exit(1, -15, 9), "ValueError: a", 1)), stopped(exit(0, -15, 9))}, nil,
			NoCause, noRank, noNode},

		{"an error file proves that a slow teardown failed first",
			failures{exit(0, 1, 8), raised(exit(1, 1, 20), "ValueError: bad batch", 3)}, nil, FirstExit, 1, noNode},
		{"an error file within the same second proves nothing",
			failures{exit(0, -11, 3.5), raised(exit(1, 1, 20), "ValueError: bad batch", 3)}, nil, FirstExit, 0, noNode},
		{"an error file dated after the exit is ignored",
			failures{exit(0, 1, 3), raised(exit(1, 1, 2), "ValueError: bad batch", 60)}, nil, FirstExit, 1, noNode},

		{"an OOM kill beats an earlier exit", failures{exit(0, 1, 1), oomKilled(exit(1, -9, 3))}, nil,
			OutOfMemory, 1, noNode},
		{"an OOM kill outside the window does not", failures{exit(0, 1, 1), oomKilled(exit(1, -9, 6.1))}, nil,
			FirstExit, 0, noNode},
		{"the first of two OOM kills", failures{oomKilled(exit(0, -9, 2)), oomKilled(exit(1, -9, 1))}, nil,
			OutOfMemory, 1, noNode},
		{"an OOM kill of a child", failures{exit(0, 1, 1), oomKilled(exit(1, 1, 1.1))}, nil, OutOfMemory, 1, noNode},

		{"a consequence yields to a later exit", failures{raised(exit(0, 1, 1), peerGone, 1), exit(1, -11, 1.5)}, nil,
			FirstExit, 1, noNode},
		{"a consequence yields up to the end of the window", failures{raised(exit(0, 1, 1), peerGone, 1), exit(1, 1, 6)}, nil,
			FirstExit, 1, noNode},
		{"a consequence does not yield after the window", failures{raised(exit(0, 1, 1), peerGone, 1), exit(1, 1, 6.001)},
			nil, Consequence, 0, noNode},
		{"only consequences", failures{raised(exit(0, 1, 2), peerGone, 2), raised(exit(1, 1, 1), peerGone, 1)}, nil,
			Consequence, 1, noNode},
		{"a consequence told by the output alone",
			failures{said(exit(0, 1, 1), "[rank0]: Traceback (most recent call last):\n[rank0]:   x\n[rank0]: "+peerGone+"\n"),
				exit(1, 1, 2)},
			nil, FirstExit, 1, noNode},
		{"a consequence that a C++ thread died of",
			failures{said(exit(0, -6, 1), "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  "+
				"[Rank 0] NCCL watchdog thread terminated with exception: remote process exited or there was a network error\n"),
				exit(1, 1, 2)},
			nil, FirstExit, 1, noNode},
		{"the output before the last error does not count",
			failures{said(exit(0, 1, 1),
				"s3: Connection reset by peer, retrying\nTraceback (most recent call last):\n  x\nValueError: a\n"), exit(1, 1, 2)},
			nil, FirstExit, 0, noNode},
		{"a crash is no consequence whatever the output",
			failures{said(exit(0, -11, 1), "Connection reset by peer"), exit(1, 1, 2)}, nil, FirstExit, 0, noNode},

		{"a lost node alone", nil, losses{lossOf(4, 1)}, NodeLost, noRank, 4},
		{"the earliest loss", nil, losses{lossOf(4, 2), lossOf(5, 1)}, NodeLost, noRank, 5},
		{"a loss, then workers stopped", failures{stopped(exit(0, -15, 3))}, losses{lossOf(4, 1)},
			NodeLost, noRank, 4},
		{"an error before the loss of another node, stopped later",
			failures{stopped(raised(exit(0, -15, 9), "ValueError: a", 1))}, losses{lossOf(4, 5)}, FirstExit, 0, noNode},
		{"a loss before the first exit", failures{exit(0, 1, 2)}, losses{lossOf(4, 1)}, NodeLost, noRank, 4},
		{"a loss just after the first exit", failures{exit(0, -15, 1)}, losses{lossOf(4, 1.3)}, NodeLost, noRank, 4},
		{"a loss later than the grace", failures{exit(0, 1, 1)}, losses{lossOf(4, 1.301)}, FirstExit, 0, noNode},
		{"a loss found late explains a consequence", failures{raised(exit(0, 1, 1), peerGone, 1)}, losses{lossOf(4, 16)},
			NodeLost, noRank, 4},
		{"an OOM kill beats a loss just after it", failures{oomKilled(exit(0, -9, 1))}, losses{lossOf(4, 1.1)},
			OutOfMemory, 0, noNode},
		{"an OOM kill does not beat an earlier loss", failures{oomKilled(exit(0, -9, 1))}, losses{lossOf(4, 0.9)},
			NodeLost, noRank, 4},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := Judge(Evidence{
				Failures: tt.failures, Losses: tt.losses, RestartsUsed: 1, MaxRestarts: 2, WorldSize: 8,
			})

			require.Equal(t, tt.rule, v.Rule)
			rank, node, followers := noRank, noNode, len(tt.failures)
			if v.Root != nil {
				rank = v.Root.Rank
				followers--
			}
			if v.Loss != nil {
				node = v.Loss.Node
			}
			require.Equal(t, [2]int{tt.rank, tt.node}, [2]int{rank, node}, "rank, node")
			require.Len(t, v.Followers, followers)
			for i, f := range v.Followers {
				require.NotEqual(t, rank, f.Rank)
				require.False(t, i > 0 && f.At.Before(v.Followers[i-1].At), "followers by time")
			}
			require.Equal(t, [3]int{1, 2, 8}, [3]int{v.RestartsUsed, v.MaxRestarts, v.WorldSize})
		})
	}
}

func TestJudgeLeavesTheEvidenceAlone(t *testing.T) {
	e := Evidence{
		Failures: []Failure{exit(2, 1, 3), exit(1, 1, 2), exit(0, 1, 1)},
		Losses:   []Loss{lossOf(1, 9), lossOf(0, 8)},
	}
	v := Judge(e)
	v.Root.Rank, v.Followers[0].Rank = 77, 77
	require.Equal(t, []Failure{exit(2, 1, 3), exit(1, 1, 2), exit(0, 1, 1)}, e.Failures)
	require.Equal(t, 1, e.Losses[0].Node)
}

func TestLine(t *testing.T) {
	full := Failure{
		Node: 1, NodeName: "host-b", Host: "host-b", Rank: 3, LocalRank: 1, PID: 4242,
		Role: "default", ExitCode: 1, At: at(1),
	}
	as := func(change func(*Failure)) []Failure {
		f := full
		change(&f)
		return []Failure{f}
	}
	const who, none = "rank 3 (node 1 host-b, local rank 1, pid 4242) failed first: ", "; no other rank of 8 " +
		"failed; restarts used 0 of 0"
	for _, tt := range []struct {
		name string
		Evidence
		want string
	}{
		{"an exception and its followers", Evidence{
			Failures: []Failure{raised(full, "ValueError: bad batch", 0), exit(0, 1, 2), exit(1, -6, 2), exit(2, -6, 3),
				stopped(exit(4, -15, 3)), stopped(exit(5, -9, 33))},
			RestartsUsed: 3, MaxRestarts: 3, WorldSize: 8},
			who + "ValueError: bad batch (exit code 1); 3 ranks followed: 2 by SIGABRT, 1 with exit code 1; " +
				"2 ranks stopped by the launcher; restarts used 3 of 3"},
		{"one rank", Evidence{Failures: as(func(*Failure) {}), WorldSize: 1},
			who + "exit code 1; restarts used 0 of 0"},
		{"only stopped ranks besides",
			Evidence{Failures: append(as(func(*Failure) {}), stopped(exit(0, -15, 2))), WorldSize: 8},
			who + "exit code 1; 1 rank stopped by the launcher; restarts used 0 of 0"},
		{"OOM", Evidence{Failures: []Failure{oomKilled(as(func(f *Failure) { f.ExitCode = -9 })[0])},
			WorldSize: 8},
			who + "killed by the kernel's OOM killer (SIGKILL): the cgroup's limit is 8.0 GiB, peak 8.0 GiB" + none},
		{"OOM without figures",
			Evidence{Failures: as(func(f *Failure) { f.ExitCode, f.OOM = -9, &OOM{} }), WorldSize: 8},
			who + "killed by the kernel's OOM killer (SIGKILL)" + none},
		{"OOM of a child", Evidence{Failures: as(func(f *Failure) {
			f.Message, f.OOM = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", &OOM{
				Limit: 512 << 20, Peak: 3 << 10,
			}
		}), WorldSize: 8},
			who + "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. (exit code 1), " +
				"after the kernel's OOM killer had " +
				"killed a process of its cgroup: the cgroup's limit is 512.0 MiB, peak 3.0 KiB" + none},
		{"a crash", Evidence{Failures: as(func(f *Failure) { f.ExitCode = -11 }), WorldSize: 8},
			who + "SIGSEGV" + none},
		{"a signal without a name", Evidence{Failures: as(func(f *Failure) { f.ExitCode = -35 }),
			WorldSize: 8}, who + "signal 35" + none},
		{"a kill from outside", Evidence{Failures: as(func(f *Failure) { f.ExitCode = -9 }), WorldSize: 8},
			who + "SIGKILL, not sent by the launcher" + none},
		{"a timer",
			Evidence{Failures: as(func(f *Failure) { f.ExitCode, f.Timer = -9, `timer "a" of 2s expired` }),
				WorldSize: 8},
			who + `timer "a" of 2s expired (SIGKILL)` + none},
		{"a timer and an error", Evidence{Failures: as(func(f *Failure) {
			f.Message, f.Timer = "KeyboardInterrupt", `timer "a" of 2s expired`
		}), WorldSize: 8}, who + `KeyboardInterrupt (exit code 1), after timer "a" of 2s expired` + none},
		{"stopped in its teardown", Evidence{Failures: append(
			as(func(f *Failure) { *f = stopped(raised(*f, "ValueError: a", 0)); f.ExitCode = -15 }),
			raised(exit(0, 1, 0.5), peerGone, 0)), WorldSize: 8},
			who + "ValueError: a (then stopped by the launcher); 1 rank followed: 1 with exit code 1; restarts used 0 of 0"},
		{"only a consequence", Evidence{Failures: []Failure{raised(full, peerGone, 0)}, WorldSize: 8},
			who + peerGone + " (exit code 1); this error is a consequence, its cause was not reported" + none},
		{"the error of a traceback in the output", Evidence{Failures: as(func(f *Failure) {
			f.LastLines = "epoch 3\n[rank3]: Traceback (most recent call last):\n[rank3]:   File \"t.py\", line 1\n" +
				"[rank3]:     f()\n[rank3]: " +
				"torch.distributed.DistStoreError: wait timeout after 2000ms, keys: /nope\n[rank3]: note\n"
		}), WorldSize: 8},
			who + "torch.distributed.DistStoreError: wait timeout after 2000ms, keys: /nope (exit code 1); " +
				"this error is a consequence, " +
				"its cause was not reported" + none},
		{"the last of chained tracebacks", Evidence{Failures: as(func(f *Failure) {
			f.Traceback = "Traceback (most recent call last):\n  a\nKeyError: 1\n\n" +
				"During handling of the above exception, another exception occurred:\n\n" +
				"Traceback (most recent call last):\n  b\nValueError: 2\n"
		}), WorldSize: 8}, who + "ValueError: 2 (exit code 1)" + none},
		{"a C++ exception", Evidence{Failures: as(func(f *Failure) {
			f.ExitCode, f.LastLines = -6, "terminate called after throwing an instance of 'std::bad_alloc'\n"+
				"  what():  std::bad_alloc\nAborted\n"
		}), WorldSize: 8}, who + "std::bad_alloc (SIGABRT)" + none},
		{"the last output, if no error is found", Evidence{Failures: as(func(f *Failure) {
			f.ExitCode, f.LastLines = 127, "x\nsh: 1: nosuch: not found\n\n"
		}), WorldSize: 8}, who + `exit code 127, last output "sh: 1: nosuch: not found"` + none},
		{"the first line of a long message",
			Evidence{Failures: []Failure{raised(full, "\nRuntimeError: CUDA error: assert\nCompile with...", 0)},
				WorldSize: 8},
			who + "RuntimeError: CUDA error: assert (exit code 1)" + none},
		{"a message that just fits",
			Evidence{Failures: []Failure{raised(full, strings.Repeat("x", 216), 0)}, WorldSize: 8},
			who + strings.Repeat("x", 216) + " (exit code 1)" + none},
		{"a message that does not",
			Evidence{Failures: []Failure{raised(full, strings.Repeat("x", 217), 0)}, WorldSize: 8},
			who + strings.Repeat("x", 213) + "… (exit code 1)" + none},
		{"a role, a node name and a host",
			Evidence{Failures: as(func(f *Failure) { f.Role, f.NodeName = "trainer", "worker-1" }),
				WorldSize: 8},
			"rank 3 (role trainer, node 1 worker-1 on host-b, local rank 1, pid 4242) failed first: exit code 1" + none},
		{"no names", Evidence{Failures: []Failure{exit(3, 1, 1)}, WorldSize: 8},
			"rank 3 (node 0, local rank 0, pid 0) failed first: exit code 1" + none},
		{"control characters",
			Evidence{Failures: []Failure{raised(full, "E: \x1b[2J\r\x00\u202e\xff\ttab 'q' \"q\" \\ é", 0)},
				WorldSize: 8},
			who + `E: \x1b[2J\r\x00\u202e\xff\ttab 'q' "q" \ é (exit code 1)` + none},
		{"a lost node", Evidence{
			Losses: []Loss{{Node: 1, NodeName: "worker-1", Host: "host-b", Reason: "no heartbeat for 15 s", At: at(0),
				Ranks: []int{11, 8, 9, 10, 8}}, lossOf(2, 5), lossOf(3, 6)},
			Failures:    []Failure{raised(exit(0, 1, 1), peerGone, 1), stopped(exit(1, -15, 2))},
			MaxRestarts: 3, WorldSize: 16},
			"node 1 worker-1 on host-b went away first: no heartbeat for 15 s; it ran ranks 8-11; " +
				"1 rank followed: 1 with exit code 1; " +
				"1 rank stopped by the launcher; 2 more nodes went away; restarts used 0 of 3"},
		{"a lost node with scattered ranks", Evidence{
			Losses: []Loss{{Node: 1, Ranks: []int{1, 3, 5, 7, 9, 11}}}, WorldSize: 16},
			"node 1 went away first; it ran ranks 1, 3, 5, 7, 2 more; restarts used 0 of 0"},
		{"a node lost later",
			Evidence{Failures: as(func(*Failure) {}), Losses: []Loss{lossOf(1, 60)}, WorldSize: 1},
			who + "exit code 1; 1 node went away; restarts used 0 of 0"},
		{"nothing failed by itself", Evidence{Failures: []Failure{stopped(full)}, WorldSize: 8},
			"no worker failed by itself; 1 rank stopped by the launcher; restarts used 0 of 0"},
		{"many ways to end", Evidence{Failures: append(as(func(*Failure) {}), exit(0, 2, 2), exit(1, 3, 2),
			exit(2, 4, 2), exit(4, 5, 2),
			exit(5, 6, 2), oomKilled(exit(6, -9, 60))), WorldSize: 8},
			who + "exit code 1; 6 ranks followed: 1 by the OOM killer, 1 with exit code 2, 1 with exit code 3, " +
				"1 with exit code 4, 2 otherwise; restarts used 0 of 0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := Judge(tt.Evidence)
			line := v.Line()
			if v.Class != Unknown {
				require.Contains(t, line, "; class "+string(v.Class)+"; restarts used")
			}
			require.Equal(t, tt.want, withoutClass(line))
		})
	}
}

// withoutClass leaves out what TestClass looks at.
func withoutClass(line string) string {
	before, after, ok := strings.Cut(line, "; class ")
	if !ok {
		return line
	}
	_, after, _ = strings.Cut(after, "; ")
	return before + "; " + after
}

func requireOneLine(t *testing.T, line string) {
	t.Helper()
	require.LessOrEqual(t, len(line), maxLine)
	require.True(t, utf8.ValidString(line))
	require.NotContains(t, line, "\n")
	for _, r := range line {
		require.True(t, unicode.IsPrint(r), "%q in %q", r, line)
	}
}

func TestLineIsBounded(t *testing.T) {
	long := strings.Repeat("é\x1b", 5000)
	f := Failure{Node: math.MaxInt, NodeName: long, Host: "x" + long, Rank: math.MaxInt,
		LocalRank: math.MaxInt, PID: math.MaxInt,
		Role: long, ExitCode: math.MaxInt, Message: long,
		OOM: &OOM{Limit: math.MaxInt64, Peak: math.MaxInt64}, At: at(0)}
	quiet := f
	quiet.Message, quiet.LastLines = "", long
	timed := f
	timed.Timer = long
	for _, root := range []Failure{f, quiet, timed} {
		e := Evidence{
			Failures: []Failure{root}, RestartsUsed: math.MaxInt, MaxRestarts: math.MaxInt, WorldSize: math.MaxInt,
		}
		for i := range 100 {
			e.Failures = append(e.Failures, exit(i, 1_000_000+i, 100), stopped(exit(i, -15, 100)))
			e.Losses = append(e.Losses, lossOf(i, 100))
		}
		line := Judge(e).Line()
		requireOneLine(t, line)
		require.Contains(t, line, "restarts used", "the end is never cut off")
	}
	loss := Loss{Node: math.MaxInt, NodeName: long, Host: "x" + long, Reason: long}
	for i := range 1000 {
		loss.Ranks = append(loss.Ranks, math.MaxInt-2*i)
	}
	requireOneLine(t, Judge(Evidence{Losses: []Loss{loss}}).Line())
}

func FuzzLine(f *testing.F) {
	f.Add("ValueError: bad batch", "Traceback (most recent call last):\n  x\nE: y", "host", 1)
	f.Add("", "[rank0]: Traceback (most recent call last):\n[rank0]: what(): \xff\xfe", "\u202e\n", -6)
	f.Add("…", "what():", "'", -9)
	f.Fuzz(func(t *testing.T, message, output, host string, code int) {
		failure := Failure{
			Message: message, LastLines: output, Host: host, NodeName: host + "n", ExitCode: code, At: at(0),
		}
		requireOneLine(t, Judge(Evidence{Failures: []Failure{failure}}).Line())
		failure.Traceback = output
		_ = Block(host, []Failure{failure.Compact()}, 0)
	})
}

func TestCompact(t *testing.T) {
	f := raised(exit(3, 1, 1), "ValueError: "+strings.Repeat("é", 9000), 0)
	f.Traceback = strings.Repeat("  frame\n", 9000) + "ValueError: end"
	f.LastLines = strings.Repeat("ö", 9000) + "last"
	c := f.Compact()
	data, err := json.Marshal(c)
	require.NoError(t, err)
	require.Less(t, len(data), 8<<10)
	require.True(t, utf8.ValidString(c.Message+c.Traceback+c.LastLines))
	require.True(t, strings.HasPrefix(c.Message, "ValueError: é"))
	require.True(t, strings.HasSuffix(c.Traceback, "ValueError: end"))
	require.True(t, strings.HasSuffix(c.LastLines, "last"))

	small := raised(exit(3, 1, 1), "ValueError", 0)
	require.Equal(t, small, small.Compact())
}

func TestVerdictTravels(t *testing.T) {
	v := Judge(Evidence{
		Failures: []Failure{oomKilled(raised(exit(0, -9, 1.25), "E: a", 1)), exit(1, 1, 2)},
		Losses:   []Loss{lossOf(3, 9)}, WorldSize: 2})
	data, err := json.Marshal(v)
	require.NoError(t, err)
	require.NotContains(t, string(data[strings.Index(string(data), "followers"):]),
		"error_time", "zero times are left out")
	var back Verdict
	require.NoError(t, json.Unmarshal(data, &back))
	require.Equal(t, v, back)
	require.Equal(t, v.Line(), back.Line())
}

// The golden files were printed by torch 2.15; see TestBlockIsTorchs for the comparison with the torch at hand.
func TestBlock(t *testing.T) {
	first := Failure{Host: "localhost", Rank: 0, LocalRank: 0, PID: 9943, ExitCode: -35, At: at(0.7)}
	second := Failure{Host: "localhost", Rank: 1, LocalRank: 1, PID: 9944, ExitCode: -15, At: at(0.9),
		ErrorFile: "/logs/attempt_0/1/error.json",
		Message:   "ValueError: a\nb", Traceback: "Traceback (most recent call last):\n  File \"w.py\"\nValueError: a\nb\n",
		ErrorTime: at(0)}
	for name, got := range map[string]string{
		"first":  Block("w.py", []Failure{first, second}, 0),
		"second": Block("w.py", []Failure{first, second}, 1),
		"single": Block("w.py", []Failure{exit(3, 3, 0)}, 0),
	} {
		golden := filepath.Join("testdata", "block_"+name+".golden")
		if *update {
			require.NoError(t, os.WriteFile(golden, []byte(got), 0o644))
		}
		want, err := os.ReadFile(golden)
		require.NoError(t, err)
		require.Equal(t, string(want), got, name)
	}

	require.Equal(t, Block("w.py", []Failure{first, second}, 0),
		Block("w.py", []Failure{first, second}, 7),
		"torchrun's choice when no failure is named: the earliest whole second, then the order given")
	require.Empty(t, Block("w.py", nil, 0))
}
