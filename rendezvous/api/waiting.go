package api

import (
	"strings"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
)

// Launchers that wait ask more often than others, but all of a run together no more than about 170 times a second, as
// those of 10,000 nodes do anyway. The answer is made for all of them once a second at most, and once in ten seconds
// for 10,000 nodes.
const (
	minWaits     = time.Second
	waitsPerNode = 6 * time.Millisecond
	waitsMade    = time.Millisecond // for each node
	maxWaiting   = 512              // bytes of each text
)

// Waiting describes the wait of a run without workers, in words.
type Waiting struct {
	For string `json:"for,omitempty"`
	// Due is the next event that time alone brings, in In; "": there is none.
	Due string        `json:"due,omitempty"`
	In  time.Duration `json:"in,omitempty"`
}

// tellsWaitsLocked reports whether a Watch is to end with a Waiting.
func (r *run) tellsWaitsLocked(after Cursor) bool {
	_, runs := r.round.Running()
	return after.Waits > 0 && r.cfg.Waits != nil && !runs
}

// waiting is for a node with a duty of this kind; nil: it waits for nothing, or for an order that it knows.
func (r *run) waiting(now time.Time, duty job.Kind) *Waiting {
	if r.cfg.Waits == nil || duty != job.Wait && duty != job.Check {
		return nil
	}
	r.Lock()
	if age := now.Sub(r.newestAt); age < max(minWaits, time.Duration(r.round.Size())*waitsMade) {
		defer r.Unlock()
		if r.newest == nil {
			return nil
		}
		w := *r.newest
		w.In -= age
		return &w
	}
	r.newestAt = now // the others have the old one meanwhile
	r.Unlock()
	s := r.status(true)
	var told *Waiting
	if s.Phase != "running" && s.Outcome == "" && s.Paused == nil {
		told = &Waiting{For: text.Head(strings.Join(s.Waits, "; "), maxWaiting)}
		if len(s.Due) > 0 {
			told.Due, told.In = text.Head(s.Due[0].Text, maxWaiting), s.Due[0].At.Sub(now)
		}
	}
	r.Lock()
	defer r.Unlock()
	r.newest = told
	return told
}
