package pystack

import (
	"bufio"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Thousands of reads harm nobody, whose threads come and go meanwhile.
func TestReadsDoNoHarm(t *testing.T) {
	t.Parallel()
	reads := 2_000 // of each interpreter
	if testing.Short() {
		reads = 200
	}
	somePythons(t, func(t *testing.T, p python) {
		cmd := exec.Command(p.path, "testdata/busy.py")
		in, err := cmd.StdinPipe()
		require.NoError(t, err)
		pipe, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		ended := false
		t.Cleanup(func() {
			if !ended {
				_ = cmd.Process.Kill()
				_ = cmd.Wait()
			}
		})
		out := bufio.NewReader(pipe)
		_, err = out.ReadString('\n')
		require.NoError(t, err)

		r, whole := New(), 0
		for i := range reads {
			want := []Want{}
			if i%10 == 0 {
				want = []Want{Native}
			}
			s, err := r.Read(t.Context(), cmd.Process.Pid, want...)
			require.NoError(t, err)
			for _, th := range s.Threads {
				if n := len(th.Python); n > 0 && th.Python[n-1].Func == "_bootstrap" {
					whole++
				}
			}
			if i%50 == 0 {
				time.Sleep(time.Millisecond)
			}
		}
		require.NoError(t, in.Close())
		turns, err := out.ReadString('\n')
		require.NoError(t, err)
		require.NotEqual(t, "0", strings.TrimSpace(turns))
		require.NoError(t, cmd.Wait())
		ended = true
		t.Logf("%d reads, %d whole stacks of threads, %s turns", reads, whole, strings.TrimSpace(turns))
		require.Greater(t, whole, reads) // of at least two threads
	})
}
