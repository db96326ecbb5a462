package simulate

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// slots is how many workers a node has.
const slots = 8

// node is a launcher: a real Session, and workers that are a value.
type node struct {
	c      *cluster
	index  int
	id     string
	self   rendezvous.Node
	link   *link
	stops  time.Duration // its workers take so long to stop, and so does a check
	sick   bool          // its checks fail
	power  context.Context
	kill   context.CancelFunc
	lag    atomic.Int64      // and so much longer, in nanoseconds
	faults chan func() error // to be done by the launcher
	done   chan struct{}

	session *api.Session // of the launcher alone
	held    bool         // as session
	over    job.EpochID  // the newest whose workers have ended by themselves; as session

	mu    sync.Mutex
	now   job.EpochID          // that of its workers; zero: there are none
	last  rendezvous.Directive // the newest with workers here
	heard rendezvous.Directive // the newest
	ended error                // why it follows the run no more

	// Of rules, and guarded by its lock.
	excused bool      // its workers may run beside a newer world
	rival   bool      // another one may replace it
	unfair  time.Time // until then it may be lost, for its network was bad
}

var (
	errKilled = errors.New("it was killed")
	errLeft   = errors.New("it has left the run")
)

func (n *node) live(delay time.Duration) {
	defer close(n.done)
	n.link.wait(delay, launchers)
	s, err := api.Open(n.power, n.link, api.SessionConfig{Run: n.c.run, Params: n.c.params, Work: "work", Node: n.self})
	if err != nil {
		n.end(err)
		return
	}
	n.session = s
	n.end(n.follow())
	n.halt()
	n.link.unplug()
	s.Close()
}

// follow returns why the launcher ends.
func (n *node) follow() error {
	notices := n.session.Notices()
	for {
		select { // directives first, so that a history repeats
		case d, open := <-n.session.Directives():
			if !open {
				return n.session.Err()
			}
			if err := n.obey(d); err != nil {
				return err
			}
			continue
		default:
		}
		select {
		case d, open := <-n.session.Directives():
			if !open {
				return n.session.Err()
			}
			if err := n.obey(d); err != nil {
				return err
			}
		case notice, open := <-notices:
			if !open {
				notices = nil
			} else {
				n.c.rules.noticed(n, notice)
			}
		case f := <-n.faults:
			if err := f(); err != nil {
				return err
			}
		case <-n.power.Done():
			return errKilled
		}
	}
}

// obey does what a launcher does; an error ends it.
func (n *node) obey(d rendezvous.Directive) error {
	n.hear(&d)
	n.c.rules.told(n, d)
	if d.Kind == job.Run && d.EpochID == n.ran().EpochID {
		return nil // a daemon that was started again confirms it
	}
	if d.Confirms() {
		d.Kind = job.Wait
	}
	if _, works := n.running(); works {
		if !n.sleep(n.stopTime()) {
			return errKilled
		}
		n.halt()
		select {
		case newer, open := <-n.session.Directives():
			if !open {
				return n.session.Err()
			}
			if newer.Kind != job.Run || newer.EpochID != n.ran().EpochID { // else it confirms the workers that have ended
				return n.obey(newer)
			}
		default:
		}
	}
	if d.Leave != nil {
		return n.leave(d.Leave.Text)
	}
	switch d.Kind {
	case job.Lead:
		return n.report(rendezvous.Ready{ID: n.id, EpochID: d.EpochID, Addr: n.id, Port: 1})
	case job.Run:
		n.start(d)
	case job.Stop:
		n.session.Achieved(job.Progress{Step: int64(d.Round)*1000 + int64(d.Epoch), Stepping: true})
		return n.session.Rejoin(n.power, d.EpochID, nil)
	case job.Check:
		return n.check()
	case job.Bar:
		if n.sick {
			return n.leave("its check has failed")
		}
	case job.Done, job.Fail:
		n.c.rules.over(n, d.Kind)
		_, _ = n.session.Leave(n.power, string(d.Kind), nil)
		return errLeft
	}
	return nil
}

// check is a check of the node, by itself.
func (n *node) check() error {
	if n.c.played {
		return nil
	}
	if !n.sleep(n.stops) {
		return errKilled
	}
	if n.sick {
		return n.report(rendezvous.Barred{ID: n.id, Reason: "its GPU is broken"})
	}
	return n.report(rendezvous.Cleared{ID: n.id})
}

// report is as the launcher's: a daemon that does not know the node says so by its directives.
func (n *node) report(ev rendezvous.Event) error {
	if err := n.session.Report(n.power, ev); err != nil && !errors.Is(err, rendezvous.ErrUnknownNode) {
		return err
	}
	return nil
}

// leave announces that the node goes, and goes.
func (n *node) leave(reason string) error {
	n.c.rules.excuse(n, time.Time{}) // the others do not wait for its workers
	err := n.report(rendezvous.Leaving{ID: n.id, Reason: reason})
	n.sleep(n.stopTime())
	n.halt()
	_, left := n.session.Leave(n.power, reason, nil)
	return errors.Join(errLeft, err, left)
}

// fail ends a worker of the node.
func (n *node) fail() error { return n.failing(rendezvous.RestartCharged) }

func (n *node) failing(decision rendezvous.Decision) error {
	e, works := n.running()
	if !works || n.killed() {
		return nil
	}
	p := n.ran().Place
	n.c.mark("a worker has failed")
	n.halt()
	n.over = e
	return n.report(rendezvous.Failing{ID: n.id, EpochID: e, Decision: decision,
		Failures: []job.Failure{{Rank: p.RankBase, GroupRank: p.GroupRank, Text: "exit code 1", At: time.Now()}}})
}

// succeed ends all workers of the node, and step has them make the first one.
func (n *node) succeed() error {
	e, works := n.running()
	if !works || n.killed() {
		return nil
	}
	n.halt()
	n.over = e
	return n.report(rendezvous.Success{ID: n.id, EpochID: e})
}

func (n *node) step() error {
	e, works := n.running()
	if !works || n.killed() {
		return nil
	}
	return n.report(rendezvous.Stepped{ID: n.id, EpochID: e})
}

// checked ends the check of the node.
func (n *node) checked(result string) error {
	if n.hear(nil).Kind != job.Check {
		return nil
	}
	switch d, err := time.ParseDuration(result); {
	case err == nil:
		return n.report(rendezvous.Cleared{ID: n.id, Until: time.Now().Add(d)})
	case result == "alone":
		return n.report(rendezvous.Cleared{ID: n.id, Until: time.Now()})
	case result == "broken", result == "undecided":
		return n.report(rendezvous.Barred{ID: n.id, Reason: "gpu 3 is gone", Again: result == "undecided"})
	case result == "pass":
		return n.report(rendezvous.Cleared{ID: n.id})
	}
	return nil
}

func (n *node) stopTime() time.Duration { return n.stops + time.Duration(n.lag.Load()) }

func (n *node) start(d rendezvous.Directive) {
	n.session.Running(&rendezvous.Resume{EpochID: d.EpochID, Place: *d.Place, Hold: d.Hold})
	if n.held = d.Hold; !n.held {
		n.c.rules.started(n, d)
	}
}

// halt ends the workers, if there are any.
func (n *node) halt() {
	if n.c.rules.stopped(n) || n.held {
		n.held = false
		n.session.Running(nil)
	}
}

// work books that workers run here because of d; nil: they do not any more.
func (n *node) work(d *rendezvous.Directive) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.now = (job.EpochID{}); d != nil {
		n.now, n.last = d.EpochID, *d
	}
}

func (n *node) ran() rendezvous.Directive {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.last
}

// hear books a directive, unless it is nil, and returns the newest.
func (n *node) hear(d *rendezvous.Directive) rendezvous.Directive {
	n.mu.Lock()
	defer n.mu.Unlock()
	if d != nil {
		n.heard = *d
	}
	return n.heard
}

func (n *node) end(why error) {
	n.mu.Lock()
	n.ended = why
	n.mu.Unlock()
	n.c.rules.ended(n)
}

// running is the epoch whose workers run here; false: none do.
func (n *node) running() (job.EpochID, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.now, n.now.Round > 0
}

// why is the reason why the launcher has ended; nil: it has not.
func (n *node) why() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.ended
}

func (n *node) hasLeft() bool { return n.why() != nil }

func (n *node) killed() bool { return n.power.Err() != nil }

// sleep reports false when the node has lost its power meanwhile.
func (n *node) sleep(d time.Duration) bool {
	expired := time.NewTimer(slot(time.Now(), d, n.index, launchers))
	defer expired.Stop()
	select {
	case <-expired.C:
		return true
	case <-n.power.Done():
		return false
	}
}
