package hang

import "time"

// asker numbers the questions to the nodes, bounds how often they are asked, and knows the awaited answers.
type asker struct {
	seq     uint64    // of the newest Ask
	room    bucket    // of Asks that cost the nodes something
	ask     Ask       // that answers are awaited for
	until   time.Time // when they are late
	collect collection
}

// collection is a user's request for stacks.
type collection struct {
	ask     Ask
	at      time.Time
	until   time.Time // zero: it has ended
	missing int
}

// complete takes one answer, and reports whether it was the last.
func (k *collection) complete() bool {
	k.missing--
	return k.missing == 0
}

// number is the next one, of an Ask or a file.
func (a *asker) number() uint64 {
	a.seq++
	return a.seq
}

// wants reports whether the answer of a node to an Ask is of use to a file; d is all that the node has answered.
func (a *asker) wants(ask, file uint64, d *nodeReport) bool {
	switch {
	case ask == 0:
		return false
	case ask == a.ask.Seq:
		return !d.answered
	case ask == a.collect.ask.Seq:
		return !d.collected
	}
	return file < ask && ask <= a.seq && d.evidence.empty()
}

// pending is the Ask that a node has not answered. asking: it need not be of a collection.
func (a *asker) pending(asking bool, d *nodeReport) Ask {
	switch {
	case asking && !d.answered:
		return a.ask
	case !a.collect.until.IsZero() && !d.collected:
		return a.collect.ask
	}
	return Ask{}
}

// bucket bounds how often the nodes are asked: maxAsks in a row, then one every askEvery.
type bucket struct {
	left int
	at   time.Time // up to which refills are booked
}

func (b *bucket) take(now time.Time) bool {
	if b.left == maxAsks {
		b.at = now
	}
	if n := int(now.Sub(b.at) / askEvery); n > 0 {
		b.left, b.at = min(b.left+n, maxAsks), b.at.Add(time.Duration(n)*askEvery)
	}
	if b.left == 0 {
		return false
	}
	b.left--
	return true
}

// next is when there is room again, which is not now.
func (b *bucket) next(now time.Time) time.Time { return later(b.at.Add(askEvery), now) }
