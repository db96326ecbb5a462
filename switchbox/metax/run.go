package metax

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const (
	// maxOutput bounds the bytes kept of a tool's output, and of its errors.
	maxOutput = 64 << 10
	// patience bounds the wait for a killed process, and for the holders of its output. A process in an uninterruptible
	// wait in the kernel may never end.
	patience = time.Second
)

// errFlood is the cause of a tool's end that it prints too much.
var errFlood = fmt.Errorf("it prints more than %d KiB", maxOutput>>10)

// run runs a tool with its own process group, kills the group before it returns, and returns the tool's output.
func (c Config) run(ctx context.Context, args ...string) ([]byte, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	cmd := exec.Command(c.Tool, args...)
	cmd.Env = c.environ()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	// Files, and no writers: Wait then waits for the process alone, and not for heirs of its output.
	out, err := capture(&cmd.Stdout, cancel)
	if err != nil {
		return nil, err
	}
	errs, err := capture(&cmd.Stderr, cancel)
	if err != nil {
		out.abort()
		return nil, err
	}
	err = c.await(ctx, cmd, func() { out.started(); errs.started() })
	text, said := out.end(), errs.end()
	if err != nil {
		return nil, withLastLine(err, said)
	}
	return text, context.Cause(ctx)
}

// await starts the tool and waits for its end, or brings it about when ctx ends.
func (c Config) await(ctx context.Context, cmd *exec.Cmd, started func()) error {
	wait, err := c.Start(cmd)
	started()
	if err != nil {
		return err
	}
	group := cmd.Process.Pid
	ended := make(chan error, 1)
	go func() { ended <- wait() }()
	select {
	case err = <-ended:
		_ = syscall.Kill(-group, syscall.SIGKILL) // its children
		return err
	case <-ctx.Done():
	}
	_ = syscall.Kill(-group, syscall.SIGKILL)
	select {
	case <-ended:
		return context.Cause(ctx)
	case <-time.After(patience):
		return fmt.Errorf("%w, and it does not end when it is killed", context.Cause(ctx))
	}
}

// output is the text that a process prints.
type output struct {
	read, write *os.File
	text        []byte
	done        chan struct{}
}

// capture makes dst a pipe that is read up to a bound, beyond which cancel is called.
func capture(dst *io.Writer, cancel context.CancelCauseFunc) (*output, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	o := &output{read: r, write: w, done: make(chan struct{})}
	*dst = w
	go func() {
		defer close(o.done)
		o.text, _ = io.ReadAll(io.LimitReader(r, maxOutput+1)) // the deadline of end is no failure
		if len(o.text) > maxOutput {
			cancel(errFlood)
		}
	}()
	return o, nil
}

// started is called when the process has its end of the pipe, or will not get it.
func (o *output) started() { o.write.Close() }

// end returns the printed text. It does not wait for other holders of the pipe.
func (o *output) end() []byte {
	_ = o.read.SetReadDeadline(time.Now().Add(patience))
	<-o.done
	o.read.Close()
	return o.text[:min(len(o.text), maxOutput)]
}

func (o *output) abort() {
	o.started()
	o.end()
}

// environ is that of this process without the variables that hide devices: indices are those of the whole node.
func (c Config) environ() []string {
	env := []string{} // nil would be everything
	for _, kv := range c.Environ {
		name, _, _ := strings.Cut(kv, "=")
		if name != visibilities[0] && name != visibilities[1] {
			env = append(env, kv)
		}
	}
	return env
}

// executable returns an error that explains why the tool cannot be used.
func executable(tool string) error {
	if !filepath.IsAbs(tool) {
		return errors.New("its path is not absolute")
	}
	info, err := os.Stat(tool)
	switch {
	case err != nil:
		return errors.Unwrap(err) // without the path
	case info.IsDir() || info.Mode()&0o111 == 0:
		return errors.New("it is not a program")
	}
	return nil
}

func withLastLine(err error, text []byte) error {
	text = bytes.TrimSpace(text)
	if last := text[bytes.LastIndexByte(text, '\n')+1:]; len(last) > 0 {
		return fmt.Errorf("%w: %.200s", err, last)
	}
	return err
}
