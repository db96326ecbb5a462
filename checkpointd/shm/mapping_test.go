package shm

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestMapFile(t *testing.T) {
	maps := func() int {
		b, err := os.ReadFile("/proc/self/maps")
		require.NoError(t, err)
		return strings.Count(string(b), "/"+t.Name()+"\n")
	}
	f, err := os.Create(t.TempDir() + "/" + t.Name())
	require.NoError(t, err)
	defer f.Close()
	content := bytes.Repeat([]byte("segment."), 3<<17) // 3 MiB
	_, err = f.Write(content)
	require.NoError(t, err)
	var all [][]byte
	for range 3 { // wherever the kernel puts it
		mem, err := mapFile(int(f.Fd()), int64(len(content)))
		require.NoError(t, err)
		require.Zero(t, uintptr(unsafe.Pointer(&mem[0]))%hugeSize)
		require.True(t, bytes.Equal(content, mem))
		all = append(all, mem)
	}
	require.Equal(t, 3, maps())
	for _, mem := range all {
		require.NoError(t, unmap(mem))
	}
	require.Zero(t, maps())
	_, err = mapFile(-1, pageSize)
	require.Error(t, err)
}

func TestAllocate(t *testing.T) {
	const size = 5<<20 + pageSize
	f, err := os.CreateTemp("/dev/shm", "dlrover-test-")
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, os.Remove(f.Name()))
	require.NoError(t, f.Truncate(size))
	mem, err := mapFile(int(f.Fd()), size)
	require.NoError(t, err)
	defer func() { require.NoError(t, unmap(mem)) }()
	require.NoError(t, allocate(int(f.Fd()), mem))
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(int(f.Fd()), &st))
	require.EqualValues(t, size, st.Blocks*512)
	copy(mem, bytes.Repeat([]byte{1}, size))

	if unix.Madvise(mem[:hugeSize], unix.MADV_COLLAPSE) != nil {
		t.Skip("HUGE PAGES ARE NOT TESTED: this kernel makes none (Linux 6.1 does)")
	}
	smaps, err := os.ReadFile("/proc/self/smaps")
	require.NoError(t, err)
	ours := regexp.MustCompile(fmt.Sprintf(`(?s)%x-.*?(ShmemPmdMapped|FilePmdMapped): +(\d+) kB`,
		&mem[0])).FindSubmatch(smaps)
	require.NotNil(t, ours)
	require.Equal(t, "4096", string(ours[2]))
}
