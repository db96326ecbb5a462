// Package python measures with the PyTorch of the job: how fast the devices of this node compute, and how fast they
// communicate with those of other nodes.
//
// A small program (probe.py) runs in the job's own Python, imports PyTorch once, and carries out one command after the
// other, each in one process per device. Commands and answers are lines of JSON.
package python

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"dlrover-run/netcheck"
)

//go:embed probe.py
var program string

// boot makes the interpreter read the program from descriptor 3, and find no modules in the current directory by
// accident. An interpreter in safe-path mode does not look there anyway:
// https://docs.python.org/3/using/cmdline.html#cmdoption-P.
const boot = `import sys
if sys.path[:1] == [""]: del sys.path[0]
import os
exec(compile(os.fdopen(3).read(), "netcheck probe", "exec"))`

// The reasons why PyTorch cannot be used. Errors wrap one of these with details.
var (
	errNoTorch = errors.New("PyTorch is not installed")
	errImport  = errors.New("PyTorch cannot be imported")
	errEnded   = errors.New("the probe has ended")
)

// Device is a kind of accelerator, as PyTorch calls it.
type Device string

// The kinds of devices.
const (
	CUDA Device = "cuda" // NVIDIA's, and AMD's and MetaX', which go by its name
	NPU  Device = "npu"  // Ascend
	MUSA Device = "musa" // Moore Threads
	CPU  Device = "cpu"
)

// Config of a Runner.
type Config struct {
	Interpreter string   // the Python of the job's workers
	Env         []string // of the job's workers. Default: this process's
	Dir         string   // where it runs. Default: this process's
	Device      Device   // the devices to measure. Default: CUDA
	// Devices is the number that the launcher has found, and Wants whether the user requires some: then a PyTorch that
	// finds none, or fewer, fails the node.
	Devices int
	Wants   bool
	// Addr is this node's address for the others. Collectives go over its interface, unless Env names another one.
	Addr string
	// Store serves PyTorch's store to the nodes with the addresses allow, at addr (host:port), until release is called.
	Store func(allow []string) (addr string, release func(), err error)
	// ImportTimeout bounds the import of PyTorch. Default: netcheck.ImportTimeout.
	ImportTimeout time.Duration
	// Start starts a command and returns the function that waits for it. A program that reaps unknown children must
	// know of these. Default: Cmd.Start and Cmd.Wait.
	Start func(*exec.Cmd) (wait func() error, err error)
	Log   *slog.Logger
}

const (
	maxLine = 1 << 16 // bytes of an answer
	// reaping is how long killed processes may take to end before they are left behind: in an uninterruptible wait
	// they may never end.
	reaping = time.Second
)

// Runner is a running probe. Its methods may be called from any goroutine; commands wait for each other.
//
// Goroutines, which end with the process: one reads the answers, one reads the output, and one waits for the end.
type Runner struct {
	cfg    Config
	log    *slog.Logger
	pid    int
	stdin  *os.File
	turn   chan struct{} // holds the right to give a command
	lastID int           // of the command with the turn

	ready   chan struct{} // closed once PyTorch is imported, or will not be
	answers chan reply
	over    chan struct{} // closed when the process is reaped and its output read
	printed tail

	mu      sync.Mutex
	greeted bool
	hello   hello  // valid once ready is closed
	err     error  // why PyTorch cannot be used; valid once ready is closed
	ended   error  // why the process was ended, if it was on purpose
	status  error  // how it ended; valid once over is closed
	stop    func() // removes the actions for the end of ctx and of the import's time
}

// Start starts the probe, which begins to import PyTorch. When ctx ends, or Close is called, all its processes are
// killed and reaped.
func Start(ctx context.Context, cfg Config) (*Runner, error) {
	cfg.defaults()
	r := &Runner{
		cfg: cfg, log: cfg.Log, turn: make(chan struct{}, 1), ready: make(chan struct{}),
		answers: make(chan reply), over: make(chan struct{}),
	}
	if err := r.start(); err != nil {
		return nil, fmt.Errorf("start %s for the node check: %w", cfg.Interpreter, err)
	}
	stopCtx := context.AfterFunc(ctx, func() { r.kill(context.Cause(ctx)) })
	late := time.AfterFunc(cfg.ImportTimeout, r.importLate)
	r.stop = func() { stopCtx(); late.Stop() }
	return r, nil
}

func (c *Config) defaults() {
	if c.Env == nil {
		c.Env = os.Environ()
	}
	if c.Start == nil {
		c.Start = func(cmd *exec.Cmd) (func() error, error) { return cmd.Wait, cmd.Start() }
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	c.Device = cmp.Or(c.Device, CUDA)
	c.ImportTimeout = cmp.Or(c.ImportTimeout, netcheck.ImportTimeout)
}

// pipes are the ends of the probe's pipes. Theirs are the child's.
type pipes struct {
	stdin, source, answers, output        *os.File
	theirStdin, theirSource, theirAnswers *os.File
	theirOutput                           *os.File
}

func newPipes() (p pipes, err error) {
	pipe := func(read, write **os.File) {
		if err == nil {
			*read, *write, err = os.Pipe()
		}
	}
	pipe(&p.theirStdin, &p.stdin)
	pipe(&p.theirSource, &p.source)
	pipe(&p.answers, &p.theirAnswers)
	pipe(&p.output, &p.theirOutput)
	if err != nil {
		p.closeTheirs()
		p.closeOurs()
	}
	return p, err
}

func (p pipes) closeTheirs() { closeAll(p.theirStdin, p.theirSource, p.theirAnswers, p.theirOutput) }

func (p pipes) closeOurs() { closeAll(p.stdin, p.source, p.answers, p.output) }

func closeAll(files ...*os.File) {
	for _, f := range files {
		_ = f.Close() // nil is an error without harm
	}
}

func (r *Runner) start() error {
	p, err := newPipes()
	if err != nil {
		return err
	}
	cmd := exec.Command(r.cfg.Interpreter, "-c", boot, string(r.cfg.Device))
	cmd.Dir, cmd.Env = r.cfg.Dir, r.cfg.environ()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = p.theirStdin, p.theirOutput, p.theirOutput
	cmd.ExtraFiles = []*os.File{p.theirSource, p.theirAnswers}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	wait, err := r.cfg.Start(cmd)
	p.closeTheirs()
	if err != nil {
		p.closeOurs()
		return err
	}
	r.pid, r.stdin = cmd.Process.Pid, p.stdin
	go r.live(p, wait)
	return nil
}

// live is the life of the process.
func (r *Runner) live(p pipes, wait func() error) {
	var readers sync.WaitGroup
	readers.Go(func() { r.hear(p.answers) })
	readers.Go(func() { _, _ = io.Copy(&r.printed, p.output) })
	readers.Go(func() {
		_, _ = io.WriteString(p.source, program) // an interpreter that ends at once does not read it
		p.source.Close()
	})
	err := wait()
	_ = syscall.Kill(-r.pid, syscall.SIGKILL) // its children
	for _, f := range []*os.File{p.answers, p.output, p.source} {
		_ = f.SetDeadline(time.Now().Add(reaping / 2)) // do not wait for another holder of a pipe
	}
	readers.Wait()
	p.closeOurs()
	r.status = r.endedBy(err)
	close(r.over)
	r.settle(hello{}, fmt.Errorf("%w: %w", errImport, r.status))
}

// hear reads the answers of the probe.
func (r *Runner) hear(answers io.Reader) {
	lines := bufio.NewScanner(answers)
	lines.Buffer(make([]byte, 0, 4096), maxLine)
	for lines.Scan() {
		a, err := parse(lines.Bytes())
		if err != nil {
			r.kill(err)
			return
		}
		if a.hello != nil {
			r.settle(*a.hello, a.hello.problem())
			continue
		}
		select {
		case r.answers <- a:
		case <-time.After(reaping): // its command has returned
		}
	}
	if errors.Is(lines.Err(), bufio.ErrTooLong) {
		r.kill(fmt.Errorf("the probe answers with more than %d bytes", maxLine))
	}
}

// settle stores whether PyTorch can be used. Only the first call counts.
func (r *Runner) settle(h hello, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.greeted {
		return
	}
	r.greeted, r.hello, r.err = true, h, err
	close(r.ready)
	r.log.Debug("PyTorch for the node check", "version", h.version(), "devices", h.Devices, "seconds", h.Seconds,
		"err", err)
}

func (r *Runner) importLate() {
	select {
	case <-r.ready:
	default:
		err := fmt.Errorf("%w: its import takes more than %v", errImport, r.cfg.ImportTimeout)
		r.settle(hello{}, err)
		r.kill(err)
	}
}

// endedBy explains the end of the process by its exit status.
func (r *Runner) endedBy(status error) error {
	r.mu.Lock()
	why := r.ended
	r.mu.Unlock()
	switch last := r.printed.lastLine(); {
	case why != nil:
		return why
	case status == nil:
		status = errors.New("exit status 0")
		fallthrough
	case last == "":
		return fmt.Errorf("%w: %w", errEnded, status)
	default:
		return fmt.Errorf("%w: %w: %s", errEnded, status, last)
	}
}

// kill ends all processes of the probe for the given reason.
func (r *Runner) kill(why error) {
	r.mu.Lock()
	if r.ended == nil {
		r.ended = why
	}
	r.mu.Unlock()
	select {
	case <-r.over:
		return
	default:
	}
	below := descendants(r.pid) // some may have left the group
	_ = syscall.Kill(-r.pid, syscall.SIGKILL)
	for _, pid := range below {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// Close ends the probe. It returns when all its processes are reaped, or do not end a second after they were killed.
func (r *Runner) Close() {
	r.stop()
	r.kill(errors.New("the node check is over"))
	select {
	case <-r.over:
	case <-time.After(reaping):
		r.log.Warn("processes of the node check do not end when they are killed", "pid", r.pid)
	}
}

// Ready waits until PyTorch is imported and returns its versions. The error wraps errNoTorch, or errImport, or is why
// ctx ended.
func (r *Runner) Ready(ctx context.Context) (version string, err error) {
	select {
	case <-r.ready:
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
	return r.hello.version(), r.err
}

// Findings are the faults of this node's devices that PyTorch has found, once Ready has returned.
func (r *Runner) Findings() []netcheck.Finding {
	missing := r.missing()
	if missing == "" {
		return nil
	}
	return []netcheck.Finding{{
		Check: "torch", Kind: "compute", Severity: netcheck.Fatal, Metric: "devices", Value: float64(r.hello.Devices),
		Threshold: float64(max(r.cfg.Devices, 1)), Text: missing,
	}}
}

// missing lists the devices that PyTorch should find but does not; "" is none, or not known yet.
func (r *Runner) missing() string {
	select {
	case <-r.ready:
	default:
		return ""
	}
	found, want := r.hello.Devices, max(r.cfg.Devices, 1)
	if r.err != nil || !r.cfg.Wants || r.cfg.Device == CPU || found >= want {
		return ""
	}
	text := fmt.Sprintf("PyTorch %s finds %d of %d devices", r.hello.version(), found, want)
	if found == 0 {
		text = fmt.Sprintf("PyTorch %s finds no device (%s), and this node should have %d", r.hello.version(),
			r.cfg.Device, want)
	}
	return strings.TrimSuffix(text+": "+r.hello.Why, ": ")
}

// command is one order to the probe.
type command struct {
	ID    int     `json:"id"`
	Do    string  `json:"do"`    // compute, collective, cancel
	Limit float64 `json:"limit"` // seconds
	Quick bool    `json:"quick"`
	// Of a collective: where the store is, the names in it, and which of how many nodes this one is.
	Host  string `json:"host,omitempty"`
	Port  int    `json:"port,omitempty"`
	Test  string `json:"test,omitempty"`
	Rank  int    `json:"rank"`
	World int    `json:"world,omitempty"`
}

// do gives a command and waits for its answer. When ctx ends the command is canceled first.
func (r *Runner) do(ctx context.Context, c command) ([]measured, error) {
	select {
	case r.turn <- struct{}{}:
		defer func() { <-r.turn }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	r.lastID++
	c.ID = r.lastID
	if err := r.tell(c); err != nil {
		return nil, err
	}
	select {
	case a := <-r.answers:
		return a.result(c.ID)
	case <-r.over:
		return nil, r.status
	case <-ctx.Done():
		r.cancel()
		return nil, context.Cause(ctx)
	}
}

func (r *Runner) tell(c command) error {
	text, err := json.Marshal(c)
	if err != nil {
		return err
	}
	if _, err := r.stdin.Write(append(text, '\n')); err != nil {
		<-r.over // soon: the commands have no reader any more
		return r.status
	}
	return nil
}

// cancel stops the running command. A probe that does not confirm it at once is not used any more.
func (r *Runner) cancel() {
	if r.tell(command{Do: "cancel"}) != nil {
		return
	}
	select {
	case <-r.answers:
	case <-r.over:
	case <-time.After(reaping / 2):
		r.kill(errors.New("the probe did not stop when it was told to"))
	}
}

// tail keeps the end of its input.
type tail struct {
	mu   sync.Mutex
	text []byte
}

// maxTail bounds a tail, in bytes.
const maxTail = 8 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p[max(0, len(p)-maxTail):]...)
	t.text = t.text[max(0, len(t.text)-maxTail):]
	return len(p), nil
}

func (t *tail) lastLine() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	text := bytes.TrimSpace(t.text)
	return oneLine(string(text[bytes.LastIndexByte(text, '\n')+1:]))
}
