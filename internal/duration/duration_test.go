package duration

import (
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestParse(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]time.Duration{
		"60": time.Minute, "60s": time.Minute, "2m": 2 * time.Minute, "1h30m": 90 * time.Minute,
		"0.5": 500 * time.Millisecond,
		"0":   0, "-3": -3 * time.Second, " 90s ": 90 * time.Second, "10ms": 10 * time.Millisecond, "1e3": 1000 * time.Second,
	} {
		got, err := Parse(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
	for _, text := range []string{"", "x", "60x", "nan", "inf", "-inf", "1e300", "9223372036.854775807", "2 m", "0x1p4"} {
		_, err := Parse(text)
		require.ErrorContains(t, err, "a plain number is in seconds", text)
	}
}

func TestWithin(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]time.Duration{"1": time.Second, "60m": time.Hour, "1h": time.Hour} {
		got, err := Within(text, time.Second, time.Hour)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
	for _, text := range []string{"999ms", "61m", "-5", "0"} {
		_, err := Within(text, time.Second, time.Hour)
		require.EqualError(t, err, `"`+text+`" is out of range: want 1s to 1h`)
	}
	_, err := Within("0", 90*time.Second, 2*time.Minute)
	require.EqualError(t, err, `"0" is out of range: want 1m30s to 2m`)
}

// People write all durations alike. The spec of checks is what our programs write to each other.
func TestNothingElseReadsDurations(t *testing.T) {
	t.Parallel()
	files := 0
	require.NoError(t, filepath.WalkDir("../..", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "test.go") {
			return err
		}
		name := strings.TrimPrefix(path, "../../")
		if name == "internal/duration/duration.go" || name == "netcheck/spec.go" {
			return nil
		}
		files++
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		for _, own := range []string{"time.ParseDuration", "cli.DurationFlag", ".DurationVar("} {
			require.False(t, strings.Contains(string(text), own), "%s: use internal/duration, not %s", name, own)
		}
		return nil
	}))
	require.Greater(t, files, 500)
}

func FuzzParse(f *testing.F) {
	f.Add("60")
	f.Add("1h30m")
	f.Fuzz(func(t *testing.T, text string) {
		d, err := Parse(text)
		if err != nil {
			return
		}
		again, err := Parse(d.String())
		require.NoError(t, err)
		require.Equal(t, d, again)
		require.Less(t, math.Abs(float64(d)), float64(math.MaxInt64)+1)
	})
}
