// Package healthcheck asks the site's own check whether this node is healthy: a command, or a service on a socket.
//
// A command is run by /bin/sh. Exit status 0 is healthy and any other is not, except 126 and 127, with which the shell
// reports that there is no such command. A command may print JSON, and a service may answer a GET with it, for more
// detail:
//
//	{"verdict": "ok", "failed_checks": ["nvlink"], "message": "..."}
//
// All keys are optional, others are ignored. Words for healthy are ok, pass, passed, healthy, success and true; for
// unhealthy fail, failed, faulty, unhealthy, error and false; warn and warning let the node through. A check that fails
// by its exit status has failed, with any output. An empty answer is a warning and no fault: a check that is broken
// must not take a cluster out of service.
package healthcheck

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"dlrover-run/internal/plainhttp"
	"dlrover-run/internal/text"
)

// Outcome is the result of a check.
type Outcome int

// The outcomes.
const (
	Healthy Outcome = iota
	Unclear         // it could not be reached, or gave no usable answer
	Unhealthy
)

// Answer is an Outcome with the reason for it in one line; "" if healthy without further words.
type Answer struct {
	Outcome Outcome
	Reason  string
}

// Bounds of a check's answer.
const (
	maxOutput = 64 << 10 // bytes of its standard output, or of a service's answer
	maxReason = 300      // bytes
)

// Socket is the prefix of a check that is a service on a Unix socket, before the socket's path.
const Socket = "unix:"

// Start starts a command and returns the function that waits for it.
type Start func(*exec.Cmd) (wait func() error, err error)

// Run runs the check that spec names. It ends soon after ctx, and leaves no process of a command's process group.
func Run(ctx context.Context, start Start, spec string, limit time.Duration) Answer {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var a Answer
	if path, ok := strings.CutPrefix(spec, Socket); ok {
		a = ask(ctx, path)
	} else {
		a = execute(ctx, start, spec)
	}
	if ctx.Err() == context.DeadlineExceeded {
		return Answer{Unhealthy, fmt.Sprintf("no answer within %s", limit)}
	}
	return a
}

func execute(ctx context.Context, start Start, command string) Answer {
	out, errs := &head{}, &head{}
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", command)
	cmd.Stdout, cmd.Stderr = out, errs
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second // for a process that left the group and holds the pipes
	wait, err := start(cmd)
	if err == nil {
		err = wait()
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // its children
	}
	var exit *exec.ExitError
	switch {
	case err == nil || errors.Is(err, exec.ErrWaitDelay):
		return judge(out.Bytes(), true)
	case !errors.As(err, &exit):
		return Answer{Unclear, "could not be run: " + err.Error()}
	case exit.ExitCode() == 126 || exit.ExitCode() == 127:
		why := exit.ProcessState.String() + ": " + lastLine(errs.Bytes())
		return Answer{Unclear, "could not be run: " + strings.TrimSuffix(why, ": ")}
	}
	why := exit.ProcessState.String()
	if a := judge(out.Bytes(), true); a.Outcome == Unhealthy {
		why += ": " + a.Reason
	} else if line := lastWords(out.Bytes(), errs.Bytes()); line != "" {
		why += ": " + line
	}
	return Answer{Unhealthy, why}
}

func ask(ctx context.Context, path string) Answer {
	client := plainhttp.New(func(t *http.Transport) {
		t.DisableKeepAlives = true
		t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}
	})
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost/", nil)
	if err != nil {
		return Answer{Unclear, err.Error()}
	}
	resp, err := client.Do(req)
	if err != nil {
		return Answer{Unclear, "could not be asked: " + errors.Unwrap(err).Error()} // without the URL
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxOutput))
	if err != nil || resp.StatusCode != http.StatusOK {
		return Answer{Unclear, fmt.Sprintf("answered %s", resp.Status)}
	}
	return judge(body, false)
}

// verdict is the JSON of a check.
type verdict struct {
	Verdict any      `json:"verdict"`
	Failed  []string `json:"failed_checks"`
	Message string   `json:"message"`
}

// judge reads the output of a check. silent: empty output, or output that is not of this form, means healthy.
func judge(out []byte, silent bool) Answer {
	var v verdict
	text := bytes.TrimSpace(out)
	if len(text) == 0 || text[0] != '{' {
		if silent {
			return Answer{}
		}
		return Answer{Unclear, "its answer is not a JSON object"}
	}
	if err := json.Unmarshal(text, &v); err != nil {
		return Answer{Unclear, "its answer cannot be read: " + err.Error()}
	}
	why := v.Message
	if len(v.Failed) > 0 {
		why = strings.TrimSuffix(strings.Join(v.Failed, ", ")+"; "+why, "; ")
		return Answer{Unhealthy, oneLine(why)}
	}
	return v.answer(oneLine(why))
}

func (v verdict) answer(why string) Answer {
	word := strings.ToLower(fmt.Sprint(v.Verdict))
	switch word {
	case "<nil>", "ok", "pass", "passed", "healthy", "success", "true":
		return Answer{Healthy, why}
	case "fail", "failed", "faulty", "unhealthy", "error", "false":
		if why == "" {
			why = "its verdict is " + word
		}
		return Answer{Unhealthy, why}
	case "warn", "warning":
		return Answer{Unclear, strings.TrimSuffix("it warns: "+why, ": ")}
	}
	return Answer{Unclear, oneLine(fmt.Sprintf("its verdict %q is neither ok nor failed", word))}
}

// oneLine makes a reason of text from outside.
func oneLine(s string) string { return text.Clip(strings.Join(strings.Fields(s), " "), maxReason) }

// lastWords is the last line of a check's errors, else that of its output unless this is JSON.
func lastWords(out, errs []byte) string {
	if line := lastLine(errs); line != "" || bytes.HasPrefix(bytes.TrimSpace(out), []byte("{")) {
		return line
	}
	return lastLine(out)
}

func lastLine(text []byte) string {
	text = bytes.TrimSpace(text)
	return oneLine(string(text[bytes.LastIndexByte(text, '\n')+1:]))
}

// head keeps the beginning of its input, and takes the rest as well.
type head struct{ bytes.Buffer }

func (h *head) Write(p []byte) (int, error) {
	h.Buffer.Write(p[:min(len(p), maxOutput-h.Len())])
	return len(p), nil
}
