package service

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"dlrover-run/internal/text"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// LighthouseRequest is what a launcher passes on to torchft's lighthouse: the body of POST /v1/runs/{run}/lighthouse.
type LighthouseRequest struct {
	ID string `json:"id"` // the launcher's
	rendezvous.QuorumAsk
}

// LighthouseAnswer has no quorum for a sign of life, and for an ask that has to be repeated.
type LighthouseAnswer struct {
	Quorum *rendezvous.Quorum `json:"quorum,omitempty"`
}

const (
	// maxMember bounds the bytes of a member of a quorum.
	maxMember = 64 << 10
	// holdAsk is how long an ask waits for its quorum until it has to be repeated.
	holdAsk = 10 * time.Second
	// quorumTick is how often an ask that waits looks for replicas that do not live any more.
	quorumTick = 200 * time.Millisecond
)

// quorums are those of all runs. It may be used with a run locked.
type quorums struct {
	mu     sync.Mutex
	of     map[string]*runQuorums // by ID of the larger run
	closed bool
}

type runQuorums struct {
	rendezvous.Quorums
	told    *rendezvous.Quorum // the last one, once those that wait were told to look for it
	changed chan struct{}      // is closed at the next change
}

func (q *runQuorums) change() {
	close(q.changed)
	q.changed = make(chan struct{})
}

func (q *quorums) drop(run string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.of, run)
}

// close has asks that wait end with api.ErrClosed.
func (q *quorums) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	for _, r := range q.of {
		r.change()
	}
}

// ended is for a group whose workers have ended, or are about to.
func (q *quorums) ended(run string, group int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if r := q.of[run]; r != nil {
		r.Ended(group)
		r.change()
	}
}

// hear takes a sign of life, or an ask, of a replica of a run with such groups.
func (q *quorums) hear(run string, g rendezvous.Group, a rendezvous.QuorumAsk) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	r := q.of[run]
	if r == nil || r.Groups != g.Count || r.Min != g.Min {
		if q.of == nil {
			q.of = map[string]*runQuorums{}
		}
		r = &runQuorums{Quorums: rendezvous.Quorums{Groups: g.Count, Min: g.Min}, changed: make(chan struct{})}
		q.of[run] = r
	}
	if !r.Hear(a, time.Now()) {
		return fmt.Errorf("%w: too many replicas of run %q", rendezvous.ErrRefused, run)
	}
	return nil
}

// answer is the quorum for an ask, or nil and a channel that is closed once there may be one.
func (q *quorums) answer(run string, a rendezvous.QuorumAsk) (*rendezvous.Quorum, <-chan struct{}, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	r := q.of[run]
	switch {
	case q.closed:
		return nil, nil, api.ErrClosed
	case r == nil: // it was forgotten meanwhile
		return nil, nil, rendezvous.ErrUnknownNode
	}
	made := r.Answer(a, time.Now())
	if made != nil && made != r.told {
		r.told = made
		r.change()
	}
	return made, r.changed, nil
}

func (q *LighthouseRequest) check() error {
	for _, name := range []string{q.Replica, q.Number} {
		if len(name) > rendezvous.MaxName || !text.Printable(name) {
			return fmt.Errorf("%w: replica or ask %.40q: %s, at most %d bytes", api.ErrBadRequest, name, text.PrintableRule,
				rendezvous.MaxName)
		}
	}
	if q.Replica == "" || len(q.Member) > maxMember {
		return fmt.Errorf("%w: replica %q with %d bytes: need an ID, and at most %d bytes", api.ErrBadRequest, q.Replica,
			len(q.Member), maxMember)
	}
	return nil
}

// Lighthouse takes a sign of life of a replica, and waits for the quorum for its ask, ten seconds at most. The error is
// rendezvous.ErrUnknownNode for a launcher that is not in the group, and api.ErrClosed.
func (s *Service) Lighthouse(run string, r LighthouseRequest) (a LighthouseAnswer, err error) {
	if err := r.check(); err != nil {
		return a, err
	}
	g := &s.groups
	id := rendezvous.GroupRun(run, r.Group)
	p, err := s.Hub.Params(id)
	if errors.Is(err, api.ErrClosed) {
		return a, err
	}
	if err != nil || p.Group.Of != run || len(s.Hub.Names(id, []string{r.ID})) == 0 {
		return a, rendezvous.ErrUnknownNode
	}
	g.mu.Lock()
	_, err = g.divisionLocked(run, p.Group.Count, time.Now()) // with it the quorums are forgotten
	g.mu.Unlock()
	if err != nil {
		return a, err
	}
	if err := g.quorums.hear(run, p.Group, r.QuorumAsk); err != nil || r.Number == "" {
		return a, err
	}
	for end := time.Now().Add(holdAsk); time.Now().Before(end); {
		var changed <-chan struct{}
		if a.Quorum, changed, err = g.quorums.answer(run, r.QuorumAsk); a.Quorum != nil || err != nil {
			return a, err
		}
		select {
		case <-changed:
		case <-time.After(quorumTick):
		}
	}
	return a, nil
}
