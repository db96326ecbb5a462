// Package checkpointd is the daemon of one node that makes checkpoints in shared memory durable. It writes them to
// storage, commits them together with the daemons of the other nodes, keeps copies of other nodes' shards, and offers
// saves in memory to workers that load.
//
// It never parses checkpoints: workers lay out the final bytes of each file in a segment (package shm), the daemon
// copies them (fsx), under names that become visible only with the whole step (commit, coordinator).
//
// A Daemon has no state that it could not find again. Segments record their save and whether the disk still needs it;
// the stage on storage records the progress of a commit. So it may be killed at any moment and started again.
package checkpointd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/fsx"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/retry"
	"dlrover-run/internal/secure"
)

// Config of a Daemon. Dir is required, the rest has defaults.
type Config struct {
	// Dir is the runtime directory of the run on this node.
	Dir *shm.Dir
	// FS is the storage. Default: fsx.OS.
	FS fsx.FS
	// Remote connects to the daemons of the other nodes through a master. Default: marks on the storage that the nodes
	// share.
	Remote coordinator.Coordinator
	// Writers is how many shards are written to one local file system at a time. Default 2. It is one on NFS, SMB, 9P and
	// FUSE.
	Writers int
	// Replicas is the number of nodes that hold each shard, this one included; 0 and 1 are no copies unless a
	// checkpoint asks for them. Copies need Remote.
	Replicas int
	// Addr is the address of this daemon for other daemons, host without port. Token is the job's token, which they prove
	// to know.
	Addr, Token string
	// Accepted are the tokens that are right, where they change: the first one is sent. Nil: Token.
	Accepted func() []string
	// TLS is what the daemons of the nodes speak to each other; nil: none.
	TLS *secure.Layer
	// Switch is the switch that this node hangs on, if known.
	Switch string
	// Spawned is set if a launcher has started this daemon, which ends with it.
	Spawned bool
	// Gone is closed when the launcher that has started this daemon has died. Then open connections of the launcher no
	// longer count, and until then closed ones do not. nil: only the connections show whether it lives.
	Gone <-chan struct{}
	// Orphaned is called when the launcher has died, or never came, and its memory has been saved as far as possible;
	// left is the number of saves that were not. nil: launchers may come and go, and nothing is done about it.
	Orphaned func(left int)
	// Logger receives at most one line for each change of state. Default: none.
	Logger *slog.Logger
}

// Times and limits of the daemon.
const (
	agreePatience = 5 * time.Second  // for the holdings of nodes that may be dead
	peersPatience = 30 * time.Second // for the addresses of nodes that may be starting
	agesEvery     = 10 * time.Second
	retryFirst    = time.Second // of a write that failed; doubles up to retryMost
	retryMost     = 30 * time.Second
	refuseBudget  = 5 * time.Second        // to report a failed save
	busyFirst     = time.Millisecond       // look again at a segment that its writer is about to unlock; doubles
	busyMost      = 100 * time.Millisecond // up to this
	stuckGrace    = time.Second            // for storage to answer after a save's time is over
	orphanGrace   = 500 * time.Millisecond
	orphanSaves   = 590 * time.Second     // without a launcher; the process ends after MaxOrphan
	yieldEvery    = 50 * time.Millisecond // look for a new launcher
	dropGrace     = 10 * time.Second      // of a save that only its leader can still end
	lookFirst     = time.Second           // look at storage, while other shards are waited for
	lookMost      = 8 * time.Second
	defaultSave   = 600 * time.Second // a save that names no timeout
	progressEvery = 5 * time.Second   // between two lines about a long write
	maxRemembered = 256               // finished saves that wait can still answer for
)

// MaxOrphan is how long a daemon may outlive the launcher that has started it.
const MaxOrphan = 600 * time.Second

// World is the epoch that the launcher last started workers of.
type World struct {
	Term           uint64 `json:"term"`
	Round          int    `json:"round"`
	Epoch          int    `json:"epoch"`
	GroupRank      int    `json:"group_rank"`
	GroupWorldSize int    `json:"group_world_size"`
	RankBase       int    `json:"rank_base"`
	WorldSize      int    `json:"world_size"`
	LocalWorldSize int    `json:"local_world_size"`
}

// Key names the epoch in messages between daemons.
func (w World) Key() string { return fmt.Sprintf("%d.%d.%d", w.Term, w.Round, w.Epoch) }

// round names the round to the coordinator of several nodes; "": there is none.
func (w World) round() string {
	if w.GroupWorldSize < 2 {
		return ""
	}
	return fmt.Sprintf("%d.%d", w.Term, w.Round)
}

// String returns the format of ParseWorld.
func (w World) String() string {
	return fmt.Sprintf("%d,%d,%d,%d,%d,%d,%d,%d", w.Term, w.Round, w.Epoch, w.GroupRank, w.GroupWorldSize, w.RankBase,
		w.WorldSize, w.LocalWorldSize)
}

// ParseWorld reads eight numbers with commas between them.
func ParseWorld(text string) (w World, err error) {
	n, err := fmt.Sscanf(text, "%d,%d,%d,%d,%d,%d,%d,%d", &w.Term, &w.Round, &w.Epoch, &w.GroupRank,
		&w.GroupWorldSize, &w.RankBase, &w.WorldSize, &w.LocalWorldSize)
	if err != nil {
		return w, fmt.Errorf("%q: %d of 8 numbers: %w", text, n, err)
	}
	return w, nil
}

// Daemon serves one run on one node. Its parts have their own locks; none of them knows the Daemon.
type Daemon struct {
	cfg         Config
	log         *slog.Logger
	life        *lifetime
	count       *counters
	segs        *segments
	storage     *storage
	mounts      *mounts
	saves       *saves
	retries     *retries
	flusher     *flusher
	breakpoints *breakpoints
	restart     *restart
	recovery    *recovery
	copies      *copies
	epochs      *epochs
	launchers   *launchers
	coords      coordinators
	takenOver   chan struct{} // closed when the saves of an earlier daemon have been taken over
	worlds      chan struct{} // gets one when there is another epoch

	mu     sync.Mutex
	served chan struct{} // closed when Serve has ended; nil before it
	conns  map[net.Conn]struct{}
}

// New returns a Daemon that has found the segments of its directory; Serve makes it work.
func New(cfg Config) (*Daemon, error) {
	if cfg.Dir == nil {
		return nil, errors.New("checkpointd: no runtime directory")
	}
	if cfg.Writers == 0 {
		cfg.Writers = 2
	}
	if cfg.Writers < 0 || cfg.Replicas < 0 {
		return nil, fmt.Errorf("checkpointd: %d writers, %d replicas: neither may be negative", cfg.Writers,
			cfg.Replicas)
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.FS == nil {
		cfg.FS = fsx.OS{}
	}
	return assemble(cfg), nil
}

// assemble makes the parts of a Daemon.
func assemble(cfg Config) *Daemon {
	log, path, life, count := cfg.Logger, cfg.Dir.Path(), newLifetime(), &counters{}
	d := &Daemon{cfg: cfg, log: log, life: life, count: count, segs: newSegments(cfg.Dir, log), saves: newSaves(life),
		restart: &restart{life: life}, epochs: newEpochs(), takenOver: make(chan struct{}), worlds: make(chan struct{}, 1),
		conns: map[net.Conn]struct{}{}, coords: coordinators{coordinator.Local(0), cfg.Remote}}
	if cfg.Remote == nil {
		d.coords.shared = coordinator.Files(cfg.FS)
	}
	d.storage = &storage{life.ctx, cfg.FS, commit.Store{FS: cfg.FS, Now: time.Now, Cache: new(commit.Cache),
		OnDamaged: func(path string, why error) {
			log.Error("an interrupted commit is damaged and can never be completed; it is set aside", "path", path,
				"err", why)
		}}}
	d.mounts = newMounts(log, d.storage, filepath.Join(path, usedFile))
	d.retries = &retries{life: life, log: log, count: count, saves: d.saves, storage: d.storage,
		causes: map[string]string{}}
	locks := &dirLocks{life: life, log: log, path: path, held: map[string]*sync.Mutex{}}
	d.flusher = &flusher{life: life, log: log, count: count, saves: d.saves, storage: d.storage, mounts: d.mounts,
		records: preparedRecords{log, filepath.Join(path, preparedName)}, retries: d.retries, coords: d.coords,
		writer:    &writer{newLanes(cfg.Writers), count, d.saves, d.storage, d.mounts, d.restart},
		committer: &committer{log, d.storage, d.retries, locks, d.coords, d.epochs}}
	d.breakpoints = &breakpoints{life: life, log: log, count: count, segs: d.segs, saves: d.saves, storage: d.storage,
		flusher: d.flusher, restart: d.restart, coords: d.coords, master: cfg.Remote != nil}
	d.recovery = &recovery{log: log, storage: d.storage, locks: locks, path: path, done: map[string]bool{}}
	d.copies = &copies{cfg: &d.cfg, life: life, log: log, count: count, segs: d.segs, world: d.epochs.current()}
	d.launchers = &launchers{cfg: &d.cfg, life: life, log: log, saveAll: d.saveAll, leads: map[*session]struct{}{}}
	d.launchers.dirInfo, _ = os.Lstat(path)
	return d
}

// Serve answers on ln until ctx ends or Close is called. It first takes over the saves of an earlier daemon.
func (d *Daemon) Serve(ctx context.Context, ln net.Listener) error {
	served := make(chan struct{})
	defer close(served)
	d.mu.Lock()
	d.served = served
	d.mu.Unlock()
	stop := context.AfterFunc(ctx, d.life.cancel)
	defer stop()
	quiet := context.AfterFunc(d.life.ctx, func() { _ = ln.Close() })
	defer quiet()
	d.life.wg.Go(func() {
		d.takeOver()
		close(d.takenOver)
		d.scanLoop()
	})
	d.life.wg.Go(d.reportAges)
	if d.cfg.Gone != nil {
		d.life.wg.Go(d.launchers.watch)
	}
	for {
		c, err := ln.Accept()
		if err != nil {
			if d.life.ctx.Err() != nil {
				return nil
			}
			if d.pauseAccept(err) {
				continue
			}
			return fmt.Errorf("checkpointd: accept: %w", err)
		}
		d.serve(c)
	}
}

// acceptPause is the pause after an Accept that found no file descriptor.
const acceptPause = 500 * time.Millisecond

// pauseAccept waits after an error of Accept that passes, as a lack of descriptors does.
func (d *Daemon) pauseAccept(err error) bool {
	if !errors.Is(err, syscall.EMFILE) && !errors.Is(err, syscall.ENFILE) {
		return false
	}
	d.log.Warn("cannot accept a connection of a worker now", "err", err, "retry_in", acceptPause.String())
	retry.Sleep(d.life.ctx, acceptPause)
	return true
}

// Close ends all work and waits for it. The next daemon finds the saves that were not committed.
func (d *Daemon) Close() {
	d.life.cancel()
	d.mu.Lock()
	served := d.served
	d.mu.Unlock()
	if served != nil {
		<-served // from here on nothing is started
	}
	d.mu.Lock()
	for c := range d.conns {
		_ = c.Close()
	}
	d.mu.Unlock()
	d.copies.close()
	d.life.wg.Wait()
	d.segs.close()
}

// SetWorld sets the epoch whose workers the launcher is about to start.
func (d *Daemon) SetWorld(w World) {
	d.epochs.set(w)
	d.recovery.reset()
	d.life.notify()
	select {
	case d.worlds <- struct{}{}:
	default:
	}
	d.copies.setWorld(w)
	d.segs.rescan() // for saves of the earlier workers
}

// Breakpoint saves in the background: it writes the newest step whose shards are all in memory, unless the disk has
// that step or a newer one. Launchers of all nodes call it when the workers of an epoch end.
func (d *Daemon) Breakpoint(reason string, pace Pace) {
	d.breakpointOf(World{}, reason, pace)
}

// breakpointOf is Breakpoint for the epoch w, or for the present one if w is zero.
func (d *Daemon) breakpointOf(w World, reason string, pace Pace) {
	d.scan()
	now, later := d.epochs.current(), ""
	if w == (World{}) {
		w = now
	}
	if w.Key() != now.Key() {
		later = now.Key()
	}
	d.breakpoints.start(w, later, reason, pace)
}

// saveAll writes memory to disk, after the saves of an earlier daemon, until ctx ends.
func (d *Daemon) saveAll(ctx context.Context) (left int) {
	select {
	case <-d.takenOver:
	case <-ctx.Done():
		return 1
	}
	d.Breakpoint("the launcher is gone", AtOnce)
	return d.Drain(ctx, orphanSaves)
}

// takeOver takes over from an earlier daemon: saves that the disk still waits for, and unfinished commits.
func (d *Daemon) takeOver() {
	resumed, dirs, epochs := d.flusher.records.load(d.segs), map[string]bool{}, map[string]bool{}
	d.segs.each(func(_ string, _ *segment, _ shm.Header, m shm.Meta) { dirs[m.Dir], epochs[m.Epoch] = true, true })
	for _, j := range resumed {
		dirs[j.meta.Dir], epochs[j.meta.Epoch] = true, true
	}
	d.epochs.setFound(slices.Collect(maps.Keys(epochs)))
	live := func(id string) bool {
		return slices.ContainsFunc(resumed, func(j *save) bool { return j.meta.Save == id && !d.storage.begun(j) })
	}
	for _, dir := range slices.Sorted(maps.Keys(dirs)) {
		d.recovery.recover(d.life.ctx, dir, live)
	}
	for _, j := range resumed {
		d.flusher.launch(j)
	}
	// The other shards of an interrupted breakpoint save:
	d.segs.each(func(_ string, s *segment, h shm.Header, m shm.Meta) {
		if m.Primary && slices.ContainsFunc(resumed, func(j *save) bool { return j.meta.Save == m.Save }) {
			d.flusher.launch(newSave(s, h.Seq, h.Saved, m))
		}
	})
	d.scan()
}

func (d *Daemon) scanLoop() {
	for {
		select {
		case <-d.segs.scans:
			d.scan()
			d.dropPartial()
		case <-d.life.ctx.Done():
			return
		}
	}
}

// scan starts the new saves in memory on their way to the disk, if the disk wants them, and to other nodes.
func (d *Daemon) scan() {
	d.segs.scan(func(s *segment, h shm.Header, m shm.Meta) {
		if h.Disk && h.Durable < h.Seq {
			d.flusher.launch(newSave(s, h.Seq, h.Saved, m))
		}
		d.copies.replicate(h.Saved, m)
	})
}

// dropPartial drops the saves whose other shards cannot come any more.
func (d *Daemon) dropPartial() {
	if !slices.ContainsFunc(d.saves.inFlight(""), func(j *save) bool { return j.meta.Shards > 1 }) {
		return
	}
	latest := d.segs.latestOrders() // before the shards: a save that was passed was here before
	d.saves.dropPartial(latest, d.segs.shards(), func(m shm.Meta) bool {
		return d.epochs.hasEnded(m.Epoch) && d.coords.forSave(m) == d.coords.local
	})
}
