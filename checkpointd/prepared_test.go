package checkpointd_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/fsx"
	"dlrover-run/checkpointd/shm"
)

func (n *node) preparedRecords() (names []string) {
	entries, err := os.ReadDir(filepath.Join(n.dir.Path(), "prepared"))
	if err != nil {
		require.ErrorIs(n.t, err, fs.ErrNotExist)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// prepared puts shard 0 of 2 of step 1, and ends the daemon when that shard is durable.
func prepared(t *testing.T) (n *node, dir string) {
	t.Helper()
	n, dir = newNode(t), t.TempDir()
	n.put(shard(dir, 1, 0, 2, 2), "seg/l0-0.seg")
	require.Eventually(t, func() bool { return len(n.preparedRecords()) == 1 }, patience, 5*time.Millisecond)
	n.stop()
	require.Len(t, n.preparedRecords(), 1)
	return n, dir
}

func (n *node) requireCommitted(dir string) {
	n.t.Helper()
	require.Equal(n.t, true, n.wait(dir, 1)["ok"])
	requireStep(n.t, dir, 1, 2)
	requireNoLeftovers(n.t, dir)
	require.Eventually(n.t, func() bool { return len(n.preparedRecords()) == 0 }, patience, 5*time.Millisecond)
}

func TestPreparedShardOutlivesDaemonAndSegment(t *testing.T) {
	n, dir := prepared(t)
	inMemory(shard(dir, 2, 0, 2, 2)).Write(t, n.dir, "seg/l0-0.seg") // the worker saves over it
	n.start()
	n.put(shard(dir, 1, 1, 2, 2), "seg/l1-0.seg")
	n.requireCommitted(dir)
}

func TestPreparedShardIsWrittenOnce(t *testing.T) {
	n, dir := prepared(t)
	n.start()
	n.put(shard(dir, 1, 1, 2, 2), "seg/l1-0.seg")
	n.requireCommitted(dir)
	st, err := n.control().Status(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 1, st.Counters.Flushes, "shard 0 was durable")
}

// clean removes the temporary files.
func clean(t *testing.T, dir string) {
	require.NoError(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() && strings.Contains(path, ".tmp") {
			err = os.Remove(path)
		}
		return err
	}))
}

func TestPreparedFilesThatAreGoneAreWrittenAgain(t *testing.T) {
	n, dir := prepared(t)
	clean(t, dir)
	n.start()
	n.put(shard(dir, 1, 1, 2, 2), "seg/l1-0.seg")
	n.requireCommitted(dir)
}

func TestPreparedFilesThatAreGoneForGood(t *testing.T) {
	n, dir := prepared(t)
	clean(t, dir)
	inMemory(shard(dir, 2, 0, 2, 2)).Write(t, n.dir, "seg/l0-0.seg")
	n.start()
	n.put(shard(dir, 1, 1, 2, 2), "seg/l1-0.seg")
	res := n.wait(dir, 1)
	require.Contains(t, res["error"], "no such file", res)
	require.Eventually(t, func() bool { return len(n.preparedRecords()) == 0 }, patience, 5*time.Millisecond)
	requireNoLeftovers(t, dir)
}

func TestDamagedPreparedRecordIsDropped(t *testing.T) {
	n, dir := prepared(t)
	require.NoError(t, os.WriteFile(filepath.Join(n.dir.Path(), "prepared", n.preparedRecords()[0]), []byte("{"),
		0o600))
	n.start()
	n.put(shard(dir, 1, 1, 2, 2), "seg/l1-0.seg")
	n.requireCommitted(dir)
}

// bothPrepared leaves the records of both shards of step 1, whose segments hold step 2.
func bothPrepared(t *testing.T) (n *node, dir string) {
	n, dir = prepared(t)
	record := filepath.Join(n.dir.Path(), "prepared", n.preparedRecords()[0])
	text, err := os.ReadFile(record)
	require.NoError(t, err)
	require.NoError(t, os.Remove(record))
	require.NoError(t, os.Remove(filepath.Join(n.dir.Path(), "seg/l0-0.seg")))
	n.start()
	n.put(shard(dir, 1, 1, 2, 2), "seg/l1-0.seg")
	require.Eventually(t, func() bool { return len(n.preparedRecords()) == 1 }, patience, 5*time.Millisecond)
	n.stop()
	require.NoError(t, os.WriteFile(record, text, 0o600))
	for r := range 2 {
		s := inMemory(shard(dir, 2, r, 2, 2))
		s.Seq = 2
		s.Write(t, n.dir, fmt.Sprintf("seg/l%d-0.seg", r))
	}
	return n, dir
}

// elsewhere commits a step of a later epoch from another node.
func elsewhere(t *testing.T, dir string, step int64) string {
	n, s := newNode(t), single(dir, step)
	s.Meta.Epoch, s.Saved, s.Meta.Save = "9.1.0", time.Now(), fmt.Sprintf("%016x", 0xabc000+step)
	s.Meta.Retention = &commit.Retention{KeepLatest: 1}
	n.put(s, "seg/l0-0.seg")
	require.Equal(t, true, n.wait(dir, step)["ok"])
	n.stop()
	return s.Meta.Save
}

func TestPreparedSaveThatWasOvertaken(t *testing.T) {
	t.Parallel()
	for _, step := range []int64{1, 5000} {
		t.Run(fmt.Sprint("by step ", step), func(t *testing.T) {
			n, dir := bothPrepared(t)
			id := elsewhere(t, dir, step)
			n.start()
			require.Eventually(t, func() bool { return len(n.preparedRecords()) == 0 }, patience, 5*time.Millisecond)
			store := commit.Store{FS: fsx.OS{}, Now: time.Now}
			m, _, err := store.Newest(t.Context(), dir, nil)
			require.NoError(t, err)
			require.Equal(t, id, m.ID)
			tracked, _ := store.Tracked(dir)
			require.Equal(t, step, tracked)
			requireNoLeftovers(t, dir)
		})
	}
}

func TestPreparedSaveOnStorageThatComesLate(t *testing.T) {
	t.Parallel()
	n, dir := bothPrepared(t)
	require.NoError(t, os.Rename(dir, dir+".away"))
	n.start()
	require.Eventually(t, func() bool {
		return n.ask(map[string]any{"op": "saved", "seg": "seg/l0-0.seg"})["note"] != ""
	}, patience, 5*time.Millisecond)
	_ = os.RemoveAll(dir)
	require.NoError(t, os.Rename(dir+".away", dir))
	n.requireCommitted(dir)
}

func TestHalfWrittenPreparedRecordIsRemoved(t *testing.T) {
	n, dir := prepared(t)
	record := filepath.Join(n.dir.Path(), "prepared", n.preparedRecords()[0])
	require.NoError(t, os.Rename(record, record+".new"))
	n.start()
	n.put(shard(dir, 1, 1, 2, 2), "seg/l1-0.seg")
	n.requireCommitted(dir)
}

// The leader and all nodes that could answer have died after the intent: the save can be completed from storage alone.
func TestPreparedSaveWithAnIntent(t *testing.T) {
	n, dir := nodes(t, 2)[0], t.TempDir()
	s := shard(dir, 1, 0, 2, 1)
	n.put(s, "seg/l0-0.seg")
	require.Eventually(t, func() bool { return len(n.preparedRecords()) == 1 }, patience, 5*time.Millisecond)
	n.stop()
	store := commit.Store{FS: fsx.OS{}, Now: time.Now}
	save := commit.Save{ID: s.Meta.Save, Epoch: s.Meta.Epoch, Dir: dir, Framework: "ddp", Layout: "00", Step: 1,
		Shards: 2, WorldSize: 2, Saved: time.Now()}
	var entries []commit.Entry
	for r := range 2 {
		path := fmt.Sprintf("1/rank_%d.pt", r)
		tmps, err := store.Plan(save, r, []string{path})
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(tmps[0], content(1, r), 0o600))
		crc, size, err := fsx.OS{}.Checksum(t.Context(), tmps[0])
		require.NoError(t, err)
		e := commit.Entry{Shard: r, Files: []commit.FileEntry{{Path: path, Size: size, CRC: crc, Shard: r}}}
		require.NoError(t, store.Prepared(save, e))
		entries = append(entries, e)
	}
	require.NoError(t, store.Intent(save, entries))
	n.cfg.Remote = nodes(t, 1)[0].cfg.Remote // a new master, without memory
	n.start()
	n.ask(map[string]any{"op": "offers", "rank": 0, "dir": dir, "timeout_ms": 1})
	n.requireCommitted(dir)
}

// whenFree returns the header of a segment as its worker finds it: at the first moment when it can have the lock.
func (n *node) whenFree(name string) <-chan shm.Header {
	n.t.Helper()
	f, err := os.OpenFile(filepath.Join(n.dir.Path(), name), os.O_RDWR, 0)
	require.NoError(n.t, err)
	found := make(chan shm.Header, 1)
	go func() {
		defer f.Close()
		if unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLKW, &unix.Flock_t{Type: unix.F_WRLCK}) != nil {
			return
		}
		b := make([]byte, 4096)
		if _, err := f.ReadAt(b, 0); err != nil {
			return
		}
		if h, err := shm.ParseHeader(b); err == nil {
			found <- h
		}
	}()
	return found
}

// notYet is how long a worker that must not have a segment tries to get it.
const notYet = 200 * time.Millisecond

func (n *node) requireKept(free <-chan shm.Header, why string) {
	n.t.Helper()
	select {
	case h := <-free:
		require.Failf(n.t, "a worker has the segment", "%s: seq %d, settled %d", why, h.Seq, h.Released)
	case <-time.After(notYet):
	}
}

func (n *node) requireSettled(free <-chan shm.Header) {
	n.t.Helper()
	select {
	case h := <-free:
		require.Equal(n.t, h.Seq, h.Released)
	case <-time.After(patience):
		require.Fail(n.t, "the segment is not given back")
	}
}

func requirePlaced(t *testing.T, dir, pattern string) {
	t.Helper()
	require.Eventually(t, func() bool {
		found, err := filepath.Glob(filepath.Join(dir, ".dlrover/stage/*", pattern))
		return err == nil && len(found) == 1
	}, patience, time.Millisecond)
}

// A worker may put anything in the place of a record: the daemon does not wait for a reader of a pipe.
func TestRecordReplacesTheFileOfItsName(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	require.Equal(t, true, n.ask(map[string]any{"op": "status"})["ok"]) // from now on nothing is swept any more
	s := shard(dir, 1, 0, 2, 2)
	s.Write(t, n.dir, "seg/l0-0.seg")
	record := filepath.Join(n.dir.Path(), "prepared", s.Meta.Save+".0")
	require.NoError(t, os.MkdirAll(filepath.Dir(record), 0o700))
	require.NoError(t, unix.Mkfifo(record, 0o600))
	require.Equal(t, true, n.ask(map[string]any{"op": "saved", "seg": "seg/l0-0.seg"})["ok"])
	requirePlaced(t, dir, "shard-0.prepared")
	n.requireSettled(n.whenFree("seg/l0-0.seg"))
	n.put(shard(dir, 1, 1, 2, 2), "seg/l1-0.seg")
	n.requireCommitted(dir)
}

func TestASegmentWithoutARecordIsKeptUntilItIsCommitted(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(n.dir.Path(), "prepared"), nil, 0o600))
	n.put(shard(dir, 1, 0, 2, 2), "seg/l0-0.seg")
	requirePlaced(t, dir, "shard-0.prepared")
	free := n.whenFree("seg/l0-0.seg")
	n.requireKept(free, "a new daemon needs it")
	n.put(shard(dir, 1, 1, 2, 2), "seg/l1-0.seg")
	require.Equal(t, true, n.wait(dir, 1)["ok"])
	n.requireSettled(free)
}
