package checkpointd

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/shm"
	"dlrover-run/checkpointd/shm/shmtest"
)

// shelved is a shelf of a daemon that does nothing else.
type shelved struct {
	shelf
	t *testing.T
}

func newShelf(t *testing.T) shelved {
	t.Helper()
	dir, err := shm.Create(t.TempDir(), "job")
	require.NoError(t, err)
	d, err := New(Config{Dir: dir})
	require.NoError(t, err)
	t.Cleanup(d.Close)
	return shelved{shelf{d}, t}
}

// copyOf is what rank 3 saved in the given second.
func copyOf(step int64, epoch string, second int64, kib int) shmtest.Save {
	m := shmtest.Meta("/ckpt", step)
	m.Rank, m.WorldSize, m.Epoch = 3, 4, epoch
	return shmtest.Save{Meta: m, Saved: time.Unix(second, 0), Files: []shmtest.File{
		{Path: "a", Kind: "raw", Data: bytes.Repeat([]byte{byte(step)}, kib<<10)},
	}}
}

func (s shelved) begin(c shmtest.Save) (*shm.Incoming, []byte) {
	s.t.Helper()
	b := c.Bytes(s.t)
	in, err := s.Incoming(c.Meta, int64(len(b)))
	require.NoError(s.t, err)
	copy(in.Bytes()[4096:], b[4096:])
	return in, b
}

func (s shelved) put(c shmtest.Save) {
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

func (s shelved) pin(c shmtest.Save) *shm.Pinned {
	s.t.Helper()
	p, err := s.Copy(3, c.Meta.Save)
	require.NoError(s.t, err)
	return p
}

// steps are those of the complete copies, in the order of their names.
func (s shelved) steps() (steps []int64) {
	s.d.held(func(_ string, _ *segment, h shm.Header, m shm.Meta) { steps = append(steps, m.Step) })
	return steps
}

func (s shelved) inode(k string) os.FileInfo {
	s.t.Helper()
	fi, err := os.Lstat(filepath.Join(s.d.cfg.Dir.Path(), "peer", "r3-"+k+".seg"))
	require.NoError(s.t, err)
	return fi
}

func TestShelfTurnsInPlace(t *testing.T) {
	s := newShelf(t)
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

func TestShelfLeavesAPinnedCopy(t *testing.T) {
	s := newShelf(t)
	old := copyOf(1, "0", 1, 100)
	s.put(old)
	s.put(copyOf(2, "0", 2, 100))
	p := s.pin(old)
	s.put(copyOf(3, "0", 3, 100))
	require.Equal(t, old.Files[0].Data, p.File(0))
	require.Equal(t, []int64{3, 2}, s.steps())
	p.Release()
}

func TestShelfKeepsTheNewestSave(t *testing.T) {
	s := newShelf(t)
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

// Two copies of a rank may come in at once: one that was looked at before the other was published does not take that
// over.
func TestShelfWithTwoThatComeIn(t *testing.T) {
	s := newShelf(t)
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

// A copy that cannot be read may be the newest one: it is replaced when the next one is complete, not written over.
func TestShelfWithWhatCannotBeRead(t *testing.T) {
	s := newShelf(t)
	s.put(copyOf(1, "0", 1, 100))
	s.put(copyOf(2, "0", 2, 100))
	path := filepath.Join(s.d.cfg.Dir.Path(), "peer", "r3-1.seg")
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
func TestShelfRefusesLinks(t *testing.T) {
	s := newShelf(t)
	s.put(copyOf(1, "0", 1, 100))
	target := filepath.Join(t.TempDir(), "target")
	content := copyOf(0, "0", 0, 100).Bytes(t)
	require.NoError(t, os.WriteFile(target, content, 0o600))
	require.NoError(t, os.Symlink(target, filepath.Join(s.d.cfg.Dir.Path(), "peer", "r3-1.seg")))
	s.put(copyOf(2, "0", 2, 100))
	got, err := os.ReadFile(target)
	require.NoError(t, err)
	require.True(t, bytes.Equal(content, got))
	require.True(t, s.inode("1").Mode().IsRegular())
}
