package featuretest

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// MetaxTree makes a node with a display adapter, MetaX devices, and those of the host in sysfs.
func MetaxTree(t *testing.T, devices, ofHost int) (root string) {
	t.Helper()
	root = t.TempDir()
	put := func(path, text string) {
		path = filepath.Join(root, path)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	put("dev/mxcd", "")
	put("dev/dri/renderD128", "")
	for i := range devices {
		put(fmt.Sprintf("dev/dri/renderD%d", 129+i), "")
	}
	put("host/sys/class/mxcd/mxcd/layout/properties", "num_cpu_nodes 1\n")
	put("host/sys/class/mxcd/mxcd/layout/nodes/0/properties", "cpu_cores_count 64\n")
	for i := range ofHost {
		put(fmt.Sprintf("host/sys/class/mxcd/mxcd/layout/nodes/%d/properties", i+1), fmt.Sprintf("mgpu_id %d\n", i))
	}
	return root
}
