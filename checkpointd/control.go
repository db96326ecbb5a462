package checkpointd

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// Control is a connection to a daemon. Its calls may be made from several goroutines; they are answered one after the
// other.
type Control struct {
	mu   sync.Mutex
	conn net.Conn
	in   *bufio.Reader
}

// Dial connects to the daemon behind the socket at path.
func Dial(ctx context.Context, path string) (*Control, error) {
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("reach the checkpoint daemon: %w", err)
	}
	return &Control{conn: c, in: bufio.NewReaderSize(c, 4096)}, nil
}

// Close ends the connection.
func (c *Control) Close() error { return c.conn.Close() }

// call sends a request and reads its reply into out, which may be nil. After an error of the connection it is of no
// more use.
func (c *Control) call(ctx context.Context, req map[string]any, out any) error {
	line, err := json.Marshal(req)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { _ = c.conn.SetDeadline(time.Unix(1, 0)); close(ended) })
	defer stop()
	if _, err := c.conn.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("%v: %w", req["op"], err)
	}
	if line, err = c.in.ReadBytes('\n'); err != nil {
		return fmt.Errorf("%v: %w", req["op"], err)
	}
	if !stop() { // ctx ended beside the reply, and has no say in the next call
		<-ended
		_ = c.conn.SetDeadline(time.Time{})
	}
	var head struct {
		OK    bool   `json:"ok"`
		Error string `json:"error"`
	}
	if err := json.Unmarshal(line, &head); err != nil {
		return fmt.Errorf("%v: %w", req["op"], err)
	}
	if !head.OK {
		return errors.New(head.Error)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(line, out)
}

// Lead makes this the connection of a launcher, which has a unique name: when it breaks without End, the daemon saves
// memory to disk and ends.
func (c *Control) Lead(ctx context.Context, launcher string) error {
	return c.call(ctx, map[string]any{"op": "lead", "launcher": launcher}, nil)
}

// World sets the epoch whose workers start next.
func (c *Control) World(ctx context.Context, w World) error {
	return c.call(ctx, map[string]any{"op": "world", "world": w}, nil)
}

// Meet names the HOST:PORT where the daemons of all nodes meet from now on.
func (c *Control) Meet(ctx context.Context, addr string) error {
	return c.call(ctx, map[string]any{"op": "meet", "addr": addr}, nil)
}

// Breakpoint asks the daemon to save, in the background, the memory of w's workers. The zero World is the present
// one.
func (c *Control) Breakpoint(ctx context.Context, w World, reason string, pace Pace) error {
	return c.call(ctx, map[string]any{"op": "flush", "world": w, "reason": reason, "early": pace == Early,
		"restart": pace == AfterRestart}, nil)
}

// End waits until nothing is on its way to the disk, at most for timeout, and then removes the run's memory. It returns
// how many saves are still under way; if there are any, nothing is removed.
func (c *Control) End(ctx context.Context, timeout time.Duration) (left int, err error) {
	var res struct{ Left int }
	err = c.call(ctx, map[string]any{"op": "end", "timeout_ms": timeout.Milliseconds()}, &res)
	return res.Left, err
}

// Status returns the daemon's Status.
func (c *Control) Status(ctx context.Context) (Status, error) {
	var res struct{ Status Status }
	err := c.call(ctx, map[string]any{"op": "status"}, &res)
	return res.Status, err
}
