package torchpython

import (
	"bufio"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

//go:embed forked.py
var forkedScript string

// Forks is an interpreter that has imported PyTorch; its forks run scripts, as an import costs two seconds of CPU. It
// is safe for concurrent use.
type Forks struct{ socket string }

// Start starts an interpreter that lives as long as the test.
func Start(t testing.TB, python string) *Forks {
	t.Helper()
	dir, err := os.MkdirTemp("", "forks-") // t.TempDir may be too long a name for a socket
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	f := &Forks{filepath.Join(dir, "socket")}
	cmd := exec.Command(python, "-c", forkedScript, f.socket)
	cmd.Env = append(os.Environ(), "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1") // a fork has the caller's thread only
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		stdin.Close()
		require.NoError(t, cmd.Wait())
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ready\n", line)
	return f
}

// Run runs a script, or -m and a module, with exactly this environment. It returns the text of both outputs and the
// exit code, which is negative for a signal. At the end of ctx the process is killed.
func (f *Forks) Run(ctx context.Context, env []string, argv ...string) (output []byte, code int, err error) {
	conn, err := net.Dial("unix", f.socket)
	if err != nil {
		return nil, 0, err
	}
	defer conn.Close()
	file, err := os.CreateTemp(filepath.Dir(f.socket), "output-")
	if err != nil {
		return nil, 0, err
	}
	defer os.Remove(file.Name())
	defer file.Close()
	vars := map[string]string{}
	for _, entry := range env {
		name, value, _ := strings.Cut(entry, "=")
		vars[name] = value
	}
	request := map[string]any{"argv": argv, "env": vars, "output": file.Name()}
	if err := json.NewEncoder(conn).Encode(request); err != nil {
		return nil, 0, err
	}
	answers := bufio.NewReader(conn)
	pid, err := number(answers)
	if err != nil {
		return nil, 0, fmt.Errorf("start %q: %w", argv, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
	defer stop()
	if code, err = number(answers); err != nil {
		return nil, 0, fmt.Errorf("wait for %q: %w", argv, err)
	}
	output, err = os.ReadFile(file.Name())
	return output, code, err
}

func number(r *bufio.Reader) (int, error) {
	line, err := r.ReadString('\n')
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(line))
}
