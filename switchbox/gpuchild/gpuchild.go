// Package gpuchild runs gpucheck for a program that must survive its failures: gpucheck's driver may hang, crash or be
// too old for it, and images may lack it. All of that is returned as a switchbox.Report in words.
package gpuchild

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"dlrover-run/switchbox"
)

const (
	// adaptor is gpucheck's name in Reports.
	adaptor = "nvml"
	// variable names gpucheck's file where it lies neither next to the launcher nor in PATH.
	variable = "DLROVER_GPUCHECK"
	program  = "gpucheck"
)

// Find returns gpucheck's file: the value of DLROVER_GPUCHECK, else the one next to the executable, else the one in
// PATH. "" means that there is none.
func Find(executable string) string {
	if path := os.Getenv(variable); path != "" {
		return path
	}
	beside := filepath.Join(filepath.Dir(executable), program)
	if info, err := os.Stat(beside); err == nil && info.Mode().IsRegular() {
		return beside
	}
	path, err := exec.LookPath(program)
	if err != nil {
		return ""
	}
	return path
}

// Program is gpucheck's file, "" if there is none, and the function that starts it. Start is needed if this process
// reaps children that it does not know; nil: Cmd.Start and Cmd.Wait.
type Program struct {
	Path  string
	Start func(*exec.Cmd) (wait func() error, err error)
}

// UsageError is gpucheck's error about its arguments, such as a pair with a GPU that is not on this node.
type UsageError struct{ Text string }

func (e *UsageError) Error() string { return e.Text }

// Timeouts for operations that are normally quick.
const (
	grace = 2 * time.Second // from the report to the end of the process
	reap  = 3 * time.Second // from SIGKILL to the end of the process
)

// Run starts gpucheck with args and --json and returns its Report. It needs a ctx with a deadline somewhat after
// gpucheck's own (--timeout): gpucheck can name the call that hangs. When ctx ends, Run kills the process and its
// children and waits for them. A process that is stuck in the kernel cannot be killed: after some seconds it is left
// behind, with a goroutine that waits for its end.
//
// The error is a *UsageError, or that of a ctx that was cancelled. Everything else is in the Report.
func (p Program) Run(ctx context.Context, args ...string) (switchbox.Report, error) {
	path := p.Path
	if path == "" {
		return skip("there is no gpucheck beside the launcher or in PATH, and %s is not set", variable), nil
	}
	started := time.Now()
	c, err := p.start(args)
	if err != nil {
		return notStarted(path, err), nil
	}
	e := c.wait(ctx)
	if errors.Is(ctx.Err(), context.Canceled) {
		return switchbox.Report{}, ctx.Err()
	}
	e.took = time.Since(started)
	return e.report()
}

// start begins the process, as the leader of a group of its own.
func (p Program) start(args []string) (*child, error) {
	c := &child{ended: make(chan error, 1)}
	c.stdout = newHead(switchbox.MaxReport + 1)
	c.stderr = newHead(4 << 10)
	c.cmd = exec.Command(p.Path, append([]string{"--json"}, args...)...)
	c.cmd.Env = environment(os.Environ())
	c.cmd.Stdout, c.cmd.Stderr = c.stdout, c.stderr
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.cmd.WaitDelay = time.Second // for children of its own that hold the pipes
	begin := p.Start
	if begin == nil {
		begin = func(cmd *exec.Cmd) (func() error, error) { return cmd.Wait, cmd.Start() }
	}
	wait, err := begin(c.cmd)
	if err != nil {
		return nil, err
	}
	go func() { c.ended <- wait() }()
	return c, nil
}

// environment is the child's. Bound at once instead of when it is called, a function that the driver lacks would end
// gpucheck at its start. One that crashes shall not print a whole program's state.
func environment(env []string) []string {
	return append(slices.DeleteFunc(slices.Clone(env), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return name == "LD_BIND_NOW" || name == "GOTRACEBACK"
	}), "GOTRACEBACK=single")
}

// child is gpucheck's process.
type child struct {
	cmd            *exec.Cmd
	ended          chan error // the result of Wait, once
	stdout, stderr *head
}

// wait waits for the first of these: the end of the process, the end of ctx, a whole line of output and some time more,
// or more output than a report has. Then nothing of its group is left.
func (c *child) wait(ctx context.Context) ending {
	var late <-chan time.Time
	line := c.stdout.line
	for {
		select {
		case err := <-c.ended:
			c.kill()
			return c.ending(err, false)
		case <-line: // closed once: the report is complete
			line, late = nil, time.After(grace)
		case <-c.stdout.full:
			return c.stop(false)
		case <-late:
			return c.stop(false)
		case <-ctx.Done():
			return c.stop(true)
		}
	}
}

// stop kills the group and waits for the process, as long as that makes sense.
func (c *child) stop(late bool) ending {
	c.kill()
	select {
	case err := <-c.ended:
		return c.ending(err, late)
	case <-time.After(reap):
		e := c.ending(nil, late)
		e.stuck = true
		return e
	}
}

func (c *child) kill() { syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL) }

func (c *child) ending(err error, late bool) ending {
	e := ending{stdout: c.stdout.text(), stderr: c.stderr.text(), late: late, status: -1}
	if errors.Is(err, exec.ErrWaitDelay) { // it ended well; something else held its pipes
		err = nil
	}
	exit, failed := errors.AsType[*exec.ExitError](err)
	if !failed {
		e.status = 0
		return e
	}
	if w := exit.Sys().(syscall.WaitStatus); w.Signaled() {
		e.signal = w.Signal()
	} else {
		e.status = w.ExitStatus()
	}
	return e
}

func skip(format string, args ...any) switchbox.Report {
	return switchbox.Skip(adaptor, fmt.Sprintf(format, args...))
}

// notStarted explains why there is no process. If a program's loader is missing, the kernel reports that the program is
// missing.
func notStarted(path string, err error) switchbox.Report {
	switch _, stat := os.Stat(path); {
	case errors.Is(err, fs.ErrNotExist) && stat == nil:
		return skip("%s cannot run here: it needs glibc, and this image has none", path)
	case errors.Is(err, fs.ErrNotExist):
		return skip("there is no %s", path)
	case errors.Is(err, syscall.ENOEXEC):
		return skip("%s is not for this kind of machine", path)
	default:
		return skip("%s cannot be started: %v", path, err)
	}
}
