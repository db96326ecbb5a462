package report

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// written writes reports of a job, each so many days before another moment.
func written(t *testing.T, dir, job string, now time.Time, days ...float64) (paths []string) {
	t.Helper()
	for _, d := range days {
		c := stuck()
		c.Job, c.At = job, now.Add(-time.Duration(d*24*float64(time.Hour)))
		path, err := Write(dir, c)
		require.NoError(t, err)
		paths = append(paths, path)
	}
	return paths
}

// numbered is from, from+1 and so on.
func numbered(from float64, n int) (out []float64) {
	for i := range n {
		out = append(out, from+float64(i))
	}
	return out
}

func requireLeft(t *testing.T, dir string, want ...[]string) {
	t.Helper()
	all := slices.Concat(want...)
	left, err := filepath.Glob(filepath.Join(dir, "hang-*"))
	require.NoError(t, err)
	require.ElementsMatch(t, all, left)
}

func TestOldReportsAreRemoved(t *testing.T) {
	dir, now := t.TempDir(), time.Unix(1790000000, 0)
	others := written(t, dir, "b-1", now, 0.5, 29.9, 30.1)
	mine := written(t, dir, "a", now, numbered(0, keepOfJob+3)...)
	newest := written(t, dir, "a", now, 100) // its clock is wrong
	require.NoError(t, Prune(newest[0], now))
	requireLeft(t, dir, mine[:keepOfJob], newest, others[:2])
	require.NoError(t, Prune(newest[0], now))
	requireLeft(t, dir, mine[:keepOfJob], newest, others[:2])
}

func TestReportsOfManyJobsAreBounded(t *testing.T) {
	dir, now := t.TempDir(), time.Unix(1790000000, 0)
	var all []string
	for i := range keepAll + 5 {
		all = append(all, written(t, dir, fmt.Sprint("job-", i), now, float64(i)/10)...)
	}
	require.NoError(t, Prune(all[0], now))
	requireLeft(t, dir, all[:keepAll])
}

// What is not a report of this user, or has something of somebody's in it, is not touched, nor what links point at.
func TestOnlyReportsAreRemoved(t *testing.T) {
	dir, now := t.TempDir(), time.Unix(1790000000, 0)
	elsewhere := written(t, t.TempDir(), "a", now, 90)[0]
	in := func(name string) string { return filepath.Join(dir, name) }
	require.NoError(t, os.Symlink(elsewhere, in("hang-link-1-1.2.3")))
	require.NoError(t, os.WriteFile(in("hang-file-1-1.2.3"), nil, 0o600))
	require.NoError(t, os.Mkdir(in("hang-name-1.2.3"), 0o700))
	require.NoError(t, os.Mkdir(in("hang-notes"), 0o700))
	noted := written(t, dir, "noted", now, 90)[0]
	require.NoError(t, os.WriteFile(filepath.Join(noted, "notes.txt"), []byte("mine"), 0o600))
	linked := written(t, dir, "linked", now, 90)[0]
	require.NoError(t, os.Remove(filepath.Join(linked, traceFile)))
	require.NoError(t, os.Symlink(filepath.Join(elsewhere, traceFile), filepath.Join(linked, traceFile)))
	if os.Geteuid() == 0 {
		require.NoError(t, os.Chown(written(t, dir, "other", now, 90)[0], 12345, -1))
	}
	newest := written(t, dir, "a", now, 0)[0]
	before := names(t, dir)

	require.NoError(t, Prune(newest, now))
	require.Equal(t, before, names(t, dir))
	require.Len(t, names(t, elsewhere), 7)
	require.Len(t, names(t, noted), 8)
	require.Len(t, names(t, linked), 7)
}

// What a launcher has left that was killed while it wrote goes, too, but not what another one may be writing.
func TestUnfinishedReportsAreRemoved(t *testing.T) {
	dir := t.TempDir()
	stale, fresh := filepath.Join(dir, ".hang-a-5-1.2.3.77"), filepath.Join(dir, ".hang-a-6-1.2.3.78")
	for _, d := range []string{stale, fresh} {
		require.NoError(t, os.Mkdir(d, 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(d, "."+JSONFile+".77"), []byte("{"), 0o600))
	}
	past := time.Now().Add(-2 * unfinished)
	require.NoError(t, os.Chtimes(stale, past, past))
	newest := written(t, dir, "a", time.Now(), 0)[0]
	require.NoError(t, Prune(newest, time.Now()))
	require.Equal(t, []string{filepath.Base(fresh), filepath.Base(newest), Latest}, names(t, dir))
}
