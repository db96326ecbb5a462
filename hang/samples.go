package hang

import (
	"slices"
	"strings"
	"time"
)

// clockTick is the unit of Worker.Start.
const clockTick = 10 * time.Millisecond

// usage is the use of resources from the first sample of a process to the last, each per second.
type usage struct {
	cpu, mainCPU, io float64 // with its descendants, but for mainCPU; cores, cores, bytes
	wants            float64 // cores that the main thread had or would have had if others had not
	switches         uint64  // in all
	span             time.Duration
}

func useBetween(a, b Sample) usage {
	span := (b.At - a.At).Seconds()
	if span <= 0 || a.PID != b.PID || a.Start != b.Start {
		return usage{}
	}
	cpu := grown(a.Proc.CPU, b.Proc.CPU) + grown(a.Proc.TreeCPU, b.Proc.TreeCPU)
	io := grown(a.Proc.IO, b.Proc.IO) + grown(a.Proc.TreeIO, b.Proc.TreeIO)
	return usage{
		cpu: cpu.Seconds() / span, mainCPU: grown(a.Proc.MainCPU, b.Proc.MainCPU).Seconds() / span,
		wants: (grown(a.Proc.MainCPU, b.Proc.MainCPU) + grown(a.Proc.MainWait, b.Proc.MainWait)).Seconds() / span,
		io:    float64(io) / span, switches: grown(a.Proc.Switches, b.Proc.Switches), span: b.At - a.At,
	}
}

// grown is the growth of a count; the use by descendants may shrink when one of them ends.
func grown[T ~int64 | ~uint64](a, b T) T {
	if b < a {
		return 0
	}
	return b - a
}

func (u usage) busy() bool { return u.cpu >= busyCPU || u.io >= busyIO }

// allIn reports whether the process was in one of these states in every sample, or in the last one, if it has ended.
func allIn(samples []Sample, states string) bool {
	in := func(s Sample) bool { return strings.IndexByte(states, s.Proc.State) >= 0 }
	if strings.IndexByte(states, 'Z') >= 0 {
		return in(samples[len(samples)-1])
	}
	return !slices.ContainsFunc(samples, func(s Sample) bool { return !in(s) })
}

// advanced reports progress from one page to another: a step, or a collective.
func advanced(a, b *Page) bool {
	if a == nil || b == nil || a.PID != b.PID || a.Start != b.Start {
		return false
	}
	if b.Steps != a.Steps {
		return true
	}
	return slices.ContainsFunc(b.Groups, func(g GroupState) bool {
		before, ok := a.Group(g.ID)
		return !ok || before.Seq != g.Seq
	})
}

// rested reports whether the main thread was not at work between two looks. It may have woken up, as a poll every few
// seconds does. Of looks at different threads nothing is known.
func rested(a, b Sample) bool {
	if a.Proc.Thread != b.Proc.Thread {
		return true
	}
	span := b.At - a.At
	return grown(a.Proc.Switches, b.Proc.Switches) <= 2+uint64(span/(2*time.Second)) &&
		grown(a.Proc.MainCPU, b.Proc.MainCPU) <= clockTick+span/200
}

// stirred reports whether the main thread was at rest between two samples, and later it was not.
func stirred(samples []Sample) bool {
	at := -1
	for i := 1; i < len(samples); i++ {
		rest := rested(samples[i-1], samples[i])
		if at >= 0 && !rest {
			return true
		}
		if rest {
			at = i
		}
	}
	return false
}

// settled reports whether the main thread was at work when its stack was read, and then came to rest. Only another
// look shows where.
func settled(samples []Sample) bool {
	n := len(samples)
	return n > 2 && !rested(samples[0], samples[1]) && rested(samples[n-2], samples[n-1])
}

// Progressed reports whether a worker has made progress from the first sample to the second: a step or a collective,
// or without pages work of its main thread. Another process in its place has made progress.
func Progressed(a, b Sample) bool {
	switch {
	case a.PID != b.PID || a.Start != b.Start:
		return true
	case a.Page == nil || b.Page == nil:
		return !rested(a, b)
	}
	return advanced(a.Page, b.Page)
}

// gaps are the times between events.
func gaps(events []time.Duration) []time.Duration {
	if len(events) < 2 {
		return nil
	}
	gs := make([]time.Duration, len(events)-1)
	for i := range gs {
		gs[i] = events[i+1] - events[i]
	}
	return gs
}

// quantile99 is 0 of nothing.
func quantile99(ds []time.Duration) time.Duration {
	if len(ds) == 0 {
		return 0
	}
	sorted := slices.Clone(ds)
	slices.Sort(sorted)
	return sorted[(len(sorted)*99+99)/100-1]
}

// stateNames are the names in /proc/PID/status, each behind its letter.
var stateNames = [...]string{
	"Rrunning", "Ssleeping", "Ddisk sleep", "Tstopped", "ttracing stop", "Zzombie", "Xdead", "Iidle", "Pparked",
}

// StateName writes a state of a process as /proc/PID/status does: S (sleeping).
func StateName(state byte) string {
	if state == 0 {
		return "gone"
	}
	for _, name := range stateNames {
		if name[0] == state {
			return name[:1] + " (" + name[1:] + ")"
		}
	}
	return strings.ToValidUTF8(string(rune(state)), "?")
}
