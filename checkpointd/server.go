package checkpointd

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"dlrover-run/checkpointd/retry"

	"golang.org/x/sys/unix"
)

// maxLine bounds one request or reply on the control socket, in bytes.
const maxLine = 1 << 20

// maxWait bounds every timeout_ms of a request.
const maxWait = 24 * time.Hour

// request is one line from a worker, a launcher or a person. Op decides which fields
// count.
type request struct {
	Op        string `json:"op"`
	V         int    `json:"v"`
	Rank      int    `json:"rank"`
	LocalRank int    `json:"local_rank"`
	PID       int    `json:"pid"`
	Seg       string `json:"seg"`
	Seq       uint64 `json:"seq"`
	Step      int64  `json:"step"`
	Save      string `json:"save"`
	Dir       string `json:"dir"`
	Shards    []int  `json:"shards"`
	Replicas  int    `json:"replicas"`
	Early     bool   `json:"early"`
	Reason    string `json:"reason"`
	Source    string `json:"source"`
	TimeoutMS int64  `json:"timeout_ms"`
	World     World  `json:"world"`
	Launcher  string `json:"launcher"`
}

func (r *request) timeout() time.Duration {
	return min(max(time.Duration(r.TimeoutMS)*time.Millisecond, 0), maxWait)
}

// reply carries {"ok":true} and the fields of a result, or {"ok":false,"error":…}.
type reply map[string]any

// maxAhead is how many requests of one connection are read before they are carried out: so
// its end is seen while one of them takes its time.
const maxAhead = 64

// session is one connection.
type session struct {
	d    *Daemon
	lead bool // the launcher's; its end without a good-bye is the launcher's death
	bye  bool // its good-bye was answered,
	left int  // with so many saves that are not on disk
}

// serve answers one connection, if it comes from our own user or from root.
func (d *Daemon) serve(c net.Conn) {
	if err := peerAllowed(c); err != nil {
		d.log.Warn("refused a connection to the control socket", "err", err)
		_ = c.Close()
		return
	}
	d.mu.Lock()
	d.conns[c] = struct{}{}
	d.mu.Unlock()
	d.wg.Go(func() {
		defer func() {
			d.mu.Lock()
			delete(d.conns, c)
			d.mu.Unlock()
			_ = c.Close()
			d.rescan() // a worker that died may have completed a save without a word
		}()
		s := &session{d: d}
		s.answer(c)
		if s.lead {
			d.orphaned(s)
		}
	})
}

func peerAllowed(c net.Conn) error {
	uc, ok := c.(*net.UnixConn)
	if !ok {
		return errors.New("not a unix socket")
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var inner error
	if err = raw.Control(func(fd uintptr) { cred, inner = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err == nil {
		err = inner
	}
	if err != nil {
		return fmt.Errorf("peer credentials: %w", err)
	}
	if cred.Uid != 0 && int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("the peer has uid %d, this daemon %d", cred.Uid, os.Geteuid())
	}
	return nil
}

// answer carries out the requests one after the other. Those that wait for something are
// of no use any more when the connection ends.
func (s *session) answer(c net.Conn) {
	out := json.NewEncoder(c)
	ctx, cancel := context.WithCancel(s.d.ctx)
	defer cancel()
	lines := make(chan []byte, maxAhead)
	s.d.wg.Go(func() {
		defer cancel()
		defer close(lines)
		read(ctx, c, lines)
	})
	for line := range lines {
		var r request
		var res reply
		err := json.Unmarshal(line, &r)
		if err != nil {
			err = fmt.Errorf("not a request: %w", err)
		} else {
			res, err = s.do(ctx, r)
		}
		if res == nil {
			res = reply{}
		}
		res["ok"] = err == nil
		if err != nil {
			res["error"] = err.Error()
		}
		if out.Encode(res) != nil {
			return
		}
	}
}

// read passes lines on until the connection or ctx ends.
func read(ctx context.Context, c net.Conn, lines chan<- []byte) {
	in := bufio.NewScanner(c)
	in.Buffer(make([]byte, 4096), maxLine)
	for in.Scan() {
		select {
		case lines <- bytes.Clone(in.Bytes()):
		case <-ctx.Done():
			return
		}
	}
}

func (s *session) do(ctx context.Context, r request) (reply, error) {
	d := s.d
	if r.Op == "lead" { // the end of a launcher is to be seen while storage does not answer
		s.lead = true
		d.led(s, r.Launcher)
		return nil, nil
	}
	select {
	case <-d.takenOver:
	case <-d.ctx.Done():
		return nil, errClosed
	}
	switch r.Op {
	case "hello":
		return s.hello(r)
	case "loaded":
		d.loaded(r)
		return nil, nil
	case "saved":
		d.rescan()
		return d.pressure(), nil
	case "wait":
		step, err := d.wait(ctx, r)
		return reply{"committed": step}, err
	case "offers":
		return d.restorables(ctx, r)
	case "verify":
		return d.verify(ctx, r)
	case "flush":
		d.breakpointOf(r.World, r.Reason, r.Early)
		return nil, nil
	case "drain":
		return reply{"left": d.Drain(ctx, r.timeout())}, nil
	case "world":
		d.SetWorld(r.World)
		return nil, nil
	case "status":
		return reply{"status": d.Status()}, nil
	case "end":
		left, err := d.end(ctx, r)
		s.bye, s.left = err == nil, left
		return reply{"left": left}, err
	}
	return nil, fmt.Errorf("operation %q is unknown to this version", r.Op)
}

// protocolVersion is what hello agrees on.
const protocolVersion = 1

func (s *session) hello(r request) (reply, error) {
	if r.V != protocolVersion {
		return nil, fmt.Errorf("the client speaks version %d of the protocol, this daemon version %d: use the client that came with the launcher", r.V, protocolVersion)
	}
	s.d.wantCopies(r.Replicas)
	s.d.rescan()
	return reply{"v": protocolVersion, "pid": os.Getpid()}, nil
}

// pressure is what a worker learns after each save.
func (d *Daemon) pressure() reply {
	d.mu.Lock()
	defer d.mu.Unlock()
	return reply{"behind": d.pendingLocked(), "note": d.storageTrouble}
}

func (d *Daemon) pendingLocked() int { return len(d.flyingLocked("")) }

// flyingLocked lists the saves of dir, "" for all, that are on their way to the disk.
func (d *Daemon) flyingLocked(dir string) (out []*save) {
	for _, j := range d.saves {
		if !j.phase.over() && (dir == "" || j.meta.Dir == dir) {
			out = append(out, j)
		}
	}
	return out
}

// Drain waits until no save is on its way to the disk and returns how many are not on
// disk then: still on their way after the timeout, or given up.
func (d *Daemon) Drain(ctx context.Context, timeout time.Duration) int {
	d.scan()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	_ = d.until(ctx, func() bool { return d.breaking == 0 && d.pendingLocked() == 0 }) // what is left is counted
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.breaking + d.pendingLocked() + d.lostLocked()
}

// lostLocked counts the shards whose newest save was given up: it is in memory only.
func (d *Daemon) lostLocked() int {
	type key struct {
		dir   string
		shard int
	}
	newest := map[key]*save{}
	for _, j := range d.saves {
		at := key{j.meta.Dir, j.meta.Shard}
		if o := newest[at]; o == nil || !j.saved.Before(o.saved) {
			newest[at] = j
		}
	}
	n := 0
	for _, j := range newest {
		half := errors.Is(j.err, errHalf) || errors.Is(j.err, errIncomplete) || errors.Is(j.err, errOutdated)
		if j.phase == failed && !half { // halves are of no use
			n++
		}
	}
	return n
}

// end is the launcher's good-bye: drain, then remove the run's memory.
func (d *Daemon) end(ctx context.Context, r request) (left int, err error) {
	left = d.Drain(ctx, r.timeout())
	if ctx.Err() != nil {
		return left, ctx.Err() // it has died over it
	}
	d.mu.Lock()
	dirs := map[string]bool{}
	for _, j := range d.saves {
		dirs[j.meta.Dir] = true
	}
	d.recovered = map[string]bool{}
	d.mu.Unlock()
	for dir := range dirs { // what is left of workers and daemons that died
		d.recoverDir(ctx, dir)
	}
	if left == 0 {
		d.removeSegments()
	}
	return left, nil
}

// led books the launcher's connection. Another launcher's job may have emptied its
// directory; the same one has only connected anew.
func (d *Daemon) led(s *session, launcher string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.leaders[s] = struct{}{}
	if launcher == "" || launcher != d.launcher {
		d.launcher = launcher
		clear(d.used)
		d.keepUsedLocked()
	}
	d.changedLocked()
}

// orphaned follows the end of a launcher's connection: a launcher that lives connects
// anew, within orphanGrace where nothing else tells of its death.
func (d *Daemon) orphaned(s *session) {
	d.mu.Lock()
	delete(d.leaders, s)
	d.mu.Unlock()
	switch {
	case !s.bye && d.cfg.Gone == nil:
		d.awaitLauncher(orphanGrace)
	case s.bye && d.cfg.Spawned && d.cfg.Orphaned != nil && d.ctx.Err() == nil:
		d.cfg.Orphaned(s.left) // it was about to end this daemon
	}
}

// bereaved waits for the death of the launcher, whoever still holds its connections.
func (d *Daemon) bereaved() {
	select {
	case <-d.cfg.Gone:
		d.awaitLauncher(0)
	case <-d.ctx.Done():
	}
}

// hereLocked reports whether a launcher is connected. What one that is dead has sent may be read late.
func (d *Daemon) hereLocked() bool {
	select {
	case <-d.cfg.Gone:
		return false
	default:
		return len(d.leaders) > 0
	}
}

// awaitLauncher waits for a connection of a launcher. Without one it saves what is in
// memory, and is done.
func (d *Daemon) awaitLauncher(patience time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.orphan || d.cfg.Orphaned == nil || d.ctx.Err() != nil {
		return
	}
	d.orphan = true
	d.wg.Go(func() {
		for {
			left, saved := d.alone(patience)
			d.mu.Lock()
			here := d.hereLocked()
			if saved || here || d.ctx.Err() != nil {
				d.orphan = false
				d.mu.Unlock()
				if saved && !here && d.ctx.Err() == nil {
					d.cfg.Orphaned(left)
				}
				return
			}
			d.mu.Unlock() // one came and is gone again
		}
	})
}

// alone is what a daemon without a launcher does; saved is false when one came before everything was saved.
func (d *Daemon) alone(patience time.Duration) (left int, saved bool) {
	ctx, cancel := context.WithTimeout(d.ctx, orphanSaves)
	defer cancel()
	var moved, came atomic.Bool
	if d.cfg.Spawned {
		d.wg.Go(func() { d.yield(ctx, func() { moved.Store(true); cancel() }) })
	}
	grace, stop := context.WithTimeout(ctx, patience)
	defer stop()
	if d.until(grace, d.hereLocked) == nil {
		return 0, false
	}
	d.wg.Go(func() { // saving stops when one comes
		if d.until(ctx, d.hereLocked) == nil {
			came.Store(true)
			cancel()
		}
	})
	if ctx.Err() == nil {
		d.log.Warn("the launcher is gone; saving what is in memory")
		left = d.saveAll(ctx)
	}
	if moved.Load() {
		left = max(left, 1)
	}
	return left, !came.Load()
}

// saveAll writes what is in memory, after what an earlier daemon has left, until ctx ends.
func (d *Daemon) saveAll(ctx context.Context) (left int) {
	select {
	case <-d.takenOver:
	case <-ctx.Done():
		return 1
	}
	d.Breakpoint("the launcher is gone", false)
	return d.Drain(ctx, orphanSaves)
}

// yield calls end when another launcher has taken the directory over: the daemon of that
// one waits for this one's end, and goes on with what is there. So it does when the
// directory is gone: nobody can find what this daemon holds.
func (d *Daemon) yield(ctx context.Context, end func()) {
	t := time.NewTicker(yieldEvery)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
		now, err := os.Lstat(d.cfg.Dir.Path())
		switch {
		case errors.Is(err, os.ErrNotExist), err == nil && d.home != nil && !os.SameFile(now, d.home):
			d.log.Warn("the runtime directory is gone, and with it what was not written", "dir", d.cfg.Dir.Path())
			end()
			return
		case locked(filepath.Join(d.cfg.Dir.Path(), "owner")):
			d.log.Info("another launcher has taken over")
			end()
			return
		}
	}
}

// locked reports whether another process has locked a file.
func locked(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}

func (d *Daemon) removeSegments() {
	names, err := d.cfg.Dir.Names()
	for _, name := range names {
		err = errors.Join(err, d.cfg.Dir.Remove(name))
	}
	if err != nil {
		d.log.Warn("cannot remove the segments", "err", err)
	}
}

// wait answers when the save is committed, or says why it will not be.
func (d *Daemon) wait(ctx context.Context, r request) (int64, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, r.timeout(), fmt.Errorf("step %d was not committed within %s", r.Step, r.timeout()))
	defer cancel()
	pause := retry.Backoff{First: 50 * time.Millisecond, Most: time.Second} // other nodes do not tell
	for {
		d.mu.Lock()
		news := d.changed
		j := d.newestLocked(r)
		var ph phase
		var err error
		if j != nil {
			ph, err = j.phase, j.err
		}
		d.mu.Unlock()
		switch {
		case ph == committed:
			return r.Step, nil
		case ph.over():
			return 0, fmt.Errorf("step %d is not on disk: %w", r.Step, err)
		case j == nil: // committed by another node, or by an earlier daemon
			if step, ok := d.onDisk(r); ok {
				return step, nil
			}
		}
		select {
		case <-news:
		case <-time.After(pause.Next()):
		case <-ctx.Done():
			return 0, d.lateness(ctx)
		}
	}
}

func (d *Daemon) lateness(ctx context.Context) error {
	err := context.Cause(ctx)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.storageTrouble != "" {
		err = fmt.Errorf("%w (%s)", err, d.storageTrouble)
	}
	return err
}

// newestLocked finds what is asked for among the saves that went through this daemon.
func (d *Daemon) newestLocked(r request) *save {
	for _, j := range slices.Backward(d.saves) {
		if j.meta.Dir == r.Dir && j.meta.Step == r.Step && (r.Save == "" || j.meta.Save == r.Save) {
			return j
		}
	}
	return nil
}

// onDisk looks for the step, or for the one that the tracker names if that is later.
func (d *Daemon) onDisk(r request) (int64, bool) {
	if m, ok := d.committedAt(r.Dir, r.Step); ok && (r.Save == "" || r.Save == m.ID) {
		return m.Step, true
	}
	m, ok := d.tracked(r.Dir)
	return m.Step, ok && r.Save == "" && m.Step >= r.Step
}

// verify reads a committed step's files against their checksums.
func (d *Daemon) verify(ctx context.Context, r request) (reply, error) {
	m, ok := d.committedAt(r.Dir, r.Step)
	if !ok {
		return reply{"good": false, "reason": fmt.Sprintf("step %d has no manifest in %s", r.Step, r.Dir)}, nil
	}
	if err := d.store.Verify(ctx, r.Dir, m, r.Shards); err != nil {
		return reply{"good": false, "reason": err.Error()}, nil
	}
	return reply{"good": true, "reason": ""}, nil
}

// loaded says once for each epoch of this node what its workers go on from.
func (d *Daemon) loaded(r request) {
	d.mu.Lock()
	key := fmt.Sprint(d.world.Key(), r.Dir, r.Step, r.Source)
	said := d.said[key]
	d.said[key] = true
	d.mu.Unlock()
	if !said {
		d.log.Info("checkpoint loaded", "step", r.Step, "from", r.Source, "dir", r.Dir)
	}
}

// Listen makes the control socket at path, for our own user alone. A socket that a dead
// daemon left is replaced; path must be in a directory that only we can write to.
func Listen(path string) (*net.UnixListener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("checkpointd: replace the old socket: %w", err)
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if errors.Is(err, syscall.EINVAL) {
		err = fmt.Errorf("%w: the path is longer than a socket's may be (107 bytes)", err)
	}
	if err != nil {
		return nil, fmt.Errorf("checkpointd: %w", err)
	}
	ln.SetUnlinkOnClose(false) // it may have been handed to the next daemon
	return ln, os.Chmod(path, 0o600)
}
