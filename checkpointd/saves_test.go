package checkpointd

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/shm"
)

// lines keeps when which line was logged.
type lines struct {
	slog.Handler // nil: only these are called
	mu           sync.Mutex
	texts        []string
	times        []time.Time
}

func (l *lines) Enabled(context.Context, slog.Level) bool { return true }

func (l *lines) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.texts, l.times = append(l.texts, r.Message), append(l.times, r.Time)
	return nil
}

// logged returns a daemon that serves nothing, and its log.
func logged(t *testing.T) (*Daemon, *lines) {
	t.Helper()
	dir, err := shm.Create(t.TempDir(), "job")
	require.NoError(t, err)
	log := &lines{}
	d, err := New(Config{Dir: dir, Logger: slog.New(log)})
	require.NoError(t, err)
	t.Cleanup(d.Close)
	return d, log
}

// madeAt is a save of shard 0 of 2 in the given second.
func madeAt(second int64, id, epoch string, step int64, dir string) *save {
	m := shm.Meta{Save: id, Epoch: epoch, Dir: dir, Step: step, Shards: 2, WorldSize: 2, LocalWorldSize: 1}
	return newSave(nil, 1, time.Unix(second, 0), m)
}

func TestSavesThatAreOverAreForgotten(t *testing.T) {
	s := newSaves(newLifetime())
	for i := range maxRemembered + 40 {
		j := madeAt(int64(i), fmt.Sprint(i), "1.0.0", int64(i), "/ckpt")
		if i%2 == 0 {
			j.phase = committed
		}
		s.list = append(s.list, j)
	}
	s.trimLocked()
	require.Len(t, s.list, maxRemembered)
	require.Equal(t, "1", s.list[0].meta.Save, "what is under way stays, however old")
	require.Equal(t, "79", s.list[39].meta.Save)
	require.Equal(t, "80", s.list[40].meta.Save, "the newest of those that are over stay")
}
