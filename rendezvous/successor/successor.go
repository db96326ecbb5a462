// Package successor elects the launcher that serves the rendezvous after the one that did so has died (pure).
//
// The members of the newest sealed world know its Failover: the launcher that serves, in which term, and up to five
// deputies in order. A member votes once it has proof that the server is dead. It votes for the first deputy, and for a
// later one only with proof that all before are dead. So the term of a vote names the deputy: it is the Failover's, and
// one more for each deputy up to its own. One vote per launcher process and term needs no more memory. A process that
// is started again is not a member, and does not vote.
//
// A deputy stands once it has that proof itself. It serves with the votes of more than half of the members that are
// left, its own included. Two deputies of one world cannot both have these. In a world of two the survivor needs only
// its own, which is safe only because silence is no proof.
//
// A member that asks for a place in the next world has no vote any more: a world of which it knows nothing may be
// sealed, with deputies of its own.
package successor

import (
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// Vote is a member's for the deputy to which it is sent.
type Vote struct {
	Term  uint64      `json:"term"`
	Epoch job.EpochID `json:"epoch"`
	ID    string      `json:"id"` // of the launcher process
}

// Answer is the deputy's: with neither field true the vote does not count, and is the voter's again.
type Answer struct {
	Counted bool   `json:"counted,omitempty"`
	Serves  bool   `json:"serves,omitempty"`
	Term    uint64 `json:"term,omitempty"` // in which it serves
}

// Voter is a launcher as a member of its newest world.
type Voter struct {
	ID string

	epoch job.EpochID
	plan  *rendezvous.Failover // nil: it has no vote
	term  uint64               // of the server that it follows
	dead  int                  // how many deputies are, from the first on
	bound bool                 // a deputy may count its vote
}

// Runs makes the launcher a member of the world of an epoch. A server without a Failover leaves that of the same epoch.
func (v *Voter) Runs(epoch job.EpochID, w *rendezvous.Failover) {
	switch {
	case w != nil:
		v.epoch, v.plan, v.dead = epoch, w, 0
		v.term = w.Term
	case epoch != v.epoch:
		v.plan = nil
	}
}

// Parts takes the vote from a launcher that leaves its world. back undoes it, unless there is a newer world.
func (v *Voter) Parts() (back func()) {
	plan := v.plan
	v.plan = nil
	return func() {
		if v.plan == nil {
			v.plan = plan
		}
	}
}

// Member reports whether the launcher has a vote, and Bound whether a deputy may count it: until that is known, the
// launcher follows no other server.
func (v *Voter) Member() bool { return v.plan != nil }

// Bound is described with Member.
func (v *Voter) Bound() bool { return v.bound }

// Ballot is the vote of a launcher with proof that the server is dead, and for whom. It binds the launcher.
func (v *Voter) Ballot() (h rendezvous.Deputy, vote Vote, ok bool) {
	if v.plan == nil || v.dead >= len(v.plan.Deputies) {
		return h, vote, false
	}
	v.bound = true
	return v.plan.Deputies[v.dead], Vote{Term: v.plan.Term + 1 + uint64(v.dead), Epoch: v.epoch, ID: v.ID}, true
}

// HeirDead says that the deputy of the ballot is dead, so that its votes are void.
func (v *Voter) HeirDead() { v.dead, v.bound = v.dead+1, false }

// Answered takes the answer of the deputy of the ballot. It reports whether the launcher follows it from now on.
func (v *Voter) Answered(a Answer) bool {
	v.bound = a.Counted && !a.Serves
	if !a.Serves || a.Term <= v.term {
		return false
	}
	v.term = a.Term
	return true
}

// Tally counts the votes for one deputy.
type Tally struct {
	standing bool
	serves   bool
	term     uint64
	epoch    job.EpochID
	need     int
	votes    map[string]bool
}

// Stand makes the deputy a candidate by its own vote, in a world with so many members besides the dead server. Another
// candidacy of before, and its votes, are void.
func (t *Tally) Stand(own Vote, voters int) Answer {
	if !t.serves && (!t.standing || t.epoch != own.Epoch || t.term != own.Term) {
		*t = Tally{standing: true, term: own.Term, epoch: own.Epoch, need: voters/2 + 1, votes: map[string]bool{}}
	}
	return t.Count(own)
}

// Withdraw ends a candidacy: the server is not dead after all. It reports false if the deputy serves already.
func (t *Tally) Withdraw() bool {
	if t.serves {
		return false
	}
	*t = Tally{}
	return true
}

// Count takes a vote.
func (t *Tally) Count(v Vote) Answer {
	switch {
	case t.serves:
		return Answer{Serves: true, Term: t.term}
	case !t.standing || v.Epoch != t.epoch || v.Term != t.term || v.ID == "":
		return Answer{}
	}
	if len(t.votes) < t.need {
		t.votes[v.ID] = true
	}
	t.serves = len(t.votes) >= t.need
	return Answer{Counted: true, Serves: t.serves, Term: t.term}
}

// Votes are those counted, and those needed.
func (t *Tally) Votes() (have, need int) { return len(t.votes), t.need }
