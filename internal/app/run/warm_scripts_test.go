package run

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/torchpython"
)

// warmScripts are run with and without --warm: only time may differ. See testdata/warm/facts.py.
var warmScripts = []warmCase{
	{name: "DDP", script: "ddp.py"},
	{name: "DDP, modules named", script: "ddp.py", option: "--warm=torch,torch._dynamo"},
	{name: "DDP, standby", script: "ddp.py", option: "--warm-mode=standby", prepares: 2, first: "no process is ready"},
	{name: "guard, asyncio, fork", script: "guard.py"},
	{name: "spawn, forkserver, fork, loaders", script: "spawn.py"},
	{name: "module", script: "-m pkg.train", env: []string{"PYTHONPATH=."}},
	{name: "run path", script: "--run-path ddp.py"},
	{name: "hash seed", script: "ddp.py", env: []string{"PYTHONHASHSEED=7"}},
	{name: "-O, -X dev, utf8 and faulthandler, -W", script: "ddp.py", env: []string{"PYTHONOPTIMIZE=1", "PYTHONUTF8=1",
		"PYTHONFAULTHANDLER=1", "PYTHONWARNINGS=ignore"}},
	{name: "late variables", script: "late.py"},
	{name: "a computed variable", script: "computed.py", first: "no process is ready",
		says: "the script sets $OMP_NUM_THREADS before it imports torch, and only running it tells how"},
	{name: "a place before others in sys.path", script: "places.py", twin: true},
	{name: "a thread at an import", script: "threads.py", first: "no process is ready",
		says: "importing starts_a_thread started threads"},
	{name: "a rank at an import", script: "ranks.py", first: "no process is ready",
		says: "importing reads_rank reads $RANK, of which each worker has its own"},
	{name: "extensions in C", script: "extension.py", extensions: true},
	{name: "a failure after the restart", script: "fails.py", code: 1},
	{name: "FSDP", script: "fsdp.py", needs: "torch.distributed.fsdp._fully_shard"},
	{name: "accelerate", script: "hf_accelerate.py", needs: "accelerate"},
	{name: "Trainer of transformers", script: "hf_trainer.py", needs: "transformers",
		sets: []string{"TORCHINDUCTOR_CACHE_DIR"}},
	{name: "Lightning", script: "lightning_fit.py", needs: "lightning", first: "no process is ready",
		sets: []string{"TORCHINDUCTOR_CACHE_DIR"},
		says: "importing lightning reads $LOCAL_RANK, of which each worker has its own"},
	{name: "DeepSpeed", script: "ds_zero.py", needs: "deepspeed", env: []string{"DS_ACCELERATOR=cpu"},
		sets: []string{"TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK"}},
}

type warmCase struct {
	name, script string // and its options
	option       string // beside --warm
	env          []string
	needs        string // a module
	extensions   bool   // own_c, and other_c, which is on PYTHONPATH
	twin         bool   // a module of that name on PYTHONPATH
	code         int
	sets         []string // variables that imports set to what holds without them, too: forks have them early, or never
	prepares     int      // interpreters that import; 0: one
	first        string   // why the first workers are started by exec; "": they are not
	says         string   // by a line of the log
}

// warmRun is what has come of a case.
type warmRun struct {
	*bench
	l     *launched
	facts map[string]warmFacts // by rank and start
}

type warmFacts struct {
	Same, Own map[string]any
	Losses    []string
	Out, Err  []string // lines
}

func TestTorchWarmScripts(t *testing.T) {
	long(t)
	testWarmScripts(t, torchpython.Require(t, "SCRIPTS AS WARM WORKERS ARE"), func(c warmCase) bool {
		return c.needs != "deepspeed" && c.needs != "lightning"
	})
}

func TestFrameworksWarmScripts(t *testing.T) {
	python := frameworkCase{name: "deepspeed", venv: "torch"}.python(t)
	testWarmScripts(t, python, func(c warmCase) bool { return c.needs == "deepspeed" || c.needs == "lightning" })
}

func testWarmScripts(t *testing.T, python string, mine func(warmCase) bool) {
	for _, c := range warmScripts {
		if !mine(c) {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			if c.needs != "" && exec.Command(python, "-c", "import "+c.needs).Run() != nil {
				t.Skipf("SKIPPED: %s AS WARM WORKERS IS NOT TESTED: %s has no %s", c.name, python, c.needs)
			}
			cold, warm := c.run(t, python, false), c.run(t, python, true)
			require.Equal(t, cold.l.code, warm.l.code, "exit code")
			require.Equal(t, c.code, warm.l.code, "exit code")
			cold.without(c.sets)
			warm.without(c.sets)
			requireSameFacts(t, cold.facts, warm.facts)
			warm.requireStarts(c)
		})
	}
}

func (r *warmRun) without(variables []string) {
	for _, f := range r.facts {
		after := f.Same["after the imports"].(map[string]any)
		for _, name := range variables {
			delete(f.Same["env"].(map[string]any), name)
			delete(after["env"].(map[string]any), name)
		}
	}
}

// run runs it to its end.
func (c warmCase) run(t *testing.T, python string, warm bool) *warmRun {
	r := &warmRun{bench: newBench(t)}
	require.NoError(t, os.CopyFS(r.dir, os.DirFS("testdata/warm")))
	lib := filepath.Join(r.dir, "lib")
	for _, dir := range []string{lib, filepath.Join(r.dir, "facts")} {
		require.NoError(t, os.Mkdir(dir, 0o700))
	}
	require.NoError(t, os.WriteFile(filepath.Join(lib, "starts_a_thread.py"), []byte("import threading, time\n"+
		"thread = threading.Thread(target=time.sleep, args=(1000,), daemon=True)\nthread.start()\n"), 0o600))
	for name, line := range map[string]string{
		"reads_rank": `RANK = int(os.environ.get("RANK", "0"))`, "reads_mode": `MODE = os.environ.get("READS_MODE")`,
	} {
		require.NoError(t, os.WriteFile(filepath.Join(lib, name+".py"), []byte("import os\n"+line+"\n"), 0o600))
	}
	if c.twin {
		require.NoError(t, os.WriteFile(filepath.Join(lib, "twin.py"), []byte("WHICH = 'another one'\n"), 0o600))
	}
	if c.extensions {
		r.extension(python, filepath.Join(r.dir, "own_c.so"))
		r.extension(python, filepath.Join(lib, "other_c.so"))
	}
	bin := filepath.Dir(python)
	r.env = append(r.env, "PYTHON_EXEC="+python, "PYTHONPATH="+lib, "FACTS="+r.dir+"/facts",
		"PATH="+bin+":"+os.Getenv("PATH"), "TORCH_EXTENSIONS_DIR="+filepath.Join(bin, "../extensions"))
	for _, v := range c.env {
		r.env = append(r.env, strings.Replace(v, "PYTHONPATH=", "PYTHONPATH="+lib+":", 1))
	}
	args := []string{"--standalone", "--nproc-per-node=2", "--max-restarts=1", "--redirects=3",
		"--log-dir=" + r.dir + "/logs",
		"--event-log=" + r.dir + "/events.json", "--ckpt-daemon=off"}
	if warm {
		option := "--warm"
		if strings.HasPrefix(c.option, "--warm=") {
			option = c.option
		} else if c.option != "" {
			args = append(args, c.option)
		}
		args = append(args, option)
	}
	r.l = r.bench.run(append(args, strings.Fields(c.script)...)...)
	if warm {
		eventually(t, "imports", func() bool { return len(r.events("warm-prepared")) >= max(1, c.prepares) || r.l.ended() })
	}
	require.NoError(t, os.WriteFile(r.dir+"/facts/go", nil, 0o600))
	r.l.wait()
	r.read()
	return r
}

// extension compiles a module.
func (r *warmRun) extension(python, path string) {
	r.t.Helper()
	name := strings.TrimSuffix(filepath.Base(path), ".so")
	source := strings.TrimSuffix(path, ".so") + ".c"
	require.NoError(r.t, os.WriteFile(source, []byte(strings.ReplaceAll(`#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *args) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "NAME", "", -1, methods};
PyMODINIT_FUNC PyInit_NAME(void) { return PyModule_Create(&module); }
`, "NAME", name)), 0o600))
	include, err := exec.Command(python, "-c", "import sysconfig; print(sysconfig.get_paths()['include'])").Output()
	require.NoError(r.t, err)
	if _, err := os.Stat(strings.TrimSpace(string(include)) + "/Python.h"); err != nil {
		r.t.Skipf("SKIPPED: EXTENSIONS IN C OF WARM WORKERS ARE NOT TESTED: %v", err)
	}
	out, err := exec.Command("cc", "-shared", "-fPIC", "-I"+strings.TrimSpace(string(include)), "-o", path, source).
		CombinedOutput()
	require.NoError(r.t, err, string(out))
}

// read reads what the workers have told. Of the rank that is stopped when the other one is killed nothing is certain.
func (r *warmRun) read() {
	r.facts = map[string]warmFacts{}
	for _, worker := range []string{"0.2", "1.1", "1.2"} {
		var f warmFacts
		text, err := os.ReadFile(fmt.Sprintf("%s/facts/%s.json", r.dir, worker))
		require.NoError(r.t, err)
		require.NoError(r.t, json.Unmarshal([]byte(r.plain(string(text))), &f))
		rank, n, _ := strings.Cut(worker, ".")
		attempt := map[string]string{"1": "0", "2": "1"}[n]
		f.Out, f.Err = r.output(attempt, rank, "stdout"), r.output(attempt, rank, "stderr")
		r.facts[worker] = f
	}
}

func (r *warmRun) output(attempt, rank, stream string) []string {
	found, err := filepath.Glob(fmt.Sprintf("%s/logs/*/attempt_%s/%s/%s.log", r.dir, attempt, rank, stream))
	require.NoError(r.t, err)
	require.Len(r.t, found, 1)
	text, err := os.ReadFile(found[0])
	require.NoError(r.t, err)
	return strings.Split(r.plain(string(text)), "\n")
}

// changing are parts of texts that are others in each process.
var changing = []string{`0x[0-9a-f]{6,}`, `\d\d:\d\d:\d\d[.,\d]*`, `\b\d{4}-\d\d-\d\d\b`, `pid[ =:]*\d+`, `:\d{4,5}\b`,
	`\[W\d+`, `\b\d+\.\d+ ?(s|ms|seconds|it/s)\b`, `"(train_\w+)": [\d.]+`, `'train_\w+': '?[\d.]+`}

// plain has nothing of this run.
func (r *warmRun) plain(text string) string {
	text = strings.ReplaceAll(text, r.dir, "DIR")
	for _, c := range changing {
		text = regexp.MustCompile(c).ReplaceAllString(text, "*")
	}
	return text
}

// lines is a value as text, so that a difference is one line.
func lines(t *testing.T, value any) string {
	text, err := json.MarshalIndent(value, "", " ")
	require.NoError(t, err)
	return string(text)
}

func requireSameFacts(t *testing.T, cold, warm map[string]warmFacts) {
	t.Helper()
	own := map[string]string{}
	for worker, want := range cold {
		got := warm[worker]
		for name, value := range want.Same {
			assert.Equal(t, lines(t, value), lines(t, got.Same[name]), "%s of %s, with and without --warm", name, worker)
		}
		require.Len(t, got.Same, len(want.Same))
		assert.Equal(t, want.Losses, got.Losses, worker)
		require.NotEmpty(t, got.Losses, worker)
		assert.Equal(t, want.Out, got.Out, "standard output of %s", worker)
		assert.Equal(t, want.Err, got.Err, "standard error of %s", worker)
		for name, value := range got.Own {
			value := name + fmt.Sprint(value)
			require.Empty(t, own[value], "%s of %s, too", value, worker)
			own[value] = worker
		}
	}
}

// requireStarts: both starts were warm, or by exec for the reason that the case has.
func (r *warmRun) requireStarts(c warmCase) {
	r.t.Helper()
	starts := r.events("warm-start")
	require.Len(r.t, starts, 4)
	for i, s := range starts {
		how := fmt.Sprint(s["how"], " ", s["why"])
		if i < 2 && c.first != "" {
			require.Equal(r.t, "exec "+c.first, how)
		} else {
			require.NotContains(r.t, how, "exec", "start %d", i)
		}
	}
	if c.says != "" {
		require.Contains(r.t, r.l.err.String(), c.says)
	}
}
