package logs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"
)

const (
	// syncGrace is how much longer than its budget Drain may take to show unfinished lines.
	syncGrace = 100 * time.Millisecond
	// closeGrace is how long an end waits for a console that takes nothing, such as a stopped terminal.
	closeGrace = 2 * time.Second
	// closeLimit is how long it waits for one that takes something, but slowly.
	closeLimit = 10 * time.Second
)

// Attempt is one start of the workers of the node, and owns the goroutines that read their output.
type Attempt struct {
	l      *Logs
	dir    string // "": no files
	dirErr error  // why there is no dir although there should be one
	// temporary: dir was not requested, so that Close removes it if it is empty.
	temporary bool

	mu       sync.Mutex
	workers  []*Worker
	filtered [2]*output // made with the first worker that needs it
	files    [2]*file   // behind filtered
	closed   bool
}

// WorkerID names one worker. Rank is the global rank, Node the rank of the node in the rendezvous.
type WorkerID struct {
	LocalRank, Rank, Node int
	Role                  string
}

// Worker is the output of one worker process.
type Worker struct {
	id        WorkerID
	streams   [2]*stream
	errorFile string
}

// stream is one of the two streams of a worker.
type stream struct {
	child     *os.File // for the child; ours is closed by Started
	path      string   // of the file that the child writes itself; then there is no pump
	pump      *pump
	tailBytes int
}

// Dir returns the directory of the attempt; "" when there are no files.
func (a *Attempt) Dir() string { return a.dir }

// Worker makes the files and pipes for one worker. The worker may be started next; Started must be called in any case.
func (a *Attempt) Worker(id WorkerID) (*Worker, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil, errors.New("logs: Worker after Close")
	}
	w := &Worker{id: id}
	dir := filepath.Join(a.dir, strconv.Itoa(id.LocalRank))
	if a.dir != "" {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			a.l.fileFailed(dir, err)
		} else {
			w.errorFile = filepath.Join(dir, "error.json")
		}
	}
	for i := range w.streams {
		s, err := a.streamLocked(id, i, dir)
		if err != nil {
			if i == 1 {
				w.streams[0].abandon()
			}
			return nil, fmt.Errorf("output of local rank %d: %w", id.LocalRank, err)
		}
		w.streams[i] = s
	}
	a.workers = append(a.workers, w)
	a.showLocked(w)
	for _, s := range w.streams {
		if s.pump != nil {
			go s.pump.run()
		}
	}
	return w, nil
}

// route is the destination of one stream of a worker.
type route struct {
	file, console bool
	tee           bool     // lines on the console have a prefix
	filters       []string // which lines also go to filtered_*.log; nil: none
	tap           Tap      // nil: none
}

// route decides the destination of stream i (0 stdout, 1 stderr) of a worker.
func (a *Attempt) route(id WorkerID, i int) (route, error) {
	cfg, is := &a.l.cfg, Stdout<<i
	tee := cfg.Tee(id.LocalRank)&is != 0
	toFile := tee || cfg.Redirects(id.LocalRank)&is != 0
	if toFile && a.dirErr != nil {
		return route{}, a.dirErr
	}
	r := route{tee: tee, file: toFile && a.dir != "", tap: cfg.Tap(id, is)}
	r.console = (tee || !r.file) && cfg.ConsoleRank(id.LocalRank)
	if tee && r.file {
		r.filters = [2][]string{cfg.StdoutFilters, cfg.StderrFilters}[i]
	}
	return r, nil
}

// direct: a file of the worker's own is all that the stream needs, so that nothing need read it.
func (r route) direct(cfg *Config) bool {
	rotate := cfg.RotateSize > 0 && cfg.RotateCount > 0
	return r.file && !r.console && len(r.filters) == 0 && r.tap == nil && !rotate
}

// streamLocked makes stream i of a worker. The pump is not running yet.
func (a *Attempt) streamLocked(id WorkerID, i int, dir string) (*stream, error) {
	r, err := a.route(id, i)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, [2]string{"stdout.log", "stderr.log"}[i])
	if r.direct(&a.l.cfg) {
		f, _, err := openLog(path)
		if err == nil {
			return &stream{child: f, path: path, tailBytes: a.l.cfg.TailBytes}, nil
		}
		a.l.fileFailed(path, err) // a pump tries again
	}
	p, child, err := a.l.source(i, r.console && !r.file && !r.tee)
	if err != nil {
		return nil, err
	}
	p.tail.id, p.tail.std = id, Stdout<<i
	a.connectLocked(p, r, i, path, a.l.prefix(id))
	return &stream{child: child, pump: p}, nil
}

// connectLocked gives the pump of stream i its outputs.
func (a *Attempt) connectLocked(p *pump, r route, i int, path string, prefix []byte) {
	if r.file {
		p.file = a.l.newFile(path)
		p.file.open()
	}
	switch {
	case r.console && r.tee:
		p.console = a.l.console[i].tee(lines{prefix: prefix, fold: true, hold: partialDelay})
	case r.console:
		p.console = a.l.console[i].pass()
	}
	p.tap = r.tap
	if len(r.filters) > 0 {
		p.filter = a.filterLocked(i, prefix, r.filters)
	}
}

// source returns the pump of stream i and the worker's end: of a pseudo-terminal if the console is a terminal and the
// stream's only destination; else of a pipe.
func (l *Logs) source(i int, consoleOnly bool) (*pump, *os.File, error) {
	if terminal := l.console[i].terminal; terminal != nil && consoleOnly {
		p, child, err := newPTY(l.ptmx, l.cfg.TailBytes, terminal)
		if err == nil {
			return p, child, nil
		}
		l.cfg.Logger.Debug("no pseudo-terminal for a worker: its output is a pipe", "err", err)
	}
	return newPipe(l.cfg.TailBytes)
}

func (l *Logs) newFile(path string) *file {
	return &file{
		path:       path,
		rotateSize: l.cfg.RotateSize, rotateCount: l.cfg.RotateCount,
		create: createLog, failed: l.fileFailed,
	}
}

// filterLocked returns the writer of the lines that also go to filtered_*.log, which all ranks share.
func (a *Attempt) filterLocked(i int, prefix []byte, filters []string) *lines {
	if a.filtered[i] == nil {
		f := a.l.newFile(filepath.Join(a.dir, [2]string{"filtered_stdout.log", "filtered_stderr.log"}[i]))
		a.files[i] = f
		a.filtered[i] = &output{now: time.Now, write: func(p []byte) (int, error) { f.write(p); return len(p), nil }}
	}
	match := make([][]byte, len(filters))
	for i, s := range filters {
		match[i] = []byte(s)
	}
	return a.filtered[i].tee(lines{prefix: prefix, fold: true, hold: partialDelay, match: match})
}

// prefix expands the template. Unknown macros stay as they are, as in Python's safe_substitute.
func (l *Logs) prefix(id WorkerID) []byte {
	return []byte(os.Expand(l.cfg.PrefixTemplate, func(name string) string {
		switch name {
		case "role_name":
			return id.Role
		case "local_rank":
			return strconv.Itoa(id.LocalRank)
		case "rank":
			return strconv.Itoa(id.Rank)
		case "node":
			return strconv.Itoa(id.Node)
		case "hostname":
			return l.hostname
		case "$":
			return "$"
		}
		return "${" + name + "}"
	}))
}

// Stdout returns the child's stdout: the write end of a pipe, or the log file.
func (w *Worker) Stdout() *os.File { return w.streams[0].child }

// Stderr returns the child's stderr.
func (w *Worker) Stderr() *os.File { return w.streams[1].child }

// ErrorFile returns <attempt>/<local_rank>/error.json for TORCHELASTIC_ERROR_FILE, or "" when there are no files.
func (w *Worker) ErrorFile() string { return w.errorFile }

// Started closes the launcher's copies of the child's ends, without which a pipe has no end. To be called once the
// child runs, or failed to start.
func (w *Worker) Started() {
	for _, s := range w.streams {
		s.child.Close()
	}
}

// Drain is called after the worker has exited. It returns when all output of the worker is written: at the end of both
// pipes, or after budget when a process that the worker left behind holds one open (or the console takes nothing). Such
// a pipe is still read until Attempt.Close.
func (w *Worker) Drain(budget time.Duration) {
	if w.await(budget, func(p *pump) <-chan struct{} { return p.done }) {
		return
	}
	w.await(syncGrace, func(p *pump) <-chan struct{} { return p.ask(false) })
}

// await waits until every pump has ended, or closed the channel that event gives for it.
func (w *Worker) await(budget time.Duration, event func(*pump) <-chan struct{}) bool {
	ctx, cancel := context.WithTimeout(context.Background(), budget)
	defer cancel()
	var events [2]<-chan struct{}
	for i, s := range w.streams {
		if s.pump != nil {
			events[i] = event(s.pump)
		}
	}
	for i, s := range w.streams {
		if s.pump == nil {
			continue
		}
		select {
		case <-s.pump.done:
		case <-events[i]:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// Tail returns the last Config.TailBytes of both streams.
func (w *Worker) Tail() (stdout, stderr []byte) {
	return w.streams[0].tail(), w.streams[1].tail()
}

func (s *stream) tail() []byte {
	if s.pump == nil {
		return fileTail(s.path, s.tailBytes)
	}
	return s.pump.tail.bytes()
}

// abandon undoes streamLocked.
func (s *stream) abandon() {
	s.child.Close()
	if p := s.pump; p != nil {
		p.r.Close()
		if p.file != nil {
			p.file.closeFile()
		}
	}
}

// Close reads the rest of the pipes, ends the goroutines and closes the files. It is called when the workers are gone:
// a process that still writes gets SIGPIPE. It waits at most two seconds for the console, so that a restart does not
// wait longer; pumps that then still read go on during the next attempt, until Logs.Close. Close removes the directory
// of an attempt without output if it is a temporary one: a job that restarts for days would leave thousands.
func (a *Attempt) Close() {
	a.mu.Lock()
	workers, closed := a.workers, a.closed
	a.workers, a.closed = nil, true
	a.mu.Unlock()
	if closed {
		return
	}

	took := a.l.took()
	for _, w := range workers {
		w.Started()
		for _, s := range w.streams {
			if s.pump != nil {
				s.pump.ask(true)
			}
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeGrace)
	defer cancel()
	var left []*pump
	for _, w := range workers {
		for _, s := range w.streams {
			if s.pump != nil && !s.pump.close(ctx, a.l.cfg.Logger) {
				left = append(left, s.pump)
			}
		}
	}
	for i, o := range a.filtered {
		if o != nil {
			o.mu.Lock()
			a.files[i].close(a.l.cfg.Logger)
			o.mu.Unlock()
		}
	}
	cancel()
	a.l.mu.Lock()
	delete(a.l.attempts, a)
	a.l.left = slices.DeleteFunc(a.l.left, func(p *pump) bool { return p.close(ctx, a.l.cfg.Logger) }) // by now
	a.l.left, a.l.leftTook = append(a.l.left, left...), took
	a.l.mu.Unlock()
	if len(left) == 0 && a.dir != "" && a.temporary {
		a.l.trash.put(a.dir)
	}
}
