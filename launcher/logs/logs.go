// Package logs owns the output of the workers of one node: a directory per attempt and rank, and tee to the launcher's
// console with a prefix. It also has duplicate filters, rotation, and the last bytes of every stream for the failure
// report.
//
// A stream that only goes to a file is the file itself: the worker writes without the launcher. Every other
// stream is a pipe, or a pseudo-terminal where the worker would have a terminal without the launcher, read by one
// goroutine, which its Attempt owns and waits for. Lines of different streams do not cut each other (see output).
// Nothing here starts or waits for processes, or reads flags or the environment.
//
// A Follower of the workers' output (Follow) sees it when the pumps do, and may miss some, as no writer waits for it.
//
// Locks: of Logs.mu, Attempt.mu and pump.mu only one is held at a time. The logger may write to an output (see Stderr):
// output.mu may be taken under all of them, and nothing is logged under that of a console. Apart from the pumps there
// is only the timer of an output; Logs.Close stops it.
package logs

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dlrover-run/internal/tempdir"
	"dlrover-run/internal/text"
)

const (
	defaultTail   = 64 << 10
	defaultPrefix = "[${role_name}${local_rank}]:"
	// maxRunID keeps <run_id>_<8 chars> far below NAME_MAX (255) for any rendezvous id.
	maxRunID = 128
)

// Std is a set of standard streams in torchrun's numbering: 0 none, 1 stdout, 2 stderr, 3 both.
type Std uint8

// The members of a Std set.
const (
	Stdout Std = 1 << iota
	Stderr
)

// Config is the destinations of the workers' output. The zero value writes no log file and passes everything to
// os.Stdout and os.Stderr.
type Config struct {
	// Dir is --log-dir. "" is a private temporary directory, made by the first Begin (with Files, by New). The directory
	// of an attempt in it is removed at the attempt's end unless a non-empty file is in it, and Close removes the
	// temporary directory if no attempt is left. "/dev/null" makes no file at all; as with torchrun, redirected output
	// then goes to the console.
	Dir string
	// RunID starts the name of the run's directory; characters that a file name cannot have become '_'. Default "none".
	RunID string
	// Redirects and Tee name the streams of a local rank that go to a file, and to a file and the console. nil: none. The
	// worker itself writes a stream that goes only to a file without rotation, and then also sees its errors.
	Redirects, Tee func(localRank int) Std
	// Files is set if Redirects or Tee will name a stream: without a place for the files New then fails.
	Files bool
	// ConsoleRank reports whether a local rank may use the console (--local-ranks-filter). nil: all. Files do not change.
	ConsoleRank func(localRank int) bool
	// StdoutFilters and StderrFilters: tee'd lines that contain any of them are also written, with their prefix, to
	// filtered_stdout.log and filtered_stderr.log in the attempt's directory.
	StdoutFilters, StderrFilters []string
	// PrefixTemplate starts every tee'd line. Macros: ${role_name} ${local_rank} ${rank} ${hostname} ${node};
	// $$ is a dollar sign. Default "[${role_name}${local_rank}]:", which is torchrun's.
	PrefixTemplate string
	// Tap returns an additional reader of a worker's stream, Stdout or Stderr; nil: none. The launcher reads a stream with
	// a Tap, regardless of its destination.
	Tap func(id WorkerID, stream Std) Tap
	// SideTap returns the reader of a side process's output, in place of the console unless it is tee'd; nil: none.
	SideTap func(name string) Tap
	// RotateSize (bytes) and RotateCount (old files kept: stdout.log.1 is the newest). Either 0: no rotation.
	RotateSize  int64
	RotateCount int
	// Stdout and Stderr are the console of the launcher. Default os.Stdout and os.Stderr.
	Stdout, Stderr io.Writer
	// TailBytes is how much of the end of every stream Tail returns. Default 64 KiB.
	TailBytes int
	// Logger takes messages for the operator, such as about a full disk. Default slog.Default().
	Logger *slog.Logger
}

// Tap sees the bytes of a stream before the console gets them. Feed is called by the goroutine that reads, which waits
// for it, and so does the worker once its pipe is full. It must keep nothing of b.
type Tap interface{ Feed(b []byte, now time.Time) }

// Logs is the output of all workers of one run on one node.
type Logs struct {
	cfg      Config
	hostname string
	console  [2]*output // stdout, stderr: the same one when both are one terminal, pipe or file
	dups     []*os.File
	ptmx     string // makes pseudo-terminals

	mu       sync.Mutex
	base     string // <dir>/<run_id>_<random>; "" before the first Begin with a temporary directory, and for /dev/null
	temp     string // the temporary directory to remove
	count    int    // restart count of the last attempt, and
	again    int    // the suffix that its next start takes; 0: none
	attempts map[*Attempt]struct{}
	closed   bool
	left     []*pump // of closed attempts: for them the console was too slow
	leftTook int64   // bytes that the console had taken when the last attempt began to close

	trash trash

	followed  atomic.Pointer[[]*following] // nil: there was no follower yet
	following sync.Mutex                   // guards changes of it

	fileSaid, tempSaid, consoleSaid atomic.Bool
}

// New checks the configuration and makes the directory of the run, so that a wrong --log-dir is an error before
// anything starts.
func New(cfg Config) (*Logs, error) {
	setDefaults(&cfg)
	l := &Logs{cfg: cfg, ptmx: "/dev/ptmx", attempts: map[*Attempt]struct{}{}}
	l.trash = trash{remove: os.RemoveAll, log: cfg.Logger}
	if strings.Contains(cfg.PrefixTemplate, "hostname") {
		name, err := os.Hostname()
		if err != nil {
			return nil, fmt.Errorf("host name for the log line prefix: %w", err)
		}
		l.hostname = text.EscapeLine(name)
	}
	if cfg.Dir != "" && cfg.Dir != os.DevNull {
		if err := l.makeBase(cfg.Dir); err != nil {
			return nil, err
		}
	}
	if cfg.Dir == "" && cfg.Files {
		if err := l.makeTemp(); err != nil {
			return nil, fmt.Errorf("--redirects and --tee: no place for the log files: give --log-dir a directory that this "+
				"user may write to: %w", err)
		}
	}
	if err := l.openConsole(); err != nil {
		return nil, err
	}
	return l, nil
}

// Stderr returns the launcher's output for its own lines until Close, instead of Config.Stderr: they do not continue a
// worker's line. Bytes that cannot be written are counted with the workers' output.
func (l *Logs) Stderr() ownLines { return ownLines{l.console[1]} }

func setDefaults(c *Config) {
	none := func(int) Std { return 0 }
	if c.Redirects == nil {
		c.Redirects = none
	}
	if c.Tee == nil {
		c.Tee = none
	}
	if c.ConsoleRank == nil {
		c.ConsoleRank = func(int) bool { return true }
	}
	if c.Tap == nil {
		c.Tap = func(WorkerID, Std) Tap { return nil }
	}
	if c.PrefixTemplate == "" {
		c.PrefixTemplate = defaultPrefix
	}
	if c.Stdout == nil {
		c.Stdout = os.Stdout
	}
	if c.Stderr == nil {
		c.Stderr = os.Stderr
	}
	if c.TailBytes <= 0 {
		c.TailBytes = defaultTail
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
}

// makeBase makes the run's directory in dir. Making it is also the only test of write permission that holds for
// read-only mounts, quotas and root-squashed NFS.
func (l *Logs) makeBase(dir string) error {
	dir, err := filepath.Abs(dir) // workers may change their directory before they write error.json
	if err != nil {
		return fmt.Errorf("--log-dir %s: %w", l.cfg.Dir, err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		if errors.Is(err, syscall.ENOTDIR) {
			return fmt.Errorf("--log-dir %s: a file is in the way, a directory is needed: remove it or give another path: %w",
				dir, err)
		}
		return fmt.Errorf("--log-dir %s: cannot be created: give a path that this user may write to: %w", dir, err)
	}
	for {
		// A new name, made exclusively: in a directory that others can write to, it cannot be a planted link.
		base := filepath.Join(dir, runName(l.cfg.RunID)+"_"+strings.ToLower(rand.Text()[:8]))
		err := os.Mkdir(base, 0o755)
		if err == nil {
			l.base = base
			return nil
		}
		if !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("--log-dir %s: nothing can be created in it: give a directory that this user may write to: %w",
				dir, err)
		}
	}
}

// runName is id as one path element: a rendezvous id may hold slashes, spaces or anything else.
func runName(id string) string {
	if id == "" {
		return "none"
	}
	name := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', strings.ContainsRune("._-", r):
			return r
		}
		return '_'
	}, id)
	return name[:min(len(name), maxRunID)]
}

// Begin makes the directory attempt_<restartCount> for the next start of the workers. After a membership change the
// count is unchanged: the directory is then attempt_<n>.1, .2 and so on, so that no earlier output is erased.
// A full disk is not an error here: the workers start, and files appear when there is space.
func (l *Logs) Begin(restartCount int) (*Attempt, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, errors.New("logs: Begin after Close")
	}
	a := &Attempt{l: l}
	if l.cfg.Dir != os.DevNull {
		a.dirErr = l.tempBaseLocked()
	}
	if l.base != "" {
		a.dir, a.temporary = l.attemptDirLocked(restartCount), l.temp != ""
	}
	l.attempts[a] = struct{}{}
	return a, nil
}

// tempBaseLocked makes the temporary directory of a run without --log-dir. A read-only root file system is no reason
// to refuse a job that asked for no log file, so the error only counts once a file is needed.
func (l *Logs) tempBaseLocked() error {
	if l.base != "" {
		return nil
	}
	err := l.makeTemp()
	if err != nil && l.tempSaid.CompareAndSwap(false, true) {
		l.cfg.Logger.Warn("no error files from workers: give --log-dir a directory that can be written", "err", err)
	}
	return err
}

func (l *Logs) makeTemp() error {
	dir, err := tempdir.Make("torchelastic_*")
	if err != nil {
		return fmt.Errorf("temporary log directory: %w", err)
	}
	if err := l.makeBase(dir); err != nil {
		return fmt.Errorf("temporary log directory: %w", errors.Join(err, os.Remove(dir)))
	}
	l.temp = dir
	return nil
}

// attemptDirLocked continues where the last attempt of the same count ended: after thousands of starts, trying every
// suffix takes longer than the start.
func (l *Logs) attemptDirLocked(restartCount int) string {
	if restartCount != l.count {
		l.count, l.again = restartCount, 0
	}
	for {
		dir := filepath.Join(l.base, fmt.Sprintf("attempt_%d", restartCount))
		if l.again > 0 {
			dir += "." + strconv.Itoa(l.again)
		}
		l.again++
		err := os.Mkdir(dir, 0o755)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			l.fileFailed(dir, err)
		}
		return dir
	}
}

// fileFailed reports trouble with a log file once per run: a full disk hits every file of every rank. The rest is
// counted, and reported when the attempt is closed.
func (l *Logs) fileFailed(path string, err error) {
	if l.fileSaid.CompareAndSwap(false, true) {
		l.cfg.Logger.Warn("cannot write a log file: the workers go on, lost bytes are counted", "path", path, "err", err)
	}
}

// Close closes the attempts that are still open, and waits while a slow console takes their end, for ten seconds at
// most. It reports the bytes that were not taken, and removes a temporary directory without output, unless that takes
// long.
func (l *Logs) Close() error {
	l.mu.Lock()
	l.closed = true
	open := make([]*Attempt, 0, len(l.attempts))
	for a := range l.attempts {
		open = append(open, a)
	}
	l.mu.Unlock()

	var errs []error
	for _, a := range open {
		a.Close()
	}
	if n := l.linger(); n > 0 {
		errs = append(errs, fmt.Errorf("the console takes no output: the end of %d streams of the workers is not on it", n))
	}
	for _, c := range l.console {
		c.close()
		if n := c.dropped.Swap(0); n > 0 {
			l.cfg.Logger.Warn("output of workers did not reach the console", "bytes", n)
		}
	}
	for _, f := range l.dups {
		errs = append(errs, f.Close())
	}
	l.dups = nil
	if l.temp != "" {
		l.trash.put(l.temp)
		l.trash.empty()
	}
	return errors.Join(errs...)
}

// linger waits for the pumps that closed attempts have left, as long as the console takes something. It returns how
// many there still are.
func (l *Logs) linger() int {
	l.mu.Lock()
	left, took := l.left, l.leftTook
	l.left = nil
	l.mu.Unlock()
	for end := time.Now().Add(closeLimit); len(left) > 0 && l.took() > took && time.Now().Before(end); {
		took = l.took()
		ctx, cancel := context.WithTimeout(context.Background(), closeGrace)
		left = slices.DeleteFunc(left, func(p *pump) bool { return p.close(ctx, l.cfg.Logger) })
		cancel()
	}
	return len(left)
}

// took is how much the console has taken, in bytes.
func (l *Logs) took() int64 { return l.console[0].took.Load() + l.console[1].took.Load() }
