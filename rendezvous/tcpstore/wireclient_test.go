package tcpstore

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// Client speaks generation B to a store. Keys are those of the wire: PyTorch's own client puts "/" in front of a user's
// key. Its methods may be called at the same time and take turns. One that ctx ends returns its cause; except for Get,
// Wait, QueuePop and Barrier, which the server lets a client cancel, the Client is of no more use then.
type Client struct {
	mu  sync.Mutex
	nc  net.Conn
	r   *bufio.Reader
	err error // the first that left the stream at an unknown place
}

// Dial connects to the store at addr.
func Dial(ctx context.Context, addr string) (*Client, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("tcpstore: connect to %s: %w", addr, err)
	}
	return newClient(nc)
}

func newClient(nc net.Conn) (*Client, error) {
	if _, err := io.WriteString(nc, greeting); err != nil {
		nc.Close()
		return nil, fmt.Errorf("tcpstore: greet %s: %w", nc.RemoteAddr(), err)
	}
	return &Client{nc: nc, r: bufio.NewReader(nc)}, nil
}

// Close ends the connection.
func (c *Client) Close() error { return c.nc.Close() }

// Set stores a value.
func (c *Client) Set(ctx context.Context, key string, value []byte) error {
	return c.do(ctx, request{op: opSet, keys: []string{key}, values: [][]byte{value}}, nil)
}

// Get waits for key and returns its value.
func (c *Client) Get(ctx context.Context, key string) (value []byte, err error) {
	if err := c.Wait(ctx, key); err != nil {
		return nil, err
	}
	err = c.do(ctx, request{op: opGet, keys: []string{key}}, func() error { return c.read(&value) })
	return value, err
}

// Add adds delta to the decimal number at key, 0 when absent, and returns the sum.
func (c *Client) Add(ctx context.Context, key string, delta int64) (int64, error) {
	return c.int(ctx, request{op: opAdd, keys: []string{key}, num: delta})
}

// Check reports whether all keys are there.
func (c *Client) Check(ctx context.Context, keys ...string) (bool, error) {
	var answer byte
	err := c.do(ctx, request{op: opCheck, keys: keys}, func() (err error) {
		answer, err = c.r.ReadByte()
		return err
	})
	return err == nil && answer == ready, err
}

// Wait returns when every key has been set.
func (c *Client) Wait(ctx context.Context, keys ...string) error {
	return c.do(ctx, request{op: opWait, keys: keys}, c.stopped)
}

// Barrier returns when it was called world times with this key.
func (c *Client) Barrier(ctx context.Context, key string, world int64) error {
	return c.do(ctx, request{op: opBarrier, keys: []string{key}, num: world}, c.stopped)
}

// Append adds value at the end of what key holds.
func (c *Client) Append(ctx context.Context, key string, value []byte) error {
	return c.do(ctx, request{op: opAppend, keys: []string{key}, values: [][]byte{value}}, nil)
}

// CompareSet stores value if key holds expected, or is absent and expected is empty, and returns what key holds then.
// For an absent key it returns expected when it stored nothing.
func (c *Client) CompareSet(ctx context.Context, key string, expected, value []byte) (current []byte, err error) {
	err = c.do(ctx, request{op: opCompareSet, keys: []string{key}, values: [][]byte{expected, value}},
		func() error { return c.read(&current) })
	return current, err
}

// MultiGet returns the values of keys, which are empty for absent ones.
func (c *Client) MultiGet(ctx context.Context, keys ...string) ([][]byte, error) {
	values := make([][]byte, len(keys))
	err := c.do(ctx, request{op: opMultiGet, keys: keys}, func() error {
		for i := range values {
			if err := c.read(&values[i]); err != nil {
				return err
			}
		}
		return nil
	})
	return values, err
}

// MultiSet stores one value for each key.
func (c *Client) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	if len(keys) != len(values) {
		return fmt.Errorf("tcpstore: MultiSet of %d keys needs as many values, not %d", len(keys), len(values))
	}
	return c.do(ctx, request{op: opMultiSet, keys: keys, values: values}, nil)
}

// Delete removes key and reports whether it was there.
func (c *Client) Delete(ctx context.Context, key string) (bool, error) {
	n, err := c.int(ctx, request{op: opDeleteKey, keys: []string{key}})
	return n > 0, err
}

// NumKeys counts the keys, without queues.
func (c *Client) NumKeys(ctx context.Context) (int64, error) {
	return c.int(ctx, request{op: opNumKeys})
}

// ListKeys returns all keys in no order, without queues.
func (c *Client) ListKeys(ctx context.Context) (keys []string, err error) {
	err = c.do(ctx, request{op: opListKeys}, func() error {
		n, err := c.uint64()
		for ; n > 0 && err == nil; n-- {
			var key []byte
			err = c.read(&key)
			keys = append(keys, string(key))
		}
		return err
	})
	return keys, err
}

// QueuePush adds an item at the end of a queue.
func (c *Client) QueuePush(ctx context.Context, key string, item []byte) error {
	return c.do(ctx, request{op: opQueuePush, keys: []string{key}, values: [][]byte{item}}, nil)
}

// QueuePop waits for an item and takes the oldest.
func (c *Client) QueuePop(ctx context.Context, key string) (item []byte, err error) {
	for n := uint64(0); n == 0 && err == nil; {
		if err := c.Wait(ctx, key); err != nil {
			return nil, err
		}
		// Another client may have been faster: then n is 0 and no item follows.
		err = c.do(ctx, request{op: opQueuePop, keys: []string{key}}, func() (err error) {
			if n, err = c.uint64(); err == nil && n > 0 {
				err = c.read(&item)
			}
			return err
		})
	}
	return item, err
}

// QueueLen counts the items of a queue.
func (c *Client) QueueLen(ctx context.Context, key string) (int64, error) {
	return c.int(ctx, request{op: opQueueLen, keys: []string{key}})
}

// Ping makes one round trip.
func (c *Client) Ping(ctx context.Context) error {
	const nonce = 0x646c7276
	return c.do(ctx, request{op: opPing, num: nonce}, func() error {
		var b [4]byte
		_, err := io.ReadFull(c.r, b[:])
		if got := binary.LittleEndian.Uint32(b[:]); err == nil && got != nonce {
			return fmt.Errorf("answer %#x to a ping of %#x", got, nonce)
		}
		return err
	})
}

func (c *Client) int(ctx context.Context, r request) (n int64, err error) {
	err = c.do(ctx, r, func() error {
		u, err := c.uint64()
		n = int64(u)
		return err
	})
	return n, err
}

// do sends a request and reads its answer, if it has one.
func (c *Client) do(ctx context.Context, r request, answer func() error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	r.gen = genB
	err := context.Cause(ctx)
	if err == nil {
		err = c.exchange(ctx, r, answer)
	}
	if err != nil {
		return fmt.Errorf("tcpstore: %s %.3q on %s: %w", r.op, r.keys, c.nc.RemoteAddr(), err)
	}
	return nil
}

// exchange sets c.err when it does not know how far the stream was read.
func (c *Client) exchange(ctx context.Context, r request, answer func() error) error {
	release := c.bind(ctx)
	_, err := c.nc.Write(r.appendTo(nil))
	sent := err == nil
	if sent && answer != nil {
		err = answer()
	}
	release()
	cause := context.Cause(ctx)
	switch {
	case err == nil:
		return nil
	case cause == nil:
	case sent && (r.op == opWait || r.op == opBarrier):
		if done, cancelErr := c.cancelWait(); cancelErr == nil {
			if done {
				return nil
			}
			return cause
		}
		err = cause
	default:
		err = cause
	}
	c.err = fmt.Errorf("tcpstore: connection unusable after an earlier failure: %w", err)
	c.nc.Close()
	return err
}

// bind makes the end of ctx interrupt I/O until release.
func (c *Client) bind(ctx context.Context) (release func()) {
	done := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = c.nc.SetDeadline(time.Unix(1, 0))
		close(done)
	})
	return func() {
		if !stop() {
			<-done
			_ = c.nc.SetDeadline(time.Time{})
		}
	}
}

var errNotStopped = errors.New("unexpected answer to a wait")

// stopped reads the answer to WAIT and BARRIER.
func (c *Client) stopped() error {
	b, err := c.r.ReadByte()
	if err == nil && b != stopWaiting {
		err = errNotStopped
	}
	return err
}

// cancelWait ends a wait at the server and reports whether the wait had been answered before that.
func (c *Client) cancelWait() (done bool, err error) {
	const patience = 5 * time.Second
	_ = c.nc.SetDeadline(time.Now().Add(patience))
	defer c.nc.SetDeadline(time.Time{})
	if _, err := c.nc.Write(request{op: opCancelWait, gen: genB}.appendTo(nil)); err != nil {
		return false, err
	}
	b, err := c.r.ReadByte()
	if done = err == nil && b == stopWaiting; done {
		b, err = c.r.ReadByte()
	}
	if err == nil && b != waitCanceled {
		err = errNotStopped
	}
	return done, err
}

func (c *Client) uint64() (uint64, error) {
	var b [8]byte
	_, err := io.ReadFull(c.r, b[:])
	return binary.LittleEndian.Uint64(b[:]), err
}

func (c *Client) read(value *[]byte) error {
	const most = 1 << 30
	n, err := c.uint64()
	if err == nil && n > most {
		err = fmt.Errorf("answer announces %d bytes, the most is %d", n, most)
	}
	if err != nil {
		return err
	}
	*value = make([]byte, n)
	_, err = io.ReadFull(c.r, *value)
	return err
}
