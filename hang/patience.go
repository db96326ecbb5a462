package hang

import (
	"cmp"
	"time"
)

// patience decides how long a verdict waits until it is reported, and until it is acted upon. Moments of progress are
// those of Incident.lastProgress.
type patience struct {
	after   time.Duration // Spec.After
	longest time.Duration // without progress, after which the run has resumed by itself
}

func (p *patience) paused(d time.Duration) { p.longest = max(p.longest, min(d, longestPause)) }

// soon is a pause before a report, or less where the user wants reports within less than steadyTime.
func (p *patience) soon(pause time.Duration) time.Duration {
	if p.after > 0 {
		return min(pause, p.after/4)
	}
	return pause
}

// dueAt is when the verdict of f may be reported. If these suspects, or enough others, were reported, it is when it
// may be acted upon. newest is the newest verdict that was told.
func (p *patience) dueAt(f *file, newest *Told, progress time.Time) time.Time {
	act := p.actAt(&f.verdict, progress)
	switch {
	case f.told > 0 && sameSuspects(newest.Verdict, f.verdict):
		return later(act, p.actAt(&newest.Verdict, progress)) // their earlier symptoms may recur
	case f.told >= maxRetold:
		return act
	}
	tell := progress.Add(f.verdict.tell())
	if steady := p.steadyAt(f, progress); steady.Before(tell) {
		tell = steady
	}
	return later(f.began.Add(f.wait), tell)
}

// steadyAt is when an unchanged finding is reported, even if it may last longer: the run has never progressed after
// so long a pause. A phase with a name has its own time.
func (p *patience) steadyAt(f *file, progress time.Time) time.Time {
	if f.verdict.Phase.lasting() {
		return progress.Add(f.verdict.Deadline)
	}
	steady := max(steadyTime, p.longest)
	if p.after > 0 && p.after < steadyTime {
		steady = p.after
	}
	return later(progress.Add(steady), f.foundAt.Add(p.soon(firstWait)))
}

// actAt is when v may be acted upon. A rank that does nothing may still go on; that is the likelier the longer this
// run has paused before.
func (p *patience) actAt(v *Verdict, progress time.Time) time.Time {
	if v.Certain {
		return progress.Add(v.Deadline)
	}
	wait := max(v.Deadline, cmp.Or(p.after, actLate), 3*p.longest)
	if v.Confidence == Low {
		wait = max(wait, lowWait)
	}
	return progress.Add(wait)
}

// early reports whether it is sooner than v asks for, and the user.
func (p *patience) early(v *Verdict, progress, now time.Time) bool {
	return now.Before(progress.Add(min(v.tell(), cmp.Or(p.after, v.tell()))))
}

// nextLook is when the evidence is asked for again, in StateWaiting.
type nextLook struct {
	at    time.Time
	due   time.Time     // when the verdict may be confirmed
	pause time.Duration // before the next one
}

// plan chooses the next look: when the verdict may be reported or acted upon, or when the situation may have changed.
// due is zero for a verdict that is not decisive.
func (l *nextLook) plan(now, due time.Time) {
	l.at, l.due = now.Add(l.pause), due
	if !due.IsZero() {
		ready := due
		if ready.Sub(now) > freshTime {
			ready = ready.Add(-lookAhead)
		}
		if ready.Before(l.at) {
			l.at = ready
			return
		}
	}
	l.pause = min(2*l.pause, longestWait)
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// reached reports whether the moment has passed; the zero time never does.
func reached(at, now time.Time) bool { return !at.IsZero() && !now.Before(at) }
