package run

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/freeports"
	"dlrover-run/internal/testkit"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/torchpython"
)

// binDir holds the programs, built once for the whole test.
var binDir string

func TestMain(m *testing.M) {
	forgetScheduler()
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP) // under nohup, too, the programs start with its default
	if binDir = os.Getenv(innerBin); binDir != "" {
		os.Exit(m.Run())
	}
	dir, err := os.MkdirTemp("", "dlrover-e2e-")
	if err == nil {
		args := []string{"build", "-tags=urfave_cli_no_docs", "-trimpath", "-ldflags=-s -w"} // as make build
		cold, _ := os.ReadFile("../../../tools/cold.txt")                                    // without it they are too large
		for p := range strings.FieldsSeq(string(cold)) {
			args = append(args, "-gcflags="+p+"=-l")
		}
		build := exec.Command("go", append(args, "-o", dir+"/", "dlrover-run/cmd/dlrover-run",
			"dlrover-run/cmd/dlrover-master", "dlrover-run/cmd/dlroverctl", "dlrover-run/cmd/checkpointd")...)
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		var out []byte
		if out, err = build.CombinedOutput(); err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "build the programs:", err)
		os.Exit(1)
	}
	atOnce := hangsAtOnce
	if os.Getenv("DLROVER_TESTS") == "long" {
		atOnce++ // they wait more than others
		if err := runLong(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	binDir = dir
	testkit.SideBySide(atOnce)
	code := m.Run()
	os.RemoveAll(dir)
	_ = os.Remove("/etc/netns") // not before: another test may be about to use it
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// long leaves a test of more than ten seconds to those who have the time.
func long(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skipf("SKIPPED: %s IS NOT RUN with -short (make e2e does)", t.Name())
	}
}

// launched is a running launcher or daemon.
type launched struct {
	t      *testing.T
	cmd    *exec.Cmd
	out    *buffer
	err    *buffer
	exited chan struct{}
	code   int
}

type buffer = testkit.Buffer

// bench is a directory with the workers' marks, and the environment of the launchers.
type bench struct {
	t   *testing.T
	dir string
	env []string
	tag string // in the environment of everything that is started
}

func newBench(t *testing.T) *bench {
	b := &bench{t: t, dir: t.TempDir()}
	b.tag = "E2E_TAG=" + filepath.Base(filepath.Dir(b.dir)) + "-" + strconv.FormatInt(time.Now().UnixNano(), 36)
	b.env = append(os.Environ(), "DIR="+b.dir, "TMPDIR="+b.dir,
		"PYTHON_EXEC=/bin/sh", "OMP_NUM_THREADS=1", "PET_CKPT_SHM_DIR="+b.dir, b.tag)
	t.Cleanup(func() { b.noneLeft() })
	return b
}

func (b *bench) start(program string, env []string, args ...string) *launched {
	b.t.Helper()
	return b.startPath(filepath.Join(binDir, program), env, args...)
}

func (b *bench) startPath(path string, env []string, args ...string) *launched {
	b.t.Helper()
	l := &launched{t: b.t, cmd: exec.Command(path, args...), out: &buffer{}, err: &buffer{}, exited: make(chan struct{})}
	l.cmd.Dir, l.cmd.Env = b.dir, append(append([]string{}, b.env...), env...)
	l.cmd.Stdout, l.cmd.Stderr = l.out, l.err
	b.follow(l)
	return l
}

// follow starts it and waits for its end.
func (b *bench) follow(l *launched) {
	b.t.Helper()
	l.cmd.WaitDelay = 5 * time.Second
	require.NoError(b.t, l.cmd.Start())
	go func() { _ = l.cmd.Wait(); l.code = l.cmd.ProcessState.ExitCode(); close(l.exited) }()
	b.t.Cleanup(func() {
		_ = l.cmd.Process.Kill()
		<-l.exited
		if b.t.Failed() {
			b.t.Logf("%v\nexit code %d\nstdout:\n%s\nstderr:\n%s", l.cmd.Args, l.code, l.out, l.err)
		}
	})
}

func (b *bench) run(args ...string) *launched {
	b.t.Helper()
	return b.start("dlrover-run", nil, args...)
}

func writeProgram(path string, text []byte) error { return testkit.WriteProgram(path, string(text)) }

// sh is a job of shell workers in a program of its own.
func (b *bench) sh(script string, opts ...string) []string {
	path := filepath.Join(b.dir, fmt.Sprintf("worker%d.sh", len(script)))
	text := []byte("#!/bin/sh\n" + script + "\n")
	// writing it again would disturb those that run it
	if old, err := os.ReadFile(path); err != nil || !bytes.Equal(old, text) {
		require.NoError(b.t, writeProgram(path, text))
	}
	return append(opts, "--no-python", path)
}

func (l *launched) wait() int {
	l.t.Helper()
	select {
	case <-l.exited:
		return l.code
	case <-time.After(2 * time.Minute): // DLRover's agents take a minute on a machine that has much to do
		require.FailNow(l.t, "the launcher does not end")
		return -1
	}
}

func (l *launched) signal(sig syscall.Signal) { require.NoError(l.t, l.cmd.Process.Signal(sig)) }

// launcher is the pid of the launcher below the guard, which is what was started.
func (l *launched) launcher() (pid int) {
	l.t.Helper()
	eventually(l.t, "a launcher below the guard", func() bool {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%[1]d/task/%[1]d/children", l.cmd.Process.Pid))
		_, err := fmt.Sscan(string(text), &pid)
		return err == nil
	})
	return pid
}

// freeze stops the launcher itself; to stop the guard stops no job.
func (l *launched) freeze() { require.NoError(l.t, syscall.Kill(l.launcher(), syscall.SIGSTOP)) }

func (l *launched) thaw() { require.NoError(l.t, syscall.Kill(l.launcher(), syscall.SIGCONT)) }

// eventually waits for what another process does; the bound is generous because test
// machines are slow, and no test passes by it.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	require.Eventually(t, f, 90*time.Second, 5*time.Millisecond, what)
}

func (b *bench) exists(file string) func() bool {
	return func() bool { _, err := os.Stat(filepath.Join(b.dir, file)); return err == nil }
}

func (b *bench) lines(file string) []string {
	data, _ := os.ReadFile(filepath.Join(b.dir, file))
	return strings.Fields(string(data))
}

// tagged lists the processes that this test started, directly or not.
func (b *bench) tagged() (pids []int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		env, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		if bytes.Contains(env, []byte(b.tag+"\x00")) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func (b *bench) noneLeft() {
	b.t.Helper()
	// they are no children of ours to wait for
	for end := time.Now().Add(15 * time.Second); len(b.tagged()) > 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			for _, pid := range b.tagged() {
				cmd, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
				b.t.Errorf("process %d of the job is left: %q", pid, cmd)
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
			return
		}
	}
}

func freePort(t *testing.T) string {
	t.Helper()
	port, err := freeports.ForServer()
	require.NoError(t, err)
	return strconv.Itoa(port)
}

func (b *bench) c10d(nodes string, more ...string) []string {
	return append([]string{
		"--nnodes=" + nodes, "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:" + freePort(b.t),
		"--rdzv-id=job", "--rdzv-conf=last_call_timeout=0.2",
	}, more...)
}

const hold = `echo $RANK/$WORLD_SIZE:$TORCHELASTIC_RESTART_COUNT >> $DIR/starts; : > $DIR/up.$WORLD_SIZE.$RANK; ` +
	`while [ ! -e $DIR/go ]; do sleep 0.02; done`

func (b *bench) release() { require.NoError(b.t, os.WriteFile(filepath.Join(b.dir, "go"), nil, 0o600)) }

func TestStandaloneJob(t *testing.T) {
	b := newBench(t)
	l := b.run(b.sh(`echo "rank $RANK of $WORLD_SIZE at $MASTER_ADDR arg $1"; echo err >&2`,
		"--standalone", "--nproc-per-node=2")...)
	require.Equal(t, 0, l.wait())
	require.Contains(t, l.out.String(), "rank 1 of 2 at 127.0.0.1 arg")
	require.Contains(t, l.err.String(), "err\n")
}

func TestPythonScriptModuleAndRunPath(t *testing.T) {
	python, err := exec.LookPath("/usr/bin/python3")
	if err != nil {
		t.Skip("no /usr/bin/python3 here, so how Python is started is not tested:", err)
	}
	b := newBench(t)
	b.env = append(b.env, "PYTHON_EXEC="+python)
	require.NoError(t,
		os.WriteFile(filepath.Join(b.dir, "mod.py"), []byte("import sys; print(__name__, sys.argv[1:])\n"), 0o600))
	for _, args := range [][]string{{"mod.py"}, {"-m", "mod"}, {"--run-path", "mod.py"}} {
		l := b.run(append(args, "-h", "--x=1")...)
		require.Equal(t, 0, l.wait())
		require.Equal(t, "__main__ ['-h', '--x=1']\n", l.out.String())
	}
}

func TestTwoNodesMeetAtTheSameCommandLine(t *testing.T) {
	b := newBench(t)
	args := b.sh(`echo $RANK $GROUP_RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR >> $DIR/seen`, b.c10d("2")...)
	l1, l2 := b.run(args...), b.run(args...)
	require.Equal(t, 0, l1.wait())
	require.Equal(t, 0, l2.wait())
	data, err := os.ReadFile(filepath.Join(b.dir, "seen"))
	require.NoError(t, err)
	require.Len(t, strings.Split(strings.TrimSpace(string(data)), "\n"), 4)
	require.Contains(t, string(data), "3 1 1 4 127.0.0.1\n")
}

func TestStaticRendezvous(t *testing.T) {
	b := newBench(t)
	args := func(rank string) []string {
		return b.sh(`echo $RANK >> $DIR/$MASTER_PORT.$GROUP_RANK`,
			"--nnodes=2", "--nproc-per-node=1", "--master-port="+b.env[len(b.env)-1], "--node-rank="+rank)
	}
	port := freePort(t)
	b.env = append(b.env, port)
	l1 := b.run(args("1")...)
	l0 := b.run(args("0")...)
	require.Equal(t, 0, l0.wait())
	require.Equal(t, 0, l1.wait())
	require.Equal(t, []string{"1"}, b.lines(port+".1"))
}

func TestElasticLifeOfAJob(t *testing.T) {
	b := newBench(t)
	args := b.sh(hold, b.c10d("1:2", "--max-restarts=2")...)
	host := b.run(args...)
	eventually(t, "alone", func() bool { return b.exists("up.2.0")() && b.exists("up.2.1")() })
	second := b.run(args...)
	eventually(t, "grown", func() bool { return b.exists("up.4.0")() && b.exists("up.4.3")() })
	second.signal(syscall.SIGKILL)
	eventually(t, "shrunk", func() bool { return count(b.lines("starts"), "0/2:0") == 2 })
	b.release()
	require.Equal(t, 0, host.wait())
	for _, s := range b.lines("starts") {
		require.True(t, strings.HasSuffix(s, ":0"), "membership changes are not charged: %s", s)
	}
}

// Where nothing says how many nodes come, MIN of them start soon.
func TestMinNodesStartAtOnce(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	began := time.Now()
	l := b.run(b.sh(hold, append(b.c10d("1:4"), "--rdzv-conf=join_timeout=60")...)...)
	eventually(t, "alone", b.exists("up.2.1"))
	require.Less(t, time.Since(began), 20*time.Second, "it would be 30 s if others were waited for")
	b.release()
	require.Equal(t, 0, l.wait())
	require.Contains(t, l.err.String(), "1 of 1:4 nodes; sealing in 30s at the latest, or 2s after the newest node")
}

func count(all []string, one string) (n int) {
	for _, s := range all {
		if s == one {
			n++
		}
	}
	return n
}

func TestWorkerFailureRestartsBothNodes(t *testing.T) {
	b := newBench(t)
	args := b.sh(`echo $RANK:$TORCHELASTIC_RESTART_COUNT >> $DIR/starts; if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; `+
		`then [ $RANK = 3 ] && sleep 0.3 && exit 1; exec sleep 60; fi`, b.c10d("2", "--max-restarts=1")...)
	l1, l2 := b.run(args...), b.run(args...)
	require.Equal(t, 0, l1.wait())
	require.Equal(t, 0, l2.wait())
	for r := range 4 {
		require.Equal(t, 1, count(b.lines("starts"), fmt.Sprintf("%d:1", r)), "the restart count is the same on all nodes")
	}
}

func TestVerdictNamesTheFirstRankOfTheWholeJob(t *testing.T) {
	b := newBench(t)
	args := b.sh(`: > $DIR/up.$RANK; if [ $RANK = 2 ]; then while [ ! -e $DIR/up.3 -o ! -e $DIR/up.0 ]; do sleep 0.01; `+
		`done; echo "ValueError: bad batch" >&2; exit 7; fi; exec sleep 60`, b.c10d("2")...)
	l1, l2 := b.run(args...), b.run(args...)
	require.Equal(t, 1, l1.wait())
	require.Equal(t, 1, l2.wait(), "the node without a failure leaves at once, too")
	for _, l := range []*launched{l1, l2} {
		require.Regexp(t,
			`dlrover-run: job job failed: rank 2 \(node 1 .*\) failed first: exit code 7, last output "ValueError: bad batch"`,
			l.err.String())
	}
	both := l1.err.String() + l2.err.String()
	require.Equal(t, 1, strings.Count(both, "Root Cause (first observed failure):"),
		"only a node with a failure of its own prints torchrun's report")
	require.Contains(t, both, "exitcode  : 7 (pid:")
}

func TestExitCodesByReason(t *testing.T) {
	b := newBench(t)
	for name, c := range map[string]struct {
		args []string
		code int
	}{
		"worker failed": {b.sh("exit 3", "--exit-code-policy=reason"), 10},
		"permanent": {b.sh("exit 3 #x", "--exit-code-policy=reason", "--restart-policy=ExitCode", "--max-restarts=3"),
			11},
		"missing script":    {[]string{"--exit-code-policy=reason", "missing.py"}, 30},
		"torchrun's one":    {b.sh("exit 3 #yy"), 1},
		"log dir is a file": {b.sh("exit 0 #zzz", "--exit-code-policy=reason", "--log-dir="+os.Args[0]), 31},
		"no master": {
			b.sh("exit 0 #zzzz", "--exit-code-policy=reason", "--rdzv-backend=dlrover-master",
				"--rdzv-endpoint=127.0.0.1:"+freePort(t), "--rdzv-conf=read_timeout=0.2"), 22,
		},
		"too few nodes": {b.sh("exit 0 #zzzzz",
			append(b.c10d("2"), "--exit-code-policy=reason", "--rdzv-conf=join_timeout=0.3")...), 20},
		"metrics address": {b.sh("exit 0 #zzzzzz", "--exit-code-policy=reason", "--metrics-addr=nonsense"), 2},
		"event log":       {b.sh("exit 0 #zzzzzzz", "--exit-code-policy=reason", "--event-log=/nosuch/x"), 2},
		"topology file":   {b.sh("exit 0 #zzzzzzzz", "--exit-code-policy=reason", "--topology-file=/nosuch"), 2},
		"usage":           {[]string{"--no-such-option", "x.py"}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			l := b.run(c.args...)
			require.Equal(t, c.code, l.wait(), l.err.String())
		})
	}
}

// A worker of node 1 loses its GPU: that node's status blames it, and the other node's says that it is innocent.
func TestExitCodesForDLRover(t *testing.T) {
	b := newBench(t)
	args := b.sh(`: > $DIR/up.$RANK; if [ $RANK = 2 ]; then while [ ! -e $DIR/up.3 -o ! -e $DIR/up.0 ]; do sleep 0.01; `+
		`done; echo "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus." >&2; exit 1; fi; exec sleep 60`,
		b.c10d("2", "--exit-code-policy=dlrover")...)
	l1, l2 := b.run(args...), b.run(args...)
	want := map[bool]int{true: 201, false: 202} // whether the worker was this node's
	blamed := 0
	for _, l := range []*launched{l1, l2} {
		code := l.wait()
		here := strings.Contains(l.err.String(), "Root Cause (first observed failure):")
		require.Equal(t, want[here], code, l.err.String())
		require.Contains(t, l.err.String(), "; class hardware; ")
		blamed += code - 202
	}
	require.Equal(t, -1, blamed, "one of the two")

	for name, c := range map[string]struct {
		script string
		code   int
	}{
		"success": {"exit 0", 0},
		"program": {"exit 3 #x", 1},
	} {
		t.Run(name, func(t *testing.T) {
			l := b.run(b.sh(c.script, "--exit-code-policy=dlrover")...)
			require.Equal(t, c.code, l.wait(), l.err.String())
		})
	}
	for _, wrong := range []string{"--nnodes=x", "--event-log=/nosuch/x", "--no-such-option"} {
		t.Run(wrong, func(t *testing.T) {
			require.Equal(t, 2, b.run(b.sh("exit 0", "--exit-code-policy=dlrover", wrong)...).wait())
		})
	}
	t.Run("SIGTERM", func(t *testing.T) {
		l := b.run(b.sh(hold+"; sleep 30", "--standalone", "--exit-code-policy=dlrover")...)
		eventually(t, "up", b.exists("up.1.0"))
		l.signal(syscall.SIGTERM)
		require.Equal(t, 143, l.wait())
	})
	t.Run("check", func(t *testing.T) {
		l := b.run(b.sh("exit 0", "--standalone", "--health-check=exit 7", "--exit-code-policy=dlrover")...)
		require.Equal(t, 201, l.wait(), l.err.String())
	})
	t.Run("plan", func(t *testing.T) {
		l := b.run(b.sh("exit 0", "--dry-run", "--exit-code-policy=dlrover")...)
		require.Equal(t, 0, l.wait(), l.err.String())
		require.Contains(t, l.out.String(), `"exit_code_policy": "dlrover"`)
	})
}

func TestSignals(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT} {
		t.Run(proc.SignalName(sig), func(t *testing.T) {
			b := newBench(t)
			l := b.run(b.sh(hold+"; sleep 30", "--standalone", "--nproc-per-node=2", "--exit-code-policy=reason")...)
			eventually(t, "up", func() bool { return b.exists("up.2.0")() && b.exists("up.2.1")() })
			l.signal(sig)
			require.Equal(t, 128+int(sig), l.wait())
			require.Contains(t, l.err.String(), "stopped by "+proc.SignalName(sig))
		})
	}
}

func TestSignalWhileWaitingForTheOthers(t *testing.T) {
	b := newBench(t)
	l := b.run(b.sh("exit 0", b.c10d("2")...)...)
	eventually(t, "serving", func() bool { return strings.Contains(l.err.String(), "serving the rendezvous") })
	l.signal(syscall.SIGTERM)
	require.Equal(t, 1, l.wait())
}

// After kill -9 of the launcher nothing of the job is left: no worker, no child of a
// worker, none that took a session of its own.
func TestKilledLauncherLeavesNothing(t *testing.T) {
	b := newBench(t)
	l := b.run(b.sh(`setsid sh -c 'sleep 300 & : > $DIR/orphan.'$RANK'; sleep 300' & (sleep 300 &) ; `+hold,
		"--standalone", "--nproc-per-node=2")...)
	eventually(t, "up", func() bool {
		return b.exists("up.2.0")() && b.exists("up.2.1")() && b.exists("orphan.0")() && b.exists("orphan.1")()
	})
	require.Greater(t, len(b.tagged()), 6)
	l.signal(syscall.SIGKILL)
	l.wait()
	b.noneLeft()
}

func TestFinishedJobLeavesNothing(t *testing.T) {
	b := newBench(t)
	l := b.run(b.sh(`setsid sleep 300 & exit 0`, "--standalone", "--nproc-per-node=2")...)
	require.Equal(t, 0, l.wait())
	require.Empty(t, b.tagged())
}

const testToken = "0123456789abcdef0123456789abcdef"

// startDaemon starts dlrover-master and returns its address.
func (b *bench) startDaemon(addr string, env ...string) (*launched, string) {
	d := b.start("dlrover-master", env, "--listen="+addr, "--event-log="+filepath.Join(b.dir, "events.json"))
	return d, b.served(d)
}

// served is the address of a dlrover-master.
func (b *bench) served(d *launched) string {
	serving := regexp.MustCompile(`"msg":"serving".*"addr":"([^"]+)"`)
	eventually(b.t, "daemon serving", func() bool { return serving.MatchString(d.err.String()) })
	return serving.FindStringSubmatch(d.err.String())[1]
}

// The daemon dies while workers run; they keep running, and a new daemon on the same
// address takes over without a restart.
func TestWorkersOutliveTheDaemon(t *testing.T) {
	b := newBench(t)
	d, addr := b.startDaemon("127.0.0.1:0", "DLROVER_TOKEN="+testToken)
	env := []string{"DLROVER_MASTER_ADDR=" + addr, "DLROVER_TOKEN=" + testToken}
	args := b.sh(hold, "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=job")
	l1, l2 := b.start("dlrover-run", env, args...), b.start("dlrover-run", env, args...)
	eventually(t, "up", func() bool { return b.exists("up.2.0")() && b.exists("up.2.1")() })
	d.signal(syscall.SIGKILL)
	d.wait()
	for _, l := range []*launched{l1, l2} {
		eventually(t, "said so", func() bool {
			return strings.Contains(l.err.String(), "cannot reach the rendezvous daemon; running workers keep running")
		})
	}
	b.startDaemon(addr, "DLROVER_TOKEN="+testToken)
	for _, l := range []*launched{l1, l2} {
		eventually(t,
			"reconnected", func() bool { return strings.Contains(l.err.String(), "did not know this node; joined again") })
	}
	b.release()
	require.Equal(t, 0, l1.wait())
	require.Equal(t, 0, l2.wait())
	require.Len(t, b.lines("starts"), 2, "no worker was restarted")
}

// The workers end while no daemon is there: the new one is told, and nobody runs again.
func TestSuccessDuringAnOutage(t *testing.T) {
	b := newBench(t)
	d, addr := b.startDaemon("127.0.0.1:0")
	env := []string{"DLROVER_MASTER_ADDR=" + addr}
	args := b.sh(hold, "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=job")
	l1, l2 := b.start("dlrover-run", env, args...), b.start("dlrover-run", env, args...)
	eventually(t, "up", func() bool { return b.exists("up.2.0")() && b.exists("up.2.1")() })
	d.signal(syscall.SIGKILL)
	d.wait()
	b.release()
	for _, l := range []*launched{l1, l2} {
		eventually(t, "noticed", func() bool { return strings.Contains(l.err.String(), `"what":"report"`) })
	}
	b.startDaemon(addr)
	require.Equal(t, 0, l1.wait())
	require.Equal(t, 0, l2.wait())
	require.Len(t, b.lines("starts"), 2, "no worker was started again")
}

// A daemon that dies while the workers are being stopped for a restart.
func TestDaemonDiesDuringARestart(t *testing.T) {
	b := newBench(t)
	d, addr := b.startDaemon("127.0.0.1:0")
	env := []string{"DLROVER_MASTER_ADDR=" + addr}
	args := b.sh(`echo $RANK:$TORCHELASTIC_RESTART_COUNT >> $DIR/starts; [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; `+
		`trap 'sleep 1; exit 1' TERM; : > $DIR/up.$RANK; while [ ! -e $DIR/go ]; do sleep 0.02; done; `+
		`[ $RANK = 0 ] && exit 1; while :; do sleep 0.02; done`,
		"--nnodes=2", "--nproc-per-node=1", "--rdzv-id=job", "--max-restarts=1")
	l1, l2 := b.start("dlrover-run", env, args...), b.start("dlrover-run", env, args...)
	eventually(t, "up", func() bool { return b.exists("up.0")() && b.exists("up.1")() })
	b.release()
	for _, l := range []*launched{l1, l2} {
		eventually(t, "stopping", func() bool {
			return strings.Contains(l.err.String(), "stopping the workers") || strings.Contains(l.err.String(), "worker failed")
		})
	}
	d.signal(syscall.SIGKILL)
	d.wait()
	b.startDaemon(addr)
	require.Equal(t, 0, l1.wait())
	require.Equal(t, 0, l2.wait())
	require.ElementsMatch(t, []string{"0:0", "1:0", "0:1", "1:1"}, b.lines("starts"),
		"the restart is charged although the daemon has forgotten it")
}

// The same while the world grows: the new daemon hears of workers that run, which an
// old daemon has told to stop.
func TestDaemonDiesWhileTheWorldGrows(t *testing.T) {
	b := newBench(t)
	d, addr := b.startDaemon("127.0.0.1:0")
	env := []string{"DLROVER_MASTER_ADDR=" + addr}
	args := b.sh(`trap 'sleep 1; exit 1' TERM; `+hold,
		"--nnodes=1:2", "--nproc-per-node=1", "--rdzv-id=job", "--rdzv-conf=last_call_timeout=0.2")
	l1 := b.start("dlrover-run", env, args...)
	eventually(t, "alone", b.exists("up.1.0"))
	l2 := b.start("dlrover-run", env, args...)
	eventually(t, "stopping", func() bool { return strings.Contains(l1.err.String(), "stopping the workers") })
	d.signal(syscall.SIGKILL)
	d.wait()
	b.startDaemon(addr)
	eventually(t, "grown", func() bool { return b.exists("up.2.0")() && b.exists("up.2.1")() })
	b.release()
	require.Equal(t, 0, l1.wait())
	require.Equal(t, 0, l2.wait())
}

func TestAlwaysPolicy(t *testing.T) {
	b := newBench(t)
	l := b.run(b.sh(`echo x >> $DIR/starts; exit 0`,
		"--restart-policy=Always", "--max-restarts=2", "--nproc-per-node=2")...)
	require.Equal(t, 0, l.wait())
	require.Len(t, b.lines("starts"), 6)
}

// The endpoint is one of our own addresses, and there is no token: everything stays on
// loopback, the workers' store included.
func TestOwnAddressWithoutAToken(t *testing.T) {
	own := networkAddresses()
	if len(own) == 0 {
		t.Skip("this machine has no address but loopback, so an endpoint at its own address is NOT tested")
	}
	for name, args := range map[string][]string{
		"static": {"--nnodes=1", "--master-addr=" + own[0], "--master-port=" + freePort(t)},
		"c10d":   {"--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=" + net.JoinHostPort(own[0], freePort(t))},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			line := b.sh(`echo $MASTER_ADDR >> $DIR/seen`, args...)
			l1 := b.run(line...)
			if name == "c10d" {
				require.Equal(t, 0, b.run(line...).wait())
			}
			require.Equal(t, 0, l1.wait())
			require.Equal(t, "127.0.0.1", b.lines("seen")[0])
		})
	}
}

// The same command again, while the launcher that served the first run still waits for
// a node that does not answer.
func TestSameJobAgainAtOnce(t *testing.T) {
	b := newBench(t)
	args := b.sh(`: > $DIR/up.$RANK; while [ ! -e $DIR/go ]; do sleep 0.02; done`, b.c10d("2", "--nproc-per-node=1")...)
	l1 := b.run(args...)
	eventually(t, "serving", func() bool { return strings.Contains(l1.err.String(), "serving the rendezvous") })
	l2 := b.run(args...)
	eventually(t, "up", func() bool { return b.exists("up.0")() && b.exists("up.1")() })
	l2.freeze()
	b.release()
	require.NoError(t, os.Remove(filepath.Join(b.dir, "up.0")))
	eventually(t, "first launcher's workers are done", func() bool { return len(b.tagged()) <= 5 })
	l3, l4 := b.run(args...), b.run(args...)
	for _, l := range []*launched{l3, l4} { // or one of them would be the first of the next run
		eventually(t, "joined", func() bool { return strings.Contains(l.err.String(), "waiting for the other nodes") })
	}
	l2.signal(syscall.SIGKILL)
	require.Equal(t, 0, l3.wait())
	require.Equal(t, 0, l4.wait())
	l1.wait()
}

func TestDaemonServesManyRuns(t *testing.T) {
	b := newBench(t)
	_, addr := b.startDaemon("127.0.0.1:0")
	env := []string{"DLROVER_MASTER_ADDR=" + addr}
	var ls []*launched
	for _, id := range []string{"blue", "red"} {
		for range 2 {
			ls = append(ls, b.start("dlrover-run", env, b.sh(`echo $RANK/$WORLD_SIZE >> $DIR/$TORCHELASTIC_RUN_ID`,
				"--nnodes=2", "--nproc-per-node=1", "--rdzv-id="+id)...))
		}
	}
	for _, l := range ls {
		require.Equal(t, 0, l.wait())
	}
	require.ElementsMatch(t, []string{"0/2", "1/2"}, b.lines("blue"))
	require.ElementsMatch(t, []string{"0/2", "1/2"}, b.lines("red"))
	metrics := get(t, "http://"+addr+"/metrics")
	require.Contains(t, metrics, `dlrover_rendezvous_events_total{event="succeeded"} 2`)
	require.Equal(t, "ok\n", get(t, "http://"+addr+"/healthz"))
	for _, line := range strings.Split(strings.TrimSpace(string(read(t, filepath.Join(b.dir, "events.json")))), "\n") {
		require.True(t, json.Valid([]byte(line)), line)
	}
}

func get(t *testing.T, url string) string {
	t.Helper()
	resp, err := http.Get(url)
	require.NoError(t, err)
	defer http.DefaultClient.CloseIdleConnections()
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(data)
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	return data
}

func TestWrongTokenIsSaidAtOnce(t *testing.T) {
	b := newBench(t)
	_, addr := b.startDaemon("127.0.0.1:0", "DLROVER_TOKEN="+testToken)
	for name, c := range map[string]struct{ token, want string }{
		"missing": {"", "carries none"},
		"wrong":   {"another-token-of-16+", "differs from the daemon's"},
	} {
		t.Run(name, func(t *testing.T) {
			l := b.start("dlrover-run", []string{"DLROVER_MASTER_ADDR=" + addr, "DLROVER_TOKEN=" + c.token},
				b.sh("exit 0", "--exit-code-policy=reason")...)
			require.Equal(t, 23, l.wait())
			require.Contains(t, l.err.String(), c.want)
			require.NotContains(t, l.err.String(), testToken)
		})
	}
}

// A second launcher on the endpoint's host that does not fit must end at once, and must
// never take over the port when the first one ends.
func TestSecondLauncherThatDoesNotFit(t *testing.T) {
	b := newBench(t)
	job := b.c10d("2", "--exit-code-policy=reason")
	first := b.start("dlrover-run", []string{"DLROVER_TOKEN=" + testToken}, b.sh("exit 0", job...)...)
	eventually(t, "serving", func() bool { return strings.Contains(first.err.String(), "serving the rendezvous") })
	for name, c := range map[string]struct {
		token string
		more  []string
		code  int
	}{
		"wrong token":   {"another-token-of-16+", nil, 23},
		"other options": {testToken, []string{"--nnodes=3"}, 21},
	} {
		t.Run(name, func(t *testing.T) {
			l := b.start("dlrover-run", []string{"DLROVER_TOKEN=" + c.token}, b.sh("exit 0", append(job, c.more...)...)...)
			require.Equal(t, c.code, l.wait(), l.err.String())
		})
	}
	require.Equal(t, 0, b.start("dlrover-run", []string{"DLROVER_TOKEN=" + testToken}, b.sh("exit 0", job...)...).wait())
	require.Equal(t, 0, first.wait())
}

// Nodes that differ in what a job has one value of run together, and those that wait hear of one that cannot.
func TestNodesWithOtherOptions(t *testing.T) {
	b := newBench(t)
	job := b.c10d("2", "--max-restarts=1")
	script := `echo $TORCHELASTIC_MAX_RESTARTS >> $DIR/max`
	first := b.run(b.sh(script, job...)...)
	eventually(t, "serving", func() bool { return strings.Contains(first.err.String(), "waiting for the other nodes") })
	wrong := b.run(b.sh(script, append(job, "--nnodes=1:3")...)...)
	require.NotEqual(t, 0, wrong.wait())
	require.Contains(t, wrong.err.String(),
		"--nnodes=1:3, but the run was opened with --nnodes=2:2; use the same option on every node")
	eventually(t, "told", func() bool { return strings.Contains(first.err.String(), "still waiting") })
	require.Contains(t, first.err.String(), `was refused: --nnodes=1:3, but the run was opened with --nnodes=2:2`)
	second := b.run(b.sh(script,
		append(job, "--max-restarts=5", "--rdzv-conf=join_timeout=50,last_call_timeout=0.2")...)...)
	require.Equal(t, 0, first.wait())
	require.Equal(t, 0, second.wait())
	require.Equal(t, []string{"1", "1", "1", "1"}, b.lines("max"))
	require.Equal(t, 1, strings.Count(second.err.String(), "options of this node differ"), second.err.String())
	require.Contains(t, second.err.String(),
		`"here":"--max-restarts=5 join_timeout=50","run":"--max-restarts=1 join_timeout=600"`)
	require.NotContains(t, first.err.String(), "options of this node differ")
}

func TestMetricsOfTheLauncher(t *testing.T) {
	b := newBench(t)
	addr := "127.0.0.1:" + freePort(t)
	l := b.run(b.sh(hold, "--standalone", "--nproc-per-node=2", "--metrics-addr="+addr)...)
	eventually(t, "up", func() bool { return b.exists("up.2.0")() && b.exists("up.2.1")() })
	eventually(t, "the start is counted",
		func() bool { return strings.Contains(get(t, "http://"+addr+"/metrics"), "dlrover_world_size 2") })
	require.Equal(t, "ok\n", get(t, "http://"+addr+"/healthz"))
	b.release()
	require.Equal(t, 0, l.wait())
}

// Nothing can be made in /proc, not even by root.
// TestNothingCanBeWritten: a job that asked for no file runs where no directory can be made, and one that did is
// refused.
func TestNothingCanBeWritten(t *testing.T) {
	// In a mount namespace nobody but the launcher misses a place for temporary files.
	const bare = `mount --bind /tmp /tmp && mount -o remount,bind,ro /tmp && mount --bind /proc /var/tmp && exec "$@"`
	for name, c := range map[string]struct {
		opts, env []string
		code      int
		say       []string
	}{
		"plain": {nil, nil, 0, []string{"no place for the checkpoint client", "no error files from workers"}},
		"no daemon": {[]string{"--ckpt-daemon=off"}, nil, 0,
			[]string{"no place for the checkpoint client", "no error files from workers"}},
		"restarts": {[]string{"--ckpt-daemon=off", "--max-restarts=2"}, []string{"CODE=3"}, 1,
			[]string{"no error files from workers", "restarts used 2 of 2"}},
		"redirects": {[]string{"--redirects=0:2"}, nil, 1,
			[]string{"error: --redirects and --tee: no place for the log files: give --log-dir"}},
		"tee": {[]string{"--tee=3"}, nil, 1,
			[]string{"error: --redirects and --tee: no place for the log files: give --log-dir"}},
		"to nobody": {[]string{"--tee=7:3", "--nproc-per-node=1"}, nil, 0, []string{"no error files from workers"}},
		"no files":  {[]string{"--tee=3", "--log-dir=/dev/null"}, nil, 0, nil},
		"log dir": {[]string{"--log-dir=/proc/x"}, nil, 1,
			[]string{"error: --log-dir /proc/x: cannot be created: give a path"}},
		"timer": {nil, []string{"TORCHELASTIC_ENABLE_FILE_TIMER=1"}, 2,
			[]string{"error: $TORCHELASTIC_ENABLE_FILE_TIMER=1: file timer in /proc: ", "set TORCHELASTIC_TIMER_FILE"}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			env := append([]string{"PET_CKPT_SHM_DIR=/proc", "TMPDIR=/proc", "PYTHONPATH=", "CODE=0"}, c.env...)
			args := b.sh(`echo "<$PYTHONPATH$TORCHELASTIC_ERROR_FILE>"; exit $CODE`, append(c.opts, "--standalone")...)
			l := b.startPath("/usr/bin/unshare", env,
				append([]string{"-rm", "sh", "-c", bare, "sh", filepath.Join(binDir, "dlrover-run")}, args...)...)
			require.Equal(t, c.code, l.wait(), l.err.String())
			for _, text := range c.say {
				require.Equal(t, 1, strings.Count(l.err.String(), text), "%s\n%s", text, l.err.String())
			}
			if c.code == 0 {
				require.Contains(t, l.out.String(), "<>")
			}
		})
	}
}

func TestPortTaken(t *testing.T) {
	b := newBench(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	port := strconv.Itoa(taken.Addr().(*net.TCPAddr).Port)
	l := b.run(b.sh("exit 0", "--nnodes=1", "--master-port="+port)...)
	require.Equal(t, 1, l.wait())
	require.Contains(t, l.err.String(), "127.0.0.1:"+port)
	require.Contains(t, l.err.String(), "address already in use")
}

func TestParentLauncherGetsTheErrorFile(t *testing.T) {
	b := newBench(t)
	link := filepath.Join(b.dir, "link.json")
	require.NoError(t, os.Symlink("reply.json", link))
	b.env = append(b.env, "TORCHELASTIC_ERROR_FILE="+link)
	l := b.run(b.sh(`printf '{"message":{"message":"Boom: x","extraInfo":{"py_callstack":"tb",`+
		`"timestamp":"1700000000"}}}' > $TORCHELASTIC_ERROR_FILE; exit 5`, "--nproc-per-node=1")...)
	require.Equal(t, 1, l.wait())
	require.Contains(t, string(read(t, filepath.Join(b.dir, "reply.json"))), `"errorCode":5`)
}

func TestLogFlood(t *testing.T) {
	b := newBench(t)
	l := b.run(b.sh(`seq 1 250000`,
		"--standalone", "--nproc-per-node=4", "--tee=1", "--log-dir="+filepath.Join(b.dir, "logs"))...)
	require.Equal(t, 0, l.wait())
	next := map[string]int{}
	for line := range strings.Lines(l.out.String()) {
		prefix, number, ok := strings.Cut(strings.TrimSuffix(line, "\n"), ":")
		require.True(t, ok, line)
		next[prefix]++
		require.Equal(t, strconv.Itoa(next[prefix]), number)
	}
	require.Equal(t,
		map[string]int{"[default0]": 250000, "[default1]": 250000, "[default2]": 250000, "[default3]": 250000}, next)
	files, err := filepath.Glob(filepath.Join(b.dir, "logs/*/attempt_0/*/stdout.log"))
	require.NoError(t, err)
	require.Len(t, files, 4)
	require.Equal(t, 250000, bytes.Count(read(t, files[3]), []byte("\n")))
}

// TestProcessGroupsInTurn holds what docs/start/from-torchrun.md tells those to do who make several process groups in
// one job.
func TestProcessGroupsInTurn(t *testing.T) {
	t.Parallel()
	script, err := filepath.Abs("testdata/groups.py")
	require.NoError(t, err)
	for name, python := range map[string]string{"system": "/usr/bin/python3", "chosen": torchpython.Chosen()} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if out, err := exec.CommandContext(ctx, python, "-c", "import torch.distributed").CombinedOutput(); err != nil {
				t.Skipf("SKIPPED: PROCESS GROUPS IN TURN ARE NOT TESTED with the %s Python: %q imports no torch: %v %s",
					name, python, err, out)
			}
			b := newBench(t)
			b.env = append(b.env, "PYTHON_EXEC="+python, "GLOO_SOCKET_IFNAME=lo")
			l := b.run("--standalone", "--nproc-per-node=3", script, "20")
			require.Equal(t, 0, l.wait())
			require.Equal(t, 3, strings.Count(l.out.String(), "all of them"))
		})
	}
}

func TestRealTorch(t *testing.T) {
	t.Parallel()
	python := torchpython.Require(t, "REAL PROCESS GROUPS ARE")
	b := newBench(t)
	b.env = append(b.env, "PYTHON_EXEC="+python)
	script, err := filepath.Abs("testdata/allreduce.py")
	require.NoError(t, err)
	args := append(b.c10d("1:2", "--max-restarts=3", "--rdzv-conf=last_call_timeout=5"), script, b.dir)
	l1 := b.run(args...)
	eventually(t, "serving", func() bool { return strings.Contains(l1.err.String(), "serving the rendezvous") })
	l2 := b.run(args...)
	eventually(t, "training on two nodes", b.exists("trained.4"))
	l2.signal(syscall.SIGKILL)
	eventually(t, "training on one node", b.exists("trained.2"))
	l3 := b.run(args...)
	eventually(t, "training on two nodes again", b.exists("trained.4.again"))
	b.release()
	require.Equal(t, 0, l1.wait())
	require.Equal(t, 0, l3.wait())
}

func TestEveryDeadlySignalIsNamed(t *testing.T) {
	b := newBench(t)
	for _, sig := range []string{"ABRT", "BUS", "FPE", "ILL", "KILL", "SEGV", "SYS", "TERM", "USR1", "XCPU"} {
		t.Run(sig, func(t *testing.T) {
			l := b.run(b.sh("ulimit -c 0; kill -"+sig+" $$", "--nproc-per-node=1")...)
			require.Equal(t, 1, l.wait())
			require.Regexp(t, "failed first: .*SIG"+sig, l.err.String())
			require.Contains(t, l.err.String(), "(SIG"+sig+")", "torchrun's block names it, too")
		})
	}
}

// One COPY puts the programs into any image: they are static, and small.
func TestProgramsAreStaticAndSmall(t *testing.T) {
	for _, name := range []string{"dlrover-run", "dlrover-master", "checkpointd", "dlroverctl"} {
		path := filepath.Join(binDir, name)
		f, err := elf.Open(path)
		require.NoError(t, err)
		defer f.Close()
		libs, err := f.ImportedLibraries()
		require.NoError(t, err)
		require.Empty(t, libs)
		for _, p := range f.Progs {
			require.NotEqual(t, elf.PT_INTERP, p.Type, "%s needs a dynamic loader", name)
		}
		fi, err := os.Stat(path)
		require.NoError(t, err)
		require.Less(t, fi.Size(), int64(26_500_000)) // the master, of which OpenTelemetry takes 1.4 MB
	}
}

func TestOutOfMemoryIsNamed(t *testing.T) {
	group := filepath.Join("/sys/fs/cgroup/memory", fmt.Sprintf("dlrover-e2e-%d", os.Getpid()))
	limit, procs := "memory.limit_in_bytes", "cgroup.procs"
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		group, limit = filepath.Join("/sys/fs/cgroup", filepath.Base(group)), "memory.max"
	}
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Skip("no memory cgroup can be made here, so the OOM verdict is NOT tested:", err)
	}
	t.Cleanup(func() {
		require.Eventually(t, func() bool { return os.Remove(group) == nil }, 10*time.Second, 10*time.Millisecond)
	})
	if err := os.WriteFile(filepath.Join(group, limit), []byte("100663296"), 0o600); err != nil {
		t.Skip("the memory limit cannot be set here, so the OOM verdict is NOT tested:", err)
	}
	b := newBench(t)
	args := b.sh(`if [ $RANK = 1 ]; then exec tail /dev/zero; fi; exec sleep 60`,
		"--standalone", "--nproc-per-node=2", "--exit-code-policy=reason")
	wrapper := filepath.Join(b.dir, "wrap.sh")
	require.NoError(t,
		os.WriteFile(wrapper, []byte("#!/bin/sh\necho $$ > "+filepath.Join(group, procs)+" && exec "+
			filepath.Join(binDir, "dlrover-run")+` "$@"`+"\n"), 0o755))
	l := b.startPath(wrapper, nil, args...)
	require.Equal(t, 12, l.wait(), l.err.String())
	require.Regexp(t,
		`rank 1 .* failed first: killed by the kernel's OOM killer \(SIGKILL\): the cgroup's limit is 96.0 MiB, `+
			`peak 9\d\.\d MiB`, l.err.String())
	b.noneLeft()
}

func TestWorkerThatIgnoresTERM(t *testing.T) {
	b := newBench(t)
	l := b.run(b.sh(`trap '' TERM; `+hold, "--nproc-per-node=2", "--standalone", "--shutdown-timeout=1")...)
	eventually(t, "up", func() bool { return b.exists("up.2.0")() && b.exists("up.2.1")() })
	start := time.Now()
	l.signal(syscall.SIGTERM)
	require.Equal(t, 1, l.wait())
	require.Greater(t, time.Since(start), time.Second, "the grace period was granted")
}

// --shutdown-timeout holds on the restart path as well (torchrun keeps 30 s there).
func TestShutdownTimeoutHoldsOnRestarts(t *testing.T) {
	b := newBench(t)
	l := b.run(b.sh(`[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; trap '' TERM; : > $DIR/up.$RANK; `+
		`while [ ! -e $DIR/up.0 -o ! -e $DIR/up.1 ]; do sleep 0.01; done; [ $RANK = 1 ] && exit 1; `+
		`while :; do sleep 0.1; done`,
		"--nproc-per-node=2", "--standalone", "--shutdown-timeout=1", "--max-restarts=1")...)
	start := time.Now()
	require.Equal(t, 0, l.wait())
	require.Less(t, time.Since(start), 20*time.Second)
}

// A worker that catches the signal, as JAX does for preemption, does not hold up the others for half a minute.
func TestRestartGrace(t *testing.T) {
	b := newBench(t)
	l := b.run(b.sh(`[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; trap '' TERM; : > $DIR/up.$RANK; `+
		`while [ ! -e $DIR/up.0 -o ! -e $DIR/up.1 ]; do sleep 0.01; done; [ $RANK = 1 ] && exit 1; `+
		`while :; do sleep 0.1; done`,
		"--nproc-per-node=2", "--standalone", "--restart-grace=0.5", "--max-restarts=1")...)
	start := time.Now()
	require.Equal(t, 0, l.wait())
	require.Less(t, time.Since(start), 20*time.Second)
	require.Greater(t, time.Since(start), 500*time.Millisecond)
	require.Contains(t, l.err.String(), "killing them for the restart")
}

func TestPID1Duties(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a PID namespace needs root, so the duties of PID 1 are NOT tested")
	}
	b := newBench(t)
	// The worker leaves orphans that end by themselves; PID 1 has to reap them.
	script := b.sh(`for i in 1 2 3 4 5; do (sh -c 'exit 3' &); done; sleep 0.3; `+
		`ps -eo stat | grep -c '^Z' > $DIR/zombies; exit 0`, "--nproc-per-node=1")
	l := b.startPath("/usr/bin/unshare", nil,
		append([]string{"--pid", "--fork", "--mount-proc", filepath.Join(binDir, "dlrover-run")}, script...)...)
	if l.wait() != 0 && strings.Contains(l.err.String(), "unshare failed") {
		t.Skip("PID namespaces are not allowed here, so the duties of PID 1 are NOT tested: " + l.err.String())
	}
	require.Equal(t, 0, l.code)
	require.Equal(t, []string{"0"}, b.lines("zombies"))
}

// What is ignored in the launcher would be so in its workers: a pipeline in one ends as
// in any shell.
func TestWorkersDoNotIgnoreSIGPIPE(t *testing.T) {
	b := newBench(t)
	l := b.run(b.sh(`grep -E 'Sig(Ign|Blk)' /proc/self/status > $DIR/signals`, "--nproc-per-node=1")...)
	require.Equal(t, 0, l.wait(), l.err.String())
	words := b.lines("signals")
	require.Len(t, words, 4)
	require.Equal(t, []string{"SigBlk:", "0000000000000000", "SigIgn:"}, words[:3])
	ignored, err := strconv.ParseUint(words[3], 16, 64)
	require.NoError(t, err)
	const glibcs = 3 << 31 // signals 32 and 33, which make's posix_spawn leaves ignored
	require.Zero(t, ignored&^glibcs, "signals %#x are ignored", ignored)
}

// systemd, for one, signals every process of a unit. Guard and launcher get one
// SIGTERM each then, which is one for the job: a second one would end the grace period.
func TestSignalToGuardAndLauncherIsOne(t *testing.T) {
	b := newBench(t)
	l := b.run(b.sh(`trap 'sleep 0.5; : > $DIR/saved.$RANK; exit 0' TERM; `+hold, "--nproc-per-node=2", "--standalone")...)
	eventually(t, "up", func() bool { return b.exists("up.2.0")() && b.exists("up.2.1")() })
	launcher := l.launcher()
	l.signal(syscall.SIGTERM)
	require.NoError(t, syscall.Kill(launcher, syscall.SIGTERM))
	require.Equal(t, 1, l.wait())
	require.True(t, b.exists("saved.0")() && b.exists("saved.1")(), "the grace period was granted")
}

// To kill either ends the job; no word of the job's is on the launcher's command line,
// so that pkill -f does not find both.
func TestKilledGuardOrLauncher(t *testing.T) {
	for _, name := range []string{"launcher", "guard"} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			l := b.run(b.sh(`env -i setsid sleep 300 & : > $DIR/orphan.$RANK; `+hold, "--standalone", "--nproc-per-node=2")...)
			eventually(t, "up", func() bool { return b.exists("up.2.0")() && b.exists("up.2.1")() })
			launcher := l.launcher()
			line := string(read(t, fmt.Sprintf("/proc/%d/cmdline", launcher)))
			require.Regexp(t, "^launcher\x00[0-9,]+\x00$", line)
			require.Equal(t, "launcher\n", string(read(t, fmt.Sprintf("/proc/%d/comm", launcher))))
			left := descendants(launcher)
			require.GreaterOrEqual(t, len(left), 4, "two shells with something in the background, and mostly a sleep of theirs")
			if name == "launcher" {
				require.NoError(t, syscall.Kill(launcher, syscall.SIGKILL))
			} else {
				l.signal(syscall.SIGKILL)
			}
			require.Equal(t, -1, l.wait(), "killed")
			for _, pid := range append(left, launcher) {
				eventually(t, "its end", func() bool { return syscall.Kill(pid, 0) != nil })
			}
		})
	}
}

// descendants are the pids below root.
func descendants(root int) (pids []int) {
	lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", root))
	for _, list := range lists {
		text, _ := os.ReadFile(list)
		for _, f := range strings.Fields(string(text)) {
			pid, _ := strconv.Atoi(f)
			pids = append(append(pids, pid), descendants(pid)...)
		}
	}
	return pids
}

// A launcher that runs as a worker has a guard of its own; its job ends with the outer one.
func TestNestedLauncher(t *testing.T) {
	b := newBench(t)
	inner := filepath.Join(binDir, "dlrover-run") + " --standalone --nproc-per-node=1 " +
		strings.Join(b.sh(`env -i setsid sleep 300 & `+hold), " ")
	l := b.run(b.sh("exec "+inner, "--standalone", "--nproc-per-node=2")...)
	eventually(t, "up", func() bool { return len(b.lines("starts")) == 2 })
	left := descendants(l.launcher())
	l.signal(syscall.SIGKILL)
	l.wait()
	for _, pid := range left {
		eventually(t, "its end", func() bool { return syscall.Kill(pid, 0) != nil })
	}
}

// nohup is for hangups: they stay ignored. Without it they end the job, as torchrun has it.
func TestNohup(t *testing.T) {
	b := newBench(t)
	l := b.startPath("/bin/sh", nil,
		append([]string{"-c", `trap '' HUP; exec "$@"`, "sh", filepath.Join(binDir, "dlrover-run")},
			b.sh(hold, "--standalone", "--nproc-per-node=1")...)...)
	eventually(t, "up", b.exists("up.1.0"))
	l.signal(syscall.SIGHUP)
	b.release()
	require.Equal(t, 0, l.wait(), l.err.String())
}
