package main

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/torchpython"
)

func envOf(env map[string]string) argv.LookupEnv {
	return func(name string) (string, bool) { v, ok := env[name]; return v, ok }
}

// tree writes files below a new directory. A name that ends in "->" is a link.
func tree(t *testing.T, files map[string]string) string {
	dir := t.TempDir()
	for name, text := range files {
		link, isLink := strings.CutSuffix(name, "->")
		path := filepath.Join(dir, link)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		if isLink {
			require.NoError(t, os.Symlink(strings.ReplaceAll(text, "ROOT", dir), path))
		} else {
			require.NoError(t, os.WriteFile(path, []byte(text), 0o755))
		}
	}
	return dir
}

const (
	torch113 = "__version__ = '1.13.0a0'\ndebug = False\n"
	torch215 = "from typing import Optional\n\n__all__ = ['__version__']\n__version__ = '2.15.0+cu132'\n"
)

func TestTorchReleaseIsFoundWhereInstallersPutIt(t *testing.T) {
	base := map[string]string{
		"base/bin/python3.11": "", "base/bin/python3->": "python3.11", "base/lib/python3.11/site-packages/torch/version.py": torch113,
		"base/lib64/python3.12/site-packages/torch/version.py": torch215, "base/bin/python3.12": "",
		"venv/bin/python->": "ROOT/base/bin/python3.11", "venv/pyvenv.cfg": "home = ROOT/base/bin\nversion = 3.11.7\n",
		"venv/lib/python3.11/site-packages/torch/version.py": torch215,
		"copy/bin/python": "", "copy/pyvenv.cfg": "home = ROOT/base/bin\nversion_info = 3.11.7.final.0\n", "copy/lib/python3.11/site-packages/torch/version.py": torch215,
		"empty/bin/python->": "ROOT/base/bin/python3.11", "empty/pyvenv.cfg": "home = x\ninclude-system-site-packages = false\n",
		"open/bin/python->": "ROOT/base/bin/python3.11", "open/pyvenv.cfg": "home = x\nInclude-System-Site-Packages = True\n",
		"shim/bin/python3": "#!/bin/sh\n", "home/.local/lib/python3.11/site-packages/torch/version.py": torch215,
		"path/torch/version.py": "__version__ = \"2.1\"\n",
		"odd/torch/version.py":  "__version__ = 'main'\n", "long/torch/version.py": strings.Repeat("#", 1<<20) + "\n" + torch215,
	}
	dir := tree(t, base)
	for name, c := range map[string]struct {
		python string
		env    map[string]string
		want   string
	}{
		"an installation":                  {"base/bin/python3", nil, "1.13"},
		"lib64":                            {"base/bin/python3.12", nil, "2.15"},
		"a venv":                           {"venv/bin/python", nil, "2.15"},
		"a venv of copies":                 {"copy/bin/python", nil, "2.15"},
		"a venv without torch":             {"empty/bin/python", nil, "none"},
		"a venv that sees the base":        {"open/bin/python", nil, "1.13"},
		"a venv does not see the user's":   {"empty/bin/python", map[string]string{"HOME": dir + "/home"}, "none"},
		"the user's packages":              {"base/bin/python3", map[string]string{"HOME": dir + "/home"}, "2.15"},
		"PYTHONUSERBASE":                   {"base/bin/python3", map[string]string{"PYTHONUSERBASE": dir + "/home/.local"}, "2.15"},
		"not the user's":                   {"base/bin/python3", map[string]string{"HOME": dir + "/home", "PYTHONNOUSERSITE": "1"}, "1.13"},
		"PYTHONPATH comes first":           {"venv/bin/python", map[string]string{"PYTHONPATH": "/nowhere:" + dir + "/path"}, "2.1"},
		"a version that is none":           {"shim/bin/python3", map[string]string{"PYTHONPATH": dir + "/odd"}, "none"},
		"a version file that is too large": {"shim/bin/python3", map[string]string{"PYTHONPATH": dir + "/long"}, "none"},
		"a wrapper":                        {"shim/bin/python3", nil, "none"},
		"no interpreter":                   {"nothing", nil, "none"},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, c.want, releaseText(torchRelease(filepath.Join(dir, c.python), envOf(c.env))))
		})
	}
}

func releaseText(major, minor int, ok bool) string {
	if !ok {
		return "none"
	}
	return fmt.Sprintf("%d.%d", major, minor)
}

// TestTorchReleaseIsTheImportedOne compares with what the interpreters of this machine import.
func TestTorchReleaseIsTheImportedOne(t *testing.T) {
	compared := 0
	for _, python := range []string{"/usr/bin/python3", "/bin/python3", torchpython.Chosen()} {
		out, err := exec.Command(python, "-c", "import torch; print(torch.__version__)").Output()
		if err != nil {
			t.Logf("%q imports no torch: not compared", python)
			continue
		}
		compared++
		require.Equal(t, release(string(out)), releaseText(torchRelease(python, os.LookupEnv)), python)
	}
	if compared == 0 {
		t.Skip("SKIPPED: THE RELEASE OF PYTORCH IN AN INTERPRETER'S OWN DIRECTORIES IS NOT TESTED: no Python here imports torch")
	}
}

// TestOnlyTheGenerationsNCCLVariable is seen by real workers, without and with an old torch.
func TestOnlyTheGenerationsNCCLVariable(t *testing.T) {
	dir := tree(t, map[string]string{"new/torch/version.py": torch215, "old/torch/version.py": torch113})
	for path, want := range map[string]string{
		"/nowhere":   "TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
		dir + "/new": "TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
		dir + "/old": "NCCL_ASYNC_ERROR_HANDLING=1",
	} {
		b := newBench(t)
		l := b.start("dlrover-run", []string{"PYTHONPATH=" + path}, b.sh(`env | grep ASYNC_ERROR_HANDLING`)...)
		require.Zero(t, l.wait())
		require.Equal(t, want, strings.TrimSpace(l.out.String()), path)
	}
}

// TestVariablesThatAreNotTorchrunsAreDocumented looks at what a worker has and the launcher has not. That torchrun's own are
// the same is a test of package preset.
func TestVariablesThatAreNotTorchrunsAreDocumented(t *testing.T) {
	docs, err := os.ReadFile("../../docs/torchrun.md")
	require.NoError(t, err)
	b := newBench(t)
	l := b.start("dlrover-run", nil, b.sh(`env`)...)
	require.Zero(t, l.wait())
	torchruns := strings.Fields(`RANK GROUP_RANK ROLE_RANK ROLE_NAME LOCAL_RANK LOCAL_WORLD_SIZE WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE
		MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE`)
	for line := range strings.Lines(l.out.String()) {
		name, _, _ := strings.Cut(line, "=")
		switch {
		case slices.ContainsFunc(b.env, func(kv string) bool { return strings.HasPrefix(kv, name+"=") }), slices.Contains(torchruns, name):
		case name == "PWD" || name == "_": // the shell's
		default:
			require.Contains(t, string(docs), "`"+name, "a variable that no user is told of")
		}
	}
}

// TestTheVenvOfTheLauncherComesFirst runs the launcher from a venv's bin: as a file, as a link, by path and by name.
func TestTheVenvOfTheLauncherComesFirst(t *testing.T) {
	b := newBench(t)
	python := "#!/bin/sh\necho ran $0\n"
	dir := tree(t, map[string]string{
		"link/pyvenv.cfg": "", "link/bin/python3": python, "link/bin/dlrover-run->": filepath.Join(binDir, "dlrover-run"), "link/bin/torchrun->": "dlrover-run",
		"two/pyvenv.cfg": "", "two/bin/python": python,
		"none/bin/python3": python, "none/bin/dlrover-run->": filepath.Join(binDir, "dlrover-run"),
		"path/python3": python, "other/python3": python,
		"home/bin/dlrover-run->": "deep/er", "home/bin/deep->": "ROOT/far/away", "far/away/er->": "../../link/bin/dlrover-run",
	})
	text, err := os.ReadFile(filepath.Join(binDir, "dlrover-run"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "two/bin/dlrover-run"), text, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, "train.py"), nil, 0o644))
	b.env = slices.DeleteFunc(b.env, func(kv string) bool { return strings.HasPrefix(kv, "PYTHON_EXEC=") || strings.HasPrefix(kv, "PATH=") })
	path := dir + "/path:" + os.Getenv("PATH")
	for name, c := range map[string]struct {
		program, arg0 string
		env           []string
		want          string
	}{
		"a link":                    {"link/bin/dlrover-run", "", []string{"PATH=" + path}, "link/bin/python3"},
		"a file, and only python":   {"two/bin/dlrover-run", "", []string{"PATH=" + path}, "two/bin/python"},
		"a link of another name":    {"link/bin/torchrun", "", []string{"PATH=" + path}, "link/bin/python3"},
		"links to a link in a venv": {"home/bin/dlrover-run", "", []string{"PATH=" + path}, "link/bin/python3"},
		"found in PATH":             {"link/bin/dlrover-run", "dlrover-run", []string{"PATH=" + dir + "/other:" + dir + "/link/bin"}, "link/bin/python3"},
		"no venv":                   {"none/bin/dlrover-run", "", []string{"PATH=" + path}, "path/python3"},
		"PYTHON_EXEC wins":          {"link/bin/dlrover-run", "", []string{"PATH=" + path, "PYTHON_EXEC=" + dir + "/other/python3"}, "other/python3"},
		"a name that is not its":    {"none/bin/dlrover-run", "two/bin/python", []string{"PATH=" + path}, "path/python3"},
		"a file by an unknown name": {"two/bin/dlrover-run", "whatever", []string{"PATH=" + path}, "two/bin/python"},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			program := filepath.Join(dir, c.program)
			cmd := exec.Cmd{Path: program, Args: []string{cmp.Or(c.arg0, program), "train.py"}, Dir: b.dir, Env: append(slices.Clone(b.env), c.env...), Stdout: &stdout, Stderr: &stderr}
			require.NoError(t, cmd.Run(), &stderr)
			require.Equal(t, "ran "+filepath.Join(dir, c.want), strings.TrimSpace(stdout.String()))
			require.Contains(t, stderr.String(), `"executable":"`+filepath.Join(dir, c.want)+`"`)
		})
	}
}
