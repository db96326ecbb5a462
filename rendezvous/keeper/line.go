package keeper

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/lead"
)

// Bounds of the timelines in the store, in bytes. A chunk is full at fullChunk, and at most one more item larger.
const (
	fullChunk = 32 << 10
	maxItem   = 24 << 10 // of evidence
	maxChunks = 8        // of one run
	maxLines  = 4 << 20  // of all runs: a new leader reads them before it serves. Above it, the oldest chunk goes
	maxCause  = 1 << 10  // of the cause in evidence that is too large
)

// line is the timeline of a run in the store: chunks of lines of JSON. Only the newest chunk grows.
type line struct {
	base, lost   uint64 // as in api.KeptLine
	event, proof uint64 // the newest in the store
	chunks       []chunk
	newest       int    // number of the newest chunk, also if that is dropped
	open         []byte // the newest chunk
}

type chunk struct {
	n    int
	size int
	last uint64 // its newest event, or that of an earlier chunk
	at   time.Time
}

// item is one line of a chunk: the first says its kind.
type item struct {
	Version int        `json:"version,omitempty"`
	Run     string     `json:"run,omitempty"`
	Event   *api.Event `json:"event,omitempty"`
	Proof   *api.Proof `json:"proof,omitempty"`
}

func chunkKey(run string, n int) string {
	return fmt.Sprintf("%s%s%s%08d", prefix, escape(run), lineName, n)
}

// grown is l with news, and the records that make it so.
func (l line) grown(run string, news api.KeptLine) (line, []lead.Record) {
	l.chunks, l.open, l.base = append([]chunk(nil), l.chunks...), bytes.Clone(l.open), news.Base
	var changes []lead.Record
	for _, e := range news.Events {
		l.event = e.Seq
		l.add(run, item{Event: &e}.encode(), e.At, &changes)
	}
	for _, p := range news.Proofs {
		l.proof = p.N
		l.add(run, encodeProof(p), p.At, &changes)
	}
	if len(news.Events)+len(news.Proofs) > 0 {
		changes = append(changes, l.openRecord(run))
	}
	for len(l.chunks) > maxChunks {
		changes = append(changes, l.drop(run))
	}
	l.lost = max(l.lost, l.base)
	return l, changes
}

func (i item) encode() []byte {
	data, _ := json.Marshal(i) // nothing in it can fail
	return append(data, '\n')
}

// add appends an item. A chunk that is full is left as it is, among the changes.
func (l *line) add(run string, data []byte, at time.Time, changes *[]lead.Record) {
	if n := len(l.chunks); n == 0 || len(l.open)+len(data) > fullChunk {
		if n > 0 {
			*changes = append(*changes, l.openRecord(run))
		}
		l.newest++
		l.chunks, l.open = append(l.chunks, chunk{n: l.newest}), item{Version: version, Run: run}.encode()
	}
	l.open = append(l.open, data...)
	c := &l.chunks[len(l.chunks)-1]
	c.size, c.last, c.at = len(l.open), l.event, at
}

func (l *line) openRecord(run string) lead.Record {
	return lead.Record{Key: chunkKey(run, l.chunks[len(l.chunks)-1].n), Value: bytes.Clone(l.open)}
}

// drop forgets the oldest chunk.
func (l *line) drop(run string) lead.Record {
	c := l.chunks[0]
	l.chunks, l.lost = l.chunks[1:], max(l.lost, c.last)
	return lead.Record{Key: chunkKey(run, c.n)}
}

// remove removes all chunks from the store.
func (l *line) remove(run string) (changes []lead.Record) {
	for _, c := range l.chunks {
		changes = append(changes, lead.Record{Key: chunkKey(run, c.n)})
	}
	return changes
}

// encodeProof is evidence without the parts that make it too large.
func encodeProof(p api.Proof) []byte {
	for {
		data := item{Proof: &p}.encode()
		if len(data) <= maxItem || len(p.Failures)+len(p.Losses) == 0 {
			return data
		}
		p.Evidence = less(p.Evidence)
	}
}

// less is e without details or, if it has none, with half of its failures and losses.
func less(e job.Evidence) job.Evidence {
	details := 0
	var bare []job.Failure
	for _, f := range e.Failures {
		details += len(f.Detail)
		f.Detail = nil
		bare = append(bare, f)
	}
	if details > 0 {
		e.Failures = bare
		return e
	}
	e.Failures, e.Losses = e.Failures[:len(e.Failures)/2], e.Losses[:len(e.Losses)/2]
	if e.Cause != nil {
		c := *e.Cause
		c.Text = text.Head(c.Text, maxCause)
		e.Cause = &c
	}
	return e
}

// loadLines takes over the chunks of the runs that are known.
func (k *Keeper) loadLines(all []lead.Record) {
	runs := map[string]*record{}
	for run, r := range k.runs {
		runs[escape(run)] = r
	}
	for _, r := range all {
		run, number, isLine := strings.Cut(strings.TrimPrefix(r.Key, prefix), lineName)
		known := runs[run]
		if !isLine || known == nil || !strings.HasPrefix(r.Key, prefix) {
			continue
		}
		n := 0
		_, err := fmt.Sscanf(number, "%d", &n)
		if err == nil {
			err = known.loadChunk(n, r.Value)
		}
		if err != nil {
			k.log.Warn("a part of what earlier leaders know of a run cannot be used", "key", r.Key, "err", err)
		}
	}
}

// loadChunk reads a chunk, up to the first line that is damaged.
func (r *record) loadChunk(n int, value []byte) error {
	l, out := &r.line, &r.past.Line
	l.chunks, l.newest, l.open = append(l.chunks, chunk{n: n, size: len(value)}), n, value
	c := &l.chunks[len(l.chunks)-1]
	first := len(l.chunks) == 1 && n > 1 // those before were dropped
	for i, data := range bytes.Split(bytes.TrimSuffix(value, []byte("\n")), []byte("\n")) {
		var next item
		if err := json.Unmarshal(data, &next); err != nil {
			return err
		}
		if i == 0 && next.Version != version {
			return fmt.Errorf("it is of version %d, and this program knows %d", next.Version, version)
		}
		if e := next.Event; e != nil && e.Seq > l.event {
			if first {
				l.lost, first = max(l.lost, e.Seq-1), false
				out.Lost = l.lost
			}
			out.Events, l.event, c.at = append(out.Events, *e), e.Seq, e.At
		}
		if p := next.Proof; p != nil && p.N > l.proof {
			out.Proofs, l.proof, c.at = append(out.Proofs, *p), p.N, p.At
		}
		c.last = l.event
	}
	return nil
}

// old is a chunk that may go.
type old struct {
	run string
	r   *record
	at  time.Time
}

// evict drops the oldest chunks until the timelines of all runs fit into their bound.
func (k *Keeper) evict(ctx context.Context) error {
	all, size := k.chunks()
	if size <= k.maxLines {
		return nil
	}
	slices.SortStableFunc(all, func(a, b old) int { return a.at.Compare(b.at) })
	for size > k.maxLines {
		var gone []lead.Record
		lines := map[old]line{}
		for len(gone) < lead.MaxRecords && size > k.maxLines {
			o := old{run: all[0].run, r: all[0].r}
			l, some := lines[o]
			if !some {
				l = o.r.line
			}
			size -= l.chunks[0].size
			gone, all = append(gone, l.drop(o.run)), all[1:]
			lines[o] = l
		}
		if err := k.store.Append(ctx, k.term, gone...); err != nil {
			return err
		}
		for o, l := range lines {
			o.r.line = l
		}
		k.dropped(lines)
	}
	return nil
}

// chunks are all chunks, and their size.
func (k *Keeper) chunks() (all []old, size int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for run, r := range k.runs {
		for _, c := range r.line.chunks {
			all, size = append(all, old{run, r, c.at}), size+c.size
		}
	}
	return all, size
}

// dropped has the rounds of runs without any chunk say what is lost. The others say it by the numbers of theirs.
func (k *Keeper) dropped(lines map[old]line) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for o, l := range lines {
		if len(l.chunks) == 0 {
			o.r.told++
			signal(k.wake)
		}
	}
}

// shed makes room in a store that is full: the oldest half of all timelines goes or, if there are none, what is known
// of runs that have ended besides how. False: there was nothing.
func (k *Keeper) shed(ctx context.Context) (shed bool, err error) {
	_, size := k.chunks()
	switch {
	case size > 0:
		k.maxLines = min(k.maxLines, size) / 2
		err = k.evict(ctx)
	case !k.lean:
		k.lean = true
		k.mu.Lock()
		for _, r := range k.runs {
			r.told++
		}
		k.mu.Unlock()
	default:
		return false, nil
	}
	if !k.full {
		k.log.Warn("the store is full: it gets less of the timelines of runs, and then of runs that have ended",
			"bytes_of_timelines", k.maxLines)
	}
	k.full = true
	return true, err
}
