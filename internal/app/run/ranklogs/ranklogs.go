// Package ranklogs writes the log files of the launcher whose name the program was called by.
package ranklogs

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/openfile"
	"dlrover-run/launcher"
	"dlrover-run/launcher/argv/native"
	"dlrover-run/launcher/logs"
)

// files writes the log files of the launcher whose name the program was called by: one for each worker, with both
// of its streams. It appends to the output of an earlier start.
type files struct {
	want *native.RankLogs
	now  *native.RankLogs // of the workers that run, or are being started
	log  *slog.Logger

	mu    sync.Mutex
	known map[string]bool  // paths that this launcher has written
	open  map[string]*file // of the workers that run
}

// New is the feature.
func New() feature.Feature {
	var want *native.RankLogs
	return feature.Feature{
		Name: "rank logs",
		Settings: func(o feature.Options) error {
			want = o.Job().Command.RankLogs
			return nil
		},
		Open: func(n feature.Node) (*feature.Opened, error) {
			if want == nil {
				return nil, nil
			}
			l, err := open(want, n.Log())
			if err != nil {
				return nil, err
			}
			return &feature.Opened{Part: launcher.Part{Start: l.start}, Tap: l.tap, SideTap: l.sideTap, Close: l.close}, nil
		},
	}
}

func open(want *native.RankLogs, log *slog.Logger) (*files, error) {
	if dir := filepath.Dir(want.Path(0, 0)); dir != "." {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil,
				feature.Unusable(fmt.Errorf("directory of the workers' logs: %w: give a path that this user may write to",
					err))
		}
	}
	return &files{
		want: want, now: want.At(time.Now()), log: log, known: map[string]bool{}, open: map[string]*file{},
	}, nil
}

// start closes the files of earlier workers, which are complete.
func (l *files) start(*launcher.StartRequest) {
	_ = l.close()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now = l.want.At(time.Now())
}

// tap is the logs.Config.Tap.
func (l *files) tap(id logs.WorkerID, _ logs.Std) logs.Tap {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fileLocked(l.now.Path(id.Rank, id.LocalRank))
}

// sideTap is the logs.Config.SideTap: a side process has its file next to the workers'.
func (l *files) sideTap(name string) logs.Tap {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fileLocked(filepath.Join(l.want.Dir, name+".log"))
}

func (l *files) fileLocked(path string) logs.Tap {
	if f := l.open[path]; f != nil {
		return f
	}
	flags := os.O_WRONLY | os.O_CREATE | os.O_APPEND
	if !l.known[path] {
		flags |= os.O_TRUNC
	}
	f, err := openfile.Open(path, flags, 0o644)
	if err != nil {
		l.log.Warn("there is no log file", "err", err)
		return nil
	}
	l.known[path], l.open[path] = true, &file{file: f, log: l.log}
	return l.open[path]
}

func (l *files) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var first error
	for _, f := range l.open {
		first = errors.Join(first, f.close())
	}
	clear(l.open)
	return first
}

// file is the file of a worker, to which the readers of its two streams write. It is given up after a failed
// write.
type file struct {
	log  *slog.Logger
	mu   sync.Mutex
	file *os.File // nil: closed, or given up
}

// Feed implements logs.Tap.
func (f *file) Feed(b []byte, _ time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.file == nil {
		return
	}
	if _, err := f.file.Write(b); err != nil {
		f.log.Warn("a worker's log file ends here", "err", err)
		_ = f.file.Close()
		f.file = nil
	}
}

func (f *file) close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.file == nil {
		return nil
	}
	defer func() { f.file = nil }()
	return f.file.Close()
}
