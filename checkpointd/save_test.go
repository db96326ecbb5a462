package checkpointd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/replica"
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

func TestProgressIsLoggedEverMoreSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := &lines{}
		f := &flusher{log: slog.New(log), saves: newSaves(newLifetime())}
		j := madeAt(0, "s", "1.0.0", 1, "/ckpt")
		j.ctx = t.Context()
		begin := time.Now()
		stop := f.progress(j)
		time.Sleep(41 * time.Second)
		j.done.Add(1)
		time.Sleep(50 * time.Second)
		stop()
		var at []int
		for _, t := range log.times {
			at = append(at, int(t.Sub(begin).Seconds()))
		}
		require.Equal(t, []int{5, 10, 20, 40, 80, 85}, at, "every 5 s while something moves, else after twice as long")
	})
}

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

func TestPermanentErrors(t *testing.T) {
	for _, err := range []error{
		fs.ErrPermission, syscall.EROFS, syscall.EISDIR, syscall.ENAMETOOLONG, commit.ErrSuperseded, commit.ErrBegun,
	} {
		require.True(t, permanent(fmt.Errorf("write: %w", err)), "%v", err)
	}
	for _, err := range []error{syscall.ENOSPC, syscall.EDQUOT, syscall.EIO, syscall.ENODEV, syscall.ESTALE,
		fs.ErrNotExist} {
		require.False(t, permanent(fmt.Errorf("write: %w", err)), "%v", err)
	}
}

func TestTheTroubleOfADirectoryIsLoggedOnce(t *testing.T) {
	r := &retries{causes: map[string]string{}}
	a, b := madeAt(1, "a", "1.0.0", 1, "/a"), madeAt(1, "b", "1.0.0", 1, "/b")
	failed := func(path string, no syscall.Errno) error { return &fs.PathError{Op: "write", Path: path, Err: no} }
	require.True(t, r.isNew(a, failed("/a/0", syscall.EIO), "one"))
	require.False(t, r.isNew(a, failed("/a/1", syscall.EIO), "two"), "another file, the same trouble")
	require.True(t, r.isNew(b, failed("/b/0", syscall.EIO), "three"))
	require.True(t, r.isNew(a, failed("/a/1", syscall.ENOSPC), "four"))
	r.clear(a)
	require.Equal(t, "four", r.trouble(), "the other directory still has it")
	r.clear(b)
	require.Empty(t, r.trouble())
	require.True(t, r.isNew(a, failed("/a/1", syscall.ENOSPC), "five"), "it is back")
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

func TestMadeAfterThePlannedSave(t *testing.T) {
	held := func(id string, shard int, second int64) coordinator.Holding {
		return coordinator.Holding{Save: id, Shard: shard, Shards: 2, Saved: time.Unix(second, 0)}
	}
	plan := coordinator.Plan{Save: "plan", Step: 5}
	for name, tc := range map[string]struct {
		held         []coordinator.Holding
		second, step int64
		want         bool
	}{
		"by the same shard":         {[]coordinator.Holding{held("plan", 1, 20), held("plan", 0, 10)}, 11, 1, true},
		"before, by the same shard": {[]coordinator.Holding{held("plan", 1, 5), held("plan", 0, 10)}, 9, 9, false},
		"after the last of other shards": {[]coordinator.Holding{held("plan", 1, 10), held("other", 0, 30)}, 11, 1,
			true},
		"before the last of other shards":   {[]coordinator.Holding{held("plan", 1, 10)}, 9, 9, false},
		"nothing of it here, a later step":  {nil, 1, 6, true},
		"nothing of it here, an older step": {nil, 99, 5, false},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, tc.want, madeAfter(madeAt(tc.second, "this", "1.0.0", tc.step, "/ckpt"), plan, tc.held))
		})
	}
}

func TestWhereTheWritersOfASaveMeet(t *testing.T) {
	local, master := coordinator.Local(0), coordinator.Local(3)
	c := coordinators{local, master}
	here := shm.Meta{Shards: 2, WorldSize: 2, LocalWorldSize: 2}
	wide := shm.Meta{Shards: 2, WorldSize: 2, LocalWorldSize: 1}
	require.Same(t, local, c.forSave(here))
	require.Same(t, local, c.forSave(shm.Meta{Shards: 1, WorldSize: 2, LocalWorldSize: 1}))
	require.Same(t, master, c.forSave(wide))
	d, _ := logged(t)
	require.Equal(t, coordinator.Files(d.cfg.FS), d.coords.forSave(wide), "without a master")
}

func TestALoadIsLoggedOncePerEpoch(t *testing.T) {
	d, log := logged(t)
	r := request{Dir: "/ckpt", Step: 3, Source: "memory"}
	for range 3 {
		d.loaded(r)
	}
	require.Equal(t, []string{"checkpoint loaded"}, log.texts)
	r.Step = 4
	d.loaded(r)
	d.SetWorld(World{Term: 1, Epoch: 1, GroupWorldSize: 1})
	d.loaded(r)
	require.Len(t, log.texts, 3)
}

func TestAgesLeaveOutCopies(t *testing.T) {
	at := func(second int64) time.Time { return time.Unix(second, 0) }
	durable := map[int]SegmentStatus{0: {Rank: 0, Step: 4, Saved: at(4)}, 2: {Rank: 2, Step: 1, Saved: at(1)}}
	require.Equal(t, []coordinator.Age{
		{Rank: 0, MemoryStep: 7, MemoryAt: at(7), DurableStep: 4, DurableAt: at(4)},
		{Rank: 1, MemoryStep: 5, MemoryAt: at(5), DurableStep: 5, DurableAt: at(5)},
		{Rank: 2, MemoryStep: -1, DurableStep: 1, DurableAt: at(1)},
	}, agesOf(durable, []SegmentStatus{
		{Rank: 0, Step: 7, Saved: at(7)}, {Rank: 0, Step: 3, Saved: at(3), Durable: true},
		{Rank: 1, Step: 5, Saved: at(5), Durable: true}, {Rank: 1, Step: 9, Saved: at(9), Copy: true},
		{Rank: 3, Step: 9, Saved: at(9), Copy: true},
	}))
}

// Only whole saves can be loaded: they are fetched first, however new the others are.
func TestHoldersOfCompleteSavesAreFirst(t *testing.T) {
	copied := func(save string, shard int, second int64) coordinator.Copy {
		return coordinator.Copy{Rank: shard, Shard: shard, Save: save, Step: second, Dir: "/ckpt", SavedNS: second,
			Shards: 2}
	}
	p := &peers{known: []coordinator.Peer{
		{Node: 0, Copies: []coordinator.Copy{copied("new", 0, 30), copied("half", 0, 40)}},
		{Node: 1, Addr: "one", Copies: []coordinator.Copy{copied("half", 0, 40), copied("new", 1, 30),
			copied("old", 0, 10)}},
		{Node: 2, Addr: "two", Copies: []coordinator.Copy{copied("new", 0, 30), copied("old", 1, 10)}},
	}}
	saves := func(have ...restorable) (out []string) {
		for _, h := range p.holders(0, request{Rank: 0, Dir: "/ckpt"}, have) {
			out = append(out, h.addr+" "+h.copy.Save)
		}
		return out
	}
	require.Equal(t, []string{"two new", "one old", "one half"}, saves())
	require.Equal(t, []string{"one half"}, saves(restorable{Save: "new", Step: 30, SavedNS: 30}), "only what is newer")
	require.Empty(t, p.holders(0, request{Rank: 0, Dir: "/other"}, nil))
}

func TestANodeThatIsAwayIsTriedEverMoreSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &peers{pending: map[origin]pendingCopy{{0, "/ckpt"}: {"s", time.Now(), map[int]bool{}}},
			copied: map[origin]pendingCopy{}, unreachable: map[int]backoff{}, key: "1.0.0",
			partners: []replica.Peer{{Node: 1}, {Node: 2}}}
		away := errors.New("connection refused")
		var pauses []time.Duration
		for range 7 {
			task, _ := p.next(time.Now())
			require.Equal(t, 2, task.to[len(task.to)-1].Node, "who may keep us waiting comes last")
			_, is := p.recordResult(task, 2, away)
			require.True(t, is)
			p.recordResult(task, 1, away)
			delete(p.unreachable, 1)
			pauses = append(pauses, p.unreachable[2].pause)
			task, _ = p.next(time.Now())
			require.Equal(t, []replica.Peer{{Node: 1}}, task.to)
			time.Sleep(p.unreachable[2].pause)
		}
		ms := time.Millisecond
		require.Equal(t, []time.Duration{250 * ms, 500 * ms, 1000 * ms, 2000 * ms, 4000 * ms, 8000 * ms, 8000 * ms},
			pauses)
		task, _ := p.next(time.Now())
		was, is := p.recordResult(task, 2, fmt.Errorf("%w: no memory", replica.ErrRefused))
		require.True(t, was)
		require.False(t, is, "it answers, even though it does not want the copy")
		p.recordResult(task, 1, nil)
		task, due := p.next(time.Now())
		require.Empty(t, task.to)
		require.Zero(t, due)
		require.Empty(t, p.pending)
	})
}
