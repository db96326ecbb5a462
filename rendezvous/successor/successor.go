// Package successor elects the launcher that serves the rendezvous after the one that did so is lost (pure).
//
// The members of the newest sealed world know its Failover: the launcher that serves, in which term, and up to five
// deputies in order. A member votes once the server is dead or silent. It votes for the first deputy, and for a later
// one if all before are dead or silent. So the term of a vote names the deputy: it is the Failover's, and one more for
// each deputy up to its own. A process that is started again is not a member, and does not vote.
//
// A deputy stands once it finds the same itself. It serves with the votes of more than half of the world, its own
// included; of a server that is dead, no vote is needed. A member votes only for a candidacy that the deputy has told
// it of. So a vote that arrives late, in a later candidacy, does not count.
//
// Silence proves nothing: the silent server may live, and so may a silent deputy for which a member has voted. No two
// of them divide the run, because each seals the next world only with enough members of this one (see Round). A member
// that asks for a place in the next world has no vote any more. One that has voted asks no server of an earlier term
// for a place.
package successor

import (
	"slices"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// Vote is a member's for the deputy to which it is sent. Without an ID it is a question.
type Vote struct {
	Term  uint64      `json:"term"`
	Epoch job.EpochID `json:"epoch"`
	ID    string      `json:"id"` // of the launcher process
	// Candidacy is the deputy's. It is 0 in votes of older launchers, which vote only if the server is dead.
	Candidacy uint64 `json:"candidacy,omitempty"`
}

// Answer is the deputy's: a vote that is not Counted is the voter's again.
type Answer struct {
	Counted bool   `json:"counted,omitempty"`
	Serves  bool   `json:"serves,omitempty"`
	Term    uint64 `json:"term,omitempty"` // in which it serves
	// Candidacy numbers the times that the deputy has stood; 0: it does not stand now, and if Unable it never will.
	Candidacy uint64 `json:"candidacy,omitempty"`
	Unable    bool   `json:"unable,omitempty"`
}

// Voter is a launcher as a member of its newest world.
type Voter struct {
	ID string

	epoch   job.EpochID
	plan    *rendezvous.Failover
	parted  bool              // it has no vote
	parting int               // requests under way that end its vote if a server takes one
	stopped job.EpochID       // the newest one whose workers it has ended for another
	term    uint64            // of the server that it follows
	out     map[string]bool   // deputies that are dead, or will not serve
	votes   map[string]uint64 // candidacies of deputies that may count its vote
}

// Runs makes the launcher a member of the world of an epoch. A server without a Failover leaves that of the same epoch,
// and gives the vote back, unless the launcher has ended its workers: then it will not count on this member.
func (v *Voter) Runs(epoch job.EpochID, w *rendezvous.Failover) {
	switch {
	case w != nil:
		v.epoch, v.plan, v.term = epoch, w, w.Term
		v.out, v.votes = map[string]bool{}, map[string]uint64{}
	case epoch != v.epoch:
		v.plan = nil
	}
	v.parted = v.parted && w == nil && epoch == v.stopped
}

// Parts takes the vote from a launcher that asks for a place in another world. stopped is the newest epoch whose
// workers it has ended. The vote is back after that if no server has taken such a request, or if there is a newer
// world.
func (v *Voter) Parts(stopped job.EpochID) (asked func(taken bool)) {
	plan := v.plan
	v.stopped = stopped
	v.parting++
	return func(taken bool) {
		v.parting--
		v.parted = v.parted || taken && v.plan == plan
	}
}

// Member reports whether the launcher has a vote, and Bound whether a deputy may count it: until that is known, the
// launcher follows no other server.
func (v *Voter) Member() bool { return v.plan != nil && !v.parted && v.parting == 0 }

// Bound is described with Member.
func (v *Voter) Bound() bool { return v.Member() && len(v.votes) > 0 }

// Able reports whether the launcher may stand in the term, as a member of its world that follows no later server.
func (v *Voter) Able(term uint64) bool { return v.Member() && v.term < term }

// Deputies lists those that may serve, in order. There are none for a launcher without a vote.
func (v *Voter) Deputies() []rendezvous.Deputy {
	if !v.Member() {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(v.plan.Deputies), func(d rendezvous.Deputy) bool { return v.out[d.ID] })
}

// Candidates lists the other deputies that may count the launcher's vote. It asks them first: one that has withdrawn
// gives the vote back.
func (v *Voter) Candidates() []rendezvous.Deputy {
	return slices.DeleteFunc(v.Deputies(), func(d rendezvous.Deputy) bool {
		_, voted := v.votes[d.ID]
		return !voted || d.ID == v.ID
	})
}

// Question asks a deputy whether it serves or stands.
func (v *Voter) Question(id string) Vote {
	at := slices.IndexFunc(v.plan.Deputies, func(d rendezvous.Deputy) bool { return d.ID == id })
	return Vote{Term: v.plan.Term + 1 + uint64(at), Epoch: v.epoch}
}

// Ballot is the vote for a deputy. It binds the launcher.
func (v *Voter) Ballot(id string, candidacy uint64) Vote {
	v.votes[id] = candidacy
	vote := v.Question(id)
	vote.ID, vote.Candidacy = v.ID, candidacy
	return vote
}

// Out says that a deputy is dead, or will not serve, so that its votes are void.
func (v *Voter) Out(id string) {
	v.out[id] = true
	delete(v.votes, id)
}

// Answered takes the answer of a deputy. It reports whether the launcher follows it from now on.
func (v *Voter) Answered(id string, a Answer) bool {
	if a.Serves || !a.Counted && (a.Candidacy == 0 || a.Candidacy != v.votes[id]) {
		delete(v.votes, id)
	}
	if !a.Serves || a.Term <= v.term {
		return false
	}
	v.term = a.Term
	clear(v.votes) // of earlier terms
	return true
}

// Tally counts the votes for one deputy.
type Tally struct {
	candidacy uint64 // the newest
	standing  bool
	serves    bool
	term      uint64
	epoch     job.EpochID
	need      int
	votes     map[string]struct{}
}

// Stand makes the deputy a candidate by its own vote, in an electorate of so many members. Another candidacy of before,
// and its votes, are void.
func (t *Tally) Stand(own Vote, electorate int) Answer {
	if !t.serves && (!t.standing || t.epoch != own.Epoch || t.term != own.Term) {
		*t = Tally{candidacy: t.candidacy + 1, standing: true, term: own.Term, epoch: own.Epoch, votes: map[string]struct{}{}}
	}
	t.need = electorate/2 + 1
	own.Candidacy = t.candidacy
	return t.Count(own)
}

// Withdraw ends a candidacy: another launcher serves, or stands before this one. It reports false if the deputy serves
// already.
func (t *Tally) Withdraw() bool {
	if t.serves {
		return false
	}
	t.standing = false
	return true
}

// Count takes a vote, or answers a question.
func (t *Tally) Count(v Vote) Answer {
	switch {
	case t.serves:
		return Answer{Serves: true, Term: t.term}
	case !t.standing || v.Epoch != t.epoch || v.Term != t.term:
		return Answer{}
	case v.ID == "" || v.Candidacy != 0 && v.Candidacy != t.candidacy:
		return Answer{Candidacy: t.candidacy}
	}
	if len(t.votes) < t.need {
		t.votes[v.ID] = struct{}{}
	}
	t.serves = len(t.votes) >= t.need
	return Answer{Counted: true, Serves: t.serves, Term: t.term, Candidacy: t.candidacy}
}

// Votes are those counted, and those needed.
func (t *Tally) Votes() (have, need int) { return len(t.votes), t.need }
