package run

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// warmScript ends as the file says that is named after its start.
const warmScript = `import decimal, json, os, sys, time
starts = os.environ["DIR"] + "/starts"
start = len(open(starts).read().split()) // 2 if os.path.exists(starts) else 0
rank = int(os.environ["RANK"])
with open(starts, "a") as f:
    f.write("%d:%d:%s:%d\n" % (rank, os.getppid(), os.environ["TORCHELASTIC_RESTART_COUNT"], os.getpid()))
with open(os.environ["DIR"] + "/shims", "a") as f:
    f.write("%s\n" % ("_dlrover_hang" in sys.modules))
while not os.path.exists(os.environ["DIR"] + "/go%d" % start):
    time.sleep(0.01)
assert sys.argv == ["warm.py", "x"] and __name__ == "__main__"
code = int(open(os.environ["DIR"] + "/go%d" % start).read())
if code == 0 or rank == 1:
    sys.exit(code)
time.sleep(1000)
`

// warmGate is a module that cannot be forked, or imported, before the first workers run: those are started by exec.
const warmGate = `import os, threading, time
starts = os.environ["DIR"] + "/starts"
if "GATE" not in os.environ and not os.path.exists(starts):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
while "GATE" in os.environ and (not os.path.exists(starts) or len(open(starts).readlines()) < 2):
    time.sleep(0.01)
`

// warmJob is a job of two workers that import little.
type warmJob struct {
	*bench
	l *launched
}

func newWarmJob(t *testing.T, opts ...string) *warmJob {
	t.Helper()
	python, err := exec.LookPath("/usr/bin/python3")
	if err != nil {
		t.Skip("SKIPPED: WARM WORKERS ARE NOT TESTED: there is no /usr/bin/python3")
	}
	j := &warmJob{bench: newBench(t)}
	j.env = append(j.env, "PYTHON_EXEC="+python, "PYTHONPATH="+j.dir)
	require.NoError(t, os.WriteFile(filepath.Join(j.dir, "gate.py"), []byte(warmGate), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(j.dir, "warm.py"), []byte(warmScript), 0o600))
	j.l = j.run(append(append([]string{"--standalone", "--nproc-per-node=2", "--max-restarts=9", "--warm=decimal,gate",
		"--event-log=events", "--hang=off", "--ckpt-daemon=off"}, opts...), "warm.py", "x")...)
	return j
}

// starts are the workers of one start, by rank: pid of the parent, restart count and pid.
func (j *warmJob) starts(n int) [2][3]int {
	j.t.Helper()
	var got [2][3]int
	eventually(j.t, fmt.Sprintf("start %d", n), func() bool { return len(j.lines("starts")) == 2*n+2 })
	for _, line := range j.lines("starts")[2*n:] {
		var rank, parent, count, pid int
		_, err := fmt.Sscanf(line, "%d:%d:%d:%d", &rank, &parent, &count, &pid)
		require.NoError(j.t, err)
		got[rank] = [3]int{parent, count, pid}
	}
	return got
}

// end lets the workers of a start end: rank 1 fails unless the code is 0.
func (j *warmJob) end(n, code int) {
	path := filepath.Join(j.dir, fmt.Sprint("go", n))
	require.NoError(j.t, os.WriteFile(path+".new", []byte(strconv.Itoa(code)), 0o600))
	require.NoError(j.t, os.Rename(path+".new", path))
}

// hows are the ways in which workers were started, in order.
func (j *warmJob) hows() (all []string) {
	text, _ := os.ReadFile(filepath.Join(j.dir, "events"))
	for line := range strings.Lines(string(text)) {
		var e struct {
			Event, How string
			Took       float64
		}
		if json.Unmarshal([]byte(line), &e) == nil && e.Event == "warm-start" {
			all = append(all, e.How)
		}
	}
	return all
}

// children are those of the launcher.
func (j *warmJob) children() (pids []int) {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", j.l.launcher()))
	for _, path := range tasks {
		text, _ := os.ReadFile(path)
		for _, word := range strings.Fields(string(text)) {
			pid, _ := strconv.Atoi(word)
			pids = append(pids, pid)
		}
	}
	return pids
}

// prepared waits until the parent and both parked children are there, beside two workers, and returns the parent.
func (j *warmJob) prepared() (parent int) {
	j.t.Helper()
	eventually(j.t, "a parent and two parked children", func() bool {
		pids := j.preparedBy()
		if len(pids) == 0 || len(j.children()) != 5 {
			return false
		}
		parent = pids[len(pids)-1]
		return syscall.Kill(parent, 0) == nil
	})
	return parent
}

// preparedBy are the processes that have imported, in order.
func (j *warmJob) preparedBy() (pids []int) {
	text, _ := os.ReadFile(filepath.Join(j.dir, "events"))
	for line := range strings.Lines(string(text)) {
		var e struct {
			Event string
			PID   int
		}
		if json.Unmarshal([]byte(line), &e) == nil && e.Event == "warm-prepared" {
			pids = append(pids, e.PID)
		}
	}
	return pids
}

func TestWarmRestart(t *testing.T) {
	t.Parallel()
	j := newWarmJob(t)
	first := j.starts(0)
	j.prepared()
	j.end(0, 3)
	second := j.starts(1)
	for rank := range 2 {
		require.Equal(t, [2]int{first[rank][0], 1}, [2]int(second[rank][:2]), "a child of the launcher; charged")
		require.NotEqual(t, first[rank][2], second[rank][2])
	}
	j.end(1, 4)
	require.Equal(t, 1, j.starts(2)[1][1], "so early after a warm start it is not charged")
	j.end(2, 5)
	require.Equal(t, 2, j.starts(3)[1][1])
	j.end(3, 0)
	require.Equal(t, 0, j.l.wait())
	require.Equal(t, []string{"exec", "exec", "parked", "parked", "exec", "exec", "forked", "forked"}, j.hows())
	require.Contains(t, j.l.err.String(), "not charged")
	left, err := filepath.Glob(filepath.Join(j.dir, "*", "*warm-*"))
	require.NoError(t, err)
	for _, path := range left {
		require.NoFileExists(t, filepath.Join(path, "owner"), "only the Python package stays, for the next launcher")
	}
}

// The first workers are forked, too, from one interpreter that imports; all later ones are as well.
func TestWarmFirstStart(t *testing.T) {
	t.Parallel()
	for _, modules := range []string{"--warm=decimal", "--warm"} {
		j := newWarmJob(t, modules)
		first := j.starts(0)
		require.Len(t, j.preparedBy(), 1)
		for _, w := range first {
			require.Equal(t, [2]int{j.l.launcher(), 0}, [2]int(w[:2]), "a child of the launcher")
		}
		j.end(0, 0)
		require.Equal(t, 0, j.l.wait())
		require.Subset(t, []string{"parked", "forked"}, j.hows())
		require.Len(t, j.hows(), 2)
	}
}

// Warm workers tell how far they are, too.
func TestWarmWorkersHaveTheShim(t *testing.T) {
	t.Parallel()
	j := newWarmJob(t, "--hang=auto")
	j.starts(0)
	j.prepared()
	j.end(0, 3)
	j.starts(1)
	j.end(1, 0)
	require.Equal(t, 0, j.l.wait())
	require.Equal(t, []string{"exec", "exec", "parked", "parked"}, j.hows())
	require.Equal(t, []string{"True", "True", "True", "True"}, j.lines("shims"))
}

func TestWarmStandby(t *testing.T) {
	t.Setenv("GATE", "1")
	j := newWarmJob(t, "--warm-mode=standby")
	j.starts(0)
	eventually(t, "both stand by", func() bool { return len(j.preparedBy()) == 2 })
	j.end(0, 3)
	j.starts(1)
	j.end(1, 0)
	require.Equal(t, 0, j.l.wait())
	require.Equal(t, []string{"exec", "exec", "standby", "standby"}, j.hows())
}

// Prepared processes and their parent may die at any time; too many deaths turn warm workers off, not the job.
func TestWarmProcessesAreReplaced(t *testing.T) {
	t.Parallel()
	j := newWarmJob(t)
	ws := j.starts(0)
	parent := j.prepared()
	for _, pid := range j.children() {
		if pid != parent && pid != ws[0][2] && pid != ws[1][2] {
			require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
		}
	}
	require.Equal(t, parent, j.prepared())
	for range 4 {
		old := j.prepared()
		require.NoError(t, syscall.Kill(old, syscall.SIGKILL))
		eventually(t, "its end", func() bool { return syscall.Kill(old, 0) != nil })
	}
	eventually(t, "the line that says so",
		func() bool { return strings.Contains(j.l.err.String(), "warm workers are off") })
	require.Contains(t, j.l.err.String(), "has ended by SIGKILL")
	j.end(0, 3)
	j.starts(1)
	j.end(1, 0)
	require.Equal(t, 0, j.l.wait())
	require.Equal(t, []string{"exec", "exec", "exec", "exec"}, j.hows())
}

// Whoever of guard and launcher is killed, nothing of what was prepared is left: newBench looks.
func TestWarmProcessesEndWithTheirLauncher(t *testing.T) {
	t.Parallel()
	for _, victim := range []string{"guard", "launcher"} {
		j := newWarmJob(t)
		j.starts(0)
		j.prepared()
		pid := j.l.launcher()
		if victim == "guard" {
			pid = j.l.cmd.Process.Pid
		}
		require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
		j.l.wait()
	}
}

func TestWarmSettings(t *testing.T) {
	for args, want := range map[string]string{
		"--warm train.py":               "",
		"--warm=a.b_1,c train.py":       "",
		"--warm=a/b train.py":           `--warm="a/b": "a/b" is not the name of a Python module`,
		"--warm=1a train.py":            "is not the name",
		"--warm-mode=fork train.py":     "--warm-mode has no effect without --warm",
		"--warm --no-python /bin/true":  "contradict each other",
		"--warm --warm-deny=, train.py": "",
	} {
		_, err := resolved(t, args, nil)
		if want == "" {
			require.NoError(t, err, args)
		} else {
			require.ErrorContains(t, err, want, args)
		}
	}
}
