package hang

// The least work in one look of a worker without progress. It is far below the threshold of a busy worker, but above
// the background work of libraries: keepalives, logs, metrics.
const (
	leastBytes = 4 << 10 // a second
	leastCPU   = 0.05    // of a core, by descendants
	leastWakes = 3       // times that the main thread has got a CPU
	busyLooks  = 32      // more than half of them are forgotten
	busyOften  = 4       // one of so many looks must show it
	wakeOften  = 16      // or that the main thread wakes up
)

// busyWork counts in how many looks a worker was seen at work while it made no progress. A single event, as the dump of
// a flight recorder that we have asked for, is none.
type busyWork struct{ looks, wakes, io, net, child int }

func (w *busyWork) see(a, b Sample, works bool) {
	span := (b.At - a.At).Seconds()
	switch {
	case works:
		*w = busyWork{}
		return
	case span <= 0:
		return
	case w.looks >= busyLooks:
		*w = busyWork{w.looks / 2, w.wakes / 2, w.io / 2, w.net / 2, w.child / 2}
	}
	w.looks++
	many := func(bytes uint64) int { return count(float64(bytes)/span >= leastBytes) }
	io := grown(a.Proc.IO, b.Proc.IO)
	child := grown(a.Proc.TreeCPU, b.Proc.TreeCPU) - grown(a.Proc.CPU, b.Proc.CPU)
	w.wakes += count(grown(a.Proc.Switches, b.Proc.Switches) >= leastWakes)
	w.io += many(io)
	w.net += many(grown(a.Proc.Net, b.Proc.Net))
	w.child += max(many(grown(io, grown(a.Proc.TreeIO, b.Proc.TreeIO))), count(child.Seconds()/span >= leastCPU))
}

func count(is bool) int {
	if is {
		return 1
	}
	return 0
}

// work is the work that was seen often enough; the first with the most looks.
func (w *busyWork) work() Work {
	often := func(n int) bool { return n > 0 && n*busyOften >= w.looks }
	switch {
	case often(w.child):
		return workChild
	case often(w.net):
		return workNet
	case often(w.io):
		return workIO
	case w.wakes > 1 && w.wakes*wakeOften >= w.looks:
		return workWakes
	}
	return workNone
}

// busy work is done by the worker, or for it. One that only wakes up may be at nothing.
func (w Work) busy() bool { return w == workIO || w == workNet || w == workChild }
