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
	voter Voter
	tally Tally
	dead  bool
	home  string // the server that it follows
}

// world is a model of a job whose server dies: processes, and requests that arrive late, twice or never. A process is
// known to be dead by whoever looks, which is what a refused connection means.
type world struct {
	t      *testing.T
	rnd    *rand.Rand
	all    map[string]*launcher
	ids    []string
	server string // that served the newest world
	late   []func()
	served map[uint64]string // by term
	voted  map[string]string // by voter and term
	won    int
}

func newWorld(t *testing.T, seed uint64, n int) *world {
	w := &world{t: t, rnd: rand.New(rand.NewPCG(seed, 7)), all: map[string]*launcher{}, server: "0",
		served: map[uint64]string{1: "0"}, voted: map[string]string{}}
	plan := &rendezvous.Failover{Term: 1, Voters: n - 1}
	for i := range n {
		id := fmt.Sprint(i)
		w.ids = append(w.ids, id)
		if i > 0 && i <= 5 {
			plan.Deputies = append(plan.Deputies, rendezvous.Deputy{ID: id})
		}
		w.all[id] = &launcher{voter: Voter{ID: id}, home: "0"}
	}
	for _, id := range w.ids[1:] {
		w.all[id].voter.Runs(job.EpochID{Term: 1, Round: 1}, plan)
	}
	return w
}

// step has one launcher do what the shell does after a failed request; lossy networks lose answers or delay votes.
func (w *world) step(id string, lossy bool) {
	l := w.all[id]
	if l.dead || !w.all[l.home].dead && !l.voter.Bound() {
		return
	}
	deputy, vote, ok := l.voter.Ballot()
	if !ok {
		return
	}
	key := fmt.Sprint(id, "/", vote.Term)
	if before, again := w.voted[key]; again {
		require.Equal(w.t, before, deputy.ID, "launcher %s voted twice in term %d", id, vote.Term)
	}
	w.voted[key] = deputy.ID
	h := w.all[deputy.ID]
	if h.dead {
		l.voter.HeirDead()
		return
	}
	if deputy.ID == id {
		w.answered(id, id, h.tally.Stand(vote, l.voter.plan.Voters))
		return
	}
	deliver := func() {
		if !h.dead {
			a := h.tally.Count(vote)
			w.serves(deputy.ID, a)
		}
	}
	switch {
	case lossy && w.rnd.IntN(3) == 0:
		w.late = append(w.late, deliver)
	case lossy && w.rnd.IntN(3) == 0:
		deliver() // and the answer is lost
	default:
		a := h.tally.Count(vote)
		w.answered(id, deputy.ID, a)
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
	for term, other := range w.served {
		require.True(w.t, w.all[other].dead, "%s serves term %d while %s serves term %d", deputy, a.Term, other, term)
	}
	w.served[a.Term] = deputy
	w.won++
}

func (w *world) answered(id, deputy string, a Answer) {
	w.serves(deputy, a)
	if w.all[id].voter.Answered(a) {
		w.all[id].home = deputy
	}
}

// chaos is what happens before the network is well again.
func (w *world) chaos() {
	for range w.rnd.IntN(60) {
		id := w.ids[w.rnd.IntN(len(w.ids))]
		l := w.all[id]
		switch k := w.rnd.IntN(20); {
		case k == 0 && w.rnd.IntN(4) == 0:
			l.dead = true
		case k == 1:
			w.all["0"].dead = true
		case k == 2 && len(w.late) > 0:
			w.late[w.rnd.IntN(len(w.late))]() // it may arrive again
		case k == 3 && w.rnd.IntN(4) == 0:
			l.voter.Parts()
		default:
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

// Never do two launchers serve at a time, and none votes twice in a term. The members that are left elect one of them
// as long as they are more than half, a deputy among them.
func TestRandomHistories(t *testing.T) {
	elected, not := 0, 0
	for seed := range uint64(20_000) {
		w := newWorld(t, seed, 2+int(seed%8))
		w.chaos()
		w.all["0"].dead = true
		for range 12 {
			for _, id := range w.ids[1:] {
				w.step(id, false)
			}
		}
		alive := w.alive()
		var server string
		for _, deputy := range w.served {
			if !w.all[deputy].dead {
				server = deputy
			}
		}
		enough := 2*len(alive) > len(w.ids)-1 && len(alive) > 0 && alive[0] <= "5"
		if server == "" && enough && first(w) == alive[0] {
			t.Fatalf("seed %d: nobody serves, and %v are left of %d", seed, alive, len(w.ids))
		}
		if server == "" {
			not++
			continue
		}
		elected++
		for _, id := range alive {
			require.False(t, w.all[id].voter.Bound(), "seed %d: %s waits for ever", seed, id)
		}
	}
	require.Greater(t, elected, 1000)
	require.Greater(t, not, 1000)
}

// first is the first deputy that lives: one without a vote does not stand, and whoever waits for it waits in doubt.
func first(w *world) string {
	for _, id := range w.ids[1:] {
		if !w.all[id].dead {
			return id
		}
	}
	return ""
}

func TestWorldOfTwo(t *testing.T) {
	w := newWorld(t, 1, 2)
	w.step("1", false)
	require.Zero(t, w.won, "the server lives")
	w.all["0"].dead = true
	w.step("1", false)
	require.Equal(t, 1, w.won)
	require.False(t, w.all["1"].voter.Bound())
}

// A server that is back before anybody was elected has its members again.
func TestWithdrawnCandidacy(t *testing.T) {
	w := newWorld(t, 1, 6)
	w.all["0"].dead = true
	w.step("1", false)
	w.step("2", false)
	require.True(t, w.all["2"].voter.Bound())
	require.True(t, w.all["1"].tally.Withdraw())
	w.step("2", false)
	require.False(t, w.all["2"].voter.Bound())
	w.step("1", false)
	w.step("2", false)
	w.step("3", false)
	require.Equal(t, 1, w.won)
	require.False(t, w.all["1"].tally.Withdraw(), "it serves")
}

// An deputy that was elected is a deputy's predecessor, too: its death is followed by the next election.
func TestSuccessorsOfSuccessors(t *testing.T) {
	w := newWorld(t, 1, 6)
	for round, dead := range []string{"0", "1", "2"} {
		w.all[dead].dead = true
		for range 3 {
			for _, id := range w.ids[1:] {
				w.step(id, false)
			}
		}
		require.Equal(t, round+1, w.won, "after %s", dead)
	}
	w.all["3"].dead = true
	for range 3 {
		for _, id := range w.ids[1:] {
			w.step(id, false)
		}
	}
	require.Equal(t, 3, w.won, "two of five are left")
}

// A directive without a Failover is of a server that took the world over: that of that world stays.
func TestFailoversOfEpochs(t *testing.T) {
	v := Voter{ID: "a"}
	e := job.EpochID{Term: 1, Round: 1}
	w := &rendezvous.Failover{Term: 1, Deputies: []rendezvous.Deputy{{ID: "b"}}}
	require.False(t, v.Member())
	v.Runs(e, w)
	v.Runs(e, nil)
	require.True(t, v.Member())
	v.Runs(job.EpochID{Term: 1, Round: 2}, nil)
	require.False(t, v.Member())
	v.Runs(e, w)
	v.Parts()
	_, _, ok := v.Ballot()
	require.False(t, ok)
}
