// Package inbox gathers the signals of a job. The guard, which is the process that was executed, passes on its
// signals; other signals are sent to this process.
package inbox

import (
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"dlrover-run/launcher/proc/guard"
)

// Inbox receives the signals of the job. systemd, for one, signals every process of a unit. A signal that arrives
// both ways within sameSignal is one signal, or a first SIGTERM would count as a second.
type Inbox struct {
	link   *guard.Link
	direct chan os.Signal
	wg     sync.WaitGroup

	twoWays bool

	mu         sync.Mutex
	caught     map[syscall.Signal]chan<- os.Signal
	relayed    bool
	last       map[syscall.Signal]time.Time // delivered
	duplicates map[delivery][]time.Time     // expected, by the other way
	abandon    func()
}

// delivery is a signal and its way.
type delivery struct {
	sig    syscall.Signal
	passed bool // by the guard
}

// sameSignal is generous: on a busy machine the guard waits for its turn.
const sameSignal = 5 * time.Second

// sameRelayed is less than a user takes for a second one.
const sameRelayed = time.Second

// New follows the guard, if link is not nil, at once. A signal that is not caught has its default effect on the
// launcher.
func New(link *guard.Link) *Inbox {
	in := &Inbox{
		link: link, twoWays: link != nil, direct: make(chan os.Signal, 64), caught: map[syscall.Signal]chan<- os.Signal{},
		duplicates: map[delivery][]time.Time{}, last: map[syscall.Signal]time.Time{}, abandon: func() {},
	}
	in.wg.Go(func() {
		for s := range in.direct {
			in.deliver(s.(syscall.Signal), false)
		}
	})
	if link != nil {
		link.Follow(func(s syscall.Signal) { in.deliver(s, true) }, in.orphaned)
	}
	return in
}

// Relayed notes that another process passes signals on to the guard, and may be in the same unit. The guard gets
// them twice then, and those that it passes on within sameRelayed are one signal.
func (in *Inbox) Relayed() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.relayed = true
}

// Catch sends signals to out from now on; like those of signal.Notify, they are dropped where out is full.
func (in *Inbox) Catch(out chan<- os.Signal, signals ...syscall.Signal) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for _, s := range signals {
		in.caught[s] = out
		signal.Notify(in.direct, s)
	}
}

func (in *Inbox) deliver(s syscall.Signal, passed bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	out := in.caught[s]
	if out == nil {
		_ = syscall.Kill(os.Getpid(), s)
		return
	}
	now := time.Now()
	if in.isDuplicate(delivery{s, passed}, now) || in.relayed && passed && now.Sub(in.last[s]) < sameRelayed {
		return
	}
	in.last[s] = now
	if in.twoWays {
		in.duplicates[delivery{s, !passed}] = append(in.duplicates[delivery{s, !passed}], now)
	}
	select {
	case out <- s:
	default:
	}
}

// isDuplicate reports, once for each, whether the signal has come the other way.
func (in *Inbox) isDuplicate(d delivery, now time.Time) bool {
	expected := in.duplicates[d]
	for len(expected) > 0 && now.Sub(expected[0]) > sameSignal {
		expected = expected[1:]
	}
	found := len(expected) > 0
	if found {
		expected = expected[1:]
	}
	in.duplicates[d] = expected
	return found
}

// WhenOrphaned sets the function to call when the guard has died, before the launcher dies as well.
func (in *Inbox) WhenOrphaned(abandon func()) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.abandon = abandon
}

// orphaned ends the launcher: the guard's pid is the one that users know, so to kill it was meant for the job.
func (in *Inbox) orphaned() {
	in.mu.Lock()
	abandon := in.abandon
	in.mu.Unlock()
	abandon()
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
}

// Close stops to catch, and to follow the guard.
func (in *Inbox) Close() {
	signal.Stop(in.direct)
	close(in.direct)
	in.wg.Wait()
	if in.link != nil {
		in.link.Close()
	}
}
