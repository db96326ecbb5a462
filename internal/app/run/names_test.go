package run

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/guarded"
	"dlrover-run/launcher/argv/native"
)

// named is the program by another name, with a command line, in a directory of its own.
func named(t *testing.T, name string, args ...string) *exec.Cmd {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.Symlink(filepath.Join(binDir, "dlrover-run"), filepath.Join(dir, name)))
	cmd := exec.CommandContext(t.Context(), filepath.Join(dir, name), args...)
	cmd.Dir = dir
	return cmd
}

func TestCalledAs(t *testing.T) {
	require.Equal(t, guarded.XPUTimerLaunch, native.XPUTimerLaunch)
	for path, name := range map[string]string{
		"/usr/bin/msrun": "msrun", "torchrun": "torchrun", "deepspeed": "deepspeed", "/x/dlrover-run": "dlrover-run",
		"launcher": "dlrover-run", "": "dlrover-run",
	} {
		as := calledAs([]string{path, "x"})
		require.Equal(t, name, as.Name)
	}
	as := calledAs(nil)
	require.Equal(t, "dlrover-run", as.Name)
}

func TestHelpAndErrorsOfNames(t *testing.T) {
	for _, name := range []string{"msrun", "deepspeed"} {
		out, err := named(t, name, "--help").Output()
		require.NoError(t, err)
		require.Contains(t, string(out), "usage: "+name+" ")
		require.Contains(t, string(out), native.HelpFooter)
		out, err = named(t, name, "--no-such-option", "x.py").CombinedOutput()
		require.Error(t, err)
		require.Contains(t, string(out), name+": error: unrecognized arguments: --no-such-option")
	}
}

// A job of msrun: its workers find what MindSpore reads, one file each has their output, and they are bound.
func TestMSRunStartsWorkers(t *testing.T) {
	const script = `[ $MS_ROLE = MS_WORKER ] || exec echo only $MS_ROLE; ` +
		`echo out $MS_ROLE $RANK_ID/$MS_WORKER_NUM $MS_TOPO_TIMEOUT; echo err >&2; grep Cpus_allowed_list /proc/self/status`
	args := []string{"--worker_num=2", "--local_worker_num=2", "--log_dir=logs", "--cluster_time_out=60",
		`--bind_core={"device0":["0"]}`, "pytest", "-c", script}
	cmd := named(t, "msrun", args...)
	require.NoError(t, os.Symlink("/bin/sh", filepath.Join(cmd.Dir, "pytest"))) // which msrun executes itself
	cmd.Env = append(os.Environ(), "PATH="+cmd.Dir+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	require.NotContains(t, string(out), "MS_WORKER", "--join=False shows nothing")
	require.NotContains(t, string(out), "MS_SCHED")
	require.Equal(t, "only MS_SCHED\n", string(read(t, filepath.Join(cmd.Dir, "logs", "scheduler.log"))))
	for rank, want := range []string{`(?s)out MS_WORKER 0/2 60\n.*list:\t0\n`, `(?s)out MS_WORKER 1/2 60\n`} {
		text, err := os.ReadFile(filepath.Join(cmd.Dir, "logs", "worker_"+string(rune('0'+rank))+".log"))
		require.NoError(t, err)
		require.Regexp(t, want, string(text))
		require.Contains(t, string(text), "err\n")
	}
}

func TestDryRunOfNames(t *testing.T) {
	cmd := named(t, "msrun", "--worker_num=4", "--local_worker_num=2", "--node_rank=1", "--dry-run", "x.py")
	require.NoError(t, os.WriteFile(filepath.Join(cmd.Dir, "x.py"), nil, 0o600))
	out, err := cmd.Output()
	require.NoError(t, err)
	var p plan
	require.NoError(t, json.Unmarshal(out, &p))
	require.Equal(t, "msrun", p.Called.Name)
	require.Contains(t, p.Called.Options, "--preset=mindspore")
	require.Len(t, p.Called.Notes, 1)
	require.Equal(t, "127.0.0.1:8119", p.Rendezvous.Endpoint)
	require.Equal(t, "worker_0.log", p.Logs.Ranks)
}

// The Python package dlrover has a script dlrover-run, too.
func TestVersionSaysWhoseItIs(t *testing.T) {
	var out bytes.Buffer
	_, err := parse([]string{"--version"}, func(string) (string, bool) { return "", false }, &out)
	require.NoError(t, err)
	require.Regexp(t, `^dlrover-run \S+\n/\S+ is of dlrover-run-go, not of the Python package dlrover\n$`, out.String())
}
