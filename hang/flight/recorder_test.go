//go:build linux

package flight

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/launcher/torchpython"
)

func nothing(string) (string, bool) { return "", false }

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func recorder(t *testing.T) (*Recorder, string) {
	dir := t.TempDir()
	return New(dir, dir, nothing), filepath.Join(dir, "flight_rank_")
}

// listen makes the fifo of rank 0 and opens it as PyTorch does. It reads nothing.
func listen(t *testing.T, prefix string) *os.File {
	require.NoError(t, unix.Mkfifo(prefix+"0.pipe", 0o600))
	fd, err := unix.Open(prefix+"0.pipe", unix.O_RDONLY|unix.O_NONBLOCK, 0)
	require.NoError(t, err)
	f := os.NewFile(uintptr(fd), "fifo")
	t.Cleanup(func() { f.Close() })
	return f
}

// answer is a worker that waits to be asked and then calls write.
func answer(t *testing.T, prefix string, write func(file string)) {
	f := listen(t, prefix)
	done := make(chan struct{})
	go func() {
		defer close(done)
		asked := make([]byte, 128)
		for {
			if n, _ := f.Read(asked); n > 0 {
				write(prefix + "0")
				return
			}
		}
	}()
	t.Cleanup(func() { <-done })
}

func TestRead(t *testing.T) {
	r, prefix := recorder(t)
	old := []byte(made(collective("0", 1, "completed")))
	require.NoError(t, os.WriteFile(prefix+"0", old, 0o600))
	whole := file(t, "torch2.15-gloo.pickle")
	answer(t, prefix, func(file string) {
		_ = os.WriteFile(file, whole[:len(whole)/2], 0o600) // seen in the middle of its writing
		time.Sleep(3 * poll)
		_ = os.WriteFile(file, whole, 0o600)
	})
	f, err := r.Read(testContext(t), 0)
	require.NoError(t, err)
	require.Len(t, f.Entries, 3, "not the old dump, and no half one")
	again, err := r.Load(0)
	require.NoError(t, err)
	require.Equal(t, f, again)
}

func TestNobodyListens(t *testing.T) {
	r, prefix := recorder(t)
	_, err := r.Read(testContext(t), 0)
	require.ErrorIs(t, err, errNone, "no fifo")
	require.NoError(t, listen(t, prefix).Close())
	_, err = r.Read(testContext(t), 0)
	require.ErrorIs(t, err, errNone, "its worker has ended")
}

func TestNoAnswer(t *testing.T) {
	r, prefix := recorder(t)
	listen(t, prefix)
	require.NoError(t, os.WriteFile(prefix+"0", []byte("an old one"), 0o600))
	ctx, cancel := context.WithTimeout(t.Context(), 3*poll)
	defer cancel()
	_, err := r.Read(ctx, 0)
	require.ErrorContains(t, err, "rank 0 was asked for a dump")
}

func TestAFullFifoIsAskedAlready(t *testing.T) {
	_, prefix := recorder(t)
	const size = 4096
	_, err := unix.FcntlInt(listen(t, prefix).Fd(), unix.F_SETPIPE_SZ, size)
	require.NoError(t, err)
	for range size + 10 {
		require.NoError(t, trigger(prefix+"0.pipe"))
	}
}

// What lies where the fifo should be is not written to.
func TestOnlyFifosAreWritten(t *testing.T) {
	r, prefix := recorder(t)
	precious := filepath.Join(t.TempDir(), "precious")
	require.NoError(t, os.WriteFile(precious, []byte("data"), 0o600))
	require.NoError(t, os.Symlink(precious, prefix+"0.pipe"))
	_, err := r.Read(testContext(t), 0)
	require.ErrorContains(t, err, "ask for a dump")
	require.NoError(t, os.Rename(precious, prefix+"1.pipe"))
	_, err = r.Read(testContext(t), 1)
	require.ErrorContains(t, err, "is not a FIFO")
	b, err := os.ReadFile(prefix + "1.pipe")
	require.NoError(t, err)
	require.Equal(t, "data", string(b))
}

func TestLoadOnlyFiles(t *testing.T) {
	r, prefix := recorder(t)
	_, err := r.Load(0)
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, unix.Mkfifo(prefix+"1", 0o600))
	_, err = r.Load(1)
	require.ErrorContains(t, err, "not a regular file")
}

func TestEnviron(t *testing.T) {
	require.Equal(t, []string{
		"TORCH_FR_BUFFER_SIZE=2000", "TORCH_NCCL_TRACE_BUFFER_SIZE=2000",
		"TORCH_FR_DUMP_ON_TIMEOUT=1", "TORCH_NCCL_DUMP_ON_TIMEOUT=1",
		"TORCH_FR_DUMP_TEMP_FILE=/d/flight_rank_", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/d/flight_rank_",
		"TORCH_NCCL_DEBUG_INFO_PIPE_FILE=/p/flight_rank_",
	}, New("/p", "/d", nothing).Environ())
}

func TestTheUsersEnvironmentCounts(t *testing.T) {
	dir := t.TempDir()
	user := map[string]string{
		"TORCH_NCCL_TRACE_BUFFER_SIZE": "50", "TORCH_FR_DUMP_ON_TIMEOUT": "0",
		"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": filepath.Join(dir, "mine"),
		"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": filepath.Join(dir, "fifo"),
	}
	r := New("/nowhere", "/nowhere", func(name string) (string, bool) { v, ok := user[name]; return v, ok })
	require.Empty(t, r.Environ())
	require.NoError(t, unix.Mkfifo(filepath.Join(dir, "fifo7.pipe"), 0o600))
	fd, err := unix.Open(filepath.Join(dir, "fifo7.pipe"), unix.O_RDONLY|unix.O_NONBLOCK, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	time.AfterFunc(poll, func() { _ = os.WriteFile(filepath.Join(dir, "mine7"), []byte(`{"entries": []}`), 0o600) })
	f, err := r.Read(testContext(t), 7)
	require.NoError(t, err)
	require.Empty(t, f.Entries)
}

// TestPyTorch asks PyTorch's own recorder, by its variables and into its file.
func TestPyTorch(t *testing.T) {
	python := torchpython.Chosen()
	if testing.Short() || python == "" {
		t.Skip("SKIPPED: THE FLIGHT RECORDER IS NOT TESTED with PyTorch: it takes half a minute, and TORCH_PYTHON (make " +
			"e2e-torch2 sets it)")
	}
	r, _ := recorder(t)
	cmd := exec.Command(python, "testdata/worker.py")
	cmd.Env = append(append(os.Environ(), r.Environ()...), "CUDA_VISIBLE_DEVICES=")
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, _ := bufio.NewReader(out).ReadString('\n')
	if line != "ready\n" {
		_ = cmd.Wait()
		t.Skipf("SKIPPED: THE FLIGHT RECORDER IS NOT TESTED with PyTorch: %s", errs.String())
	}
	f, err := r.Read(testContext(t), 0)
	require.NoError(t, err)
	require.NoError(t, cmd.Wait(), errs.String())
	require.Len(t, f.Entries, 1)
	e := f.Entries[0]
	require.Equal(t, "all_reduce", e.Op)
	require.Equal(t, uint64(3), e.Seq)
	require.Equal(t, "2x3", e.Sizes)
	require.Equal(t, completed, e.State)
}
