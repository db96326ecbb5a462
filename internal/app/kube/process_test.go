package kube_test

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	farewell = 20 * time.Second // for a process to end by itself
	tailSize = 4 << 10          // bytes of a log that a failure shows
)

// process is a program that a test has started. Its output is in a file.
type process struct {
	name, log string
	of        *os.Process
	ended     chan struct{}      // closed
	wait      syscall.WaitStatus // once it has ended
}

// spawn starts a program that ends with the test, or with this process.
func spawn(t *testing.T, dir, program string, args ...string) *process {
	t.Helper()
	name := filepath.Base(program)
	p := &process{name: name, log: filepath.Join(dir, name+".log"), ended: make(chan struct{})}
	out, err := os.Create(p.log)
	check(t, err)
	defer out.Close()
	cmd := exec.Command(program, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // at whose end the program would be killed
		defer runtime.UnlockOSThread()
		defer close(p.ended)
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait()
			p.wait = cmd.ProcessState.Sys().(syscall.WaitStatus)
		}
	}()
	check(t, <-started)
	p.of = cmd.Process
	t.Cleanup(p.end)
	return p
}

func (p *process) end() {
	_ = p.of.Signal(syscall.SIGTERM)
	select {
	case <-p.ended:
	case <-time.After(farewell):
		_ = p.of.Kill()
		<-p.ended
	}
	p.kill()
}

// kill kills the program and what a shell has started, as the end of a container does.
func (p *process) kill() { _ = syscall.Kill(-p.of.Pid, syscall.SIGKILL) }

// tail is the end of what it has printed.
func (p *process) tail() string {
	text, _ := os.ReadFile(p.log)
	return p.name + ":\n" + strings.ToValidUTF8(string(text[max(0, len(text)-tailSize):]), "?")
}

// freePort is a port of 127.0.0.1 that nobody has now.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	check(t, err)
	return port
}
