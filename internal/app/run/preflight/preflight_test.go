package preflight

import (
	"bytes"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// fakeRoot is a file system with processes, which are pid, parent and name, and their open files.
func fakeRoot(t *testing.T, devices []string, procs map[string][]string) string {
	t.Helper()
	root := t.TempDir()
	for _, d := range devices {
		require.NoError(t, os.MkdirAll(filepath.Join(root, filepath.Dir(d)), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(root, d), nil, 0o600))
	}
	for what, files := range procs {
		var pid, parent int
		var name string
		_, err := fmt.Sscan(what, &pid, &parent, &name)
		require.NoError(t, err)
		dir := filepath.Join(root, "proc", fmt.Sprint(pid))
		require.NoError(t, os.MkdirAll(filepath.Join(dir, "fd"), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "stat"),
			fmt.Appendf(nil, "%d (%s) S %d 1 1", pid, name, parent), 0o600))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "cmdline"), []byte(name+"\x00other.py\x00"), 0o600))
		for i, f := range files {
			require.NoError(t, os.Symlink(f, filepath.Join(dir, "fd", fmt.Sprint(i))))
		}
	}
	return root
}

func TestDevicesThatAreInUseAreTold(t *testing.T) {
	root := fakeRoot(t, []string{"dev/nvidia0", "dev/nvidia1", "dev/nvidiactl", "dev/nvidia-uvm"}, map[string][]string{
		"100 1 python3": {"/dev/null", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm"},
		"101 1 nv)(sm":  {"/dev/nvidia0"},
		fmt.Sprintf("102 %d worker", os.Getppid()): {"/dev/nvidia0", "/dev/nvidia-uvm"},
	})
	require.True(t, HasDevices(os.DirFS(root)))
	look := func() string {
		var said bytes.Buffer
		require.NoError(t, lookAtDevices(os.DirFS(root), slog.New(slog.NewTextHandler(&said, nil))).close())
		return said.String()
	}
	t.Setenv("CUDA_VISIBLE_DEVICES", "0,1")
	require.Contains(t, look(), "/dev/nvidia1 is in use by another program: pid 100 (python3 other.py)")
	t.Setenv("CUDA_VISIBLE_DEVICES", "0")
	require.Empty(t, look(), "of devices that this job does not use nothing is said")
	require.False(t, HasDevices(os.DirFS(t.TempDir())))
}

// Who has the port is named: this test.
func TestATakenPortIsNamed(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	root := os.DirFS("/")
	for _, host := range []string{"", "127.0.0.1"} {
		require.ErrorContains(t, Listenable(root, host, port),
			fmt.Sprintf("port %d is taken by pid %d (", port, os.Getpid()))
	}
	require.NoError(t, Listenable(root, "203.0.113.7", port), "not this machine's")
	require.NoError(t, l.Close())
	require.NoError(t, Listenable(root, "", port))
	require.ErrorContains(t, fmt.Errorf("%s", listener(os.DirFS(t.TempDir()), "", 1)), "another user")
}
