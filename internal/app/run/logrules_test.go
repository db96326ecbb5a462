package run

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher"
	"dlrover-run/launcher/logs"
	logrule "dlrover-run/launcher/logs/rule"
	"dlrover-run/launcher/torchpython"
)

// diverging is a job whose loss becomes NaN at its first start, on rank 1 alone, while rank 0 prints a progress bar.
const diverging = `
import os, sys, time
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1"
opt = torch.optim.SGD(model.parameters(), lr=1e30 if first else 0.01)
for step in range(200 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 5):
    loss = model(torch.ones(8, 4)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if os.environ["RANK"] == "1":
        print(f"step {step} loss: {loss}", flush=True)
    else:
        print(f"\rstep {step} loss={loss:.3f}", end="", file=sys.stderr, flush=True)
    time.sleep(0.05)
`

func TestLogRuleRestartsAJobWhoseLossIsNaN(t *testing.T) {
	long(t)
	b := newBench(t)
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, "train.py"), []byte(diverging), 0o600))
	l := b.start("dlrover-run",
		[]string{"PYTHON_EXEC=" + torchpython.Require(t, "A LOSS THAT BECOMES NAN IS")},
		"--nproc-per-node=2", "--max-restarts=1", "--redirects=3", "--event-log="+filepath.Join(b.dir, "events"),
		"--log-rule=loss:loss[:=]:nan:action=restart", "--log-rule=again:step 3:action=report", "train.py")
	require.Zero(t, l.wait(), l.err.String())
	require.Regexp(t, `"msg":"log rule".*"rule":"loss","rank":1,"found":"(nan|inf) is no number in \\"step \d+ loss: `+
		`(nan|inf)\\""`,
		l.err.String())
	require.Contains(t, l.err.String(), `"cause":"rank 1 (node 0`)
	events, err := os.ReadFile(filepath.Join(b.dir, "events"))
	require.NoError(t, err)
	require.Contains(t, string(events), `"event":"log-rule"`)
	require.Contains(t, string(events), `"rule":"again","rank":0`, "what is only told, and of a progress bar")
}

func TestLogRuleStopsAJob(t *testing.T) {
	b := newBench(t)
	l := b.run(b.sh(`echo "it is over \033[31mnow"; exec sleep 60`, "--max-restarts=3",
		"--log-rule=end:over:action=stop")...)
	require.Equal(t, 1, l.wait())
	require.Regexp(t, `rank 0 .* failed first: log rule end: it says "it is over \\+x1b\[31mnow"`, l.err.String())
	require.NotContains(t, l.err.String(), "\x1b")
}

// The master hears of what is only told: a broken device marks its node, and anything else is kept beside it.
func TestTheMasterHearsOfLogRules(t *testing.T) {
	b := newBench(t)
	d := b.start("dlrover-master", nil, "--listen=127.0.0.1:0", "--data-dir="+t.TempDir(),
		"--event-log="+filepath.Join(b.dir, "events.json"))
	env := []string{"DLROVER_MASTER_ADDR=" + b.served(d), "POD_NAME=pod-3", "NODE_NAME=gpu-07"}
	const script = `echo loss: nan; echo "NVRM: Xid (PCI:0000:3b:00): 79, pid=7"; echo loss: nan`
	l := b.start("dlrover-run", env, b.sh(script, "--log-rule=loss:loss:nan", "--log-rule=gpu:NVRM")...)
	require.Zero(t, l.wait(), l.err.String())
	for event, want := range map[string]string{
		"log-rule": `rank 0: log rule loss: nan is no number in "loss: nan"`, "device-fault": "xid: rank 0: log rule gpu: ",
	} {
		require.Len(t, b.events(event), 1, "told before the good-bye, and once")
		require.Equal(t, "pod-3", b.events(event)[0]["node"])
		require.Contains(t, b.events(event)[0]["text"], want)
	}
	eventually(t, "the mark", func() bool { return len(b.events("node-marked")) == 1 })
	require.Equal(t, "gpu-07", b.events("node-marked")[0]["node"])
	d.signal(syscall.SIGTERM)
	require.Zero(t, d.wait())
}

func TestLogRuleFindsALineThatStaysAway(t *testing.T) {
	b := newBench(t)
	l := b.run(b.sh(`echo step 1; exec sleep 60`, "--log-rule=progress:step:every=1s:action=stop")...)
	require.Equal(t, 1, l.wait())
	require.Contains(t, l.err.String(), "failed first: log rule progress: no such line for 1s")
}

// A launcher that did not run has not read what came meanwhile.
func TestLogRuleOfALauncherThatWasStopped(t *testing.T) {
	long(t)
	b := newBench(t)
	l := b.run(b.sh(`i=0; while [ ! -e $DIR/go ]; do echo step $i; : > $DIR/up; sleep 0.1; done`,
		"--log-rule=progress:step:every=1s:action=stop")...)
	eventually(t, "the worker", b.exists("up"))
	l.freeze()
	time.Sleep(5 * time.Second) // what is tested is that this long nothing is read
	l.thaw()
	time.Sleep(3 * time.Second) // in which a line that was missed would stop the job
	b.release()
	require.Zero(t, l.wait(), l.err.String())
}

func TestLogRulesOfAFile(t *testing.T) {
	b := newBench(t)
	path := filepath.Join(b.dir, "rules")
	for text, want := range map[string]string{
		"# none\n":               "",
		"a:x:nan\n\nb:(:nan\n":   path + ": line 3: b: the expression cannot be used",
		"loss:x:nan":             "two rules are called loss",
		strings.Repeat("#", 2e6): "too long: at most 1048576 bytes are read",
		"a:x:action=destroy:nan": "line 1: a: action=destroy: need report, restart or stop",
	} {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		l := b.run(b.sh(`exit 0`, "--log-rule=loss:loss:nan", "--log-rules="+path)...)
		if want == "" {
			require.Zero(t, l.wait(), text)
			continue
		}
		require.Equal(t, 2, l.wait(), text)
		require.Contains(t, l.err.String(), want)
	}
	l := b.run(b.sh(`exit 0`, "--log-rules="+path+".gone")...)
	require.Equal(t, 2, l.wait())
	require.Contains(t, l.err.String(), "no such file or directory; give the path of a file with rules")
}

// What nobody asked for is not there: the worker writes its file itself.
func TestNoLogRulesNoTap(t *testing.T) {
	b := newBench(t)
	const show = `fd=$(readlink /proc/$$/fd/1); echo $fd > $DIR/stdout`
	require.Zero(t, b.run(b.sh(show, "--redirects=3")...).wait())
	require.NotContains(t, b.lines("stdout")[0], "pipe")
	require.Zero(t, b.run(b.sh(show, "--redirects=3", "--log-rule=x:loss:nan:ranks=7")...).wait())
	require.NotContains(t, b.lines("stdout")[0], "pipe", "nor for a rank that no rule names")
	require.Zero(t, b.run(b.sh(show, "--redirects=3", "--log-rule=x:loss:nan")...).wait())
	require.Contains(t, b.lines("stdout")[0], "pipe")
}

// A worker never waits for rules: what they cannot read in their share of the time goes by.
func TestShareOfRules(t *testing.T) {
	var s share
	start := time.Now()
	require.True(t, s.left(start))
	s.spend(shareBurst + 50*time.Millisecond)
	require.False(t, s.left(start.Add(100*time.Millisecond)))
	require.True(t, s.skipped)
	require.True(t, s.left(start.Add(600*time.Millisecond)))
	s.spend(time.Second)
	require.False(t, s.left(start.Add(5*time.Second)))
	require.True(t, s.left(start.Add(20*time.Second)))
}

// The pumps of earlier workers may still read while new ones run.
func TestOutputOfEarlierWorkersIsTheirs(t *testing.T) {
	r, err := logrule.Parse("x:bad")
	require.NoError(t, err)
	l := &logRules{j: &nodeJob{s: &settings{size: size{slots: 1}}}, rules: []logrule.Rule{r}}
	l.start(&launcher.StartRequest{})
	old := l.tap(logs.WorkerID{}, logs.Stdout)
	l.start(&launcher.StartRequest{})
	old.Feed([]byte("bad\n"), time.Now())
	found, _ := l.workers[0].take(time.Now())
	require.Empty(t, found)
	l.tap(logs.WorkerID{}, logs.Stderr).Feed([]byte("bad\n"), time.Now())
	found, _ = l.workers[0].take(time.Now())
	require.Len(t, found, 1)
}

// Whoever sleeps until a later time, or for good, must hear that something is due sooner.
func TestTheFirstLineWakesTheWatch(t *testing.T) {
	r, err := logrule.Parse("x:step:every=1s")
	require.NoError(t, err)
	l := &logRules{j: &nodeJob{s: &settings{size: size{slots: 1}}}, rules: []logrule.Rule{r}}
	l.start(&launcher.StartRequest{})
	tap, w := l.tap(logs.WorkerID{}, logs.Stdout), l.workers[0]
	require.Zero(t, w.next())
	tap.Feed([]byte("step 1\n"), w.begun)
	require.Len(t, l.news, 1)
	<-l.news
	require.Equal(t, w.begun.Add(time.Second), w.next())
	tap.Feed([]byte("step 2\n"), w.begun.Add(time.Second/2))
	require.Empty(t, l.news, "a line like those before wakes nobody")
}

// BenchmarkLogRules measures how many lines of 100 bytes a second a worker gets rid of, and what they cost the
// launcher.
func BenchmarkLogRules(b *testing.B) {
	for _, tc := range []struct{ name, rule string }{
		{"off", ""}, {"other lines", "x:no such text:nan"}, {"every line", "x:loss:nan"}, {"no literal", "x:(?i)LOSS:nan"},
	} {
		b.Run(tc.name, func(b *testing.B) { floodRules(b, tc.rule) })
	}
}

func floodRules(b *testing.B, text string) {
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	require.NoError(b, err)
	defer null.Close()
	cfg := logs.Config{Dir: b.TempDir(), Stdout: null, Stderr: null, Tee: func(int) logs.Std { return 3 }}
	if text != "" {
		r, err := logrule.Parse(text)
		require.NoError(b, err)
		l := &logRules{j: &nodeJob{s: &settings{size: size{slots: 1}}}, rules: []logrule.Rule{r}}
		l.start(&launcher.StartRequest{})
		cfg.Tap = l.tap
	}
	l, err := logs.New(cfg)
	require.NoError(b, err)
	defer l.Close()
	a, err := l.Begin(0)
	require.NoError(b, err)
	w, err := a.Worker(logs.WorkerID{})
	require.NoError(b, err)
	line := "step 1200 of 100000, loss: 0.34567, lr 0.0001, grad norm 1.234, " + strings.Repeat("x", 35)
	cmd := exec.Command("/bin/sh", "-c", fmt.Sprintf("yes '%s' | head -n %d", line, b.N))
	cmd.Stdout, cmd.Stderr = w.Stdout(), w.Stderr()
	before, start := ownCPU(), time.Now()
	require.NoError(b, cmd.Start())
	w.Started()
	require.NoError(b, cmd.Wait())
	w.Drain(time.Minute)
	b.ReportMetric(float64(b.N)/time.Since(start).Seconds(), "lines/s")
	b.ReportMetric(float64(ownCPU()-before)/float64(b.N), "cpu-ns/line")
}

func ownCPU() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Whatever time the machine took from it, what comes in small pieces is read.
func TestOnlyAFloodGoesByUnread(t *testing.T) {
	r, err := logrule.Parse("x:bad")
	require.NoError(t, err)
	l := &logRules{j: &nodeJob{s: &settings{size: size{slots: 1}}}, rules: []logrule.Rule{r}}
	l.start(&launcher.StartRequest{})
	l.workers[0].share = share{since: time.Now(), spent: time.Hour}
	tap := l.tap(logs.WorkerID{}, logs.Stdout)
	tap.Feed([]byte(strings.Repeat("x", flooded)+"bad\n"), time.Now())
	found, skipped := l.workers[0].take(time.Now())
	require.Empty(t, found)
	require.True(t, skipped)
	tap.Feed([]byte("bad\n"), time.Now())
	found, _ = l.workers[0].take(time.Now())
	require.Len(t, found, 1)
}
