package rendezvous

import (
	"maps"
	"slices"
	"strings"
	"time"
)

const (
	// replicaLost is how long a replica may give no sign of life, as with torchft's own lighthouse.
	replicaLost = 5 * time.Second
	// replicaJoins is how long a quorum waits for a replica that lives and does not ask, as with torchft's.
	replicaJoins = time.Minute
	// replicasSettle is how long the first quorum waits for replicas that a new server has not heard of yet.
	replicasSettle = 3 * time.Second
	// replicasPerGroup bounds the remembered replicas of a group, which has a new one after each restart.
	replicasPerGroup = 8
)

// QuorumAsk asks for the next quorum of the replicas of all groups.
type QuorumAsk struct {
	Replica string `json:"replica"`         // the ID of the replica, another one after each start of its workers
	Group   int    `json:"group"`           // in which it is
	Number  string `json:"ask,omitempty"`   // of this ask, which may be repeated; "": a sign of life alone
	Member  []byte `json:"member,omitzero"` // the replica as it tells the others of itself
	// ShrinkOnly admits no other replicas than those of the last quorum. Failed is set if the last step failed.
	ShrinkOnly bool `json:"shrink_only,omitempty"`
	Failed     bool `json:"failed,omitempty"`
}

// Quorum is the replicas that train together.
type Quorum struct {
	ID      int64    `json:"id"`      // rises, also from one server to the next; another one has to connect anew
	Members [][]byte `json:"members"` // by their replicas' IDs, in order
	Made    int64    `json:"made"`    // in Unix milliseconds
}

// Quorums decides which replicas of torchft train together. It is not safe for use by several goroutines.
type Quorums struct {
	Groups   int // of the run
	Min      int // of replicas in a quorum
	replicas map[string]*replica
	last     []string  // the replicas of the last quorum
	id       int64     // of the last quorum; 0: there was none
	opened   time.Time // when the first replica was heard of
}

type replica struct {
	ask   QuorumAsk // the last one; without a Number before the first
	since time.Time // of the ask
	made  *Quorum   // the answer to the ask; nil: it waits
	seen  time.Time
	gone  bool // the workers of its group were ended after its last ask
}

func (r *replica) lives(now time.Time) bool { return !r.gone && now.Sub(r.seen) < replicaLost }

func (r *replica) waits(now time.Time) bool {
	return r.ask.Number != "" && r.made == nil && r.lives(now)
}

// Hear takes a sign of life of a replica, and its ask. It returns false if too many replicas live.
func (q *Quorums) Hear(a QuorumAsk, now time.Time) bool {
	r := q.replicas[a.Replica]
	if r == nil {
		if most := replicasPerGroup * q.Groups; len(q.replicas) >= most {
			maps.DeleteFunc(q.replicas, func(_ string, r *replica) bool { return !r.lives(now) })
			if len(q.replicas) >= most {
				return false
			}
		}
		if q.replicas == nil {
			q.replicas, q.opened = map[string]*replica{}, now
		}
		r = &replica{}
		q.replicas[a.Replica] = r
	}
	r.seen, r.ask.Group = now, a.Group
	if a.Number == "" {
		return true
	}
	r.gone = false // the end of an earlier epoch became known late
	if a.Number != r.ask.Number {
		r.ask, r.since, r.made = a, now, nil
	}
	return true
}

// Ended forgets the replicas of a group whose workers were ended.
func (q *Quorums) Ended(group int) {
	for _, r := range q.replicas {
		r.gone = r.gone || r.ask.Group == group
	}
}

// Answer is the quorum for an ask that was heard, which is made now if it can be; nil: the ask waits.
func (q *Quorums) Answer(a QuorumAsk, now time.Time) *Quorum {
	q.decide(now)
	if r := q.replicas[a.Replica]; r != nil && r.ask.Number == a.Number {
		return r.made
	}
	return nil
}

// decide makes a quorum of all that ask, unless it has to wait for others.
func (q *Quorums) decide(now time.Time) {
	var asking []string
	living, first, shrinks := 0, now, false
	for id, r := range q.replicas {
		if r.lives(now) {
			living++
		}
		if !r.waits(now) {
			continue
		}
		asking = append(asking, id)
		shrinks = shrinks || r.ask.ShrinkOnly
		if r.since.Before(first) {
			first = r.since
		}
	}
	again := len(q.last) > 0 && !slices.ContainsFunc(q.last, func(id string) bool { return !slices.Contains(asking, id) })
	switch {
	case again:
	case len(asking) < q.Min, 2*len(asking) <= living: // those that live and do not ask may have a quorum of their own
		return
	case len(asking) >= q.Groups:
	case q.id == 0 && now.Sub(q.opened) < replicasSettle:
		return
	case len(asking) < living && now.Sub(first) < replicaJoins:
		return
	}
	if shrinks && q.id != 0 {
		asking = slices.DeleteFunc(asking, func(id string) bool { return !slices.Contains(q.last, id) })
	}
	if len(asking) > 0 {
		q.make(asking, now)
	}
}

func (q *Quorums) make(of []string, now time.Time) {
	slices.SortFunc(of, strings.Compare)
	failed := slices.ContainsFunc(of, func(id string) bool { return q.replicas[id].ask.Failed })
	switch {
	case q.id == 0:
		q.id = now.UnixMilli() // servers before this one have made fewer quorums than one a millisecond
	case failed || !slices.Equal(of, q.last):
		q.id++
	}
	made := &Quorum{ID: q.id, Made: now.UnixMilli()}
	for _, id := range of {
		made.Members = append(made.Members, q.replicas[id].ask.Member)
	}
	for _, id := range of {
		q.replicas[id].made = made
	}
	q.last = of
}
