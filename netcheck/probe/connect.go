package probe

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"dlrover-run/netcheck"
)

// How a dialer tries. A connection that is closed before it was proved may have fallen to a crowd of strangers at the
// other end, so it is tried again.
const (
	proofTries = 5
	tryPause   = 50 * time.Millisecond
)

// connect opens the control connection and the streams of one rail. On error all are closed.
// It notes in r that connections cannot be bound to the interface.
func connect(ctx context.Context, r *rail, t ticket, addr string) ([]*net.TCPConn, []byte, *fault) {
	to, f := target(addr, r.allow)
	if f != nil {
		return nil, nil, f
	}
	ctl, n, f := open(ctx, *r, t, t.key, 0, to)
	if f != nil && r.out.bind && (f.class == netcheck.Refused || f.class == netcheck.Unreachable) && ctx.Err() == nil {
		r.out.bind = false
		ctl, n, f = open(ctx, *r, t, t.key, 0, to)
	}
	if f != nil {
		return nil, nil, f
	}
	key := t.sessionKey(n)
	conns := make([]*net.TCPConn, 1+streams)
	faults := make([]*fault, 1+streams)
	conns[0] = ctl
	var all sync.WaitGroup
	for i := 1; i <= streams; i++ {
		all.Go(func() { conns[i], _, faults[i] = open(ctx, *r, t, key, i, to) })
	}
	all.Wait()
	if f := worst(faults); f != nil {
		for _, c := range conns {
			if c != nil {
				discard(c)
			}
		}
		return nil, nil, f
	}
	return conns, key, nil
}

// target is addr, which must be one of the peer's: nothing is sent to other addresses, even if the peer names them.
func target(addr string, allow []netip.Addr) (netip.AddrPort, *fault) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil || to.Port() == 0 {
		return to, faultf(netcheck.Own, "address %q of the other end: need ip:port", addr)
	}
	to = netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
	if !slices.Contains(allow, to.Addr().WithZone("")) {
		return to, faultf(netcheck.Own, "address %s is none of the other node's, which are %v", addr, allow)
	}
	return to, nil
}

// open connects and proves one stream.
func open(ctx context.Context, r rail, t ticket, key []byte, stream int, to netip.AddrPort) (
	c *net.TCPConn, n nonces, f *fault) {
	began := time.Now()
	for try := 0; ; try++ {
		if c, n, f = attempt(ctx, r, t, key, stream, to); f == nil {
			return c, n, nil
		}
		// A wrong key stays wrong, however often it is shown.
		again := f.class == netcheck.Reset || f.class == netcheck.Auth && try+1 < proofTries
		if ctx.Err() != nil || !again || time.Since(began) > r.limits.retry {
			break
		}
		select {
		case <-ctx.Done():
		case <-time.After(tryPause):
		}
	}
	if ctx.Err() != nil {
		f = ended(ctx, f)
	}
	return nil, n, f
}

func attempt(ctx context.Context, r rail, t ticket, key []byte, stream int, to netip.AddrPort) (
	*net.TCPConn, nonces, *fault) {
	wait := r.limits.connect
	if r.out.bind {
		wait = r.limits.bound
	}
	c, err := r.out.dial(ctx, to, wait)
	if err != nil {
		class := connectClass(err)
		return nil, nonces{}, faultf(class, "connecting to %s from %s: %v", to, r.out.from, cause(err))
	}
	_ = c.SetDeadline(time.Now().Add(r.limits.proof))
	stop := context.AfterFunc(ctx, func() { discard(c) })
	n, at, err := t.proveAsDialer(c, key, stream)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		discard(c)
		return nil, n, handshakeFault(to, at, err, r.limits.proof)
	}
	return c, n, nil
}

// cause strips the addresses from net's errors, as the fault names them itself.
func cause(err error) error {
	if op, ok := errors.AsType[*net.OpError](err); ok {
		return op.Err
	}
	return err
}

// handshakeFault explains a handshake that ended at a stage. A server disconnects a dialer without the key in order and
// without a message, so an end in order after the proof means that the keys differ. A connection that had to make room
// is reset.
func handshakeFault(to netip.AddrPort, at stage, err error, within time.Duration) *fault {
	closed := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
	switch {
	case errors.Is(err, errProof) || at == stageProof && closed:
		return faultf(netcheck.Auth, "handshake with %s: the two ends do not have the same key", to)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return faultf(netcheck.Stalled, "handshake with %s: the connection was accepted, then there was no data for %v",
			to, within)
	}
	return faultf(brokenClass(err), "handshake with %s: %v", to, cause(err))
}
