// Package fakedriver builds stand-ins for NVIDIA's libraries, for tests: shared libraries with GPUs that exist in
// memory only. Their faults are set in the environment (FAKE_...); the C sources name the variables.
package fakedriver

import (
	_ "embed"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// The file names under which the libraries are looked for.
const (
	CUDA = "libcuda.so.1"
	NVML = "libnvidia-ml.so.1"
)

//go:embed testdata/libcuda.c
var cudaSource []byte

//go:embed testdata/libnvidia-ml.c
var nvmlSource []byte

// Build makes a library in dir and returns its path. flags are the compiler's, such as -DOLD. Where there is no C
// compiler the test is skipped.
func Build(t testing.TB, dir, library string, flags ...string) string {
	t.Helper()
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("SKIPPED: no gcc, so no stand-in for NVIDIA's libraries can be built")
	}
	source := filepath.Join(t.TempDir(), "fake.c")
	text := map[string][]byte{CUDA: cudaSource, NVML: nvmlSource}[library]
	require.NotEmpty(t, text, library)
	require.NoError(t, os.WriteFile(source, text, 0o600))
	path := filepath.Join(dir, library)
	out, err := exec.Command(gcc, append(flags, "-O1", "-shared", "-fPIC", "-o", path, source, "-ldl")...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return path
}
