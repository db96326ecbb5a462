package logs

import (
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// terminal is a console that is a terminal, and what shows on it.
func terminal(t *testing.T) (screen, con *os.File) {
	t.Helper()
	p, con, err := newPTY("/dev/ptmx", 1, os.Stdin)
	require.NoError(t, err)
	t.Cleanup(func() {
		con.Close()
		p.r.Close()
	})
	return p.r, con
}

func setSize(t *testing.T, screen *os.File, rows, columns uint16) {
	t.Helper()
	control(screen, func(fd int) {
		require.NoError(t, unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: columns}))
	})
}

const isTerminal = "for i in 1 2; do [ -t $i ] && s=\"${s}yes \" || s=\"${s}no \"; done; printf \"$s\" >&3"

func TestWorkersHaveATerminalWhenTheConsoleIsOne(t *testing.T) {
	for _, tc := range []struct {
		name           string
		cfg            Config
		stdout, stderr bool // of the launcher are the terminal
		want           string
	}{
		{"both", Config{}, true, true, "yes yes "},
		{"stdout only", Config{}, true, false, "yes no "},
		{"stderr only", Config{}, false, true, "no yes "},
		{"redirected", Config{Redirects: func(int) Std { return Stdout }}, true, true, "no yes "},
		{"tee'd", Config{Tee: func(int) Std { return Stderr }}, true, true, "yes no "},
		{"not on the console", Config{ConsoleRank: func(int) bool { return false }}, true, true, "no no "},
	} {
		t.Run(tc.name, func(t *testing.T) {
			screen, con := terminal(t)
			go io.Copy(io.Discard, screen)
			tc.cfg.Dir = t.TempDir()
			if tc.stdout {
				tc.cfg.Stdout = con
			}
			if tc.stderr {
				tc.cfg.Stderr = con
			}
			r := newRig(t, tc.cfg)
			w := worker(t, r.begin(t), 0)
			said, say := pipe(t)
			cmd := sh(isTerminal)
			cmd.ExtraFiles = []*os.File{say}
			run(t, w, cmd)
			expect(t, said, tc.want)
		})
	}
}

func TestWithoutPseudoTerminalsThereArePipes(t *testing.T) {
	screen, con := terminal(t)
	r := newRig(t, Config{Dir: os.DevNull, Stdout: con, Stderr: con})
	r.ptmx = "/dev/null/ptmx"
	run(t, worker(t, r.begin(t), 0), sh("[ -t 1 ] || echo pipe"))
	expect(t, screen, "pipe\n")
	require.Empty(t, r.log.String())
}

// TestTerminalSize: and nothing of a controlling terminal, so that the job's end never comes from there.
func TestTerminalSize(t *testing.T) {
	screen, con := terminal(t)
	setSize(t, screen, 24, 100)
	r := newRig(t, Config{Dir: os.DevNull, Stdout: con, Stderr: con})
	w := worker(t, r.begin(t), 0)
	cmd := sh("stty size <&1; stty size <&2; read x; stty size <&1; stty size <&2; cut -d' ' -f7 /proc/self/stat")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	start(t, w, cmd)
	expect(t, screen, "24 100\n24 100\n")
	setSize(t, screen, 50, 80)
	r.Resize()
	require.NoError(t, stdin.Close())
	expect(t, screen, "50 80\n50 80\n0\n")
}

func TestTerminalOutputIsUnchanged(t *testing.T) {
	screen, con := terminal(t)
	r := newRig(t, Config{Dir: os.DevNull, Stdout: con, Stderr: con})
	w := worker(t, r.begin(t), 0)
	start(t, w,
		sh(`printf '\r  0%%|   |'; printf '\r 50%%|#  |'; `+
			`printf '\r100%%|###|\n\ttab\033[31mred\033[0m\r\nno end'; sleep 60`))
	const said = "\r  0%|   |\r 50%|#  |\r100%|###|\n\ttab\x1b[31mred\x1b[0m\r\nno end"
	expect(t, screen, said)
	tail, _ := w.Tail()
	require.Equal(t, said, string(tail))
}

func TestTerminalFlood(t *testing.T) {
	const lines = 100_000
	screen, con := terminal(t)
	check := &numbered{next: map[string]int{"x": 0}, prefix: func(string) string { return "" }}
	done := make(chan struct{})
	go func() {
		defer close(done)
		io.CopyN(check, screen, lines*100)
	}()
	r := newRig(t, Config{Dir: os.DevNull, Stdout: con, Stderr: con, TailBytes: 100})
	w := worker(t, r.begin(t), 0)
	run(t, w, helper("flood", "x", strconv.Itoa(lines), "100", "4096"))
	<-done
	require.NoError(t, check.err)
	require.Equal(t, lines, check.next["x"])
	tail, _ := w.Tail()
	require.True(t, strings.HasPrefix(string(tail), "x "+strconv.Itoa(lines-1)), "%q", tail)
}

// TestTerminalOfASurvivor: a process that the worker left is told by EIO, as others are by SIGPIPE.
func TestTerminalOfASurvivor(t *testing.T) {
	screen, con := terminal(t)
	r := newRig(t, Config{Dir: os.DevNull, Stdout: con, Stderr: con})
	a := r.begin(t)
	w := worker(t, a, 0)
	cmd := sh("echo one; read x; echo two 2>&3; echo $? >&3")
	said, say := pipe(t)
	cmd.ExtraFiles = []*os.File{say}
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	start(t, w, cmd)
	expect(t, screen, "one\n")
	began := time.Now()
	a.Close()
	require.Less(t, time.Since(began), closeGrace)
	require.NoError(t, stdin.Close())
	require.NoError(t, cmd.Wait())
	require.NoError(t, say.Close())
	text, err := io.ReadAll(said)
	require.NoError(t, err)
	require.Contains(t, strings.ToLower(string(text)), "i/o error")
}
