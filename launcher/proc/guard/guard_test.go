package guard

import (
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestArguments(t *testing.T) {
	for _, args := range [][]string{{"x"}, {""}, {"dlrover-run", "", "a b", "ä\n"}, {"x", strings.Repeat("y", 1<<20)}} {
		fd, err := newWill(args, false)
		require.NoError(t, err)
		got, err := readArguments(fd)
		require.NoError(t, err)
		require.Equal(t, args, got)
		require.NoError(t, syscall.Close(fd))
	}
}

// Nothing but the guard's own file makes a process a launcher.
func TestForeignArguments(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "")
	require.NoError(t, err)
	defer f.Close()
	_, err = f.WriteString(strings.Repeat("x", 2*willSize))
	require.NoError(t, err)
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	defer w.Close()
	for _, fd := range []int{int(f.Fd()), int(r.Fd()), 1 << 20} {
		_, err := readArguments(fd)
		require.Error(t, err)
		require.Nil(t, inherited([]string{Name, strconv.Itoa(fd) + ",4"}))
	}
	for _, args := range [][]string{
		nil, {Name}, {Name, ""}, {Name, "3"}, {Name, "3,4,5"}, {Name, "3,4", "x"}, {"x", "3,4"},
	} {
		require.Nil(t, inherited(args))
	}
}

func TestWill(t *testing.T) {
	fd, err := newWill([]string{"x"}, true)
	require.NoError(t, err)
	defer syscall.Close(fd)
	check := func(cgroup string, heirs ...int) {
		t.Helper()
		c, h := readWill(fd)
		require.Equal(t, cgroup, c)
		require.Len(t, h, len(heirs))
		for _, pid := range heirs {
			require.True(t, h[pid])
		}
	}
	check("")
	writeWill(fd, "/sys/fs/cgroup/a b", []int{12, 345})
	check("/sys/fs/cgroup/a b", 12, 345)
	writeWill(fd, "", []int{7})
	check("", 7)
	writeWill(fd, strings.Repeat("x", willSize), nil)
	check("", 7)
	writeWill(fd, "", nil)
	check("")
}

func FuzzNumbers(f *testing.F) {
	f.Add([]byte("12 345 x 6"))
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, n := range numbers(text) {
			require.Contains(t, string(text), strconv.Itoa(n))
			require.GreaterOrEqual(t, n, 0)
		}
	})
}
