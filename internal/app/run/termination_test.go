package run

import (
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/verdict"
)

// terminationOf reads a termination message.
func terminationOf(t *testing.T, path string) (line string, m verdict.Termination) {
	t.Helper()
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	require.LessOrEqual(t, len(data), verdict.MaxTermination)
	line, rest, _ := strings.Cut(string(data), "\n")
	require.NoError(t, json.Unmarshal([]byte(rest), &m), string(data))
	return line, m
}

func TestTerminationMessage(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	path := filepath.Join(b.dir, "termination-log")
	require.NoError(t, os.WriteFile(path, []byte(strings.Repeat("old\n", 2000)), 0o600))
	b.env = append(b.env, "DLROVER_TERMINATION_LOG="+path, "POD_NAME=worker-0")

	fails := b.sh("echo 'OSError: [Errno 28] No space left on device' >&2; exit 3", "--standalone")
	require.Equal(t, 1, b.run(fails...).wait())
	line, m := terminationOf(t, path)
	require.Regexp(t,
		`^dlrover-run: job [0-9a-f]+ failed: rank 0 .* failed first: .*; class disk-full; restarts used 0 of 0$`,
		line)
	zero, three := 0, 3
	require.Equal(t, verdict.Termination{RunID: m.RunID, Node: "worker-0", Reason: policy.WorkerFailed.String(),
		ExitCode: 1, Class: verdict.DiskFull, Rule: verdict.FirstExit, RootRank: &zero, RootNode: "worker-0",
		RootExit: &three}, m)

	require.Equal(t, 2, b.run("--nnodes=none", "x.py").wait())
	line, m = terminationOf(t, path)
	require.Regexp(t, `^dlrover-run: error: .*nnodes`, line)
	require.Equal(t, verdict.Termination{Reason: policy.Usage.String(), ExitCode: 2}, m)

	require.Equal(t, 0, b.run(b.sh("exit 0", "--standalone")...).wait())
	line, m = terminationOf(t, path)
	require.Equal(t, policy.Success.String(), line)
	require.Equal(t, verdict.Termination{RunID: m.RunID, Node: "worker-0", Reason: policy.Success.String()}, m)

	l := b.run(b.sh(hold, "--standalone")...)
	eventually(t, "up", b.exists("up.1.0"))
	l.signal(syscall.SIGTERM)
	code := l.wait()
	line, m = terminationOf(t, path)
	require.Equal(t, "dlrover-run: job "+m.RunID+": stopped by SIGTERM", line)
	require.Equal(t, [2]any{"SIGTERM", code}, [2]any{m.Signal, m.ExitCode})

	// Whoever waits for the rendezvous is told to end, too.
	at := "localhost:" + freePort(t)
	l = b.run(b.sh("exit 0", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint="+at)...)
	eventually(t, "waits", func() bool {
		conn, err := net.Dial("tcp", at)
		return err == nil && conn.Close() == nil
	})
	l.signal(syscall.SIGINT)
	l.wait()
	_, m = terminationOf(t, path)
	require.Equal(t, "SIGINT", m.Signal)
}

// A name that leads elsewhere is not followed, and nothing that is no plain file delays the end.
func TestTerminationMessageGoesToAPlainFileOnly(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	target, link, pipe := filepath.Join(b.dir, "target"), filepath.Join(b.dir, "link"), filepath.Join(b.dir, "pipe")
	require.NoError(t, os.WriteFile(target, []byte("mine"), 0o600))
	require.NoError(t, os.Symlink(target, link))
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	for path, why := range map[string]string{
		link: "a link, which is not followed here", pipe: "not a regular file", b.dir: "is a directory",
		"/dev/null": "not a regular file", "/nosuch/x": "no such file or directory",
	} {
		l := b.start("dlrover-run", []string{"DLROVER_TERMINATION_LOG=" + path}, b.sh("exit 3", "--standalone")...)
		require.Equal(t, 1, l.wait())
		require.Contains(t, l.err.String(), "cannot write the termination message")
		require.Contains(t, l.err.String(), why)
	}
	data, err := os.ReadFile(target)
	require.NoError(t, err)
	require.Equal(t, "mine", string(data))
}
