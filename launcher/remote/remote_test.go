package remote

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestMain lets the test's program be an agent, whose launcher is a shell.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == Argument {
		os.Exit(Main(os.Args[2:]))
	}
	if os.Args[0] == "launcher" {
		os.Exit(launcher(os.Args[1]))
	}
	os.Exit(m.Run())
}

// launcher executes a script of sh in which JOINED and ENDED are commands.
func launcher(script string) int {
	h := Received()
	if h == nil || os.Getenv(variable) != "" {
		return 99
	}
	script, joins := strings.CutPrefix(script, "JOINED;")
	if joins {
		h.Joined()
	}
	script, ends := strings.CutPrefix(script, "ENDED;")
	if ends {
		h.Ended()
	}
	err := syscall.Exec("/bin/sh", []string{"sh", "-c", script}, append(os.Environ(), "HANDED="+string(h.Text)))
	println(err.Error())
	return 98
}

func TestCommand(t *testing.T) {
	t.Parallel()
	require.Equal(t, []string{"kubectl", "exec", "-i", "w-1", "-n1", "--", "sh"},
		Command([]string{"kubectl", "exec", "-i", "{host}", "-n{rank}", "--"}, "w-1", 1))
}

// start runs a script as the launcher of a host whose remote shell is these words.
func start(t *testing.T, script string, shell ...string) (s *Session, out, errs *bytes.Buffer) {
	t.Helper()
	p, err := OpenProgram()
	require.NoError(t, err)
	t.Cleanup(p.Close)
	return startWith(t, p, script, shell...)
}

func startWith(t *testing.T, p *Program, script string, shell ...string) (s *Session, out, errs *bytes.Buffer) {
	t.Helper()
	out, errs = &bytes.Buffer{}, &bytes.Buffer{}
	s, err := Start(Target{Name: "h", Shell: shell, Program: p, Out: NewPrinter(out), Err: NewPrinter(errs),
		Memo: Memo{Name: "launcher", Args: []string{script}, Dir: t.TempDir(), Env: []string{"A=b c"}, Token: "secret",
			Grace: 10 * time.Second, Handed: []byte(`"x"`)}})
	require.NoError(t, err)
	t.Cleanup(func() { s.Close(); <-s.Done() })
	return s, out, errs
}

const speak = "JOINED;" +
	`echo "$A $HANDED $DLROVER_TOKEN $DLROVER_TOKEN_FILE"; pwd; umask; echo oops >&2; printf "no end"; exit 3`

// The program is found in PATH, or sent; the script is read by any sh. A login shell may print something before.
func TestSession(t *testing.T) {
	t.Parallel()
	for _, shell := range []string{"dash", "bash", "busybox sh"} {
		if _, err := exec.LookPath(strings.Fields(shell)[0]); err != nil {
			t.Logf("SKIPPED: THE SCRIPT IS NOT TESTED WITH %s: %v", shell, err)
			continue
		}
		for name, hide := range map[string]bool{"own path": false, "sent": true} {
			t.Run(shell+", "+name, func(t *testing.T) {
				tmp := t.TempDir()
				greet := "echo welcome; printf 'to this host'; echo motd >&2; umask 026; TMPDIR=" + tmp + " exec " + shell
				words := []string{"sh", "-c", greet, "h"}
				p, err := OpenProgram()
				require.NoError(t, err)
				defer p.Close()
				if hide {
					p.Path = "/nowhere/dlrover-run"
				}
				s, out, errs := startWith(t, p, speak, words...)
				<-s.Done()
				require.Equal(t, Ending{Status: 3, Joined: true, Started: true}, s.Ending())
				require.Contains(t, out.String(), "h: b c \"x\" secret \n")
				require.Contains(t, out.String(), "h: 0026\n")
				require.Contains(t, out.String(), "h: no end\n")
				require.Equal(t, "h: oops\n", errs.String())
				left, err := filepath.Glob(tmp + "/*")
				require.NoError(t, err)
				require.Empty(t, left)
			})
		}
	}
}

func TestSessionOfThisHost(t *testing.T) {
	t.Parallel()
	s, out, _ := start(t, "exit 0")
	<-s.Done()
	require.Equal(t, Ending{Started: true}, s.Ending())
	require.Empty(t, out.String())
}

// The agent's line is found wherever a read ends.
func TestSessionFindsTheEnd(t *testing.T) {
	t.Parallel()
	mark := "dlrover-remote-0123456789abcdef01234567"
	last := ending(mark, 137, joined)
	for _, before := range []int{buffered, 2 * buffered, chunk} {
		for n := before - 2*len(last); n < before+2; n++ {
			var out bytes.Buffer
			s := &Session{to: Target{Name: "h", Out: NewPrinter(&out)}, mark: mark}
			text := strings.Repeat("x", n)
			status, knew, err := s.output(bufio.NewReaderSize(strings.NewReader(text+last), buffered))
			require.NoError(t, err, n)
			require.Equal(t, 137, status, n)
			require.True(t, knew, n)
			require.Equal(t, text, strings.NewReplacer("h: ", "", "\n", "").Replace(out.String()), n)
			out.Reset()
			_, _, err = s.output(bufio.NewReaderSize(strings.NewReader(text), buffered))
			require.ErrorIs(t, err, io.EOF)
			require.Equal(t, text, strings.NewReplacer("h: ", "", "\n", "").Replace(out.String()), n)
		}
	}
}

// Signals come through, and the end of the remote shell is the launcher's end.
func TestSessionPassesSignals(t *testing.T) {
	t.Parallel()
	const wait = `; echo up > up; while :; do sleep 0.02; done`
	for name, c := range map[string]struct {
		script string
		do     func(*Session)
		status int
	}{
		"signal":       {"JOINED;trap 'exit 5' USR1" + wait, func(s *Session) { s.Signal(syscall.SIGUSR1) }, 5},
		"leave":        {"JOINED;trap 'exit 6' TERM" + wait, func(s *Session) { s.Leave() }, 6},
		"killed":       {"JOINED;echo" + wait, func(s *Session) { s.Signal(syscall.SIGKILL) }, 137},
		"the agent's":  {"trap 'exit 7' HUP" + wait, func(s *Session) { _ = s.cmd.Process.Signal(syscall.SIGHUP) }, 7},
		"end of input": {"trap 'exit 8' TERM" + wait, func(s *Session) { _ = s.stdin.Close() }, 8},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, _, _ := start(t, c.script)
			up := filepath.Join(s.to.Memo.Dir, "up")
			require.Eventually(t, func() bool { _, err := os.Stat(up); return err == nil }, time.Minute, 5*time.Millisecond)
			c.do(s)
			<-s.Done()
			require.Equal(t, c.status, s.Ending().Status)
			require.NoError(t, s.Ending().Failure)
		})
	}
}

// A signal to every process of a unit comes to the agent twice, and is one; a second one is a second.
func TestAgentCountsSignals(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("sleep", "60")
	require.NoError(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	a := agent{launcher: cmd.Process, passed: map[came]time.Time{}}
	for i, c := range []struct{ ordered, passes bool }{
		{true, true}, {false, false}, {false, true}, {true, false}, {true, true}, {true, true},
		{false, false}, {false, true},
	} {
		this := came{syscall.SIGURG, c.ordered} // does nothing
		delete(a.passed, this)
		a.pass(this)
		_, passes := a.passed[this]
		require.Equal(t, c.passes, passes, i)
	}
	a.passed[came{syscall.SIGTERM, true}] = time.Now().Add(-sameSignal)
	a.pass(came{syscall.SIGTERM, false})
	require.Error(t, cmd.Wait(), "a signal that came long ago is another one")
	require.Equal(t, syscall.SIGTERM, cmd.ProcessState.Sys().(syscall.WaitStatus).Signal())
}

// A launcher that writes its last checkpoints gets time, and no signal, when its starter is gone.
func TestSessionLeavesTheLastCheckpointsTime(t *testing.T) {
	t.Parallel()
	gone := func(s *Session) { _ = s.stdin.Close() }
	for name, c := range map[string]struct {
		come         string
		end          func(*Session)
		grace, drain time.Duration
		said         string
	}{
		"its run goes on":           {"JOINED", gone, time.Hour, 0, "TERM"},
		"its run goes on, by Close": {"JOINED", (*Session).Close, time.Hour, 0, "TERM"},
		"its run is over":           {"ENDED", gone, 0, time.Hour, "saved"},
		"its run is over, by Close": {"ENDED", (*Session).Close, 0, time.Hour, "saved"},
		"it takes too long":         {"ENDED", gone, 10 * time.Millisecond, 10 * time.Millisecond, ""},
		"somebody ends it":          {"ENDED", func(s *Session) { s.Signal(syscall.SIGTERM) }, 0, 0, "TERM"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, err := OpenProgram()
			require.NoError(t, err)
			defer p.Close()
			script := c.come + `;trap 'echo TERM > said; exit 8' TERM; : > up
				while ! [ -e go ]; do sleep 0.02; done; echo saved > said`
			dir := t.TempDir()
			s, err := Start(Target{Name: "h", Program: p, Out: NewPrinter(io.Discard), Err: NewPrinter(io.Discard), Memo: Memo{
				Name: "launcher", Args: []string{script}, Dir: dir, Grace: c.grace, Drain: c.drain}})
			require.NoError(t, err)
			up := func() bool { _, err := os.Stat(filepath.Join(dir, "up")); return err == nil }
			require.Eventually(t, up, time.Minute, 5*time.Millisecond)
			c.end(s)
			if c.said == "saved" {
				require.NoError(t, os.WriteFile(filepath.Join(dir, "go"), nil, 0o600))
			}
			<-s.Done()
			said, _ := os.ReadFile(filepath.Join(dir, "said"))
			require.Equal(t, c.said, strings.TrimSpace(string(said)))
		})
	}
}

func TestSessionsThatFail(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ shell, said string }{
		"no input":         {"exec sh < /dev/null", "does not pass its standard input on"},
		"it says why":      {"echo no pod >&2; exit 4", "sh ended with status 4 before it executed anything: no pod"},
		"no word":          {"exit 4", "sh ended with status 4 before it executed anything"},
		"without end":      {"exec cat /dev/zero", "prints without end before it executes anything"},
		"another answer":   {"echo 'dlrover-remote: cannot run sparc'", "cannot be executed (sparc): install it there"},
		"nowhere to write": {"echo 'dlrover-remote: nowhere'", "there is no directory for it"},
		"ends too soon":    {"echo 'dlrover-remote: ready'; exit 1", "the connection is lost (sh: exit status 1)"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, _, _ := start(t, "exit 0", "sh", "-c", c.shell)
			<-s.Done()
			require.ErrorContains(t, s.Ending().Failure, c.said)
		})
	}
	_, err := Start(Target{Shell: []string{"/no/such/shell"}})
	require.Error(t, err)
}

// A host that is too slow is told which wait is over.
func TestSessionSaysWhatTookTooLong(t *testing.T) {
	t.Parallel()
	p, err := OpenProgram()
	require.NoError(t, err)
	defer p.Close()
	for said, want := range map[string]string{
		"":                                "ssh has executed nothing there within 2m0s",
		"welcome\n":                       "ssh has executed nothing there within 2m0s",
		"\ndlrover-remote: send\npart of": "the program could not be sent there within 10m0s: install it",
	} {
		s := &Session{to: Target{Shell: []string{"ssh"}, Program: p}, in: newWriter(io.Discard), said: &tail{}}
		slow := time.NewTimer(time.Hour)
		h := heard{late: true}
		h.sent, h.err = s.greet(bufio.NewReader(strings.NewReader(said)), slow)
		s.in.close()
		slow.Stop()
		require.ErrorContains(t, s.why(h, nil), want)
	}
}

// watched is what an agent reads.
type watched struct {
	*Session
	early chan bool
}

func (w watched) Write(p []byte) (int, error) {
	w.early <- w.speaks.Load()
	return len(p), nil
}

// What a launcher prints first is printed, however fast it is.
func TestSessionPrintsTheFirstErrors(t *testing.T) {
	t.Parallel()
	s := &Session{ready: make(chan struct{})}
	w := watched{s, make(chan bool, 1)}
	s.in = newWriter(w)
	defer s.in.close()
	require.NoError(t, s.brief())
	require.True(t, <-w.early, "the memo is sent before standard error is the launcher's")
	require.False(t, s.Running(), "an order may precede the memo")
}

// stuck is a file that nobody reads.
type stuck struct{ entered, release chan struct{} }

func (w stuck) Write(p []byte) (int, error) {
	w.entered <- struct{}{}
	<-w.release
	return len(p), nil
}

// Nobody reads what is printed: a session can be ended all the same.
func TestSessionWithoutAReader(t *testing.T) {
	t.Parallel()
	p, err := OpenProgram()
	require.NoError(t, err)
	defer p.Close()
	w := stuck{entered: make(chan struct{}, 100), release: make(chan struct{})}
	defer close(w.release)
	s, err := Start(Target{Name: "h", Program: p, Out: NewPrinter(w), Err: NewPrinter(io.Discard), Memo: Memo{
		Name: "launcher", Args: []string{"trap 'exit 3' TERM; while :; do echo 0123456789; done"}, Dir: "/"}})
	require.NoError(t, err)
	<-w.entered
	s.Close()
	<-s.Done()
	require.ErrorContains(t, s.Ending().Failure, "the connection is lost")
}

// Nobody reads the errors that are printed: it is known all the same how the launcher has ended.
func TestSessionWithoutAReaderOfErrors(t *testing.T) {
	t.Parallel()
	p, err := OpenProgram()
	require.NoError(t, err)
	defer p.Close()
	w := stuck{entered: make(chan struct{}, 100), release: make(chan struct{})}
	defer close(w.release)
	s, err := Start(Target{Name: "h", Program: p, Out: NewPrinter(io.Discard), Err: NewPrinter(w), Memo: Memo{
		Name: "launcher", Args: []string{"JOINED;echo oops >&2; exit 3"}, Dir: "/"}})
	require.NoError(t, err)
	<-s.Done()
	require.Equal(t, Ending{Status: 3, Joined: true, Started: true}, s.Ending())
}

func TestNoDirectoryThere(t *testing.T) {
	t.Parallel()
	p, err := OpenProgram()
	require.NoError(t, err)
	defer p.Close()
	var errs bytes.Buffer
	s, err := Start(Target{Name: "h", Program: p, Out: NewPrinter(&errs), Err: NewPrinter(&errs),
		Memo: Memo{Name: "deepspeed", Dir: "/nowhere"}})
	require.NoError(t, err)
	<-s.Done()
	require.Equal(t, Ending{Status: 2, Started: true}, s.Ending())
	require.Contains(t, errs.String(), "h: deepspeed: error: this host has no directory /nowhere, in which the job")
}

func TestExplain(t *testing.T) {
	t.Parallel()
	for said, want := range map[string]string{
		"Warning: x\nroot@w: Permission denied (publickey).\n": "ssh: no key of this user is accepted there: put the public",
		"No ED25519 host key is known for w\nHost key verification failed.\r\n": "ssh: its host key is not known here: add " +
			"it by ssh-keyscan w >>",
		"@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.": "another one than before",
		"ssh: connect to host w port 22: Connection refused":                                  "no sshd listens there",
		"ssh: connect to host w port 22: Connection timed out":                                "it does not answer",
		"ssh: connect to host w port 22: No route to host":                                    "it does not answer",
		"ssh: Could not resolve hostname w: no":                                               "no host of that name",
		"kex_exchange_identification: Connection closed by remote host":                       "MaxStartups",
		"command-line: line 0: Bad configuration option: x":                                   "not understand its options",
		"something new": "ssh ended with status 255 before it executed anything: something new",
	} {
		require.ErrorContains(t, explain("w", "ssh", true, 255, said), want)
	}
	require.EqualError(t, explain("w", "rsh", false, 1, "Connection refused"),
		"rsh ended with status 1 before it executed anything: Connection refused")
}

func TestMuster(t *testing.T) {
	t.Parallel()
	lost, away := Ending{Failure: errors.New("lost"), Started: true}, Ending{Failure: errors.New("away")}
	failed, refused := Ending{Status: 1, Joined: true, Started: true}, Ending{Status: 2, Started: true}
	fine := Ending{Joined: true, Started: true}
	for name, c := range map[string]struct {
		hosts, least int
		ends         []Ending
		verdicts     []Verdict
		culprit      int
	}{
		"all succeed":              {3, 3, []Ending{fine, fine, fine}, []Verdict{GoOn, GoOn, GoOn}, -1},
		"one fails":                {3, 3, []Ending{fine, failed, failed}, []Verdict{GoOn, EndSoon, GoOn}, 1},
		"one is lost":              {2, 2, []Ending{lost}, []Verdict{EndSoon}, 0},
		"one cannot be reached":    {2, 2, []Ending{away}, []Verdict{EndNow}, 0},
		"one refuses":              {2, 2, []Ending{refused}, []Verdict{EndNow}, 0},
		"enough are left":          {3, 2, []Ending{lost, fine, fine}, []Verdict{GoOn, GoOn, GoOn}, -1},
		"one that was not reached": {3, 2, []Ending{away, fine, fine}, []Verdict{GoOn, GoOn, GoOn}, -1},
		"too few are left":         {3, 2, []Ending{lost, refused, failed}, []Verdict{GoOn, EndNow, GoOn}, 2},
		"one host":                 {1, 1, []Ending{failed}, []Verdict{GoOn}, 0},
	} {
		m := NewMuster(c.hosts, c.least)
		for i, e := range c.ends {
			require.Equal(t, c.verdicts[i], m.Ended(i, e), name)
		}
		got, _ := m.Culprit()
		require.Equal(t, c.culprit, got, name)
		require.Equal(t, c.hosts-len(c.ends), m.Left(), name)
	}
	m := NewMuster(2, 2)
	m.Ended(0, failed)
	m.End()
	require.Equal(t, GoOn, m.Ended(1, lost))
	got, end := m.Culprit()
	require.Equal(t, 0, got)
	require.Equal(t, failed, end)
}

// Lines of hosts do not mix, and a line without an end has a bound.
func TestPrinter(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	p := NewPrinter(&out)
	a, b := p.of("a"), p.of("b")
	a.add("one ")
	b.add("other\n")
	b.flush()
	a.add("line\n")
	a.add(strings.Repeat("x", chunk))
	a.add("end")
	a.close()
	require.Equal(t, "b: other\na: one line\na: "+strings.Repeat("x", chunk)+"\na: end\n", out.String())
}

func TestMemoIsBounded(t *testing.T) {
	t.Parallel()
	m := Memo{Name: "x", Mark: "m", Dir: "/", Args: []string{strings.Repeat("x", maxMemo)}}
	_, err := m.Encode()
	require.ErrorContains(t, err, "at most 16777216 are sent to a host")
	for _, text := range []string{"", "x\n", "-1\n", "99999999\n{}", "2\n{}", "5\n{}"} {
		_, err := readMemo(bufio.NewReader(strings.NewReader(text)))
		require.Error(t, err, text)
	}
}

func FuzzMemo(f *testing.F) {
	m := Memo{Name: "deepspeed", Mark: "m", Dir: "/a", Args: []string{"a b"}, Handed: []byte("{}")}
	text, err := m.Encode()
	require.NoError(f, err)
	f.Add(string(text))
	f.Fuzz(func(t *testing.T, text string) {
		m, err := readMemo(bufio.NewReader(strings.NewReader(text)))
		if err != nil {
			return
		}
		again, err := m.Encode()
		require.NoError(t, err)
		same, err := readMemo(bufio.NewReader(bytes.NewReader(again)))
		require.NoError(t, err)
		require.Equal(t, m.Args, same.Args)
	})
}

func FuzzLines(f *testing.F) {
	f.Add("some output mark 7 +\n")
	f.Add("signal 15")
	f.Fuzz(func(t *testing.T, line string) {
		before, status, _, found := parseEnding("mark", line)
		require.True(t, strings.HasPrefix(line, before))
		require.Equal(t, found, before != line || strings.HasPrefix(line, "mark ") && found)
		require.True(t, status >= 0 && status < 256)
		o := parseOrder(line)
		require.True(t, o.signal >= 0 && o.signal <= 64)
	})
}
