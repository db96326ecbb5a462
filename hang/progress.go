package hang

import (
	"fmt"
	"hash/fnv"
	"time"
)

// progress is how far a run has come, and decides whether restarts help.
type progress struct {
	began time.Time // the present epoch
	steps uint64    // the most that a worker of it is known to have made
	count int       // restarts for hangs without progress between them
	best  achievement
}

func (p *progress) begin(now time.Time) { p.began, p.steps = now, 0 }

func (p *progress) made(steps uint64) { p.steps = max(p.steps, steps) }

// achievement is the progress of a run. Steps count from the start of the workers, which is the newest checkpoint's if
// one is known; so they are compared only while that is the same. If none is known, the user may have some: fewer steps
// are no progress in the same place only, and not after a long time.
type achievement struct {
	saved int64 // newest checkpoint
	known bool  // there is one
	steps uint64
	long  bool   // there was time for much
	where string // a digest of the suspects, and their operation
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

// achieved is the progress of the present epoch, which hangs as f has it.
func (p *progress) achieved(f *file) achievement {
	long := f.since.Sub(p.began) >= longEpoch && (p.steps > 0 || !f.paged())
	return achievement{steps: p.steps, where: f.verdict.where(), long: long}
}

// action returns the action for a hang, and the reason if it is not the wanted one.
func (p *progress) action(wanted Action, now achievement) (a Action, why string) {
	if wanted == ActRestart && p.fruitless(now) >= maxFruitless {
		return ActStop, fmt.Sprintf("%d restarts for hangs have brought no newer step", maxFruitless)
	}
	return wanted, ""
}

// where is a digest of the ranks, and of the lines in which they hang.
func (v *Verdict) where() string {
	h := fnv.New64a()
	for _, s := range v.Suspects {
		fmt.Fprintf(h, " %d:%s:%s:%d", s.Rank, s.Where.File, s.Where.Func, s.Where.Line)
	}
	return fmt.Sprintf("%x", h.Sum64())
}

// paged reports whether some worker has a page.
func (f *file) paged() bool {
	for e := range f.all() {
		if e.Page() != nil {
			return true
		}
	}
	return false
}
