package guard

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestArguments(t *testing.T) {
	for _, args := range [][]string{{"x"}, {""}, {"dlrover-run", "", "a b", "ä\n"}, {"x", strings.Repeat("y", 1<<20)}} {
		t.Setenv(TokenVariable, "")
		fd, err := newState(args, "a token", false)
		require.NoError(t, err)
		got, err := readArguments(fd)
		require.NoError(t, err)
		require.Equal(t, args, got)
		require.Equal(t, "a token", os.Getenv(TokenVariable))
		require.NoError(t, syscall.Close(fd))
	}
}

// Nothing but the guard's own file makes a process a launcher.
func TestForeignArguments(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "")
	require.NoError(t, err)
	defer f.Close()
	_, err = f.WriteString(strings.Repeat("x", 2*stateSize))
	require.NoError(t, err)
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	defer w.Close()
	for _, fd := range []int{int(f.Fd()), int(r.Fd()), 1 << 20} {
		_, err := readArguments(fd)
		require.Error(t, err)
		require.Nil(t, inherited([]string{processName, strconv.Itoa(fd) + ",4"}))
	}
	for _, args := range [][]string{
		nil, {processName}, {processName, ""}, {processName, "3"}, {processName, "3,4,5"}, {processName, "3,4", "x"},
		{"x", "3,4"},
	} {
		require.Nil(t, inherited(args))
	}
}

func TestState(t *testing.T) {
	fd, err := newState([]string{"x"}, "", true)
	require.NoError(t, err)
	defer syscall.Close(fd)
	check := func(cgroup string, survivors ...int) {
		t.Helper()
		c, h := readState(fd)
		require.Equal(t, cgroup, c)
		require.Len(t, h, len(survivors))
		for _, pid := range survivors {
			require.True(t, h[pid])
		}
	}
	check("")
	writeState(fd, "/sys/fs/cgroup/a b", []int{12, 345})
	check("/sys/fs/cgroup/a b", 12, 345)
	writeState(fd, "", []int{7})
	check("", 7)
	writeState(fd, strings.Repeat("x", stateSize), nil)
	check("", 7)
	writeState(fd, "", nil)
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

// TestConceal has a child look at its own environment: that of a test is no other's.
func TestConceal(t *testing.T) {
	const token, other = "a-token-0123456789", "DLROVER_TOKEN_FILE=/run/token"
	if os.Getenv("TEST_CONCEAL") != "" {
		Conceal()
		Conceal()
		shown, err := os.ReadFile("/proc/self/environ")
		require.NoError(t, err)
		require.NotContains(t, string(shown), token)
		require.Contains(t, string(shown), other)
		require.Contains(t, string(shown), "TEST_CONCEAL=yes")
		require.Equal(t, token, os.Getenv(TokenVariable))
		env, kept := withoutToken(os.Environ())
		require.Equal(t, token, kept)
		require.Equal(t, []string{"TEST_CONCEAL=yes", other, "X="}, env)
		return
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestConceal$", "-test.v")
	cmd.Env = []string{"TEST_CONCEAL=yes", TokenVariable + "=" + token, other, "X="}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "--- PASS: TestConceal")
}
