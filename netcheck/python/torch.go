package python

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"dlrover-run/netcheck"
)

const (
	// defaultLeft bounds a test without a time of its own.
	defaultLeft = 20 * time.Second
	// margin is kept of this time, so that the answer comes before the service stops waiting.
	margin = time.Second
)

// Compute measures how fast each device of this node multiplies matrices.
func (r *Runner) Compute(ctx context.Context, a netcheck.Assignment) netcheck.Result {
	ctx, cancel := limit(ctx, a)
	defer cancel()
	if res, ok := r.usable(ctx, a, netcheck.Failed); !ok {
		return res
	}
	ms, err := r.do(ctx, command{Do: "compute", Limit: left(ctx), Quick: a.Quick})
	res := r.result(ctx, a, ms, err)
	if res.Torch != nil {
		for _, m := range ms {
			res.Torch.Matmul = append(res.Torch.Matmul, m.Matmul)
		}
	}
	return res
}

// Serve is rank 0 of a collective of two nodes. It opens the store for the peer and passes its address to ready.
func (r *Runner) Serve(ctx context.Context, a netcheck.Assignment, ready func(addrs []string) error) netcheck.Result {
	a.Rank, a.World = 0, 2
	a.Allow = append(peerAddrs(a.Peer), a.Allow...)
	return r.lead(ctx, a, ready)
}

// Dial is rank 1 of a collective of two nodes.
func (r *Runner) Dial(ctx context.Context, a netcheck.Assignment) netcheck.Result {
	a.Rank, a.World = 1, 2
	return r.follow(ctx, a)
}

// Join takes part in a collective of a.World nodes as a.Rank. Rank 0 passes the store's address to ready, the others
// find it in a.Peer.Addrs.
func (r *Runner) Join(ctx context.Context, a netcheck.Assignment, ready func(addrs []string) error) netcheck.Result {
	if a.Rank == 0 {
		return r.lead(ctx, a, ready)
	}
	return r.follow(ctx, a)
}

func peerAddrs(p netcheck.Peer) (addrs []string) {
	if p.Addr != "" {
		addrs = append(addrs, p.Addr)
	}
	for _, nic := range p.NICs {
		if nic.Addr != "" {
			addrs = append(addrs, nic.Addr)
		}
	}
	return addrs
}

func (r *Runner) lead(ctx context.Context, a netcheck.Assignment, ready func([]string) error) netcheck.Result {
	ctx, cancel := limit(ctx, a)
	defer cancel()
	if res, ok := r.usable(ctx, a, netcheck.Own); !ok {
		return res
	}
	addr, release, err := r.cfg.Store(a.Allow)
	if err != nil {
		return failure(a, netcheck.Own, fmt.Errorf("serve PyTorch's store: %w", err))
	}
	defer release()
	if err := ready([]string{addr}); err != nil {
		return failure(a, netcheck.Own, fmt.Errorf("say where the store is: %w", err))
	}
	return r.collective(ctx, a, addr)
}

func (r *Runner) follow(ctx context.Context, a netcheck.Assignment) netcheck.Result {
	ctx, cancel := limit(ctx, a)
	defer cancel()
	if res, ok := r.usable(ctx, a, netcheck.Own); !ok {
		return res
	}
	if len(a.Peer.Addrs) == 0 {
		return failure(a, netcheck.Own, errors.New("the assignment does not say where the store is"))
	}
	return r.collective(ctx, a, a.Peer.Addrs[0])
}

// collective takes part in one with the store at addr. All devices of a node have the same figures but for noise: the
// slowest counts.
func (r *Runner) collective(ctx context.Context, a netcheck.Assignment, addr string) netcheck.Result {
	host, port, err := endpoint(addr)
	if err != nil {
		return failure(a, netcheck.Own, err)
	}
	ms, err := r.do(ctx, command{
		Do: "collective", Limit: left(ctx), Quick: a.Quick, Host: host, Port: port,
		Test: a.Test, Rank: a.Rank, World: a.World,
	})
	res := r.result(ctx, a, ms, err)
	for _, m := range ms {
		if t := res.Torch; t != nil && !m.Idle && m.AllReduce > t.AllReduce {
			t.Backend, t.Bytes, t.Transport = m.Backend, m.Bytes, m.Transport
			t.AllReduce, t.BusMBps, t.Latency = m.AllReduce, m.BusMBps, m.Latency
		}
	}
	return res
}

func endpoint(addr string) (host string, port int, err error) {
	host, text, err := net.SplitHostPort(addr)
	if err == nil {
		port, err = strconv.Atoi(text)
	}
	if err != nil || host == "" || port < 1 || port > 65535 {
		return "", 0, fmt.Errorf("the store's address is %.80q, which is not a host:port", addr)
	}
	return host, port, nil
}

// limit ends ctx with the test's time.
func limit(ctx context.Context, a netcheck.Assignment) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, cmp.Or(a.Left, defaultLeft))
}

// left is how many seconds the probe may take.
func left(ctx context.Context) float64 {
	deadline, _ := ctx.Deadline() // limit has set one
	d := time.Until(deadline)
	return max(d-min(margin, d/4), 0).Seconds()
}

// usable waits for PyTorch. If it cannot be used here, the Result has the class: Own where PyTorch is missing, which is
// no fault. PyTorch may also not work, or find fewer devices than it should, which the CPU does not make up for. The
// class is then the given one: Failed for a test of this node, Own for a test with others, whose fault it is not.
func (r *Runner) usable(ctx context.Context, a netcheck.Assignment, broken netcheck.Class) (netcheck.Result, bool) {
	_, err := r.Ready(ctx)
	switch {
	case err == nil && r.missing() != "":
		return failure(a, broken, errors.New(r.missing())), false
	case err == nil:
		return netcheck.Result{}, true
	case ctx.Err() == context.Canceled:
		return failure(a, netcheck.Canceled, err), false
	case ctx.Err() != nil:
		return failure(a, broken, errors.New("PyTorch is still being imported")), false
	case errors.Is(err, errNoTorch):
		return failure(a, netcheck.Own, err), false
	}
	return failure(a, broken, err), false
}

// result reports a test. A cancelled test has the class Canceled; a test whose time is over has failed.
func (r *Runner) result(ctx context.Context, a netcheck.Assignment, ms []measured, err error) netcheck.Result {
	switch {
	case err != nil && ctx.Err() == context.Canceled:
		return failure(a, netcheck.Canceled, err)
	case err != nil:
		return failure(a, netcheck.Failed, err)
	}
	device := string(CPU)
	if r.hello.Devices > 0 {
		device = string(r.cfg.Device)
	}
	return netcheck.Result{Test: a.Test, Torch: &netcheck.TorchResult{Torch: r.hello.version(), Device: device}}
}

func failure(a netcheck.Assignment, class netcheck.Class, err error) netcheck.Result {
	return netcheck.Result{Test: a.Test, Class: class, Text: oneLine(err.Error())}
}
