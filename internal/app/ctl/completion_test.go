package ctl

import (
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// askers print the words that a shell offers for a command line, which its script gets as arguments. Outside of its
// editor zsh has no compadd.
var askers = map[string]string{
	"bash": `source <(dlroverctl --print-completion bash); COMP_WORDS=(dlroverctl "$@"); COMP_CWORD=$#
		_dlroverctl dlroverctl "${COMP_WORDS[COMP_CWORD]}"; echo "${COMPREPLY[*]}"`,
	"zsh": `compdef() { }; _files() { }; compadd() { echo ${(M)${(P)2}:#$PREFIX*}; }
		source <(dlroverctl --print-completion zsh); words=(dlroverctl "$@"); CURRENT=$#words PREFIX=$words[-1]
		_dlroverctl`,
	"fish": `dlroverctl --print-completion fish | source; complete -C "dlroverctl $argv"`,
}

// Shells ask the program, so this test builds it.
func TestCompletion(t *testing.T) {
	dir := t.TempDir()
	build := exec.Command("go", "build", "-o", dir, "dlrover-run/cmd/dlroverctl")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	for _, c := range completions {
		t.Run(c.shell, func(t *testing.T) {
			require.Contains(t, c.script, "--generate-bash-completion 2>/dev/null")
			shell, err := exec.LookPath(c.shell)
			if err != nil {
				t.Skipf("SKIPPED, the script was not tried: %v", err)
			}
			for line, want := range map[string]string{
				"ver": "verdict", "checkpoints v": "verify", "node m": "mark", "status job --cond": "--conditions",
				"forget job --":       "--help --json --master --tls --tls-ca --tls-cert --tls-key --token-file",
				"checkpoints rm --js": "--json", "nonsense": "", "exec job 0 -- l": "",
			} {
				require.Equal(t, want, offered(t, dir, shell, askers[c.shell], strings.Fields(line)), line)
			}
		})
	}
	require.Equal(t, 2, ctl(io.Discard, "--print-completion", "csh"))
	require.Equal(t, 0, ctl(io.Discard, "exec", "job", "0", "--", "ls", "--generate-bash-completion"), "it was executed")
}

// offered are the words that a script prints, in alphabetical order.
func offered(t *testing.T, dir, shell, script string, words []string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), shell, append([]string{"-c", script, "--"}, words...)...)
	if strings.HasSuffix(shell, "fish") {
		cmd.Args = append([]string{shell, "-N", "-c", script}, words...)
	}
	cmd.Dir = t.TempDir() // fish offers files, too
	cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
	out, err := cmd.Output()
	require.NoError(t, err)
	found := strings.Fields(string(out))
	slices.Sort(found)
	return strings.Join(found, " ")
}
