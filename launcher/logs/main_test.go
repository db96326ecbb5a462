package logs

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/testkit"
)

// helperEnv makes the test binary act as another process: its value is the name of the helper.
const helperEnv = "LOGS_TEST_HELPER"

func TestMain(m *testing.M) {
	switch os.Getenv(helperEnv) {
	case "":
		goleak.VerifyTestMain(m)
	case "flood":
		helperFlood()
	case "parts":
		helperParts()
	case "launcher":
		helperLauncher()
	}
}

// helperFlood writes argv[2] numbered lines with argv[1] in them, padded to argv[3] bytes, argv[4] bytes per write.
func helperFlood() {
	n, _ := strconv.Atoi(os.Args[2])
	width, _ := strconv.Atoi(os.Args[3])
	size, _ := strconv.Atoi(os.Args[4])
	w := bufio.NewWriterSize(os.Stdout, size)
	for i := range n {
		head := os.Args[1] + " " + strconv.Itoa(i)
		w.WriteString(head)
		w.WriteString(strings.Repeat(".", max(0, width-1-len(head))))
		w.WriteByte('\n')
	}
	w.Flush()
}

// helperParts writes argv[2] numbered lines with argv[1] in them to stdout and to stderr at the same time, each line in
// four writes.
func helperParts() {
	n, _ := strconv.Atoi(os.Args[2])
	var wg sync.WaitGroup
	for f, tag := range map[*os.File]string{os.Stdout: "o", os.Stderr: "e"} {
		wg.Go(func() {
			for i := range n {
				for _, part := range []string{os.Args[1] + tag, " ", strconv.Itoa(i), "\n"} {
					f.WriteString(part)
				}
			}
		})
	}
	wg.Wait()
}

func helper(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), helperEnv+"="+name)
	return cmd
}

func sh(script string) *exec.Cmd { return exec.Command("/bin/sh", "-c", script) }

// rig is a Logs with what a test needs to look at.
type rig struct {
	*Logs
	out, err, log *testkit.Buffer
}

func newRig(t *testing.T, cfg Config) *rig {
	t.Helper()
	r := &rig{out: &testkit.Buffer{}, err: &testkit.Buffer{}, log: &testkit.Buffer{}}
	if cfg.Stdout == nil {
		cfg.Stdout = r.out
	}
	if cfg.Stderr == nil {
		cfg.Stderr = r.err
	}
	cfg.Logger = slog.New(slog.NewTextHandler(r.log, nil))
	l, err := New(cfg)
	require.NoError(t, err)
	r.Logs = l
	t.Cleanup(func() { l.Close() })
	return r
}

func (r *rig) begin(t *testing.T) *Attempt {
	t.Helper()
	a, err := r.Begin(0)
	require.NoError(t, err)
	return a
}

func worker(t *testing.T, a *Attempt, rank int) *Worker {
	t.Helper()
	w, err := a.Worker(WorkerID{LocalRank: rank, Rank: rank, Role: "default"})
	require.NoError(t, err)
	return w
}

func start(t *testing.T, w *Worker, cmd *exec.Cmd) {
	t.Helper()
	cmd.Stdout, cmd.Stderr = w.Stdout(), w.Stderr()
	err := cmd.Start()
	w.Started()
	require.NoError(t, err)
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
}

func run(t *testing.T, w *Worker, cmd *exec.Cmd) {
	t.Helper()
	start(t, w, cmd)
	require.NoError(t, cmd.Wait())
	w.Drain(time.Minute)
}

func all(int) Std { return Stdout | Stderr }

func read(t *testing.T, elem ...string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(elem...))
	require.NoError(t, err)
	return string(b)
}

// pipe is a console with a real file descriptor.
func pipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	t.Cleanup(func() {
		r.Close()
		w.Close()
	})
	return r, w
}

// expect reads want from r, which must say it within ten seconds.
func expect(t *testing.T, r *os.File, want string) {
	t.Helper()
	require.NoError(t, r.SetReadDeadline(time.Now().Add(10*time.Second)))
	b := make([]byte, len(want))
	n, err := io.ReadFull(r, b)
	require.NoError(t, err, "got %q", b[:n])
	require.Equal(t, want, string(b))
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	require.Eventually(t, ok, 20*time.Second, 5*time.Millisecond, what)
}

// numbered checks a stream of "<tag> 0", "<tag> 1" ... lines of several tags, without keeping them.
type numbered struct {
	prefix func(tag string) string
	next   map[string]int
	rest   []byte
	err    error
}

func (c *numbered) Write(p []byte) (int, error) {
	c.rest = append(c.rest, p...)
	for c.err == nil {
		line, rest, ok := bytes.Cut(c.rest, []byte("\n"))
		if !ok {
			break
		}
		c.err = c.check(string(line))
		c.rest = rest
	}
	return len(p), nil
}

func (c *numbered) check(line string) error {
	for tag, n := range c.next {
		if rest, ok := strings.CutPrefix(line, c.prefix(tag)+tag+" "+strconv.Itoa(n)); ok && strings.Trim(rest, ".") == "" {
			c.next[tag]++
			return nil
		}
	}
	return fmt.Errorf("line %q does not come next in %v", line, c.next)
}
