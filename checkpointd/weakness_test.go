package checkpointd_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd"
	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/fsx"
	"dlrover-run/checkpointd/shm/shmtest"
)

func inMemory(s shmtest.Save) shmtest.Save {
	s.Disk = false
	return s
}

// A save that the disk refused is the only copy: the good-bye of the launcher does not remove it.
func TestMemoryOutlivesASaveThatFailed(t *testing.T) {
	disk := &faulty{FS: fsx.OS{}, err: syscall.EACCES, hit: make(chan struct{}, 1)}
	n, dir := newNode(t, withFS(disk)), t.TempDir()
	n.put(single(dir, 10), "seg/l0-0.seg")
	require.Equal(t, false, n.wait(dir, 10)["ok"])
	c := n.control()
	left, err := c.End(t.Context(), patience)
	require.NoError(t, err)
	require.Equal(t, 1, left)
	names, err := n.dir.Names()
	require.NoError(t, err)
	require.Equal(t, []string{"seg/l0-0.seg"}, names)

	disk.fail(nil)
	n.put(single(dir, 20), "seg/l0-1.seg")
	require.Equal(t, true, n.wait(dir, 20)["ok"])
	left, err = c.End(t.Context(), patience)
	require.NoError(t, err)
	require.Zero(t, left, "a later step is on disk")
}

// A save that was aborted here may be on disk all the same, or a later one, by other nodes: a copy of a shard, for
// example, whose node came back. It is not kept in memory.
func TestSaveCommittedByOthersIsNotLost(t *testing.T) {
	for name, step := range map[string]int64{"the same save": 10, "a later one": 20} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			disk := &faulty{FS: fsx.OS{}, err: syscall.EACCES, hit: make(chan struct{}, 1)}
			n, other, dir := newNode(t, withFS(disk)), newNode(t), t.TempDir()
			given, theirs := single(dir, 10), single(dir, step)
			given.Saved = time.Now().Add(-time.Second)
			n.put(given, "seg/l0-0.seg")
			require.Equal(t, false, n.wait(dir, 10)["ok"])
			other.put(theirs, "seg/l0-0.seg")
			require.Equal(t, true, other.wait(dir, step)["ok"])
			left, err := n.control().End(t.Context(), patience)
			require.NoError(t, err)
			require.Zero(t, left)
			names, err := n.dir.Names()
			require.NoError(t, err)
			require.Empty(t, names)
		})
	}
}

// A worker that dies while it copies leaves the others' shards of that save without theirs: the next epoch does not
// wait for it.
func TestPartialSaveIsAbortedWithItsEpoch(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	c := n.control()
	w := checkpointd.World{Term: 1, Round: 1, GroupWorldSize: 1, WorldSize: 2, LocalWorldSize: 2}
	require.NoError(t, c.World(t.Context(), w))
	half := shard(dir, 20, 0, 2, 2)
	half.Meta.Epoch = w.Key()
	n.put(half, "seg/l0-0.seg")
	require.NoError(t, c.World(t.Context(), w), "told again: its workers live")
	require.EqualValues(t, 1, n.ask(map[string]any{"op": "drain", "timeout_ms": 50})["left"])
	w.Epoch++
	require.NoError(t, c.World(t.Context(), w))
	left, err := c.End(t.Context(), patience)
	require.NoError(t, err)
	require.Zero(t, left, "nothing to wait for, nothing to keep")
	requireNoLeftovers(t, dir)
	require.NoFileExists(t, filepath.Join(dir, "dlrover_latest.txt"))
}

// A breakpoint save belongs to an epoch that is over, and is finished all the same.
func TestBreakpointSaveOutlivesItsEpoch(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	c := n.control()
	for r := range 2 {
		s := inMemory(shard(dir, 20, r, 2, 2))
		s.Meta.Epoch = "1.1.0"
		n.put(s, fmt.Sprintf("seg/l%d-0.seg", r))
	}
	require.NoError(t, c.Breakpoint(t.Context(), checkpointd.World{}, "test", checkpointd.AtOnce))
	require.NoError(t, c.World(t.Context(), checkpointd.World{Term: 1, Round: 1, Epoch: 1, GroupWorldSize: 1,
		WorldSize: 2, LocalWorldSize: 2}))
	left, err := c.End(t.Context(), patience)
	require.NoError(t, err)
	require.Zero(t, left)
	requireStep(t, dir, 20, 2)
}

// late is a coordinator that answers one exchange of addresses only on command.
type late struct {
	coordinator.Coordinator
	key  string
	wait chan struct{}
	gone chan struct{}
}

func (b *late) Peers(ctx context.Context, key string, self coordinator.Peer, nodes int,
	patience time.Duration) ([]coordinator.Peer, error) {
	if key != b.key {
		return b.Coordinator.Peers(ctx, key, self, nodes, patience)
	}
	defer close(b.gone)
	<-b.wait
	return []coordinator.Peer{self, {Node: 1, Addr: "127.0.0.1:1"}}, nil
}

// The addresses of an epoch that is over do not replace those of the next.
func TestLateAddressesAreOld(t *testing.T) {
	hub := httptest.NewServer(coordinator.NewHub().Handler())
	defer hub.Close()
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	w := checkpointd.World{Round: 1, GroupWorldSize: 2, WorldSize: 2, LocalWorldSize: 1}
	slow := &late{Coordinator: coordinator.Client(hub.URL, "run", nil, client), key: w.Key(),
		wait: make(chan struct{}), gone: make(chan struct{})}
	common := func(c *checkpointd.Config) {
		c.Remote, c.Addr, c.Token, c.Replicas = coordinator.Client(hub.URL, "run", nil, client), "127.0.0.1", "secret", 2
	}
	a, b, dir := newNode(t, common, func(c *checkpointd.Config) { c.Remote = slow }), newNode(t, common), t.TempDir()
	require.NoError(t, a.control().World(t.Context(), w))
	w.Round++
	require.NoError(t, a.control().World(t.Context(), w))
	other := w
	other.GroupRank, other.RankBase = 1, 1
	require.NoError(t, b.control().World(t.Context(), other))
	copied := func(step int64) func() bool {
		return func() bool {
			st, err := b.control().Status(t.Context())
			require.NoError(t, err)
			for _, s := range st.Segments {
				if s.Copy && s.Step == step {
					return true
				}
			}
			return false
		}
	}
	a.put(inMemory(shard(dir, 1, 0, 2, 1)), "seg/l0-0.seg")
	require.Eventually(t, copied(1), patience, 10*time.Millisecond)
	close(slow.wait)
	<-slow.gone
	for step := int64(2); step < 5; step++ {
		a.put(inMemory(shard(dir, step, 0, 2, 1)), fmt.Sprintf("seg/l0-%d.seg", step%3))
		require.Eventually(t, copied(step), patience, 10*time.Millisecond)
	}
}

// If a daemon finds several saves at once, other nodes get the newest, regardless of its segment's name.
func TestTheNewestSaveIsCopied(t *testing.T) {
	dir := t.TempDir()
	ns := nodes(t, 2, func(c *checkpointd.Config) { c.Replicas = 2 })
	now := time.Now()
	for i, n := range ns {
		w := checkpointd.World{Round: 2, GroupRank: i, GroupWorldSize: 2, RankBase: i, WorldSize: 2, LocalWorldSize: 1}
		require.NoError(t, n.control().World(t.Context(), w))
	}
	for k, step := range []int64{30, 10, 20} {
		s := inMemory(shard(dir, step, 0, 2, 1))
		s.Saved = now.Add(time.Duration(step) * time.Millisecond)
		s.Write(t, ns[0].dir, fmt.Sprintf("seg/l0-%d.seg", k))
	}
	ns[0].ask(map[string]any{"op": "saved", "seg": "seg/l0-0.seg"})
	require.Eventually(t, func() bool {
		st, err := ns[1].control().Status(t.Context())
		require.NoError(t, err)
		return len(st.Segments) == 1 && st.Segments[0].Step == 30
	}, patience, 10*time.Millisecond)
}

// Two checkpoint directories in one job do not know of each other.
func TestTwoDirectories(t *testing.T) {
	n, a, b := newNode(t), t.TempDir(), t.TempDir()
	n.put(single(a, 10), "seg/l0-0.seg")
	other := single(b, 10)
	other.Meta.Save = "00000000000000ff"
	n.put(other, "seg/l0-1.seg")
	require.Equal(t, true, n.wait(a, 10)["ok"])
	require.Equal(t, true, n.wait(b, 10)["ok"])
	requireStep(t, a, 10, 1)
	requireStep(t, b, 10, 1)
}

// A step that is saved again after a rollback replaces the first, and a daemon that dies meanwhile leaves one of the
// two.
func TestAStepIsSavedAgain(t *testing.T) {
	disk := &faulty{FS: fsx.OS{}, hit: make(chan struct{}, 1)}
	n, dir := newNode(t, withFS(disk)), t.TempDir()
	first := single(dir, 10)
	first.Files[0].Data = []byte("before the rollback")
	n.put(first, "seg/l0-0.seg")
	require.Equal(t, true, n.wait(dir, 10)["ok"])
	disk.fail(syscall.EIO)
	again := single(dir, 10)
	again.Meta.Save = "00000000000000ff"
	n.put(again, "seg/l0-1.seg")
	<-disk.hit
	n.stop()
	got, err := os.ReadFile(filepath.Join(dir, "10/rank_0.pt"))
	require.NoError(t, err)
	require.Equal(t, "before the rollback", string(got))
	disk.fail(nil)
	n.start()
	res := n.ask(map[string]any{"op": "wait", "dir": dir, "step": 10, "save": again.Meta.Save,
		"timeout_ms": patience.Milliseconds()})
	require.Equal(t, true, res["ok"], res)
	requireStep(t, dir, 10, 1)
	requireNoLeftovers(t, dir)
}

// The lists of the daemon do not grow with the saves, and neither do its descriptors.
func TestThousandsOfSaves(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	fds := func() int {
		es, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		return len(es)
	}
	c := n.control()
	paths := make([]string, 3)
	for k := range paths {
		paths[k] = inMemory(single(dir, 1)).Write(t, n.dir, fmt.Sprintf("seg/l0-%d.seg", k))
	}
	before := 0
	for step := int64(2); step < 1000; step++ {
		s := inMemory(single(dir, step))
		s.Files[0].Data = []byte("short")
		s.Write(t, n.dir, fmt.Sprintf("seg/l0-%d.seg", step%3)) // a new file each time
		require.Equal(t, true, n.ask(map[string]any{"op": "saved", "seg": "x"})["ok"])
		if step == 10 {
			before = fds()
		}
	}
	st, err := c.Status(t.Context())
	require.NoError(t, err)
	require.Len(t, st.Segments, 3)
	require.LessOrEqual(t, fds(), before+8)
}

// A lost node had just saved a step that no other node has: it fetches the step that all have.
func TestFetchedCopyIsComplete(t *testing.T) {
	ns, dir := nodes(t, 2, func(c *checkpointd.Config) { c.Replicas = 2 }), t.TempDir()
	ns[0].put(inMemory(shard(dir, 50, 0, 2, 1)), "seg/l0-0.seg")
	for k, step := range []int64{50, 51} {
		ns[1].put(inMemory(shard(dir, step, 1, 2, 1)), fmt.Sprintf("seg/l0-%d.seg", k))
		require.Eventually(t, func() bool {
			names, err := ns[0].dir.Names()
			require.NoError(t, err)
			return len(names) == k+2
		}, patience, 10*time.Millisecond)
	}
	ns[1].stop()
	for _, sub := range []string{"seg", "peer"} {
		require.NoError(t, os.RemoveAll(filepath.Join(ns[1].dir.Path(), sub)))
		require.NoError(t, os.Mkdir(filepath.Join(ns[1].dir.Path(), sub), 0o700))
	}
	ns[1].start()
	for i, n := range ns {
		w := checkpointd.World{Round: 2, GroupRank: i, GroupWorldSize: 2, RankBase: i, WorldSize: 2, LocalWorldSize: 1}
		require.NoError(t, n.control().World(t.Context(), w))
	}
	res := ns[1].ask(map[string]any{"op": "offers", "rank": 1, "dir": dir, "timeout_ms": patience.Milliseconds()})
	offers := res["offers"].([]any)
	require.NotEmpty(t, offers)
	require.Equal(t, 50.0, offers[0].(map[string]any)["step"])
}

// Two directories of one rank, one of them steps behind the other: both are copied.
func TestTwoDirectoriesAreCopied(t *testing.T) {
	ns, ahead, behind := nodes(t, 2, func(c *checkpointd.Config) { c.Replicas = 2 }), t.TempDir(), t.TempDir()
	for k, s := range []shmtest.Save{inMemory(shard(ahead, 50, 0, 2, 1)), inMemory(shard(behind, 30, 0, 2, 1))} {
		ns[0].put(s, fmt.Sprintf("seg/l0-%d.seg", k))
		require.Eventually(t, func() bool {
			st, err := ns[1].control().Status(t.Context())
			require.NoError(t, err)
			return slices.ContainsFunc(st.Segments,
				func(c checkpointd.SegmentStatus) bool { return c.Copy && c.Dir == s.Meta.Dir })
		}, patience, 10*time.Millisecond)
	}
}

// Storage that vanishes under a running job, so that its mount point is left: nothing is written there.
func TestVanishedStorage(t *testing.T) {
	t.Parallel()
	n, dir := newNode(t), filepath.Join(t.TempDir(), "ckpts")
	n.put(single(dir, 10), "seg/l0-0.seg")
	require.Equal(t, true, n.wait(dir, 10)["ok"])
	require.NoError(t, os.Rename(dir, dir+".away"))
	require.NoError(t, os.Mkdir(dir, 0o755))
	lost := single(dir, 20)
	lost.Meta.TimeoutS = 2
	n.put(lost, "seg/l0-1.seg")
	require.Contains(t, n.wait(dir, 20)["error"], "mount it, or make")
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)

	n.put(single(dir, 30), "seg/l0-2.seg") // tried again until the storage is back
	require.NoError(t, syscall.Rename(dir+".away",
		dir)) // in one go: a directory that is not there is one that was deleted
	require.Equal(t, true, n.wait(dir, 30)["ok"])
	requireStep(t, dir, 30, 1)

	require.NoError(t, os.RemoveAll(dir)) // a job begins again
	require.NoError(t, os.MkdirAll(filepath.Join(dir, ".dlrover"), 0o755))
	n.put(single(dir, 40), "seg/l0-0.seg")
	require.Equal(t, true, n.wait(dir, 40)["ok"])
	requireStep(t, dir, 40, 1)
}
