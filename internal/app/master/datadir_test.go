package master

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/marks"
	"dlrover-run/rendezvous/lead"
)

// A directory that cannot be used is named, and nothing holds it after that.
func TestDataDirectoriesThatCannotBeUsed(t *testing.T) {
	old, lock, plain := t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "plain")
	require.NoError(t, os.WriteFile(filepath.Join(old, "nodes.json"), []byte("{"), 0o600))
	require.NoError(t, os.Symlink(filepath.Join(old, "x"), filepath.Join(lock, "lock")))
	require.NoError(t, os.WriteFile(plain, nil, 0o600))
	for dir, want := range map[string]string{
		old: "move the file away", lock: "a link, which is not followed", plain: "give one that can be made",
		filepath.Join(plain, "x"): "not a directory",
	} {
		for range 2 {
			_, err := made(t, "--data-dir="+dir)
			require.ErrorContains(t, err, "data directory "+dir)
			require.ErrorContains(t, err, want)
		}
	}
	dir := filepath.Join(t.TempDir(), "made", "too")
	for _, wrong := range []string{"--topology-file=/nope", "--event-log=/nope/x"} {
		_, err := made(t, "--data-dir="+dir, wrong)
		require.Error(t, err)
		require.NotContains(t, err.Error(), "another")
	}
	st, err := os.Stat(dir)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), st.Mode().Perm())
	d, err := made(t, "--data-dir="+dir)
	require.NoError(t, err)
	_, err = made(t, "--data-dir="+dir)
	require.ErrorContains(t, err, "another dlrover-master uses it")
	d.close(0)
}

// failures is the metric of writes that have failed.
func failures(t *testing.T, at string) string {
	t.Helper()
	_, rest, found := strings.Cut(metricsOf(t, at), "\ndlrover_store_failures_total ")
	require.True(t, found)
	value, _, _ := strings.Cut(rest, "\n")
	return value
}

// While the directory is away the master serves, is not ready, and tells whoever asks that a mark is not kept. What it
// knows is written when the directory is back.
func TestADataDirectoryThatVanishes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	_, c, at, end := served(t, "--data-dir="+dir)
	status, body := ready(t, at)
	require.Equal(t, http.StatusOK, status, body)
	require.Equal(t, "0", failures(t, at))
	mark := func(node string) error {
		return c.Global(t.Context(), "nodes/"+node, marks.Change{Action: "mark", Reason: "smoke"}, nil)
	}
	require.NoError(t, mark("gpu-00"))
	require.NoError(t, os.Rename(dir, dir+"2"))
	require.ErrorContains(t, mark("gpu-01"), "the change counts, but is not kept yet, and ends with this daemon")
	require.Contains(t, listed(t, c).Troubles[0], "the newest changes are not kept yet")
	status, body = ready(t, at)
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.Contains(t, body, "no such file")
	require.Eventually(t, func() bool { return failures(t, at) != "0" }, 20*time.Second, 100*time.Millisecond)
	require.NoError(t, os.Rename(dir+"2", dir))
	require.NoError(t, mark("gpu-02"))
	require.Eventually(t, func() bool { status, _ := ready(t, at); return status == 200 }, 20*time.Second,
		100*time.Millisecond)
	end()
	_, c, _, end = served(t, "--data-dir="+dir)
	defer end()
	require.Equal(t, []string{"gpu-00", "gpu-01", "gpu-02"}, listed(t, c).Avoid)
	require.Empty(t, listed(t, c).Troubles)
}

// slow is a store whose writes are to be apart.
type slow struct{ lead.Decisions }

func (slow) Pause() time.Duration { return time.Second }

// A store whose failures are counted is as slow as it is.
func TestTrackedStoreIsSlow(t *testing.T) {
	var s lead.Decisions = &tracked{Decisions: slow{}}
	require.Equal(t, time.Second, s.(lead.Slow).Pause())
	s = &tracked{}
	require.Zero(t, s.(lead.Slow).Pause())
}
