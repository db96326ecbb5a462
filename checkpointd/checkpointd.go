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
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/fsx"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/retry"
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
	// Writers is how many files are written at a time. Default 2.
	Writers int
	// Replicas is the number of nodes that hold each shard, this one included; 0 and 1 are no copies unless a
	// checkpoint asks for them. Copies need Remote.
	Replicas int
	// Addr is the address of this daemon for other daemons, host without port. Token is the job's token, which they prove
	// to know.
	Addr, Token string
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

// Daemon serves one run on one node.
type Daemon struct {
	cfg   Config
	log   *slog.Logger
	store commit.Store
	local coordinator.Coordinator

	ctx      context.Context
	cancel   context.CancelFunc
	wg       sync.WaitGroup
	writeSem chan struct{} // one for each file that may be written now
	scans    chan struct{} // asks for another look at the segments

	scanning sync.Mutex // held while the segments are read; before mu

	mu             sync.Mutex
	served         chan struct{} // closed when Serve has ended; nil before it
	world          World
	segs           map[string]*segment
	saves          []*save           // newest last; bounded by maxRemembered
	changed        chan struct{}     // closed and replaced whenever something above changes
	storageTrouble string            // the present error of the storage
	troubles       map[string]string // the same by directory, in short
	count          Counters
	peers          *peers // nil until copies are wanted
	conns          map[net.Conn]struct{}
	takenOver      chan struct{}                  // closed when the saves of an earlier daemon have been taken over
	dirInfo        os.FileInfo                    // the runtime directory as it was found
	leaders        map[*session]struct{}          // connections of launchers
	launcher       string                         // the last one that led
	orphan         bool                           // the daemon waits for a launcher
	breakpoints    int                            // breakpoint saves that have not been decided
	undecided      map[string]coordinator.Holding // the newest save, by directory, where the nodes could not agree on one
	durable        map[int]SegmentStatus          // newest committed save of each rank
	loggedLoads    map[string]bool                // loads that were logged since the world last changed
	recovered      map[string]bool                // directories recovered since the world last changed
	endedEpochs    map[string]bool                // epochs whose workers have ended
	used           map[string]mountIdentity       // directories that were committed to, by this launcher's job
	dirLocks       map[string]*sync.Mutex         // by directory
	foundEpochs    []string                       // epochs of an earlier daemon's saves, until the world is set
}

// Counters only ever grow.
type Counters struct {
	Flushes       int64         `json:"flushes"`
	FlushedBytes  int64         `json:"flushed_bytes"`
	WriteTime     time.Duration `json:"write_ns"`
	Commits       int64         `json:"commits"`
	Failures      int64         `json:"failures"`
	Superseded    int64         `json:"superseded"`
	Retries       int64         `json:"retries"`
	CopiesSent    int64         `json:"copies_sent"`
	CopiedBytes   int64         `json:"copied_bytes"`
	CopiesFailed  int64         `json:"copies_failed"`
	CopiesFetched int64         `json:"copies_fetched"`
	Breakpoints   int64         `json:"breakpoints"`
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
	d := &Daemon{
		cfg:         cfg,
		log:         cfg.Logger,
		local:       coordinator.Local(0),
		store:       commit.Store{FS: cfg.FS, Now: time.Now, Cache: new(commit.Cache)},
		writeSem:    make(chan struct{}, cfg.Writers),
		scans:       make(chan struct{}, 1),
		segs:        map[string]*segment{},
		changed:     make(chan struct{}),
		conns:       map[net.Conn]struct{}{},
		troubles:    map[string]string{},
		recovered:   map[string]bool{},
		undecided:   map[string]coordinator.Holding{},
		loggedLoads: map[string]bool{},
		endedEpochs: map[string]bool{},
		dirLocks:    map[string]*sync.Mutex{},
		leaders:     map[*session]struct{}{},
		takenOver:   make(chan struct{}),
		durable:     map[int]SegmentStatus{},
		world:       World{GroupWorldSize: 1}, // until a launcher sets it
	}
	d.dirInfo, _ = os.Lstat(cfg.Dir.Path())
	d.launcher, d.used = d.readUsed()
	d.store.OnDamaged = func(path string, why error) {
		d.log.Error("an interrupted commit is damaged and can never be completed; it is set aside", "path", path,
			"err", why)
	}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	return d, nil
}

// Serve answers on ln until ctx ends or Close is called. It first takes over the saves of an earlier daemon.
func (d *Daemon) Serve(ctx context.Context, ln net.Listener) error {
	served := make(chan struct{})
	defer close(served)
	d.mu.Lock()
	d.served = served
	d.mu.Unlock()
	stop := context.AfterFunc(ctx, d.cancel)
	defer stop()
	quiet := context.AfterFunc(d.ctx, func() { _ = ln.Close() })
	defer quiet()
	d.wg.Go(func() {
		d.takeOver()
		close(d.takenOver)
		d.scanLoop()
	})
	d.wg.Go(d.reportAges)
	if d.cfg.Gone != nil {
		d.wg.Go(d.watchLauncher)
	}
	for {
		c, err := ln.Accept()
		if err != nil {
			if d.ctx.Err() != nil {
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
	retry.Sleep(d.ctx, acceptPause)
	return true
}

// Close ends all work and waits for it. The next daemon finds the saves that were not committed.
func (d *Daemon) Close() {
	d.cancel()
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
	p := d.peers
	d.mu.Unlock()
	if p != nil {
		p.close()
	}
	d.wg.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.segs {
		_ = s.seg.Close()
	}
	d.segs = map[string]*segment{}
}

// changedLocked wakes all waiters of changed.
func (d *Daemon) changedLocked() {
	close(d.changed)
	d.changed = make(chan struct{})
}

// until waits for cond, which is called with the lock held, or for ctx.
func (d *Daemon) until(ctx context.Context, cond func() bool) error {
	for {
		d.mu.Lock()
		ok, news := cond(), d.changed
		d.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return ctx.Err()
		case <-d.ctx.Done():
			return errClosed
		}
	}
}

var errClosed = errors.New("the checkpoint daemon is ending")
