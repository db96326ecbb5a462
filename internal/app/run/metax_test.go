package run

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/proc"
)

// metaxTree makes a node with a display adapter, MetaX devices, and those of the host in sysfs.
func metaxTree(t *testing.T, devices, ofHost int) (root string) {
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

func TestWorkersPerMetaXDevice(t *testing.T) {
	for _, c := range []struct {
		options, visible string
		slots            int
		err              string
	}{
		{"--nproc-per-node=gpu", "", 8, ""},
		{"--nproc-per-node=auto", "", 8, ""},
		{"--nproc-per-node=gpu", "2,3,5", 3, ""},
		{"--nproc-per-node=gpu --accelerator=metax-tech.com/gpu", "7", 1, ""},
		{"--nproc-per-node=gpu --accelerator=nvidia.com/gpu", "0,1", 2, ""},
		{"--nproc-per-node=gpu", "8", 0, "--nproc-per-node=gpu: no GPU is visible here"},
		{"--nproc-per-node=gpu --accelerator=ascend-npu", "", 0,
			"--accelerator=ascend-npu: the devices of this node are metax"},
	} {
		root := metaxTree(t, 8, 8)
		env := map[string]string{"DLROVER_SYSFS_ROOT": filepath.Join(root, "host/sys")}
		if c.visible != "" {
			env["MACA_VISIBLE_DEVICES"] = c.visible
		}
		lookup := func(name string) (string, bool) { v, ok := env[name]; return v, ok }
		t.Chdir(t.TempDir())
		require.NoError(t, os.WriteFile("train.py", nil, 0o600))
		args, err := parse(strings.Fields(c.options+" train.py"), lookup, io.Discard)
		require.NoError(t, err)
		host := testHost()
		host.gpus = func() (int, string) { return proc.GPUCount(root, lookup) }
		s, err := resolve(args, lookup, host)
		if c.err != "" {
			require.ErrorContains(t, err, c.err)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, c.slots, s.size.slots, c)
	}
}
