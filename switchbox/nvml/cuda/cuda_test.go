//go:build cgo && linux

package cuda

import (
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/switchbox/nvml/fakedriver"
)

// fake builds the stand-in once: a library that was loaded stays.
var fake = struct {
	sync.Mutex
	path string
}{}

func TestMain(m *testing.M) {
	code := m.Run()
	os.RemoveAll(filepath.Dir(fake.path))
	os.Exit(code)
}

func open(t *testing.T, knobs ...string) *Driver {
	t.Helper()
	for i := 0; i < len(knobs); i += 2 {
		t.Setenv(knobs[i], knobs[i+1])
	}
	fake.Lock()
	defer fake.Unlock()
	if fake.path == "" {
		dir, err := os.MkdirTemp("", "fakecuda")
		require.NoError(t, err)
		fake.path = fakedriver.Build(t, dir, fakedriver.CUDA)
	}
	d, err := Open(fake.path)
	require.NoError(t, err)
	return d
}

func pair(t *testing.T, d *Driver) (a, b *GPU) {
	t.Helper()
	a, err := d.GPU("GPU 0", "0000:10:00.0")
	require.NoError(t, err)
	t.Cleanup(a.Close)
	b, err = d.GPU("GPU 1", "0000:11:00.0")
	require.NoError(t, err)
	t.Cleanup(b.Close)
	return a, b
}

func TestCopyMeasuresAndVerifies(t *testing.T) {
	d := open(t)
	require.Equal(t, "12.4", d.Version())
	a, b := pair(t, d)
	require.EqualValues(t, small, a.Bytes(), "200 MB are free")
	direct, err := Reach(a, b)
	require.NoError(t, err)
	require.True(t, direct)
	_, err = Reach(a, b)
	require.NoError(t, err, "once more is no error")
	for _, p := range [][2]*GPU{{a, b}, {b, a}, {a, a}} {
		r, err := Copy(p[0], p[1])
		require.NoError(t, err)
		require.InEpsilon(t, 400_000, r.MBps, 0.001)
		require.Positive(t, r.Low)
		require.EqualValues(t, small, r.Bytes)
		require.EqualValues(t, 52*small, r.Moved)
	}
}

func TestSlowDirectionIsSeen(t *testing.T) {
	a, b := pair(t, open(t, "FAKE_CUDA_SLOW", "0>1=8000"))
	r, err := Copy(a, b)
	require.NoError(t, err)
	require.InEpsilon(t, 8000, r.MBps, 0.001)
	r, err = Copy(b, a)
	require.NoError(t, err)
	require.InEpsilon(t, 400_000, r.MBps, 0.001)
}

func TestCorruptCopyIsNoticed(t *testing.T) {
	a, b := pair(t, open(t, "FAKE_CUDA_CORRUPT", "0>1"))
	_, err := Copy(a, b)
	var bad *Corruption
	require.ErrorAs(t, err, &bad)
	require.EqualValues(t, 1, bad.Words)
	require.EqualValues(t, small/2, bad.At)
	require.Equal(t, bad.Sent^0x10<<24, bad.Came)
	require.ErrorContains(t, err, "GPU 0 to GPU 1: 1 of 8388608 words differ, the first at byte 33554432")
	_, err = Copy(b, a)
	require.NoError(t, err)
}

// What an earlier copy left must not pass for this one's data.
func TestCopyThatDoesNothingIsNoticed(t *testing.T) {
	a, b := pair(t, open(t))
	_, err := Copy(a, b)
	require.NoError(t, err)
	require.NoError(t, b.spoil(b.bytes))
	require.ErrorAs(t, b.verify(a, b.bytes), new(*Corruption))
}

func TestNoPeerAccess(t *testing.T) {
	a, b := pair(t, open(t, "FAKE_CUDA_NO_PEER", "1"))
	direct, err := Reach(a, b)
	require.NoError(t, err)
	require.False(t, direct)
}

func TestErrorsOfADevice(t *testing.T) {
	for _, c := range []struct{ name, pci, knob, value, want string }{
		{"hidden", "0000:7f:00.0", "FAKE_GPUS", "2",
			"GPU 0: CUDA does not show this device: cuDeviceGetByPCIBusId: CUDA_ERROR_INVALID_DEVICE"},
		{"short of memory", "0000:10:00.0", "FAKE_CUDA_FREE_MB", "100",
			"too little memory is free: 100 of 81920 MiB, and 192 are needed"},
		{"no room for a context", "0000:10:00.0", "FAKE_CUDA_FAIL", "cuDevicePrimaryCtxRetain=2",
			"too little memory is free: cuDevicePrimaryCtxRetain"},
		{"allocation", "0000:10:00.0", "FAKE_CUDA_FAIL", "cuMemAlloc_v2=2", "too little memory is free: cuMemAlloc"},
		{"unknown code", "0000:10:00.0", "FAKE_CUDA_FAIL", "cuMemcpyHtoD_v2=4711", "cuMemcpyHtoD: CUDA error 4711"},
		{"lost context", "0000:10:00.0", "FAKE_CUDA_FAIL", "cuCtxSetCurrent=201",
			"cuCtxSetCurrent: CUDA_ERROR_INVALID_CONTEXT"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := open(t, c.knob, c.value)
			_, err := d.GPU("GPU 0", c.pci)
			require.ErrorContains(t, err, c.want)
		})
	}
}

// Fabric manager is not running: the driver's own word for it must reach the user.
func TestOpenTellsWhatTheDriverSays(t *testing.T) {
	open(t)
	t.Setenv("FAKE_CUDA_FAIL", "cuInit=802")
	_, err := Open(fake.path)
	require.ErrorContains(t, err, "cuInit: CUDA_ERROR_SYSTEM_NOT_READY (CUDA error 802)")
	require.NotErrorIs(t, err, ErrNoDriver)
	t.Setenv("FAKE_CUDA_FAIL", "")
	t.Setenv("FAKE_GPUS", "0")
	_, err = Open(fake.path)
	require.ErrorIs(t, err, ErrNoDriver)
}

func TestOpenWithoutAUsableLibrary(t *testing.T) {
	_, err := Open("libcuda-that-is-not-there.so.1")
	require.ErrorIs(t, err, ErrNoDriver)
	require.ErrorContains(t, err, "libcuda-that-is-not-there.so.1: cannot open shared object file")
	old := fakedriver.Build(t, t.TempDir(), fakedriver.CUDA, "-DOLD")
	_, err = Open(old)
	require.ErrorIs(t, err, ErrNoDriver)
	require.ErrorContains(t, err, "has no cuMemcpyPeerAsync: the driver is too old")
	pair(t, open(t)) // what was loaded before still works
}

func TestSizeFor(t *testing.T) {
	for free, want := range map[int64]int64{
		0: 0, 2*small + spare - 1: 0, 2*small + spare: small, 2*Large + spare - 1: small, 2*Large + spare: Large,
		80 << 30: Large,
	} {
		require.Equal(t, want, sizeFor(free), free)
	}
}
