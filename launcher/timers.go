package launcher

import (
	"fmt"
	"log/slog"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/launcher/filetimer"
	"dlrover-run/launcher/proc"
)

// timers are the file timers of one group's processes. They end with the group.
type timers struct {
	table   filetimer.Table
	alarm   *time.Timer // for the earliest deadline
	at      time.Time   // when it expires; zero: never
	late    bool        // it went off late and was put off once
	targets map[int]target
	others  int  // targets that are no workers
	refused bool // a request was; the next ones are not reported
}

// target is a process that a timer may kill: a worker, or one of its session.
type target struct {
	w  *worker
	fd int // pidfd; -1 for the worker itself
}

// maxOthers bounds the descriptors that are held for processes that are no workers.
const maxOthers = 256

// slack is how long after its deadline a timer expires: a release that was written in time may still be in the pipe.
// torchrun looks every 0.1 s.
const slack = 100 * time.Millisecond

// alarm is the channel of the group's next deadline; nil, which is never ready, if there is none.
func (g *group) alarm() <-chan time.Time {
	if g == nil || g.timers.alarm == nil {
		return nil
	}
	return g.timers.alarm.C
}

// onTimer starts or ends a timer. Timers of workers that are being stopped do not count any more.
func (g *group) onTimer(r filetimer.Request, log *slog.Logger) {
	switch {
	case g == nil || g.stopping:
	case r.Release:
		g.timers.table.Release(r.PID, r.Scope)
	default:
		if err := g.setTimer(r, now()); err != nil && !g.timers.refused {
			g.timers.refused = true
			log.Warn("a timer is refused; more of them are not reported", "pid", r.PID, "scope", r.Scope, "err", err)
		}
	}
}

func (g *group) setTimer(r filetimer.Request, now time.Time) error {
	if err := g.admit(r.PID); err != nil {
		return err
	}
	timer, err := g.timers.table.Set(r, now)
	if at := timer.Deadline.Add(slack); err == nil && (g.timers.at.IsZero() || at.Before(g.timers.at)) {
		g.timers.set(at, now)
	}
	return err
}

func (t *timers) set(at, now time.Time) {
	t.at = at
	if t.alarm == nil {
		t.alarm = time.NewTimer(at.Sub(now))
	} else {
		t.alarm.Reset(at.Sub(now))
	}
}

// admit finds the worker that process pid belongs to. Any process that can write to the pipe can send any number, so
// only a worker or a process of a worker's session is allowed. The pidfd keeps a later process of that number safe.
func (g *group) admit(pid int) error {
	if t, found := g.timers.targets[pid]; found && t.alive() {
		return nil
	}
	g.timers.forget(pid)
	t, err := g.find(pid)
	if err != nil {
		return err
	}
	if t.fd >= 0 && !g.timers.room() {
		unix.Close(t.fd)
		return fmt.Errorf("more than %d processes that are no workers have timers", maxOthers)
	}
	g.timers.add(pid, t)
	return nil
}

func (t *timers) add(pid int, p target) {
	if t.targets == nil {
		t.targets = map[int]target{}
	}
	if t.targets[pid] = p; p.fd >= 0 {
		t.others++
	}
}

// room makes room for one more process that is not a worker, if it can.
func (t *timers) room() bool {
	if t.others < maxOthers {
		return true
	}
	for pid, target := range t.targets {
		if !target.alive() {
			t.forget(pid)
		}
	}
	return t.others < maxOthers
}

func (g *group) find(pid int) (target, error) {
	for _, w := range g.workers {
		if w.proc.PID() == pid {
			return target{w, -1}, nil
		}
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return target{}, fmt.Errorf("process %d: %w", pid, err)
	}
	session, err := unix.Getsid(pid)
	for _, w := range g.workers {
		if err == nil && w.proc.PID() == session && (target{w, fd}).alive() {
			return target{w, fd}, nil
		}
	}
	unix.Close(fd)
	return target{}, fmt.Errorf("process %d is none of this node's workers, nor of a worker's session", pid)
}

func (t target) alive() bool { return t.signal(0) == nil }

func (t target) signal(sig syscall.Signal) error {
	if t.fd < 0 {
		return t.w.proc.SignalOnly(sig)
	}
	return unix.PidfdSendSignal(t.fd, sig, nil, 0)
}

// forget drops the records of a process that is gone.
func (t *timers) forget(pid int) {
	t.table.Drop(pid)
	if target, found := t.targets[pid]; found && target.fd >= 0 {
		unix.Close(target.fd)
		t.others--
	}
	delete(t.targets, pid)
}

// end forgets all timers.
func (t *timers) end() {
	if t.alarm != nil {
		t.alarm.Stop()
	}
	for pid := range t.targets {
		t.forget(pid)
	}
	*t = timers{}
}

// onAlarm kills the processes with expired timers, of which c's observers are notified. When the alarm itself is late,
// the launcher had no time for requests either; it takes them first.
func (t *timers) onAlarm(c *Config) {
	at := now()
	if at.Sub(t.at) > slack && !t.late {
		t.late = true
		t.set(at.Add(slack), at)
		return
	}
	for _, timer := range t.table.Expire(at.Add(-slack)) {
		t.targets[timer.PID].expire(timer, c)
		if !t.table.Runs(timer.PID) {
			t.forget(timer.PID)
		}
	}
	t.at, t.late = time.Time{}, false
	if next, ok := t.table.Next(); ok {
		t.set(next.Add(slack), at)
	}
}

func (t target) expire(timer filetimer.Timer, c *Config) {
	what := fmt.Sprintf("timer %s of %s expired", strconv.Quote(timer.Scope), rounded(timer.After))
	attrs := []any{"rank", t.w.id.Rank, "local_rank", t.w.id.LocalRank, "pid", timer.PID}
	if timer.Signal == 0 {
		c.Logger.Warn(what+"; it asks for no signal", attrs...)
		return
	}
	if err := t.signal(timer.Signal); err != nil {
		c.Logger.Debug(what+", but its process has ended", append(attrs, "err", err)...)
		return
	}
	name := proc.SignalName(timer.Signal)
	t.w.timer = what
	if t.fd >= 0 {
		t.w.timer += fmt.Sprintf(" in its process %d", timer.PID)
	}
	c.Logger.Warn(what+", sent "+name, attrs...)
	c.observe(TimerInfo{
		Worker: t.w.id, PID: timer.PID, Scope: timer.Scope, After: rounded(timer.After), Signal: timer.Signal,
	})
}

// rounded hides the time that the request was on its way.
func rounded(d time.Duration) time.Duration {
	if d < time.Second {
		return d.Round(10 * time.Millisecond)
	}
	return d.Round(100 * time.Millisecond)
}
