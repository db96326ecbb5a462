package run

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"dlrover-run/internal/app/run/xputimer"
	"dlrover-run/internal/console"
	"dlrover-run/internal/text"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/proc/inbox"
)

// become runs the workers' Python in place of a job, and passes signals on to it. The guard ends the processes that
// it leaves behind.
func (as *invocation) become(host hostFacts, in *inbox.Inbox, stdout io.Writer) int {
	o := options{env: as.variables(os.LookupEnv), host: host}
	python, err := o.Python()
	if err != nil {
		console.Complain(os.Stderr, as.Name, err)
		return policy.CannotExecute.Code(policy.TorchrunCodes, policy.Nobody)
	}
	if as.command.DryRun {
		return as.printBecome(stdout, python)
	}
	for _, n := range as.command.Notes {
		fmt.Fprintf(os.Stderr, "%s: %s\n", as.Name, text.EscapeLine(n))
	}
	runtime.LockOSThread() // Pdeathsig is sent when this thread ends
	defer runtime.UnlockOSThread()
	cmd := exec.Command(python, as.command.Become...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(xputimer.Setenv(os.Environ(), "PATH", findable(as.Name)), as.command.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	signals := make(chan os.Signal, 16)
	in.Catch(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT)
	if err := cmd.Start(); err != nil {
		console.Complain(os.Stderr, as.Name, err)
		return policy.CannotExecute.Code(policy.TorchrunCodes, policy.Nobody)
	}
	done := make(chan struct{})
	go func() {
		_ = cmd.Wait() // cmd.ProcessState has the details
		close(done)
	}()
	for {
		select {
		case s := <-signals:
			_ = cmd.Process.Signal(s)
		case <-done:
			return exitStatus(cmd.ProcessState.Sys().(syscall.WaitStatus))
		}
	}
}

func exitStatus(s syscall.WaitStatus) int {
	if s.Signaled() {
		return 128 + int(s.Signal())
	}
	return s.ExitStatus()
}

// findable is $PATH. If it lacks the name, the directory of this program is added.
func findable(name string) string {
	list := os.Getenv("PATH")
	if _, err := exec.LookPath(name); err == nil {
		return list
	}
	own, err := exec.LookPath(os.Args[0])
	if err != nil {
		return list
	}
	return strings.TrimPrefix(list+string(os.PathListSeparator)+filepath.Dir(own), string(os.PathListSeparator))
}

func (as *invocation) printBecome(w io.Writer, python string) int {
	p := as.plan()
	p.Execute = append([]string{python}, as.command.Become...)
	return printJSON(w, as.Name, p)
}
