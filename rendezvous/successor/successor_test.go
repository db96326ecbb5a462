package successor

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// launcher is one process of the model.
type launcher struct {
	id       string
	voter    Voter
	tally    Tally
	dead     bool
	home     string          // the server that it follows
	ofDead   bool            // it knows that the server of the world is dead
	waiting  map[string]bool // members that have asked it for a place in the next world
	electors int             // of the newest candidacy
}

// world is a model of a job that loses its server: processes, links between their hosts that break and heal one way or
// both, and requests that arrive late, twice or never. A process that is dead is known to be so over a link that works.
type world struct {
	t      *testing.T
	rnd    *rand.Rand
	plan   *rendezvous.Failover
	all    map[string]*launcher
	ids    []string
	cut    map[string]bool // from one to another
	late   []func()
	served map[uint64]string // by term
	sealed string            // the server that has sealed the next world
	tied   bool              // and with no more than half of this one
	won    int
	seed   uint64
}

// newWorld is one of n members that the first serves.
func newWorld(t *testing.T, seed uint64, n int) *world {
	w := &world{t: t, rnd: rand.New(rand.NewPCG(seed, 7)), all: map[string]*launcher{}, cut: map[string]bool{},
		seed: seed, served: map[uint64]string{1: "0"}, plan: &rendezvous.Failover{Term: 1, Voters: n - 1, Members: n}}
	for i := range n {
		id := fmt.Sprint(i)
		w.ids = append(w.ids, id)
		if i > 0 && i <= 5 {
			w.plan.Deputies = append(w.plan.Deputies, rendezvous.Deputy{ID: id})
		}
		w.all[id] = &launcher{id: id, voter: Voter{ID: id}, home: "0", waiting: map[string]bool{}}
	}
	for _, id := range w.ids[1:] {
		w.all[id].voter.Runs(job.EpochID{Term: 1, Round: 1}, w.plan)
	}
	return w
}

func (w *world) links(a, b string) bool { return !w.cut[a+">"+b] && !w.cut[b+">"+a] }

func (w *world) answers(from, to string) bool {
	return from == to || w.links(from, to) && !w.all[to].dead
}

func (w *world) refuses(from, to string) bool { return w.links(from, to) && w.all[to].dead }

// step has one launcher do what the shell does after a failed request.
func (w *world) step(id string, lossy bool) {
	l := w.all[id]
	if a := l.tally.Count(Vote{}); l.dead || a.Serves {
		w.answered(l, id, a)
		return
	}
	for _, d := range l.voter.Candidates() {
		if w.refuses(id, d.ID) {
			l.voter.Out(d.ID)
		} else if w.answers(id, d.ID) && w.answered(l, d.ID, w.all[d.ID].tally.Count(l.voter.Question(d.ID))) {
			return
		}
	}
	if !l.voter.Bound() && w.answers(id, l.home) {
		return
	}
	l.ofDead = l.ofDead || w.refuses(id, "0")
	for _, d := range l.voter.Deputies() {
		switch to := w.all[d.ID]; {
		case d.ID == id:
			w.stand(l)
			for _, other := range l.voter.Deputies() { // one after it may serve
				if w.answers(id, other.ID) && other.ID != id {
					w.answered(l, other.ID, w.all[other.ID].tally.Count(l.voter.Question(other.ID)))
				}
			}
			return
		case w.refuses(id, d.ID):
			l.voter.Out(d.ID)
		case w.answers(id, d.ID):
			if q := l.voter.Question(to.id); !to.voter.Able(q.Term) && !to.tally.Count(q).Serves {
				l.voter.Out(d.ID) // unable
				continue
			}
			w.vote(l, to, lossy)
			return
		}
	}
}

func (w *world) stand(l *launcher) {
	own := l.voter.Ballot(l.id, 0)
	l.electors = w.plan.Electorate(l.ofDead)
	a := l.tally.Stand(own, l.electors)
	if !a.Serves && (w.answers(l.id, "0") || w.answers(l.id, l.home)) && l.tally.Withdraw() {
		a = Answer{}
	}
	w.answered(l, l.id, a)
}

func (w *world) vote(l, to *launcher, lossy bool) {
	a := to.tally.Count(l.voter.Question(to.id))
	if w.answered(l, to.id, a) || !l.tally.Withdraw() {
		return
	}
	l.voter.Answered(l.id, Answer{})
	if a.Serves || a.Candidacy == 0 {
		return
	}
	ballot := l.voter.Ballot(to.id, a.Candidacy)
	deliver := func() Answer {
		if to.dead {
			return Answer{}
		}
		a := to.tally.Count(ballot)
		w.serves(to.id, a)
		return a
	}
	switch {
	case lossy && w.rnd.IntN(3) == 0:
		w.late = append(w.late, func() { deliver() })
	case lossy && w.rnd.IntN(3) == 0:
		deliver() // and the answer is lost
	default:
		w.answered(l, to.id, deliver())
	}
}

func (w *world) serves(deputy string, a Answer) {
	if !a.Serves {
		return
	}
	if by, taken := w.served[a.Term]; taken {
		require.Equal(w.t, by, deputy, "two servers of term %d", a.Term)
		return
	}
	w.served[a.Term] = deputy
	w.won++
}

func (w *world) answered(l *launcher, deputy string, a Answer) bool {
	w.serves(deputy, a)
	moved := l.voter.Answered(deputy, a)
	if moved {
		l.home = deputy
		if deputy != l.id {
			l.tally.Withdraw()
		}
	}
	return moved
}

// part has a launcher ask its server for a place in the next world.
func (w *world) part(id string) {
	l := w.all[id]
	if l.dead || l.voter.Bound() || l.voter.plan != nil && l.voter.parted {
		return
	}
	taken := w.answers(id, l.home)
	if l.voter.Parts(job.EpochID{})(taken); !taken {
		return
	}
	w.all[l.home].waiting[id] = true
}

// seal has a server form the next world by the Round's rule: not while a member is silent, and more than half of the
// members, some of which may have died since, may have elected another server. After a tie they may if this one dies;
// nobody follows it then.
func (w *world) seal(id string) {
	l := w.all[id]
	if l.dead || id != "0" && !l.tally.Count(Vote{}).Serves {
		return
	}
	absent, silent, limit := 0, false, (len(w.ids)-1)/2
	for _, m := range w.ids {
		if m != id && !l.waiting[m] && !(m == "0" && l.ofDead) {
			absent++
			silent = silent || !w.refuses(id, m)
		}
	}
	tied := silent && absent > limit && 2*absent == len(w.ids) && !l.ofDead
	if silent && absent > limit && !tied {
		return
	}
	if w.sealed != "" && w.sealed != id {
		require.True(w.t, w.tied && w.all[w.sealed].dead, "seed %d: %s and %s sealed", w.seed, w.sealed, id)
	}
	w.sealed, w.tied = id, tied
}

// chaos is what happens before the network is well again.
func (w *world) chaos(kills bool) {
	for range w.rnd.IntN(120) {
		id, other := w.ids[w.rnd.IntN(len(w.ids))], w.ids[w.rnd.IntN(len(w.ids))]
		switch k := w.rnd.IntN(24); {
		case k == 0 && kills && w.rnd.IntN(4) == 0:
			w.all[id].dead = true
		case k == 1 && kills:
			w.all["0"].dead = true
		case k == 2 && len(w.late) > 0:
			w.late[w.rnd.IntN(len(w.late))]() // it may arrive again
		case k == 3:
			w.part(id)
		case k == 4:
			w.seal(id)
		case k < 9:
			w.cut[id+">"+other] = w.rnd.IntN(3) > 0
		case k == 9:
			clear(w.cut)
		case id != "0":
			w.step(id, true)
		}
	}
}

func (w *world) alive() (ids []string) {
	for _, id := range w.ids[1:] {
		if l := w.all[id]; !l.dead && l.voter.Member() {
			ids = append(ids, id)
		}
	}
	return ids
}

// No two servers form the next world, and each term has one. Once the network is well, the members that are left elect
// one of them as long as they are more than half.
func TestRandomHistories(t *testing.T) {
	elected, sealed, split := 0, 0, 0
	for seed := range uint64(10_000) {
		w := newWorld(t, seed, 2+int(seed%8))
		w.chaos(seed%3 > 0)
		clear(w.cut)
		w.all["0"].dead = true
		for range 12 {
			for _, id := range w.ids[1:] {
				w.step(id, false)
			}
		}
		alive, server := w.alive(), ""
		living := 0
		for _, deputy := range w.served {
			if !w.all[deputy].dead {
				server = deputy
				living++
			}
		}
		if living > 1 {
			split++
		}
		if enough := 2*len(alive) > len(w.ids); server == "" && enough && alive[0] <= "5" {
			t.Fatalf("seed %d: nobody serves, and %v are left of %d", seed, alive, len(w.ids))
		}
		for _, id := range w.ids {
			w.part(id)
			w.seal(id)
		}
		if w.sealed != "" {
			sealed++
		}
		if server != "" {
			elected++
			for _, id := range alive {
				require.False(t, w.all[id].voter.Bound(), "seed %d: %s waits for ever", seed, id)
			}
		}
	}
	require.Greater(t, elected, 1000)
	require.Greater(t, sealed, 1000)
	require.Greater(t, split, 10, "no two have served at a time")
}

// elect has all members look for a server.
func (w *world) elect() {
	for range 4 {
		for _, id := range w.ids[1:] {
			w.step(id, false)
		}
	}
}

func (w *world) isolate(ids ...string) {
	for _, id := range ids {
		for _, other := range w.ids {
			w.cut[id+">"+other] = id != other
		}
	}
}

func TestWorldOfTwo(t *testing.T) {
	w := newWorld(t, 1, 2)
	w.step("1", false)
	require.Zero(t, w.won, "the server lives")
	w.isolate("0")
	w.elect()
	require.Zero(t, w.won, "it may live")
	clear(w.cut)
	w.all["0"].dead = true
	w.elect()
	require.Equal(t, 1, w.won)
	require.False(t, w.all["1"].voter.Bound())
	w = newWorld(t, 1, 2)
	w.plan.Alone = true
	w.isolate("0")
	w.elect()
	require.Equal(t, 1, w.won)
}

// The majority of a world serves itself while the others are silent. A deputy among these is passed over.
func TestSilence(t *testing.T) {
	w := newWorld(t, 1, 5)
	w.isolate("0", "1")
	w.elect()
	require.Equal(t, map[uint64]string{1: "0", 3: "2"}, w.served)
	w.part("1")
	w.seal("0")
	require.Empty(t, w.sealed)
	clear(w.cut)
	w.isolate("0")
	w.elect()
	w.all["1"].home = "2" // as its own server tells it
	for _, id := range w.ids[2:] {
		w.part(id)
	}
	w.seal("2")
	require.Equal(t, "2", w.sealed)
	w = newWorld(t, 1, 5)
	w.isolate("3", "4")
	w.elect()
	require.Zero(t, w.won, "two of five are no majority")
}

// A server that is back before anybody was elected has its members again.
func TestWithdrawnCandidacy(t *testing.T) {
	w := newWorld(t, 1, 6)
	w.isolate("0")
	w.step("1", false)
	w.step("2", false)
	require.True(t, w.all["2"].voter.Bound())
	clear(w.cut)
	require.True(t, w.all["1"].tally.Withdraw())
	w.step("2", false)
	require.False(t, w.all["2"].voter.Bound())
	w.all["0"].dead = true
	w.elect()
	require.Equal(t, 1, w.won)
	require.False(t, w.all["1"].tally.Withdraw(), "it serves")
}

// A deputy that was elected is a deputy's predecessor, too: its death is followed by the next election.
func TestSuccessorsOfSuccessors(t *testing.T) {
	w := newWorld(t, 1, 6)
	for round, dead := range []string{"0", "1", "2"} {
		w.all[dead].dead = true
		w.elect()
		require.Equal(t, round+1, w.won, "after %s", dead)
		require.Len(t, w.all["5"].voter.Deputies(), 5-round, "a dead one is none")
	}
	w.all["3"].dead = true
	w.elect()
	require.Equal(t, 3, w.won, "two of five are left")
}

// Votes of launchers that know of no candidacies count: these vote only if the server is dead.
func TestVoteWithoutCandidacy(t *testing.T) {
	v := Vote{Term: 2, Epoch: job.EpochID{Term: 1, Round: 1}, ID: "1"}
	var tally Tally
	require.Equal(t, Answer{}, tally.Count(v))
	require.Equal(t, Answer{Counted: true, Term: 2, Candidacy: 1}, tally.Stand(v, 4))
	v.ID, v.Candidacy = "2", 7
	require.Equal(t, Answer{Candidacy: 1}, tally.Count(v), "of another candidacy")
	v.Candidacy = 0
	require.True(t, tally.Count(v).Counted)
	own := Vote{Term: 2, Epoch: job.EpochID{Term: 1, Round: 1}, ID: "1"}
	require.Equal(t, Answer{Counted: true, Term: 2, Candidacy: 1}, tally.Stand(own, 4), "it stands already")
	v.ID = "3"
	require.True(t, tally.Count(v).Serves)
	own.Term, own.Epoch.Round = 3, 2
	require.Equal(t, Answer{Serves: true, Term: 2}, tally.Stand(own, 4))
}

// A vote in an earlier world or term, or in a candidacy that was withdrawn, does not count.
func TestVoteOfAnotherCandidacy(t *testing.T) {
	own := Vote{Term: 2, Epoch: job.EpochID{Term: 1, Round: 1}, ID: "1"}
	for name, next := range map[string]Vote{
		"a later world": {Term: 2, Epoch: job.EpochID{Term: 1, Round: 2}, ID: "1"},
		"a later term":  {Term: 3, Epoch: job.EpochID{Term: 1, Round: 1}, ID: "1"},
		"withdrawn":     own,
	} {
		var tally Tally
		tally.Stand(own, 4)
		tally.Count(Vote{Term: 2, Epoch: own.Epoch, ID: "2", Candidacy: 1})
		if next == own {
			tally.Withdraw()
		}
		require.Equal(t, Answer{Counted: true, Term: next.Term, Candidacy: 2}, tally.Stand(next, 4), name)
		have, need := tally.Votes()
		require.Equal(t, [2]int{1, 3}, [2]int{have, need}, name)
	}
}

// A voter whose vote has not arrived is bound by it, for it may arrive later. A new candidacy of the deputy ends that.
func TestVoteUnderWay(t *testing.T) {
	v := Voter{ID: "a"}
	v.Runs(job.EpochID{Term: 1, Round: 1}, &rendezvous.Failover{Term: 1, Deputies: []rendezvous.Deputy{{ID: "b"}}})
	v.Ballot("b", 1)
	require.False(t, v.Answered("b", Answer{Candidacy: 1}))
	require.True(t, v.Bound())
	require.False(t, v.Answered("b", Answer{Candidacy: 2}))
	require.False(t, v.Bound())
}

// A directive without a Failover is of a server that took the world over: that of that world stays, and the vote is
// back.
func TestFailoversOfEpochs(t *testing.T) {
	v := Voter{ID: "a"}
	e := job.EpochID{Term: 1, Round: 1}
	w := &rendezvous.Failover{Term: 1, Deputies: []rendezvous.Deputy{{ID: "b"}}}
	require.False(t, v.Member())
	v.Runs(e, w)
	v.Runs(e, nil)
	require.True(t, v.Member())
	v.Parts(job.EpochID{})(true)
	require.Empty(t, v.Deputies())
	v.Runs(e, nil)
	require.Len(t, v.Deputies(), 1)
	v.Runs(job.EpochID{Term: 1, Round: 2}, nil)
	require.False(t, v.Member())
}

// A server that takes a world over counts on no vote of a member that has ended its workers, and so that has none.
func TestVoteOfAMemberThatHasStopped(t *testing.T) {
	v := Voter{ID: "a"}
	e := job.EpochID{Term: 1, Round: 1}
	w := &rendezvous.Failover{Term: 1}
	v.Runs(e, w)
	v.Parts(e)(true)
	v.Runs(e, nil)
	require.False(t, v.Member())
	v.Runs(job.EpochID{Term: 1, Round: 2}, w)
	require.True(t, v.Member())
	v.Parts(job.EpochID{Term: 1, Round: 2})(false)
	v.Runs(job.EpochID{Term: 1, Round: 2}, nil)
	require.True(t, v.Member(), "no server knows that it has stopped")
}

// Two requests for a place may be under way. The vote is back only if no server has taken any.
func TestTwoRequestsForAPlace(t *testing.T) {
	e := job.EpochID{Term: 1, Round: 1}
	for _, taken := range [][2]bool{{false, false}, {true, false}, {false, true}} {
		v := Voter{ID: "a"}
		v.Runs(e, &rendezvous.Failover{Term: 1})
		first, second := v.Parts(e), v.Parts(e)
		second(taken[1])
		require.False(t, v.Member())
		first(taken[0])
		require.Equal(t, !taken[0] && !taken[1], v.Member())
	}
}
