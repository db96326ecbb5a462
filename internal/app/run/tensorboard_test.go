package run

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTensorBoardIsFound(t *testing.T) {
	s, err := resolved(t, "--tensorboard=logs:7000 train.py", map[string]string{"PYTHON_EXEC": "python3"})
	require.NoError(t, err)
	plan, err := makePlan(&s, testHost())
	require.NoError(t, err)
	require.Equal(t, []string{"/bin/tensorboard", "--logdir", "logs", "--host", "127.0.0.1", "--port", "7000"},
		reflect.ValueOf(plan.Features["tensorboard"]).Elem().FieldByName("Argv").Interface())
	h := testHost()
	h.lookPath = func(f string) (string, error) {
		if filepath.Base(f) == "tensorboard" {
			return "", os.ErrNotExist
		}
		return "/nowhere/" + f, nil
	}
	_, err = resolvedOn(t, h, "--tensorboard=logs train.py", map[string]string{"PYTHON_EXEC": "python3"})
	require.ErrorContains(t, err, "--tensorboard=logs: there is no TensorBoard in PATH, and none of the workers' Python "+
		"/nowhere/python3; install it (pip install tensorboard), or leave the option out")
}

// board puts a TensorBoard in PATH that does what the script says.
func (b *bench) board(script string) (env string) {
	b.t.Helper()
	dir := filepath.Join(b.dir, "bin")
	require.NoError(b.t, os.MkdirAll(dir, 0o755))
	require.NoError(b.t, writeProgram(filepath.Join(dir, "tensorboard"), []byte("#!/bin/sh\n"+script+"\n")))
	return "PATH=" + dir + ":" + os.Getenv("PATH")
}

// TensorBoard outlives the epochs, is not a worker, and ends with the job.
func TestTensorBoardRunsAsLongAsTheJob(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	port := freePort(t)
	path := b.board(`echo "$$ $@" >> $DIR/board; echo serving; exec sleep 600`)
	l := b.start("dlrover-run", []string{path, "PYTHON_EXEC=/nowhere/python3"}, b.sh(
		`while [ ! -s $DIR/board ]; do sleep 0.02; done; [ $TORCHELASTIC_RESTART_COUNT = 1 ]`, "--standalone",
		"--max-restarts=1", "--log-dir="+b.dir+"/logs", "--redirects=3", "--tensorboard=runs:"+port)...)
	require.Equal(t, 0, l.wait(), l.err.String())
	line := string(read(t, filepath.Join(b.dir, "board")))
	require.Equal(t, 1, strings.Count(line, "\n"), "one start")
	pid, args, _ := strings.Cut(strings.TrimSpace(line), " ")
	require.Equal(t, "--logdir runs --host 127.0.0.1 --port "+port, args)
	require.NoDirExists(t, "/proc/"+pid)
	found, err := filepath.Glob(filepath.Join(b.dir, "logs", "*", "tensorboard.log"))
	require.NoError(t, err)
	require.Len(t, found, 1)
	require.Equal(t, "serving\n", string(read(t, found[0])))
}

func TestTensorBoardThatEndsIsStartedAgain(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	path := b.board(`echo x >> $DIR/board; [ -e $DIR/two ] && exec sleep 600; : > $DIR/two; echo "no logs" >&2; exit 3`)
	l := b.start("dlrover-run", []string{path}, b.sh(
		`while [ "$(cat $DIR/board)" != "x
x" ]; do sleep 0.02; done`, "--standalone", "--tensorboard=runs:"+freePort(t))...)
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Contains(t, l.err.String(), "TensorBoard has ended; it is started again")
	require.Contains(t, l.err.String(), "exit code 3: no logs")
	require.Contains(t, l.err.String(), "[tensorboard]:no logs")
}

func TestTensorBoardOnATakenPortStartsNothing(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	path := b.board("exit 1")
	l := b.start("dlrover-run", []string{path}, b.sh(": > $DIR/ran", "--standalone",
		fmt.Sprintf("--tensorboard=runs:%d", taken.Addr().(*net.TCPAddr).Port))...)
	require.Equal(t, 2, l.wait())
	require.Contains(t, l.err.String(), fmt.Sprintf("is taken by pid %d (", os.Getpid()))
	require.NoFileExists(t, filepath.Join(b.dir, "ran"))
}

// Killed with its guard, the launcher leaves no TensorBoard behind.
func TestTensorBoardEndsWithAKilledLauncher(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	path := b.board(`echo $$ > $DIR/board.new; mv $DIR/board.new $DIR/board; exec sleep 600`)
	l := b.start("dlrover-run", []string{path}, b.sh(`exec sleep 600`, "--standalone",
		"--tensorboard=runs:"+freePort(t))...)
	eventually(t, "TensorBoard", b.exists("board"))
	pid := strings.TrimSpace(string(read(t, filepath.Join(b.dir, "board"))))
	require.NoError(t, syscall.Kill(l.launcher(), syscall.SIGKILL))
	l.wait()
	eventually(t, "its end", func() bool { _, err := os.Stat("/proc/" + pid); return err != nil })
}
