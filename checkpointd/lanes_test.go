package checkpointd

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestLanes(t *testing.T) {
	l := newLanes(3)
	require.Equal(t, 3, cap(l.lane(1, unix.EXT4_SUPER_MAGIC)))
	require.Equal(t, 1, cap(l.lane(2, unix.NFS_SUPER_MAGIC)))
	require.Equal(t, 1, cap(l.lane(3, unix.CIFS_SUPER_MAGIC)))
	require.Equal(t, 1, cap(l.lane(4, unix.FUSE_SUPER_MAGIC)))
	require.Len(t, l.byMount, 4)

	dir := t.TempDir()
	there, err := l.of(dir)
	require.NoError(t, err)
	later, err := l.of(filepath.Join(dir, "a", "b"))
	require.NoError(t, err)
	require.Equal(t, there, later, "a directory that does not exist yet is on its parent's mount")
	proc, err := l.of("/proc")
	require.NoError(t, err)
	require.NotEqual(t, there, proc)
}
