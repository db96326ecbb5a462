package ctl

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang/dump"
)

// launchers are some that answer, with the requests that they have got.
func launchers(t *testing.T, here ...dump.Answer) *[]dump.Request {
	t.Helper()
	got := new([]dump.Request)
	for i, a := range here {
		dir := filepath.Join(t.TempDir(), "hang-x")
		require.NoError(t, os.Mkdir(dir, 0o700))
		s, err := dump.Serve(dir, func(_ context.Context, r dump.Request) dump.Answer {
			if !r.Native && !r.Python && r.Steps == 0 {
				return a
			}
			*got = append(*got, r)
			return dump.Answer{Files: []string{r.Dir + "/" + here[i].Run}}
		})
		require.NoError(t, err)
		t.Cleanup(func() { _ = s.Close() })
	}
	return got
}

// drive calls the tool. There may be launchers on this machine that are none of the test's, so it names ranks that
// those do not have.
func drive(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, log strings.Builder
	p := &program{stdout: &out, stderr: &log, env: noEnv, now: time.Now}
	code = p.run(t.Context(), append([]string{"/usr/bin/" + driver}, args...))
	return code, out.String(), log.String()
}

func TestDumpDriverAsksTheLauncherOfARank(t *testing.T) {
	got := launchers(t, dump.Answer{Run: "a", World: 70002, Workers: []dump.Worker{{Rank: 70000, PID: 5}, {Rank: 70001,
		PID: 6}}}, dump.Answer{Run: "b", World: 70003, Workers: []dump.Worker{{Rank: 70002, PID: 7}}})
	code, out, log := drive(t, "--pid", "6", "--rank", "70001", "--world-size", "70002", "--dump-path", "/x", "--gdb",
		"--pyspy", "--gdb-bin=/opt/conda/bin/gdb") // as xpu_timer's daemon calls it
	require.Zero(t, code, log)
	require.Equal(t, "/x/a\n", out)
	require.Equal(t, driver+": --gdb-bin has no effect: dlrover-run reads stacks itself\n", log)
	require.Equal(t, []dump.Request{{Dir: "/x", Ranks: []int{70001}, Native: true, Python: true}}, *got)

	*got = nil
	code, _, log = drive(t, "--world-size=70003")
	require.Zero(t, code, log)
	require.Equal(t, []dump.Request{{Ranks: []int{70002}, Native: true, Python: true}}, *got)
	*got = nil
	code, _, log = drive(t, "--world-size=70002", "--pyspy", "--dump-path=x")
	require.Zero(t, code, log)
	wd, err := os.Getwd()
	require.NoError(t, err)
	require.Equal(t, []dump.Request{{Dir: filepath.Join(wd, "x"), Ranks: []int{70000, 70001}, Python: true}}, *got)

	*got = nil
	code, _, log = drive(t, "--world-size=70003", "--timeline=5")
	require.Zero(t, code, log)
	require.Equal(t, []dump.Request{{Ranks: []int{70002}, Steps: 5}}, *got)

	code, _, log = drive(t, "--rank", "70001", "--world-size", "70003")
	require.Equal(t, 1, code)
	require.Contains(t, log, "no such worker runs here; there are ")
	require.Contains(t, log, "ranks 70000-70001 of 70002 of run a (pids 5, 6)")
}

func TestDumpDriverOfTwoJobsWithTheSameNames(t *testing.T) {
	w := []dump.Worker{{Rank: 70000, PID: 5}}
	got := launchers(t, dump.Answer{Run: "a", World: 70002, Workers: w}, dump.Answer{Run: "b", World: 70002, Workers: w})
	code, _, log := drive(t, "--rank=70000")
	require.Equal(t, 1, code)
	require.Contains(t, log, "have the same name, 70000-70002.stacktrace: choose by --pid")
	require.Empty(t, *got)
}

// A launcher that is stopped holds nobody up for long.
func TestDumpDriverOfALauncherThatIsSilent(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "hang-x")
	require.NoError(t, os.Mkdir(dir, 0o700))
	path := filepath.Join(dir, "dump")
	l, err := net.Listen("unix", path)
	require.NoError(t, err)
	defer l.Close()
	got := launchers(t, dump.Answer{Run: "a", World: 70002, Workers: []dump.Worker{{Rank: 70000, PID: 5}}})
	code, _, log := drive(t, "--world-size=70002")
	require.Zero(t, code, log)
	require.Contains(t, log, "the launcher at "+path+" has not answered for 5s: ")
	require.Len(t, *got, 1)
}

func TestWrongUsesOfTheDumpDriver(t *testing.T) {
	for want, args := range map[string][]string{
		`--pid=0: there is no such one`: {"--pid", "0"}, `"x" is not an option; see xpu_timer_dump_driver --help`: {"x"},
		"--rank=-2": {"--rank=-2"}, "--timeline=0: need 1 to 100 steps": {"--timeline=0"},
		"--device": {"--device"}, "--dump-path needs a value": {"--dump-path"},
	} {
		code, _, log := drive(t, args...)
		require.Equal(t, 2, code, log)
		require.Contains(t, log, want)
		require.Equal(t, 1, strings.Count(log, "\n"), log)
	}
	code, out, _ := drive(t, "--help")
	require.Zero(t, code)
	require.Contains(t, out, "usage: "+driver+" [options]")
}
