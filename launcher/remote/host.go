package remote

import (
	"bufio"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Bounds of the time until a launcher is started.
const (
	helloTime = 2 * time.Minute  // for the first word of the host
	sendTime  = 10 * time.Minute // for the program to be there
	// closeTime is for the remote shell to end by itself after the last line. A process that outlives the launcher, such
	// as a checkpoint daemon that still writes, holds its streams.
	closeTime = 2 * time.Second
)

// Target is a host on which a launcher is to be started.
type Target struct {
	Name string
	// Shell is the command that has a sh read its standard input on the host; nil: this is the host.
	Shell []string
	// SSH: the shell is ssh, and its messages are known.
	SSH     bool
	Program *Program
	Memo    Memo // its Mark is made here
	Out     *Printer
	Err     *Printer
}

// Ending is how a launcher has ended, or why there is none.
type Ending struct {
	Status int
	// Joined: the other nodes are notified of its end.
	Joined bool
	// Failure is why the host could not be reached, or is not any more; nil: the launcher has ended with Status.
	Failure error
	// Started: there was a launcher.
	Started bool
}

// Session is the connection to one host.
type Session struct {
	to    Target
	mark  string
	cmd   *exec.Cmd
	in    *writer
	stdin io.Closer
	said  *tail // on the standard error before there was an agent

	speaks  atomic.Bool   // the agent, or its launcher: standard error is theirs
	ready   chan struct{} // closed once the agent has its memo, which orders follow
	closing sync.Once
	closed  chan struct{}
	done    chan struct{}
	told    atomic.Pointer[Ending] // by the agent
	end     Ending
}

// Start executes the remote shell. It has to be called by a thread that lives as long as the session: the kernel ends
// the remote shell with it. An agent of this host ends by the end of its input.
func Start(to Target) (*Session, error) {
	mark, err := randomText()
	if err != nil {
		return nil, err
	}
	to.Memo.Mark = "dlrover-remote-" + mark
	s := &Session{to: to, mark: to.Memo.Mark, said: &tail{}, ready: make(chan struct{}),
		closed: make(chan struct{}), done: make(chan struct{})}
	words := to.Shell
	if words == nil {
		words = []string{ownFile, Argument, asAgent}
	}
	s.cmd = exec.Command(words[0], words[1:]...)
	if to.Shell != nil {
		s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	}
	stdin, err1 := s.cmd.StdinPipe()
	stdout, err2 := s.cmd.StdoutPipe()
	stderr, err3 := s.cmd.StderrPipe()
	if err := errors.Join(err1, err2, err3, s.cmd.Start()); err != nil {
		return nil, err
	}
	s.stdin, s.in = stdin, newWriter(stdin)
	go s.follow(stdout, stderr)
	return s, nil
}

// randomText is the name of a directory and a line that cannot be guessed.
func randomText() (string, error) {
	b := make([]byte, 12)
	if _, err := rand.Read(b); err != nil {
		return "", err
	}
	return hex.EncodeToString(b), nil
}

// PID is the remote shell's, or that of this host's agent.
func (s *Session) PID() int { return s.cmd.Process.Pid }

// Ready is closed once the launcher is being started.
func (s *Session) Ready() <-chan struct{} { return s.ready }

// Running reports whether Ready is closed.
func (s *Session) Running() bool {
	select {
	case <-s.ready:
		return true
	default:
		return false
	}
}

// Done is closed when the session is over.
func (s *Session) Done() <-chan struct{} { return s.done }

// Ending is to be called once Done is closed.
func (s *Session) Ending() Ending { return s.end }

// Signal passes a signal on to the launcher. It does not wait.
func (s *Session) Signal(sig syscall.Signal) { s.in.line(fmt.Sprintf("%s%d", tellSignal, sig)) }

// Leave asks the launcher to end, unless it is about to. It does not wait.
func (s *Session) Leave() { s.in.line(tellLeave) }

// Close ends the remote shell at once; the agent ends the launcher. The agent of this host ends by the end of its
// input, and the session is over when it has. If the agent were killed, the kernel would signal the launcher. Unread
// output is lost.
func (s *Session) Close() {
	s.closing.Do(func() { close(s.closed) })
	if s.to.Shell != nil {
		_ = s.cmd.Process.Kill()
		return
	}
	_ = s.stdin.Close()
	time.AfterFunc(s.to.Memo.Grace+s.to.Memo.Drain+closeTime, func() { _ = s.cmd.Process.Kill() }) // it is stuck
}

// follow is the session.
func (s *Session) follow(stdout, stderr io.ReadCloser) {
	defer close(s.done)
	said := make(chan heard, 1)
	go func() { said <- s.listen(stdout, stderr) }()
	h := heard{err: errClosed}
	select {
	case h = <-said:
	case <-s.closed:
		select {
		case h = <-said:
		case <-time.After(closeTime): // the reader of the output does not read
			if h.end.Started = s.Running(); s.told.Load() != nil {
				h = heard{end: *s.told.Load()}
			}
			_ = errors.Join(stdout.Close(), stderr.Close())
		}
	}
	s.in.close()
	_ = s.stdin.Close()
	wait := s.cmd.Wait()
	s.end = h.end
	switch {
	case h.err == nil: // it has reported how it ended
	case h.end.Started:
		s.end.Failure = fmt.Errorf("the connection is lost (%s): the launcher there ends by itself", s.how(wait))
	default:
		s.end.Failure = s.why(h, wait)
	}
}

var errClosed = errors.New("closed")

// heard is the outcome of a session.
type heard struct {
	end  Ending
	err  error // nil: the agent has reported how the launcher ended
	late bool  // before there was an agent
	sent bool  // the program was asked for
}

// listen reads both streams to their ends.
func (s *Session) listen(stdout, stderr io.ReadCloser) (h heard) {
	var streams sync.WaitGroup
	streams.Go(func() { s.errors(stderr) })
	slow := time.AfterFunc(helloTime, s.Close)
	r := bufio.NewReaderSize(stdout, buffered)
	h.sent, h.err = s.greet(r, slow)
	h.late = !slow.Stop()
	if h.err == nil {
		close(s.ready)
		h.end.Started = true
		h.end.Status, h.end.Joined, h.err = s.output(r)
		if told := h.end; h.err == nil {
			s.told.Store(&told)
		}
	}
	_ = s.stdin.Close()
	hurry := time.AfterFunc(closeTime, func() {
		s.Close()
		_ = stdout.Close()
		_ = stderr.Close()
	})
	streams.Wait()
	hurry.Stop()
	return h
}

// how the remote shell ended.
func (s *Session) how(err error) string {
	if err == nil {
		return s.shell() + " has ended"
	}
	return s.shell() + ": " + err.Error()
}

func (s *Session) shell() string {
	if s.to.Shell == nil {
		return "the agent"
	}
	return s.to.Shell[0]
}

// why there is no agent.
func (s *Session) why(h heard, wait error) error {
	switch {
	case errors.As(h.err, new(*refusal)):
		return h.err
	case h.late && h.sent:
		return fmt.Errorf("the program could not be sent there within %s: install it there, at a place in PATH", sendTime)
	case h.late:
		return fmt.Errorf("%s has executed nothing there within %s: see that the host answers, and what its login shell "+
			"waits for", s.shell(), helloTime)
	}
	return explain(s.to.Name, s.shell(), s.to.SSH, status(wait), s.said.String())
}

func status(err error) int {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exitStatus(exit.Sys().(syscall.WaitStatus))
	}
	return 0
}

// refusal is the script's reason not to become an agent.
type refusal struct{ text string }

func (r *refusal) Error() string { return r.text }

// greet starts the agent and sends its memo.
func (s *Session) greet(r *bufio.Reader, slow *time.Timer) (sent bool, err error) {
	if s.to.Shell != nil {
		directory, err := randomText()
		if err != nil {
			return false, err
		}
		s.in.text([]byte(bootScript(s.to.Program, "dlrover-run-"+directory)))
	}
	for skipped := 0; skipped < maxGreeting; {
		line, err := r.ReadSlice('\n')
		if err != nil && err != bufio.ErrBufferFull {
			return sent, err
		}
		skipped += len(line)
		switch said, is := strings.CutPrefix(strings.TrimRight(string(line), "\r\n"), head); {
		case !is:
		case said == sayReady:
			return sent, s.brief()
		case said == saySend:
			sent = true
			slow.Reset(sendTime)
			s.in.program(s.to.Program)
		default:
			return sent, refused(said)
		}
	}
	return sent, &refusal{"the remote shell prints without end before it executes anything"}
}

// brief gives the agent its memo.
func (s *Session) brief() error {
	text, err := s.to.Memo.Encode()
	if err != nil {
		return &refusal{err.Error()}
	}
	s.speaks.Store(true) // the launcher may print before this continues
	s.in.text(text)
	s.in.beat()
	return nil
}

// refused is why the script does not execute the agent.
func refused(said string) error {
	if said == sayNowhere {
		return &refusal{"this program is not there, and there is no directory for it: $TMPDIR, /tmp, /var/tmp, /dev/shm " +
			"and $HOME cannot be written, or nothing may be executed in them; install it there, at a place in PATH"}
	}
	return &refusal{fmt.Sprintf("this program is not there, and was sent, but cannot be executed (%s): install it "+
		"there, at a place in PATH", strings.TrimSpace(strings.TrimPrefix(said, sayCannot)))}
}

// maxGreeting bounds the output of a login shell before it executes anything, in bytes.
const maxGreeting = 1 << 20

// output prints the launcher's output, until its agent reports its end. The end of a part of a line waits for the next
// one: the agent's line may begin in it.
func (s *Session) output(r *bufio.Reader) (status int, knew bool, err error) {
	p := s.to.Out.of(s.to.Name)
	defer p.close()
	held := ""
	for {
		text, err := r.ReadSlice('\n')
		line := held + string(text)
		before, status, at, found := parseEnding(s.mark, line)
		if held = ""; !found && err == bufio.ErrBufferFull {
			before = line[:max(0, len(line)-len(ending(s.mark, 255, ended)))]
			held = line[len(before):]
		}
		p.add(before)
		if found {
			return status, at != alone, nil
		}
		if err != nil && err != bufio.ErrBufferFull {
			return 0, false, err
		}
		if r.Buffered() == 0 {
			p.flush()
		}
	}
}

// errors prints the launcher's standard error. Earlier output is kept, to explain why there is no launcher.
func (s *Session) errors(stderr io.Reader) {
	p := s.to.Err.of(s.to.Name)
	defer p.close()
	r := bufio.NewReaderSize(stderr, buffered)
	for {
		line, err := r.ReadSlice('\n')
		if s.speaks.Load() {
			p.add(string(line))
		} else {
			s.said.add(string(line))
		}
		if err != nil && err != bufio.ErrBufferFull {
			return
		}
		if r.Buffered() == 0 {
			p.flush()
		}
	}
}

// tail keeps the end of a text.
type tail struct {
	mu   sync.Mutex
	text string
}

func (t *tail) add(text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text += text
	t.text = t.text[max(0, len(t.text)-8<<10):]
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.text
}

// writer writes to an agent in a goroutine of its own, so that an agent that does not read delays no caller.
type writer struct {
	w    io.Writer
	todo chan func(io.Writer) error
	mu   sync.Mutex
	over bool
}

func newWriter(w io.Writer) *writer {
	n := &writer{w: w, todo: make(chan func(io.Writer) error, 64)}
	go n.write()
	return n
}

// write also sends a sign of life at each heartbeat.
func (n *writer) write() {
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()
	talks := false // to an agent that has its memo
	for {
		select {
		case f, open := <-n.todo:
			if !open {
				return
			}
			if f == nil {
				talks = true
			} else if f(n.w) != nil {
				talks = false
			}
		case <-beat.C:
			if talks {
				_, _ = io.WriteString(n.w, "\n")
			}
		}
	}
}

// do drops the message when the agent has not read for long.
func (n *writer) do(f func(io.Writer) error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.over {
		return
	}
	select {
	case n.todo <- f:
	default:
	}
}

func (n *writer) text(text []byte) {
	n.do(func(w io.Writer) error { _, err := w.Write(text); return err })
}

func (n *writer) program(p *Program) { n.do(p.send) }

// beat begins with it.
func (n *writer) beat() { n.do(nil) }

func (n *writer) line(text string) { n.text([]byte(text + "\n")) }

func (n *writer) close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.over = true
	close(n.todo)
}
