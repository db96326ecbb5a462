package node

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dlrover-run/internal/text"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/streams"
)

const (
	// grace is how long a command has between SIGTERM and SIGKILL, and lastOutput how long its output is waited for when
	// all of its processes have ended.
	grace      = 500 * time.Millisecond
	lastOutput = 2 * time.Second
	lastWord   = 2 * time.Second // for the daemon to close a connection after it has received the exit
	// maxError bounds the error of a command that was not executed, in bytes.
	maxError = 2 << 10
)

// command executes the request, and reports how it has ended.
func (n *Node) command(c *conn, req streams.Request) {
	in, gone := newInput(), make(chan struct{})
	var hearing sync.WaitGroup
	hearing.Go(func() {
		defer close(gone)
		in.hear(c)
	})
	var exit streams.Exit
	if req.Profile > 0 {
		exit = n.profile(c, gone, req)
	} else {
		exit = n.execute(c, in, gone, req)
	}
	exit.Error = text.Clip(exit.Error, maxError)
	_ = c.send(streams.Frame{Kind: streams.KindExit, Rank: int32(req.Rank), Data: streams.JSON(exit)})
	late := time.NewTimer(lastWord) // a connection with unread input would be reset, and the exit be lost
	defer late.Stop()
	select {
	case <-gone:
	case <-late.C:
	}
	_ = c.nc.Close()
	hearing.Wait()
}

func refused(format string, args ...any) streams.Exit {
	return streams.Exit{Code: streams.CodeRefused, Error: fmt.Sprintf(format, args...)}
}

func (n *Node) execute(c *conn, in *input, gone <-chan struct{}, req streams.Request) streams.Exit {
	if !n.cfg.Exec {
		return refused("the launcher of rank %d executes nothing: it was started without --allow-exec", req.Rank)
	}
	if !n.enter() {
		return refused("the launcher of rank %d executes %d commands already; wait for one of them", req.Rank, maxCommands)
	}
	defer n.leave()
	w, err := n.cfg.Worker(req.Rank)
	if err != nil {
		return refused("%s", err)
	}
	r, err := n.start(c, in, w, req)
	if err != nil {
		code := streams.CodeExecute
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, exec.ErrNotFound) {
			code = streams.CodeNotFound
		}
		return streams.Exit{Code: code, Error: err.Error()}
	}
	cmd := Command{Rank: req.Rank, LocalRank: w.LocalRank, PID: r.p.PID(), From: req.From, Args: req.Args}
	n.cfg.Began(cmd)
	exit := r.run(req.Timeout, gone, n.ending)
	n.cfg.Ended(cmd, exit)
	return exit
}

func (n *Node) enter() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.commands >= maxCommands || n.closed {
		return false
	}
	n.commands++
	return true
}

func (n *Node) leave() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.commands--
}

// running is a command that runs.
type running struct {
	conn *conn
	p    *proc.Process
	mark string      // in the environment of all that it starts
	in   *input      // its standard input
	out  [2]*os.File // its output

	draining atomic.Bool // it has ended
}

// markVariable distinguishes the processes of one command from all others.
const markVariable = "DLROVER_EXEC_ID"

// unfit reports whether a variable of a worker must not reach a command: the command would write where only the worker
// may.
func unfit(kv string) bool {
	name, _, _ := strings.Cut(kv, "=")
	return name == "TORCHELASTIC_ERROR_FILE" || name == "DLROVER_HANG_DIR"
}

// start starts the command in the environment of the worker and in the directory where that is now.
func (n *Node) start(c *conn, in *input, w Worker, req streams.Request) (*running, error) {
	child, own, err := pipes()
	if err != nil {
		return nil, err
	}
	defer closeAll(child[:])
	r := &running{conn: c, mark: markVariable + "=" + rand.Text(), in: in, out: [2]*os.File{own[1], own[2]}}
	env := append(slices.DeleteFunc(slices.Clone(w.Env), unfit), r.mark)
	dir := "/proc/" + strconv.Itoa(w.PID) + "/cwd"
	if path, err := os.Readlink(dir); err == nil {
		env = append(env, "PWD="+path)
	} else {
		dir = "" // the worker has become another user's, or has just ended
	}
	r.p, err = n.cfg.Start(proc.Spec{
		Path: req.Args[0], Args: req.Args, Env: env, Dir: dir, Stdin: child[0], Stdout: child[1], Stderr: child[2],
		Helper: true, Sheltered: true,
	})
	if err != nil {
		closeAll(own[:])
		return nil, err
	}
	in.open(own[0])
	return r, nil
}

// pipes makes three pipes: the ends that the command gets as its standard files, and the others.
func pipes() (child, own [3]*os.File, err error) {
	for i := range child {
		read, write, err := os.Pipe()
		if err != nil {
			closeAll(child[:])
			closeAll(own[:])
			return child, own, err
		}
		child[i], own[i] = write, read
		if i == 0 {
			child[i], own[i] = read, write
		}
	}
	return child, own, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}

// run returns when nothing of the command is left.
func (r *running) run(timeout time.Duration, gone, ending <-chan struct{}) streams.Exit {
	var feeder, readers sync.WaitGroup
	feeder.Go(func() { r.in.feed(r.conn) })
	for i, f := range r.out {
		readers.Go(func() { r.show(f, uint8(i+1)) })
	}
	why := r.await(timeout, gone, ending)
	if why != "" {
		_ = r.p.Signal(syscall.SIGTERM)
		_ = r.p.Signal(syscall.SIGCONT)
		r.pause(grace)
	}
	left := killAll(r.p.PID(), r.mark)
	r.in.close()
	r.drain(&readers)
	feeder.Wait()
	if left != nil {
		return streams.Exit{Code: streams.CodeRefused, Error: left.Error()}
	}
	<-r.p.Done()
	return exitOf(r.p.Exit(), why, timeout)
}

// await returns why the command is to be ended; "": it has ended.
func (r *running) await(timeout time.Duration, gone, ending <-chan struct{}) (why string) {
	var late <-chan time.Time
	if timeout > 0 {
		t := time.NewTimer(timeout)
		defer t.Stop()
		late = t.C
	}
	select {
	case <-r.p.Done():
		return ""
	case <-late:
		return "timeout"
	case <-gone:
		return "who has asked for it is gone"
	case <-ending:
		return "the launcher ends"
	}
}

func (r *running) pause(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-r.p.Done():
	case <-t.C:
	}
}

func exitOf(e proc.Exit, why string, timeout time.Duration) streams.Exit {
	switch {
	case why == "timeout":
		return streams.Exit{Code: streams.CodeTimeout, Error: fmt.Sprintf("it was ended after %s", timeout)}
	case why != "":
		return streams.Exit{Code: streams.CodeRefused, Error: "it was ended: " + why}
	case e.Signal != 0:
		return streams.Exit{Code: streams.CodeSignalBase + int(e.Signal)}
	}
	return streams.Exit{Code: e.Code}
}

// drain waits for the command's output. It leaves a pipe that another process holds.
func (r *running) drain(readers *sync.WaitGroup) {
	r.draining.Store(true)
	for _, f := range r.out {
		_ = f.SetReadDeadline(time.Now().Add(lastOutput))
	}
	readers.Wait()
	closeAll(r.out[:])
}

// show sends the command's output. It waits for the reader, and so does the command.
func (r *running) show(f *os.File, std uint8) {
	buf := make([]byte, streams.MaxData/2)
	for {
		if r.draining.Load() {
			_ = f.SetReadDeadline(time.Now().Add(lastOutput))
		}
		n, err := f.Read(buf)
		if n > 0 && r.conn.send(streams.Frame{Kind: streams.KindOutput, Std: std, Data: buf[:n]}) != nil || err != nil {
			return
		}
	}
}

// input is the part of a command's input that it has not read yet. The sender sends no more than streams.Window of it
// at a time.
type input struct {
	news chan struct{}

	mu     sync.Mutex
	file   *os.File // nil: not open yet
	text   []byte
	unread int  // in text, and being written
	ended  bool // nothing follows
	closed bool
}

func newInput() *input { return &input{news: make(chan struct{}, 1)} }

func (in *input) open(f *os.File) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.file = f
}

// hear takes input until the caller is gone, or sends more than is allowed.
func (in *input) hear(c *conn) {
	for {
		f, err := c.in.Next()
		switch {
		case err != nil:
			return
		case f.Kind == streams.KindInput && !in.put(f.Data):
			return
		case f.Kind == streams.KindInputEnd:
			in.end()
		}
	}
}

func (in *input) put(b []byte) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.unread+len(b) > streams.Window {
		return false
	}
	in.unread += len(b)
	in.text = append(in.text, b...)
	in.wakeLocked()
	return true
}

func (in *input) end() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.ended = true
	in.wakeLocked()
}

// close ends feed.
func (in *input) close() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.closed = true
	_ = in.file.Close()
	in.wakeLocked()
}

func (in *input) wakeLocked() {
	select {
	case in.news <- struct{}{}:
	default:
	}
}

// feed writes the input, and reports consumed bytes to the sender. A command that has closed its input loses the rest.
func (in *input) feed(c *conn) {
	for {
		in.mu.Lock()
		text, ended, closed := in.text, in.ended, in.closed
		in.text = nil
		in.mu.Unlock()
		switch {
		case closed:
			return
		case len(text) > 0:
			_, _ = in.file.Write(text) // close ends it
			in.mu.Lock()
			in.unread -= len(text)
			in.mu.Unlock()
			_ = c.send(streams.Frame{Kind: streams.KindAck, Data: streams.Count(uint64(len(text)))})
			continue
		case ended:
			_ = in.file.Close()
		}
		<-in.news
	}
}
