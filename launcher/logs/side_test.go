package logs

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSideOutput(t *testing.T) {
	std := func(s Std) func(int) Std { return func(int) Std { return s } }
	const plain, prefixed = "o\ne\n", "[scheduler]:o\n[scheduler]:e\n"
	for _, tc := range []struct {
		name          string
		cfg           Config
		console, file string
		direct        bool
	}{
		{name: "default", console: prefixed},
		{name: "redirected", cfg: Config{Redirects: std(1)}, file: plain, direct: true},
		{name: "redirected and rotated", cfg: Config{Redirects: std(3), RotateSize: 1 << 20, RotateCount: 1}, file: plain},
		{name: "tee", cfg: Config{Tee: std(2)}, console: prefixed, file: plain},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.cfg.Dir = t.TempDir()
			r := newRig(t, tc.cfg)
			a := r.begin(t)
			s, err := a.Side("scheduler")
			require.NoError(t, err)
			a.Close() // the attempt may end first
			info, err := s.File().Stat()
			require.NoError(t, err)
			require.Equal(t, tc.direct, info.Mode().IsRegular())
			c := exec.Command("/bin/sh", "-c", "echo o; echo e >&2")
			c.Stdout, c.Stderr = s.File(), s.File()
			require.NoError(t, c.Run())
			s.Started()
			require.Equal(t, plain, string(s.Tail(time.Second)))
			s.Close()
			require.NoError(t, r.Close())
			require.Equal(t, tc.console, r.err.String())
			require.Empty(t, r.out.String())
			data, err := os.ReadFile(filepath.Join(a.Dir(), "scheduler.log"))
			if tc.file == "" {
				require.ErrorIs(t, err, os.ErrNotExist)
				return
			}
			require.NoError(t, err)
			require.Equal(t, tc.file, string(data))
		})
	}
}

// What runs as long as the job has its file beside the attempts.
func TestSideOutputOfTheJob(t *testing.T) {
	r := newRig(t, Config{Dir: t.TempDir(), Redirects: func(int) Std { return 3 }, Files: true})
	s, err := r.Side("tensorboard")
	require.NoError(t, err)
	_, err = s.File().WriteString("up\n")
	require.NoError(t, err)
	s.Close()
	require.Equal(t, "up\n", read(t, r.base, "tensorboard.log"))
	require.NoError(t, r.Close())
}
