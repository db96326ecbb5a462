package checkpointd_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd"
	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/fsx"
)

// picky fails to write the files of one step.
type picky struct {
	fsx.FS
	step string
	err  error
	hit  chan struct{}
}

func (f *picky) WriteFrom(ctx context.Context, path string, src fsx.Source) error {
	if strings.Contains(path, "/"+f.step+"/") {
		select {
		case f.hit <- struct{}{}:
		default:
		}
		return fmt.Errorf("write %s: %w", path, f.err)
	}
	return f.FS.WriteFrom(ctx, path, src)
}

// A save that cannot be written is dropped when a later one is committed, regardless of step numbers, and the end of
// the job does not wait for it.
func TestOvertakenSaveIsDropped(t *testing.T) {
	for later, step := range map[string]int64{"a later step": 20, "back to an earlier step": 5} {
		t.Run(later, func(t *testing.T) {
			var log lines
			disk := &picky{FS: fsx.OS{}, step: "10", err: syscall.ENOSPC, hit: make(chan struct{}, 1)}
			n, dir := newNode(t, withFS(disk), log.config), t.TempDir()
			n.put(single(dir, 10), "seg/l0-0.seg")
			<-disk.hit
			next := single(dir, step)
			next.Saved = time.Now().Add(time.Minute) // however busy the machine is
			n.put(next, "seg/l0-1.seg")
			require.Equal(t, true, n.wait(dir, step)["ok"])
			left, err := n.control().End(t.Context(), patience)
			require.NoError(t, err)
			require.Zero(t, left)
			requireStep(t, dir, step, 1)
			require.Contains(t, n.wait(dir, 10)["error"], fmt.Sprintf("a later save is committed: step %d", step))
			lines := strings.Split(log.String(), "\n")
			dropped := 0
			for _, line := range lines {
				if strings.Contains(line, "step=10") && strings.Contains(line, fmt.Sprintf("step %d;", step)) {
					dropped++
				}
			}
			require.Equal(t, 1, dropped, log.String())
		})
	}
}

// The next daemon finds the save in memory, and the later one on disk.
func TestOvertakenSaveOfAnEarlierDaemon(t *testing.T) {
	disk := &picky{FS: fsx.OS{}, step: "10", err: syscall.ENOSPC, hit: make(chan struct{}, 1)}
	n, dir := newNode(t, withFS(disk)), t.TempDir()
	next := single(dir, 20)
	next.Saved = time.Now().Add(time.Minute) // however busy the machine is
	n.put(next, "seg/l0-1.seg")
	require.Equal(t, true, n.wait(dir, 20)["ok"])
	n.stop()
	single(dir, 10).Write(t, n.dir, "seg/l0-0.seg")
	n.start()
	<-disk.hit
	require.Contains(t, n.wait(dir, 10)["error"], "a later save is committed: step 20")
}

// A full disk, and an earlier commit: space may be freed, so it is tried again.
func TestFullDiskIsTriedAgain(t *testing.T) {
	t.Parallel()
	disk := &faulty{FS: fsx.OS{}, hit: make(chan struct{}, 1)}
	n, dir := newNode(t, withFS(disk)), t.TempDir()
	n.put(single(dir, 10), "seg/l0-0.seg")
	require.Equal(t, true, n.wait(dir, 10)["ok"])
	disk.fail(syscall.ENOSPC)
	n.put(single(dir, 20), "seg/l0-1.seg")
	<-disk.hit
	disk.fail(nil)
	require.Equal(t, true, n.wait(dir, 20)["ok"])
	requireStep(t, dir, 20, 1)
}

// Errors that waiting does not repair are final at once.
func TestFinalErrors(t *testing.T) {
	for _, final := range []syscall.Errno{
		syscall.EISDIR, syscall.ENOTDIR, syscall.EINVAL, syscall.ENAMETOOLONG, syscall.EROFS, syscall.ELOOP, syscall.EACCES,
		syscall.EPERM, syscall.EFBIG,
	} {
		t.Run(final.Error(), func(t *testing.T) {
			t.Parallel()
			disk := &faulty{FS: fsx.OS{}, err: final, hit: make(chan struct{}, 1)}
			n, dir := newNode(t, withFS(disk)), t.TempDir()
			n.put(single(dir, 10), "seg/l0-0.seg")
			require.Contains(t, n.wait(dir, 10)["error"], final.Error())
			st, err := n.control().Status(t.Context())
			require.NoError(t, err)
			require.Zero(t, st.Counters.Retries)
			require.Empty(t, st.Saves)
		})
	}
}

// A directory where a file is to be.
func TestPathOfADirectory(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "10/rank_0.pt"), 0o755))
	n.put(single(dir, 10), "seg/l0-0.seg")
	require.Contains(t, n.wait(dir, 10)["error"], "is a directory")
	n.put(single(dir, 20), "seg/l0-1.seg")
	require.Equal(t, true, n.wait(dir, 20)["ok"])
	requireStep(t, dir, 20, 1)
	requireNoLeftovers(t, dir)
}

// deleting removes the directory once, between the writing of a save and its commit.
type deleting struct {
	fsx.FS
	dir  string
	once sync.Once
}

func (f *deleting) WriteFile(path string, data []byte) error {
	if filepath.Base(path) == "intent" {
		f.once.Do(func() { _ = os.RemoveAll(f.dir) })
	}
	return f.FS.WriteFile(path, data)
}

// A directory that is deleted under a save that is written and not committed: memory still has it.
func TestDirectoryDeletedUnderASave(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ckpts")
	n := newNode(t, withFS(&deleting{FS: fsx.OS{}, dir: dir}))
	n.put(single(dir, 10), "seg/l0-0.seg")
	require.Equal(t, true, n.wait(dir, 10)["ok"])
	requireStep(t, dir, 10, 1)
	requireNoLeftovers(t, dir)
}

// stageless is storage on which others end a save while it is written.
type stageless struct{ fsx.FS }

func (f stageless) WriteFrom(ctx context.Context, path string, src fsx.Source) error {
	err := f.FS.WriteFrom(ctx, path, src)
	stages, _ := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(path)), ".dlrover/stage/*"))
	for _, stage := range stages {
		_ = os.RemoveAll(stage)
	}
	return err
}

func TestASaveThatOthersHaveEndedLeavesNoFile(t *testing.T) {
	t.Parallel()
	n, dir := newNode(t, withFS(stageless{fsx.OS{}})), t.TempDir()
	n.put(short(dir, 7), "seg/l0-0.seg")
	require.Equal(t, false, n.wait(dir, 7)["ok"])
	n.ask(map[string]any{"op": "drain", "timeout_ms": patience.Milliseconds()})
	left, err := filepath.Glob(filepath.Join(dir, "7/.*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// A save of workers that have ended comes after one of their successors, whose epoch is of another term: the master was
// started again. The tracker stays.
func TestASaveThatIsOvertakenInALaterTerm(t *testing.T) {
	dir := t.TempDir()
	disk := &hanging{FS: fsx.OS{}, dir: filepath.Join(dir, "10") + "/", hit: make(chan struct{}, 1),
		free: make(chan struct{})}
	n := newNode(t, withFS(disk))
	begin := func(w checkpointd.World) (epoch string) {
		w.GroupWorldSize, w.WorldSize, w.LocalWorldSize = 1, 1, 1
		require.NoError(t, n.control().World(t.Context(), w))
		return w.Key()
	}
	older, newer := single(dir, 10), single(dir, 15)
	older.Meta.Epoch = begin(checkpointd.World{Term: 7, Round: 11, Epoch: 1})
	older.Saved = time.Now()
	n.put(older, "seg/l0-0.seg")
	<-disk.hit
	newer.Meta.Epoch = begin(checkpointd.World{Term: 9, Round: 11, Epoch: 2})
	newer.Saved = older.Saved.Add(time.Millisecond)
	n.put(newer, "seg/l0-1.seg")
	require.Equal(t, true, n.wait(dir, 15)["ok"])
	close(disk.free)
	require.Eventually(t, func() bool {
		_, err := os.Stat(filepath.Join(commit.MetaDir(dir), "10.json"))
		return err == nil
	}, patience, time.Millisecond)
	n.stop()
	requireStep(t, dir, 15, 1)
}
