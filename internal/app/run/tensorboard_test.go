package run

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseBoard(t *testing.T) {
	for text, want := range map[string]board{
		"logs":                        {LogDir: "logs", Host: "127.0.0.1", Port: 6006},
		"logs:6007":                   {LogDir: "logs", Host: "127.0.0.1", Port: 6007},
		"/a/b:0.0.0.0:80":             {LogDir: "/a/b", Host: "0.0.0.0", Port: 80},
		"s3://bucket/logs":            {LogDir: "s3://bucket/logs", Host: "127.0.0.1", Port: 6006},
		"s3://bucket/logs:6008":       {LogDir: "s3://bucket/logs", Host: "127.0.0.1", Port: 6008},
		"s3://bucket/logs:[::1]:6008": {LogDir: "s3://bucket/logs", Host: "::1", Port: 6008},
	} {
		got, err := parseBoard(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
	for _, text := range []string{"logs:", "logs:0", "logs:65536", "logs:x", ":6006", "logs::6006", "::"} {
		_, err := parseBoard(text)
		require.ErrorContains(t, err, "need LOGDIR", text)
	}
}

func FuzzParseBoard(f *testing.F) {
	f.Add("logs:6006")
	f.Add("s3://a/b:[::1]:1")
	f.Fuzz(func(t *testing.T, text string) {
		if b, err := parseBoard(text); err == nil && text != "" {
			require.NotEmpty(t, b.LogDir)
			require.NotEmpty(t, b.Host)
			require.True(t, b.Port > 0 && b.Port < 65536)
		}
	})
}

func TestTensorBoardIsFound(t *testing.T) {
	s, err := resolved(t, "--tensorboard=logs:7000 train.py", map[string]string{"PYTHON_EXEC": "python3"})
	require.NoError(t, err)
	plan, err := makePlan(&s, testHost())
	require.NoError(t, err)
	require.Equal(t, []string{"/bin/tensorboard", "--logdir", "logs", "--host", "127.0.0.1", "--port", "7000"},
		plan.Features["tensorboard"].(*board).Argv)
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

// TensorBoard outlives the epochs, is no worker, and ends with the job.
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
