package pidfiles

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPIDFilesReplaceNoOneElses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	own := filepath.Join(dir, "own")
	require.NoError(t, os.WriteFile(own, []byte("mine"), 0o600))
	require.NoError(t, os.Symlink(own, filepath.Join(dir, "5.ds")))
	p, err := write([]string{filepath.Join(dir, "{pid}.ds")}, 5)
	require.NoError(t, err)
	text, err := os.ReadFile(own)
	require.NoError(t, err)
	require.Equal(t, "mine", string(text), "a link is not followed")
	require.NoError(t, os.WriteFile(p.paths[0], []byte("9"), 0o600))
	require.NoError(t, p.close())
	require.FileExists(t, p.paths[0], "it is another's by now")
	_, err = write([]string{filepath.Join(dir, "none", "{pid}")}, 5)
	require.Error(t, err)
}
