package checkpointd

import (
	"bytes"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/checkpointd/shm/shmtest"
)

// testStore is a replicaStore without a daemon.
type testStore struct {
	replicaStore
	t *testing.T
}

func newTestStore(t *testing.T) testStore {
	t.Helper()
	dir, err := shm.Create(t.TempDir(), "job")
	require.NoError(t, err)
	segs := newSegments(dir, slog.New(slog.DiscardHandler))
	t.Cleanup(segs.close)
	return testStore{replicaStore{segs}, t}
}

// copyOf is the save of rank 3 in the given second.
func copyOf(step int64, epoch string, second int64, kib int) shmtest.Save {
	m := shmtest.Meta("/ckpt", step)
	m.Rank, m.WorldSize, m.Epoch = 3, 4, epoch
	return shmtest.Save{Meta: m, Saved: time.Unix(second, 0), Files: []shmtest.File{
		{Path: "a", Kind: "raw", Data: bytes.Repeat([]byte{byte(step)}, kib<<10)},
	}}
}

func (s testStore) begin(c shmtest.Save) (*shm.Incoming, []byte) {
	s.t.Helper()
	b := c.Bytes(s.t)
	in, err := s.Incoming(c.Meta, int64(len(b)))
	require.NoError(s.t, err)
	copy(in.Bytes()[4096:], b[4096:])
	return in, b
}

func (s testStore) put(c shmtest.Save) {
	s.t.Helper()
	in, b := s.begin(c)
	h, err := shm.ParseHeader(b)
	require.NoError(s.t, err)
	seg, err := in.Publish(h)
	require.NoError(s.t, err)
	s.Published(seg)
	p := s.pin(c)
	defer p.Release()
	require.Equal(s.t, c.Files[0].Data, p.File(0))
}

func (s testStore) pin(c shmtest.Save) *shm.Pinned {
	s.t.Helper()
	p, err := s.Copy(3, c.Meta.Save)
	require.NoError(s.t, err)
	return p
}

// steps are those of the complete copies, in the order of their names.
func (s testStore) steps() (steps []int64) {
	s.segs.each(func(_ string, _ *segment, h shm.Header, m shm.Meta) { steps = append(steps, m.Step) })
	return steps
}

func (s testStore) inode(k string) os.FileInfo {
	s.t.Helper()
	fi, err := os.Lstat(filepath.Join(s.segs.dir.Path(), "peer", "r3-"+k+".seg"))
	require.NoError(s.t, err)
	return fi
}

func TestReplicaStoreReusesMemory(t *testing.T) {
	s := newTestStore(t)
	s.put(copyOf(1, "0", 1, 100))
	s.put(copyOf(2, "0", 2, 100))
	a, b := s.inode("0"), s.inode("1")
	for step := int64(3); step < 7; step++ {
		in, _ := s.begin(copyOf(step, "0", step, 100))
		require.Equal(t, []int64{step - 1}, s.steps(), "the newest stays while another comes in")
		require.Positive(t, in.Warm(), "mapped already")
		in.Abort()
		s.put(copyOf(step, "0", step, 100))
	}
	require.Equal(t, []int64{5, 6}, s.steps())
	require.True(t, os.SameFile(a, s.inode("0")))
	require.True(t, os.SameFile(b, s.inode("1")))

	s.put(copyOf(7, "0", 7, 500))
	require.False(t, os.SameFile(a, s.inode("0")), "too small")
	s.put(copyOf(8, "0", 8, 40))
	require.True(t, os.SameFile(b, s.inode("1")))
	s.put(copyOf(9, "0", 9, 40))
	require.Equal(t, []int64{9, 8}, s.steps())
}

func TestReplicaStoreLeavesAPinnedCopy(t *testing.T) {
	s := newTestStore(t)
	old := copyOf(1, "0", 1, 100)
	s.put(old)
	s.put(copyOf(2, "0", 2, 100))
	p := s.pin(old)
	s.put(copyOf(3, "0", 3, 100))
	require.Equal(t, old.Files[0].Data, p.File(0))
	require.Equal(t, []int64{3, 2}, s.steps())
	p.Release()
}

func TestReplicaStoreKeepsTheNewestSave(t *testing.T) {
	s := newTestStore(t)
	s.put(copyOf(20, "0", 1, 100))
	s.put(copyOf(30, "0", 2, 100))
	_, err := s.Incoming(copyOf(25, "0", 3, 100).Meta, 8192)
	require.ErrorContains(t, err, "older")
	s.put(copyOf(15, "1", 3, 100)) // went back to step 10
	in, _ := s.begin(copyOf(16, "1", 4, 100))
	require.Equal(t, []int64{15}, s.steps())
	in.Abort()
	s.put(copyOf(16, "1", 4, 100))
	require.Equal(t, []int64{15, 16}, s.steps())
}

func TestReplicaStoreFollowsWorkersThatGoBack(t *testing.T) {
	s := newTestStore(t)
	for i, step := range []int64{10, 5, 3} {
		c := copyOf(step, "0", int64(i+1), 100)
		c.Meta.SavedNS = int64(i + 1)
		s.put(c)
	}
	require.Equal(t, []int64{3, 5}, s.steps())
	late := copyOf(20, "0", 1, 100).Meta
	late.SavedNS = 1
	_, err := s.Incoming(late, 8192)
	require.ErrorContains(t, err, "older")
}

// Two copies of a rank may come in at once: one that was looked at before the other was published does not take that
// over.
func TestReplicaStoreWithTwoThatComeIn(t *testing.T) {
	s := newTestStore(t)
	s.put(copyOf(1, "0", 1, 100))
	s.put(copyOf(2, "0", 2, 100))
	stale := s.slot(3, 0)
	s.put(copyOf(3, "0", 3, 100))
	require.Nil(t, stale.reuse(100<<10))
	require.Equal(t, []int64{3, 2}, s.steps())

	in, first := s.begin(copyOf(4, "0", 4, 100))
	other, b := s.begin(copyOf(5, "0", 5, 100))
	require.Equal(t, []int64{3}, s.steps())
	h, err := shm.ParseHeader(b)
	require.NoError(t, err)
	seg, err := other.Publish(h)
	require.NoError(t, err)
	s.Published(seg)
	h, err = shm.ParseHeader(first)
	require.NoError(t, err)
	_, err = in.Publish(h)
	require.ErrorIs(t, err, shm.ErrUnfit)
	in.Abort()
	require.Equal(t, []int64{3, 5}, s.steps())
}

// A directory that is saved to more often does not push out the only copy of another; one place more is enough.
func TestReplicaStoreKeepsTheNewestOfEachDirectory(t *testing.T) {
	s := newTestStore(t)
	in := func(dir string, step int64) shmtest.Save {
		c := copyOf(step, "0", step, 100)
		c.Meta.Dir = dir
		return c
	}
	for _, c := range []struct {
		dir  string
		step int64
		want []int64
	}{
		{"/a", 1, []int64{1}}, {"/a", 2, []int64{1, 2}}, {"/b", 3, []int64{3, 2}}, {"/a", 4, []int64{3, 2, 4}}, {"/a",
			5, []int64{3, 5, 4}},
		{"/a", 6, []int64{3, 5, 6}}, {"/b", 7, []int64{3, 7, 6}}, {"/c", 8, []int64{8, 7, 6}}, {"/d", 9,
			[]int64{8, 7, 6, 9}}, {"/d", 10, []int64{8, 7, 6, 9, 10}},
		{"/a", 11, []int64{8, 7, 6, 11, 10}}, {"/a", 12, []int64{8, 7, 12, 11, 10}},
	} {
		s.put(in(c.dir, c.step))
		require.Equal(t, c.want, s.steps(), "after step %d of %s", c.step, c.dir)
	}
}

// Without room for one more slot the oldest copy of another directory makes way.
func TestPlaceWithoutRoom(t *testing.T) {
	slots := []replicaSlot{
		{name: "0", saved: time.Unix(1, 0), dir: "/a"}, {name: "1", saved: time.Unix(2, 0), dir: "/b"}, {name: "2",
			saved: time.Unix(3, 0), dir: "/c"},
		{name: "3", step: -1, err: fs.ErrNotExist},
	}
	require.Equal(t, "3", pickSlot(slots, "/a", true).name)
	require.Equal(t, "1", pickSlot(slots, "/a", false).name)
	require.Equal(t, "0", pickSlot(slots, "/b", false).name)
}

// A save that another rank of the node has fetched is not fetched again, and is not held for ever.
func TestFetchedBefore(t *testing.T) {
	s := newTestStore(t)
	s.put(copyOf(1, "0", 1, 100))
	s.put(copyOf(2, "0", 2, 100))
	before := s.inode("0")
	p := &peers{segs: s.segs}
	require.NoError(t, p.fetchOne(t.Context(), holder{copy: coordinator.Copy{Rank: 3,
		Save: copyOf(1, "0", 1, 1).Meta.Save}}, "/ckpt"))
	s.put(copyOf(3, "0", 3, 100))
	require.True(t, os.SameFile(before, s.inode("0")))
}

// A coordinator that has lost its memory does not know all nodes any more: the others are where they were.
func TestAddressesOutliveTheBoard(t *testing.T) {
	w := World{Round: 1, GroupWorldSize: 2}
	p := &peers{life: newLifetime(), segs: newTestStore(t).segs, world: w, nodes: 2, wake: make(chan struct{}, 1)}
	partner := func() string {
		require.Len(t, p.partners, 1)
		return p.partners[0].Addr
	}
	p.setNodes(w, []coordinator.Peer{{Node: 0, Addr: "a:1"}, {Node: 1, Addr: "b:1"}})
	require.Equal(t, "b:1", partner())
	p.setNodes(w, []coordinator.Peer{{Node: 0, Addr: "a:1"}})
	require.Equal(t, "b:1", partner())
	p.setNodes(w, []coordinator.Peer{{Node: 1, Addr: "b:2"}})
	require.Equal(t, "b:2", partner())
	w.Round++
	p.world = w
	p.setNodes(w, []coordinator.Peer{{Node: 0, Addr: "a:1"}})
	require.Empty(t, p.partners, "of another epoch")
}

// Complete saves are first, then the newest, regardless of steps: training may have been rolled back.
func TestHolders(t *testing.T) {
	c := func(rank, of int, save string, step, at int64) coordinator.Copy {
		return coordinator.Copy{Rank: rank, Shard: max(rank, 0), Shards: of, Save: save, Step: step, Dir: "/a",
			SavedNS: at}
	}
	other := c(1, 2, "x", 99, 99)
	other.Dir = "/b"
	for name, tc := range map[string]struct {
		copies []coordinator.Copy // of node 1
		mine   []coordinator.Copy
		have   []restorable
		want   []string
	}{
		"nothing": {},
		"newest first": {copies: []coordinator.Copy{c(1, 2, "a", 1, 10), c(1, 2, "b", 2, 20)},
			want: []string{"b", "a"}},
		"by time after a rollback": {copies: []coordinator.Copy{c(1, 2, "a", 30, 10), c(1, 2, "b", 12, 20)},
			want: []string{"b", "a"}},
		"whole before newer": {copies: []coordinator.Copy{c(1, 2, "a", 1, 10), c(1, 2, "b", 2, 20)},
			mine: []coordinator.Copy{c(0, 2, "a", 1, 10)}, want: []string{"a", "b"}},
		"whole before many": {copies: []coordinator.Copy{c(1, 2, "a", 1, 10), c(1, 4, "b", 2, 20),
			c(2, 4, "b", 2, 20)}, mine: []coordinator.Copy{c(0, 2, "a", 1, 10), c(3, 4, "b", 2,
			20)}, want: []string{"a", "b"}},
		"another rank, directory": {copies: []coordinator.Copy{c(2, 4, "a", 1, 10), other}},
		"the state that all have": {copies: []coordinator.Copy{c(anyRank, 1, "a", 1, 10)}, want: []string{"a"}},
		"what is here": {copies: []coordinator.Copy{c(1, 2, "a", 1, 11), c(1, 2, "b", 2, 20)},
			have: []restorable{{Save: "a", Step: 1, SavedNS: 10}}, want: []string{"b"}},
		"older than what is here": {copies: []coordinator.Copy{c(1, 2, "a", 30, 10)},
			have: []restorable{{Save: "b", Step: 12, SavedNS: 20}}},
		"by step where no time is": {copies: []coordinator.Copy{c(1, 2, "a", 30, 0), c(1, 2, "b", 12, 0)},
			have: []restorable{{Save: "c", Step: 20, SavedNS: 5}}, want: []string{"a"}},
		"this node is not a stranger": {mine: []coordinator.Copy{c(1, 2, "a", 1, 10)}},
	} {
		t.Run(name, func(t *testing.T) {
			p := &peers{known: []coordinator.Peer{{Node: 0, Copies: tc.mine}, {Node: 1, Copies: tc.copies}}}
			var got []string
			for _, h := range p.holders(0, request{Rank: 1, Dir: "/a"}, tc.have) {
				require.Equal(t, 1, h.node)
				got = append(got, h.copy.Save)
			}
			require.Equal(t, tc.want, got)
		})
	}
}

// A copy that cannot be read may be the newest one: it is replaced when the next one is complete, not written over.
func TestReplicaStoreWithUnreadableCopies(t *testing.T) {
	s := newTestStore(t)
	s.put(copyOf(1, "0", 1, 100))
	s.put(copyOf(2, "0", 2, 100))
	path := filepath.Join(s.segs.dir.Path(), "peer", "r3-1.seg")
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	_, err = f.WriteAt([]byte("x"), 0)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	before, err := os.ReadFile(path)
	require.NoError(t, err)
	in, _ := s.begin(copyOf(3, "0", 3, 100))
	require.Equal(t, []int64{1}, s.steps())
	after, err := os.ReadFile(path)
	require.NoError(t, err)
	require.True(t, bytes.Equal(before, after))
	in.Abort()
	s.put(copyOf(3, "0", 3, 100))
	require.Equal(t, []int64{1, 3}, s.steps())
}

// A link under the name of a copy is neither followed nor written to; the next copy takes its place.
func TestReplicaStoreRefusesLinks(t *testing.T) {
	s := newTestStore(t)
	s.put(copyOf(1, "0", 1, 100))
	target := filepath.Join(t.TempDir(), "target")
	content := copyOf(0, "0", 0, 100).Bytes(t)
	require.NoError(t, os.WriteFile(target, content, 0o600))
	require.NoError(t, os.Symlink(target, filepath.Join(s.segs.dir.Path(), "peer", "r3-1.seg")))
	s.put(copyOf(2, "0", 2, 100))
	got, err := os.ReadFile(target)
	require.NoError(t, err)
	require.True(t, bytes.Equal(content, got))
	require.True(t, s.inode("1").Mode().IsRegular())
}
