package probe

import (
	"context"
	"crypto/rand"
	"errors"
	"sync"
	"time"

	"dlrover-run/netcheck"
)

// loopbackPlan takes 0.2 s.
var loopbackPlan = plan{warm: 50 * time.Millisecond, measure: 150 * time.Millisecond}

// Loopback returns this host's TCP rate over its own loopback with the sockets, buffers and streams of a test, in 10^6
// bit/s. It takes 0.2 s. A network rate beyond it, or close to it, is limited by the CPU.
func Loopback(ctx context.Context) (float64, error) { return throughput(ctx, loopbackPlan) }

// throughput measures one direction between two ends in this process.
func throughput(ctx context.Context, p plan) (float64, error) {
	const loopback = "127.0.0.1"
	a := netcheck.Assignment{Test: rand.Text(), Key: []byte(rand.Text()), Left: p.warm + p.measure + 3*usual.answer,
		Peer: netcheck.Peer{Addr: loopback}}
	ctx, cancel, limit := within(ctx, a)
	defer cancel()
	prober := New(Config{Addr: loopback})
	rails, f := prober.begin(ctx, a)
	if f != nil {
		return 0, f
	}
	doors, f := prober.openDoors(ctx, a, rails, limit)
	if f != nil {
		return 0, f
	}
	d := doors[0]
	defer d.greeters.Wait()
	defer d.close()
	to, key, f := connect(ctx, &rails[0], newTicket(a, 0, "", dialerRole), d.addr())
	if f != nil {
		return 0, f
	}
	from, _, f := d.wait(ctx)
	if f != nil {
		for _, c := range to {
			discard(c)
		}
		return 0, f
	}
	receiver := prober.session(a, rails[0], serverRole, from, key, limit)
	sender := prober.session(a, rails[0], dialerRole, to, key, limit)
	receiver.plan, sender.plan = p, p
	return oneWay(ctx, sender, receiver)
}

func oneWay(ctx context.Context, sender, receiver *session) (float64, error) {
	stop := context.AfterFunc(ctx, func() { sender.shut(); receiver.shut() })
	defer stop()
	var sending sync.WaitGroup
	var sent error
	sending.Go(func() { sent = sender.send() })
	received := receiver.receive()
	if received != nil {
		receiver.shut()
	}
	sending.Wait()
	sender.close()
	receiver.close()
	return receiver.flow.Mbps, errors.Join(ctx.Err(), received, sent)
}
