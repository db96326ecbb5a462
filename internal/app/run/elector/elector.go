package elector

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dlrover-run/internal/app/member"
	"dlrover-run/internal/retry"
	"dlrover-run/launcher/proc"
	"dlrover-run/rendezvous"
)

// Config describes the part of this node in the election.
type Config struct {
	Program string // the helper's path
	Member  member.Config
	// Start starts the helper, which is to end with the launcher. ErrClosed: it may not any more.
	Start   func(*exec.Cmd) (wait func() error, err error)
	Observe func(rendezvous.Note) // of the run, while this node serves it
	Log     *slog.Logger
}

// Times of the helper.
const (
	firstPause = 100 * time.Millisecond // before a helper that has died is started again, at first
	mostPause  = 10 * time.Second
	healthy    = 30 * time.Second // a helper that lived for so long is started again at once
	answering  = 10 * time.Second // of the helper beyond its patience with etcd
	forever    = math.MaxInt64
	ending     = 3 * time.Second // until a helper that was told to end is killed
)

// Elector keeps the helper. Its methods may be called by any goroutine.
type Elector struct {
	cfg    Config
	cancel context.CancelFunc // starts no other helper; nil: none was started
	done   chan struct{}      // closed when no helper runs any more
	// silence is that of a helper that is frozen.
	silence time.Duration

	mu     sync.Mutex
	token  string
	leader string
	follow []func(leader string)
	helper *exec.Cmd      // that runs, or nil
	stdin  io.WriteCloser // of helper
	met    chan struct{}  // closed when token and leader are known
	failed chan error     // why the first helper has ended, before that
}

// New returns an Elector without a helper.
func New(cfg Config) *Elector {
	return &Elector{cfg: cfg, token: cfg.Member.Token, done: make(chan struct{}), met: make(chan struct{}),
		failed: make(chan error, 1), silence: member.Silence}
}

// Meet starts the helper, and waits until a member serves the run. It is called once.
func (e *Elector) Meet(ctx context.Context) (leader, token string, err error) {
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	e.cancel = cancel
	go e.keep(running)
	patience := e.cfg.Member.Patience + answering
	select {
	case <-e.met:
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.leader, e.token, nil
	case err = <-e.failed:
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-time.After(patience):
		err = fmt.Errorf("no node has been elected in etcd within %s: %w", patience, context.DeadlineExceeded)
	}
	return "", "", err
}

// Follow has f called with the address of the present leader, and of every later one.
func (e *Elector) Follow(f func(leader string)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.follow = append(e.follow, f)
	f(e.leader)
}

// Leader is the HOST:PORT of the present leader.
func (e *Elector) Leader() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.leader
}

// Linger has a helper that serves the run go on until the other nodes know of its end, for at most budget or until
// enough. The helper ends, and no other is started.
func (e *Elector) Linger(budget time.Duration, enough <-chan os.Signal) {
	if e.cancel == nil {
		return
	}
	e.cancel()
	e.mu.Lock()
	if e.helper != nil {
		_ = json.NewEncoder(e.stdin).Encode(member.Order{Linger: budget}) // one that has died serves nothing
	}
	e.mu.Unlock()
	select {
	case <-e.done:
	case <-enough:
	case <-time.After(budget + ending):
	}
}

// Close ends the helper, which lets another one lead.
func (e *Elector) Close() {
	if e.cancel == nil {
		return
	}
	e.cancel()
	e.mu.Lock()
	if e.helper != nil {
		_ = e.stdin.Close()
	}
	e.mu.Unlock()
	select {
	case <-e.done:
		return
	case <-time.After(ending):
	}
	e.kill()
	<-e.done
}

func (e *Elector) kill() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.helper != nil {
		_ = e.helper.Process.Kill()
	}
}

// keep runs helpers one after the other.
func (e *Elector) keep(ctx context.Context) {
	defer close(e.done)
	pause := retry.Backoff{First: firstPause, Most: mostPause, Spread: true}
	for ctx.Err() == nil {
		began := time.Now()
		err := e.runOne()
		if ctx.Err() != nil || errors.Is(err, proc.ErrClosed) {
			return
		}
		select {
		case <-e.met:
		default:
			e.failed <- fmt.Errorf("%s: %w", e.cfg.Program, err)
			return
		}
		e.cfg.Log.Warn("the dlrover-master of this node has ended, starting another; workers run on", "why", err)
		if time.Since(began) > healthy {
			pause.Reset()
		}
		pause.Wait(ctx)
	}
}

// runOne is the life of a helper.
func (e *Elector) runOne() error {
	cmd := exec.Command(e.cfg.Program, member.Argument)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	wait, err := e.cfg.Start(cmd)
	if err != nil {
		return fmt.Errorf("start %s: %w", e.cfg.Program, err)
	}
	e.runs(cmd, stdin)
	why := e.hear(stdin, stdout)
	e.runs(nil, nil)
	_, _ = stdin.Close(), stdout.Close() // one that says what cannot be read ends as well
	if err = wait(); why == nil {
		why = fmt.Errorf("it has ended without a reason (%v); a helper of another version does", err)
	}
	return why
}

func (e *Elector) runs(helper *exec.Cmd, stdin io.WriteCloser) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.helper, e.stdin = helper, stdin
}

// hear writes the configuration, and reads the news until the helper ends. The error is the helper's own.
func (e *Elector) hear(stdin io.Writer, stdout io.Reader) error {
	cfg := e.cfg.Member
	cfg.Token, cfg.Agreed = e.token, cfg.Token == "" // only this goroutine writes it
	_ = json.NewEncoder(stdin).Encode(cfg)           // if it has ended, so does its output
	var frozen atomic.Bool
	silent := time.AfterFunc(forever, func() {
		frozen.Store(true)
		e.kill()
	})
	defer silent.Stop()
	for in, beats := json.NewDecoder(stdout), false; ; {
		var n member.News
		if err := in.Decode(&n); err != nil {
			if frozen.Load() {
				return fmt.Errorf("it has said nothing for %s", e.silence)
			}
			return nil
		}
		if beats = beats || n.Beats; beats {
			silent.Reset(e.silence)
		}
		switch {
		case n.Error != "":
			return errors.New(n.Error)
		case n.Note != nil:
			e.cfg.Observe(*n.Note)
		default:
			e.learn(n)
		}
	}
}

// learn takes the token, or a leader.
func (e *Elector) learn(n member.News) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if n.Token != "" {
		e.token = n.Token
		return
	}
	if n.Leader == e.leader {
		return
	}
	e.leader = n.Leader
	e.cfg.Log.Info("the node that serves the rendezvous was elected", "addr", n.Leader, "term", n.Term)
	for _, f := range e.follow {
		f(n.Leader)
	}
	select {
	case <-e.met:
	default:
		close(e.met)
	}
}
