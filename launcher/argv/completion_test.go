package argv

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCompletionGolden(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "tcsh"} {
		t.Run(shell, func(t *testing.T) {
			got, err := Completion(shell, Options())
			require.NoError(t, err)
			file := filepath.Join("testdata", "completion."+shell)
			if *update {
				require.NoError(t, os.WriteFile(file, []byte(got), 0o644))
			}
			want, err := os.ReadFile(file)
			require.NoError(t, err)
			require.Equal(t, string(want), got)
			syntax := exec.CommandContext(t.Context(), findShell(t, shell), "-n", file)
			out, err := syntax.CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.Empty(t, out)
		})
	}
	_, err := Completion("fish", Options())
	require.EqualError(t, err, "no completion for shell 'fish': choose bash, zsh or tcsh")
}

// TestBashCompletion runs the generated function; compopt, which asks for file names, is replaced by a mark.
func TestBashCompletion(t *testing.T) {
	script, err := Completion("bash", Options())
	require.NoError(t, err)
	const run = `
compopt() { echo FILES; }
COMP_WORDS=(dlrover-run "$@"); COMP_CWORD=$#
_dlrover_run
echo "${COMPREPLY[*]}"`
	for _, tc := range []struct{ line, want string }{
		{"--nno", "--nnodes"},
		{"--nproc", "--nproc-per-node"},
		{"-m --standal", "--standalone"},
		{"--start-method ", "spawn fork forkserver"},
		{"--start_method f", "fork forkserver"},
		{"--start-method = fork", "fork forkserver"},
		{"--start-method =", "spawn fork forkserver"},
		{"--log-dir ", "FILES"},
		{"--nnodes ", ""},
		{"", "FILES"},
		{"--nnodes 2 tr", "FILES"},
		{"train.py --nno", "FILES"},
		{"-- --nno", "FILES"},
		{"--rdzv-endpoint host : 29400 --nno", "--nnodes"},
		{"--tee = 0 : 3 --nno", "--nnodes"},
		{"--tee = 0 : 3 train.py --nno", "FILES"},
	} {
		t.Run(tc.line, func(t *testing.T) {
			args := append([]string{"-c", script + run, "bash"}, strings.Split(tc.line, " ")...)
			out, err := exec.CommandContext(t.Context(), findShell(t, "bash"), args...).CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.Equal(t, tc.want, strings.TrimSpace(string(out)))
		})
	}
}

func findShell(t *testing.T, shell string) string {
	path, err := exec.LookPath(shell)
	if err != nil {
		t.Skipf("SKIPPED, the script was not tried: %v", err)
	}
	return path
}
