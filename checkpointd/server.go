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
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/checkpointd/coordinator"
)

// maxLine bounds one request or reply on the control socket, in bytes.
const maxLine = 1 << 20

// maxWait bounds every timeout_ms of a request.
const maxWait = 24 * time.Hour

// request is one line from a worker, a launcher or a person. Op decides which fields count.
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
	Restart   bool   `json:"restart"` // other workers start in the place of those that have ended
	Reason    string `json:"reason"`
	Source    string `json:"source"`
	TimeoutMS int64  `json:"timeout_ms"`
	World     World  `json:"world"`
	Launcher  string `json:"launcher"`
	Addr      string `json:"addr"`
	// Blocked is for how long the saves of the worker have kept it from training, all together.
	Blocked time.Duration `json:"blocked_ns"`
}

func (r *request) timeout() time.Duration {
	return min(max(time.Duration(r.TimeoutMS)*time.Millisecond, 0), maxWait)
}

// pace is that of a breakpoint.
func (r *request) pace() Pace {
	switch {
	case r.Early:
		return Early
	case r.Restart:
		return AfterRestart
	}
	return AtOnce
}

// reply carries {"ok":true} and the fields of a result, or {"ok":false,"error":…}.
type reply map[string]any

// maxAhead is how many requests of one connection are read before they are carried out: so its end is seen while one of
// them takes its time.
const maxAhead = 64

// session is one connection.
type session struct {
	lead bool // the launcher's; its end without a good-bye is the launcher's death
	bye  bool // its good-bye was answered,
	left int  // with so many saves that are not on disk
}

// serve answers one connection, if it belongs to our own user or to root.
func (d *Daemon) serve(c net.Conn) {
	if err := peerAllowed(c); err != nil {
		d.log.Warn("refused a connection to the control socket", "err", err)
		_ = c.Close()
		return
	}
	d.mu.Lock()
	d.conns[c] = struct{}{}
	d.mu.Unlock()
	d.life.wg.Go(func() {
		defer func() {
			d.mu.Lock()
			delete(d.conns, c)
			d.mu.Unlock()
			_ = c.Close()
			d.segs.rescan() // a worker that died may have completed a save without a word
		}()
		s := &session{}
		d.answer(c, s)
		if s.lead {
			d.launchers.disconnect(s)
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
	if err = raw.Control(func(fd uintptr) {
		cred, inner = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err == nil {
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

// answer carries out the requests one after the other. Those that wait for something are of no use any more when the
// connection ends.
func (d *Daemon) answer(c net.Conn, s *session) {
	out := json.NewEncoder(c)
	ctx, cancel := context.WithCancel(d.life.ctx)
	defer cancel()
	lines := make(chan []byte, maxAhead)
	d.life.wg.Go(func() {
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
			res, err = d.do(ctx, s, r)
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

func (d *Daemon) do(ctx context.Context, s *session, r request) (reply, error) {
	if r.Op == "lead" { // the end of a launcher is to be seen while storage does not answer
		s.lead = true
		d.mounts.lead(r.Launcher)
		d.launchers.connect(s)
		return nil, nil
	}
	select {
	case <-d.takenOver:
	case <-d.life.ctx.Done():
		return nil, errClosed
	}
	switch r.Op {
	case "hello":
		return d.hello(r)
	case "loaded":
		d.loaded(r)
		return nil, nil
	case "saved":
		d.epochs.blocked(r)
		d.segs.rescan()
		return d.pressure(), nil
	case "wait":
		step, err := d.wait(ctx, r)
		return reply{"committed": step}, err
	case "offers":
		return d.restorables(ctx, r)
	case "verify":
		return d.verify(ctx, r)
	case "flush":
		d.breakpointOf(r.World, r.Reason, r.pace())
		return nil, nil
	case "drain":
		return reply{"left": d.Drain(ctx, r.timeout())}, nil
	case "world":
		d.SetWorld(r.World)
		return nil, nil
	case "meet":
		if m, ok := d.coords.shared.(coordinator.Mover); ok {
			m.Move(r.Addr)
		}
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

// protocolVersion is the version that hello agrees on.
const protocolVersion = 1

func (d *Daemon) hello(r request) (reply, error) {
	if r.V != protocolVersion {
		return nil, fmt.Errorf("the client speaks version %d of the protocol, "+
			"this daemon version %d: use the client that came with the launcher", r.V, protocolVersion)
	}
	d.copies.want(r.Replicas)
	d.segs.rescan()
	return reply{"v": protocolVersion, "pid": os.Getpid()}, nil
}

// pressure is the reply that a worker gets after each save.
func (d *Daemon) pressure() reply {
	return reply{"behind": len(d.saves.inFlight("")), "note": d.retries.trouble()}
}

// end is the launcher's good-bye: drain, then remove the run's memory.
func (d *Daemon) end(ctx context.Context, r request) (left int, err error) {
	left = d.Drain(ctx, r.timeout())
	if ctx.Err() != nil {
		return left, ctx.Err() // it has died over it
	}
	d.recovery.reset()
	for dir := range d.saves.dirs() { // leftovers of workers and daemons that died
		d.recovery.recover(ctx, dir, d.saves.working)
	}
	if left == 0 {
		d.segs.remove()
	}
	return left, nil
}

// verify reads a committed step's files against their checksums.
func (d *Daemon) verify(ctx context.Context, r request) (reply, error) {
	m, ok := d.storage.committedAt(r.Dir, r.Step)
	if !ok {
		return reply{"good": false, "reason": fmt.Sprintf("step %d has no manifest in %s", r.Step, r.Dir)}, nil
	}
	if err := d.storage.store.Verify(ctx, r.Dir, m, r.Shards); err != nil {
		return reply{"good": false, "reason": err.Error()}, nil
	}
	return reply{"good": true, "reason": ""}, nil
}

// loaded logs, once for each epoch of this node, the step that its workers continue from.
func (d *Daemon) loaded(r request) {
	if d.epochs.firstLoad(r) {
		d.log.Info("checkpoint loaded", "step", r.Step, "from", r.Source, "dir", r.Dir)
	}
}

// Listen makes the control socket at path, for our own user alone. A socket that a dead daemon left is replaced; path
// must be in a directory that only we can write to.
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
