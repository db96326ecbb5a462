package run

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// screen is the user's side of a terminal.
type screen struct {
	t    *testing.T
	user *os.File
	text *buffer // what is on it, as it came
	done sync.WaitGroup
}

// newScreen returns a terminal of 24 rows and 100 columns, and the side that programs have.
func newScreen(t *testing.T) (*screen, *os.File) {
	t.Helper()
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	require.NoError(t, err)
	s := &screen{t: t, user: os.NewFile(uintptr(fd), "terminal"), text: &buffer{}}
	require.NoError(t, unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	require.NoError(t, err)
	tty, err := os.OpenFile("/dev/pts/"+strconv.Itoa(n), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	s.resize(24, 100)
	s.done.Go(func() {
		if _, err := io.Copy(s.text, s.user); !errors.Is(err, unix.EIO) && !errors.Is(err, os.ErrClosed) { // EIO is its end
			t.Errorf("read a terminal: %v", err)
		}
	})
	t.Cleanup(func() {
		tty.Close()
		s.user.Close()
		s.done.Wait()
	})
	return s, tty
}

func (s *screen) resize(rows, columns uint16) {
	s.t.Helper()
	c, err := s.user.SyscallConn()
	require.NoError(s.t, err)
	require.NoError(s.t, c.Control(func(fd uintptr) {
		require.NoError(s.t, unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: columns}))
	}))
}

func (s *screen) types(text string) {
	s.t.Helper()
	_, err := s.user.WriteString(text)
	require.NoError(s.t, err)
}

func (s *screen) shows(want string) {
	s.t.Helper()
	eventually(s.t, want, func() bool { return strings.Contains(s.text.String(), want) })
}

// onTerminal starts the launcher as the foreground of a terminal; stderr goes there too, or to a file.
func (b *bench) onTerminal(stderr *os.File, args ...string) (*launched, *screen) {
	b.t.Helper()
	s, tty := newScreen(b.t)
	if stderr == nil {
		stderr = tty
	}
	l := &launched{
		t: b.t, cmd: exec.Command(filepath.Join(binDir, "dlrover-run"), args...), out: s.text, err: s.text,
		exited: make(chan struct{}),
	}
	l.cmd.Dir, l.cmd.Env = b.dir, b.env
	l.cmd.Stdin, l.cmd.Stdout, l.cmd.Stderr = tty, tty, stderr
	l.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	b.follow(l)
	return l, s
}

// terminals says in files which streams of a rank are terminals.
const terminals = `for i in 1 2; do [ -t $i ] && echo $i >> $DIR/tty.$RANK; done; : >> $DIR/tty.$RANK; `

func TestWorkersOnATerminal(t *testing.T) {
	for _, tc := range []struct {
		name   string
		opts   []string
		toFile bool // stderr of the launcher
		want   []string
	}{
		{"both", nil, false, []string{"1", "2"}},
		{"stderr to a file", nil, true, []string{"1"}},
		{"redirected", []string{"--redirects=2"}, false, []string{"1"}},
		{"tee'd", []string{"--tee=3"}, false, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := newBench(t)
			var file *os.File
			if tc.toFile {
				var err error
				file, err = os.Create(filepath.Join(b.dir, "stderr"))
				require.NoError(t, err)
				defer file.Close()
			}
			opts := append([]string{"--standalone", "--nproc-per-node=2", "--log-dir=" + filepath.Join(b.dir, "logs")},
				tc.opts...)
			l, s := b.onTerminal(file, b.sh(terminals+`echo out.$RANK; echo err.$RANK >&2`, opts...)...)
			require.Equal(t, 0, l.wait())
			for _, rank := range []string{"0", "1"} {
				require.ElementsMatch(t, tc.want, b.lines("tty."+rank))
				s.shows("out." + rank + "\r\n")
				switch tc.name {
				case "both", "tee'd":
					s.shows("err." + rank + "\r\n")
				case "stderr to a file":
					require.Contains(t, string(read(t, file.Name())), "err."+rank+"\n")
				default:
					require.NotContains(t, s.text.String(), "err."+rank)
				}
			}
		})
	}
}

// Ranks get the size of the terminal, then SIGWINCH and the new one.
func TestWorkersTerminalSize(t *testing.T) {
	b := newBench(t)
	script := `exec 3>&1; sizes() { echo $RANK.$(stty size <&3).$(stty size <&2).; }; trap sizes WINCH; sizes; ` + hold
	l, s := b.onTerminal(nil, b.sh(script, "--standalone", "--nproc-per-node=2")...)
	for _, rank := range []string{"0", "1"} {
		s.shows(rank + ".24 100.24 100.\r\n")
	}
	s.resize(50, 80)
	for _, rank := range []string{"0", "1"} {
		s.shows(rank + ".50 80.50 80.\r\n")
	}
	b.release()
	require.Equal(t, 0, l.wait())
}

// A bar is on the terminal while it is drawn, and byte for byte what the worker wrote.
func TestBarsOnATerminal(t *testing.T) {
	b := newBench(t)
	b.env = append(b.env, "LOGLEVEL=ERROR") // the launcher's line about the start may come between two bars
	const bar = "\r  0%|    |\r 50%|\x1b[32m##  \x1b[0m|"
	l, s := b.onTerminal(nil, b.sh(`printf '\r  0%%|    |'; printf '\r 50%%|\033[32m##  \033[0m|'; `+
		hold+`; printf '\r100%%|####|\n'`, "--standalone")...)
	s.shows(bar)
	b.release()
	require.Equal(t, 0, l.wait())
	s.shows(bar + "\r100%|####|\r\n")
}

// Ctrl-C is one SIGINT for the job, with the same end as one that was sent.
func TestCtrlC(t *testing.T) {
	for _, program := range []struct{ name, script string }{
		{"workers that die of it", hold + "; sleep 30"},
		{"workers that handle it", `trap 'echo int >> $DIR/ints; exit 3' INT; ` + hold},
	} {
		t.Run(program.name, func(t *testing.T) {
			b := newBench(t)
			l, s := b.onTerminal(nil, b.sh(program.script, "--standalone", "--nproc-per-node=2", "--exit-code-policy=reason")...)
			eventually(t, "up", func() bool { return b.exists("up.2.0")() && b.exists("up.2.1")() })
			s.types("\x03")
			require.Equal(t, 128+int(syscall.SIGINT), l.wait())
			s.shows("stopped by SIGINT")
			if program.name == "workers that handle it" {
				require.Equal(t, 2, count(b.lines("ints"), "int"), "each rank is told once")
			}
		})
	}
}

// The launcher's own lines do not go on with a worker's.
func TestLaunchersLinesOnATerminal(t *testing.T) {
	b := newBench(t)
	l, s := b.onTerminal(nil, b.sh(`trap 'printf "no end"; exit 3' INT; printf 'prompt> '; `+hold, "--standalone")...)
	s.shows("prompt> ")
	eventually(t, "up", b.exists("up.1.0"))
	s.types("\x03")
	l.wait()
	eventually(t, "a line of its own", func() bool {
		_, line, _ := strings.Cut(s.text.String(), "prompt> ^C\r\n")
		return ownLine.MatchString(line)
	})
	s.shows("\r\nno end\r\ndlrover-run: ")
}

// ownLine matches a line of the launcher on a terminal.
var ownLine = regexp.MustCompile(`^\d\d:\d\d:\d\d\.\d\d\d (INFO |WARN |ERROR) \S+: `)

func TestLogFormat(t *testing.T) {
	t.Parallel()
	const text, json = ` INFO  \S+: workers started `, `{"time":.*"msg":"workers started"`
	for _, tc := range []struct {
		name, opt, env string
		terminal, pipe string // what there is
	}{
		{"by default", "--log-format=auto", "", text, json},
		{"text", "--log-format=text", "", text, text},
		{"json", "--log-format=json", "", json, json},
		{"variable", "--role=default", "PET_LOG_FORMAT=json", json, json},
		{"the option wins", "--log-format=text", "PET_LOG_FORMAT=json", text, text},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := newBench(t)
			b.env = append(b.env, tc.env)
			args := b.sh(":", "--standalone", tc.opt)
			l, s := b.onTerminal(nil, args...)
			require.Zero(t, l.wait())
			onScreen := regexp.MustCompile(tc.terminal)
			eventually(t, tc.terminal, func() bool { return onScreen.MatchString(s.text.String()) })
			l = b.run(args...)
			require.Zero(t, l.wait())
			require.Regexp(t, tc.pipe, l.err.String())
		})
	}
	for program, args := range map[string][]string{
		"dlrover-run": {"train.py"}, "dlrover-master": nil, "checkpointd": {"--job=x"},
	} {
		b := newBench(t)
		for _, l := range []*launched{
			b.start(program, nil, append([]string{"--log-format=xml"}, args...)...),
			b.start(program, []string{"PET_LOG_FORMAT=xml"}, args...),
		} {
			require.Equal(t, 2, l.wait(), program)
			require.Regexp(t, `error: .*(log-format|PET_LOG_FORMAT).*xml.*auto.*text.*json`, l.err.String())
		}
	}
}

func TestVerdictOfARankOnATerminal(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("SKIPPED: no python3 on PATH, so the END OF A PYTHON WORKER ON A TERMINAL IS NOT TESTED")
	}
	b := newBench(t)
	b.env = append(b.env, "PYTHON_EXEC="+python, "FORCE_COLOR=1") // without a TERM, Python would not colour
	path := filepath.Join(b.dir, "train.py")
	require.NoError(t, os.WriteFile(path, []byte("import os, sys\nsys.stderr.write('\\r 50%|##  |')\nsys.stderr.flush()\n"+
		"assert os.isatty(2)\nif os.environ['RANK'] == '1': raise ValueError('bad batch 7')\n"), 0o600))
	l, s := b.onTerminal(nil, "--standalone", "--nproc-per-node=2", path)
	require.Equal(t, 1, l.wait())
	s.shows("failed first: ValueError: bad batch 7 (exit code 1)")
}

// Four ranks write each line in four pieces; on a pipe, in a file and on a terminal all are whole and in order.
func TestLinesOfRanksStayWhole(t *testing.T) {
	const ranks, perRank = 4, 500
	for _, console := range []string{"pipe", "file", "terminal"} {
		t.Run(console, func(t *testing.T) {
			b := newBench(t)
			args := b.sh(fmt.Sprintf(`i=0; while [ $i -lt %d ]; do printf $RANK; printf ' line '; printf $i; printf '\n'; `+
				`i=$((i+1)); done`, perRank),
				"--standalone", fmt.Sprintf("--nproc-per-node=%d", ranks))
			text := func() string { return "" }
			var l *launched
			switch console {
			case "pipe":
				l = b.run(args...)
				text = l.out.String
			case "file":
				path := filepath.Join(b.dir, "console")
				l = b.startPath("/bin/sh", nil,
					append([]string{"-c", `exec "$@" > console`, "sh", filepath.Join(binDir, "dlrover-run")}, args...)...)
				text = func() string { return string(read(t, path)) }
			case "terminal":
				l, _ = b.onTerminal(nil, args...)
				text = func() string { return strings.ReplaceAll(l.out.String(), "\r\n", "\n") }
			}
			require.Equal(t, 0, l.wait())
			var next [ranks]int
			for rank := range next {
				last := fmt.Sprintf("%d line %d\n", rank, perRank-1)
				eventually(t, last, func() bool { return strings.Contains(text(), last) })
			}
			for line := range strings.Lines(text()) {
				if ownLine.MatchString(line) {
					continue
				}
				rank := int(line[0] - '0')
				require.Contains(t, []int{0, 1, 2, 3}, rank, "%q", line)
				require.Equal(t, fmt.Sprintf("%d line %d\n", rank, next[rank]), line)
				next[rank]++
			}
			require.Equal(t, [ranks]int{perRank, perRank, perRank, perRank}, next)
		})
	}
}
