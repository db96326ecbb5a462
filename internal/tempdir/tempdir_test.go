package tempdir

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMake(t *testing.T) {
	here, there := t.TempDir(), t.TempDir()
	Fallbacks = []string{"/nowhere", there}
	t.Cleanup(func() { Fallbacks = []string{"/tmp", "/var/tmp"} })
	file := filepath.Join(here, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	for tmpdir, want := range map[string]string{here: here, here + "/missing": there, file: there, "/proc": there} {
		t.Setenv("TMPDIR", tmpdir)
		dir, err := Make("x-")
		require.NoError(t, err)
		require.Equal(t, want, filepath.Dir(dir), tmpdir)
	}
	Fallbacks = nil
	t.Setenv("TMPDIR", here+"/missing")
	_, err := Make("x-")
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.ErrorContains(t, err, here)
}
