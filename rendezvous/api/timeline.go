package api

import (
	"context"
	"errors"
	"slices"
	"sort"
	"sync"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous"
)

// Limits of the timelines.
const (
	maxEvents = 1000 // notes of one run
	maxEnded  = 16   // epochs of one run with kept evidence
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

// timeline is the history of a run. Nothing is encoded before it is requested. When it is full, no source of events
// displaces those of others: a node that floods it loses its own oldest, and else the kind of events, or the evidence,
// that takes the most loses its oldest.
type timeline struct {
	of      *archive
	base    uint64 // every sequence number is larger
	seq     uint64
	lost    uint64 // of the newest event that is not here any more, or base
	events  ring[Event]
	ended   ring[Proof]
	proofs  uint64 // how many there have been
	size    int
	sources []source
	news    chan struct{} // closed with the next event; nil while no request waits
	closed  error
}

// source is a kind of events, of which there are some dozens, or evidence, which has no name.
type source struct {
	event job.Event
	bytes int
}

// A node floods a timeline if half of the last floodOf events are its own.
const floodOf = 64

// Proof is the evidence about the end of an epoch.
type Proof struct {
	N  uint64    `json:"n"` // grows by one with every one of a run
	At time.Time `json:"at"`
	rendezvous.EpochEvidence
}

func newArchive(limit int) *archive { return &archive{limit: limit, lines: map[*timeline]struct{}{}} }

// open returns the timeline of a new run, with numbers that begin after base.
func (a *archive) open(base uint64) *timeline {
	t := &timeline{of: a, base: base, seq: base, lost: base}
	t.events.limit, t.ended.limit = maxEvents, maxEnded
	a.mu.Lock()
	defer a.mu.Unlock()
	a.lines[t] = struct{}{}
	return t
}

// note appends a note.
func (t *timeline) note(now time.Time, n rendezvous.Note) {
	n.Members = nil
	n.Text = text.Head(n.Text, maxText)
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	if t.closed != nil {
		return
	}
	t.seq++
	if t.events.count == t.events.limit {
		t.dropFor(n.Node, t.heaviest(false))
	}
	e := Event{Seq: t.seq, At: now.Round(0).UTC(), Note: n}
	t.events.push(e)
	t.grow(e.Event, n.Node, e.size())
	if t.news != nil {
		close(t.news)
		t.news = nil
	}
}

// end appends the evidence of an epoch.
func (t *timeline) end(now time.Time, e rendezvous.EpochEvidence) {
	kept := Proof{At: now.Round(0).UTC(), EpochEvidence: bounded(e)}
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	if t.closed != nil {
		return
	}
	t.proofs++
	kept.N = t.proofs
	if old, full := t.ended.push(kept); full {
		t.book("", -old.size())
	}
	t.grow("", "", kept.size())
}

// grow books n bytes of a source and drops others until they fit.
func (t *timeline) grow(event job.Event, node string, n int) {
	t.book(event, n)
	for t.size > maxLine {
		t.dropFor(node, t.heaviest(true))
	}
	for t.of.used > t.of.limit {
		t.of.evict()
	}
}

func (t *timeline) book(event job.Event, n int) {
	t.size += n
	t.of.used += n
	i := slices.IndexFunc(t.sources, func(s source) bool { return s.event == event })
	if i < 0 {
		i = len(t.sources)
		t.sources = append(t.sources, source{event: event})
	}
	t.sources[i].bytes += n
}

// heaviest is the source that takes the most, of all or of events.
func (t *timeline) heaviest(evidence bool) job.Event {
	var most source
	for _, s := range t.sources {
		if s.bytes > most.bytes && (evidence || s.event != "") {
			most = s
		}
	}
	return most.event
}

// dropFor makes room for news of a node: the oldest of its own events if it floods, else the oldest of a source.
func (t *timeline) dropFor(node string, event job.Event) {
	floods := t.floods(node)
	if event == "" && !floods {
		t.book("", -t.ended.pop().size())
		return
	}
	i := 0
	for e := t.events.at(0); floods && e.Node != node || !floods && e.Event != event; e = t.events.at(i) {
		i++
	}
	t.dropped(t.events.remove(i))
}

func (t *timeline) floods(node string) bool {
	return node != "" && t.recent(node, 4) > 0 && t.recent(node, floodOf) >= floodOf/2
}

// recent is how many of the last n events are a node's.
func (t *timeline) recent(node string, n int) (own int) {
	for i := max(t.events.count-n, 0); i < t.events.count; i++ {
		if t.events.at(i).Node == node {
			own++
		}
	}
	return own
}

func (t *timeline) dropped(e Event) {
	t.lost = max(t.lost, e.Seq)
	t.book(e.Event, -e.size())
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
	return t.ended.at(0).At
}

func (t *timeline) eventIsOldest() bool {
	return t.ended.count == 0 || t.events.count > 0 && !t.events.at(0).At.After(t.ended.at(0).At)
}

func (t *timeline) dropOldest() {
	if t.eventIsOldest() {
		t.dropped(t.events.pop())
	} else {
		t.book("", -t.ended.pop().size())
	}
}

// close forgets everything that nobody may read any more, and ends the waits for news, with err.
func (t *timeline) close(err error) {
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	if t.closed != nil {
		return
	}
	t.closed = err
	t.of.used -= t.size
	delete(t.of.lines, t)
	if !errors.Is(err, ErrClosed) { // a Keeper may still read the lines of a closed Hub
		t.events, t.ended, t.sources, t.size = ring[Event]{}, ring[Proof]{}, nil, 0
	}
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
	out := Events{Next: t.seq, Dropped: foreign || after < t.lost}
	if out.Events = t.events.from(t.first(after)); out.Events != nil {
		return out, nil, nil
	}
	if t.news == nil {
		t.news = make(chan struct{})
	}
	return out, t.news, nil
}

// first is the index of the first event after another one.
func (t *timeline) first(after uint64) int {
	return sort.Search(t.events.count, func(i int) bool { return t.events.at(i).Seq > after })
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

func (e Proof) size() int {
	n := proofSize
	if e.Cause != nil {
		n += len(e.Cause.Node) + len(e.Cause.Text)
	}
	for _, f := range e.Failures {
		n += lineSize + len(f.Text) + len(f.Detail)
	}
	for _, l := range e.Losses {
		n += lineSize + len(l.Node) + len(l.Reason) + len(l.Switch)
	}
	return n
}

// bounded cuts evidence to maxProof: texts that are far too long, and then the latest failures and losses.
func bounded(e rendezvous.EpochEvidence) rendezvous.EpochEvidence {
	if e.Cause != nil {
		c := *e.Cause
		c.Text = text.Head(c.Text, maxText)
		e.Cause = &c
	}
	left := maxProof - proofSize
	e.Failures = fitting(e.Failures, &left, func(f job.Failure) (job.Failure, int) {
		f.Text, f.Fingerprint = text.Head(f.Text, maxText), ""
		if len(f.Detail) > maxDetail {
			f.Detail = nil
		}
		return f, lineSize + len(f.Text) + len(f.Detail)
	})
	e.Losses = fitting(e.Losses, &left, func(l job.Loss) (job.Loss, int) {
		l.Reason = text.Head(l.Reason, maxText)
		return l, lineSize + len(l.Node) + len(l.Reason) + len(l.Switch)
	})
	return e
}

// fitting copies as many items as fit into the rest, each cut to its own limits.
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

// Evidences is the evidence about the ends of the last 16 epochs of a run, newest last. The caller must not write to
// the data that it refers to.
func (h *Hub) Evidences(id string) ([]rendezvous.EpochEvidence, error) {
	r, err := h.existing(id)
	if err != nil {
		return nil, err
	}
	return r.line.evidences(), nil
}
