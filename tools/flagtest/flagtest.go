// Package flagtest has tests that hold for the options of every program.
package flagtest

import (
	"flag"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"

	"dlrover-run/internal/duration"
)

// Durations checks that each option for a DURATION takes a number of seconds, and units. It returns how many there are.
func Durations(t *testing.T, flags []cli.Flag) (found int) {
	t.Helper()
	for _, f := range flags {
		_, foreign := f.(*cli.DurationFlag)
		require.False(t, foreign, "%s: use duration.Value", f.Names()[0])
		if !strings.HasPrefix(f.(cli.DocGenerationFlag).GetUsage(), "`DURATION`: ") {
			continue
		}
		found++
		for text, want := range map[string]time.Duration{"60": time.Minute, "60s": time.Minute, "2m": 2 * time.Minute} {
			set := flag.NewFlagSet("", flag.ContinueOnError)
			require.NoError(t, f.Apply(set))
			require.NoError(t, set.Set(f.Names()[0], text))
			require.Equal(t, duration.Text(want), set.Lookup(f.Names()[0]).Value.String(), "--%s=%s", f.Names()[0], text)
		}
	}
	return found
}
