package failover

import (
	"net"
	"sync"
	"sync/atomic"
)

// door is a listener that turns all connections away until it is opened. It owns a goroutine until close.
type door struct {
	net.Listener
	opened atomic.Bool
	in     chan net.Conn
	done   chan struct{} // closed by close
	once   sync.Once
	ended  chan struct{}
}

func newDoor(l net.Listener) *door {
	d := &door{Listener: l, in: make(chan net.Conn), done: make(chan struct{}), ended: make(chan struct{})}
	go d.run()
	return d
}

func (d *door) open() { d.opened.Store(true) }

func (d *door) run() {
	defer close(d.ended)
	for {
		nc, err := d.Listener.Accept()
		if err != nil {
			return
		}
		if !d.opened.Load() {
			_ = nc.Close()
			continue
		}
		select {
		case d.in <- nc:
		case <-d.done:
			_ = nc.Close()
		}
	}
}

// Accept implements net.Listener.
func (d *door) Accept() (net.Conn, error) {
	select {
	case nc := <-d.in:
		return nc, nil
	case <-d.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener. The listener below stays open: it has other uses.
func (d *door) Close() error {
	d.once.Do(func() { close(d.done) })
	return nil
}

// close ends the door and the listener below.
func (d *door) close() {
	_ = d.Close()
	_ = d.Listener.Close()
	<-d.ended
}
