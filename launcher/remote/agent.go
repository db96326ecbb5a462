package remote

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// How starter and agent know that the other one is there.
const (
	// heartbeat is the interval at which an idle starter sends a sign of life.
	heartbeat = 15 * time.Second
	// silence is how long an agent waits for that. A host that is gone closes no connection.
	silence = 90 * time.Second
)

// sameSignal is how far apart a signal may come to a starter's own host both ways, and is one: systemd, for one,
// signals every process of a unit.
const sameSignal = 5 * time.Second

// Main is the program called with Argument and words behind it. It returns the exit status.
func Main(words []string) int {
	if len(words) == 1 && words[0] == asAgent {
		return runAgent(os.Stdin, os.Stdout)
	}
	if len(words) != 1 || words[0] != askID {
		fmt.Fprintf(os.Stderr, "%s is for dlrover-run's own use\n", Argument)
		return 2
	}
	p, err := OpenProgram()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println(p.ID)
	return 0
}

// runAgent starts a launcher by the memo, and ends with its status.
func runAgent(stdin io.Reader, stdout io.Writer) int {
	runtime.LockOSThread() // the kernel signals the launcher when this thread ends
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	fmt.Fprintln(stdout, "\n"+head+sayReady) // behind a greeting that has no end of line
	r := bufio.NewReader(stdin)
	m, err := readMemo(r)
	if err != nil {
		if err != io.EOF { // at io.EOF there is no reader
			fmt.Fprintln(os.Stderr, "dlrover-run: error: "+err.Error())
		}
		return 1
	}
	status, s := m.run(r)
	_, _ = io.WriteString(stdout, ending(m.Mark, status, s))
	return status
}

// run returns the status of the launcher, and how far it has come.
func (m *Memo) run(r *bufio.Reader) (status int, s stage) {
	handed, err := newHanded(m.Handed)
	if err != nil {
		return m.refuse(1, err), alone
	}
	defer handed.Close()
	if info, err := os.Stat(m.Dir); err != nil || !info.IsDir() {
		return m.refuse(2, fmt.Errorf("this host has no directory %s, in which the job was started: have it on every "+
			"host, by shared storage or the image", m.Dir)), alone
	}
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT)
	cmd := m.command(handed)
	if err := cmd.Start(); err != nil {
		return m.refuse(1, fmt.Errorf("the launcher cannot be started: %w", err)), alone
	}
	done := make(chan struct{})
	go func() {
		_ = cmd.Wait() // the state has more detail
		close(done)
	}()
	a := agent{launcher: cmd.Process, handed: handed, grace: m.Grace, drain: m.Drain, done: done,
		signals: signals, orders: orders(r), passed: map[came]time.Time{}}
	a.follow()
	return exitStatus(cmd.ProcessState.Sys().(syscall.WaitStatus)), stageOf(handed)
}

// refuse prints why nothing was started.
func (m *Memo) refuse(status int, err error) int {
	fmt.Fprintf(os.Stderr, "%s: error: %v\n", m.Name, err)
	return status
}

func (m *Memo) command(handed *os.File) *exec.Cmd {
	cmd := exec.Command(ownFile)
	cmd.Args, cmd.Dir = append([]string{m.Name}, m.Args...), m.Dir
	cmd.Env = append(append(os.Environ(), m.Env...), variable+"=3", "PWD="+m.Dir)
	if m.Token != "" {
		cmd.Env = append(cmd.Env, "DLROVER_TOKEN="+m.Token, "DLROVER_TOKEN_FILE=")
	}
	cmd.ExtraFiles = []*os.File{handed}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	return cmd
}

// orders reads them until the starter is gone.
func orders(r *bufio.Reader) <-chan order {
	out := make(chan order, 16)
	go func() {
		defer close(out)
		for {
			line, err := r.ReadSlice('\n')
			if err != nil {
				return
			}
			out <- parseOrder(strings.TrimSuffix(string(line), "\n"))
		}
	}()
	return out
}

// agent follows a launcher.
type agent struct {
	launcher *os.Process
	handed   *os.File
	grace    time.Duration
	drain    time.Duration
	done     <-chan struct{}
	signals  <-chan os.Signal
	orders   <-chan order
	passed   map[came]time.Time
}

// came is a signal, and the way it came.
type came struct {
	signal  syscall.Signal
	ordered bool
}

// follow returns once the launcher has ended.
func (a *agent) follow() {
	quiet := time.NewTimer(silence)
	defer quiet.Stop()
	for {
		select {
		case <-a.done:
			return
		case s := <-a.signals:
			a.pass(came{s.(syscall.Signal), false})
		case o, open := <-a.orders:
			if !open {
				a.end()
				return
			}
			quiet.Reset(silence)
			a.obey(o)
		case <-quiet.C:
			a.end()
			return
		}
	}
}

func (a *agent) obey(o order) {
	switch {
	case o.leave && stageOf(a.handed) != ended: // a further signal would cut its end short
		a.pass(came{syscall.SIGTERM, true})
	case o.signal != 0:
		a.pass(came{o.signal, true})
	}
}

// pass signals the launcher, unless the same signal has just come the other way.
func (a *agent) pass(c came) {
	other := came{c.signal, !c.ordered}
	at, is := a.passed[other]
	delete(a.passed, other)
	if is && time.Since(at) < sameSignal {
		return
	}
	a.passed[c] = time.Now()
	_ = a.launcher.Signal(c.signal)
}

// end ends a launcher without a starter. A launcher after its run ends by itself: SIGTERM would cut its last
// checkpoints short.
func (a *agent) end() {
	within := a.grace
	if stageOf(a.handed) == ended {
		within += a.drain
	} else {
		_ = a.launcher.Signal(syscall.SIGTERM)
	}
	late := time.NewTimer(within)
	defer late.Stop()
	for {
		select {
		case <-a.done:
			return
		case s := <-a.signals:
			a.pass(came{s.(syscall.Signal), false})
		case <-late.C:
			_ = a.launcher.Kill()
			<-a.done
			return
		}
	}
}

func exitStatus(s syscall.WaitStatus) int {
	if s.Signaled() {
		return 128 + int(s.Signal())
	}
	return s.ExitStatus()
}
