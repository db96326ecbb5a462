package ctl

import (
	"bytes"
	"context"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// ctl runs dlroverctl without an environment.
func ctl(stdout io.Writer, args ...string) int {
	p := &program{stdout: stdout, stderr: io.Discard, env: func(string) (string, bool) { return "", false }, now: time.Now}
	return p.run(context.Background(), append([]string{"dlroverctl"}, args...))
}

func TestHelpAndVersion(t *testing.T) {
	for _, c := range []struct {
		arg, want string
		code      int
	}{{"--help", "  checkpoints verify DIR [STEP]  ", 0}, {"--version", "dlroverctl", 0}, {"dance", "", 2}} {
		var out bytes.Buffer
		require.Equal(t, c.code, ctl(&out, c.arg))
		require.Contains(t, out.String(), c.want)
	}
}
