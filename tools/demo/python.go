package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// python is an interpreter that can run the training.
type python struct{ path, torch string }

// probe prints where the interpreter really is: python3 in PATH may be a wrapper.
const probe = `import sys, torch, torch.distributed as d
assert d.is_available() and hasattr(d, "ProcessGroupGloo"), "this torch was built without gloo"
print(sys.executable); print(torch.__version__)`

// probeLimit is ample for an import of torch from a cold disk.
const probeLimit = 2 * time.Minute

const debianPython = "/usr/bin/python3"

// findPython returns an interpreter with torch, which it installs if it may.
func findPython(ctx context.Context, s *screen, dir string) (python, error) {
	s.status("looking for a Python with PyTorch ...")
	candidates := []string{"python3", debianPython}
	chosen := os.Getenv("TORCH_PYTHON")
	if chosen != "" {
		candidates = []string{chosen}
	}
	var tried []string
	for _, c := range candidates {
		p, err := probePython(ctx, c)
		if err == nil {
			return p, nil
		}
		tried = append(tried, fmt.Sprintf("%s: %s", c, err))
	}
	if ctx.Err() != nil {
		return python{}, context.Cause(ctx)
	}
	if chosen != "" {
		return python{}, fmt.Errorf("$TORCH_PYTHON=%s cannot run the training: %s", chosen, tried[0])
	}
	if os.Geteuid() == 0 && hasApt() {
		if err := installTorch(ctx, s, dir+"/apt.log"); err != nil {
			return python{}, err
		}
		return probePython(ctx, debianPython)
	}
	return python{}, fmt.Errorf("no Python with PyTorch (%s); install it with 'apt-get install python3-torch' as root "+
		"on Debian or Ubuntu, or with 'pip install torch' in a virtual environment whose interpreter you name in "+
		"TORCH_PYTHON", strings.Join(tried, "; "))
}

func probePython(ctx context.Context, name string) (python, error) {
	ctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, "-c", probe)
	cmd.Env = environment()
	cmd.WaitDelay = time.Second
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	switch {
	case ctx.Err() != nil:
		return python{}, fmt.Errorf("'import torch' did not end within %s", probeLimit)
	case err != nil && stderr.Len() > 0:
		return python{}, errors.New(lastLine(stderr.Bytes()))
	case err != nil:
		return python{}, err
	case len(lines) != 2:
		return python{}, fmt.Errorf("unexpected output %q", out)
	}
	return python{path: lines[0], torch: lines[1]}, nil
}

// environment is ours without variables that would configure the launchers or the workers.
func environment() []string {
	var env []string
	for _, kv := range os.Environ() {
		if !steers(kv[:strings.IndexByte(kv+"=", '=')]) {
			env = append(env, kv)
		}
	}
	return env
}

func steers(name string) bool {
	for _, prefix := range []string{
		"PET_", "DLROVER_", "TORCHELASTIC_", "TORCH_", "MASTER_", "GLOO_", "NODE_", "POD_", "WORKER_",
	} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	switch name {
	case "RANK", "LOCAL_RANK", "WORLD_SIZE", "ELASTIC_JOB_NAME", "LOGLEVEL", "PYTHON_EXEC":
		return true
	}
	return false
}

func hasApt() bool {
	_, err := exec.LookPath("apt-get")
	return err == nil
}

// installTorch takes Debian's package: it needs no account, index or compiler.
func installTorch(ctx context.Context, s *screen, logPath string) error {
	log, err := os.Create(logPath)
	if err != nil {
		return fmt.Errorf("log of apt-get: %w", err)
	}
	defer log.Close()
	s.line("no Python with PyTorch here; installing python3-torch with apt-get (some 100 MB)")
	began := time.Now()
	for _, args := range [][]string{{"update"}, {"install", "-y", "--no-install-recommends", "python3-torch"}} {
		cmd := exec.CommandContext(ctx, "apt-get", args...)
		cmd.Env = append(environment(), "DEBIAN_FRONTEND=noninteractive")
		cmd.Stdout, cmd.Stderr = log, log
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // dpkg must not be torn by our Ctrl-C
		cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
		err := watchRun(cmd, func() { s.installing(began, args[0], logPath) })
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			return fmt.Errorf("apt-get %s: %w: %s; install PyTorch yourself ('pip install torch' in a virtual environment) "+
				"and name its interpreter in TORCH_PYTHON", strings.Join(args, " "), err, lastLineOf(logPath))
		}
	}
	s.line("installed python3-torch in %.0f s", time.Since(began).Seconds())
	return nil
}

// watchRun runs cmd and calls tick every second meanwhile.
func watchRun(cmd *exec.Cmd, tick func()) error {
	if err := cmd.Start(); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }() // waited for below
	ticks := time.NewTicker(time.Second)
	defer ticks.Stop()
	for {
		select {
		case err := <-done:
			return err
		case <-ticks.C:
			tick()
		}
	}
}

// installing shows that apt-get is alive: each second on a terminal, else now and then.
func (s *screen) installing(began time.Time, what, logPath string) {
	elapsed := int(time.Since(began).Seconds())
	switch text := fmt.Sprintf("%4d s  apt-get %s: %s", elapsed, what, lastLineOf(logPath)); {
	case s.tty:
		s.status("%s", text)
	case elapsed%10 == 0:
		s.line("%s", text)
	}
}

func lastLineOf(path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return lastLine(data)
}

// lastLine is the last line of a program's output; a carriage return starts a line anew.
func lastLine(text []byte) string {
	text = bytes.TrimSpace(text)
	return string(text[bytes.LastIndexAny(text, "\r\n")+1:])
}

func lastLines(path string, n int) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
