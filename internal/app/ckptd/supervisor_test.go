package ckptd

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/checkpointd"
	"dlrover-run/internal/testkit"
)

// fakes are daemons that answer everything and record their requests.
type fakes struct {
	t    *testing.T
	left int   // saves that End leaves
	fail error // of Start

	mu      sync.Mutex
	tried   int
	daemons []*fake
}

type fake struct {
	Command
	of   *fakes
	ln   net.Listener
	done chan struct{}
	wg   sync.WaitGroup

	mu    sync.Mutex
	told  []string
	conns []net.Conn
	mute  bool // answers no more
}

func (f *fakes) start(c Command) (Process, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tried++
	if f.fail != nil {
		return nil, f.fail
	}
	ln, err := net.FileListener(c.Stdin)
	require.NoError(f.t, err)
	d := &fake{Command: c, of: f, ln: ln, done: make(chan struct{})}
	f.daemons = append(f.daemons, d)
	d.wg.Go(d.serve)
	return d, nil
}

func (f *fakes) attempts() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.tried
}

func (f *fakes) all() []*fake {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.daemons)
}

// nth waits for the nth daemon, from 1.
func (f *fakes) nth(n int) *fake {
	f.t.Helper()
	require.Eventually(f.t, func() bool { return len(f.all()) >= n }, 10*time.Second, time.Millisecond, "daemon %d", n)
	return f.all()[n-1]
}

func (d *fake) PID() int              { return 4711 }
func (d *fake) Done() <-chan struct{} { return d.done }
func (d *fake) Code() int             { return -9 }

func (d *fake) serve() {
	for {
		c, err := d.ln.Accept()
		if err != nil {
			return
		}
		d.mu.Lock()
		d.conns = append(d.conns, c)
		d.mu.Unlock()
		d.wg.Go(func() { d.answer(c) })
	}
}

func (d *fake) answer(c net.Conn) {
	for in := bufio.NewScanner(c); in.Scan(); {
		var r struct {
			Op     string
			World  checkpointd.World
			Reason string
			Early  bool
			Addr   string
		}
		if json.Unmarshal(in.Bytes(), &r) != nil {
			return
		}
		d.mu.Lock()
		mute := d.mute
		d.told = append(d.told,
			strings.TrimSpace(fmt.Sprintf("%s %s", r.Op, r.Addr+d.what(r.Op, r.World, r.Reason, r.Early))))
		d.mu.Unlock()
		if !mute {
			fmt.Fprintf(c, `{"ok":true,"left":%d,"status":{"note":"full"}}`+"\n", d.of.left)
		}
	}
}

func (d *fake) what(op string, w checkpointd.World, reason string, early bool) string {
	switch op {
	case "world":
		return fmt.Sprint(w.Epoch)
	case "flush":
		return fmt.Sprint(w.Epoch, " ", reason, " ", early)
	}
	return ""
}

// hears waits until the daemon has received these requests, in this order. Only the first of each counts: a request may
// be sent twice while a connection is made.
func (d *fake) hears(want ...string) {
	d.of.t.Helper()
	var told []string
	ok := func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		told = nil
		for _, what := range d.told {
			if !slices.Contains(told, what) {
				told = append(told, what)
			}
		}
		return slices.Equal(told, want)
	}
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			require.Equal(d.of.t, want, told)
		}
	}
}

// die simulates the death of the process. The socket, which belongs to the launcher, stays.
func (d *fake) die() {
	_ = d.ln.Close()
	d.mu.Lock()
	for _, c := range d.conns {
		_ = c.Close()
	}
	d.mu.Unlock()
	close(d.done)
	d.wg.Wait()
}

type rig struct {
	*fakes
	*Supervisor
	log *testkit.Buffer
	cfg SupervisorConfig
}

// newRig has a supervisor that serves nothing yet.
func newRig(t *testing.T, change func(*SupervisorConfig)) *rig {
	t.Helper()
	base, err := os.MkdirTemp("", "ckptd") // short: the path of a socket
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(base)) })
	r := &rig{fakes: &fakes{t: t}, log: &testkit.Buffer{}}
	r.cfg = SupervisorConfig{
		ShmDir: base, Key: "job", Run: "run", Start: r.start, Logger: slog.New(slog.NewTextHandler(r.log, nil)),
	}
	if change != nil {
		change(&r.cfg)
	}
	r.Supervisor, err = NewSupervisor(r.cfg)
	require.NoError(t, err)
	return r
}

// finish ends and closes as a launcher does, and checks that nothing is left.
func (r *rig) finish() error {
	r.t.Helper()
	unsaved := r.End(time.Second, nil)
	for _, d := range r.all() {
		select {
		case <-d.done:
		default:
			d.die()
		}
	}
	r.Close()
	goleak.VerifyNone(r.t)
	return unsaved
}

// call is a worker that calls the daemon.
func (r *rig) call() {
	r.t.Helper()
	c, err := net.Dial("unix", filepath.Join(r.Dir(), socketName))
	require.NoError(r.t, err)
	r.t.Cleanup(func() { _ = c.Close() })
}

// segment leaves a save in the memory of the run.
func segment(t *testing.T, dir string) {
	t.Helper()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "seg", "l0-0.seg"), []byte("a save"), 0o600))
}

func epoch(n int) checkpointd.World {
	return checkpointd.World{Term: 1, Round: 1, Epoch: n, WorldSize: 2}
}

func TestNoDaemonBeforeAWorkerCalls(t *testing.T) {
	r := newRig(t, nil)
	r.Serve(Network{})
	r.World(epoch(1))
	r.Breakpoint("a worker failed", checkpointd.AtOnce)
	st, err := r.Status(t.Context())
	require.NoError(t, err)
	require.Nil(t, st)
	dir := r.Dir()
	require.NoError(t, r.finish())
	require.Zero(t, r.attempts(), "nobody saves, so nobody needs a daemon")
	require.NoDirExists(t, dir)
}

// The rendezvous is elsewhere: the daemon that runs, and every later one, go there.
func TestMove(t *testing.T) {
	r := newRig(t, nil)
	r.Serve(Network{Master: "10.0.0.1:29400"})
	r.World(epoch(1))
	r.call()
	d := r.nth(1)
	d.hears("lead", "world 1")
	r.Move("10.0.0.2:41000")
	d.hears("lead", "world 1", "meet 10.0.0.2:41000")
	d.die()
	next := r.nth(2)
	require.Contains(t, strings.Join(next.Args, " "), "--master 10.0.0.2:41000")
	next.hears("lead", "meet 10.0.0.2:41000", "world 1")
	require.NoError(t, r.finish())
}

// A daemon reads a token file itself, which may change; the token of one that is gone is handed on.
func TestTheTokenOfADaemon(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	for _, c := range []struct{ want, not string }{
		{"DLROVER_TOKEN=secret", "DLROVER_TOKEN_FILE=" + file}, {"DLROVER_TOKEN_FILE=" + file, "DLROVER_TOKEN=secret"},
	} {
		r := newRig(t, nil)
		r.Serve(Network{Token: "secret", File: file})
		r.World(epoch(1))
		r.call()
		d := r.nth(1)
		d.hears("lead", "world 1")
		require.Contains(t, d.Env, c.want)
		require.NotContains(t, d.Env, c.not)
		require.NoError(t, r.finish())
		require.NoError(t, os.WriteFile(file, []byte("secret"), 0o600))
	}
}

func TestTheFirstCallStartsADaemon(t *testing.T) {
	r := newRig(t, func(c *SupervisorConfig) { c.Replicas, c.WriteRate = 2, "5M" })
	r.Serve(Network{Master: "10.0.0.1:29400", Token: "secret", Addr: "10.0.0.2"})
	r.World(epoch(3))
	r.call()
	d := r.nth(1)
	d.hears("lead", "world 3")
	line := strings.Join(d.Args, " ")
	for _, part := range []string{"--runtime " + r.Dir(), "--replicas 2", "--addr 10.0.0.2", "--run run",
		"--master 10.0.0.1:29400", "--write-rate 5M"} {
		require.Contains(t, line, part)
	}
	require.Contains(t, d.Env, "DLROVER_TOKEN=secret")
	require.NotContains(t, line, "secret", "everybody may read a command line")

	r.World(epoch(4))
	r.Breakpoint("a worker failed", checkpointd.AtOnce)
	d.hears("lead", "world 3", "world 4", "flush 4 a worker failed false")
	st, err := r.Status(t.Context())
	require.NoError(t, err)
	require.Equal(t, "full", st.Trouble)
	require.NoError(t, r.finish())
	require.NotContains(t, r.log.String(), "level=WARN")
}

// The successor of a dead daemon receives the requests that the dead one may not have finished.
func TestADaemonThatDiesIsReplaced(t *testing.T) {
	r := newRig(t, nil)
	r.Serve(Network{})
	r.World(epoch(1))
	r.call()
	first := r.nth(1)
	first.hears("lead", "world 1")
	r.Breakpoint("a worker failed", checkpointd.AtOnce)
	first.hears("lead", "world 1", "flush 1 a worker failed false")
	first.die()
	second := r.nth(2)
	second.hears("lead", "world 1", "flush 1 a worker failed false")
	require.Contains(t, r.log.String(), "the checkpoint daemon died, starting another")
	require.Contains(t, r.log.String(), "code=-9")
	r.World(epoch(2))
	second.hears("lead", "world 1", "flush 1 a worker failed false", "world 2")
	require.NoError(t, r.finish())
}

// Requests while no daemon runs reach the next one.
func TestOrdersWaitForTheNextDaemon(t *testing.T) {
	r := newRig(t, nil)
	r.Serve(Network{})
	r.call()
	first := r.nth(1)
	first.hears("lead", "world 0")
	first.mu.Lock()
	first.mute = true
	first.mu.Unlock()
	r.Breakpoint("a worker failed", checkpointd.Early)
	first.hears("lead", "world 0", "flush 0 a worker failed true")
	first.die()
	r.nth(2).hears("lead", "world 0", "flush 0 a worker failed true")
	require.NoError(t, r.finish())
}

// A daemon that was frozen for a while is reached over a new connection: an answer on the old one might be late.
func TestStatusOfADaemonThatWasFrozen(t *testing.T) {
	r := newRig(t, nil)
	r.Serve(Network{})
	r.call()
	d := r.nth(1)
	d.hears("lead", "world 0")
	freeze := func(yes bool) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.mute = yes
	}
	freeze(true)
	ctx, cancel := context.WithCancel(t.Context())
	asked := make(chan error, 1)
	go func() { _, err := r.Status(ctx); asked <- err }()
	d.hears("lead", "world 0", "status")
	freeze(false)
	cancel()
	require.Error(t, <-asked)
	require.Eventually(t, func() bool {
		st, err := r.Status(t.Context())
		return err == nil && st != nil && st.Trouble == "full"
	}, 10*time.Second, time.Millisecond)
	require.Len(t, r.all(), 1)
	require.NoError(t, r.finish())
}

func TestADaemonThatCannotBeStartedIsTriedAgain(t *testing.T) {
	r := newRig(t, nil)
	r.fail = errors.New("too many processes")
	r.Serve(Network{})
	r.call()
	require.Eventually(t, func() bool { return r.attempts() >= 2 }, 10*time.Second, time.Millisecond)
	require.Contains(t, r.log.String(), "too many processes")
	r.fakes.mu.Lock()
	r.fail = nil
	r.fakes.mu.Unlock()
	r.nth(1).hears("lead", "world 0")
	require.NoError(t, r.finish())
}

func TestNoDaemonIsStartedOnceTheLauncherEnds(t *testing.T) {
	r := newRig(t, nil)
	r.fail = ErrClosed
	r.Serve(Network{})
	r.call()
	require.Eventually(t, func() bool { return r.attempts() == 1 }, 10*time.Second, time.Millisecond)
	enough := make(chan struct{})
	close(enough) // a daemon was called for, and none will ever answer
	require.Error(t, r.End(time.Minute, enough))
	r.Close()
	require.Equal(t, 1, r.attempts())
	goleak.VerifyNone(t)
}

// The memory of a killed launcher may wait for the disk: the daemon starts without a worker's call.
func TestMemoryOfADeadLauncherNeedsADaemon(t *testing.T) {
	r := newRig(t, nil)
	segment(t, r.Dir())
	dir := r.Dir()
	r.left = 1
	r.Serve(Network{})
	r.nth(1).hears("lead", "world 0")
	require.ErrorContains(t, r.finish(), "1 saves are not there")
	require.Contains(t, r.log.String(), "1 saves are not there")
	require.FileExists(t, filepath.Join(dir, "seg", "l0-0.seg"), "it stays for the next launcher")
	next, err := NewSupervisor(r.cfg)
	require.NoError(t, err)
	require.Equal(t, dir, next.Dir())
	require.NoError(t, next.dir.RemoveAll())
	require.NoError(t, next.End(0, patienceIsOver()), "nothing was served")
	next.Close()
}

// patienceIsOver is a signal that has come.
func patienceIsOver() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

func TestEndWaitsNoLongerThanEnough(t *testing.T) {
	r := newRig(t, nil)
	r.Serve(Network{})
	r.call()
	d := r.nth(1)
	d.hears("lead", "world 0")
	d.mu.Lock()
	d.mute = true
	d.mu.Unlock()
	enough, ended := make(chan struct{}), make(chan struct{})
	var unsaved error
	go func() { defer close(ended); unsaved = r.End(time.Hour, enough) }()
	d.hears("lead", "world 0", "end")
	select {
	case <-ended:
		require.FailNow(t, "nobody has answered")
	default:
	}
	close(enough)
	<-ended
	require.ErrorContains(t, unsaved, "a signal has ended the wait")
	d.die()
	r.Close()
	goleak.VerifyNone(t)
}

func TestTwoLaunchersOfARunHaveADirectoryEach(t *testing.T) {
	r := newRig(t, nil)
	other, err := NewSupervisor(r.cfg)
	require.NoError(t, err)
	require.Equal(t, "job-0", filepath.Base(r.Dir()))
	require.Equal(t, "job-1", filepath.Base(other.Dir()))
	other.Serve(Network{})
	require.NoError(t, other.End(time.Second, nil))
	other.Close()
	r.Serve(Network{})
	require.NoError(t, r.finish())
}

func TestNoDirectory(t *testing.T) {
	_, err := NewSupervisor(SupervisorConfig{ShmDir: "/proc", Key: "job", Logger: slog.New(slog.DiscardHandler)})
	require.ErrorContains(t, err, "/proc/dlrover-")
	_, err = NewSupervisor(SupervisorConfig{ShmDir: "/proc", Sidecar: "pod", Logger: slog.New(slog.DiscardHandler)})
	require.ErrorContains(t, err, "/proc/dlrover-")
}

// A sidecar's daemon has another owner: it gets the same requests, and is never started or ended.
func TestSidecar(t *testing.T) {
	r := newRig(t, func(c *SupervisorConfig) { c.Sidecar = "pod" })
	r.Serve(Network{})
	r.World(epoch(1))
	ln, err := checkpointd.Listen(filepath.Join(r.Dir(), socketName))
	require.NoError(t, err)
	d := &fake{of: r.fakes, ln: ln, done: make(chan struct{})}
	d.wg.Go(d.serve)
	d.hears("lead", "world 1")
	r.World(epoch(2))
	d.hears("lead", "world 1", "world 2")
	dir := r.Dir()
	require.NoError(t, r.End(time.Second, nil))
	d.hears("lead", "world 1", "world 2", "end")
	r.Close()
	d.die()
	require.Zero(t, r.attempts())
	require.DirExists(t, dir)
	goleak.VerifyNone(t)
}

// A sidecar that went away and came back, with a launcher that went on meanwhile.
func TestSidecarComesBack(t *testing.T) {
	r := newRig(t, func(c *SupervisorConfig) { c.Sidecar = "pod" })
	path := filepath.Join(r.Dir(), socketName)
	serve := func() *fake {
		ln, err := checkpointd.Listen(path)
		require.NoError(t, err)
		d := &fake{of: r.fakes, ln: ln, done: make(chan struct{})}
		d.wg.Go(d.serve)
		return d
	}
	first := serve()
	r.Serve(Network{})
	first.hears("lead", "world 0")
	first.die()
	second := serve()
	r.World(epoch(1)) // finds the connection broken
	require.Eventually(t, func() bool {
		second.mu.Lock()
		defer second.mu.Unlock()
		return slices.Contains(second.told, "lead") && slices.Contains(second.told, "world 1")
	}, 10*time.Second, time.Millisecond)
	require.NoError(t, r.End(time.Second, nil))
	r.Close()
	second.die()
	goleak.VerifyNone(t)
}

func TestMemoryOfDeadJobsIsRemoved(t *testing.T) {
	r := newRig(t, nil)
	user := filepath.Dir(r.Dir())
	dead := func(key string, age time.Duration, saved bool) string {
		dir := filepath.Join(user, key)
		for _, d := range []string{dir, filepath.Join(dir, "seg"), filepath.Join(dir, "peer")} {
			require.NoError(t, os.Mkdir(d, 0o700))
		}
		require.NoError(t, os.WriteFile(filepath.Join(dir, "owner"), []byte("1 7\n"), 0o600))
		if saved {
			segment(t, dir)
		}
		at := time.Now().Add(-age)
		require.NoError(t, filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
			require.NoError(t, err)
			return os.Chtimes(path, at, at)
		}))
		return dir
	}
	old, fresh, empty := dead("old-0", time.Hour, true), dead("fresh-0", time.Minute, true), dead("empty-0", 0, false)
	r.RemoveStale()
	require.Eventually(t, func() bool {
		_, errOld := os.Stat(old)
		_, errEmpty := os.Stat(empty)
		return os.IsNotExist(errOld) && os.IsNotExist(errEmpty)
	}, 10*time.Second, time.Millisecond)
	r.Serve(Network{})
	own := r.Dir()
	require.DirExists(t, own)
	require.NoError(t, r.finish())
	require.DirExists(t, fresh, "its next launcher may come")
	require.Contains(t, r.log.String(), "removed the checkpoint memory of a job that is dead")
	require.Equal(t, 1, strings.Count(r.log.String(), "removed the checkpoint memory"),
		"nothing was lost with the empty one")
}
