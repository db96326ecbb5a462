package ckptd

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"dlrover-run/checkpointd"
	"dlrover-run/internal/console"
	"dlrover-run/internal/secure"
)

// ErrClosed is returned by SupervisorConfig.Start once no more processes may be started.
var ErrClosed = errors.New("ckptd: no more processes are started")

// Process is a daemon that was started.
type Process interface {
	PID() int
	// Done is closed when the process has ended; then Code has its exit code, -n for signal n.
	Done() <-chan struct{}
	Code() int
}

// Command is how a daemon is started. The program is this one, the working directory /.
type Command struct {
	Args, Env []string // argv, [0] included, and the whole environment
	Stdin     *os.File // the socket; it stays the supervisor's
}

// SupervisorConfig describes the daemon of one launcher.
type SupervisorConfig struct {
	// ShmDir is where memory is shared, an absolute path.
	ShmDir string
	// Key names the run on this machine: a launcher finds the memory that an earlier launcher with the same key has left.
	// See shm.ValidKey.
	Key string
	// Sidecar is the key of a daemon in another container. No other is started then.
	Sidecar string
	// Run is the run's id.
	Run string
	// Replicas is how many nodes hold each shard; 0 leaves it to the checkpoints.
	Replicas int
	// WriteRate bounds the bytes that are written to storage in a second, as text; "" does not.
	WriteRate string
	// LogFormat is how the daemon writes its log.
	LogFormat console.Format
	// Start starts a process that survives this one. Required without a Sidecar.
	Start func(Command) (Process, error)
	// Logger is required.
	Logger *slog.Logger
}

// Network is how the daemons of several nodes reach each other. It is known later than the rest.
type Network struct {
	Master string // HOST:PORT of their rendezvous; "" for one node
	Token  string // of the job, or ""
	File   string // the absolute path of a file with it, or ""
	Addr   string // where the others reach this one
	TLS    secure.Choice
}

// Supervisor keeps a checkpoint daemon for the workers of this node: it listens on the daemon's socket, starts the
// daemon when the first worker connects, starts it again when it dies, and reports epochs and failures to it. Its
// methods may be called from any goroutine; End and Close once, in this order.
//
// Three goroutines share the work: supervision (daemon.go) has the daemon's process and the connection to it, delivery
// (orders.go) sends it one request after the other, and the caller does not wait. mu guards their shared fields and is
// not held during calls.
type Supervisor struct {
	cfg    SupervisorConfig
	log    *slog.Logger
	name   string // by which a daemon knows this launcher from the next one
	dir    *runDir
	serves bool
	quit   chan struct{} // closed by End
	wg     sync.WaitGroup
	orders chan func()
	lost   chan struct{} // the connection to the daemon is closed

	mu             sync.Mutex
	net            Network
	moved          bool // net.Master has changed
	world          checkpointd.World
	started        bool                 // a daemon runs, or will run again
	control        *checkpointd.Control // to the daemon that runs, if one does
	lastBreakpoint request              // the last breakpoint
	resendUntil    time.Time
}

// OrderBudget is how long the daemon may take to hear of something, a new one that takes its place included.
const OrderBudget = 10 * time.Second

// Times of the supervisor. A worker that calls meanwhile waits in the socket's queue.
const (
	resendFor   = time.Minute            // a breakpoint is sent again to a new daemon
	startPause  = 100 * time.Millisecond // before a daemon that died is started again; doubles
	startPauses = 5 * time.Second        // up to this
)

// NewSupervisor takes the runtime directory of the run, with its socket. Nothing is supervised before Serve.
func NewSupervisor(cfg SupervisorConfig) (*Supervisor, error) {
	dir, err := openRunDir(cfg)
	if err != nil {
		return nil, err
	}
	return &Supervisor{
		cfg: cfg, log: cfg.Logger, name: rand.Text(), dir: dir,
		quit: make(chan struct{}), orders: make(chan func(), 64), lost: make(chan struct{}, 1),
	}, nil
}

// Serve begins to supervise, in the background. It is called at most once, before all other methods but Dir.
func (s *Supervisor) Serve(n Network) {
	s.net, s.serves = n, true
	s.wg.Go(s.deliver)
	if s.cfg.Sidecar != "" {
		s.wg.Go(s.watchSidecar)
		return
	}
	s.wg.Go(s.supervise)
}

// RemoveStale removes, in the background, the memory of jobs of this user that died some time ago. That of a sidecar is
// left to its owner.
func (s *Supervisor) RemoveStale() {
	if s.cfg.Sidecar != "" {
		return
	}
	s.wg.Go(func() { removeStale(s.cfg.ShmDir, s.dir.Path(), s.log) })
}

// Dir is the runtime directory, for workers.
func (s *Supervisor) Dir() string { return s.dir.Path() }

// Status returns the daemon's status; nil without an error when none runs, or none has answered since an earlier error.
func (s *Supervisor) Status(ctx context.Context) (*checkpointd.Status, error) {
	c, _ := s.daemonNow()
	if c == nil {
		return nil, nil
	}
	st, err := c.Status(ctx)
	if err != nil {
		s.disconnect(c) // it is of no more use
		return nil, err
	}
	return &st, nil
}

// Move turns the daemon to a rendezvous elsewhere. A sidecar has its own.
func (s *Supervisor) Move(master string) {
	s.mu.Lock()
	s.net.Master, s.moved = master, true
	s.mu.Unlock()
	if s.cfg.Sidecar == "" {
		s.send(func(ctx context.Context, c *checkpointd.Control) error { return c.Meet(ctx, master) })
	}
}

// World sets the epoch whose workers are about to start. It does not wait for the daemon.
func (s *Supervisor) World(w checkpointd.World) {
	s.mu.Lock()
	s.world = w
	s.mu.Unlock()
	s.send(func(ctx context.Context, c *checkpointd.Control) error { return c.World(ctx, w) })
}

// Breakpoint reports that the workers of the present epoch have ended, or will: their saves in memory are to be
// written. It does not wait for the daemon.
func (s *Supervisor) Breakpoint(reason string, pace checkpointd.Pace) {
	s.mu.Lock()
	w := s.world // a daemon that has to be started again gets the next one first
	order := func(ctx context.Context, c *checkpointd.Control) error { return c.Breakpoint(ctx, w, reason, pace) }
	s.lastBreakpoint, s.resendUntil = order, time.Now().Add(resendFor)
	s.mu.Unlock()
	s.send(order)
}

// End waits, for at most budget or until enough, for the saves on their way to the disk. It removes the run's memory if
// all of them got there; else the error has the reason. After it the daemon may be ended. Without Serve it does not
// wait.
func (s *Supervisor) End(budget time.Duration, enough <-chan struct{}) error {
	defer close(s.quit)
	if !s.serves {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), budget+OrderBudget)
	defer cancel()
	done := make(chan error, 1)
	s.orders <- func() { done <- s.endDaemon(ctx, budget) } // behind the last Breakpoint
	select {
	case err := <-done:
		return err
	case <-enough:
	}
	select {
	case err := <-done:
		return err
	default:
		return errors.New("a signal has ended the wait for them")
	}
}

func (s *Supervisor) endDaemon(ctx context.Context, budget time.Duration) error {
	var left int
	err := s.call(ctx, func(ctx context.Context, c *checkpointd.Control) (err error) {
		left, err = c.End(ctx, budget)
		return err
	})
	if err == nil && left > 0 { // its answer, which asking again does not change
		err = fmt.Errorf("%d saves are not there", left)
	}
	if err != nil {
		s.log.Warn("not all checkpoints are on disk; they stay in memory for the next launcher with the same --rdzv-id and "+
			"endpoint on this machine", "dir", s.dir.Path(), "err", err)
	}
	return err
}

// Close releases the directory, and removes it if it has no segments. It follows End, after the daemon has been ended.
func (s *Supervisor) Close() {
	s.dir.interrupt()
	s.wg.Wait()
	s.disconnect(nil)
	if err := s.dir.close(); err != nil {
		s.log.Debug("remove the runtime directory", "err", err)
	}
}
