package ckptd

import (
	"errors"
	"io"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWrongOptionsLeaveNothingBehind(t *testing.T) {
	shm := t.TempDir()
	for _, c := range []struct {
		want string
		args []string
	}{
		{"--job is required", nil},
		{"--job=a/b: need 1 to 128 letters, digits and ._-", []string{"--job=a/b"}},
		{"--write-rate: size '3x' is not a whole number", []string{"--job=a", "--write-rate=3x"}},
		{"--master needs --run", []string{"--job=a", "--master=node0:50001"}},
		{"--replicas=x: need a whole number; see checkpointd --help", []string{"--job=a", "--replicas=x"}},
		{"--hang=auto: need outside or off", []string{"--job=a", "--hang=auto"}},
		{"--hang-action=kill: need report, restart or stop", []string{"--job=a", "--hang=outside", "--hang-action=kill"}},
		{"--hang-action=stop needs --hang=outside", []string{"--job=a", "--hang-action=stop"}},
		{"unknown option --nope", []string{"--job=a", "--nope"}},
		{`unexpected argument "b"`, []string{"--job=a", "b"}},
	} {
		err := run(app(io.Discard), append([]string{"--shm-dir=" + shm}, c.args...))
		require.ErrorContains(t, err, c.want)
		_, late := errors.AsType[*runError](err)
		require.False(t, late, "an error of the command line: %v", err)
		left, err := os.ReadDir(shm)
		require.NoError(t, err)
		require.Empty(t, left)
	}
}
