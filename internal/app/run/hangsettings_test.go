package run

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// What is done about hangs is the run's, and goes with its parameters.
func TestTheRunHearsWhatIsDoneAboutHangs(t *testing.T) {
	for line, want := range map[string]string{
		"": "action=report", "--hang-action=restart": "action=restart", "--hang=off": "", "--hang=auto": "action=report",
		"--slow-action=check --slow-check-link=yes": "action=report slow=check slow-link=yes",
		"--slow-action=check --slow-check-link=no":  "action=report slow=check",
		"--slow-action=check":                       "action=report slow=check", "--slow-action=report": "action=report",
	} {
		s, err := resolved(t, line+" train.py", nil)
		require.NoError(t, err)
		require.Equal(t, want, s.params.Hang, line)
	}
	s, err := resolved(t, "--hang-action=restart train.py", map[string]string{"XPU_TIMER_HANG_TIMEOUT": "90"})
	require.NoError(t, err)
	require.Equal(t, "action=restart after=1m30s", s.params.Hang)
	_, err = resolved(t, "--slow-action=drain --slow-check-link=yes train.py", nil)
	require.ErrorContains(t, err, "--slow-check-link acts only with --slow-action=check")
	for _, line := range []string{"--hang=maybe", "--hang-action=kill"} {
		_, err := resolved(t, line+" train.py", nil)
		require.ErrorContains(t, err, "invalid choice", line)
	}
}
