package hang

import (
	"fmt"
	"strings"
	"time"
)

// clipRanks leaves the first ranks of a text such as 0-1,3, in so many bytes.
func clipRanks(ranks string, room int) string {
	if len(ranks) <= room {
		return ranks
	}
	return ranks[:max(strings.LastIndexByte(ranks[:room+1], ','), 0)]
}

// maxLine bounds a Line that is sent, in bytes: a notice has 4 KiB.
const maxLine = 1 << 10

// bucket bounds how often the nodes are asked: maxAsks in a row, then one every askEvery.
type bucket struct {
	left int
	at   time.Time // up to which refills are booked
}

func (b *bucket) take(now time.Time) bool {
	if b.at.IsZero() || b.left == maxAsks {
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

// progress decides whether restarts help.
type progress struct {
	count int // restarts for hangs without progress between them
	best  achievement
}

// achievement is the progress of a run. Steps count from the start of the workers, which is the newest checkpoint's if
// one is known; so they are compared only while that is the same. If none is known, the user may have some: fewer steps
// are no progress in the same place only, and not after a long time.
type achievement struct {
	saved int64 // newest checkpoint
	known bool  // there is one
	steps uint64
	long  bool   // there was time for much
	where string // the suspects, and their operation
}

// fruitless is how many restarts there were without progress, if the run is as far as now.
func (p *progress) fruitless(now achievement) int {
	if p.count == 0 || now.beyond(p.best) {
		return 0
	}
	return p.count
}

func (p *progress) restarted(now achievement) {
	if p.count = p.fruitless(now) + 1; p.count == 1 {
		p.best = now
	}
}

func (a achievement) beyond(b achievement) bool {
	switch {
	case a.known && (!b.known || a.saved > b.saved):
		return true
	case a.known:
		return a.steps > b.steps
	case a.steps > 0 && a.where == b.where:
		return a.steps > b.steps || a.long && a.steps != b.steps
	}
	return a.steps > 0 || a.long
}

// achieved is the progress of the present epoch.
func (c *Incident) achieved() (a achievement) {
	if c.cfg.Saved != nil {
		a.saved, a.known = c.cfg.Saved()
	}
	a.steps, a.where = c.steps, c.file.verdict.where()
	a.long = (c.steps > 0 || !c.file.paged()) && c.file.since.Sub(c.beganAt) >= longEpoch
	return a
}

// where names the ranks, and the lines in which they hang.
func (v *Verdict) where() (text string) {
	for _, s := range v.Suspects {
		text += fmt.Sprintf(" %d:%s:%s:%d", s.Rank, s.Where.File, s.Where.Func, s.Where.Line)
	}
	return text
}

// paged reports whether some worker has a page.
func (f *file) paged() bool {
	for e := range f.all() {
		if newestPage(&e) != nil {
			return true
		}
	}
	return false
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// reached reports whether the moment has passed; the zero time never does.
func reached(at, now time.Time) bool { return !at.IsZero() && !now.Before(at) }

func seconds(d time.Duration) string {
	return fmt.Sprintf("%d s", max(d, 0).Round(time.Second)/time.Second)
}
