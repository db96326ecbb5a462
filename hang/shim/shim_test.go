package shim

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/hang"
	"dlrover-run/hang/page"
	"dlrover-run/internal/testkit"
	"dlrover-run/launcher/torchpython"
)

const (
	// moduleTimeout is what no module of tests needs, on a machine that does much else.
	moduleTimeout = 15 * time.Minute
	shownBytes    = 16 << 10
	oldest        = 8 // minor versions of Python 3 that the shim is for
	newest        = 14
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestEmbedsEveryModuleAndNothingElse(t *testing.T) {
	want, err := filepath.Glob("_dlrover_hang/*.py")
	require.NoError(t, err)
	want = append(want, "sitecustomize.py")
	var got []string
	require.NoError(t, fs.WalkDir(Files, ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			got = append(got, name)
		}
		return err
	}))
	slices.Sort(got)
	slices.Sort(want)
	require.Equal(t, want, got)
	require.Contains(t, got, "_dlrover_hang/__init__.py")
}

// TestInterpreters runs the tests that need no PyTorch with every interpreter that is installed.
func TestInterpreters(t *testing.T) {
	testkit.Long(t, "a Python takes half a minute")
	for minor := oldest; minor <= newest; minor++ {
		version := fmt.Sprintf("3.%d", minor)
		t.Run(version, func(t *testing.T) {
			interpreter := torchpython.Interpreter(version)
			if interpreter == "" {
				t.Skipf("SKIPPED: THE SHIM IS NOT TESTED WITH PYTHON %s: there is no python%s", version, version)
			}
			runModule(t, interpreter, "test_site")
			runModule(t, interpreter, "test_worker")
			runModule(t, interpreter, "test_looks")
		})
	}
}

// TestOlderInterpreters: programs of a job that are older than the shim are left alone.
func TestOlderInterpreters(t *testing.T) {
	found := false
	for _, version := range []string{"2.7", "3.6", "3.7"} {
		if interpreter := torchpython.Interpreter(version); interpreter != "" {
			found = true
			out, err := python(t, interpreter, "-c",
				"import sys; assert 'sitecustomize' in sys.modules; assert '_dlrover_hang' not in sys.modules")
			require.NoError(t, err, out)
			require.Empty(t, out)
		}
	}
	if !found {
		t.Skip("SKIPPED: PYTHONS OLDER THAN THE SHIM ARE NOT TESTED: there is none")
	}
}

// TestTorch runs the tests with PyTorch.
func TestTorch(t *testing.T) {
	testkit.Long(t, "PyTorch is imported dozens of times")
	runModule(t, torchpython.Require(t, "THE SHIM IS"), "test_torch")
}

func runModule(t *testing.T, interpreter, name string) {
	t.Helper()
	out, err := python(t, interpreter, "-m", "unittest", "-v", "tests."+name)
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", interpreter, name, err, tail(out))
	}
	if strings.Contains(out, "SKIPPED: ") {
		t.Log(out[strings.Index(out, "SKIPPED: "):])
	}
}

// python runs an interpreter as that of a worker, and returns what it prints. When its time is over that ends with
// where it was.
func python(t *testing.T, interpreter string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), moduleTimeout)
	defer cancel()
	here, err := filepath.Abs(".")
	require.NoError(t, err)
	cmd := exec.CommandContext(ctx, interpreter, args...)
	cmd.Env = append(os.Environ(), "PYTHONPATH="+here+":"+filepath.Join(here, "tests"), "DLROVER_HANG_DIR="+t.TempDir(),
		"PYTHONDONTWRITEBYTECODE=1", "PYTHONFAULTHANDLER=1", "OMP_NUM_THREADS=1")
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGABRT) }
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = 10 * time.Second // children may hold the pipe
	err = cmd.Run()
	return out.String(), err
}

// tail returns the end of what unittest prints: the failures and the summary.
func tail(out string) string {
	if len(out) > shownBytes {
		return "[...]" + out[len(out)-shownBytes:]
	}
	return out
}

// job is what a worker does whose page Go reads, with the PyTorch of the tests.
const job = `
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group()
dist.new_group([0, 2]).seq = 2**64 - 1
o = torch.optim.Optimizer()
for _ in range(5):
    o.step()
torch.save(0.002, None)
while not os.path.exists(os.path.join(os.environ["DLROVER_HANG_DIR"], "l1.groups")):
    time.sleep(0.01)
time.sleep(0.01)
torch.nn.Module().eval()
time.sleep(0.002)
print("ready", flush=True)
sys.stdin.read()
`

// TestPageIsRead: what the shim writes is what hang reads.
func TestPageIsRead(t *testing.T) {
	interpreter := torchpython.Interpreter("3")
	if interpreter == "" {
		t.Skip("SKIPPED: THE FORMAT OF PAGES IS NOT TESTED: there is no python3")
	}
	dir := t.TempDir()
	here, err := filepath.Abs(".")
	require.NoError(t, err)
	cmd := exec.Command(interpreter, "-c", job)
	cmd.Env = append(os.Environ(), "PYTHONPATH="+here+":"+filepath.Join(here, "tests/fake"), "DLROVER_HANG_DIR="+dir,
		"PYTHONDONTWRITEBYTECODE=1", "RANK=5", "LOCAL_RANK=1", "WORLD_SIZE=8")
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	_, err = stdout.Read(make([]byte, 6))
	require.NoError(t, err)

	p, groups := read(t, dir)
	require.Equal(t, []any{cmd.Process.Pid, 5, 8, 1, uint64(5), hang.PhaseEval},
		[]any{p.PID, p.Rank, p.WorldSize, p.Local, p.Steps, p.Phase})
	require.Equal(t, cmd.Process.Pid, p.Thread)
	require.Len(t, p.StepTimes, 5)
	require.Equal(t, p.LastStep, p.StepTimes[4])
	require.Equal(t, hang.PhaseCheckpoint, p.Spans[len(p.Spans)-1].Phase)
	require.True(t, p.Created < p.LastStep && p.LastStep < p.PhaseSince && p.PhaseSince < p.Created+time.Minute)
	require.Len(t, p.Groups, 2)
	require.ElementsMatch(t, []string{"0-7", "0,2"}, []string{groups[0].Ranks, groups[1].Ranks})
	for _, g := range groups {
		i := slices.IndexFunc(p.Groups, func(s hang.GroupState) bool { return s.ID == g.ID })
		require.Equal(t, map[string]uint64{"0-7": 0, "0,2": 1<<64 - 1}[g.Ranks], p.Groups[i].Seq)
		require.Equal(t, []string{"of tests", "cpu:gloo"}, []string{g.Desc, g.Backend})
	}

	require.NoError(t, stdin.Close())
	require.NoError(t, cmd.Wait())
	p, _ = read(t, dir)
	require.Equal(t, hang.PhaseEnd, p.Phase)
	require.Equal(t, hang.PhaseEval, p.Spans[len(p.Spans)-1].Phase)
}

func read(t *testing.T, dir string) (hang.Page, []hang.Group) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "l1.page"))
	require.NoError(t, err)
	p, err := page.Read(b)
	require.NoError(t, err)
	b, err = os.ReadFile(filepath.Join(dir, "l1.groups"))
	require.NoError(t, err)
	groups, err := page.ParseGroups(b)
	require.NoError(t, err)
	return p, groups
}
