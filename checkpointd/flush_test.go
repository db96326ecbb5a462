package checkpointd

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/commit"
)

func TestProgressIsLoggedEverMoreSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := &lines{}
		f := &flusher{log: slog.New(log), saves: newSaves(newLifetime())}
		j := madeAt(0, "s", "1.0.0", 1, "/ckpt")
		j.ctx = t.Context()
		other := madeAt(0, "s", "1.0.0", 1, "/ckpt")
		other.meta.Shard, other.ctx = j.meta.Shard+1, t.Context()
		require.Nil(t, f.saves.add(j))
		require.Nil(t, f.saves.add(other))
		begin := time.Now()
		stop := f.progress(j)
		defer f.progress(other)()
		time.Sleep(41 * time.Second)
		j.done.Add(1)
		time.Sleep(50 * time.Second)
		stop()
		var at []int
		for _, t := range log.times {
			at = append(at, int(t.Sub(begin).Seconds()))
		}
		require.Equal(t, []int{5, 10, 20, 40, 80, 85}, at,
			"every 5 s while something moves, else after twice as long, one line for both shards")
	})
}

// A save that other daemons have committed, or gone past, stops waiting for the other shards.
func TestStorageEndsAWait(t *testing.T) {
	for name, tc := range map[string]struct {
		id, epoch string
		want      error
	}{
		"committed elsewhere": {"this", "1.0.0", errElsewhere},
		"passed":              {"other", "1.0.1", errOutdated},
		"not yet":             {"other", "1.0.0", nil},
	} {
		t.Run(name, func(t *testing.T) {
			d, _ := logged(t)
			dir := t.TempDir()
			manifestOf(t, dir, commit.Manifest{Save: commit.Save{ID: tc.id, Epoch: tc.epoch, Step: 5,
				Saved: time.Unix(11, 0)}}, true)
			j := madeAt(10, "this", "1.0.0", 5, dir)
			j.ctx, j.quit = context.WithCancelCause(t.Context())
			j.waits, j.stopWaiting = context.WithCancelCause(j.ctx)
			defer j.quit(nil)
			d.flusher.checkStorage(j)
			require.Equal(t, tc.want, context.Cause(j.waits))
			require.False(t, j.stuck)
			j.begun = j.begun.Add(-2 * agreePatience)
			d.flusher.checkStorage(j)
			require.True(t, j.stuck, "nobody who loads waits for it any more")
		})
	}
}
