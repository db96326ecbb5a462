package slow

import (
	"cmp"
	"time"

	"dlrover-run/hang"
	"dlrover-run/internal/stable"
)

const computing = "computing" // Slowed.Doing

// Times of Drains.
const (
	lasting   = 5 * time.Minute // for which ranks slow the job before their node leaves: the restart costs less
	nextTry   = time.Minute     // until a node that could not leave may do so
	nextDrain = time.Hour       // until another node leaves
)

// Drains decides which node leaves because its ranks slow the job: one at a time, and one an hour. The zero value is of
// a run that no node has left.
type Drains struct {
	next time.Time
}

// Next returns the nodes that may leave now, the slowest first. One of them should; mostly there are none.
func (d *Drains) Next(now time.Time, j *Judge) (list []hang.Drain) {
	if now.Before(d.next) {
		return nil
	}
	nodes := len(j.world.Nodes)
	for i := range j.found {
		f := &j.found[i]
		if f.missed > 0 || now.Sub(f.Since) < lasting || !f.byNode() {
			continue
		}
		least := nodes
		if f.Share*float64(nodes) > 1 { // the others do more in a time without it
			least--
		}
		list = append(list, hang.Drain{Slowed: f.Slowed, Epoch: j.world.Epoch, Least: least})
	}
	if len(list) > 0 {
		d.next = now.Add(nextTry)
	}
	stable.Sort(list, func(a, b hang.Drain) int { return -cmp.Compare(a.Share, b.Share) })
	return list
}

// Left notes that one of them leaves.
func (d *Drains) Left(now time.Time) { d.next = now.Add(nextDrain) }

// byNode reports whether the node may be the cause. A rank alone that loads data or sleeps is slow because of its part
// of the data, or of the program, more often.
func (f *finding) byNode() bool { return f.Doing == computing || f.All }
