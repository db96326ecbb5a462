package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/freeports"
)

// now is CLOCK_MONOTONIC in nanoseconds, the same clock for all processes.
func now() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // cannot fail
	return t.Nano()
}

func seconds(from, to int64) float64 { return float64(to-from) / 1e9 }

// lab is one measurement: its processes, and the stamps of its workers.
type lab struct {
	*bench
	side   side
	dir    string
	stamps string // file of stamp lines
	pace   string // the pause of a training between two steps, in seconds; "" for that of most rows
	procs  []*process
	files  []*os.File
	ends   []func() // called by close
	// garbage are patterns of paths that close removes
	garbage []string
}

// process is a child of this program.
type process struct {
	cmd   *exec.Cmd
	began int64 // just before exec
	out   string
	done  chan struct{}
	ended int64 // valid when done is closed
}

func newLab(b *bench, s side) (*lab, error) {
	dir, err := os.MkdirTemp(b.dir, "lab-")
	if err != nil {
		return nil, err
	}
	return &lab{bench: b, side: s, dir: dir, stamps: filepath.Join(dir, "stamps")}, nil
}

// close ends everything that was started, by pid. The processes that a killed launcher leaves are our children,
// because we are their subreaper.
func (l *lab) close() {
	own := map[int]bool{}
	for _, p := range l.procs {
		own[p.cmd.Process.Pid] = true
	}
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); {
		pids := descendants(os.Getpid())
		if len(pids) == 0 {
			break
		}
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL)
			if !own[pid] {
				_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil) // ours only if it is an orphan
			}
		}
		time.Sleep(2 * time.Millisecond)
	}
	for _, p := range l.procs {
		<-p.done
	}
	for _, f := range l.files {
		_ = f.Close()
	}
	for _, end := range l.ends {
		end()
	}
	for _, pattern := range append(l.garbage, l.dir) {
		paths, _ := filepath.Glob(pattern) // the pattern is good
		for _, path := range paths {
			_ = os.RemoveAll(path)
		}
	}
}

// start runs a program with its output in a file of the lab, its standard output in
// stdout if that is given.
func (l *lab) start(env []string, stdout *os.File, argv ...string) (*process, error) {
	out, err := os.Create(filepath.Join(l.dir, fmt.Sprintf("out-%d", len(l.procs))))
	if err != nil {
		return nil, err
	}
	defer out.Close()
	p := &process{cmd: exec.Command(argv[0], argv[1:]...), out: out.Name(), done: make(chan struct{})}
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = l.dir, out, out
	p.cmd.Env = append(append(cleanEnv(), "OMP_NUM_THREADS=1", "TMPDIR="+l.dir), env...)
	if stdout != nil {
		p.cmd.Stdout = stdout
	}
	p.began = now()
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	l.procs = append(l.procs, p)
	go func() { // close waits for it
		_ = p.cmd.Wait()
		p.ended = now()
		close(p.done)
	}()
	return p, nil
}

// launch starts the launcher of this side; both understand the same options.
func (l *lab) launch(args ...string) (*process, error) {
	return l.start(l.side.env, nil, append(append([]string{}, l.side.command...), args...)...)
}

// worker is the tail of a launcher's arguments: the stamping worker in a mode.
func (l *lab) worker(mode ...string) []string {
	return append([]string{"--no_python", l.bench.stamp, l.stamps}, mode...)
}

// daemon starts dlrover-master at addr and waits until it listens.
func (l *lab) daemon(ctx context.Context, addr string, env ...string) (*process, error) {
	p, err := l.start(env, nil, l.master, "--listen", addr)
	if err != nil {
		return nil, err
	}
	return p, l.listening(ctx, addr)
}

// listening waits until someone serves at addr.
func (l *lab) listening(ctx context.Context, addr string) error {
	return l.until(ctx, "someone to listen at "+addr, func() (bool, error) {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			return false, nil
		}
		return true, c.Close()
	})
}

// exited waits for the end of p and returns when it was.
func (l *lab) exited(ctx context.Context, p *process) (int64, error) {
	select {
	case <-p.done:
		return p.ended, nil
	case <-ctx.Done():
		return 0, fmt.Errorf("waited for the end of %s: %w", filepath.Base(p.cmd.Path), context.Cause(ctx))
	}
}

// until calls ok every two milliseconds until it returns true.
func (l *lab) until(ctx context.Context, what string, ok func() (bool, error)) error {
	for {
		if done, err := ok(); done || err != nil {
			return err
		}
		if err := pause(ctx, 2*time.Millisecond); err != nil {
			return fmt.Errorf("waited for %s: %w", what, err)
		}
	}
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// stamp is one line that a worker has written.
type stamp struct {
	event     string // start, exit or train
	at        int64
	pid, ppid int
	rank      int
	world     int
}

func parseStamps(data []byte) (ss []stamp, err error) {
	for line := range bytes.Lines(data[:bytes.LastIndexByte(data, '\n')+1]) { // no half-written one
		var s stamp
		if _, err := fmt.Sscanf(string(line), "%s %d %d %d %d %d\n",
			&s.event, &s.at, &s.pid, &s.ppid, &s.rank, &s.world); err != nil {
			return nil, fmt.Errorf("stamp %q: %w", line, err)
		}
		ss = append(ss, s)
	}
	return ss, nil
}

// await waits for n stamps that match.
func (l *lab) await(ctx context.Context, what string, n int, match func(stamp) bool) (found []stamp, err error) {
	err = l.until(ctx, what, func() (bool, error) {
		found, err = l.pick(match)
		return len(found) >= n, err
	})
	return found, err
}

// pick returns the stamps that match, in order of writing.
func (l *lab) pick(match func(stamp) bool) (found []stamp, err error) {
	data, err := os.ReadFile(l.stamps)
	if err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	all, err := parseStamps(data)
	for _, s := range all {
		if match(s) {
			found = append(found, s)
		}
	}
	return found, err
}

func started(after int64) func(stamp) bool {
	return func(s stamp) bool { return s.event == "start" && s.at > after }
}

// startedBy matches starts by one launcher, which is p or, below its guard, p's child.
func startedBy(p *process, after int64) func(stamp) bool {
	return func(s stamp) bool {
		if s.event != "start" || s.at <= after {
			return false
		}
		guard, _ := parentOf(s.ppid)
		return s.ppid == p.cmd.Process.Pid || guard == p.cmd.Process.Pid
	}
}

func first(ss []stamp) int64 {
	at := ss[0].at
	for _, s := range ss {
		at = min(at, s.at)
	}
	return at
}

func last(ss []stamp) int64 {
	at := ss[0].at
	for _, s := range ss {
		at = max(at, s.at)
	}
	return at
}

// fail makes a waiting worker exit with 1 and returns when it did.
func (l *lab) fail(ctx context.Context, w stamp) (int64, error) {
	if err := unix.Kill(w.pid, unix.SIGUSR1); err != nil {
		return 0, fmt.Errorf("signal the worker: %w", err)
	}
	ss, err := l.await(ctx, "the worker's exit", 1, func(s stamp) bool { return s.event == "exit" && s.pid == w.pid })
	if err != nil {
		return 0, err
	}
	return ss[0].at, nil
}

// kill ends p and all below it at once, as the death of a node would.
func (l *lab) kill(p *process) {
	for _, pid := range append([]int{p.cmd.Process.Pid}, descendants(p.cmd.Process.Pid)...) {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
}

// killExecuted kills the process that was executed, and killBelow the first that it has started.
func (l *lab) killExecuted(p *process) { _ = unix.Kill(p.cmd.Process.Pid, unix.SIGKILL) }

func (l *lab) killBelow(p *process) {
	for _, pid := range descendants(p.cmd.Process.Pid)[:1] {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
}

// lastWords are the last lines that the processes have written, for an error.
func (l *lab) lastWords() string {
	var b strings.Builder
	for i, p := range l.procs {
		data, err := os.ReadFile(p.out)
		if data = bytes.TrimSpace(data); err != nil || len(data) == 0 {
			continue
		}
		fmt.Fprintf(&b, "\n  process %d (%s): ...%s", i, filepath.Base(p.cmd.Path), data[max(0, len(data)-400):])
	}
	return b.String()
}

// freePort is a port without a listener just now, and freeAddr that of loopback.
func freePort() (string, error) {
	port, err := freeports.ForServer()
	return strconv.Itoa(port), err
}

func freeAddr() (string, error) {
	port, err := freePort()
	return "127.0.0.1:" + port, err
}

// descendants are the pids below root, by /proc; zombies are among them.
func descendants(root int) []int {
	below := map[int][]int{}
	names, _ := os.ReadDir("/proc") // without /proc nothing is found
	for _, e := range names {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			if ppid, ok := parentOf(pid); ok {
				below[ppid] = append(below[ppid], pid)
			}
		}
	}
	var out []int
	for queue := below[root]; len(queue) > 0; queue = queue[1:] {
		out = append(out, queue[0])
		queue = append(queue, below[queue[0]]...)
	}
	return out
}

func parentOf(pid int) (int, bool) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false
	}
	// pid (name) state ppid; the name may hold anything, even parentheses
	fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	if len(fields) < 2 {
		return 0, false
	}
	ppid, err := strconv.Atoi(fields[1])
	return ppid, err == nil
}

// memory is a size in bytes out of a file of /proc/PID with lines such as "Rss: 12 kB".
func memory(pid int, file, key string) (float64, error) {
	path := fmt.Sprintf("/proc/%d/%s", pid, file)
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, key+":"); ok {
			kb, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 64)
			return kb * 1024, err
		}
	}
	return 0, fmt.Errorf("%s: no %s", path, key)
}

func rss(pid int) (float64, error) { return memory(pid, "smaps_rollup", "Rss") }

// cpuSeconds is the processor time of all living threads of a process, to the
// nanosecond; /proc/PID/stat counts in hundredths of a second.
func cpuSeconds(pid int) (float64, error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(files) == 0 {
		return 0, fmt.Errorf("no threads of process %d (no schedstat in this kernel?): %w", pid, os.ErrNotExist)
	}
	sum := 0.0
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			continue // the thread has ended
		}
		text, _, _ := strings.Cut(string(data), " ")
		ns, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", f, err)
		}
		sum += ns / 1e9
	}
	return sum, nil
}
