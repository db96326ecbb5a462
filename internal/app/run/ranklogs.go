package run

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

// rankLogs writes the log files of the launcher whose name the program was called by: one for each worker, with both
// of its streams. It appends to the output of an earlier start.
type rankLogs struct {
	want *native.RankLogs
	now  *native.RankLogs // of the workers that run, or are being started
	log  *slog.Logger

	mu    sync.Mutex
	known map[string]bool     // paths that this launcher has written
	open  map[string]*rankLog // of the workers that run
}

func rankLogsFeature() row {
	var want *native.RankLogs
	return row{
		name: "rank logs",
		settings: func(o *options, s *settings) error {
			if want = s.called.command.RankLogs; want != nil {
				s.logs.ranks = map[int]bool{}
				for _, rank := range want.Console {
					s.logs.ranks[rank] = true
				}
			}
			return nil
		},
		plan: func(p *plan) {
			if want != nil {
				p.Logs.Ranks = want.Path(0, 0)
			}
		},
		open: func(j *nodeJob) (*feature.Opened, error) {
			if want == nil {
				return nil, nil
			}
			l, err := newRankLogs(want, j.log)
			if err != nil {
				return nil, err
			}
			return &feature.Opened{Part: launcher.Part{Start: l.start}, Tap: l.tap, SideTap: l.sideTap, Close: l.close}, nil
		},
	}
}

func newRankLogs(want *native.RankLogs, log *slog.Logger) (*rankLogs, error) {
	if dir := filepath.Dir(want.Path(0, 0)); dir != "." {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, feature.Unusable(fmt.Errorf("directory of the workers' logs: %w: give a path that this user may write to",
				err))
		}
	}
	return &rankLogs{
		want: want, now: want.At(time.Now()), log: log, known: map[string]bool{}, open: map[string]*rankLog{},
	}, nil
}

// start closes the files of earlier workers, which are complete.
func (l *rankLogs) start(*launcher.StartRequest) {
	_ = l.close()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now = l.want.At(time.Now())
}

// tap is the logs.Config.Tap.
func (l *rankLogs) tap(id logs.WorkerID, _ logs.Std) logs.Tap {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fileLocked(l.now.Path(id.Rank, id.LocalRank))
}

// sideTap is the logs.Config.SideTap: a side process has its file next to the workers'.
func (l *rankLogs) sideTap(name string) logs.Tap {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fileLocked(filepath.Join(l.want.Dir, name+".log"))
}

func (l *rankLogs) fileLocked(path string) logs.Tap {
	if f := l.open[path]; f != nil {
		return f
	}
	flags := os.O_WRONLY | os.O_CREATE | os.O_APPEND
	if !l.known[path] {
		flags |= os.O_TRUNC
	}
	file, err := openfile.Open(path, flags, 0o644)
	if err != nil {
		l.log.Warn("there is no log file", "err", err)
		return nil
	}
	l.known[path], l.open[path] = true, &rankLog{file: file, log: l.log}
	return l.open[path]
}

func (l *rankLogs) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var first error
	for _, f := range l.open {
		first = errors.Join(first, f.close())
	}
	clear(l.open)
	return first
}

// rankLog is the file of a worker, to which the readers of its two streams write. It is given up after a failed
// write.
type rankLog struct {
	log  *slog.Logger
	mu   sync.Mutex
	file *os.File // nil: closed, or given up
}

// Feed implements logs.Tap.
func (f *rankLog) Feed(b []byte, _ time.Time) {
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

func (f *rankLog) close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.file == nil {
		return nil
	}
	defer func() { f.file = nil }()
	return f.file.Close()
}
