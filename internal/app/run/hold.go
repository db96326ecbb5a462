package run

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/launcher"
	"dlrover-run/launcher/argv"
	"dlrover-run/rendezvous"
)

// holdSettings are the options of a job that waits, continues with another command, or leaves.
type holdSettings struct {
	Held      bool     `json:"held,omitempty"`
	Meanwhile []string `json:"meanwhile,omitempty"` // argv of the command that runs while the run is held
	OnResume  string   `json:"resume_command,omitempty"`
	LeaveOn   string   `json:"leave_on,omitempty"`
	Grace     string   `json:"leave_grace,omitempty"`
}

// leaveNotice looks for a notice that this node has to leave.
type leaveNotice struct {
	from   string
	log    *slog.Logger
	leaves chan string
	cancel context.CancelFunc // nil before this node has joined
	wg     sync.WaitGroup
}

func holdFeature() feature {
	var k holdSettings
	return feature{
		name:     "hold",
		settings: func(r *resolver) (err error) { k, err = r.hold(); return err },
		plan: func(p *plan) {
			if k.Held || k.OnResume != "" || k.LeaveOn != "" {
				p.Features["hold"] = k
			}
		},
		open: func(j *nodeJob) (*opened, error) {
			if k.LeaveOn == "" {
				return nil, nil
			}
			l := &leaveNotice{from: k.LeaveOn, log: j.log, leaves: make(chan string, 1)}
			configure := func(cfg *launcher.Config) { cfg.Leaves = l.leaves }
			return &opened{joined: l.joined, configure: configure, close: l.close}, nil
		},
	}
}

// Bounds of --leave-grace.
const (
	defaultLeaveGrace = 30 * time.Second // the default terminationGracePeriodSeconds of a pod
	maxLeaveGrace     = 24 * time.Hour
	maxLeaveMargin    = 2 * time.Second
)

func (r *resolver) hold() (k holdSettings, err error) {
	if k.Held = r.c.IsSet("hold"); k.Held {
		if k.Meanwhile, err = argv.Words(r.c.String("hold")); err != nil {
			return k, fmt.Errorf("--hold=%s: %w", r.c.String("hold"), err)
		}
		r.s.meanwhile = k.Meanwhile
		if r.s.params.Hold = true; r.s.backend == local {
			r.warn("--hold: nobody can start a job whose rendezvous stays inside its launcher; it is held until it is ended")
		}
	}
	for _, step := range []func(*holdSettings) error{r.onResume, r.leaveGrace, r.leaveOn} {
		if err := step(&k); err != nil {
			return k, err
		}
	}
	r.s.node.Can = append(r.s.node.Can, rendezvous.CanHold, rendezvous.CanLeave)
	if r.s.token != "" { // without a token, anyone could have commands executed through the rendezvous
		r.s.node.Can = append(r.s.node.Can, rendezvous.CanCommand)
	}
	return k, nil
}

// onResume reads the command that is given in advance.
func (r *resolver) onResume(k *holdSettings) (err error) {
	if !r.c.IsSet("resume-command") && !r.c.IsSet("resume-args") {
		return nil
	}
	if r.s.token == "" {
		return errors.New("--resume-command and --resume-args need a job token: give every node the same DLROVER_TOKEN, " +
			"DLROVER_TOKEN_FILE or --token-file")
	}
	c := &job.Command{}
	if c.Program, err = argv.Words(r.c.String("resume-command")); err != nil {
		return fmt.Errorf("--resume-command: %w", err)
	}
	if r.c.IsSet("resume-args") {
		if c.Args, err = argv.Words(r.c.String("resume-args")); err != nil {
			return fmt.Errorf("--resume-args: %w", err)
		}
		c.Args = append([]string{}, c.Args...) // none is not the same as this node's own
	}
	r.s.onResume, k.OnResume = c, c.String()
	return c.Validate()
}

// leaveGrace sets the deadline of a node that leaves. A user who sets only the workers' shutdown timeout limits
// nothing else.
func (r *resolver) leaveGrace(k *holdSettings) (err error) {
	grace := defaultLeaveGrace
	switch {
	case r.c.IsSet("leave-grace"):
		if grace, err = r.duration("leave-grace", time.Millisecond, maxLeaveGrace); err != nil {
			return err
		}
	case r.c.IsSet("shutdown-timeout") || r.lookup("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") != "":
		grace = 0
	}
	k.Grace = grace.String()
	r.s.leaveGrace = grace - min(maxLeaveMargin, grace/10)
	return nil
}

func (r *resolver) leaveOn(k *holdSettings) error {
	k.LeaveOn = r.c.String("leave-on")
	if k.LeaveOn == "" || filepath.IsAbs(k.LeaveOn) {
		return nil
	}
	u, err := url.Parse(k.LeaveOn)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return fmt.Errorf("--leave-on=%s: need the absolute path of a file, or a URL that begins with http:// or https://",
			k.LeaveOn)
	}
	return nil
}

func (l *leaveNotice) joined(*nodeJob) {
	var ctx context.Context
	ctx, l.cancel = context.WithCancel(context.Background())
	l.wg.Go(func() {
		if why := awaitLeaveNotice(ctx, l.from, l.log); why != "" {
			l.leaves <- why
		}
	})
}

func (l *leaveNotice) close() error {
	if l.cancel != nil {
		l.cancel()
		l.wg.Wait()
	}
	return nil
}

// resolveCommand finds the program of a command of the run on this node. The workers' Python executes a Python file.
func (s *settings) resolveCommand(c job.Command) (p launcher.Program, err error) {
	if len(c.Program) == 0 {
		p = launcher.Program{Path: s.program.path, Args: s.program.args, Own: s.program.own}
		if c.Args != nil {
			p.Args = append(append([]string{}, p.Args[:p.Own]...), c.Args...)
		}
		return p, nil
	}
	name := c.Program[0]
	p = launcher.Program{Args: append(append([]string{}, c.Program...), c.Args...), Own: 1}
	if strings.HasSuffix(name, ".py") {
		if err := checkScript(s.inWorkdir(name)); err != nil {
			return p, err
		}
		if p.Path, err = s.findPython(); err != nil {
			return p, fmt.Errorf("the command of the run is a script, %s: %w", name, err)
		}
		p.Args, p.Own = append([]string{p.Path, "-u"}, p.Args...), 3
		return p, nil
	}
	if strings.Contains(name, "/") {
		name = s.inWorkdir(name)
	}
	if p.Path, err = exec.LookPath(name); err != nil {
		return p, fmt.Errorf("the command of the run cannot be executed: %w", err)
	}
	return p, nil
}

// inWorkdir is a path as the workers see it.
func (s *settings) inWorkdir(path string) string {
	if s.workdir == "" || filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(s.workdir, path)
}

// pickWorkdir checks the workers' working directory.
func (r *resolver) pickWorkdir() error {
	dir := r.c.String("workdir")
	if dir == "" {
		return nil
	}
	if !isDir(dir) {
		return fmt.Errorf("--workdir=%s: there is no such directory", dir)
	}
	var err error
	if r.s.workdir, err = filepath.Abs(dir); err != nil {
		return fmt.Errorf("--workdir=%s: %w", dir, err)
	}
	if f, err := os.OpenFile(r.s.workdir, syscall.O_DIRECTORY, 0); err == nil {
		return f.Close()
	}
	return fmt.Errorf("--workdir=%s: it cannot be read", dir)
}
