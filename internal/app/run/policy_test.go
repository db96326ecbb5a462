package run

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/policy"
	"dlrover-run/rendezvous"
)

// withRules resolves a command line with these values of --rule.
func withRules(t *testing.T, line string, rules ...string) (settings, error) {
	t.Helper()
	args := []string{}
	for _, r := range rules {
		args = append(args, "--rule", r)
	}
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "train.py"), nil, 0o600))
	c, err := parse(append(append(args, strings.Fields(line)...), filepath.Join(dir, "train.py")), noVariables, io.Discard)
	require.NoError(t, err)
	return resolve(c, noVariables, testHost())
}

func noVariables(string) (string, bool) { return "", false }

func TestPolicyOfTheCommandLine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "site.yaml")
	require.NoError(t, os.WriteFile(path, []byte("base: t9k\nrules:\n  - exit: 5\n    action: hold\n"), 0o600))
	s, err := withRules(t, "--max-restarts=3 --standalone --policy="+path,
		"exit 3 -> stop-job", "exit 4 -> retry-elsewhere")
	require.NoError(t, err)
	require.Equal(t, []planPolicy{
		{"exit 3 -> stop-job", "--rule"}, {"exit 4 -> retry-elsewhere", "--rule"}, {"exit 5 -> hold", "site.yaml:3"},
		{"exit 130,137,143 -> retry", "--restart-policy=ExitCode"},
		{"exit 138 -> retry-free", "--restart-policy=ExitCode"}, {"any -> stop-job", "--restart-policy=ExitCode"},
	}, planRules(s.restarts.policy))
	require.Equal(t, rendezvous.SuccessNode0, s.params.Budget.Success)
	require.Equal(t, policy.RestartCharged, s.restarts.policy.Decide(policy.Exit{Code: 4}), "there is no other node")
	require.Contains(t, s.warnings, `the rule "exit 4 -> retry-elsewhere" (--rule) restarts here: this job has one node`)

	s, err = withRules(t, "--standalone --policy=nvrx")
	require.NoError(t, err)
	require.Contains(t, s.warnings, "the policy retries failures, but --max-restarts=0 leaves it no restart to spend")
	s, err = withRules(t, "--standalone")
	require.NoError(t, err)
	require.Empty(t, s.warnings)
	require.Equal(t, []planPolicy{{"any -> retry", "--restart-policy=OnFailure"}}, planRules(s.restarts.policy))
}

// T9k's policy has its four restart policies, and a limit of all restarts.
func TestPolicyOfT9k(t *testing.T) {
	for line, want := range map[string]policy.Action{
		"--max-restarts=1": policy.Fail, "--max-restarts=1 --restart-policy=ExitCode": policy.Fail,
		"--max-restarts=1 --restart-policy=OnFailure":   policy.RestartCharged,
		"--max-restarts=1 --restart-policy=Always":      policy.RestartCharged,
		"--restart-policy=Never":                        policy.Fail,
		"--max-restarts=1 --retryable-exit-codes=1,137": policy.RestartCharged,
	} {
		s, err := withRules(t, "--standalone --policy=t9k --backoff-limit=3 "+line)
		require.NoError(t, err, line)
		require.Equal(t, want, s.restarts.policy.Decide(policy.Exit{Code: 1}), line)
		b := s.params.Budget
		require.True(t, b.Sum)
		require.Equal(t, []int{3, -1}, []int{b.BackoffLimit, b.SameFailures})
		require.Contains(t, b.String(), "--backoff-limit=3 in all ")
		require.Equal(t, rendezvous.SuccessNode0, b.Success)
		require.True(t, b.Alone)
	}
	s, err := withRules(t, "--standalone --policy=t9k --same-failures=2 --max-restarts=1")
	require.NoError(t, err)
	require.Equal(t, 2, s.params.Budget.SameFailures)
	s, err = withRules(t, "--standalone --policy=nvrx --max-restarts=1")
	require.NoError(t, err)
	require.False(t, s.params.Budget.Sum)
}

// Whose success counts decides alone if it was said on purpose, and not by a preset or for an operator that does not.
func TestWhoDecidesAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "site.yaml")
	require.NoError(t, os.WriteFile(path, []byte("success-rule: rank0\nbase: ms-operator\n"), 0o600))
	for line, want := range map[string]string{
		"": "all", "--success-rule=all": "all", "--success-rule=any": "any", "--success-rule=rank0": "rank0 alone",
		"--success-rule=node0": "node0 alone", "--preset=mindspore": "rank0",
		"--preset=mindspore --success-rule=rank0": "rank0 alone", "--policy=t9k": "node0 alone",
		"--policy=t9k --success-rule=all": "all", "--policy=ms-operator": "node0", "--policy=" + path: "rank0 alone",
		"--policy=ms-operator --success-rule=rank0": "rank0 alone",
	} {
		s, err := withRules(t, "--standalone "+line)
		require.NoError(t, err, line)
		require.Contains(t, s.params.Budget.String(), " --success-rule="+want+" --clean-up", line)
	}
}

func TestPolicyThatCannotBeUsed(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "site.yaml")
	require.NoError(t, os.WriteFile(path, []byte("rules:\n  - exit: 5\n    action: pray\n"), 0o600))
	for want, c := range map[string]struct{ line, rule string }{
		`--rule: "exit 1": there is no ->`:                  {"", "exit 1"},
		`--policy=` + path + `: line 3: there is no action`: {"--policy=" + path, "exit 1 -> hold"},
		"give one of t9k, ms-operator, kubeflow":            {"--policy=" + dir + "/none", "exit 1 -> hold"},
		dir + ": not a regular file":                        {"--policy=" + dir, "exit 1 -> hold"},
		"/dev/zero: not a regular file":                     {"--policy=/dev/zero", "exit 1 -> hold"},
		"shrinks a job that needs all of its 1 nodes":       {"", "exit 1 -> shrink"},
		`the rule "any -> hold" (--rule) decides before`:    {"--policy=nvrx", "any -> hold"},
		"restart policy ExitCode has no effect":             {"--restart-policy=ExitCode", "any -> hold"},
	} {
		_, err := withRules(t, "--standalone "+c.line, c.rule)
		require.ErrorContains(t, err, want)
	}
	_, err := withRules(t, "--standalone", "exit 1 -> hold", "exit 1 -> retry")
	require.ErrorContains(t, err, "never decides anything")
}
