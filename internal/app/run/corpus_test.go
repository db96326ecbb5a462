package run

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/torchpython"
	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous"
)

// produced is one file of the corpus, see launcher/verdict/testdata/corpus/README.md.
type produced struct {
	Fault    string           `json:"fault"`
	How      string           `json:"how"`
	Software string           `json:"software"`
	Rank     *int             `json:"rank"`
	Node     string           `json:"node,omitempty"`
	Class    verdict.Class    `json:"class"`
	Evidence verdict.Evidence `json:"evidence"`
}

// fault is one way for a job to fail. Its name is "FAULT[.VARIANT]", FAULT being a function of faults.py.
type fault struct {
	name   string
	class  verdict.Class
	python string // of softwares; "" is PyTorch 1.13
	rank   int    // that is to be named; anyRank, or lostNode
	env    []string
	nodes  int // 0 is 2
	slots  int // 0 is 1
	opts   []string
	box    string // shell commands before the launcher, in a mount namespace
	act    func(c *corpusRun)
	stand  string // the library that has the text of a stand-in
	races  int    // how often it runs, to catch orders that differ
}

const (
	badRank  = 0  // rank 1, as BAD is
	rankZero = -3 //
	anyRank  = -1 // all fail alike, or nothing tells
	lostNode = -2 // the node named node-1
)

// softwares are what faults are produced with: an interpreter, and where its packages are.
var softwares = map[string]struct{ title, python, path string }{
	"":          {"PyTorch 1.13.0", "/usr/bin/python3", ""},
	"2":         {"PyTorch 2.15.0", "$VENV/bin/python", ""},
	"jax":       {"JAX 0.10.2", "$VENV/bin/python", "$PACKAGES/jaxsite"},
	"paddle":    {"PaddlePaddle 3.3.1", "$PACKAGES/paddle/bin/python", ""},
	"deepspeed": {"DeepSpeed 0.19.8, PyTorch 2.15.0", "$VENV/bin/python", "$PACKAGES/dssite"},
}

func faults() []fault {
	const tmpfs = "mount -t tmpfs -o size=%s tmpfs %s"
	shm, disk := fmt.Sprintf(tmpfs, "8m", "/dev/shm"), fmt.Sprintf(tmpfs, "1m", "$DIR/disk")
	diskEnv := "DISK=$DIR/disk"
	early, record, all := "EARLY=1", "RECORD=1", "BAD=all"
	memory := "memory"
	libs := "PyTorch 2.15.0 and NCCL 2.30.7"
	return []fault{
		{name: "user_exception", class: verdict.UserException, races: 3},
		{name: "user_exception.record", class: verdict.UserException, env: []string{record}, races: 3},
		{name: "user_exception.torch2", class: verdict.UserException, python: "2", races: 3},
		{name: "user_exception.slots", class: verdict.UserException, slots: 2, races: 3},
		{name: "user_exception.early", class: verdict.UserException, env: []string{early}},
		{name: "key_error", class: verdict.UserException},
		{name: "chained", class: verdict.UserException, python: "2", env: []string{record}},
		{name: "assertion", class: verdict.Assertion},
		{name: "nan_check", class: verdict.UserException},
		{name: "anomaly", class: verdict.UserException},
		{name: "sys_exit", class: verdict.Unknown},
		{name: "sys_exit_text", class: verdict.Unknown},
		{name: "os_exit", class: verdict.Unknown, races: 3},
		{name: "recursion", class: verdict.UserException},
		{name: "segv", class: verdict.Segfault, races: 3},
		{name: "segv.torch2", class: verdict.Segfault, python: "2", slots: 2},
		{name: "segv_faulthandler", class: verdict.Segfault},
		{name: "stack_overflow", class: verdict.Segfault},
		{name: "ill", class: verdict.IllegalInstruction},
		{name: "fpe", class: verdict.IllegalInstruction},
		{name: "bus_file", class: verdict.SIGBUSShm},
		{name: "abort", class: verdict.Abort},
		{name: "heap", class: verdict.Abort},
		{name: "c_assert", class: verdict.Assertion},
		{name: "cpp_exception", class: verdict.Abort},
		{name: "cpp_bad_alloc", class: verdict.OOMPython},
		{name: "fatal_python", class: verdict.Abort},
		{name: "kill9", class: verdict.Killed, races: 3},
		{name: "kill9.torch2", class: verdict.Killed, python: "2", races: 2},
		{name: "kill_term", class: verdict.Killed},
		{name: "keyboard", class: verdict.Interrupted},
		{name: "cpu_limit", class: verdict.Killed},
		{name: "oom_kernel", class: verdict.OOMKernel, box: memory, slots: 2, nodes: 1},
		{name: "oom_loader", class: verdict.OOMKernel, box: memory, slots: 2, nodes: 1},
		{name: "memory_error", class: verdict.OOMPython},
		{name: "torch_memory", class: verdict.OOMPython},
		{name: "numpy_memory", class: verdict.OOMPython},
		{name: "open_files", class: verdict.UserException},
		{name: "disk_write", class: verdict.DiskFull, box: disk, env: []string{diskEnv}},
		{name: "disk_save", class: verdict.DiskFull, box: disk, env: []string{diskEnv}},
		{name: "disk_save.torch2", class: verdict.DiskFull, python: "2", box: disk, env: []string{diskEnv}},
		{name: "file_limit", class: verdict.DiskFull},
		{name: "file_limit.torch2", class: verdict.DiskFull, python: "2", env: []string{record}},
		{name: "file_limit_save", class: verdict.DiskFull},
		{name: "file_limit_save.torch2", class: verdict.DiskFull, python: "2"},
		{name: "shm_loader", class: verdict.SIGBUSShm, box: shm},
		{name: "shm_loader.torch2", class: verdict.SIGBUSShm, python: "2", box: shm},
		{name: "shm_share", class: verdict.SIGBUSShm, box: shm},
		{name: "address_in_use", class: verdict.AddressInUse},
		{name: "store_in_use", class: verdict.AddressInUse},
		{name: "store_in_use.torch2", class: verdict.AddressInUse, python: "2"},
		{name: "permission", class: verdict.Permission},
		{name: "missing_file", class: verdict.FileNotFound},
		{name: "missing_file.all", class: verdict.FileNotFound, rank: anyRank, env: []string{early, all}},
		{name: "missing_module", class: verdict.ImportError, rank: anyRank, env: []string{early, all}},
		{name: "missing_module.one", class: verdict.ImportError, env: []string{early}},
		{name: "missing_name", class: verdict.ImportError, rank: anyRank, env: []string{early, all}},
		{name: "missing_library", class: verdict.ImportError},
		{name: "undefined_symbol", class: verdict.ImportError},
		{name: "wrong_version", class: verdict.ImportError, python: "2"},
		{name: "hf_arguments", class: verdict.UsageError, python: "2", rank: anyRank, env: []string{early, all}},
		{name: "hf_missing", class: verdict.FileNotFound, python: "2", env: []string{early}},
		{name: "hf_unknown", class: verdict.FileNotFound, python: "2", rank: anyRank, env: []string{early, all}},
		{name: "argparse", class: verdict.UsageError, rank: anyRank, env: []string{early, all}},
		{name: "corrupt_safetensors", class: verdict.UserException, python: "2"},
		{name: "corrupt_checkpoint", class: verdict.UserException},
		{name: "corrupt_checkpoint.torch2", class: verdict.UserException, python: "2"},
		{name: "state_mismatch", class: verdict.UserException},
		{name: "state_keys", class: verdict.UserException, rank: anyRank, env: []string{early, all}},
		{name: "state_keys.torch2", class: verdict.UserException, python: "2", env: []string{record}},
		{name: "shape_mismatch", class: verdict.UserException, python: "2"},
		{name: "loader_raises", class: verdict.DataLoader},
		{name: "loader_raises.torch2", class: verdict.DataLoader, python: "2", env: []string{record}},
		{name: "loader_missing_file", class: verdict.FileNotFound},
		{name: "loader_segv", class: verdict.DataLoader},
		{name: "loader_killed", class: verdict.DataLoader},
		{name: "loader_killed.torch2", class: verdict.DataLoader, python: "2", env: []string{record}},
		{name: "loader_timeout", class: verdict.DataLoader},
		{name: "spawn:raise", class: verdict.UserException},
		{name: "spawn:raise.record", class: verdict.UserException, python: "2", env: []string{record}},
		{name: "spawn:segv", class: verdict.Segfault},
		{name: "spawn:exit", class: verdict.UserException},
		{name: "slow_teardown", class: verdict.UserException, races: 2},
		{name: "slow_teardown.record", class: verdict.UserException, env: []string{record}, races: 2},
		{name: "slow_teardown.torch2", class: verdict.UserException, python: "2", slots: 2},
		{name: "slow_thread", class: verdict.UserException, slots: 2, races: 2},
		{name: "slow_thread.torch2", class: verdict.UserException, python: "2"},
		{name: "late:user_exception", class: verdict.UserException, races: 2},
		{name: "late:user_exception.torch2", class: verdict.UserException, python: "2", env: []string{record}, slots: 2},
		{name: "late:kill9", class: verdict.Killed, slots: 2, races: 2},
		{name: "late:kill9.torch2", class: verdict.Killed, python: "2", races: 2},
		{name: "late:segv", class: verdict.Segfault, races: 2},
		{name: "late:os_exit", class: verdict.Unknown, slots: 2},
		{name: "late:disk_write", class: verdict.DiskFull, box: disk, env: []string{diskEnv}},
		{name: "sleeps.gloo", class: verdict.CollectiveTimeout, rank: anyRank, env: []string{"TIMEOUT=3"}, slots: 2},
		{name: "sleeps.torch2", class: verdict.CollectiveTimeout, python: "2", rank: anyRank, env: []string{"TIMEOUT=3"}},
		{name: "monitored_barrier", class: verdict.CollectiveTimeout, rank: anyRank},
		{name: "store_key", class: verdict.StoreTimeout, rank: anyRank},
		{name: "store_key.torch2", class: verdict.StoreTimeout, python: "2", rank: anyRank},
		{name: "late_member", class: verdict.StoreTimeout, rank: anyRank},
		{name: "late_member.torch2", class: verdict.StoreTimeout, python: "2", rank: anyRank},
		{name: "unresolved", class: verdict.StoreTimeout, races: 2},
		{name: "unresolved.torch2", class: verdict.StoreTimeout, python: "2"},
		{name: "unresolved.all", class: verdict.StoreTimeout, rank: anyRank, env: []string{all}},
		{name: "own_store", class: verdict.Killed, rank: rankZero, races: 3},
		{name: "own_store.torch2", class: verdict.Killed, python: "2", rank: rankZero, races: 2},
		{name: "ddp_mismatch", class: verdict.UserException, rank: anyRank},
		{name: "no_gpu", class: verdict.DeviceError},
		{name: "no_gpu.torch2", class: verdict.DeviceError, python: "2"},
		{name: "no_nccl.torch2", class: verdict.DeviceError, python: "2", rank: anyRank, env: []string{all}},
		{name: "init_nccl", class: verdict.DeviceError, rank: anyRank},
		{name: "init_nccl.torch2", class: verdict.DeviceError, python: "2", rank: anyRank},
		{name: "deadlock.timer", class: verdict.Hang, rank: anyRank, opts: []string{"--hang=auto", "--hang-action=stop"},
			env: []string{"STEP=0.2", "TIMEOUT=600", "XPU_TIMER_HANG_TIMEOUT=10"}},
		{name: "deepspeed_config", class: verdict.Assertion, python: "deepspeed", rank: anyRank, env: []string{early, all}},
		{name: "cuda_oom", class: verdict.OOMDevice, python: "2", stand: libs, races: 2},
		{name: "cuda_oom.record", class: verdict.OOMDevice, python: "2", stand: libs, env: []string{record}},
		{name: "cuda_error:an illegal memory access was encountered", class: verdict.DeviceError, python: "2", stand: libs},
		{name: "cuda_error:device-side assert triggered", class: verdict.DeviceError, python: "2", stand: libs},
		{name: "cuda_error:uncorrectable ECC error encountered", class: verdict.Hardware, python: "2", stand: libs},
		{name: "nccl_job", class: verdict.Hardware, python: "2", stand: libs, slots: 2, races: 2},
		{name: "nccl_hang_job", class: verdict.CollectiveTimeout, python: "2", stand: libs, rank: anyRank},
		{name: "nccl_system", class: verdict.NCCLError, python: "2", stand: libs},
		{name: "jax_job", class: verdict.UserException, python: "jax", slots: 2, nodes: 1, races: 2},
		{name: "jax_job.kill", class: verdict.Killed, python: "jax", env: []string{"JAX=kill"}, races: 2},
		{name: "jax_shapes", class: verdict.UserException, python: "jax"},
		{name: "paddle_job", class: verdict.UserException, python: "paddle", races: 2},
		{name: "paddle_job.enforce", class: verdict.UserException, python: "paddle", env: []string{"PADDLE=enforce"}},
		{name: "paddle_job.segv", class: verdict.Segfault, python: "paddle", env: []string{"PADDLE=segv"}},
		{name: "paddle_job.term", class: verdict.Killed, python: "paddle", env: []string{"PADDLE=term"}},
		{name: "sleeps.launcher_killed", class: verdict.Lost, rank: lostNode, act: afterStep(syscall.SIGKILL), races: 2},
		{name: "sleeps.launcher_term", class: verdict.Lost, rank: lostNode, act: afterStep(syscall.SIGTERM), races: 2},
		{name: "sleeps.ctrl_c", class: verdict.Lost, rank: anyRank, act: func(c *corpusRun) {
			afterStep(syscall.SIGINT)(c)
			c.launchers[0].signal(syscall.SIGINT)
		}},
	}
}

// TestCorpus produces the faults of launcher/verdict/testdata/corpus again, which takes half an hour: DLROVER_CORPUS is
// a pattern of names whose files are written anew, and DLROVER_CORPUS_PACKAGES has JAX, PaddlePaddle and DeepSpeed.
func TestCorpus(t *testing.T) {
	if os.Getenv("DLROVER_LONG_TESTS") == "" {
		t.Skip("SKIPPED: THE CORPUS OF FAULTS IS NOT PRODUCED AGAIN without DLROVER_LONG_TESTS=1")
	}
	torchpython.Require(t, "THE CORPUS OF FAULTS IS")
	write := os.Getenv("DLROVER_CORPUS")
	pattern := regexp.MustCompile(cmp.Or(write, "."))
	atOnce := make(chan struct{}, 4)
	for _, f := range faults() {
		if !pattern.MatchString(f.name) {
			continue
		}
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			atOnce <- struct{}{}
			defer func() { <-atOnce }()
			var seen []string
			for range max(f.races, 1) {
				p := f.produce(t)
				if s := orderOf(p.Evidence); !slices.Contains(seen, s) {
					seen = append(seen, s)
					f.check(t, p, len(seen), write != "")
				}
			}
		})
	}
}

// orderOf tells evidence apart: who ended how, in which order.
func orderOf(e verdict.Evidence) string {
	var parts []string
	for _, f := range e.Failures {
		parts = append(parts, fmt.Sprint(f.Rank, f.ExitCode, f.Stopped, f.Class()))
	}
	return strings.Join(parts, "; ")
}

func (f *fault) check(t *testing.T, p produced, nth int, write bool) {
	v := verdict.Judge(p.Evidence)
	t.Logf("%s: %s", v.Class, v.Line())
	if !write {
		require.Equal(t, p.Class, v.Class)
		return
	}
	name := regexp.MustCompile(`[^a-z0-9]+`).ReplaceAllString(strings.ToLower(f.name), "-")
	if nth > 1 {
		name += fmt.Sprint("-order", nth)
	}
	data, err := json.MarshalIndent(p, "", " ")
	require.NoError(t, err)
	path := filepath.Join("../../../launcher/verdict/testdata/corpus", name+".json")
	require.NoError(t, os.WriteFile(path, append(data, '\n'), 0o644))
}

// corpusRun is a fault that is being produced.
type corpusRun struct {
	*bench
	f         *fault
	addr      string
	launchers []*launched
}

func (f *fault) produce(t *testing.T) produced {
	c := &corpusRun{bench: newBench(t), f: f}
	var d *launched
	d, c.addr = c.startDaemon("127.0.0.1:0", "DLROVER_TOKEN="+testToken)
	for node := range cmp.Or(f.nodes, 2) {
		c.launchers = append(c.launchers, c.launch(node))
	}
	if f.act != nil {
		f.act(c)
	}
	for _, l := range c.launchers {
		select {
		case <-l.exited:
		case <-time.After(4 * time.Minute):
			require.FailNow(t, "the launcher does not end")
		}
		require.NotContains(t, l.err.String(), "exit code 99", "the text of a stand-in is not the library's")
	}
	e := c.evidence()
	for _, l := range c.launchers {
		if len(e.Failures)+len(e.Losses) == 0 {
			t.Logf("stderr:\n%s", l.err)
		}
	}
	d.signal(syscall.SIGTERM)
	d.wait()
	return f.file(e)
}

func (f *fault) file(e verdict.Evidence) produced {
	rank := 1
	p := produced{Fault: f.name, How: "run", Software: softwares[f.python].title, Class: f.class, Evidence: e}
	if f.stand != "" {
		p.How = "stand-in: raised by hand, with a text whose parts were found in the binaries of " + f.stand
	}
	switch f.rank {
	case badRank:
		p.Rank = &rank
	case rankZero:
		rank = 0
		p.Rank = &rank
	case lostNode:
		p.Node = "node-1"
	}
	return p
}

// launch starts the launcher of one node.
func (c *corpusRun) launch(node int) *launched {
	s := softwares[c.f.python]
	packages := cmp.Or(os.Getenv("DLROVER_CORPUS_PACKAGES"), "/nonexistent")
	home, err := os.UserHomeDir()
	require.NoError(c.t, err)
	expand := strings.NewReplacer("$VENV", home+"/.cache/dlrover-run/torch2", "$PACKAGES", packages, "$DIR", c.dir).Replace
	script, err := filepath.Abs("../../../launcher/verdict/testdata/faults.py")
	require.NoError(c.t, err)
	if _, err := os.Stat(expand(s.python)); err != nil {
		c.t.Skip("SKIPPED: NO", s.title, "HERE, so its faults are not produced:", err)
	}
	name, _, _ := strings.Cut(c.f.name, ".")
	env := []string{"DLROVER_MASTER_ADDR=" + c.addr, "DLROVER_TOKEN=" + testToken, fmt.Sprint("POD_NAME=node-", node),
		"PYTHON_EXEC=" + expand(s.python), "PYTHONPATH=" + expand(s.path), "PYTHONDONTWRITEBYTECODE=1",
		"GLOO_SOCKET_IFNAME=lo", "JAX_PLATFORMS=cpu"}
	for _, e := range c.f.env {
		env = append(env, expand(e))
	}
	args := slices.Concat([]string{fmt.Sprint("--nnodes=", cmp.Or(c.f.nodes, 2)),
		fmt.Sprint("--nproc-per-node=", cmp.Or(c.f.slots, 1)), "--rdzv-id=job", "--max-restarts=0",
		"--rdzv-conf=join_timeout=10", "--shutdown-timeout=5"}, c.f.opts, []string{script, name})
	return c.startPath(c.boxed(node, expand(c.f.box)), env, args...)
}

// boxed is a script that executes the launcher where c.f wants it.
func (c *corpusRun) boxed(node int, box string) string {
	launcher := filepath.Join(binDir, "dlrover-run")
	text := "exec " + launcher + ` "$@"`
	switch {
	case box == "memory":
		group := memoryGroup(c.t, 1<<30)
		text = "echo $$ > " + group + "/cgroup.procs\n" + text
	case box != "":
		require.NoError(c.t, os.MkdirAll(filepath.Join(c.dir, "disk"), 0o755))
		text = fmt.Sprintf("exec unshare -m sh -c '%s && exec %s \"$@\"' sh \"$@\"", box, launcher)
	}
	path := filepath.Join(c.dir, fmt.Sprint("launch-", node))
	require.NoError(c.t, writeProgram(path, []byte("#!/bin/sh\n"+text+"\n")))
	return path
}

// memoryGroup makes a cgroup with a limit in bytes, until the end of the test.
func memoryGroup(t *testing.T, limit int) (dir string) {
	dir, err := os.MkdirTemp("/sys/fs/cgroup/memory", "dlrover-test-")
	if err != nil {
		t.Skip("SKIPPED: no memory cgroup can be made here, so the kernel's OOM killer is not met:", err)
	}
	t.Cleanup(func() { _ = exec.Command("rmdir", dir).Run() })
	require.NoError(t, os.WriteFile(dir+"/memory.limit_in_bytes", []byte(fmt.Sprint(limit)), 0o644))
	return dir
}

// evidence is what the daemon has heard of the job's last epoch.
func (c *corpusRun) evidence() verdict.Evidence {
	req, err := http.NewRequestWithContext(c.t.Context(), http.MethodGet, "http://"+c.addr+"/v1/runs/job/failures", nil)
	require.NoError(c.t, err)
	req.Header.Set("Authorization", "Bearer "+testToken)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(c.t, err)
	defer resp.Body.Close()
	defer http.DefaultClient.CloseIdleConnections()
	var epochs []rendezvous.EpochEvidence
	require.NoError(c.t, json.NewDecoder(resp.Body).Decode(&epochs))
	require.NotEmpty(c.t, epochs)
	return verdict.Unpack(epochs[0].Evidence)
}

// afterStep signals the second launcher once its workers train.
func afterStep(sig syscall.Signal) func(c *corpusRun) {
	return func(c *corpusRun) {
		eventually(c.t, "workers started", func() bool {
			return !slices.ContainsFunc(c.launchers, func(l *launched) bool {
				return !strings.Contains(l.err.String(), "workers started")
			})
		})
		time.Sleep(5 * time.Second)
		c.launchers[1].signal(sig)
	}
}
