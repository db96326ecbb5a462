package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"
)

//go:embed train.py
var trainPy []byte

// cluster is the processes of the demo, such as one daemon and the launchers of some nodes, each with files of its name
// in dir.
type cluster struct {
	dir     string // made here
	bin     string // of dlrover-run and dlrover-master
	python  string
	train   []string // arguments of train.py
	launch  []string // more options of dlrover-run
	within  []string // a command that starts others elsewhere
	host    string   // where the daemon listens
	addr    string   // of the daemon, or of all masters
	daemon  *child   // nil: there are several masters
	all     []*child // in the order of their start
	nodes   map[string]*child
	records chan record // the records in the order of their arrival
	quit    chan struct{}
	wg      sync.WaitGroup
	open    []io.Closer
}

// child is a process that we started.
type child struct {
	name string
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
	code int           // valid then; -N for signal N
}

func newCluster(dir, bin, python string, train []string) (*cluster, error) {
	c := &cluster{
		dir: dir, bin: bin, python: python, train: train, host: "127.0.0.1", nodes: map[string]*child{},
		records: make(chan record), quit: make(chan struct{}),
	}
	err := os.WriteFile(c.path("train.py"), trainPy, 0o644)
	return c, errors.Join(err, os.WriteFile(c.path("token"), []byte(rand.Text()), 0o600))
}

func (c *cluster) path(name string) string { return filepath.Join(c.dir, name) }

// start runs a program of bin, or one with an absolute path, in a process group of its own, so that Ctrl-C reaches only
// us.
func (c *cluster) start(name, program string, args, env []string, stdout *os.File) (*child, error) {
	stderr, err := os.Create(c.path(name + ".stderr"))
	if err != nil {
		return nil, err
	}
	defer stderr.Close()
	if !filepath.IsAbs(program) {
		program = filepath.Join(c.bin, program)
	}
	command := slices.Concat(c.within, []string{program}, args)
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = append(environment(), "DLROVER_TOKEN_FILE="+c.path("token"), "TMPDIR="+c.path(""),
		"PET_CKPT_SHM_DIR="+filepath.Clean(c.path("")))
	cmd.Env = append(cmd.Env, env...)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	ch := &child{name: name, cmd: cmd, done: make(chan struct{})}
	c.all = append(c.all, ch)
	c.wg.Go(func() {
		_ = cmd.Wait() // cmd.ProcessState has the details
		ws := cmd.ProcessState.Sys().(syscall.WaitStatus)
		if ch.code = ws.ExitStatus(); ws.Signaled() {
			ch.code = -int(ws.Signal())
		}
		close(ch.done)
		c.see(record{Time: time.Now(), Event: evExit, From: name, ExitCode: ch.code})
	})
	return ch, nil
}

// see hands over a record.
func (c *cluster) see(r record) {
	select {
	case c.records <- r:
	case <-c.quit:
	}
}

// startMaster starts the daemon and waits until it serves: it logs the port it took.
func (c *cluster) startMaster(ctx context.Context) (err error) {
	args := []string{"--listen=" + c.host + ":0", "--event-log=" + c.path("master.events")}
	if c.daemon, err = c.start("master", "dlrover-master", args, nil, nil); err != nil {
		return err
	}
	const limit = 10 * time.Second
	late := time.After(limit)
	for {
		if c.addr = servedAt(c.path("master.stderr")); c.addr != "" {
			return nil
		}
		select {
		case <-time.After(poll):
		case <-c.daemon.done:
			return fmt.Errorf("dlrover-master ended with code %d: %s", c.daemon.code, lastLineOf(c.path("master.stderr")))
		case <-late:
			return fmt.Errorf("dlrover-master does not serve within %s", limit)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// goesOn waits a moment; false: the cluster is closed.
func (c *cluster) goesOn() bool {
	select {
	case <-c.quit:
		return false
	case <-time.After(time.Millisecond):
		return true
	}
}

// poll is how often a file that another process writes is looked at.
const poll = 10 * time.Millisecond

// servedAt finds the address in the daemon's log.
func servedAt(log string) string {
	data, _ := os.ReadFile(log)
	for line := range bytes.Lines(data) {
		var l struct{ Msg, Addr string }
		if json.Unmarshal(line, &l) == nil && l.Msg == "serving" {
			return l.Addr
		}
	}
	return ""
}

// startNode starts the launcher of one node, as a pod would.
func (c *cluster) startNode(name string) error {
	out, err := c.workerOutput(name)
	if err != nil {
		return err
	}
	defer out.Close()
	args := slices.Concat([]string{
		"--rdzv-id=demo", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-conf=last_call_timeout=1",
		"--log-dir=" + c.path(name+".logs"), "--event-log=" + c.path(name+".events"),
	}, c.launch, []string{c.path("train.py")}, c.train)
	if err := c.startLauncher(name, args, out); err != nil {
		return err
	}
	node := c.nodes[name]
	c.wg.Go(func() { c.followEvents(node) })
	return nil
}

// startLauncher starts that of a node, with any arguments.
func (c *cluster) startLauncher(name string, args []string, stdout *os.File, env ...string) (err error) {
	env = append([]string{"POD_NAME=" + name, "DLROVER_MASTER_ADDR=" + c.addr, "PYTHON_EXEC=" + c.python,
		"OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo"}, env...)
	c.nodes[name], err = c.start(name, "dlrover-run", args, env, stdout)
	return err
}

// workerOutput returns a pipe for the output of a node's workers.
func (c *cluster) workerOutput(name string) (*os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	keep, err := os.Create(c.path(name + ".stdout"))
	if err != nil {
		return nil, errors.Join(err, r.Close(), w.Close())
	}
	c.open = append(c.open, r, keep)
	c.wg.Go(func() {
		for lines := bufio.NewScanner(io.TeeReader(r, keep)); lines.Scan(); {
			if rec, ok := parseRecord(lines.Bytes()); ok {
				rec.Time, rec.From = time.Now(), name
				c.see(rec)
			}
		}
	})
	return w, nil
}

// followEvents reads a launcher's event log while it grows, until its writer has ended.
func (c *cluster) followEvents(n *child) {
	var line []byte
	var log *bufio.Reader
	for ended := false; ; {
		if log == nil {
			if f, err := os.Open(c.path(n.name + ".events")); err == nil {
				defer f.Close()
				log = bufio.NewReader(f)
			}
		}
		if log != nil {
			line = c.readEvents(n.name, log, line)
		}
		if ended {
			return
		}
		select {
		case <-n.done:
			ended = true // and read its last records
		case <-time.After(poll):
		case <-c.quit:
			return
		}
	}
}

// readEvents reads to the end of the file and returns the line that is not whole yet.
func (c *cluster) readEvents(name string, log *bufio.Reader, line []byte) []byte {
	for {
		part, err := log.ReadBytes('\n')
		line = append(line, part...)
		if err != nil {
			return line
		}
		if rec, ok := parseRecord(line); ok {
			rec.From = name
			c.see(rec)
		}
		line = nil
	}
}

// close ends everything that was started, in order if it can.
func (c *cluster) close() {
	close(c.quit)
	for _, ch := range c.all {
		if ch.running() {
			_ = ch.cmd.Process.Signal(syscall.SIGTERM) // it may be ending right now
		}
	}
	late, cancel := context.WithTimeout(context.Background(), stopLimit)
	defer cancel()
	for _, ch := range c.all {
		ch.wait(late)
	}
	leftovers(stopLimit, true)
	for _, f := range c.open {
		_ = f.Close()
	}
	c.wg.Wait()
}

// stopLimit bounds both the orderly end and the hard one.
const stopLimit = 5 * time.Second

func (ch *child) wait(ctx context.Context) {
	select {
	case <-ch.done:
	case <-ctx.Done():
	}
}

func (ch *child) running() bool {
	select {
	case <-ch.done:
		return false
	default:
		return true
	}
}
