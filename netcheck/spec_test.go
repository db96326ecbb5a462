package netcheck

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSpecText(t *testing.T) {
	for text, want := range map[string]Spec{
		"level=full ttl=10m0s timeout=1m0s": {Level: LevelFull, TTL: DefaultTTL, Timeout: DefaultTimeout},
		"level=host ttl=0s timeout=5s exclude-straggler report-only": {Level: LevelHost, Timeout: minTimeout,
			ExcludeStraggler: true, ReportOnly: true},
		"level=full ttl=168h0m0s timeout=1h0m0s comm": {Level: LevelFull, TTL: MaxTTL, Timeout: MaxTimeout, Comm: true},
		"level=local ttl=1s timeout=1m0s":             {Level: LevelLocal, TTL: time.Second, Timeout: time.Minute},
	} {
		got, err := ParseSpec(text)
		require.NoError(t, err)
		require.Equal(t, want, got)
		require.Equal(t, text, got.String())
	}
	got, err := ParseSpec("")
	require.NoError(t, err)
	require.Equal(t, Spec{Level: LevelFull, TTL: DefaultTTL, Timeout: DefaultTimeout}, got)
}

func TestSpecIsRefused(t *testing.T) {
	for text, want := range map[string]string{
		"level=deep":          `check level "deep" is unknown: use local, host or full`,
		"level=host comm":     "a collective over all nodes needs the check level full, not host",
		"ttl=-1s":             "a pass cannot hold for -1s: use 0 (the run) to 168h0m0s",
		"ttl=169h":            "a pass cannot hold for 169h0m0s",
		"timeout=4.999s":      "a check cannot be bounded by 4.999s: use 5s to 1h0m0s",
		"timeout=61m":         "a check cannot be bounded by 1h1m0s",
		"ttl=soon":            `invalid duration "soon"`,
		"level=full comm=yes": `"comm=yes" is unknown here`,
		"quick":               `"quick" is unknown here: all nodes of a run need the same version`,
	} {
		_, err := ParseSpec(text)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, text)
	}
}

func FuzzParseSpec(f *testing.F) {
	f.Add("level=full ttl=10m0s timeout=1m0s comm exclude-straggler report-only")
	f.Add("level=host ttl=0")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := ParseSpec(text)
		if err != nil {
			return
		}
		again, err := ParseSpec(s.String())
		require.NoError(t, err)
		require.Equal(t, s, again)
		require.NoError(t, s.Validate())
		require.Less(t, len(s.String()), 1024)
	})
}
