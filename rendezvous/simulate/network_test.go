package simulate

import (
	"context"
	"errors"
	"sync"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// Everything happens at times that differ for all nodes, so that a history depends on its seed alone. Of every period a
// node has a moment for the requests of its session, one for those of its launcher, and one for its troubles. The
// control plane waits for multiples of a period, so that its timers of different nodes end at different times, too.
const (
	period  = 500_000 // nanoseconds
	lanes   = 4
	maxNode = period / lanes
)

// Lanes.
const (
	sessions = iota
	launchers
	troubles
)

// errUnreachable is the error of a request without an answer.
var errUnreachable = errors.New("the daemon cannot be reached")

// slot is the first moment of a lane of a node that is at least delay from now.
func slot(now time.Time, delay time.Duration, node, lane int) time.Duration {
	at := now.UnixNano() + int64(delay)
	at += (int64(node*lanes+lane) - at%period + period) % period
	return time.Duration(at - now.UnixNano())
}

// link is the network between a node and the daemon. It is an api.Service that reaches the Hub of the present daemon.
type link struct {
	c    *cluster
	node int

	mu    sync.Mutex
	delay time.Duration   // of a request
	cut   bool            // no connection can be made
	conn  context.Context // of the present connections
	drop  context.CancelFunc
	home  *daemon  // that has answered; nil: the leader is asked
	lossy bool     // the next answer is lost
	held  bool     // the next report stays on the way, for those that wait for its answer in vain
	way   []func() // reports that do
	sent  func()   // the newest report, once more
	dark  bool     // the node has lost its power: the daemon hears nothing, not even the end of its connections
}

func newLink(c *cluster, node int) *link {
	l := &link{c: c, node: node, delay: time.Millisecond}
	l.conn, l.drop = context.WithCancel(context.Background())
	return l
}

// hangUp breaks all connections. With stay no others can be made until mend.
func (l *link) hangUp(stay bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.drop()
	l.home = nil
	l.cut = l.cut || stay
	l.conn, l.drop = context.WithCancel(context.Background())
}

// unplug ends the connections of a launcher that ends. The daemon does not hear of one that is in the dark.
func (l *link) unplug() {
	if !l.isDark() {
		l.hangUp(true)
	}
}

func (l *link) mend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dark { // its daemon has noticed by now, or hears it from the next connection
		l.drop()
		l.home = nil
		l.conn, l.drop = context.WithCancel(context.Background())
	}
	l.cut, l.dark = false, false
}

// heal ends all faults. What is on the way never arrives.
func (l *link) heal() {
	l.mend()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lossy, l.held, l.way, l.delay = false, false, nil, time.Millisecond
}

// blackOut takes the node off the network without a word.
func (l *link) blackOut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut, l.dark = true, true
}

// slow makes requests take longer.
func (l *link) slow(delay time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.delay = delay
}

// loseAnswer has the next request arrive, and its answer not.
func (l *link) loseAnswer() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lossy = true
}

// wait passes the time until the node's next moment.
func (l *link) wait(delay time.Duration, lane int) { time.Sleep(slot(time.Now(), delay, l.node, lane)) }

func (l *link) travel() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.delay
}

// reach returns the daemon and the connection to it.
func (l *link) reach() (d *daemon, conn context.Context, lossy bool) {
	leader := l.c.running()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		return nil, nil, false
	}
	if l.home == nil || l.home.gone.Load() {
		l.home = leader
	}
	lossy, l.lossy = l.lossy, false
	return l.home, l.conn, lossy
}

// call makes one request; the connection alone ends it. News take the way back, too, and errors of the network come in
// a moment of the node.
func (l *link) call(lane int, f func(context.Context, *api.Hub) error) error {
	l.wait(l.travel(), lane)
	d, conn, lossy := l.reach()
	if d == nil {
		return errUnreachable
	}
	if lane == launchers && l.stays(d, f) {
		l.wait(l.travel(), lane)
		return errUnreachable
	}
	err := f(conn, d.hub)
	l.wait(l.travel(), lane)
	if closed := errors.Is(err, api.ErrClosed); closed || lossy || conn.Err() != nil || d.gone.Load() || l.isDark() {
		l.leave(d, closed)
		return errUnreachable
	}
	return err
}

// leave turns to the leader if a daemon has closed: it serves no more.
func (l *link) leave(d *daemon, closed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if closed && l.home == d {
		l.home = nil
	}
}

// stays reports whether a report to a daemon stays on the way.
func (l *link) stays(d *daemon, f func(context.Context, *api.Hub) error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent = func() {
		if !d.gone.Load() {
			_ = f(context.Background(), d.hub)
		}
	}
	if !l.held {
		return false
	}
	l.held = false
	l.way = append(l.way, l.sent)
	return true
}

// arrivals are the reports that have been on the way, or the newest one once more.
func (l *link) arrivals(again bool) (all []func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if again && l.sent != nil {
		return []func(){l.sent}
	} else if again {
		return nil
	}
	all, l.way = l.way, nil
	return all
}

// waits reports whether there are any on the way.
func (l *link) waits() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.way) > 0
}

// hold has the next report stay on the way.
func (l *link) hold() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held = true
}

// daemon is the one that has answered.
func (l *link) daemon() *daemon {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.home
}

func (l *link) isCut() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cut
}

func (l *link) isDark() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dark
}

func (l *link) Join(_ context.Context, run string, ev rendezvous.Join) error {
	return l.call(launchers, func(ctx context.Context, h *api.Hub) error { return h.Join(ctx, run, ev) })
}

func (l *link) Watch(_ context.Context, run, id string, after api.Cursor) (n api.News, err error) {
	err = l.call(sessions, func(ctx context.Context, h *api.Hub) error {
		n, err = h.Watch(ctx, run, id, after)
		return err
	})
	if err == nil && n.Kind == job.Run && !n.Confirms() {
		l.c.rules.sent(id, n.EpochID)
	}
	return n, err
}

func (l *link) Report(_ context.Context, run string, ev rendezvous.Event) error {
	return l.call(launchers, func(ctx context.Context, h *api.Hub) error { return h.Report(ctx, run, ev) })
}

func (l *link) Leave(_ context.Context, run string, ev rendezvous.Leave) (e job.Evidence, err error) {
	err = l.call(launchers, func(ctx context.Context, h *api.Hub) error {
		e, err = h.Leave(ctx, run, ev)
		return err
	})
	return e, err
}

func (l *link) World(_ context.Context, run string) (ms []job.Member, err error) {
	err = l.call(launchers, func(ctx context.Context, h *api.Hub) error {
		ms, err = h.World(ctx, run)
		return err
	})
	return ms, err
}
