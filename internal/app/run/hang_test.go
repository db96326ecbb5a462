package run

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang/xpu"
	"dlrover-run/launcher/torchpython"
)

// hangJob is a job of testdata/hang.py.
type hangJob struct {
	*bench
	python string
	ls     []*launched
	files  string // where evidence goes
}

// newHangJob prepares a job whose given ranks do what the case says.
func newHangJob(t *testing.T) *hangJob {
	t.Helper()
	j := &hangJob{bench: newBench(t), python: torchpython.Require(t, "HANGS ARE")}
	j.files = filepath.Join(j.dir, "evidence")
	j.env = append(j.env, "PYTHON_EXEC="+j.python, "XPU_TIMER_TIMELINE_PATH="+j.files, "PYTHONWARNINGS=ignore")
	return j
}

// start starts it with four ranks on so many launchers.
func (j *hangJob) start(nodes int, opts []string, script ...string) {
	j.t.Helper()
	size := []string{"--standalone", "--nproc-per-node=4"}
	if nodes > 1 {
		size = append(j.c10d(strconv.Itoa(nodes)), fmt.Sprintf("--nproc-per-node=%d", 4/nodes))
	}
	path, err := filepath.Abs("testdata/hang.py")
	require.NoError(j.t, err)
	args := append(append(append(size, "--shutdown-timeout=2", "--log-format=json"), opts...), append([]string{path},
		script...)...)
	for range nodes {
		j.ls = append(j.ls, j.run(args...))
	}
}

// logged are the messages of a launcher that begin so, of some levels or of all.
func (l *launched) logged(begin string, levels ...string) (msgs []string) {
	for line := range strings.Lines(l.err.String()) {
		var m struct{ Msg, Level string }
		if json.Unmarshal([]byte(line), &m) == nil && strings.HasPrefix(m.Msg, begin) &&
			(len(levels) == 0 || slices.Contains(levels, m.Level)) {
			msgs = append(msgs, m.Msg)
		}
	}
	return msgs
}

// verdict waits for one on every launcher and returns it, with the time since the ranks have begun to hang.
func (j *hangJob) verdict(patience time.Duration) (string, time.Duration) {
	j.t.Helper()
	require.Eventually(j.t, func() bool {
		data, _ := os.ReadFile(filepath.Join(j.dir, "hangs")) // it is there before the time is in it
		return bytes.HasSuffix(data, []byte("\n"))
	}, 3*time.Minute, 10*time.Millisecond, "the ranks hang")
	began := j.times("hangs")[0]
	for _, l := range j.ls {
		require.Eventually(j.t, func() bool { return len(l.logged("hang: ")) > 0 }, patience, 10*time.Millisecond,
			"a verdict")
	}
	return j.ls[0].logged("hang: ")[0], time.Since(began)
}

// times are what the script has marked.
func (j *hangJob) times(mark string) (ts []time.Time) {
	j.t.Helper()
	data, err := os.ReadFile(filepath.Join(j.dir, mark))
	require.NoError(j.t, err)
	for line := range bytes.Lines(data) {
		s, err := strconv.ParseFloat(string(bytes.TrimSpace(line)), 64)
		require.NoError(j.t, err)
		ts = append(ts, time.UnixMicro(int64(s*1e6)))
	}
	return ts
}

// kill ends a job that hangs.
func (j *hangJob) kill() {
	for _, l := range j.ls {
		l.signal(syscall.SIGTERM)
	}
	for _, l := range j.ls {
		l.wait()
	}
}

// hangsAtOnce bounds the jobs that run side by side: most of the time they sleep.
const hangsAtOnce = 3

// besideOthers runs a test of hangs beside others. So does one that has such subtests only.
func besideOthers(t *testing.T) {
	t.Helper()
	long(t)
	t.Parallel()
}

// longest leaves a test to those who want all cases, not one of each kind.
func longest(t *testing.T) {
	t.Helper()
	if os.Getenv("DLROVER_LONG_TESTS") != "1" {
		t.Skipf("SKIPPED: %s IS NOT RUN without DLROVER_LONG_TESTS=1", t.Name())
	}
}

// hangCase is a job that hangs.
type hangCase struct {
	name, script, ranks string
	nodes               int
	want                string // a pattern of the line
	rare                bool   // runs with the longest tests only
}

// Every hang is named within half a minute, on every node.
func TestHangsAreNamedWithTorch(t *testing.T) {
	besideOthers(t)
	for _, c := range []hangCase{
		{"asleep in the data loader", "data", "2", 1, `rank 2 .*load_batch`, true},
		{"asleep in the data loader, two nodes", "data", "2", 2, `rank 2 \(node 1.*load_batch`, true},
		{"stopped", "stop", "1", 1, `rank 1 .*stopped`, true},
		{"stopped, two nodes", "stop", "3", 2, `rank 3 \(node 1.*stopped`, true},
		{"a loop", "spin", "2", 1, `rank 2 .*preprocess`, true},
		{"a loop that holds the GIL", "gil", "3", 1, `rank 3 .*tokenize`, true},
		{"a call that holds the GIL", "pause", "1", 1, `rank 1 .*wait_for_driver`, true},
		{"uninterruptible", "vfork", "1", 1, `rank 1 .*spawn_helper`, true},
		{"another collective", "gather", "2", 1, `rank 2.*all_gather`, true},
		{"a process group of two", "subgroup", "2", 1, `rank 2`, false},
		{"before the first step", "before", "2", 1, `rank 2`, false},
		{"before the first step, two nodes", "before", "3", 2, `rank 3`, true},
		{"after the last step", "after", "2", 1, `rank 2 .*finish`, false},
		{"rank 0", "data", "0", 1, `rank 0 .*load_batch`, true},
		{"in a thread", "data.thread", "2", 1, `rank 2 .*load_batch.*wait in`, false},
		{"an exception that does not end it", "fail", "2", 1,
			`rank 2 .* in beat .*has ended by ValueError: a batch of rank 2 is bad;`, false},
		{"two of them", "data", "1,3", 1, `ranks 1,3 .*load_batch`, true},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t) })
	}
}

func (c *hangCase) test(t *testing.T) {
	if c.rare {
		longest(t)
	}
	besideOthers(t)
	j := newHangJob(t)
	args := []string{c.script, c.ranks}
	opts := []string{"--hang=auto"}
	within := 30 * time.Second
	switch c.script {
	case "fail":
		opts = append(opts, "--tee=3") // its output is kept
	case "after":
		args = append(args, "150")
	case "before":
		within = 40 * time.Second // since it began to start; the others wait in the store for less
	}
	j.start(c.nodes, opts, args...)
	line, took := j.verdict(90 * time.Second)
	t.Logf("%5.1f s: %s", took.Seconds(), line)
	require.Regexp(t, c.want, line)
	if strings.Contains(line, " busy for ") {
		line = strings.TrimSuffix(line, " (uncertain: it may be at work)") // as everyone who computes may be
	}
	require.NotContains(t, line, "(uncertain")
	require.Less(t, took, within)
	j.evidence()
	j.kill()
}

// Stacks and a timeline of a healthy job, by the tool that xpu_timer's users know.
func TestDumpDriverWithTorch(t *testing.T) {
	besideOthers(t)
	j := newHangJob(t)
	path, err := filepath.Abs("testdata/hang.py")
	require.NoError(t, err)
	l := j.run("--standalone", "--nproc-per-node=3", "--hang=auto", path, "data", "9")
	eventually(t, "the ranks train", func() bool {
		marks, _ := filepath.Glob(filepath.Join(j.dir, "up.*"))
		return len(marks) == 3
	})
	driver := filepath.Join(j.dir, "xpu_timer_dump_driver")
	require.NoError(t, os.Symlink(filepath.Join(binDir, "dlroverctl"), driver))
	out, err := exec.Command(driver, "--world-size=3", "--gdb", "--pyspy", "--timeline=4").CombinedOutput()
	require.NoError(t, err, string(out))
	found, err := xpu.Read(j.files)
	require.NoError(t, err)
	require.Len(t, found.Evidence, 3)
	for rank := range 3 {
		data, err := os.ReadFile(filepath.Join(j.files, fmt.Sprintf("%05d-00003.trace.json", rank)))
		require.NoError(t, err, string(out))
		require.True(t, json.Valid(data))
		require.Contains(t, string(data), "aten::addmm")
	}
	require.NoError(t, os.WriteFile(filepath.Join(j.dir, "go"), nil, 0o600))
	require.Zero(t, l.wait(), "the job goes on, and ends as it would have")
}

// evidence checks the files.
func (j *hangJob) evidence() {
	j.t.Helper()
	for _, f := range []string{"py_stack", "py_stack.svg", "cpp_stack", "hang_report.json", "hang_report.txt",
		"trace.json"} {
		eventually(j.t, f, func() bool {
			data, err := os.ReadFile(filepath.Join(j.files, "latest", f))
			return err == nil && len(data) > 0
		})
	}
	for rank := range 4 { // each node writes those of its own ranks
		eventually(j.t, "stacks of a rank", func() bool {
			_, err := os.Stat(filepath.Join(j.files, xpu.Name(rank, 4)))
			return err == nil
		})
	}
	found, err := xpu.Read(j.files)
	require.NoError(j.t, err)
	require.Len(j.t, found.Evidence, 4, "%v", found.Notes)
	dirs, err := filepath.Glob(filepath.Join(j.files, "hang-*"))
	require.NoError(j.t, err)
	require.Len(j.t, dirs, 1, "one node writes")
}

// What takes its time is no hang.
func TestHealthyPausesAreNoHangsWithTorch(t *testing.T) {
	besideOthers(t)
	for _, c := range []struct {
		name, script, seconds string
		rare                  bool
	}{
		{"a stop of 15 s", "pause15", "", true},
		{"a checkpoint of rank 1", "save", "40", false},
		{"an evaluation on rank 1", "eval", "40", true},
		{"a first step of 60 s", "first", "60", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.rare {
				longest(t)
			}
			besideOthers(t)
			j := newHangJob(t)
			j.env = append(j.env, "SECONDS="+c.seconds)
			j.start(1, []string{"--hang=auto"}, c.script, "1", "200")
			j.healthy()
		})
	}
}

// A job is not ended because one of its ranks waits for something for a minute. A line may say what it does.
func TestInnocentWaitsAreNotEndedWithTorch(t *testing.T) {
	besideOthers(t)
	service := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(service.Close)
	for _, c := range []struct {
		name, script string
		want         string // a pattern of the line, if there may be one
		rare         bool
	}{
		{"a service is polled", "service", `rank 1 .* evaluate_by_service .*\(uncertain: it looks for something`, false},
		{"a child copies slowly", "child", "", false},
		{"data comes late", "late", `rank 1 .*asleep in await_data`, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.rare {
				longest(t)
			}
			besideOthers(t)
			j := newHangJob(t)
			j.env = append(j.env, "SECONDS=60", "SERVICE="+service.URL)
			j.start(1, []string{"--hang-action=restart", "--max-restarts=3"}, c.script, "1", "200")
			j.ends()
			require.Empty(t, j.ls[0].logged("hang: ", "ERROR"))
			require.Len(t, j.lines("up.1"), 1, "there is no restart")
			lines := j.ls[0].logged("hang: ")
			t.Logf("%q", lines)
			require.LessOrEqual(t, len(lines), 1)
			if c.want == "" {
				require.Empty(t, lines)
				return
			}
			require.Regexp(t, c.want, strings.Join(lines, ""))
		})
	}
}

// healthy waits for the end of a job of which nothing is to be said.
func (j *hangJob) healthy() {
	j.t.Helper()
	j.ends()
	require.Empty(j.t, j.ls[0].logged("hang: "))
}

func (j *hangJob) ends() {
	j.t.Helper()
	select {
	case <-j.ls[0].exited:
	case <-time.After(4 * time.Minute):
		require.FailNow(j.t, "the job does not end")
	}
	require.Zero(j.t, j.ls[0].code)
}

// A launcher that does not run sees no steps, and knows why.
func TestStarvedObserverAccusesNobodyWithTorch(t *testing.T) {
	besideOthers(t)
	for _, mode := range []string{"auto", "outside"} {
		t.Run(mode, func(t *testing.T) {
			if mode == "outside" {
				longest(t)
			}
			besideOthers(t)
			j := newHangJob(t)
			j.start(1, []string{"--hang=" + mode}, "none", "1", "500")
			eventually(t, "trains", j.exists("up.1"))
			j.ls[0].freeze()
			time.Sleep(20 * time.Second) // twice the limit, in which it sees nothing
			j.ls[0].thaw()
			j.healthy()
		})
	}
}

// actsSoon has hangs acted upon in less than three minutes.
const actsSoon = "XPU_TIMER_HANG_TIMEOUT=12"

// The job goes on, and says whose fault it was.
func TestHangRestartWithTorch(t *testing.T) {
	besideOthers(t)
	for _, c := range []hangCase{
		{"asleep", "data", "2", 1, `rank 2 .*load_batch`, true},
		{"stopped, two nodes", "stop", "2", 2, `rank 2 .*stopped`, true},
		{"uninterruptible, two nodes", "vfork", "2", 2, `rank 2 .*spawn_helper`, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.rare {
				longest(t)
			}
			besideOthers(t)
			j := newHangJob(t)
			j.env = append(j.env, actsSoon)
			j.start(c.nodes, []string{"--hang-action=restart", "--max-restarts=1"}, c.script, c.ranks)
			line, took := j.verdict(90 * time.Second)
			t.Logf("%5.1f s: %s", took.Seconds(), line)
			require.Regexp(t, c.want, line)
			eventually(t, "trains again", func() bool { return len(j.lines("up.2")) == 2 })
			j.release()
			for _, l := range j.ls {
				require.Zero(t, l.wait())
			}
			require.True(t, j.exists("done.2")())
			j.evidence()
		})
	}
}

// A job that may not be restarted any more ends with a status of its own.
func TestHangStopWithTorch(t *testing.T) {
	besideOthers(t)
	j := newHangJob(t)
	j.env = append(j.env, actsSoon)
	j.start(2, []string{"--hang-action=stop", "--exit-code-policy=reason"}, "data", "2")
	line, took := j.verdict(90 * time.Second)
	t.Logf("%5.1f s: %s", took.Seconds(), line)
	require.Regexp(t, `rank 2 \(node 1.*load_batch`, line)
	require.Less(t, took, 30*time.Second)
	for _, l := range j.ls {
		require.Equal(t, 42, l.wait())
		require.Regexp(t, `job job failed: .*rank 2`, l.err.String())
	}
}

// The daemon forgets what it has heard of a hang. The nodes tell its successor.
func TestHangOutlivesTheDaemonWithTorch(t *testing.T) {
	besideOthers(t)
	j := newHangJob(t)
	d, addr := j.startDaemon("127.0.0.1:0")
	j.env = append(j.env, "DLROVER_MASTER_ADDR="+addr)
	script, err := filepath.Abs("testdata/hang.py")
	require.NoError(t, err)
	for range 2 {
		j.ls = append(j.ls, j.run("--nnodes=2", "--nproc-per-node=2", "--rdzv-id=job", "--shutdown-timeout=2",
			"--log-format=json", "--hang=auto", script, "data", "2"))
	}
	events := func(kind string) bool {
		data, _ := os.ReadFile(filepath.Join(j.dir, "events.json"))
		return bytes.Contains(data, []byte(kind))
	}
	eventually(t, "suspected", func() bool { return events("hang-suspected") })
	d.signal(syscall.SIGKILL)
	d.wait()
	require.False(t, events("hang-verdict"))
	j.startDaemon(addr)
	line, took := j.verdict(90 * time.Second)
	t.Logf("%5.1f s: %s", took.Seconds(), line)
	require.Regexp(t, `rank 2 \(node 1.*load_batch`, line)
	require.NotContains(t, line, "(uncertain")
	require.Less(t, took, 60*time.Second)
	j.kill()
}

// From outside alone: nothing of ours is in the workers, and the culprit has a name all the same.
func TestHangsFromOutsideWithTorch(t *testing.T) {
	besideOthers(t)
	for _, c := range []hangCase{
		{"asleep", "data", "2", 1, `rank 2 .*load_batch`, true}, {"stopped", "stop", "2", 1, `rank 2 .*stopped`, false},
		{"a loop", "spin", "2", 1, `rank 2 .*preprocess`, false}, {"polls", "poll", "2", 1, `rank 2 .*await_file`, true},
		{"in a thread", "data.thread", "2", 1, `rank 2 .*load_batch`, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.rare {
				longest(t)
			}
			besideOthers(t)
			j := newHangJob(t)
			j.start(1, []string{"--hang=outside"}, c.script, c.ranks)
			line, took := j.verdict(3 * time.Minute)
			t.Logf("%5.1f s: %s", took.Seconds(), line)
			require.Regexp(t, c.want, line)
			require.Less(t, took, 2*time.Minute)
			j.kill()
		})
	}
}
