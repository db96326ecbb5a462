package run

import (
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/launcher/torchpython"
)

// warmTraining is a job of two nodes of two ranks that trains, and saves to memory at every step; see the bench's
// warm.py.
type warmTraining struct {
	*bench
	log, ckpts string
	args       []string
	nodes      []*launched

	read int64 // of the log
	seen []trainLine
}

func newWarmTraining(t *testing.T, opts ...string) *warmTraining {
	t.Helper()
	w := &warmTraining{bench: newBench(t)}
	w.env = append(w.env, "PYTHON_EXEC="+torchpython.Require(t, "WARM WORKERS ARE"))
	w.log, w.ckpts = filepath.Join(w.dir, "log"), filepath.Join(w.dir, "ckpts")
	require.NoError(t, os.Mkdir(w.ckpts, 0o700))
	script, err := filepath.Abs("../../../tools/bench/warm.py")
	require.NoError(t, err)
	w.args = append(w.c10d("2", append([]string{"--max-restarts=1000000", "--same-failures=-1", "--hang=off",
		"--shutdown-timeout=20"}, opts...)...), script, w.log, w.ckpts, "1000000", "0.02")
	return w
}

func (w *warmTraining) launch() {
	for i := range 2 {
		w.nodes = append(w.nodes, w.run(append([]string{fmt.Sprintf("--event-log=%s/events%d", w.dir, i)}, w.args...)...))
	}
}

// trainLine is a line of warm.py.
type trainLine struct {
	what             string
	rank, count, pid int
	at               time.Duration
	step             int
	loss             string
}

func (w *warmTraining) lines() []trainLine {
	if f, err := os.Open(w.log); err == nil {
		defer f.Close()
		text, _ := io.ReadAll(io.NewSectionReader(f, w.read, math.MaxInt64-w.read)) // what is new
		for line := range strings.Lines(string(text)) {
			var l trainLine
			if !strings.HasSuffix(line, "\n") {
				break
			}
			if n, _ := fmt.Sscan(line, &l.what, &l.rank, &l.count, &l.pid, &l.at, &l.step, &l.loss); n == 7 {
				w.seen = append(w.seen, l)
			}
			w.read += int64(len(line))
		}
	}
	return w.seen
}

func clock() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // never fails
	return time.Duration(ts.Nano())
}

// after is when the last of all ranks was that far after a moment, and their pids; false: one is not.
func (w *warmTraining) after(what string, since time.Duration) (last time.Duration, pids [4]int, ok bool) {
	for _, l := range w.lines() {
		if l.what == what && l.at > since && pids[l.rank] == 0 {
			pids[l.rank], last = l.pid, max(last, l.at)
		}
	}
	return last, pids, !slices.Contains(pids[:], 0)
}

// await waits until all ranks are that far.
func (w *warmTraining) await(what string, since, patience time.Duration) (last time.Duration, pids [4]int) {
	w.t.Helper()
	require.Eventually(w.t, func() (ok bool) { last, pids, ok = w.after(what, since); return ok }, patience,
		5*time.Millisecond, what)
	return last, pids
}

// ready: both launchers have two workers, a parent and two children that wait for their turn.
func (w *warmTraining) ready() bool {
	for _, l := range w.nodes {
		if len((&warmJob{w.bench, l}).children()) < 5 {
			return false
		}
	}
	return true
}

// off: so many parents were killed that a launcher has given up.
func (w *warmTraining) off() bool {
	return slices.ContainsFunc(w.nodes, func(l *launched) bool {
		return strings.Contains(l.err.String(), "warm workers are off")
	})
}

// curve is the loss by step, the same in all that have made it.
func (w *warmTraining) curve() map[int]string {
	w.t.Helper()
	all := map[int]string{}
	for _, l := range w.lines() {
		if l.what == "step" {
			if old, ok := all[l.step]; ok {
				require.Equal(w.t, old, l.loss, "step %d of rank %d", l.step, l.rank)
			}
			all[l.step] = l.loss
		}
	}
	return all
}

func (w *warmTraining) finish() {
	require.NoError(w.t, os.WriteFile(w.log+".go", nil, 0o600))
	for _, l := range w.nodes {
		require.Equal(w.t, 0, l.wait(), l.err.String())
	}
}

func (w *warmTraining) hows() map[string]int {
	all := map[string]int{}
	for i := range w.nodes {
		text, _ := os.ReadFile(fmt.Sprintf("%s/events%d", w.dir, i))
		for _, how := range []string{"parked", "forked", "exec"} {
			all[how] += strings.Count(string(text), `"how":"`+how+`"`)
		}
	}
	return all
}

func rounds(t *testing.T, variable string, few int) int {
	if text := os.Getenv(variable); text != "" {
		n, err := strconv.Atoi(text)
		require.NoError(t, err)
		return n
	}
	return few
}

func median(ds []time.Duration) string {
	slices.Sort(ds)
	ms := func(d time.Duration) string { return d.Round(time.Millisecond).String() }
	return fmt.Sprintf("%s [%s, %s]", ms(ds[len(ds)/2]), ms(ds[0]), ms(ds[len(ds)-1]))
}

// undisturbedCurve is the curve of a job that nothing happens to, for as many steps as another has made.
func undisturbedCurve(t *testing.T, steps int) map[int]string {
	t.Helper()
	w := newWarmTraining(t)
	w.args[len(w.args)-2], w.args[len(w.args)-1] = strconv.Itoa(steps), "0"
	w.launch()
	for _, l := range w.nodes {
		require.Eventually(t, func() bool {
			select {
			case <-l.exited:
				return true
			default:
				return false
			}
		}, time.Hour, 100*time.Millisecond)
		require.Zero(t, l.code)
	}
	return w.curve()
}

// requireSameCurve names the first step that differs.
func requireSameCurve(t *testing.T, want, got map[int]string) {
	t.Helper()
	for step := range len(want) {
		require.Equal(t, want[step+1], got[step+1], "loss of step %d", step+1)
	}
	require.Len(t, got, len(want))
}

// TestTorchWarmRestarts kills one rank after the other, WARM_RESTARTS (100) times. What is trained is, to the bit, what
// an undisturbed job trains.
func TestTorchWarmRestarts(t *testing.T) {
	longest(t)
	w := newWarmTraining(t, "--warm")
	w.launch()
	_, pids := w.await("step", 0, 5*time.Minute)
	var imported, stepped []time.Duration
	n := rounds(t, "WARM_RESTARTS", 100)
	for i := range n {
		require.Eventually(t, w.ready, 3*time.Minute, 20*time.Millisecond, "prepared processes")
		time.Sleep(rand.N(100 * time.Millisecond)) // at any moment of a step
		killed := clock()
		require.NoError(t, syscall.Kill(pids[i%4], syscall.SIGKILL))
		var at time.Duration
		at, _ = w.await("imported", killed, time.Minute)
		imported = append(imported, at-killed)
		// A step that was under way may end in others.
		at, pids = w.await("step", at, time.Minute)
		stepped = append(stepped, at-killed)
	}
	w.finish()
	curve := w.curve()
	t.Logf("%d kills, %d steps, starts %v; kill to past import torch %s, to the next step %s", n, len(curve), w.hows(),
		median(imported), median(stepped))
	requireSameCurve(t, undisturbedCurve(t, len(curve)), curve)
	hows := w.hows()
	require.Equal(t, 4*(n+1), hows["parked"]+hows["forked"], "the first start, too")
	require.GreaterOrEqual(t, hows["parked"], 4*n)
}

// killOne kills a child of a launcher, and says what it was.
func (w *warmTraining) killOne() string {
	pids := (&warmJob{w.bench, w.nodes[rand.IntN(2)]}).children()
	for _, i := range rand.Perm(len(pids)) {
		args, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pids[i]))
		for _, what := range []string{"_dlrover_warm", "warm.py"} { // a parent or its forks, a worker
			if strings.Contains(string(args), what) {
				_ = syscall.Kill(pids[i], syscall.SIGKILL) // it may have ended
				return what
			}
		}
	}
	return nobody
}

// nobody: there was no child to be killed, as between two starts.
const nobody = "nobody"

// TestTorchWarmChaos kills parents, prepared processes and workers at random moments of imports, forks and first steps,
// WARM_KILLS (50) times. The job goes on, and trains the same.
func TestTorchWarmChaos(t *testing.T) {
	longest(t)
	w := newWarmTraining(t, "--warm")
	w.launch()
	w.await("step", 0, 5*time.Minute)
	killed := map[string]int{}
	for i := range rounds(t, "WARM_KILLS", 50) {
		if i%3 == 0 {
			w.await("step", clock(), 5*time.Minute) // or the job backs off more and more
			require.Eventually(t, func() bool { return w.off() || w.ready() }, 3*time.Minute, 20*time.Millisecond,
				"prepared processes")
		}
		what := nobody
		for began := time.Now(); what == nobody && time.Since(began) < time.Minute; what = w.killOne() {
			time.Sleep(rand.N(400 * time.Millisecond)) // any moment
		}
		killed[what]++
	}
	w.await("step", clock(), 5*time.Minute)
	w.finish()
	curve, excused := w.curve(), 0
	for _, l := range w.nodes {
		excused += strings.Count(l.err.String(), "not charged to the job")
	}
	t.Logf("killed %v, %d steps, starts %v, not charged %d", killed, len(curve), w.hows(), excused)
	requireSameCurve(t, undisturbedCurve(t, len(curve)), curve)
}
