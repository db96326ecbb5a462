package api

import (
	"context"
	"strings"
	"sync"
	"time"

	"dlrover-run/rendezvous"
)

// What the timelines keep.
const (
	maxEvents = 1000 // notes of one run
	maxEnded  = 16   // epochs of one run whose evidence is kept
	maxLine   = 1 << 20
	maxLines  = 256 << 20 // of all runs; some 64 KiB of the oldest go at once when it is full
	evictStep = 64 << 10
	maxText   = 8 << 10   // of one note or failure, in bytes
	maxDetail = 64 << 10  // of one failure
	maxProof  = 256 << 10 // of the evidence of one epoch
)

// Event is a note of a run in its timeline.
type Event struct {
	// Seq grows by one with every event of a run, and by more from one daemon to the next.
	Seq uint64    `json:"seq"`
	At  time.Time `json:"at"`
	rendezvous.Note
}

// Events is a part of a timeline.
type Events struct {
	Events []Event `json:"events"`
	// Next is the number after which to ask for more.
	Next uint64 `json:"next"`
	// Dropped: there were others between the number that was asked for and these.
	Dropped bool `json:"dropped"`
}

// archive keeps the timelines of all runs below one limit. Its lock is the last that is taken, and it is held for the
// copying of a few kilobytes at most.
type archive struct {
	limit int
	mu    sync.Mutex
	used  int
	lines map[*timeline]struct{}
}

// timeline is what a run remembers of itself. Nothing is encoded before somebody asks.
type timeline struct {
	of     *archive
	base   uint64 // every sequence number is larger
	seq    uint64
	events ring[Event]
	ended  ring[endedAt]
	size   int
	news   chan struct{} // closed with the next event; nil while nobody waits
	closed error
}

type endedAt struct {
	at time.Time
	rendezvous.EpochEvidence
}

func newArchive(limit int) *archive { return &archive{limit: limit, lines: map[*timeline]struct{}{}} }

// open returns the timeline of a new run, whose numbers begin after base.
func (a *archive) open(base uint64) *timeline {
	t := &timeline{of: a, base: base, seq: base}
	t.events.limit, t.ended.limit = maxEvents, maxEnded
	a.mu.Lock()
	defer a.mu.Unlock()
	a.lines[t] = struct{}{}
	return t
}

// note appends a note.
func (t *timeline) note(now time.Time, n rendezvous.Note) {
	n.Members = nil
	n.Text = clip(n.Text, maxText)
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	if t.closed != nil {
		return
	}
	t.seq++
	e := Event{Seq: t.seq, At: now.Round(0).UTC(), Note: n}
	if old, full := t.events.push(e); full {
		t.grow(-old.size())
	}
	t.grow(e.size())
	if t.news != nil {
		close(t.news)
		t.news = nil
	}
}

// end appends the evidence of an epoch.
func (t *timeline) end(now time.Time, e rendezvous.EpochEvidence) {
	kept := endedAt{now.Round(0).UTC(), bounded(e)}
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	if t.closed != nil {
		return
	}
	if old, full := t.ended.push(kept); full {
		t.grow(-old.size())
	}
	t.grow(kept.size())
}

// grow books n bytes and drops the oldest until they fit.
func (t *timeline) grow(n int) {
	t.size += n
	t.of.used += n
	for t.size > maxLine {
		t.dropOldest()
	}
	for t.of.used > t.of.limit {
		t.of.evict()
	}
}

// evict drops a piece of the timeline that goes back the farthest.
func (a *archive) evict() {
	var oldest *timeline
	for t := range a.lines {
		if t.size > 0 && (oldest == nil || t.oldest().Before(oldest.oldest())) {
			oldest = t
		}
	}
	for goal := oldest.size - evictStep; oldest.size > max(goal, 0); {
		oldest.dropOldest()
	}
	oldest.events.trim()
}

// oldest is the time of the first thing in a timeline that is not empty.
func (t *timeline) oldest() time.Time {
	if t.eventIsOldest() {
		return t.events.at(0).At
	}
	return t.ended.at(0).at
}

func (t *timeline) eventIsOldest() bool {
	return t.ended.count == 0 || t.events.count > 0 && !t.events.at(0).At.After(t.ended.at(0).at)
}

func (t *timeline) dropOldest() {
	var freed int
	if t.eventIsOldest() {
		freed = t.events.pop().size()
	} else {
		freed = t.ended.pop().size()
	}
	t.size -= freed
	t.of.used -= freed
}

// close forgets everything and ends whatever waits for news, with err.
func (t *timeline) close(err error) {
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	if t.closed != nil {
		return
	}
	t.closed = err
	t.of.used -= t.size
	delete(t.of.lines, t)
	t.events, t.ended, t.size = ring[Event]{}, ring[endedAt]{}, 0
	if t.news != nil {
		close(t.news)
	}
}

// since returns the events after the given one, or a channel that closes with the next. 0 is before all, and so is a
// number of the future, which is that of a daemon whose clock was ahead of ours.
func (t *timeline) since(after uint64) (Events, <-chan struct{}, error) {
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	if t.closed != nil {
		return Events{}, nil, t.closed
	}
	foreign := after != 0 && after < t.base || after > t.seq
	if after < t.base || after > t.seq {
		after = t.base
	}
	first := t.seq - uint64(t.events.count) // the newest event that is not here
	out := Events{Next: t.seq, Dropped: foreign || after < first}
	if out.Events = t.events.from(int(max(after, first) - first)); out.Events != nil {
		return out, nil, nil
	}
	if t.news == nil {
		t.news = make(chan struct{})
	}
	return out, t.news, nil
}

func (t *timeline) evidences() []rendezvous.EpochEvidence {
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	out := make([]rendezvous.EpochEvidence, 0, t.ended.count)
	for i := range t.ended.count {
		out = append(out, t.ended.at(i).EpochEvidence)
	}
	return out
}

// The room of an item without its texts, with that of a ring that has just grown.
const (
	eventSize = 320
	proofSize = 512
	lineSize  = 192 // of a failure or loss
)

func (e Event) size() int { return eventSize + len(e.Event) + len(e.Node) + len(e.Text) }

func (e endedAt) size() int {
	n := proofSize
	if e.Cause != nil {
		n += len(e.Cause.Node) + len(e.Cause.Text)
	}
	for _, f := range e.Failures {
		n += lineSize + len(f.Text) + len(f.Detail)
	}
	for _, l := range e.Losses {
		n += lineSize + len(l.Node) + len(l.Reason)
	}
	return n
}

// bounded cuts evidence to maxProof: texts that are far too long, and then the latest failures and losses.
func bounded(e rendezvous.EpochEvidence) rendezvous.EpochEvidence {
	if e.Cause != nil {
		c := *e.Cause
		c.Text = clip(c.Text, maxText)
		e.Cause = &c
	}
	left := maxProof - proofSize
	e.Failures = fitting(e.Failures, &left, func(f rendezvous.Failure) (rendezvous.Failure, int) {
		f.Text = clip(f.Text, maxText)
		if len(f.Detail) > maxDetail {
			f.Detail = nil
		}
		return f, lineSize + len(f.Text) + len(f.Detail)
	})
	e.Losses = fitting(e.Losses, &left, func(l rendezvous.Loss) (rendezvous.Loss, int) {
		l.Reason = clip(l.Reason, maxText)
		return l, lineSize + len(l.Node) + len(l.Reason)
	})
	return e
}

// fitting copies as many items as fit into what is left, each cut to its own limits.
func fitting[T any](items []T, left *int, cut func(T) (T, int)) []T {
	var out []T
	for _, item := range items {
		item, size := cut(item)
		if size > *left {
			break
		}
		*left -= size
		out = append(out, item)
	}
	return out
}

// clip shortens a text to about limit bytes, in memory of its own so that the rest can be freed.
func clip(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + " …"
}

// Events waits for events of a run after the given one (Events.Next); 0 is before all. It returns ErrNothingNew when it
// has waited for 20 seconds, ErrUnknownRun, and ErrClosed.
func (h *Hub) Events(ctx context.Context, id string, after uint64) (Events, error) {
	r, err := h.existing(id)
	if err != nil {
		return Events{}, err
	}
	expired := time.NewTimer(hold(0))
	defer expired.Stop()
	for {
		out, news, err := r.line.since(after)
		if err != nil || news == nil {
			return out, err
		}
		select {
		case <-news:
		case <-expired.C:
			return Events{}, ErrNothingNew
		case <-ctx.Done():
			return Events{}, context.Cause(ctx)
		}
	}
}

// Evidences is what is known about the ends of the last 16 epochs of a run, the newest last. The caller must not write
// to what it refers to.
func (h *Hub) Evidences(id string) ([]rendezvous.EpochEvidence, error) {
	r, err := h.existing(id)
	if err != nil {
		return nil, err
	}
	return r.line.evidences(), nil
}
