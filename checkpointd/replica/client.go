package replica

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/plainhttp"
	"dlrover-run/internal/secure"
)

// Client pushes copies to Servers, and fetches them. Safe for concurrent use; the fields are set before the first use.
type Client struct {
	Token string // of the job; empty only for loopback addresses
	// Tokens has the tokens that are right, where they change; nil: Token alone is.
	Tokens *plainhttp.Tokens
	TLS    *secure.Layer
	// Conns is how many connections one transfer uses, at most 4; 0: two.
	Conns int
	// Dial opens a connection; nil: TCP.
	Dial func(ctx context.Context, addr string) (net.Conn, error)
}

// Push sends the save in p to the Server at addr, and returns when the copy is complete there. ErrRefused: the peer
// does not want it. After any error the peer has no part of it; errDamaged and lost connections are worth another try.
// p stays pinned until Push returns.
func (cl *Client) Push(ctx context.Context, addr string, p *shm.Pinned) error {
	if err := cl.push(ctx, addr, p); err != nil {
		return fmt.Errorf("push step %d of rank %d to %s: %w", p.Meta.Step, p.Meta.Rank, addr, err)
	}
	return nil
}

func (cl *Client) push(ctx context.Context, addr string, p *shm.Pinned) error {
	o, err := offerOf(p)
	if err != nil {
		return err
	}
	c, err := cl.dial(ctx, addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := o.write(c, message{Op: "push"}); err != nil {
		return cl.reason(ctx, c, err)
	}
	m, err := c.answer()
	if err != nil {
		return err
	}
	t := newTransfer(ctx)
	out := newOutgoing(t.ctx, p)
	defer out.close()
	t.part = func(c *conn) error {
		err := out.send(c)
		if err == nil {
			err = sendEnd(c)
		}
		if err == nil {
			_, err = c.answer()
		}
		return err
	}
	cl.gather(t, addr, m.ID, o.size)
	c.bind(t.ctx, &t.moved)
	err = out.send(c)
	if err == nil {
		err = t.wait()
	}
	if err == nil {
		err = sendEnd(c)
	}
	if err == nil {
		if _, err = c.answer(); err == nil {
			return t.end(nil)
		}
		return t.end(err)
	}
	return cl.reason(ctx, c, t.end(err))
}

// Reach reports whether the Server at addr can be reached, and knows the token.
func (cl *Client) Reach(ctx context.Context, addr string) error {
	c, err := cl.dial(ctx, addr)
	if err != nil {
		return fmt.Errorf("reach %s: %w", addr, err)
	}
	return c.Close()
}

// Fetch gets the copy of a rank's save from the Server at addr, into the file that `into` makes for it, and publishes
// it there. ErrMissing: the peer does not hold it. After any error the file is aborted.
func (cl *Client) Fetch(ctx context.Context, addr string, rank int, save string,
	into func(shm.Meta, int64) (*shm.Incoming, error)) (*shm.Segment, error) {
	seg, err := cl.fetch(ctx, addr, rank, save, into)
	if err != nil {
		return nil, fmt.Errorf("fetch save %s of rank %d from %s: %w", save, rank, addr, err)
	}
	return seg, nil
}

func (cl *Client) fetch(ctx context.Context, addr string, rank int, save string,
	into func(shm.Meta, int64) (*shm.Incoming, error)) (*shm.Segment, error) {
	c, err := cl.dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if err := c.send(message{Op: "fetch", Rank: rank, Save: save}); err != nil {
		return nil, err
	}
	m, err := c.answer()
	if err != nil {
		return nil, err
	}
	o, err := readOffer(c, m)
	if err != nil {
		return nil, err
	}
	if o.meta.Rank != rank || o.meta.Save != save {
		return nil, fmt.Errorf("%w: peer offers save %s of rank %d", errDamaged, o.meta.Save, o.meta.Rank)
	}
	var file *shm.Incoming
	if err := c.during(func() (err error) { file, err = into(o.meta, o.size); return err }); err != nil {
		return nil, err
	}
	seg, err := cl.fill(ctx, c, addr, m.ID, file, o)
	if err != nil {
		file.Abort()
	}
	return seg, err
}

// fill receives the chunks of a fetch. After it returns nothing uses the file any more.
func (cl *Client) fill(ctx context.Context, c *conn, addr, id string, file *shm.Incoming,
	o offer) (*shm.Segment, error) {
	in, err := newIncoming(file, o)
	if err != nil {
		return nil, err
	}
	t := newTransfer(ctx)
	t.part = in.receive
	c.bind(t.ctx, &t.moved)
	if err := c.send(message{Op: "go"}); err != nil {
		return nil, t.end(err)
	}
	cl.gather(t, addr, id, o.size)
	if err = in.receive(c); err == nil {
		err = t.wait()
	}
	if err = t.end(err); err != nil {
		return nil, err
	}
	return in.publish()
}

// gather opens further connections for a transfer, as far as it has chunks for them. One that cannot be had is no
// error: the others do its work.
func (cl *Client) gather(t *transfer, addr, id string, size int64) {
	conns := cl.Conns
	if conns <= 0 {
		conns = defaultConns
	}
	for range min(int64(conns), maxConns, chunks(size)) - 1 {
		t.join()
		go func() {
			c, err := cl.join(t, addr, id)
			if err != nil {
				t.wg.Done()
				return
			}
			defer c.Close()
			t.help(c) // its error is the transfer's
		}()
	}
}

// join makes a connection part of a transfer. It is closed if the others finish all the work before it can ask for
// some. Later it may have a chunk, and must end without an error.
func (cl *Client) join(t *transfer, addr, id string) (*conn, error) {
	c, err := cl.dial(t.early, addr)
	if err != nil {
		return nil, err
	}
	if t.done() {
		c.Close()
		return nil, errOver
	}
	c.bind(t.ctx, &t.moved)
	if err = c.send(message{Op: "join", ID: id}); err == nil {
		_, err = c.answer()
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// dial returns a connection whose two ends have proved that they know the token. It tries another one that may be right
// if the first is refused.
func (cl *Client) dial(ctx context.Context, addr string) (*conn, error) {
	if cl.Tokens == nil {
		return cl.dialWith(ctx, addr, cl.Token)
	}
	token := cl.Tokens.Sent()
	c, err := cl.dialWith(ctx, addr, token)
	if errors.Is(err, errToken) && cl.Tokens.Refused(token) {
		c, err = cl.dialWith(ctx, addr, cl.Tokens.Sent())
	}
	return c, err
}

func (cl *Client) dialWith(ctx context.Context, addr, token string) (*conn, error) {
	dial := cl.Dial
	if dial == nil {
		dial = func(ctx context.Context, addr string) (net.Conn, error) {
			return (&net.Dialer{Timeout: handshakeTime}).DialContext(ctx, "tcp", addr)
		}
	}
	nc, err := cl.TLS.Dial(func(ctx context.Context, _, addr string) (net.Conn, error) {
		return dial(ctx, addr)
	})(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	if cl.Token == "" && !loopback(nc.RemoteAddr()) {
		err = errors.New("a token is needed beyond this machine: give the job one")
	} else {
		err = handshake(ctx, nc, func(rw io.ReadWriter) error { return greet(rw, token) })
	}
	if err != nil {
		nc.Close()
		return nil, err
	}
	return newConn(ctx, nc), nil
}

// reason is the cause of a broken transfer: the caller's context, else the peer's error, else our own.
func (cl *Client) reason(ctx context.Context, c *conn, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return c.reason(err)
}
