package pystack

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"dlrover-run/hang"
)

// toolTime bounds eu-stack, and toolOutput its output, in bytes.
const (
	toolTime   = 2 * time.Second
	toolOutput = 8 << 20
)

// tool asks eu-stack for the native frames, if that is safe. It stops the process by ptrace: a thread that cannot stop
// now, or is stopped already, would stay so when eu-stack is killed.
func (s *survey) tool(ctx context.Context) {
	path, err := exec.LookPath("eu-stack")
	if err != nil || !traceable(s.tasks) || tracerOf(s.pid) != 0 {
		return
	}
	target, err := os.FindProcess(s.pid) // by a pidfd
	if err != nil {
		return
	}
	defer target.Release()
	out, err := runTool(ctx, path, s.pid)
	if err != nil || anyStopped(s.pid) {
		// The stop may still be on its way to a thread; this takes it back.
		_ = target.Signal(syscall.SIGCONT)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		s.problem("eu-stack did not end within %s", toolTime)
	}
	byTID := map[int]task{}
	for _, t := range s.tasks {
		byTID[t.tid] = t
	}
	for tid, frames := range parseTool(string(out)) {
		if t, ok := byTID[tid]; ok && len(frames) > 0 {
			s.thread(t, true).Native = fold(frames)
		}
	}
}

// traceable reports whether no thread is in a state that tracing could make worse.
func traceable(tasks []task) bool {
	for _, t := range tasks {
		if strings.IndexByte("DTtZX", t.state) >= 0 {
			return false
		}
	}
	return true
}

func anyStopped(pid int) bool {
	tasks, _ := readTasks(pid)
	for _, t := range tasks {
		if t.state == 'T' {
			return true
		}
	}
	return false
}

// tracerOf is the process that traces another; 0 is none.
func tracerOf(pid int) int {
	b, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	_, rest, _ := strings.Cut(string(b), "\nTracerPid:")
	line, _, _ := strings.Cut(rest, "\n")
	tracer, _ := strconv.Atoi(strings.TrimSpace(line))
	return tracer
}

// runTool returns the output of eu-stack. Its error means that it did not end; incomplete output is no error.
func runTool(ctx context.Context, path string, pid int) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, toolTime)
	defer cancel()
	// Modules, and names as they are in the files; without a look at debug information on the net.
	cmd := exec.CommandContext(ctx, path, "-m", "-r", "-n", strconv.Itoa(maxNativeFrames), "-p", strconv.Itoa(pid))
	cmd.Env = append(os.Environ(), "DEBUGINFOD_URLS=")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 100 * time.Millisecond
	out := limitedBuffer{left: toolOutput}
	cmd.Stdout = &out
	err := cmd.Run()
	if _, exited := errors.AsType[*exec.ExitError](err); exited && ctx.Err() == nil {
		err = nil
	}
	return out.Bytes(), errors.Join(err, ctx.Err())
}

// limitedBuffer keeps the beginning of the written data.
type limitedBuffer struct {
	bytes.Buffer
	left int
}

func (b *limitedBuffer) Write(p []byte) (int, error) {
	n := min(len(p), b.left)
	b.left -= n
	b.Buffer.Write(p[:n])
	return len(p), nil
}

// parseTool reads the output of eu-stack -m -r: TID 42:, and then lines as #1  0x00007f12 name - /lib/libc.so.6.
func parseTool(out string) map[int][]hang.Frame {
	stacks := map[int][]hang.Frame{}
	tid := 0
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(line)
		if rest, ok := strings.CutPrefix(line, "TID "); ok {
			tid, _ = strconv.Atoi(strings.TrimSuffix(rest, ":"))
			continue
		}
		if tid == 0 || !strings.HasPrefix(line, "#") || len(stacks[tid]) == maxNativeFrames {
			continue
		}
		stacks[tid] = append(stacks[tid], parseToolFrame(line))
	}
	return stacks
}

func parseToolFrame(line string) hang.Frame {
	_, line, _ = strings.Cut(line, " ") // the number
	line = strings.TrimSpace(line)
	_, line, _ = strings.Cut(line, " ") // the address
	name, file := line, ""
	if i := strings.LastIndex(line, " - "); i >= 0 {
		name, file = line[:i], strings.TrimSpace(line[i+3:])
	} else if strings.HasPrefix(line, "- ") { // no name
		name, file = "", line[2:]
	}
	name, _, _ = strings.Cut(strings.TrimSpace(name), "@") // of a version
	return hang.Frame{Func: demangle(name), File: file}
}
