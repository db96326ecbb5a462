package checkpointd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/commit"
)

func TestAHungStepIsLeftToItself(t *testing.T) {
	for name, tc := range map[string]struct {
		takes time.Duration
		want  string // an error
		after time.Duration
	}{
		"in time":             {time.Second, "", time.Second},
		"as time is over":     {2500 * time.Millisecond, "", 2500 * time.Millisecond},
		"it does not come":    {time.Minute, "storage does not answer: too late", 3 * time.Second},
		"as the grace begins": {2*time.Second + 1, "", 2*time.Second + 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeoutCause(t.Context(), 2*time.Second, errors.New("too late"))
				defer cancel()
				begin := time.Now()
				v, err := bounded(ctx, func() (int, error) { time.Sleep(tc.takes); return 7, nil })
				require.Equal(t, tc.after, time.Since(begin))
				if tc.want != "" {
					require.EqualError(t, err, tc.want)
					time.Sleep(time.Minute)
					return
				}
				require.NoError(t, err)
				require.Equal(t, 7, v)
			})
		})
	}
}

// manifestOf writes a committed step, and the tracker if it is to name it.
func manifestOf(t *testing.T, dir string, m commit.Manifest, tracked bool) {
	t.Helper()
	m.Version, m.Shards, m.Files = 1, 1, []commit.FileEntry{{Path: "a.pt"}}
	b, err := json.Marshal(m)
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(commit.MetaDir(dir), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(commit.MetaDir(dir), fmt.Sprintf("%d.json", m.Step)), b, 0o644))
	if tracked {
		require.NoError(t, os.WriteFile(filepath.Join(dir, commit.Latest), fmt.Append(nil, m.Step), 0o644))
	}
}

func TestASaveThatWorkersOfALaterEpochHavePassed(t *testing.T) {
	for name, tc := range map[string]struct {
		epoch   string
		step    int64
		second  int64
		tracked bool
		want    bool
	}{
		"a later epoch has gone on":               {"1.0.1", 8, 11, true, true},
		"from a lower step, too":                  {"1.0.1", 3, 11, true, true},
		"the same epoch goes on":                  {"1.0.0", 8, 11, true, false},
		"a later epoch, whose clock lags":         {"1.0.1", 8, 9, true, true},
		"another history, saved before":           {"7.0.1", 8, 9, true, false},
		"the same step, not named by the tracker": {"1.0.1", 5, 11, false, true},
		"another step, not named by the tracker":  {"1.0.1", 8, 11, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			d, _ := logged(t)
			dir := t.TempDir()
			manifestOf(t, dir, commit.Manifest{Save: commit.Save{ID: "other", Epoch: tc.epoch, Step: tc.step,
				Saved: time.Unix(tc.second, 0)}}, tc.tracked)
			require.Equal(t, tc.want, d.storage.outdated(madeAt(10, "this", "1.0.0", 5, dir)))
		})
	}
}
