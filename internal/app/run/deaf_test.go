package run

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A worker replaces what its launcher reads and writes by something else. The launcher restarts it, hears a signal, and
// stays as small as it is.
func TestAWorkerCannotMakeItsLauncherDeaf(t *testing.T) {
	t.Parallel()
	for name, plant := range map[string]string{
		"fifo": `mkfifo "$f"`, "device": `ln -s /dev/zero "$f"`, "directory": `mkdir "$f"`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			script := `for f in $(readlink /proc/$$/fd/1) $(readlink /proc/$$/fd/2) $TORCHELASTIC_ERROR_FILE \
	$DLROVER_HANG_DIR/l0.page $DLROVER_HANG_DIR/l0.groups; do rm -rf "$f"; ` + plant + `; done
sleep 2; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 3
: > $DIR/up; exec sleep 1000`
			l := b.run(b.sh(script, "--standalone", "--max-restarts=1", "--redirects=3", "--hang=auto",
				"--log-dir="+filepath.Join(b.dir, "logs"))...)
			eventually(t, "the restart", b.exists("up"))
			_, peak, _ := strings.Cut(string(read(t, fmt.Sprintf("/proc/%d/status", l.launcher()))), "VmHWM:")
			var kib int
			_, err := fmt.Sscan(peak, &kib)
			require.NoError(t, err)
			require.Less(t, kib, 128<<10)
			l.signal(syscall.SIGTERM)
			l.wait()
		})
	}
}

// A file that the command line names is refused in one line if reading it would not end; a shell's <(command) does end.
func TestNamedFilesEnd(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for _, args := range [][]string{{"--hostfile=/dev/zero"}, {"--hostfile=" + b.dir}} {
		l := b.deepSpeed(nil, append(args, "--no_python", "/bin/true")...)
		require.Equal(t, 2, l.wait())
		require.Contains(t, l.err.String(), "deepspeed: error: --hostfile: open "+args[0][len("--hostfile="):]+
			": not a regular file; give a file that can be read, or /dev/null for none")
	}
	l := b.run("--token-file=/dev/zero", "--standalone", "--no-python", "/bin/true")
	require.Equal(t, 2, l.wait())
	require.Contains(t, l.err.String(), "token file: open /dev/zero: not a regular file")
	l = b.startPath("/bin/bash", nil, "-c", filepath.Join(binDir, "dlrover-run")+
		" --standalone --policy=<(printf 'rules:\\n  - exit: 3\\n    action: stop-job\\n') --dry-run --no-python /bin/true")
	require.Equal(t, 0, l.wait())
	require.Contains(t, l.out.String(), "exit 3 -> stop-job")
}

// A console that takes nothing keeps the launcher neither from restarting its workers nor from hearing a signal.
func TestABlockedConsoleHoldsUpNobody(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	defer w.Close()
	size, err := unix.FcntlInt(w.Fd(), unix.F_SETPIPE_SZ, 4096)
	require.NoError(t, err)
	_, err = w.Write(make([]byte, size))
	require.NoError(t, err)
	args := b.sh(`echo line; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 3; : > $DIR/up; exec sleep 1000`,
		"--standalone", "--max-restarts=1")
	l := &launched{t: t, cmd: exec.Command(filepath.Join(binDir, "dlrover-run"), args...), exited: make(chan struct{})}
	l.cmd.Dir, l.cmd.Env, l.cmd.Stdout, l.cmd.Stderr = b.dir, b.env, w, w
	b.follow(l)
	eventually(t, "the restart", b.exists("up"))
	begun := time.Now()
	l.signal(syscall.SIGTERM)
	l.wait()
	require.Less(t, time.Since(begun), 30*time.Second)
}
