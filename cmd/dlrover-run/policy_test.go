package main

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
		{"exit 130,137,143 -> retry because SIGINT, SIGKILL and SIGTERM come from outside", "t9k"},
		{"exit 138 -> retry-free because the program asks for a restart", "t9k"},
		{"any -> stop-job because other exit codes are permanent", "t9k"},
	}, planRules(s.policy))
	require.Equal(t, rendezvous.SuccessNode0, s.params.Budget.Success)
	require.Equal(t, policy.RestartCharged, s.policy.Decide(policy.Exit{Code: 4}), "there is no other node")
	require.Contains(t, s.warnings, `the rule "exit 4 -> retry-elsewhere" (--rule) restarts here: this job has one node`)

	s, err = withRules(t, "--standalone --policy=nvrx")
	require.NoError(t, err)
	require.Contains(t, s.warnings, "the policy retries failures, but --max-restarts=0 leaves it no restart to spend")
	s, err = withRules(t, "--standalone")
	require.NoError(t, err)
	require.Empty(t, s.warnings)
	require.Equal(t, []planPolicy{{"any -> retry", "--restart-policy=OnFailure"}}, planRules(s.policy))
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
		`the rule "any -> hold" (--rule) decides before`:    {"--policy=t9k", "any -> hold"},
		"restart policy ExitCode has no effect":             {"--restart-policy=ExitCode", "any -> hold"},
	} {
		_, err := withRules(t, "--standalone "+c.line, c.rule)
		require.ErrorContains(t, err, want)
	}
	_, err := withRules(t, "--standalone", "exit 1 -> hold", "exit 1 -> retry")
	require.ErrorContains(t, err, "never decides anything")
}
