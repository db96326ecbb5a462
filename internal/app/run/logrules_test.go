package run

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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
	t.Parallel()
	b := newBench(t)
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, "train.py"), []byte(diverging), 0o600))
	l := b.start("dlrover-run",
		[]string{"PYTHON_EXEC=" + torchpython.Require(t, "A LOSS THAT BECOMES NAN IS")},
		"--nproc-per-node=2", "--max-restarts=1", "--redirects=3", "--event-log="+filepath.Join(b.dir, "events"),
		"--log-rule=loss:loss[:=]:nan:action=restart", "--log-rule=again:step 3:action=report", "train.py")
	require.Zero(t, l.wait(), l.err.String())
	require.Regexp(t, `"msg":"log rule".*"rule":"loss","rank":1,"found":"(nan|inf) is not a number in \\"step \d+ loss: `+
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
		"log-rule":     `rank 0: log rule loss: nan is not a number in "loss: nan"`,
		"device-fault": "xid: rank 0: log rule gpu: ",
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
