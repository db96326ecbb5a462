package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/checkpointd"
	"dlrover-run/checkpointd/python"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/cmd/internal/ckptd"
	"dlrover-run/cmd/internal/console"
	"dlrover-run/launcher"
	"dlrover-run/launcher/proc"
)

// keeper keeps a checkpoint daemon for the workers of this node: it listens on the
// daemon's socket, starts the daemon when the first worker calls, starts it again when
// it dies, and tells it of epochs and failures. A nil *keeper has nothing to end.
type keeper struct {
	s      *settings
	log    *slog.Logger
	procs  *proc.Supervisor
	master string // of the daemons of all nodes; "" for one node
	name   string // by which a daemon knows this launcher from the next one

	client    string       // what goes on PYTHONPATH; "" if there is no place for it
	tree      *python.Tree // has client, for all launchers of this user
	temporary string       // has client instead
	dir       *shm.Dir     // nil: no daemon
	release   func() error
	ln        *net.UnixListener
	file      *os.File // ln's, for the daemon
	watch     *os.File // ln's, to see the first call
	quit      chan struct{}
	wg        sync.WaitGroup
	orders    chan func()
	lost      chan struct{} // the connection to the daemon was given up
	signaled  bool          // the job was told to end; belongs to the launcher's loop

	mu         sync.Mutex
	world      checkpointd.World
	started    bool                                              // a daemon is there, or will be again
	control    *checkpointd.Control                              // to the daemon that runs, if one does
	again      func(context.Context, *checkpointd.Control) error // the last breakpoint
	againUntil time.Time
}

// Times of the keeper. A worker that calls meanwhile waits in the socket's queue.
const (
	orderBudget = 10 * time.Second
	againFor    = time.Minute            // a breakpoint is told again to a new daemon
	startPause  = 100 * time.Millisecond // before a daemon that died is started again; doubles
	startPauses = 5 * time.Second        // up to this
	staleAfter  = 10 * time.Minute       // until the memory of a dead job is removed
)

// keep prepares the runtime directory and the client that workers import. Without a
// runtime directory there is no daemon, and workers save by themselves.
func keep(s *settings, log *slog.Logger, procs *proc.Supervisor, master string) *keeper {
	k := &keeper{s: s, log: log, procs: procs, master: master, name: rand.Text(), quit: make(chan struct{}), orders: make(chan func(), 64), lost: make(chan struct{}, 1)}
	if err := k.open(); err != nil {
		log.Warn("no checkpoint daemon: workers save by themselves", "err", err)
		k.drop()
	}
	k.place()
	k.wg.Go(k.deliver)
	if k.s.ckpt.sidecar != "" && k.dir != nil {
		k.wg.Go(k.attend)
	}
	if k.ln != nil {
		k.wg.Go(k.serve)
		k.wg.Go(func() { removeStale(s.ckpt.shmDir, k.dir, log) })
	}
	return k
}

// place puts the client where all launchers of this user have it, or, where there is no
// room, into a temporary directory. Workers may never import it.
func (k *keeper) place() {
	base, err := shm.UserDir(k.s.ckpt.shmDir)
	if err == nil {
		k.tree, err = python.Take(base)
	}
	if err == nil {
		k.client = k.tree.Dir()
		return
	}
	if k.dir != nil {
		k.log.Warn("no room for the checkpoint client in shared memory", "shm_dir", k.s.ckpt.shmDir, "err", err)
	}
	if k.temporary, err = os.MkdirTemp("", "dlrover-ckpt-"); err == nil {
		k.client = filepath.Join(k.temporary, "python")
		err = python.Extract(k.client)
	}
	if err != nil {
		k.client = ""
		k.log.Warn("no place for the checkpoint client: workers cannot import dlrover", "shm_dir", k.s.ckpt.shmDir, "err", err)
	}
}

// maxNamesakes bounds the launchers of one run on one machine.
const maxNamesakes = 1024

// open takes the first free directory of the run: that of a launcher that died has its
// memory, another that lives has its own.
func (k *keeper) open() (err error) {
	if k.s.ckpt.off {
		return nil
	}
	if k.s.ckpt.sidecar != "" {
		k.dir, err = shm.Create(k.s.ckpt.shmDir, k.s.ckpt.sidecar)
		return err
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s|%s|%s:%d", k.s.runID, k.s.backend, k.s.host, k.s.port))
	err = shm.ErrOwned
	for i := 0; i < maxNamesakes && errors.Is(err, shm.ErrOwned); i++ {
		err = k.take(fmt.Sprintf("%s-%d", hex.EncodeToString(sum[:6]), i))
	}
	if err != nil {
		return err
	}
	if k.ln, err = checkpointd.Listen(filepath.Join(k.dir.Path(), ckptd.Socket)); err != nil {
		return err
	}
	if k.file, err = k.ln.File(); err != nil {
		return err
	}
	k.watch, err = pollable(k.file)
	return err
}

// take makes a directory ours. The daemon of a launcher that was killed may remove the
// directory at this very moment; then a new one is made.
func (k *keeper) take(key string) (err error) {
	for range maxNamesakes {
		if k.dir, err = shm.Create(k.s.ckpt.shmDir, key); err == nil {
			k.release, err = k.dir.Own()
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return err
}

// pollable returns another descriptor of f that the runtime's poller waits for.
func pollable(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, err
	}
	err = unix.SetNonblock(fd, true) // os.NewFile gives only such files to the poller
	return os.NewFile(uintptr(fd), f.Name()), err
}

// removeStale removes the memory of jobs that died some time ago, and at once what holds
// no checkpoint.
func removeStale(base string, own *shm.Dir, log *slog.Logger) {
	dead, err := shm.Dead(base)
	if err != nil {
		log.Debug("look for the memory of dead jobs", "err", err)
	}
	if err := python.Tidy(filepath.Dir(own.Path()), staleAfter); err != nil {
		log.Debug("remove the checkpoint clients of other versions", "err", err)
	}
	for _, d := range dead {
		age := d.Age()
		names, _ := d.Names()
		if d.Path() == own.Path() || len(names) > 0 && age < staleAfter {
			continue
		}
		if err := d.RemoveAll(); err != nil {
			log.Debug("remove the checkpoint memory of a job that is dead", "dir", d.Path(), "err", err)
			continue
		}
		if len(names) == 0 {
			continue
		}
		log.Info("removed the checkpoint memory of a job that is dead", "dir", d.Path(), "age", age.Round(time.Second).String())
	}
}

// serve runs daemons one after the other.
func (k *keeper) serve() {
	names, _ := k.dir.Names()
	needed := len(names) > 0 // what a dead launcher left may wait for the disk
	for pause := startPause; ; pause = min(2*pause, startPauses) {
		if !needed && !k.called() {
			return
		}
		k.mu.Lock()
		k.started = true
		k.mu.Unlock()
		begun := time.Now()
		if !k.daemon() {
			return
		}
		if time.Since(begun) > startPauses {
			pause = startPause
		}
		needed = true
		select {
		case <-time.After(pause):
		case <-k.quit:
			return
		}
	}
}

// called waits for a worker's first connection; false when the job is over.
func (k *keeper) called() bool {
	rc, err := k.watch.SyscallConn()
	if err != nil {
		return false
	}
	return rc.Read(func(fd uintptr) bool {
		n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n > 0
	}) == nil
}

// daemon runs one daemon until it dies; false when the job is over.
func (k *keeper) daemon() bool {
	k.mu.Lock()
	w := k.world
	k.mu.Unlock()
	p, err := k.procs.Start(proc.Spec{
		Path: "/proc/self/exe", Survives: true, Dir: "/", Stdin: k.file, Stderr: os.Stderr, Env: k.environ(),
		Args: ckptd.Args(k.dir.Path(), k.master, k.s.runID, k.s.ckpt.replicas, k.s.node.Addr, k.s.ckpt.writeRate, w),
	})
	if err != nil {
		if errors.Is(err, proc.ErrClosed) {
			return false
		}
		k.log.Warn("cannot start the checkpoint daemon, trying again", "err", err)
		return true
	}
	for ended := false; !ended; {
		k.connect(p)
		select {
		case <-p.Done():
			ended = true
		case <-k.lost:
		case <-k.quit:
			return false // Close of the supervisor ends it
		}
	}
	k.disconnect(nil)
	select {
	case <-k.lost: // the connection to this one, not to the next
	default:
	}
	k.log.Warn("the checkpoint daemon died, starting another; nothing in memory is lost", "pid", p.PID(), "code", p.Exit().Code)
	return true
}

// environ is what the daemon needs of ours; its memory limit keeps the heap small.
func (k *keeper) environ() []string {
	env := []string{"GOMEMLIMIT=64MiB", "PATH=" + os.Getenv("PATH"), "TZ=" + os.Getenv("TZ"), "LOGLEVEL=" + os.Getenv("LOGLEVEL"), console.FormatVariable + "=" + string(k.s.logs.format)}
	if k.s.token != "" {
		env = append(env, "DLROVER_TOKEN="+k.s.token)
	}
	return env
}

// connect makes the launcher known to the daemon p. It takes as long as p needs to serve:
// the daemon of a launcher that was killed may still be saving.
func (k *keeper) connect(p *proc.Process) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	late := time.AfterFunc(orderBudget, func() { k.log.Warn("the checkpoint daemon does not answer yet", "pid", p.PID()) })
	defer late.Stop()
	go func() {
		select {
		case <-p.Done(): // it never answers
		case <-k.quit:
		case <-ctx.Done():
		}
		cancel()
	}()
	if err := k.introduce(ctx); err != nil && ctx.Err() == nil {
		k.log.Warn("the checkpoint daemon cannot be reached", "err", err)
	}
}

// introduce makes the launcher known to whoever serves the socket, and tells it what it
// has to know.
func (k *keeper) introduce(ctx context.Context) error {
	c, err := checkpointd.Dial(ctx, filepath.Join(k.dir.Path(), ckptd.Socket))
	if err != nil {
		return err
	}
	if err := c.Lead(ctx, k.name); err != nil {
		return errors.Join(err, c.Close())
	}
	k.mu.Lock()
	w := k.world
	k.control, k.started = c, true
	k.mu.Unlock()
	err = c.World(ctx, w)
	if again := k.unfinished(); err == nil && again != nil {
		err = again(ctx, c)
	}
	return err
}

// attend keeps the connection to a sidecar's daemon.
func (k *keeper) attend() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	late := time.AfterFunc(orderBudget, func() {
		k.log.Warn("the sidecar of --ckpt-sidecar is not there: workers save by themselves until a checkpointd --job="+k.s.ckpt.sidecar+" serves the socket", "socket", filepath.Join(k.dir.Path(), ckptd.Socket))
	})
	defer late.Stop()
	go func() { <-k.quit; cancel() }()
	for {
		if k.introduce(ctx) == nil {
			late.Stop()
			select {
			case <-k.lost:
			case <-k.quit:
				return
			}
		}
		select {
		case <-time.After(startPause):
		case <-k.quit:
			return
		}
	}
}

// unfinished is the last breakpoint, if the daemon before may have died over it: the
// others wait for its part.
func (k *keeper) unfinished() func(context.Context, *checkpointd.Control) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if time.Now().After(k.againUntil) {
		return nil
	}
	return k.again
}

// disconnect forgets the connection c, or whatever is there if c is nil.
func (k *keeper) disconnect(c *checkpointd.Control) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.control == nil || c != nil && c != k.control {
		return
	}
	_ = k.control.Close()
	k.control = nil
	select {
	case k.lost <- struct{}{}:
	default:
	}
}

// deliver carries out orders one after the other, beside the launcher's loop.
func (k *keeper) deliver() {
	for {
		select {
		case o := <-k.orders:
			o()
		case <-k.quit:
			return
		}
	}
}

// send queues something to tell the daemon.
func (k *keeper) send(tell func(ctx context.Context, c *checkpointd.Control) error) {
	order := func() {
		ctx, cancel := context.WithTimeout(context.Background(), orderBudget)
		defer cancel()
		if err := k.carryOut(ctx, tell); err != nil {
			k.log.Warn("cannot tell the checkpoint daemon", "err", err)
		}
	}
	select {
	case k.orders <- order:
	case <-k.quit:
	}
}

// carryOut tells the daemon, or the next one if it dies meanwhile. Without a daemon no
// worker has anything to keep, and nothing is told.
func (k *keeper) carryOut(ctx context.Context, tell func(ctx context.Context, c *checkpointd.Control) error) error {
	for begun := time.Now(); ; {
		c, expected := k.daemonNow()
		if !expected {
			return nil
		}
		err := errors.New("it does not run")
		if c == nil && k.s.ckpt.sidecar != "" && time.Since(begun) > orderBudget {
			return err // nobody here starts it again
		}
		if c != nil {
			if err = tell(ctx, c); err == nil {
				return nil
			}
			k.disconnect(c)
		}
		select {
		case <-time.After(startPause):
		case <-ctx.Done():
			return err
		case <-k.quit:
			return err
		}
	}
}

// daemonNow is the connection to the daemon, if there is one now; expected says whether
// there should be.
func (k *keeper) daemonNow() (c *checkpointd.Control, expected bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.control, k.started
}

// Name implements launcher.Part.
func (k *keeper) Name() string { return "checkpoints" }

// Environ implements launcher.Environer.
func (k *keeper) Environ(e launcher.Epoch, _ int) []string {
	env := []string{fmt.Sprintf("DLROVER_CKPT_EPOCH=%d.%d.%d", e.Term, e.Round, e.Epoch)}
	if k.dir != nil {
		env = append(env, "DLROVER_CKPT_RUNTIME="+k.dir.Path())
	}
	return env
}

// pythonPath puts the client before what the user's PYTHONPATH says.
func (k *keeper) pythonPath(env []string) []string {
	if k.client == "" {
		return env
	}
	path := k.client
	for _, kv := range env {
		if v, ok := strings.CutPrefix(kv, "PYTHONPATH="); ok && v != "" {
			path = k.client + string(os.PathListSeparator) + v
		}
	}
	return append(env, "PYTHONPATH="+path)
}

// Starting implements launcher.Starter.
func (k *keeper) Starting(e launcher.Epoch) {
	w := checkpointd.World{Term: e.Term, Round: e.Round, Epoch: e.Epoch, GroupRank: e.Place.GroupRank, GroupWorldSize: e.Place.GroupWorldSize,
		RankBase: e.Place.RankBase, WorldSize: e.Place.WorldSize, LocalWorldSize: k.s.slots}
	k.mu.Lock()
	k.world = w
	k.mu.Unlock()
	k.send(func(ctx context.Context, c *checkpointd.Control) error { return c.World(ctx, w) })
}

// Stopped implements launcher.Stopper: what the workers left in memory is to be saved. A signal is not a failure that
// the next workers recover from, so --no-save-at-breakpoint does not count.
func (k *keeper) Stopped(why launcher.StopInfo) {
	k.signaled = k.signaled || why.Early
	if !k.s.ckpt.breakpoint && !k.signaled {
		return
	}
	k.mu.Lock()
	w := k.world // a daemon that has to be started again hears of the next one first
	tell := func(ctx context.Context, c *checkpointd.Control) error {
		return c.Breakpoint(ctx, w, why.Reason, why.Early)
	}
	k.again, k.againUntil = tell, time.Now().Add(againFor)
	k.mu.Unlock()
	k.send(tell)
}

// End implements launcher.Ender: it waits for what is on its way to the disk, and removes the run's memory if all of it
// got there. After it the daemon may be ended.
func (k *keeper) End(e launcher.Ending) {
	defer close(k.quit)
	ctx, cancel := context.WithTimeout(context.Background(), e.Budget+orderBudget)
	defer cancel()
	done := make(chan struct{})
	k.orders <- func() { // behind the last Breakpoint
		defer close(done)
		var left int
		err := k.carryOut(ctx, func(ctx context.Context, c *checkpointd.Control) (err error) {
			left, err = c.End(ctx, e.Budget)
			return err
		})
		if err == nil && left > 0 { // its answer, which asking again does not change
			err = fmt.Errorf("%d saves are not there", left)
		}
		if err != nil {
			k.log.Warn("not all checkpoints are on disk; they stay in memory for the next launcher with the same --rdzv-id and endpoint on this machine", "dir", k.dir.Path(), "err", err)
		}
	}
	select {
	case <-done:
	case <-e.Enough:
	}
}

// close follows end, after the supervisor has ended the daemon.
func (k *keeper) close() {
	if k == nil {
		return
	}
	if k.watch != nil {
		_ = k.watch.SetReadDeadline(time.Unix(1, 0)) // ends called
	}
	k.wg.Wait()
	k.disconnect(nil)
	k.drop()
}

// drop gives the directory back; without segments in it, it goes.
func (k *keeper) drop() {
	if k.ln != nil {
		_ = k.ln.Close()
		k.ln = nil
	}
	for _, f := range []*os.File{k.file, k.watch} {
		if f != nil {
			_ = f.Close()
		}
	}
	if k.tree != nil {
		_ = k.tree.Release()
	}
	if k.temporary != "" {
		_ = os.RemoveAll(k.temporary)
	}
	if k.dir == nil || k.s.ckpt.sidecar != "" {
		return
	}
	defer func() { k.dir = nil }()
	names, err := k.dir.Names()
	if err == nil && len(names) == 0 {
		err = k.dir.RemoveAll()
	}
	if k.release != nil {
		err = errors.Join(err, k.release())
	}
	if err != nil {
		k.log.Debug("remove the runtime directory", "err", err)
	}
}
