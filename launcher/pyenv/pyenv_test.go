package pyenv

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/testkit"
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
			require.NoError(t, testkit.WriteProgram(path, text))
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
		"base/bin/python3.11": "", "base/bin/python3->": "python3.11",
		"base/lib/python3.11/site-packages/torch/version.py":   torch113,
		"base/lib64/python3.12/site-packages/torch/version.py": torch215, "base/bin/python3.12": "",
		"venv/bin/python->": "ROOT/base/bin/python3.11", "venv/pyvenv.cfg": "home = ROOT/base/bin\nversion = 3.11.7\n",
		"venv/lib/python3.11/site-packages/torch/version.py": torch215,
		"copy/bin/python": "", "copy/pyvenv.cfg": "home = ROOT/base/bin\nversion_info = 3.11.7.final.0\n",
		"copy/lib/python3.11/site-packages/torch/version.py": torch215,
		"empty/bin/python->": "ROOT/base/bin/python3.11",
		"empty/pyvenv.cfg":   "home = x\ninclude-system-site-packages = false\n",
		"open/bin/python->":  "ROOT/base/bin/python3.11",
		"open/pyvenv.cfg":    "home = x\nInclude-System-Site-Packages = True\n",
		"shim/bin/python3":   "#!/bin/sh\n", "home/.local/lib/python3.11/site-packages/torch/version.py": torch215,
		"path/torch/version.py": "__version__ = \"2.1\"\n",
		"odd/torch/version.py":  "__version__ = 'main'\n",
		"long/torch/version.py": strings.Repeat("#", 1<<20) + "\n" + torch215,
	}
	dir := tree(t, base)
	for name, c := range map[string]struct {
		python string
		env    map[string]string
		want   string
	}{
		"an installation":                {"base/bin/python3", nil, "1.13"},
		"lib64":                          {"base/bin/python3.12", nil, "2.15"},
		"a venv":                         {"venv/bin/python", nil, "2.15"},
		"a venv of copies":               {"copy/bin/python", nil, "2.15"},
		"a venv without torch":           {"empty/bin/python", nil, "none"},
		"a venv that sees the base":      {"open/bin/python", nil, "1.13"},
		"a venv does not see the user's": {"empty/bin/python", map[string]string{"HOME": dir + "/home"}, "none"},
		"the user's packages":            {"base/bin/python3", map[string]string{"HOME": dir + "/home"}, "2.15"},
		"PYTHONUSERBASE": {"base/bin/python3",
			map[string]string{"PYTHONUSERBASE": dir + "/home/.local"}, "2.15"},
		"not the user's": {"base/bin/python3",
			map[string]string{"HOME": dir + "/home", "PYTHONNOUSERSITE": "1"}, "1.13"},
		"PYTHONPATH comes first": {"venv/bin/python",
			map[string]string{"PYTHONPATH": "/nowhere:" + dir + "/path"}, "2.1"},
		"a version that is none":           {"shim/bin/python3", map[string]string{"PYTHONPATH": dir + "/odd"}, "none"},
		"a version file that is too large": {"shim/bin/python3", map[string]string{"PYTHONPATH": dir + "/long"}, "none"},
		"a wrapper":                        {"shim/bin/python3", nil, "none"},
		"no interpreter":                   {"nothing", nil, "none"},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, c.want, releaseText(TorchRelease(filepath.Join(dir, c.python), envOf(c.env))))
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
		require.Equal(t, release(string(out)), releaseText(TorchRelease(python, os.LookupEnv)), python)
	}
	if compared == 0 {
		t.Skip("SKIPPED: THE RELEASE OF PYTORCH IN AN INTERPRETER'S OWN DIRECTORIES IS NOT TESTED: " +
			"no Python here imports torch")
	}
}
