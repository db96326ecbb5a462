package run

import (
	"bytes"
	"cmp"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

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
			require.NoError(t, writeProgram(path, []byte(text)))
		}
	}
	return dir
}

const (
	torch113 = "__version__ = '1.13.0a0'\ndebug = False\n"
	torch215 = "from typing import Optional\n\n__all__ = ['__version__']\n__version__ = '2.15.0+cu132'\n"
)

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

// TestVariablesThatAreNotTorchrunsAreDocumented looks at what a worker has and the launcher has not. That torchrun's
// own are the same is a test of package preset.
func TestVariablesThatAreNotTorchrunsAreDocumented(t *testing.T) {
	docs, err := os.ReadFile("../../../docs/start/from-torchrun.md")
	require.NoError(t, err)
	b := newBench(t)
	l := b.start("dlrover-run", nil, b.sh(`env`)...)
	require.Zero(t, l.wait())
	torchruns := strings.Fields(`RANK GROUP_RANK ROLE_RANK ROLE_NAME LOCAL_RANK
		LOCAL_WORLD_SIZE WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE
		MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS
		TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE`)
	for line := range strings.Lines(l.out.String()) {
		name, _, _ := strings.Cut(line, "=")
		switch {
		case slices.ContainsFunc(b.env, func(kv string) bool { return strings.HasPrefix(kv, name+"=") }),
			slices.Contains(torchruns, name):
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
		"link/pyvenv.cfg": "", "link/bin/python3": python, "link/bin/dlrover-run->": filepath.Join(binDir, "dlrover-run"),
		"link/bin/torchrun->": "dlrover-run",
		"two/pyvenv.cfg":      "", "two/bin/python": python,
		"none/bin/python3": python, "none/bin/dlrover-run->": filepath.Join(binDir, "dlrover-run"),
		"path/python3": python, "other/python3": python,
		"home/bin/dlrover-run->": "deep/er", "home/bin/deep->": "ROOT/far/away",
		"far/away/er->": "../../link/bin/dlrover-run",
	})
	text, err := os.ReadFile(filepath.Join(binDir, "dlrover-run"))
	require.NoError(t, err)
	require.NoError(t, writeProgram(filepath.Join(dir, "two/bin/dlrover-run"), text))
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, "train.py"), nil, 0o644))
	b.env = slices.DeleteFunc(b.env,
		func(kv string) bool { return strings.HasPrefix(kv, "PYTHON_EXEC=") || strings.HasPrefix(kv, "PATH=") })
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
		"found in PATH": {"link/bin/dlrover-run", "dlrover-run",
			[]string{"PATH=" + dir + "/other:" + dir + "/link/bin"}, "link/bin/python3"},
		"no venv": {"none/bin/dlrover-run", "", []string{"PATH=" + path}, "path/python3"},
		"PYTHON_EXEC wins": {"link/bin/dlrover-run", "",
			[]string{"PATH=" + path, "PYTHON_EXEC=" + dir + "/other/python3"}, "other/python3"},
		"a name that is not its":    {"none/bin/dlrover-run", "two/bin/python", []string{"PATH=" + path}, "path/python3"},
		"a file by an unknown name": {"two/bin/dlrover-run", "whatever", []string{"PATH=" + path}, "two/bin/python"},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			program := filepath.Join(dir, c.program)
			cmd := exec.Cmd{
				Path: program, Args: []string{cmp.Or(c.arg0, program), "train.py"}, Dir: b.dir,
				Env: append(slices.Clone(b.env), c.env...), Stdout: &stdout, Stderr: &stderr,
			}
			require.NoError(t, cmd.Run(), &stderr)
			require.Equal(t, "ran "+filepath.Join(dir, c.want), strings.TrimSpace(stdout.String()))
			require.Contains(t, stderr.String(), `"executable":"`+filepath.Join(dir, c.want)+`"`)
		})
	}
}
