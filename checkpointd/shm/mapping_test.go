package shm

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
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
