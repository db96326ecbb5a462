//go:build cgo && linux

package cuda

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRealDriverCopies(t *testing.T) {
	if _, err := os.Stat("/dev/nvidia0"); err != nil {
		t.Skip("SKIPPED: CUDA'S DRIVER IS NOT TESTED: there is no /dev/nvidia0")
	}
	out, err := exec.Command("nvidia-smi", "--query-gpu=pci.bus_id", "--format=csv,noheader", "--id=0").Output()
	require.NoError(t, err)
	pci := strings.ToLower(strings.TrimSpace(string(out)))
	// A process of its own: this one may have opened the stand-in, and there is one library in a process.
	if os.Getenv("CUDA_REAL") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestRealDriverCopies$", "-test.v")
		cmd.Env = append(os.Environ(), "CUDA_REAL=1")
		out, err := cmd.CombinedOutput()
		t.Log(string(out))
		require.NoError(t, err)
		return
	}
	d, err := Open(Library)
	require.NoError(t, err)
	g, err := d.GPU("GPU 0", pci)
	require.NoError(t, err)
	defer g.Close()
	require.EqualValues(t, Large, g.Bytes())
	r, err := Copy(g, g)
	require.NoError(t, err)
	t.Logf("CUDA %s: %.0f MB/s, %.0f at worst", d.Version(), r.MBps, r.Low)
	require.Greater(t, r.MBps, 50_000.0, "slower than any memory of a GPU")
	_, err = d.GPU("no GPU", "0000:fe:1f.0")
	require.ErrorIs(t, err, ErrHidden)
}
