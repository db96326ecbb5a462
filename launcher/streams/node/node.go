// Package node is a launcher's side of streams: it sends its workers' output to followers, and executes commands next
// to the workers where that is allowed.
//
// Nothing runs without a request. A stream has two goroutines, a command some more; Close ends all of them.
package node

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"time"

	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/streams"
)

// Bounds of a launcher.
const (
	maxStreams  = 32               // at a time
	maxCommands = 8                // of these
	requestTime = 10 * time.Second // until the daemon has sent the request of a stream
	stalled     = 10 * time.Minute // until a stream without a reader is closed
)

// Config holds the dependencies of a Node.
type Config struct {
	Logs *logs.Logs
	// Connect opens the stream of an invitation.
	Connect func(ctx context.Context, id string) (io.ReadWriteCloser, error)
	// Exec: commands may be executed; the rest is for them.
	Exec bool
	// Worker finds the worker of a rank; an error holds why there is none.
	Worker func(rank int) (Worker, error)
	Start  func(proc.Spec) (*proc.Process, error)
	// Profile has the worker of a rank write a trace of some time to a file, and says what is in it; nil: it cannot.
	Profile func(ctx context.Context, rank int, last time.Duration, to string) (note string, err error)
	// Began and Ended hear of a command that is executed.
	Began func(Command)
	Ended func(Command, streams.Exit)
	Log   *slog.Logger
}

// Worker is the worker next to which a command runs.
type Worker struct {
	LocalRank, PID int
	Env            []string
}

// Command is one that is executed.
type Command struct {
	Rank, LocalRank int
	PID             int // of its shelter
	From            string
	Args            []string
}

// Node serves the streams of one launcher. Its methods may be called by any goroutine.
type Node struct {
	cfg Config

	mu       sync.Mutex
	open     map[string]io.Closer // by id; nil: being opened
	commands int
	closed   bool
	ending   chan struct{} // closed by End
	wg       sync.WaitGroup
}

// New returns a Node without streams.
func New(cfg Config) *Node {
	return &Node{cfg: cfg, open: map[string]io.Closer{}, ending: make(chan struct{})}
}

// Invite opens the stream with that id, in the background, unless it is open.
func (n *Node) Invite(id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, open := n.open[id]; open || n.closed || len(n.open) >= maxStreams {
		return
	}
	n.open[id] = nil
	n.wg.Go(func() {
		n.serve(id)
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.open, id)
	})
}

// End ends all streams when their data are on the way, or after the time.
func (n *Node) End(most time.Duration) {
	n.mu.Lock()
	already := n.closed
	n.closed = true
	n.mu.Unlock()
	if already {
		return
	}
	close(n.ending)
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.wg.Wait()
	}()
	late := time.NewTimer(most)
	defer late.Stop()
	select {
	case <-done:
		return
	case <-late.C:
	}
	n.mu.Lock()
	for _, c := range n.open {
		if c != nil {
			_ = c.Close()
		}
	}
	n.mu.Unlock()
	<-done
}

func (n *Node) serve(id string) {
	ctx, cancel := context.WithTimeout(context.Background(), requestTime)
	defer cancel()
	nc, err := n.cfg.Connect(ctx, id)
	if err != nil {
		n.cfg.Log.Debug("nobody wants a stream any more", "err", err)
		return
	}
	defer nc.Close()
	if !n.keep(id, nc) {
		return
	}
	stop := context.AfterFunc(ctx, func() { _ = nc.Close() })
	in := streams.NewReader(nc)
	f, err := in.Next()
	if err != nil || !stop() {
		return
	}
	var req streams.Request
	if err := f.Decode(&req); f.Kind != streams.KindRequest || err != nil {
		return // the daemon's version is not ours
	}
	c := &conn{nc: nc, in: in}
	if req.Ends() {
		n.command(c, req)
	} else {
		n.follow(c, req)
	}
}

// keep notes the connection for End.
func (n *Node) keep(id string, nc io.Closer) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.open[id] = nc
	return !n.closed
}

// conn is one stream. Reading and writing have goroutines of their own.
type conn struct {
	nc io.ReadWriteCloser
	in *streams.Reader

	mu  sync.Mutex // of writing
	buf []byte
}

// send writes a frame. A peer that takes nothing for long loses the connection.
func (c *conn) send(f streams.Frame) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.buf = f.Append(c.buf[:0])
	stuck := time.AfterFunc(stalled, func() { _ = c.nc.Close() })
	defer stuck.Stop()
	_, err := c.nc.Write(c.buf)
	return err
}
