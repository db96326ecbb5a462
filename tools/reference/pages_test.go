package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/argv"
)

// pages writes all man pages and completions once.
func pages(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, writePages(root, dir, "v1.2-rc1"))
	return dir
}

func TestPages(t *testing.T) {
	dir := pages(t)
	t.Run("options", func(t *testing.T) { pagesHaveAllOptions(t, dir) })
	t.Run("roff", func(t *testing.T) { pagesAreRoff(t, dir) })
	t.Run("shells", func(t *testing.T) { completionsAreValid(t, dir) })
	t.Run("bash", func(t *testing.T) { bashCompletes(t, dir) })
	t.Run("fish", func(t *testing.T) {
		text, err := os.ReadFile(filepath.Join(dir, "fish/dlrover-run.fish"))
		require.NoError(t, err)
		require.Contains(t, string(text), "complete -c dlrover-run -l start-method -x -a 'spawn fork forkserver' -d '")
		require.Contains(t, string(text), "complete -c dlrover-run -l log-dir -r -F -d ")
		require.Contains(t, string(text), "complete -c dlrover-run -l help -s h -d 'show this text, and exit'\n")
	})
}

func pagesHaveAllOptions(t *testing.T, dir string) {
	page := func(name string) string {
		text, err := os.ReadFile(filepath.Join(dir, "man", name+".1"))
		require.NoError(t, err)
		return strings.NewReplacer(`\-`, "-", `\fB`, "", `\fR`, "", `\fI`, "").Replace(string(text))
	}
	for _, o := range argv.Options() {
		require.Contains(t, page("dlrover-run"), "--"+o.Name)
	}
	for program, lines := range map[string][]string{
		"dlrover-run":    {"\n42\nthe workers hung", "\nDLROVER_TOKEN\n", "dlrover-run v1.2-rc1"},
		"dlrover-master": {"\n--python-agents", "\nDLROVER_SERVICE_ACCOUNT_DIR\n"},
		"checkpointd":    {"\n--job NAME\n", "\nXPU_TIMER_HANG_TIMEOUT\n"},
		"dlroverctl":     {"\n.SS node mark NODE\n", "\n-f, --follow\n", "\nNO_COLOR\n"},
		"gpucheck":       {"\n--level LEVEL\n"},
	} {
		for _, line := range lines {
			require.Contains(t, page(program), line, program)
		}
		require.NotContains(t, page(program), "](", program)
		require.NotContains(t, page(program), "`", program)
	}
}

// pagesAreRoff has the formatter say what it does not understand.
func pagesAreRoff(t *testing.T, dir string) {
	paths, err := filepath.Glob(filepath.Join(dir, "man/*.1"))
	require.NoError(t, err)
	require.Len(t, paths, 5)
	groff, err := exec.LookPath("groff")
	if err != nil {
		t.Skip("SKIPPED: NO GROFF HERE, SO THE MAN PAGES ARE NOT FORMATTED")
	}
	for _, path := range paths {
		out, err := exec.Command(groff, "-man", "-ww", "-Tutf8", "-Kutf8", "-z", path).CombinedOutput()
		require.NoError(t, err)
		require.Empty(t, string(out), path)
	}
}

func completionsAreValid(t *testing.T, dir string) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		path, err := exec.LookPath(shell)
		if err != nil {
			t.Logf("SKIPPED: NO %s HERE, SO ITS COMPLETIONS ARE NOT READ", strings.ToUpper(shell))
			continue
		}
		files, err := filepath.Glob(filepath.Join(dir, shell, "*"))
		require.NoError(t, err)
		require.Len(t, files, 5)
		for _, f := range files {
			out, err := exec.Command(path, "-n", f).CombinedOutput()
			require.NoError(t, err, "%s: %s", f, out)
		}
	}
}

func bashCompletes(t *testing.T, dir string) {
	const run = `
. "$0"
compopt() { echo FILES; }
COMP_WORDS=(checkpointd "$@"); COMP_CWORD=$#
_checkpointd
echo "${COMPREPLY[*]}"`
	for line, want := range map[string]string{
		"--sh":              "--shm-dir",
		"--job ":            "",
		"--hang ":           "outside off",
		"--hang = o":        "outside off",
		"--hang-action = r": "report restart",
		"--token-file ":     "FILES",
		"--job a --mas":     "--master",
	} {
		args := append([]string{"-c", run, filepath.Join(dir, "bash/checkpointd")}, strings.Split(line, " ")...)
		out, err := exec.Command("bash", args...).CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Equal(t, want, strings.TrimSpace(string(out)), line)
	}
}
