package checkpointd_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/checkpointd"
	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/fsx"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/checkpointd/shm/shmtest"
	"dlrover-run/internal/testkit"
)

// busy writes a save into a segment that is locked as its writer does, until release is called. The daemon is started
// again: else it might look at the segment before the lock is there.
func (n *node) busy(s shmtest.Save, name string) (release func()) {
	n.t.Helper()
	n.stop()
	s.Write(n.t, n.dir, name)
	f, err := os.OpenFile(n.dir.Path()+"/"+name, os.O_RDWR, 0)
	require.NoError(n.t, err)
	release = sync.OnceFunc(func() { f.Close() })
	n.t.Cleanup(release)
	require.NoError(n.t, unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}))
	n.start()
	return release
}

// A worker publishes its shard and loses the CPU before it unlocks, while another's word makes the daemon look.
func TestABusySegmentIsLookedAtAgain(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	release := n.busy(shard(dir, 7, 1, 2, 2), "seg/l1-0.seg")
	n.put(shard(dir, 7, 0, 2, 2), "seg/l0-0.seg")
	require.Eventually(t, func() bool { return len(n.preparedRecords()) == 1 }, patience, time.Millisecond,
		"shard 0 is written")
	res := n.ask(map[string]any{"op": "wait", "dir": dir, "step": 7, "timeout_ms": 50})
	require.Contains(t, res["error"], "not committed within")
	release()
	require.Equal(t, true, n.wait(dir, 7)["ok"])
	requireStep(t, dir, 7, 2)
}

// A writer that has begun the next save is another matter.
func TestABusySegmentWithANewerSaveIsSuperseded(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	release := n.busy(single(dir, 7), "seg/l0-0.seg")
	n.ask(map[string]any{"op": "saved", "seg": "seg/l0-0.seg"})
	require.Eventually(t, func() bool {
		st, err := n.control().Status(t.Context())
		require.NoError(t, err)
		return len(st.Saves) == 1
	}, patience, time.Millisecond)
	f, err := os.OpenFile(n.dir.Path()+"/seg/l0-0.seg", os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	_, err = f.WriteAt([]byte{1, 0, 0, 0, 0, 0, 0, 0, 2}, 16) // state and seq
	require.NoError(t, err)
	require.Contains(t, n.wait(dir, 7)["error"], "overwritten by a newer save")
	release()
}

// lines is a log.
type lines struct{ testkit.Buffer }

// with returns the lines that contain text.
func (l *lines) with(text string) (out []string) {
	for line := range strings.Lines(l.String()) {
		if strings.Contains(line, text) {
			out = append(out, line)
		}
	}
	return out
}

func (l *lines) config(c *checkpointd.Config) { c.Logger = slog.New(slog.NewTextHandler(l, nil)) }

// logged is a node with a recorded log, and with storage that fails.
func logged(t *testing.T, fail error) (*node, *faulty, *lines) {
	log, disk := new(lines), &faulty{FS: fsx.OS{}, err: fail, hit: make(chan struct{}, 1)}
	return newNode(t, withFS(disk), log.config), disk, log
}

// A breakpoint tries an aborted save once more, and then it stays aborted: one line, with the first reason, and no
// wait.
func TestAbortedSave(t *testing.T) {
	t.Parallel()
	n, _, log := logged(t, syscall.EACCES)
	dir := t.TempDir()
	for r := range 3 {
		n.put(shard(dir, 7, r, 3, 3), fmt.Sprintf("seg/l%d-0.seg", r))
	}
	require.Contains(t, n.wait(dir, 7)["error"], "permission denied")
	c := n.control()
	for range 3 {
		require.NoError(t, c.Breakpoint(t.Context(), checkpointd.World{}, "test", checkpointd.AtOnce))
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		left, err := c.End(ctx, time.Hour)
		cancel()
		require.NoError(t, err)
		require.Equal(t, 3, left)
	}
	require.Len(t, log.with("level=ERROR"), 1)
	require.Equal(t, 1, strings.Count(log.with("level=ERROR")[0], "permission denied"))
	require.Len(t, log.with("saving what is in memory"), 1)
	for r := range 3 {
		require.LessOrEqual(t, strings.Count(n.ask(map[string]any{"op": "wait", "dir": dir, "step": 7,
			"timeout_ms": 1000})["error"].(string), "shard"), 1, "shard %d", r)
	}
}

// The second attempt writes the shards that are still there, of all shards.
func TestAbortedSaveIsTriedOnceMore(t *testing.T) {
	n, disk, _ := logged(t, syscall.EACCES)
	dir := t.TempDir()
	for r := range 3 {
		n.put(shard(dir, 7, r, 3, 3), fmt.Sprintf("seg/l%d-0.seg", r))
	}
	require.Equal(t, false, n.wait(dir, 7)["ok"])
	n.ask(map[string]any{"op": "drain", "timeout_ms": patience.Milliseconds()})
	disk.fail(nil)
	c := n.control()
	require.NoError(t, c.Breakpoint(t.Context(), checkpointd.World{}, "test", checkpointd.AtOnce))
	left, err := c.End(t.Context(), patience)
	require.NoError(t, err)
	require.Zero(t, left)
	requireStep(t, dir, 7, 3)
	requireNoLeftovers(t, dir)
}

// A partial save of an earlier run does not delay the end of this one.
func TestPartialSaveOfAnEarlierRunIsOver(t *testing.T) {
	n, dir := prepared(t)
	for r := range 2 {
		inMemory(shard(dir, 2, r, 2, 2)).Write(t, n.dir, fmt.Sprintf("seg/l%d-0.seg", r))
	}
	n.start()
	c := n.control()
	require.NoError(t, c.World(t.Context(), checkpointd.World{Term: 1, Round: 1, GroupWorldSize: 1, WorldSize: 2,
		LocalWorldSize: 2}))
	left, err := c.End(t.Context(), patience)
	require.NoError(t, err)
	require.Zero(t, left)
	requireNoLeftovers(t, dir)
	require.Empty(t, n.preparedRecords())
}

// Nor does a save of the running workers, if one of its shards was saved over.
func TestSaveWithoutItsOtherShardIsOver(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	s := shard(dir, 1, 0, 2, 2)
	s.Meta.Order = 1
	n.put(s, "seg/l0-0.seg")
	require.Eventually(t, func() bool { return len(n.preparedRecords()) == 1 }, patience, time.Millisecond)
	next := inMemory(shard(dir, 2, 1, 2, 2))
	next.Meta.Order = 2
	n.put(next, "seg/l1-0.seg")
	require.Contains(t, n.wait(dir, 1)["error"], "has saved over it")
	left, err := n.control().End(t.Context(), patience)
	require.NoError(t, err)
	require.Zero(t, left)
	requireNoLeftovers(t, dir)
}

// A breakpoint save that was interrupted between two shards continues.
func TestAnInterruptedBreakpointSaveGoesOn(t *testing.T) {
	n, dir := prepared(t)
	inMemory(shard(dir, 1, 1, 2, 2)).Write(t, n.dir, "seg/l1-0.seg")
	n.start()
	n.requireCommitted(dir)
}

// The save in memory is the latest, regardless of its step: a save in flight is not dropped for a lower step.
func TestABreakpointGoesByTime(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	for _, step := range []int64{10, 5} {
		n.put(single(dir, step), fmt.Sprintf("seg/l0-%d.seg", step))
		require.Equal(t, true, n.wait(dir, step)["ok"])
	}
	n.put(inMemory(single(dir, 3)), "seg/l0-3.seg")
	c := n.control()
	require.NoError(t, c.Breakpoint(t.Context(), checkpointd.World{}, "test", checkpointd.AtOnce))
	left, err := c.End(t.Context(), patience)
	require.NoError(t, err)
	require.Zero(t, left)
	requireStep(t, dir, 3, 1)
}

func TestASaveUnderWayIsNotDroppedForALaterLowerStep(t *testing.T) {
	t.Parallel()
	n, disk, _ := logged(t, syscall.EIO)
	dir := t.TempDir()
	n.put(single(dir, 10), "seg/l0-0.seg")
	<-disk.hit
	n.put(inMemory(single(dir, 3)), "seg/l0-1.seg")
	c := n.control()
	require.NoError(t, c.Breakpoint(t.Context(), checkpointd.World{}, "test", checkpointd.AtOnce))
	require.Eventually(t, func() bool {
		st, err := c.Status(t.Context())
		require.NoError(t, err)
		return len(st.Saves) == 2
	}, patience, time.Millisecond)
	require.EqualValues(t, 2, n.ask(map[string]any{"op": "drain", "timeout_ms": 50})["left"])
	disk.failBelow(dir+"/3/", syscall.EIO) // or it might come first, and the other one would have been overtaken
	require.Equal(t, true, n.wait(dir, 10)["ok"])
	disk.fail(nil)
	require.Equal(t, true, n.wait(dir, 3)["ok"])
	left, err := c.End(t.Context(), patience)
	require.NoError(t, err)
	require.Zero(t, left)
	requireStep(t, dir, 3, 1)
	require.FileExists(t, dir+"/10/rank_0.pt")
}

// Saves that are written at the same time leave the trackers at the latest, in any order of their commits.
func TestSavesAtTheSameTimeKeepTheirOrder(t *testing.T) {
	t.Parallel()
	n, dir := newNode(t), t.TempDir()
	begin := time.Now()
	steps := []int64{10, 9, 8, 7, 6, 5, 4, 3}
	for round := range int64(5) {
		for i, step := range steps {
			s := single(dir, 10*round+step)
			s.Saved = begin.Add(time.Duration(10*int(round)+i) * time.Microsecond)
			s.Write(t, n.dir, fmt.Sprintf("seg/l0-%d.seg", 10*round+int64(i)))
		}
		n.ask(map[string]any{"op": "saved"})
		n.ask(map[string]any{"op": "drain", "timeout_ms": patience.Milliseconds()})
		requireStep(t, dir, 10*round+3, 1)
	}
	store := commit.Store{FS: fsx.OS{}, Now: time.Now}
	ms, err := store.Manifests(dir)
	require.NoError(t, err)
	require.Len(t, ms, 40)
	require.True(t, slices.IsSortedFunc(ms, func(a, b commit.Manifest) int { return b.Saved.Compare(a.Saved) }),
		"the newest first")
}

// patient storage knows how long it has waited for the content of a file whose checksums are all there.
type patient struct {
	fsx.FS
	waited chan time.Duration
}

func (f *patient) WriteFrom(ctx context.Context, path string, src fsx.Source) error {
	begin := time.Now()
	if err := src.Ready(ctx, src.Len()); err != nil {
		return err
	}
	f.waited <- time.Since(begin)
	return f.FS.WriteFrom(ctx, path, src)
}

// A save on its way to the disk lets a worker copy first, but not for ever: that one is stopped in the middle.
func TestAFlushWaitsForACopy(t *testing.T) {
	disk := &patient{fsx.OS{}, make(chan time.Duration, 1)}
	n, dir := newNode(t, withFS(disk)), t.TempDir()
	n.busy(single(dir, 7), "seg/l0-0.seg")
	f, err := os.OpenFile(n.dir.Path()+"/seg/l0-0.seg", os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	_, err = f.WriteAt([]byte{byte(shm.Writing)}, 16)
	require.NoError(t, err)
	n.put(single(dir, 10), "seg/l1-0.seg")
	require.Equal(t, true, n.wait(dir, 10)["ok"])
	require.GreaterOrEqual(t, <-disk.waited, 900*time.Millisecond)
}
