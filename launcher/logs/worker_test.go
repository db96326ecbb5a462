package logs

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/testkit"
)

func TestWhereOutputGoes(t *testing.T) {
	const out, errText = "o\n", "e\n"
	std := func(s Std) func(int) Std { return func(int) Std { return s } }
	never := func(int) bool { return false }
	for _, tc := range []struct {
		name             string
		cfg              Config
		conOut, conErr   string
		fileOut, fileErr bool
		direct           Std // the child has the file itself
	}{
		{name: "default", conOut: out, conErr: errText},
		{name: "redirect stdout", cfg: Config{Redirects: std(1)}, conErr: errText, fileOut: true, direct: 1},
		{name: "redirect stderr", cfg: Config{Redirects: std(2)}, conOut: out, fileErr: true, direct: 2},
		{name: "redirect both", cfg: Config{Redirects: std(3)}, fileOut: true, fileErr: true, direct: 3},
		{name: "redirect both, rotated", cfg: Config{Redirects: std(3), RotateSize: 1 << 20, RotateCount: 1},
			fileOut: true, fileErr: true},
		{name: "tee stdout", cfg: Config{Tee: std(1)}, conOut: "[default0]:" + out, conErr: errText, fileOut: true},
		{name: "tee both", cfg: Config{Tee: std(3)}, conOut: "[default0]:" + out, conErr: "[default0]:" + errText,
			fileOut: true, fileErr: true},
		{name: "tee wins over redirect", cfg: Config{Tee: std(1), Redirects: std(3)}, conOut: "[default0]:" + out,
			fileOut: true, fileErr: true, direct: 2},
		{name: "rank not on the console", cfg: Config{ConsoleRank: never}},
		{name: "tee, rank not on the console", cfg: Config{Tee: std(3), ConsoleRank: never}, fileOut: true,
			fileErr: true, direct: 3},
		{name: "tee, filters, rank not on the console",
			cfg: Config{Tee: std(1), StdoutFilters: []string{"o"}, ConsoleRank: never}, fileOut: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.cfg.Dir = t.TempDir()
			r := newRig(t, tc.cfg)
			a := r.begin(t)
			w := worker(t, a, 0)
			for i, f := range []*os.File{w.Stdout(), w.Stderr()} {
				info, err := f.Stat()
				require.NoError(t, err)
				require.Equal(t, tc.direct&(1<<i) != 0, info.Mode().IsRegular(), "child's fd %d is the file", i+1)
			}
			run(t, w, sh("printf 'o\\n'; printf 'e\\n' >&2"))
			tailOut, tailErr := w.Tail()
			require.Equal(t, out, string(tailOut))
			require.Equal(t, errText, string(tailErr))
			require.NoError(t, r.Close())
			require.Equal(t, tc.conOut, r.out.String())
			require.Equal(t, tc.conErr, r.err.String())
			for name, want := range map[string]bool{"stdout.log": tc.fileOut, "stderr.log": tc.fileErr} {
				if want {
					require.Equal(t, map[string]string{"stdout.log": out, "stderr.log": errText}[name], read(t, a.Dir(), "0", name))
				} else {
					require.NoFileExists(t, filepath.Join(a.Dir(), "0", name))
				}
			}
			require.Empty(t, r.log.String())
		})
	}
}

func TestPrompts(t *testing.T) {
	for _, tc := range []struct {
		name, shown, answered string
		tee                   func(int) Std
	}{
		{"raw", "(Pdb) ", "got c\n", nil},
		{"tee", "[default0]:(Pdb) ", "got c\n", all},
	} {
		t.Run(tc.name, func(t *testing.T) {
			con, conW := pipe(t)
			r := newRig(t, Config{Dir: t.TempDir(), Tee: tc.tee, Stdout: conW})
			w := worker(t, r.begin(t), 0)
			cmd := sh("printf '(Pdb) '; read x; echo got $x")
			stdin, err := cmd.StdinPipe()
			require.NoError(t, err)
			start(t, w, cmd)
			expect(t, con, tc.shown)
			_, err = stdin.Write([]byte("c\n"))
			require.NoError(t, err)
			expect(t, con, tc.answered)
			require.NoError(t, cmd.Wait())
			w.Drain(time.Minute)
		})
	}
}

func TestFilesKeepRawBytes(t *testing.T) {
	const text = `\r0%%\r50%%\r100%%\nbad \377\376 utf8\ncrlf\r\nlast`
	r := newRig(t, Config{Dir: t.TempDir(), Tee: all})
	a := r.begin(t)
	run(t, worker(t, a, 0), sh("printf '"+text+"'"))
	require.Equal(t, "\r0%\r50%\r100%\nbad \xff\xfe utf8\ncrlf\r\nlast", read(t, a.Dir(), "0", "stdout.log"))
	require.Equal(t, "[default0]:100%\n[default0]:bad \xff\xfe utf8\n[default0]:crlf\n[default0]:last\n", r.out.String())
}

func TestStdoutAndStderrOnOneConsole(t *testing.T) {
	con := &testkit.Buffer{}
	r := newRig(t, Config{Dir: t.TempDir(), Tee: all, Stdout: con, Stderr: con})
	require.Same(t, r.console[0], r.console[1])
	w := worker(t, r.begin(t), 0)
	cmd := sh("printf half; read x; echo line >&2; read x; echo rest")
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	start(t, w, cmd)
	for _, want := range []string{"[default0]:half", "[default0]:half\n[default0]:line\n"} {
		eventually(t, want, func() bool { return con.String() == want })
		_, err = stdin.Write([]byte("\n"))
		require.NoError(t, err)
	}
	require.NoError(t, cmd.Wait())
	w.Drain(time.Minute)
	require.Equal(t, "[default0]:half\n[default0]:line\n[default0]:rest\n", con.String())
}

// TestFilters: rank 1 is not tee'd and rank 2 not on the console; their files tell.
func TestFilters(t *testing.T) {
	r := newRig(t, Config{Dir: t.TempDir(), StdoutFilters: []string{"loss", "ERR"}, StderrFilters: []string{"Trace"},
		Tee:         func(rank int) Std { return Std([]int{3, 0, 3}[rank]) },
		ConsoleRank: func(rank int) bool { return rank != 2 }})
	a := r.begin(t)
	for rank := range 3 {
		run(t, worker(t, a, rank), sh(`echo "loss 1"; echo none; echo "an ERR"; echo Traceback; echo "Trace loss" >&2`))
	}
	a.Close()
	require.Equal(t, "[default0]:loss 1\n[default0]:an ERR\n[default2]:loss 1\n[default2]:an ERR\n",
		read(t, a.Dir(), "filtered_stdout.log"))
	require.Equal(t, "[default0]:Trace loss\n[default2]:Trace loss\n", read(t, a.Dir(), "filtered_stderr.log"))
	require.NotContains(t, r.out.String(), "[default2]")
}

func TestRotatedWorker(t *testing.T) {
	r := newRig(t, Config{Dir: t.TempDir(), Redirects: all, RotateSize: 10_000, RotateCount: 20, TailBytes: 100})
	a := r.begin(t)
	w := worker(t, a, 0)
	run(t, w, helper("flood", "x", "1000", "100", "4096"))
	a.Close()
	got, parts := joined(t, filepath.Join(a.Dir(), "0", "stdout.log"))
	require.Len(t, got, 100_000)
	require.Len(t, parts, 10)
	tail, _ := w.Tail()
	require.Equal(t, got[len(got)-100:], string(tail))
}

func TestDrainWithAGrandchild(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "go")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	r := newRig(t, Config{Dir: dir, Tee: all})
	a := r.begin(t)
	w := worker(t, a, 0)
	cmd := sh("(read x <" + fifo + "; echo late; exec sleep 60) & echo $!; printf bye")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	start(t, w, cmd)
	t.Cleanup(func() { syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
	require.NoError(t, cmd.Wait())

	began := time.Now()
	w.Drain(50 * time.Millisecond)
	require.Less(t, time.Since(began), 5*time.Second)
	tail, _ := w.Tail()
	require.True(t, strings.HasSuffix(string(tail), "\nbye"), "%q", tail)
	require.True(t, strings.HasSuffix(r.out.String(), "\n[default0]:bye"), "the last line is on the console: %q",
		r.out.String())

	require.NoError(t, os.WriteFile(fifo, []byte("\n"), 0))
	eventually(t, "what comes later is read too", func() bool { return strings.HasSuffix(r.out.String(), "byelate\n") })
	a.Close() // an open pipe does not hold up Close
}

func TestCloseReadsWhatIsInThePipe(t *testing.T) {
	r := newRig(t, Config{Dir: t.TempDir(), Tee: all})
	a := r.begin(t)
	w := worker(t, a, 0)
	dup, err := syscall.Dup(int(w.Stdout().Fd())) // a writer that stays
	require.NoError(t, err)
	defer syscall.Close(dup)
	w.Started()
	text := strings.Repeat("0123456789abcde\n", 20_000)
	n, err := syscall.Write(dup, []byte(text))
	require.NoError(t, err)
	require.Equal(t, len(text), n)
	a.Close()
	require.Equal(t, text, read(t, a.Dir(), "0", "stdout.log"))
}

// blockedConsole is a console that takes nothing, with a child that writes size bytes to it.
func blockedConsole(t *testing.T, size int) (r *rig, con *os.File, a *Attempt, w *Worker, cmd *exec.Cmd) {
	t.Helper()
	con, conW := pipe(t)
	r = newRig(t, Config{Dir: t.TempDir(), Tee: all, Stdout: conW})
	a = r.begin(t)
	w = worker(t, a, 0)
	cmd = helper("flood", "x", strconv.Itoa(size/100), "100", "4096")
	start(t, w, cmd)
	return r, con, a, w, cmd
}

func TestBlockedConsoleBlocksTheWorker(t *testing.T) {
	const size = 8 << 20 / 100 * 100
	_, con, a, w, cmd := blockedConsole(t, size)
	eventually(t, "the child sits in write(2) to its stdout", func() bool {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", cmd.Process.Pid))
		return slices.ContainsFunc(threads, func(path string) bool {
			b, _ := os.ReadFile(path)
			return bytes.HasPrefix(b, []byte(strconv.Itoa(syscall.SYS_WRITE)+" 0x1 "))
		})
	})
	info, err := os.Stat(filepath.Join(a.Dir(), "0", "stdout.log"))
	require.NoError(t, err)
	require.Less(t, info.Size(), int64(size))

	check := &numbered{next: map[string]int{"x": 0}, prefix: func(string) string { return "[default0]:" }}
	done := make(chan error, 1)
	go func() {
		_, err := io.CopyN(check, con, int64(size+size/100*len("[default0]:")))
		done <- err
	}()
	require.NoError(t, cmd.Wait())
	w.Drain(time.Minute)
	require.NoError(t, <-done)
	require.NoError(t, check.err)
	require.Equal(t, size/100, check.next["x"])
}

func TestBlockedConsoleDoesNotBlockTheEnd(t *testing.T) {
	r, con, a, w, cmd := blockedConsole(t, 500_000) // less than the pipe: the child exits
	require.NoError(t, cmd.Wait())
	began := time.Now()
	w.Drain(10 * time.Millisecond)
	require.Less(t, time.Since(began), 5*time.Second)
	a.Close()
	tail, _ := w.Tail()
	require.NotEmpty(t, tail)
	require.ErrorContains(t, r.Close(), "the console takes no output: the end of 1 streams of the workers is not on it")

	go io.Copy(io.Discard, con)
	<-w.streams[0].pump.done
}

// A job that restarts for days behind a slow console keeps nothing of the attempts whose output has arrived.
func TestWhatASlowConsoleHasTakenIsForgotten(t *testing.T) {
	r, con, a, w, cmd := blockedConsole(t, 500_000)
	require.NoError(t, cmd.Wait())
	a.Close()
	require.Len(t, r.left, 1)
	go io.Copy(io.Discard, con)
	<-w.streams[0].pump.done
	r.begin(t).Close()
	require.Empty(t, r.left)
}

// A busy machine, or a log collector behind: nothing is lost, and a restart does not wait for it.
func TestSlowConsoleGetsTheEnd(t *testing.T) {
	const size = 500_000
	r, con, a, w, cmd := blockedConsole(t, size)
	require.NoError(t, cmd.Wait())
	a.Close()
	took := r.took()
	select {
	case <-w.streams[0].pump.done:
		require.Fail(t, "the console was not slow")
	default:
	}
	const all = int64(size + size/100*len("[default0]:"))
	slowly := make(chan error, 1)
	go func() {
		var err error
		for n := int64(0); n < all && err == nil; n += 1 << 16 {
			_, err = io.CopyN(io.Discard, con, min(1<<16, all-n))
			time.Sleep(closeGrace / 5)
		}
		slowly <- err
	}()
	eventually(t, "the console takes something", func() bool { return r.took() > took })
	require.NoError(t, r.Close())
	select {
	case <-w.streams[0].pump.done:
	default:
		require.Fail(t, "not waited for")
	}
	require.NoError(t, <-slowly)
}

// helperLauncher is a launcher whose stdout is a pipe without a reader. It reports on stderr, with exit code 0.
func helperLauncher() {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	l, err := New(Config{Dir: os.Args[1], Tee: func(rank int) Std { return Std(rank) }, Logger: log})
	check := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(3)
		}
	}
	check(err)
	a, err := l.Begin(0)
	check(err)
	for rank := range 2 { // rank 0 raw, rank 1 tee'd
		w, err := a.Worker(WorkerID{LocalRank: rank})
		check(err)
		cmd := sh("for i in 1 2 3; do echo line || exit 9; done")
		cmd.Stdout, cmd.Stderr = w.Stdout(), w.Stderr()
		check(cmd.Start())
		w.Started()
		check(cmd.Wait())
		w.Drain(time.Minute)
	}
	check(l.Close())
}

func TestClosedConsoleKillsNobody(t *testing.T) {
	dir := t.TempDir()
	con, conW := pipe(t)
	con.Close()
	cmd := helper("launcher", dir)
	var stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = conW, &stderr
	require.NoError(t, cmd.Run(), stderr.String())
	require.Equal(t, 1, strings.Count(stderr.String(), "cannot write to the console"), stderr.String())
	require.Contains(t, stderr.String(), fmt.Sprintf("bytes=%d", len("line\n")*3+len("[1]:line\n")*3))
	found, err := filepath.Glob(filepath.Join(dir, "*", "attempt_0", "1", "stdout.log"))
	require.NoError(t, err)
	require.Len(t, found, 1)
	require.Equal(t, "line\nline\nline\n", read(t, found[0]))
}

func TestDiskFull(t *testing.T) {
	dir := t.TempDir()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: a full disk is a tiny tmpfs, which only root can mount")
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("SKIPPED: cannot mount a tiny tmpfs here: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, syscall.Unmount(dir, syscall.MNT_DETACH)) })

	r := newRig(t, Config{Dir: dir, Tee: all})
	a := r.begin(t)
	const lines, total = 10_000, 10_000 * 100
	for rank := range 2 {
		run(t, worker(t, a, rank), helper("flood", "x", strconv.Itoa(lines), "100", "4096"))
	}
	require.Equal(t, 2*lines, strings.Count(r.out.String(), "\n"), "the console goes on")
	require.Equal(t, 1, strings.Count(r.log.String(), "cannot write a log file"), r.log.String())
	require.Contains(t, r.log.String(), a.Dir())
	require.Contains(t, r.log.String(), "no space left on device")

	path := filepath.Join(a.Dir(), "0", "stdout.log")
	info, err := os.Stat(path)
	require.NoError(t, err)
	a.Close()
	require.Contains(t, r.log.String(), fmt.Sprintf("lost_bytes=%d", total-info.Size()))

	b := r.begin(t) // a restart while the disk is full
	w := worker(t, b, 0)
	cmd := sh("echo lost; read x; echo kept")
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	start(t, w, cmd)
	eventually(t, "the first line was handled", func() bool { return strings.HasSuffix(r.out.String(), "lost\n") })
	require.NoError(t, os.Remove(path))
	require.NoError(t, stdin.Close())
	require.NoError(t, cmd.Wait())
	w.Drain(time.Minute)
	require.Equal(t, "kept\n", read(t, b.Dir(), "0", "stdout.log"), "there is space again")
}

func TestFlood(t *testing.T) {
	const ranks, perRank = 4, 250_000
	check := &numbered{next: map[string]int{}, prefix: func(tag string) string { return "[default" + tag + "]:" }}
	for rank := range ranks {
		check.next[strconv.Itoa(rank)] = 0
	}
	r := newRig(t, Config{Dir: t.TempDir(), Tee: all, Stdout: check})
	a := r.begin(t)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var cmds []*exec.Cmd
	var workers []*Worker
	for rank := range ranks {
		w := worker(t, a, rank)
		cmd := helper("flood", strconv.Itoa(rank), strconv.Itoa(perRank), "0", "4096")
		start(t, w, cmd)
		cmds, workers = append(cmds, cmd), append(workers, w)
	}
	for i, cmd := range cmds {
		require.NoError(t, cmd.Wait())
		workers[i].Drain(time.Minute)
	}
	runtime.ReadMemStats(&after)
	require.NoError(t, check.err)
	for rank := range ranks {
		tag := strconv.Itoa(rank)
		require.Equal(t, perRank, check.next[tag])
		file := &numbered{next: map[string]int{tag: 0}, prefix: func(string) string { return "" }}
		f, err := os.Open(filepath.Join(a.Dir(), tag, "stdout.log"))
		require.NoError(t, err)
		_, err = io.Copy(file, f)
		f.Close()
		require.NoError(t, err)
		require.NoError(t, file.err)
		require.Equal(t, perRank, file.next[tag])
	}
	require.Less(t, after.HeapInuse, before.HeapInuse+64<<20)
}

// BenchmarkTee measures the launcher's CPU time per 100-byte line: from the pipe to file and console, with prefix.
func BenchmarkTee(b *testing.B) {
	for _, tc := range []struct {
		name string
		cfg  Config
	}{
		{"tee", Config{Tee: all}},
		{"tee+filter", Config{Tee: all, StdoutFilters: []string{"no such text"}}},
		{"raw", Config{}},
		{"redirect+rotate", Config{Redirects: all, RotateSize: 64 << 20, RotateCount: 100}},
	} {
		for _, write := range []string{"100", "4096"} {
			b.Run(tc.name+"/write="+write, func(b *testing.B) {
				null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
				require.NoError(b, err)
				defer null.Close()
				cfg := tc.cfg
				cfg.Dir, cfg.Stdout, cfg.Stderr = b.TempDir(), null, null
				l, err := New(cfg)
				require.NoError(b, err)
				a, err := l.Begin(0)
				require.NoError(b, err)
				w, err := a.Worker(WorkerID{Role: "default"})
				require.NoError(b, err)
				cmd := helper("flood", "x", strconv.Itoa(b.N), "100", write)
				cmd.Stdout, cmd.Stderr = w.Stdout(), w.Stderr()
				before := cpu()
				require.NoError(b, cmd.Start())
				w.Started()
				require.NoError(b, cmd.Wait())
				w.Drain(time.Minute)
				b.ReportMetric(float64(cpu()-before)/float64(b.N), "cpu-ns/line")
				require.NoError(b, l.Close())
			})
		}
	}
}

func cpu() time.Duration {
	var u syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
