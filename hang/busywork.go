package hang

// The least work in one look of a worker without progress. It is far below the threshold of a busy worker, but above
// the background work of libraries: keepalives, logs, metrics.
const (
	toilBytes = 4 << 10 // a second
	toilCPU   = 0.05    // of a core, by descendants
	toilWakes = 3       // times that the main thread has got a CPU
	toilLooks = 32      // more than half of them are forgotten
	toilOften = 4       // one of so many looks must show it
	wakeOften = 16      // or that the main thread wakes up
)

// toil counts in how many looks a worker was seen at work while it made no progress. A single event, as the dump of a
// flight recorder that we have asked for, is none.
type toil struct{ looks, wakes, io, net, child int }

func (t *toil) see(a, b Sample, works bool) {
	span := (b.At - a.At).Seconds()
	switch {
	case works:
		*t = toil{}
		return
	case span <= 0:
		return
	case t.looks >= toilLooks:
		*t = toil{t.looks / 2, t.wakes / 2, t.io / 2, t.net / 2, t.child / 2}
	}
	t.looks++
	many := func(bytes uint64) int { return count(float64(bytes)/span >= toilBytes) }
	io := grown(a.Proc.IO, b.Proc.IO)
	child := grown(a.Proc.TreeCPU, b.Proc.TreeCPU) - grown(a.Proc.CPU, b.Proc.CPU)
	t.wakes += count(grown(a.Proc.Switches, b.Proc.Switches) >= toilWakes)
	t.io += many(io)
	t.net += many(grown(a.Proc.Net, b.Proc.Net))
	t.child += max(many(grown(io, grown(a.Proc.TreeIO, b.Proc.TreeIO))), count(child.Seconds()/span >= toilCPU))
}

func count(is bool) int {
	if is {
		return 1
	}
	return 0
}

// work is the work that was seen often enough; the first with the most looks.
func (t *toil) work() Work {
	often := func(n int) bool { return n > 0 && n*toilOften >= t.looks }
	switch {
	case often(t.child):
		return workChild
	case often(t.net):
		return workNet
	case often(t.io):
		return workIO
	case t.wakes > 1 && t.wakes*wakeOften >= t.looks:
		return workWakes
	}
	return workNone
}

// busy work is done by the worker, or for it. One that only wakes up may be at nothing.
func (w Work) busy() bool { return w == workIO || w == workNet || w == workChild }
