package run

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// deepSpeed starts the program by that name; its workers are shell scripts.
func (b *bench) deepSpeed(env []string, args ...string) *launched {
	b.t.Helper()
	path := filepath.Join(b.dir, "deepspeed")
	if _, err := os.Lstat(path); err != nil {
		require.NoError(b.t, os.Symlink(filepath.Join(binDir, "dlrover-run"), path))
	}
	return b.startPath(path, append([]string{"HOME=" + b.dir, "DS_ACCELERATOR=cpu"}, env...), args...)
}

// hosts writes a host file.
func (b *bench) hosts(lines ...string) string {
	b.t.Helper()
	path := filepath.Join(b.dir, "hosts")
	require.NoError(b.t, os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600))
	return path
}

// program is sh without dlrover-run's options: an executable that deepspeed --no_python starts.
func (b *bench) program(script string) string { return b.sh(script)[1] }

func TestDeepSpeedRanksHaveFilesOfTheirOwn(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	l := b.deepSpeed(nil, "--hostfile=/dev/null", "--num_gpus=2", "--bind_cores_to_rank", "--bind_core_list=0",
		"--no_python", b.program("true"))
	require.Equal(t, 2, l.wait())
	require.Contains(t, l.err.String(), "deepspeed: error: --bind_cores_to_rank: there are 1 cores (0) for 2 ranks")

	script := b.program(`echo "out $RANK $1 $2 $CUDA_VISIBLE_DEVICES $LOCAL_SIZE $CROSS_RANK/$CROSS_SIZE"; echo err >&2
		if [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then sleep 1.1; exit 3; fi`)
	l = b.deepSpeed([]string{"PET_MAX_RESTARTS=1"}, "--hostfile=/dev/null", "--num_gpus=2", "--enable_each_rank_log=ranks",
		"--no_python", script, "--x")
	require.Equal(t, 0, l.wait())
	require.Empty(t, l.out.String())
	found, err := filepath.Glob(filepath.Join(b.dir, "ranks", "*_rank1.log"))
	require.NoError(t, err)
	require.Len(t, found, 2, "every start has files of its own")
	for _, path := range found {
		require.Regexp(t, `/20\d{12}_rank1\.log$`, path)
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		require.ElementsMatch(t, []string{"out 1 --local_rank=1 --x 0,1 2 0/1", "err"},
			strings.Split(strings.TrimSpace(string(text)), "\n"))
	}
}

// Two nodes with one and two workers; their files of pids go with the job.
func TestDeepSpeedOfTwoNodes(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, ".deepspeed_env"), []byte("FROM_FILE=$E2E_TAG.x\n"), 0o600))
	hosts := b.hosts("127.0.0.1 slots=1", "127.0.0.2 slots=2")
	script := b.program(`cp $DLROVER_HOSTFILE $DIR/live.$RANK; echo $FROM_FILE >> $DIR/env; ` +
		`echo "$RANK/$WORLD_SIZE $CROSS_RANK $CUDA_VISIBLE_DEVICES $1" > $DIR/seen.$RANK; : > $DIR/up.$RANK
		while [ ! -e $DIR/go ]; do sleep 0.02; done`)
	run := func(rank string) *launched {
		return b.deepSpeed(nil, "--hostfile="+hosts, "--node_rank="+rank, "--master_port="+b.port(), "--launcher=openmpi",
			"--save_pid", "--no_local_rank", "--no_python", script, "end")
	}
	l0, l1 := run("0"), run("1")
	for rank := range 3 {
		eventually(t, "all ranks", b.exists("up."+strconv.Itoa(rank)))
	}
	for _, l := range []*launched{l0, l1} {
		for _, name := range []string{".deepspeed", ".ds"} {
			text, err := os.ReadFile("/tmp/" + strconv.Itoa(l.cmd.Process.Pid) + name)
			require.NoError(t, err)
			require.Equal(t, strconv.Itoa(l.launcher()), string(text))
		}
	}
	b.release()
	require.Equal(t, 0, l0.wait())
	require.Equal(t, 0, l1.wait())
	require.Contains(t, l1.err.String(), "without effect here: --launcher=openmpi")
	for rank, want := range []string{"0/3 0 0 end", "1/3 1 0,1 end", "2/3 1 0,1 end"} {
		text, err := os.ReadFile(filepath.Join(b.dir, "seen."+strconv.Itoa(rank)))
		require.NoError(t, err)
		require.Equal(t, want+"\n", string(text))
		text, err = os.ReadFile(filepath.Join(b.dir, "live."+strconv.Itoa(rank)))
		require.NoError(t, err)
		require.Equal(t, "127.0.0.1 slots=1\n127.0.0.2 slots=2\n", string(text))
	}
	require.Contains(t, b.lines("env"), b.tag[len("E2E_TAG="):]+".x")
	require.NoFileExists(t, "/tmp/"+strconv.Itoa(l0.cmd.Process.Pid)+".deepspeed")
	require.NoFileExists(t, "/tmp/"+strconv.Itoa(l0.cmd.Process.Pid)+".ds")
}

// port is one for all launchers of the test.
func (b *bench) port() string {
	path := filepath.Join(b.dir, "port")
	if text, err := os.ReadFile(path); err == nil {
		return string(text)
	}
	port := freePort(b.t)
	require.NoError(b.t, os.WriteFile(path, []byte(port), 0o600))
	return port
}

// The file that the user names follows the world: two nodes, and one when the other has been killed.
func TestLiveHostfileFollowsTheWorld(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	live := filepath.Join(b.dir, "live")
	args := b.sh(hold, b.c10d("1:2", "--live-hostfile="+live, "--rdzv-conf=last_call_timeout=20")...)
	l0 := b.run(args...)
	eventually(t, "the rendezvous", func() bool { return strings.Contains(l0.err.String(), "serving the rendezvous") })
	l1 := b.run(args...)
	text := func() string { data, _ := os.ReadFile(live); return string(data) }
	eventually(t, "both nodes", func() bool { return text() == "127.0.0.1 slots=2\n127.0.0.1 slots=2\n" })
	eventually(t, "their workers", b.exists("up.4.3"))
	l1.signal(syscall.SIGKILL)
	eventually(t, "one node", func() bool { return text() == "127.0.0.1 slots=2\n" })
	b.release()
	require.Equal(t, 0, l0.wait())
	require.FileExists(t, live)
	left, err := filepath.Glob(filepath.Join(b.dir, ".live*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestDeepSpeedRefusesAndIdles(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	name, err := os.Hostname()
	require.NoError(t, err)
	l := b.deepSpeed(nil, "--no_ssh", "--hostfile="+b.hosts("nobody.invalid slots=1"), "train.py")
	require.Equal(t, 2, l.wait())
	require.Regexp(t, `(?m)^deepspeed: error: this node, \S+, is not in \S+, which has nobody.invalid: run the command`,
		l.err.String())
	l = b.deepSpeed([]string{"PATH=/nowhere"}, "--hostfile="+b.hosts("nobody.invalid slots=1"), "train.py")
	require.Equal(t, 2, l.wait())
	require.Contains(t, l.err.String(), "to start the job there from here needs ssh, which is not in PATH: install it")
	l = b.deepSpeed(nil, "--no_ssh", "--hostfile="+b.hosts(name+" slots=1", "x slots=1"), "--exclude="+name, "train.py")
	require.Equal(t, 0, l.wait(), l.err)
	require.Equal(t, "deepspeed: host "+name+" is not among those that are used: nothing to do here\n", l.out.String())
	require.Equal(t, 2, b.run("--live-hostfile=/proc/none/x", "--no-python", "true").wait())
}

func TestDeepSpeedPlan(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	l := b.deepSpeed(nil, "--hostfile="+b.hosts("127.0.0.1 slots=1", "127.0.0.2 slots=2"), "--node_rank=1", "--dry-run",
		"--enable_each_rank_log=out", "--no_python", "/bin/true")
	require.Equal(t, 0, l.wait())
	var p plan
	require.NoError(t, json.Unmarshal([]byte(l.out.String()), &p))
	require.Equal(t, "deepspeed", p.Called.Name)
	require.Equal(t, "auto", p.Features["live_hostfile"])
	require.Len(t, p.Workers, 2)
	require.Equal(t, []string{"/bin/true", "--local_rank=1"}, p.Workers[1].Argv)
}

// Tuning is DeepSpeed's own launcher's business: it gets signals, and its exit status is the command's.
func TestDeepSpeedTunes(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	python := b.program(`trap 'exit 7' TERM; echo "$@" > $DIR/args.new; mv $DIR/args.new $DIR/args
		while :; do sleep 0.02; done`)
	l := b.deepSpeed([]string{"PYTHON_EXEC=" + python, "PATH=/usr/bin:/bin"}, "--hostfile=/dev/null", "--autotuning=tune",
		"--num_gpus=1", "train.py", "--deepspeed", "ds.json")
	eventually(t, "the tuner", b.exists("args"))
	require.Equal(t, strings.Fields("-u -m deepspeed.launcher.runner --hostfile=/dev/null --autotuning=tune --num_gpus=1 "+
		"train.py --deepspeed ds.json"), b.lines("args"))
	l.signal(syscall.SIGTERM)
	require.Equal(t, 7, l.wait())
	require.Contains(t, l.err.String(), "deepspeed: --autotuning=tune: DeepSpeed's own launcher runs on this node")

	l = b.deepSpeed([]string{"PYTHON_EXEC=/bin/sh"}, "--hostfile=/dev/null", "--autotuning=run", "--dry-run", "train.py")
	require.Equal(t, 0, l.wait())
	require.Contains(t, l.out.String(), `"deepspeed.launcher.runner"`)

	require.NoError(t, os.Remove(filepath.Join(b.dir, "args")))
	l = b.deepSpeed([]string{"PYTHON_EXEC=" + python}, "--hostfile=/dev/null", "--autotuning=tune", "train.py")
	eventually(t, "the tuner", b.exists("args"))
	l.signal(syscall.SIGKILL)
	l.wait()
	b.noneLeft()
}

// The files are where people put the secrets of their workers.
func TestDeepSpeedsFilesOfVariablesAreNotPrinted(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, ".deepspeed_env"),
		[]byte("API_KEY=hunter2\nDLROVER_TOKEN=hunter2-hunter2-hunter2\n"), 0o600))
	l := b.deepSpeed(nil, "--hostfile="+b.hosts("127.0.0.1 slots=1", "127.0.0.2 slots=1"), "--node_rank=0",
		"--no_python", "--dry-run", b.program("true"))
	require.Equal(t, 0, l.wait())
	require.Contains(t, l.out.String(), `"API_KEY=<not shown>"`)
	require.NotContains(t, l.out.String()+l.err.String(), "hunter2")
}

func TestWorkersHaveNoJobTokenOfAFileOfVariables(t *testing.T) {
	s := settings{called: ownName()}
	s.called.command.Env = []string{"A=1", "DLROVER_TOKEN=hunter2"}
	require.Contains(t, s.workerEnv(), "A=1")
	require.NotContains(t, s.workerEnv(), "DLROVER_TOKEN=hunter2")
}
