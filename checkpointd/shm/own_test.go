package shm

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// locked holds the lock of a directory like another process, with text as the owner.
func locked(t *testing.T, dir string, how int, text string) *os.File {
	f, err := os.OpenFile(filepath.Join(dir, ownerFile), os.O_RDWR|os.O_CREATE, 0o600)
	require.NoError(t, err)
	require.NoError(t, unix.Flock(int(f.Fd()), how))
	_, err = f.WriteString(text)
	require.NoError(t, err)
	return f
}

func TestLiveOwnerIsReportedAtOnce(t *testing.T) {
	dir := t.TempDir()
	f, err := lockOwner(dir)
	require.NoError(t, err)
	defer f.Close()
	synctest.Test(t, func(t *testing.T) { // its clock moves only in sleeps
		begun := time.Now()
		_, err := lockOwner(dir)
		require.ErrorIs(t, err, ErrOwned)
		require.Zero(t, time.Since(begun))
	})
}

func TestOwnerIsWaitedFor(t *testing.T) {
	gone := exec.Command("true")
	require.NoError(t, gone.Run())
	for name, c := range map[string]struct {
		how     int
		text    string
		patient bool
	}{
		"that is ending":                {unix.LOCK_EX, fmt.Sprintf("%d %s", gone.Process.Pid, pidNamespace()), true},
		"of another PID namespace":      {unix.LOCK_EX, fmt.Sprintf("%d 7", os.Getpid()), false},
		"that has not signed":           {unix.LOCK_EX, "", false},
		"that is none and only looking": {unix.LOCK_SH, fmt.Sprintf("%d %s", os.Getpid(), pidNamespace()), false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			f := locked(t, dir, c.how, c.text)
			synctest.Test(t, func(t *testing.T) {
				begun := time.Now()
				_, err := lockOwner(dir)
				require.ErrorIs(t, err, ErrOwned)
				waited := time.Since(begun)
				if c.patient {
					require.Greater(t, waited, time.Second)
				} else {
					require.InDelta(t, 100*time.Millisecond, waited, float64(50*time.Millisecond))
				}
				time.AfterFunc(35*time.Millisecond, func() { f.Close() })
				own, err := lockOwner(dir)
				require.NoError(t, err)
				require.NoError(t, own.Close())
			})
		})
	}
}

func TestEnding(t *testing.T) {
	stat, err := os.ReadFile("/proc/self/stat")
	require.NoError(t, err)
	require.False(t, ending(string(stat)))
	with := func(i int, v string) string {
		f := statFields(string(stat))
		f[i] = v
		return "1 (a) b) " + strings.Join(f, " ")
	}
	require.True(t, ending(with(0, "Z")))
	require.True(t, ending(with(6, "4194564")), "PF_EXITING")
	require.True(t, ending(with(28, "256")), "SIGKILL is pending")
	require.False(t, ending(with(28, "16384")), "SIGTERM is")
	require.False(t, ending("1 (a"))
}

func TestValidKey(t *testing.T) {
	for _, key := range []string{"a", "_", "0-1", "Run.7", strings.Repeat("x", 128)} {
		require.True(t, ValidKey(key), key)
	}
	for _, key := range []string{"", ".a", "-a", "a/b", "a b", "\u00e9", "a\n", strings.Repeat("x", 129)} {
		require.False(t, ValidKey(key), key)
	}
}
