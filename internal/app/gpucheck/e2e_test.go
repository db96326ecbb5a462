//go:build cgo && linux

package gpucheck

import (
	"cmp"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/testkit"
	"dlrover-run/switchbox"
	"dlrover-run/switchbox/gpuchild"
	"dlrover-run/switchbox/nvml/fakedriver"
)

// binary is gpucheck as `make build` builds it, built once.
var binary = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "gpucheck")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "gpucheck")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-extldflags=-Wl,-z,lazy", "-o", path,
		"dlrover-run/cmd/gpucheck")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", errors.New(string(out))
	}
	return path, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if path, err := binary(); err == nil {
		os.RemoveAll(filepath.Dir(path))
	}
	os.Exit(code)
}

// libraries are stand-ins for NVIDIA's, built once for all tests.
func libraries(t *testing.T, cuda bool, flags ...string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	fakedriver.Build(t, dir, fakedriver.NVML, flags...)
	if cuda {
		fakedriver.Build(t, dir, fakedriver.CUDA)
	}
	return dir
}

// gpucheck runs the program as the launcher does, with the stand-ins of dir, which are told what to do.
func gpucheck(t *testing.T, dir, knob string, args ...string) switchbox.Report {
	t.Helper()
	path, err := binary()
	require.NoError(t, err)
	name, value, _ := strings.Cut(knob, "=")
	script := fmt.Sprintf("#!/bin/sh\nexport LD_LIBRARY_PATH='%s' %s='%s'\nexec '%s' \"$@\"\n", dir, cmp.Or(name,
		"FAKE"), value, path)
	wrapper := filepath.Join(t.TempDir(), "gpucheck")
	require.NoError(t, testkit.WriteProgram(wrapper, script))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	r, err := gpuchild.Program{Path: wrapper}.Run(ctx, args...)
	require.NoError(t, err)
	return r
}

// This machine's own driver, or the word that there is none.
func TestThisMachine(t *testing.T) {
	t.Parallel()
	r := gpucheck(t, "", "", "--level=inventory")
	if _, err := os.Stat("/dev/nvidiactl"); err == nil {
		t.Logf("%+v", r)
		return
	}
	require.Equal(t, switchbox.Skipped, r.State)
	require.Equal(t, "no NVIDIA driver: libnvidia-ml.so.1 cannot be loaded", r.Reason)
}

func TestRealLibrariesOfAFakeDriver(t *testing.T) {
	t.Parallel()
	dir := libraries(t, true)
	r := gpucheck(t, dir, "FAKE_NVML_CLIQUE=7", "--level=copy", "--min-bandwidth=10000", "--min-channels=2")
	require.Equal(t, switchbox.OK, r.State, texts(r))
	require.Equal(t, "NVIDIA 550.54.15, CUDA 12.4", r.Driver)
	require.Equal(t, "abababab-abab-abab-abab-abababababab.7", r.Domain)
	require.Len(t, r.Devices, 4)
	require.Equal(t, switchbox.Identity{Index: 3, Name: "Fake H100", UUID: "GPU-00000003", PCI: "0000:13:00.0",
		Module: 4}, r.Devices[3].Identity)
	require.Equal(t, 18, r.Devices[0].Active())
	require.Equal(t, "0:1 2:3", tested(r))
	for _, p := range r.Pairs {
		require.InEpsilon(t, 400_000, p.MBps, 0.001)
	}
	require.NotContains(t, texts(r), "warn", "NVML has counted what CUDA has copied")
}

func TestFaultsOfAFakeDriver(t *testing.T) {
	t.Parallel()
	dir := libraries(t, true)
	for _, c := range []struct {
		name, knob string
		state      switchbox.State
		want       string
	}{
		{"fabric not registered", "FAKE_NVML_FABRIC=2", switchbox.Faulty,
			"GPU 0 has 18 active links, but its fabric is in_progress"},
		{"no handle", "FAKE_NVML_HANDLE=16", switchbox.Faulty,
			"GPU 1 cannot be used: Mode: the driver refuses the device: GPU requires reset"},
		{"routes unhealthy", "FAKE_NVML_HEALTH=0x10", switchbox.Faulty, "has broken routes through its switches"},
		{"H100 refuses the newest structure", "FAKE_NVML_FABRIC_V=2", switchbox.OK, ""},
		{"link down", "FAKE_NVML_DOWN=1:5", switchbox.Faulty, "GPU 1 has 17 active links, others have 18; down: 5"},
		{"hot", "FAKE_NVML_HOT=1", switchbox.OK, "GPU 1 has its clocks held down by its temperature: 1095 MHz at 91 C"},
		{"memory in use", "FAKE_NVML_USED_MB=40000", switchbox.Faulty, "of its memory in use"},
		{"versions differ", "FAKE_NVML_INIT=18", switchbox.Faulty, "of different versions"},
		{"slow pair", "FAKE_CUDA_SLOW=1>0=9999", switchbox.Faulty, "pair 0:1 reaches 9999 MB/s, less than 10000 MB/s"},
		{"exactly enough", "FAKE_CUDA_MBPS=10000.1", switchbox.OK, "pair 0:1 reaches 10000"},
		{"corrupt data", "FAKE_CUDA_CORRUPT=0>1", switchbox.Faulty,
			"data was damaged on its way: GPU 0 to GPU 1: 1 of 8388608 words differ"},
		{"another route", "FAKE_CUDA_BLIND=1", switchbox.OK, "over its links: the rest went another way"},
		{"Xid", "FAKE_NVML_XID=79", switchbox.Faulty, "had Xid 79 during the copies: GPU has fallen off the bus"},
		{"switch manager not ready", "FAKE_CUDA_FAIL=cuInit=802", switchbox.Faulty, "CUDA_ERROR_SYSTEM_NOT_READY"},
		{"divided", "FAKE_NVML_MIG=1", switchbox.Skipped, "pair 0:1 is skipped: GPU 0 is divided (MIG)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := gpucheck(t, dir, c.knob, "--pairs=0:1", "--min-bandwidth=10000", "--min-channels=1")
			require.Equal(t, c.state, r.State, "%s: %s", r.Reason, texts(r))
			require.Contains(t, texts(r), c.want)
		})
	}
}

func TestHangsAndCrashesOfADriver(t *testing.T) {
	t.Parallel()
	dir := libraries(t, true)
	for _, c := range []struct {
		name, knob string
		state      switchbox.State
		want       string
	}{
		{"no devices", "FAKE_GPUS=0", switchbox.Skipped, "shows this process no GPU"},
		{"hang of NVML", "FAKE_NVML_HANG=nvmlDeviceGetGpuFabricInfoV", switchbox.Faulty,
			"the driver does not answer: asking GPU 0 for Fabric"},
		{"hang of CUDA", "FAKE_CUDA_HANG=cuInit", switchbox.Faulty, "the driver does not answer: initialising CUDA (cuInit)"},
		{"hang of a copy", "FAKE_CUDA_HANG=0>1", switchbox.Faulty, "the driver does not answer: copying from GPU 0 to GPU 1"},
		{"crash of NVML", "FAKE_NVML_CRASH=nvmlInit_v2", switchbox.Skipped, "gpucheck crashed in the driver: "},
		{"crash of CUDA", "FAKE_CUDA_CRASH=cuDevicePrimaryCtxRetain", switchbox.Skipped, "gpucheck crashed in the driver: "},
		{"crash in a copy", "FAKE_CUDA_CRASH=0>1", switchbox.Skipped, "gpucheck crashed in the driver: "},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := gpucheck(t, dir, c.knob, "--pairs=0:1", "--timeout=8s")
			require.Equal(t, c.state, r.State, "%s: %s", r.Reason, texts(r))
			require.Contains(t, r.Reason, c.want)
		})
	}
}

func TestHangIsAnExitStatusOfItsOwn(t *testing.T) {
	t.Parallel()
	dir := libraries(t, false)
	path, err := binary()
	require.NoError(t, err)
	cmd := exec.Command(path, "--timeout=1s")
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+dir, "FAKE_NVML_HANG=nvmlDeviceGetUUID")
	out, err := cmd.Output()
	exit, ok := errors.AsType[*exec.ExitError](err)
	require.True(t, ok)
	require.Equal(t, exitTimeout, exit.ExitCode())
	require.Contains(t, string(out), "faulty: the driver does not answer: asking GPU 0 for Identity")
}

func TestOldDrivers(t *testing.T) {
	t.Parallel()
	r := gpucheck(t, libraries(t, false, "-DOLD"), "", "--level=links")
	require.Equal(t, switchbox.OK, r.State, "%s: %s", r.Reason, texts(r))
	require.Len(t, r.Devices, 4)
	require.Contains(t, r.Devices[0].Unsupported, "Fabric")
	r = gpucheck(t, libraries(t, false, "-DANCIENT"), "", "--level=links")
	require.Equal(t, switchbox.Skipped, r.State)
	require.Contains(t, r.Reason, "the NVIDIA driver is too old for gpucheck: ")
	require.Contains(t, r.Reason, "undefined symbol: nvmlInit")
}

// An image with the management library alone, as `NVIDIA_DRIVER_CAPABILITIES=utility` makes it.
func TestWithoutCUDA(t *testing.T) {
	t.Parallel()
	r := gpucheck(t, libraries(t, false), "", "--level=copy")
	require.Equal(t, switchbox.Skipped, r.State)
	require.Contains(t, r.Reason,
		"nothing was copied: no usable CUDA driver: libcuda.so.1: cannot open shared object file")
	require.Len(t, r.Devices, 4)
}

// newestGlibc is what images must have; docs/tasks/gpucheck.md names it. Debian 12 builds against 2.36, and what is
// used of that has been there since 2.34.
const newestGlibc = 34

func TestGlibcThatIsNeeded(t *testing.T) {
	t.Parallel()
	path, err := binary()
	require.NoError(t, err)
	f, err := elf.Open(path)
	require.NoError(t, err)
	defer f.Close()
	symbols, err := f.ImportedSymbols()
	require.NoError(t, err)
	newest := 0
	for _, s := range symbols {
		if m := regexp.MustCompile(`^GLIBC_2\.(\d+)`).FindStringSubmatch(s.Version); m != nil {
			n, _ := strconv.Atoi(m[1])
			newest = max(newest, n)
		}
	}
	t.Logf("gpucheck needs glibc 2.%d", newest)
	require.Positive(t, newest)
	require.LessOrEqual(t, newest, newestGlibc, "say so in docs/tasks/gpucheck.md")
	needed, err := f.ImportedLibraries()
	require.NoError(t, err)
	for _, library := range needed {
		require.True(t, slices.ContainsFunc([]string{"libc.so", "libdl.so", "libpthread.so", "libresolv.so", "ld-linux"},
			func(prefix string) bool { return strings.HasPrefix(library, prefix) }), "%s is needed to start", library)
	}
}
