package token

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"
)

func TestOfKey(t *testing.T) {
	t.Parallel()
	key := &fstest.MapFile{Data: []byte(strings.Repeat("k", 400)), Mode: 0o600}
	root := fstest.MapFS{"root/.ssh/id_rsa": key, "root/.ssh/id_ecdsa": {Data: []byte("short"), Mode: 0o600}}
	token, file := OfKey(root, "/root", "a")
	require.Regexp(t, "^[0-9a-f]{64}$", token)
	require.Equal(t, "/root/.ssh/id_rsa", file)
	same, _ := OfKey(root, "/root/", "a")
	require.Equal(t, token, same)
	other, _ := OfKey(root, "/root", "b")
	require.NotEqual(t, token, other)
	for name, c := range map[string]struct {
		home string
		file fstest.MapFile
	}{
		"no home":          {"", *key},
		"a relative home":  {"root", *key},
		"others read it":   {"/root", fstest.MapFile{Data: key.Data, Mode: 0o604}},
		"the group writes": {"/root", fstest.MapFile{Data: key.Data, Mode: 0o620}},
		"a directory":      {"/root", fstest.MapFile{Mode: fs.ModeDir | 0o700}},
		"empty":            {"/root", fstest.MapFile{Mode: 0o600}},
		"no key":           {"/root", fstest.MapFile{Data: make([]byte, maxKey+1), Mode: 0o600}},
	} {
		token, file := OfKey(fstest.MapFS{"root/.ssh/id_rsa": &c.file}, c.home, "a")
		require.Empty(t, token+file, name)
	}
}

// Kubernetes mounts a Secret as links. Nobody waits for a pipe.
func TestOfKeyOnDisk(t *testing.T) {
	t.Parallel()
	home := t.TempDir()
	ssh := filepath.Join(home, ".ssh")
	require.NoError(t, os.MkdirAll(filepath.Join(ssh, "..data"), 0o700))
	require.NoError(t, syscall.Mkfifo(filepath.Join(ssh, "id_ed25519"), 0o600))
	key := filepath.Join(ssh, "..data", "id_rsa")
	require.NoError(t, os.WriteFile(key, []byte(strings.Repeat("k", 400)), 0o600))
	require.NoError(t, os.Symlink("..data/id_rsa", filepath.Join(ssh, "id_rsa")))
	token, file := OfKey(os.DirFS("/"), home, "a")
	require.NotEmpty(t, token)
	require.Equal(t, filepath.Join(ssh, "id_rsa"), file)
	require.NoError(t, os.Chmod(key, 0o644))
	token, _ = OfKey(os.DirFS("/"), home, "a")
	require.Empty(t, token, "ssh refuses it, too")
}
