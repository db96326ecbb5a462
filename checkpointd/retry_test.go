package checkpointd

import (
	"fmt"
	"io/fs"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/commit"
)

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
