package rendezvous

import (
	"fmt"
	"maps"
	"math/rand"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

// TestRandomHistories runs random clusters and holds the rules that no history may break.
func TestRandomHistories(t *testing.T) {
	for seed := range int64(300) {
		history(t, rand.New(rand.NewSource(seed)), 200)
	}
}

func FuzzHistory(f *testing.F) {
	f.Add(int64(1), 50)
	f.Fuzz(func(t *testing.T, seed int64, steps int) {
		history(t, rand.New(rand.NewSource(seed)), min(max(steps, 0), 400))
	})
}

func history(t testing.TB, rnd *rand.Rand, steps int) {
	p := Params{
		Min: 1 + rnd.Intn(3), Unit: 1 + rnd.Intn(2), MaxRestarts: rnd.Intn(4),
		Gate: rnd.Intn(2) == 0, GateTimeout: 20 * time.Second,
	}
	p.Max = p.Min + rnd.Intn(5)
	p.Static = p.Max == p.Min
	if p.Validate() != nil {
		return
	}
	s := newSim(t, p)
	s.r.cfg.Suspicious = func(e job.Evidence) string {
		if len(e.Losses) > 1 || len(e.Failures) == 2 {
			return "two at once"
		}
		return ""
	}
	s.r.cfg.Suspect = func(machine string) bool { return machine[len(machine)-1]%3 == 0 }
	for i := range steps {
		s.random(rnd, i)
		s.check()
	}
	s.calmDown()
}

// calmDown stops all faults: the run must reach an end, or a running world, or lack
// the nodes for one. Nobody may wait for nothing.
func (s *sim) calmDown() {
	clear(s.health)
	_ = s.step(Order{Kind: OrderResume})
	for _, name := range sortedKeys(s.r.orders.bars) {
		_ = s.step(Order{Kind: OrderUnbar, Node: name})
	}
	for range 3 {
		s.obey()
		s.pass(defaultLastCall + silentGrace)
		s.obey()
	}
	s.check()
	r := s.r
	switch r.epoch.phase {
	case finished:
	case forming:
		require.Zero(s.t, r.members.stopping, "someone is waited for")
		require.Less(s.t, s.p.floor(r.members.possible()), s.p.Min, "there are nodes for a world")
	case running:
		for _, n := range r.epoch.world {
			if n.state == member {
				require.Contains(s.t, s.runs, n.ID, "everyone in the world runs")
			}
		}
	default:
		require.Fail(s.t, "stuck", "phase %s", r.epoch.phase)
	}
}

func (s *sim) random(rnd *rand.Rand, i int) {
	ids := sortedKeys(s.dirs)
	pick := func() string { return ids[rnd.Intn(len(ids))] }
	switch k := rnd.Intn(15); {
	case k < 3 && len(ids) < 12:
		s.randomJoin(rnd, i)
	case k == 12:
		s.randomOrder(rnd)
	case k == 13 && len(ids) > 0:
		s.randomAnswer(rnd, pick())
	case k == 14 && rnd.Intn(10) == 0:
		s.newDaemon(rnd)
	case k < 7 && len(ids) > 0:
		if id := pick(); s.r.members.nodes[id] != nil {
			s.obeyOne(id)
		}
	case k == 7 && len(s.runs) > 0:
		s.fail(sortedKeys(s.runs)[rnd.Intn(len(s.runs))],
			[]Decision{RestartCharged, RestartFree, Permanent}[min(rnd.Intn(8), 2)])
	case k == 8 && len(ids) > 0:
		if id := pick(); s.r.members.nodes[id] != nil {
			s.vanish(id)
		}
	case k == 9 && len(ids) > 0:
		if id := pick(); s.r.members.nodes[id] != nil {
			s.must(Leave{ID: id})
			delete(s.dirs, id)
			delete(s.runs, id)
		}
	case k == 10 && len(s.runs) > 0:
		if id := sortedKeys(s.runs)[rnd.Intn(len(s.runs))]; s.r.members.nodes[id] != nil {
			s.succeed(id)
		}
	default:
		s.pass(time.Duration(rnd.Int63n(int64(5 * time.Second))))
	}
	for id := range s.dirs { // what is lost does not listen any more
		if s.r.members.nodes[id] == nil {
			delete(s.dirs, id)
			delete(s.runs, id)
		}
	}
}

// randomJoin brings a node with one of a few names, so that names are replaced, and repeated.
func (s *sim) randomJoin(rnd *rand.Rand, i int) {
	n := Node{ID: fmt.Sprintf("n%d", i), Name: fmt.Sprint("name", rnd.Intn(20)), Rank: rnd.Intn(4) - 1, Slots: 2}
	if rnd.Intn(8) == 0 {
		n.Slots = 0
	}
	if rnd.Intn(4) > 0 {
		n.Can = []Ability{CanGate}
	}
	s.health[n.ID] = checkOutcome(max(rnd.Intn(8)-3, 0))
	if s.step(Join{Node: n, Params: s.p}) == nil {
		s.must(Attach{ID: n.ID})
	}
}

func (s *sim) randomOrder(rnd *rand.Rand) {
	kinds := []OrderKind{OrderRestart, OrderBar, OrderUnbar, OrderUnbar, OrderPause, OrderResume, OrderResume}
	o := Order{Kind: kinds[rnd.Intn(len(kinds))], Charge: rnd.Intn(2) == 0}
	if rnd.Intn(50) == 0 {
		o.Kind = OrderStop
	}
	if o.Kind == OrderBar || o.Kind == OrderUnbar {
		o.Node = fmt.Sprint("name", rnd.Intn(20))
	}
	_ = s.step(o) // some are refused
}

// randomAnswer answers a check that was perhaps never asked for.
func (s *sim) randomAnswer(rnd *rand.Rand, id string) {
	switch {
	case s.r.members.nodes[id] == nil:
	case rnd.Intn(3) == 0:
		s.must(Barred{ID: id, Reason: "at random", Again: rnd.Intn(2) == 0})
	case rnd.Intn(3) == 0:
		s.must(Doubt{ID: id, Reason: "at random"})
	case rnd.Intn(3) == 0:
		s.must(Cleared{ID: id, Until: s.now})
	default:
		s.must(Cleared{ID: id, Until: s.now.Add(time.Duration(rnd.Int63n(int64(20 * time.Second))))})
	}
}

// newDaemon starts the daemon again; most nodes come back, in any order.
func (s *sim) newDaemon(rnd *rand.Rand) {
	v := &revived{sim: s, old: &sim{r: s.r, dirs: s.dirs, runs: maps.Clone(s.runs), worked: s.worked}}
	clear(s.awaited)
	cfg := Config{Term: s.r.out.seq + 1000, Suspicious: s.r.cfg.Suspicious, Suspect: s.r.cfg.Suspect}
	if rnd.Intn(4) > 0 {
		cfg.Kept = stored(s.t, s.r)
	}
	s.r, s.dirs = New(cfg), map[string]Directive{}
	ids := sortedKeys(v.old.dirs)
	rnd.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	if cfg.Kept != nil {
		defer v.checkKept(ids)
	}
	for _, id := range ids {
		if k := v.old.dirs[id].Kind; v.old.r.members.nodes[id] == nil || k == job.Done || k == job.Fail || rnd.Intn(10) == 0 {
			delete(s.runs, id)
			continue
		}
		v.comeBack(id)
		s.check()
	}
}

// check holds the rules between two events.
func (s *sim) check() {
	r := s.r
	counts := map[nodeState]int{}
	seconds := 0
	for _, n := range r.members.nodes {
		counts[n.state]++
		if n.state == checking && n.bar != nil || n.state == barred && n.again {
			seconds++
		}
		s.checkNode(n)
	}
	if r.epoch.phase != finished {
		require.Equal(s.t, counts[pending], r.members.stopping)
		require.Equal(s.t, counts[waiting], r.members.waiting)
		require.Equal(s.t, seconds, r.members.again)
		require.Equal(s.t, counts[checking]+counts[barred], r.members.checking+r.members.again+r.members.barred)
	}
	s.checkPasses()
	if r.epoch.phase == gating {
		require.Zero(s.t, r.members.stopping)
		require.NotZero(s.t, r.members.checking+r.members.again, "somebody's answer is awaited")
	}
	if r.orders.paused != nil {
		require.Equal(s.t, forming, r.epoch.phase)
	}
	if r.epoch.phase == running || r.epoch.phase == releasing {
		size := len(r.epoch.world)
		require.True(s.t, size >= s.p.Min && size <= s.p.Max && size%s.p.Unit == 0, "world of %d under %+v", size, s.p)
		working := 0
		for i, n := range r.epoch.world {
			require.Equal(s.t, i, n.rank)
			working += min(n.Slots, 1)
		}
		require.Equal(s.t, working, r.epoch.working)
	}
	for id, d := range s.runs { // no worker of an older epoch runs beside a released one
		if n := r.members.nodes[id]; n != nil && r.epoch.phase == running && n.state == member {
			require.Equal(s.t, r.epoch.id, d.EpochID, "node %s", id)
		}
	}
}

// checkPasses holds what is kept about checks, and that it is acted upon in time.
func (s *sim) checkPasses() {
	r := s.r
	for _, n := range r.members.nodes {
		require.False(s.t, n.optional && (n.state != waiting || n.dir.Kind != job.Check),
			"%s has an optional check: %s", n.ID, n.state)
		require.Equal(s.t, s.awaited[n.ID], s.member(n.ID).Asked, "who checks node %s knows when it shall not", n.ID)
		require.False(s.t, n.unpaired && !n.cleared, "node %s has passed alone, and has not", n.ID)
	}
	free := r.orders.paused == nil && r.memory.rebuild == nil && r.account.failPendingAt.IsZero()
	if !r.gate.failAt.IsZero() && r.epoch.phase != finished && free {
		waits := r.params.Static && r.shortage.failed() && r.members.checking > 0 && s.now.Before(r.gate.failAt)
		require.True(s.t, waits, "the run should have ended")
	}
	if r.epoch.phase == running || r.epoch.phase == releasing {
		require.Nil(s.t, r.shortage.lacking)
		require.False(s.t, r.epoch.sealedAt.IsZero(), "the clocks of the members' passes run")
	}
}

func (s *sim) checkNode(n *node) {
	r := s.r
	if r.memory.rebuild != nil || r.epoch.phase == finished {
		return
	}
	out := r.orders.bars[n.Name] != nil || n.bar != nil
	switch {
	case out && (n.state == member || n.state == waiting):
		require.Fail(s.t, "a barred node has workers, or may get some", "%s: %s", n.ID, n.state)
	case !out && n.state == barred:
		require.Fail(s.t, "a node is barred by nobody", n.ID)
	case r.orders.paused != nil && (n.dir.Kind == job.Run || n.dir.Kind == job.Lead || n.dir.Kind == job.Check):
		require.Fail(s.t, "the run is paused", "%s: %s", n.ID, n.dir.Kind)
	case !s.p.Gate && n.state == checking:
		require.Fail(s.t, "the run has no gate", n.ID)
	}
}
