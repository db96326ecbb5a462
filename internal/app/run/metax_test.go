package run

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/run/feature/featuretest"
	"dlrover-run/launcher/proc"
)

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
		root := featuretest.MetaxTree(t, 8, 8)
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
