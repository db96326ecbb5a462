// Package hooks runs the commands of --before and --after around every start of the workers of this node.
package hooks

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/duration"
	"dlrover-run/internal/text"
	"dlrover-run/launcher"
	"dlrover-run/launcher/verdict"
)

// Bounds of a command.
const (
	maxLimit = 24 * time.Hour
	grace    = 2 * time.Second        // between SIGTERM and SIGKILL, and until it is left behind
	drain    = 100 * time.Millisecond // for output that is under way when it has ended
	maxLine  = 1 << 10
	maxTail  = 2 << 10 // of the output that a failure quotes
)

// timedOut is the exit code of timeout(1).
const timedOut = 124

const shell = "/bin/sh"

// hooks are the commands; "" is none.
type hooks struct {
	Before  string `json:"before,omitempty"`
	After   string `json:"after,omitempty"`
	Timeout string `json:"timeout"`
	limit   time.Duration
	node    feature.Node
}

// New is the feature.
func New() feature.Feature {
	var h hooks
	return feature.Feature{
		Name:     "hooks",
		Settings: func(o feature.Options) (err error) { h, err = read(o); return err },
		Plan: func(p *feature.Plan) {
			if h.any() {
				p.Features["hooks"] = h
			}
		},
		Open: func(n feature.Node) (*feature.Opened, error) {
			if !h.any() {
				return nil, nil
			}
			h.node = n
			return &feature.Opened{Configure: h.configure}, nil
		},
	}
}

func (h *hooks) any() bool { return h.Before+h.After != "" }

func read(o feature.Options) (h hooks, err error) {
	h.Before, h.After = o.String("before"), o.String("after")
	if !h.any() && o.IsSet("hook-timeout") {
		return h, errors.New("--hook-timeout has no effect without --before and --after: add one of them, or leave this out")
	}
	if h.limit, err = o.Within("hook-timeout", time.Second, maxLimit); err != nil || !h.any() {
		return h, err
	}
	h.Timeout = duration.Text(h.limit)
	if _, err := o.LookPath(shell); err != nil {
		return h, fmt.Errorf("--before and --after need %s on this node: %w; leave them out, or add a shell to the image",
			shell, err)
	}
	return h, nil
}

func (h *hooks) configure(cfg *launcher.Config) {
	if h.Before != "" {
		cfg.Before = h.before
	}
	if h.After != "" {
		cfg.After = h.after
	}
}

func (h *hooks) before(ctx context.Context, e launcher.Epoch) *verdict.Failure {
	return h.run(ctx, "before", h.Before, h.environ("before", e))
}

// after has no say in the job any more.
func (h *hooks) after(ctx context.Context, r launcher.AfterRequest) {
	how, code := "stopped", ""
	switch {
	case r.Succeeded:
		how, code = "success", "0"
	case r.Failed != nil:
		how, code = "failure", strconv.Itoa(shellCode(r.Failed.ExitCode))
	}
	env := append(h.environ("after", r.Epoch), "DLROVER_ENDED="+how, "DLROVER_EXIT_CODE="+code,
		"DLROVER_REASON="+oneLine(r.Reason))
	h.run(ctx, "after", h.After, env)
}

// shellCode is an exit code as a shell has it.
func shellCode(code int) int {
	if code < 0 {
		return 128 - code
	}
	return code
}

// environ describes the start of e.
func (h *hooks) environ(hook string, e launcher.Epoch) []string {
	cause := string(e.Cause.Kind)
	if cause == "" {
		cause = "start"
	}
	env := append(h.node.Environ(), "DLROVER_HOOK="+hook, "DLROVER_RUN_ID="+h.node.Job().RunID, "DLROVER_CAUSE="+cause,
		"DLROVER_CAUSE_TEXT="+oneLine(e.Cause.Text))
	p := e.Place
	for _, v := range []struct {
		name  string
		value int
	}{{"ROUND", e.Round}, {"EPOCH", e.Epoch}, {"NODE_RANK", p.GroupRank}, {"NODES", p.GroupWorldSize},
		{"RESTART_COUNT", p.RestartCount}, {"MAX_RESTARTS", e.MaxRestarts}} {
		env = append(env, "DLROVER_"+v.name+"="+strconv.Itoa(v.value))
	}
	return env
}

func oneLine(s string) string { return text.Line(s, maxLine) }

// run runs a command, and returns why it has failed; nil: it has not.
func (h *hooks) run(ctx context.Context, name, command string, env []string) *verdict.Failure {
	log := h.node.Log()
	log.Info("running the command of --" + name)
	began := time.Now()
	p, err := h.start(command, env, func(line string) { log.Info(name + ": " + line) })
	if err != nil {
		return &verdict.Failure{Role: name, ExitCode: 126, Message: fmt.Sprintf("the command of --%s: %s", name, err)}
	}
	limited, cancel := context.WithTimeout(ctx, h.limit)
	defer cancel()
	state := p.wait(limited)
	took := time.Since(began).Round(time.Millisecond).String()
	if state != nil && state.Success() {
		log.Info("the command of --"+name+" has passed", "took", took)
		return nil
	}
	f := &verdict.Failure{Role: name, PID: p.pid, ExitCode: exitCode(state), LastLines: p.said()}
	f.Message = "the command of --" + name
	switch {
	case ctx.Err() != nil:
		f.Message += " was stopped"
	case limited.Err() != nil:
		f.Message += " did not end within " + h.Timeout + " (--hook-timeout), and was killed"
		f.ExitCode = timedOut
	default:
		f.Message += " failed"
	}
	log.Warn(f.Message, "exit_code", f.ExitCode, "took", took)
	if s := f.LastLines; s != "" {
		f.Message += `, last output "` + oneLine(s[strings.LastIndexByte(s, '\n')+1:]) + `"`
	}
	return f
}

// exitCode is that of state, or the negated signal; without a state it is SIGKILL's.
func exitCode(state *os.ProcessState) int {
	if state == nil {
		return -int(syscall.SIGKILL)
	}
	if ws := state.Sys().(syscall.WaitStatus); ws.Signaled() {
		return -int(ws.Signal())
	}
	return state.ExitCode()
}

// process is a running command.
type process struct {
	pid   int
	ended chan *os.ProcessState
	from  *os.File
	read  chan struct{} // closed when all output has been read
	tail  []byte
}

func (h *hooks) start(command string, env []string, say func(string)) (*process, error) {
	from, to, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer to.Close()
	cmd := exec.Command(shell, "-c", command)
	cmd.Env, cmd.Dir, cmd.Stdout, cmd.Stderr = env, h.node.Job().Workdir, to, to
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	wait, err := h.node.Processes().Command(cmd)
	if err != nil {
		return nil, errors.Join(err, from.Close())
	}
	p := &process{pid: cmd.Process.Pid, ended: make(chan *os.ProcessState, 1), from: from, read: make(chan struct{})}
	go func() { _ = wait(); p.ended <- cmd.ProcessState }()
	go func() { defer close(p.read); p.follow(say) }()
	return p, nil
}

// follow passes lines on, long ones in pieces, and keeps the end.
func (p *process) follow(say func(string)) {
	r := bufio.NewReaderSize(p.from, maxLine)
	for {
		line, err := r.ReadSlice('\n')
		p.tail = append(p.tail, line...)
		p.tail = p.tail[max(0, len(p.tail)-maxTail):]
		if s := strings.TrimRight(string(line), "\r\n"); s != "" {
			say(oneLine(s))
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}

// wait returns how the process has ended; nil: it survives SIGKILL. Its process group has been killed then, at the
// latest some seconds after the end of ctx.
func (p *process) wait(ctx context.Context) (state *os.ProcessState) {
	select {
	case state = <-p.ended:
	case <-ctx.Done():
		if state = p.signal(syscall.SIGTERM); state == nil {
			state = p.signal(syscall.SIGKILL)
		}
	}
	_ = syscall.Kill(-p.pid, syscall.SIGKILL) // its children
	_ = p.from.SetReadDeadline(time.Now().Add(drain))
	<-p.read
	_ = p.from.Close()
	return state
}

// signal signals the group, and waits for its leader; nil: that has not ended.
func (p *process) signal(sig syscall.Signal) *os.ProcessState {
	_ = syscall.Kill(-p.pid, sig)
	select {
	case state := <-p.ended:
		return state
	case <-time.After(grace):
		return nil
	}
}

// said is the end of the output.
func (p *process) said() string {
	return strings.TrimSpace(verdict.Ending(verdict.Plain(p.tail), maxTail))
}
