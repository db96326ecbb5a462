package run

import (
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/run/trainjob"
)

// Steps are counted for the TrainJob that wants to know, without --hang.
func TestTotalSteps(t *testing.T) {
	pod := map[string]string{
		trainjob.URLVariable: "https://trainer:10443/status", trainjob.CAVariable: "ca", trainjob.TokenVariable: "token",
	}
	for name, c := range map[string]struct {
		line string
		env  map[string]string
		want []string // of features
		warn string
	}{
		"asked for":      {"--total-steps=1000 train.py", pod, []string{"hang", "trainjob"}, ""},
		"not asked for":  {"train.py", pod, nil, ""},
		"no TrainJob":    {"--total-steps=1000 train.py", nil, nil, trainjob.URLVariable},
		"counted anyway": {"--hang=auto --total-steps=5 train.py", pod, []string{"hang", "trainjob"}, ""},
	} {
		s, err := resolved(t, "--standalone "+c.line, c.env)
		require.NoError(t, err, name)
		p, err := makePlan(&s, testHost())
		require.NoError(t, err, name)
		for _, f := range []string{"hang", "trainjob"} {
			require.Equal(t, len(c.want) > 0, p.Features[f] != nil, "%s: %s", name, f)
		}
		if c.warn != "" {
			require.Contains(t, s.warnings[len(s.warnings)-1], c.warn)
		}
	}
	for line, want := range map[string]string{
		"--total-steps=0 train.py":  "--total-steps=0: need at least 1",
		"--total-steps=-5 train.py": "--total-steps=-5: need at least 1",
	} {
		_, err := resolved(t, "--standalone "+line, pod)
		require.ErrorContains(t, err, want)
	}
}
