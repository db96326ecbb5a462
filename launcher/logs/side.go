package logs

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// Side is the output of a side process, both streams as one. Its destinations are those of local rank 0: <name>.log if
// any stream of that rank has a file, and the console, with "[<name>]:" before every line, unless it only has the file.
type Side struct {
	l *Logs
	s *stream
}

// Side makes the output of a side process of the attempt, in the attempt's directory. It does not end with the attempt:
// Close ends it.
func (a *Attempt) Side(name string) (*Side, error) {
	var tap Tap
	if a.l.cfg.SideTap != nil {
		tap = a.l.cfg.SideTap(name)
	}
	return a.l.side(name, a.dir, a.dirErr, tap)
}

// Side makes the output of a process that runs as long as the job, in the run's directory.
func (l *Logs) Side(name string) (*Side, error) {
	l.mu.Lock()
	dir, err := l.base, error(nil)
	if l.cfg.Dir != os.DevNull && l.cfg.Files {
		err = l.tempBaseLocked()
		dir = l.base
	}
	l.mu.Unlock()
	return l.side(name, dir, err, nil)
}

func (l *Logs) side(name, dir string, dirErr error, tap Tap) (*Side, error) {
	tee := l.cfg.Tee(0) != 0
	wanted := tee || l.cfg.Redirects(0) != 0
	if wanted && dirErr != nil {
		return nil, fmt.Errorf("output of the %s: %w", name, dirErr)
	}
	r := route{tee: tee, file: wanted && dir != "", tap: tap}
	r.console = tee || !r.file && tap == nil
	s, err := l.sideStream(name, filepath.Join(dir, name+".log"), r)
	if err != nil {
		return nil, fmt.Errorf("output of the %s: %w", name, err)
	}
	if s.pump != nil {
		go s.pump.run()
	}
	return &Side{l, s}, nil
}

func (l *Logs) sideStream(name, path string, r route) (*stream, error) {
	if r.direct(&l.cfg) {
		f, _, err := openLog(path)
		if err == nil {
			return &stream{child: f, path: path, tailBytes: l.cfg.TailBytes}, nil
		}
		l.fileFailed(path, err) // a pump tries again
	}
	p, child, err := newPipe(l.cfg.TailBytes)
	if err != nil {
		return nil, err
	}
	p.tap = r.tap
	if r.file {
		p.file = l.newFile(path)
		p.file.open()
	}
	if r.console {
		p.console = l.console[1].tee(lines{prefix: []byte("[" + name + "]:"), fold: true, hold: partialDelay})
	}
	return &stream{child: child, pump: p, path: path}, nil
}

// File returns the child's stdout and stderr.
func (s *Side) File() *os.File { return s.s.child }

// Started closes the launcher's copy of that file. To be called once the child runs, or failed to start.
func (s *Side) Started() { s.s.child.Close() }

// Tail returns the last Config.TailBytes of the process's output, once it has ended. It waits up to budget for the rest
// of a pipe.
func (s *Side) Tail(budget time.Duration) []byte {
	if p := s.s.pump; p != nil {
		select {
		case <-p.done:
		case <-time.After(budget):
		}
	}
	return s.s.tail()
}

// Close reads the rest of the pipe and ends. It waits at most two seconds for a console that takes nothing.
func (s *Side) Close() {
	s.Started()
	p := s.s.pump
	if p == nil {
		return
	}
	p.ask(true)
	ctx, cancel := context.WithTimeout(context.Background(), closeGrace)
	defer cancel()
	p.close(ctx, s.l.cfg.Logger)
}
