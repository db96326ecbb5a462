package gpuchild

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/testkit"
	"dlrover-run/switchbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a gpucheck that is a shell script.
func fake(t *testing.T, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "gpucheck")
	require.NoError(t, testkit.WriteProgram(path, "#!/bin/sh\n"+script+"\n"))
	return path
}

// run runs a fake under a deadline that is never reached where the fake ends.
func run(t *testing.T, script string) (switchbox.Report, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	return Program{Path: fake(t, script)}.Run(ctx, "--level=copy", "--timeout=20s")
}

const fine = `{"schema":1,"adaptor":"nvml","state":"ok","driver":"NVIDIA 550"}`

const faulty = `{"schema":1,"adaptor":"nvml","state":"faulty","reason":"GPU 3 must be reset, says the driver",` +
	`"findings":[{"check":"nvml","kind":"gpu.reset","severity":"fatal","text":"GPU 3 must be reset, says the driver"}]}`

func TestReportOfTheChild(t *testing.T) {
	r, err := run(t, `test "$*" = "--json --level=copy --timeout=20s" && echo '`+fine+`'`)
	require.NoError(t, err)
	require.Equal(t, switchbox.OK, r.State)
	require.Equal(t, "NVIDIA 550", r.Driver)
}

// The exit status only repeats what the report says, and what a driver prints is not in its way.
func TestReportCountsWhateverTheExitStatus(t *testing.T) {
	for _, status := range []string{"1", "3", "139"} {
		r, err := run(t, `echo noise >&2; echo '`+faulty+`'; exit `+status)
		require.NoError(t, err)
		require.Equal(t, switchbox.Faulty, r.State)
		require.Equal(t, "GPU 3 must be reset, says the driver", r.Reason)
	}
}

func TestEndsWithoutAReport(t *testing.T) {
	for _, c := range []struct{ name, script, want string }{
		{
			"old glibc",
			`echo "$0: /lib/x86_64-linux-gnu/libc.so.6: version 'GLIBC_2.34' not found (required by $0)" >&2; exit 1`,
			"gpucheck needs a newer glibc than this image has: ",
		},
		{
			"old driver", `echo "$0: symbol lookup error: $0: undefined symbol: nvmlDeviceGetFieldValues" >&2; exit 127`,
			"the NVIDIA driver is too old for gpucheck: ",
		},
		{
			"missing library", `echo "$0: error while loading shared libraries: libdl.so.2: cannot open" >&2; exit 127`,
			"gpucheck cannot be loaded: ",
		},
		{"killed", `kill -KILL $$`, "gpucheck was ended by a signal (killed)"},
		{"ended", `kill -TERM $$`, "gpucheck was ended by a signal (terminated)"},
		{"crash", `kill -SEGV $$`, "gpucheck crashed in the driver (segmentation fault)"},
		{"abort", `echo "libcuda: assertion failed" >&2; kill -ABRT $$`,
			"gpucheck crashed in the driver (aborted): libcuda: assertion failed"},
		{
			"crash of Go's runtime", `echo "fatal error: unexpected signal during runtime execution
[signal SIGSEGV: segmentation violation]" >&2; exit 2`,
			"gpucheck crashed in the driver: fatal error: unexpected signal",
		},
		{"silence", `exit 5`, "gpucheck ended with status 5 and no report"},
		{"success without a word", `exit 0`, "gpucheck ended with status 0 and no report"},
		{"garbage", `echo hello`, "gpucheck printed something else than a report: "},
		{"half a report", `printf '{"schema":1,'`, "gpucheck printed something else than a report: "},
		{"report of another version", `echo '{"schema":9,"adaptor":"nvml","state":"ok"}'`, "schema 9"},
		{"two reports", `echo '` + fine + `'; echo '` + fine + `'`, "something follows it"},
		{"terminal codes", `printf '\033]0;title\007' >&2; exit 4`, "status 4"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, err := run(t, c.script)
			require.NoError(t, err)
			require.Equal(t, switchbox.Skipped, r.State, "the node is not blamed")
			require.Contains(t, r.Reason, c.want)
			require.Equal(t, "nvml", r.Adaptor)
			require.NotContains(t, r.Reason, "\033")
			_, err = switchbox.ParseReport(printed(r))
			require.NoError(t, err, "it is a report like any other")
		})
	}
}

func TestUsageErrorIsTheCallers(t *testing.T) {
	_, err := run(t, `echo "gpucheck: --box-pairs: 0:9 names a device that is not here" >&2; exit 2`)
	_, ok := errors.AsType[*UsageError](err)
	require.True(t, ok)
	require.EqualError(t, err, "--box-pairs: 0:9 names a device that is not here")
}

// A flood must neither fill our memory nor keep us waiting.
func TestFloodIsCutOff(t *testing.T) {
	t.Parallel()
	for _, where := range []string{"", " >&2"} {
		started := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		r, err := Program{Path: fake(t, `exec tr '\0' x </dev/zero`+where)}.Run(ctx)
		require.NoError(t, err)
		require.Equal(t, switchbox.Skipped, r.State)
		require.Less(t, time.Since(started), 20*time.Second)
	}
}

// What does not end is killed with everything that it has started.
func TestHangIsKilledWithItsChildren(t *testing.T) {
	t.Parallel()
	pids := filepath.Join(t.TempDir(), "pids")
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	r, err := Program{Path: fake(t, `echo $$ >`+pids+`; sleep 1000 & echo $! >>`+pids+`; wait`)}.Run(ctx)
	require.NoError(t, err)
	require.Equal(t, switchbox.Skipped, r.State)
	require.Regexp(t, `^gpucheck did not end within .*s and was killed$`, r.Reason)
	text, err := os.ReadFile(pids)
	require.NoError(t, err)
	for _, word := range strings.Fields(string(text)) {
		pid, err := strconv.Atoi(word)
		require.NoError(t, err)
		require.Eventually(t, func() bool { return testkit.Gone(pid) }, 10*time.Second, 5*time.Millisecond, "process %d", pid)
	}
}

func TestCancelledCheckEndsAtOnce(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	started := time.Now()
	_, err := Program{Path: fake(t, `exec sleep 1000`)}.Run(ctx)
	require.ErrorIs(t, err, context.Canceled)
	require.Less(t, time.Since(started), 10*time.Second)
}

// A report that has come counts although its process does not end, as one with a thread that is stuck in the driver.
func TestReportOfAProcessThatDoesNotEnd(t *testing.T) {
	t.Parallel()
	started := time.Now()
	r, err := run(t, `echo '`+fine+`'; exec sleep 1000`)
	require.NoError(t, err)
	require.Equal(t, switchbox.OK, r.State)
	require.Less(t, time.Since(started), 30*time.Second, "it is not waited for until the deadline")
}

// Something else that holds its pipes, such as a daemon that a driver has started, is not waited for.
func TestPipesThatStayOpen(t *testing.T) {
	t.Parallel()
	r, err := run(t, `setsid sleep 5 & echo '`+fine+`'`)
	require.NoError(t, err)
	require.Equal(t, switchbox.OK, r.State)
}

// What not even SIGKILL ends waits in the kernel for the driver: that condemns the node.
func TestProcessThatCannotBeKilled(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("true")
	require.NoError(t, cmd.Run())
	c := &child{cmd: cmd, ended: make(chan error), stdout: newHead(10), stderr: newHead(10)}
	e := c.stop(true)
	require.True(t, e.stuck)
	e.took = 25 * time.Second
	r, err := e.report()
	require.NoError(t, err)
	require.Equal(t, switchbox.Faulty, r.State)
	require.Equal(t, "gpucheck hangs in the NVIDIA driver for 25s and cannot be killed", r.Reason)
	e.stdout = fine + "\n"
	r, err = e.report()
	require.NoError(t, err)
	require.Equal(t, switchbox.OK, r.State, "unless it has reported before")
}

func TestWhatCannotBeStarted(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(content), mode))
		return path
	}
	for _, c := range []struct{ path, want string }{
		{"", "there is no gpucheck beside the launcher or in PATH, and DLROVER_GPUCHECK is not set"},
		{filepath.Join(dir, "nowhere"), "there is no "},
		{write("loader", "#!/lib64/no-such-loader.so\n", 0o755), "it needs glibc, and this image has none"},
		{write("other", "\x7fELF of another machine", 0o755), "is not for this kind of machine"},
		{write("plain", "#!/bin/sh\n", 0o644), "permission denied"},
		{dir, "permission denied"},
	} {
		r, err := Program{Path: c.path}.Run(t.Context())
		require.NoError(t, err)
		require.Equal(t, switchbox.Skipped, r.State)
		require.Contains(t, r.Reason, c.want)
	}
}

func TestEnvironmentBindsLazily(t *testing.T) {
	got := environment([]string{"A=1", "LD_BIND_NOW=1", "GOTRACEBACK=crash", "LD_LIBRARY_PATH=/x"})
	require.Equal(t, []string{"A=1", "LD_LIBRARY_PATH=/x", "GOTRACEBACK=single"}, got)
}

func TestFind(t *testing.T) {
	dir, path := t.TempDir(), t.TempDir()
	t.Setenv(variable, "")
	t.Setenv("PATH", path)
	launcher := filepath.Join(dir, "dlrover-run")
	require.Empty(t, Find(launcher))
	require.NoError(t, os.WriteFile(filepath.Join(path, "gpucheck"), nil, 0o755))
	require.Equal(t, filepath.Join(path, "gpucheck"), Find(launcher))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "gpucheck"), nil, 0o755))
	require.Equal(t, filepath.Join(dir, "gpucheck"), Find(launcher), "the one of the same version")
	t.Setenv(variable, "/opt/gpucheck")
	require.Equal(t, "/opt/gpucheck", Find(launcher))
}

// Whatever comes out of a child, there is a report that others can read, or an error of the command line.
func FuzzEnding(f *testing.F) {
	f.Add(fine, "", 0, 0)
	f.Add(faulty, "noise", 1, 0)
	f.Add("", "gpucheck: no", 2, 0)
	f.Add("{", "GLIBC_2.34 not found", 1, 11)
	f.Fuzz(func(t *testing.T, stdout, stderr string, status, signal int) {
		r, err := ending{stdout: stdout, stderr: stderr, status: status, signal: syscall.Signal(signal)}.report()
		if err != nil {
			return
		}
		_, err = switchbox.ParseReport(printed(r))
		require.NoError(t, err)
	})
}
