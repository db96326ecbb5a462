package journal

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/app/leadtest"
	"dlrover-run/rendezvous/lead"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func TestStore(t *testing.T) {
	leadtest.Run(t, func(t *testing.T) leadtest.Suite {
		dir := t.TempDir()
		return leadtest.Suite{Open: func(t *testing.T) lead.Store {
			j, err := Open(dir, quiet())
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, j.Resign(t.Context())) })
			return j
		}}
	})
}

func leading(t *testing.T, dir string) (*Journal, lead.Term) {
	t.Helper()
	j, err := Open(dir, quiet())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, j.Resign(t.Context())) })
	term, err := j.TryCampaign()
	require.NoError(t, err)
	return j, term
}

func TestTryCampaign(t *testing.T) {
	dir := t.TempDir()
	a, first := leading(t, dir)
	b, err := Open(dir, quiet())
	require.NoError(t, err)
	_, err = b.TryCampaign()
	require.ErrorIs(t, err, ErrTaken)
	require.NoError(t, a.Append(t.Context(), first), "which makes the term durable")
	require.NoError(t, a.Resign(t.Context()))
	second, err := b.TryCampaign()
	require.NoError(t, err)
	require.Greater(t, second, first)
	require.NoError(t, b.Resign(t.Context()))
}

// What is written while the directory is away is refused, and so is the probe; nothing is lost when it is back, or was
// made anew.
func TestADirectoryThatVanishes(t *testing.T) {
	for name, back := range map[string]func(dir string) error{
		"moved back": func(dir string) error { return os.Rename(dir+"2", dir) },
		"made anew":  func(dir string) error { return os.Mkdir(dir, 0o700) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "data")
			j, term := leading(t, dir)
			require.NoError(t, j.Append(t.Context(), term, record("a", "1")))
			require.NoError(t, j.Probe())
			require.NoFileExists(t, filepath.Join(dir, probeFile))
			require.NoError(t, os.Rename(dir, dir+"2"))
			for range 2 {
				require.ErrorIs(t, j.Append(t.Context(), term, record("b", "2")), os.ErrNotExist)
			}
			j.probed = j.probed.Add(-probeEvery)
			require.ErrorIs(t, j.Probe(), os.ErrNotExist)
			require.NoError(t, back(dir))
			require.NoError(t, j.Append(t.Context(), term, record("c", "3")))
			require.NoError(t, j.Resign(t.Context()))
			j, term = leading(t, dir)
			all, err := j.Load(t.Context(), term)
			require.NoError(t, err)
			require.Equal(t, []lead.Record{record("a", "1"), record("c", "3")}, all)
		})
	}
}

// More records than fit into a frame, and segments that a crash has left.
func TestLargeJournals(t *testing.T) {
	dir := t.TempDir()
	j, term := leading(t, dir)
	const count = 2*recordsInFrame + 10
	for round := range 2 {
		for i := 0; i < count; i += lead.MaxRecords {
			var some []lead.Record
			for k := i; k < min(count, i+lead.MaxRecords); k++ {
				some = append(some, lead.Record{Key: fmt.Sprint(k), Value: make([]byte, 1500+round)})
			}
			require.NoError(t, j.Append(t.Context(), term, some...))
		}
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, segmentName(0)), nil, 0o600))
	require.NoError(t, j.Resign(t.Context()))
	j, term = leading(t, dir)
	all, err := j.Load(t.Context(), term)
	require.NoError(t, err)
	require.Len(t, all, count)
	segments, err := j.store.segments()
	require.NoError(t, err)
	require.Len(t, segments, 1)
	require.Greater(t, segments[0], segmentName(1), "it was written anew")
	j.store.kept = maxKept + 1
	err = j.Append(t.Context(), term, record("a", "1"))
	require.ErrorIs(t, err, lead.ErrFull)
	require.ErrorContains(t, err, "at most 268435456 are kept")
	require.NoError(t, j.Append(t.Context(), term, lead.Record{Key: "0"}, lead.Record{Key: "1"}), "that makes room")
	require.Less(t, j.store.kept, maxKept)
	require.NoError(t, j.Append(t.Context(), term, record("a", "1")))
}

// A file does not grow with the number of processes that have used it one after the other, each for a short time.
func TestManyShortProcesses(t *testing.T) {
	dir := t.TempDir()
	for range 30 {
		j, term := leading(t, dir)
		for range 4 {
			require.NoError(t, j.Append(t.Context(), term, lead.Record{Key: "a", Value: make([]byte, 60_000)}))
		}
		require.NoError(t, j.Resign(t.Context()))
	}
	j, _ := leading(t, dir)
	require.Less(t, j.store.seg.size, int64(2*segmentSize))
}
