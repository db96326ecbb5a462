package netcheck

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// watcher holds a Check to what it promises whatever happens.
type watcher struct {
	t     testing.TB
	check *Check
	now   time.Time
	here  map[string]bool   // has arrived, not gone, not decided
	told  map[string]bool   // to be checked, and has not arrived
	test  map[string]string // that a node is in
	tests map[string]Assignment
	seq   map[string]uint64
	log   []string
	story *json.Encoder // of all actions and pictures; nil for nobody
	early bool          // nodes that report listen for their next test
}

func newWatcher(t testing.TB, cfg Config) *watcher {
	return &watcher{t: t, check: New(cfg), now: simBegin, here: map[string]bool{}, told: map[string]bool{},
		test: map[string]string{}, tests: map[string]Assignment{}, seq: map[string]uint64{}}
}

// give hands over an event, after what it says has been believed. What is due by then happens before.
func (w *watcher) give(ev Event) {
	if _, tick := ev.(Tick); !tick {
		w.give(Tick{})
	}
	switch ev := ev.(type) {
	case Expect:
		for _, id := range ev.IDs {
			if !w.here[id] {
				w.told[id] = true
			}
		}
	case Arrive:
		delete(w.told, ev.Node.ID)
		delete(w.test, ev.Node.ID)
		w.here[ev.Node.ID] = true
	case Gone:
		delete(w.told, ev.ID)
		delete(w.here, ev.ID)
		delete(w.test, ev.ID)
	case Report:
		if w.test[ev.ID] == ev.Result.Test {
			delete(w.test, ev.ID)
		}
	}
	for _, a := range w.check.Step(w.now, ev) {
		w.look(a)
	}
	p := w.check.Picture()
	if w.story != nil {
		_ = w.story.Encode(p)
	}
}

func (w *watcher) look(a Action) {
	if w.story != nil {
		_ = w.story.Encode(a)
	}
	set := 0
	for _, is := range []bool{a.Assign != nil, a.Silent != "", a.Note != nil} {
		if is {
			set++
		}
	}
	require.Equal(w.t, 1, set, "%+v", a)
	switch {
	case a.Silent != "":
		require.True(w.t, w.told[a.Silent], "%s was not waited for", a.Silent)
		require.NotNil(w.t, a.Verdict)
		delete(w.told, a.Silent)
	case a.Assign != nil:
		w.log = append(w.log, fmt.Sprintf("%v %s %+v %+v", w.now.Sub(simBegin), a.To, a.Assign.Verdict, a.Assign.Peer))
		w.assigned(a.To, *a.Assign)
	}
}

func (w *watcher) assigned(id string, a Assignment) {
	require.True(w.t, w.here[id], "%s is not here and gets %+v", id, a)
	require.Greater(w.t, a.Seq, w.seq[id])
	w.seq[id] = a.Seq
	switch a.Duty {
	case Rest:
		delete(w.test, id)
	case Decided:
		require.NotNil(w.t, a.Verdict)
		require.NotEmpty(w.t, a.Verdict.State)
		require.LessOrEqual(w.t, len(a.Verdict.Findings), MaxFindings)
		require.Empty(w.t, w.test[id], "%s is decided in a test", id)
		delete(w.here, id)
		delete(w.test, id)
	default:
		require.Empty(w.t, w.test[id], "%s is in a test and gets %+v", id, a)
		require.NotEmpty(w.t, a.Test)
		require.Positive(w.t, a.Left)
		if a.Peer.ID != "" {
			require.True(w.t, w.here[a.Peer.ID], "%s is to meet %s, who is not here", id, a.Peer.ID)
		}
		w.test[id] = a.Test
		w.tests[id] = a
	}
}

// end lets time pass until the Check wants nothing any more: all are decided by then, in bounded time.
func (w *watcher) end() {
	last := w.now
	for ticks := 0; ; ticks++ {
		next := w.check.Next()
		if next.IsZero() {
			break
		}
		require.Less(w.t, ticks, 100_000, "it never ends")
		w.now = later(w.now, next)
		w.give(Tick{})
	}
	require.Empty(w.t, w.here, "not decided: %s", w.check.Picture().Summary)
	require.Empty(w.t, w.told, "not decided: %s", w.check.Picture().Summary)
	most := gatherMost + absentTime + DefaultTimeout + ImportTimeout + computeTime + gatherMost
	require.LessOrEqual(w.t, w.now.Sub(last), most+absentTime)
	require.Equal(w.t, "idle", w.check.Picture().Phase)
}

// chance makes events out of random numbers.
func chance(w *watcher, next func(n int) int) {
	id := fmt.Sprintf("n%d", next(12))
	w.now = w.now.Add(time.Duration(next(8)) * 250 * time.Millisecond)
	switch next(8) {
	case 0:
		w.give(Expect{IDs: []string{id, fmt.Sprintf("n%d", next(12))}, Helpers: []string{fmt.Sprintf("n%d", next(12))}})
	case 1:
		w.give(Arrive{chanceNode(id, next)})
	case 2:
		if next(3) == 0 {
			w.give(Gone{id})
		}
	case 3:
		w.give(Tick{})
	case 4, 5:
		w.give(Ready{ID: id, Test: w.tests[id].Test, Addrs: []string{"x:1"}})
	default:
		if w.early {
			w.give(Listens{ID: id, Addrs: []string{"x:1"}})
		}
		w.give(Report{ID: id, Result: chanceResult(w.tests[id].Test, next)})
	}
}

func chanceNode(id string, next func(n int) int) Node {
	n := Node{ID: id, Name: id, Torch: next(4) > 0, GPUs: next(3), NICs: make([]NIC, next(3))}
	if next(3) == 0 {
		n.Switch = fmt.Sprintf("leaf%d", next(3))
	}
	if next(20) == 0 {
		n.Findings = []Finding{{Severity: Fatal, Text: "broken"}}
	}
	return n
}

func chanceResult(test string, next func(n int) int) Result {
	classes := []Class{OK, OK, OK, OK, Refused, Own, Canceled, MTU, Silent, "nonsense"}
	r := Result{Test: test, Class: classes[next(len(classes))]}
	for range next(3) {
		r.Flows = append(r.Flows, Flow{Rail: next(4) - 1, Mbps: float64(next(2000) - 100), Retrans: float64(next(3)) / 100,
			Segments: 2000, P50: float64(next(1000)), CPUBound: next(9) == 0})
	}
	if next(2) == 0 {
		r.Torch = &TorchResult{Matmul: []float64{float64(next(5))}, BusMBps: float64(next(100))}
	}
	return r
}

func chanceConfig(seed uint64) Config {
	spec := Spec{Level: []Level{LevelLocal, LevelHost, LevelFull}[seed%3], TTL: DefaultTTL, Timeout: DefaultTimeout}
	spec.Comm = spec.Level == LevelFull && seed%2 == 0
	spec.ExcludeStraggler = seed%5 == 0
	return Config{Spec: spec, Seed: seed}
}

// play gives a Check random events and lets it end.
func play(t testing.TB, seed uint64, events int) []string {
	w := newWatcher(t, chanceConfig(seed))
	w.early = seed%2 == 1
	w.live(seed, events)
	return w.log
}

func (w *watcher) live(seed uint64, events int) {
	rng := rand.New(rand.NewPCG(seed, 3))
	for range events {
		chance(w, rng.IntN)
	}
	w.end()
}

// seeded names the seed when a test fails.
type seeded struct {
	testing.TB
	seed uint64
}

func (s seeded) Errorf(format string, args ...any) {
	s.Helper()
	s.TB.Errorf("seed %d: "+format, append([]any{s.seed}, args...)...)
}

func TestWhateverHappensAllAreDecided(t *testing.T) {
	seeds := 2000
	if testing.Short() {
		seeds = 30
	}
	for seed := range uint64(seeds) {
		play(seeded{t, seed}, seed, 250)
	}
}

func TestEqualSeedsGiveEqualChecks(t *testing.T) {
	for seed := range uint64(5) {
		require.True(t, slices.Equal(play(t, seed, 200), play(t, seed, 200)), seed)
	}
	runs := func() (log []Action) {
		s := newSim(5, 100)
		s.spurious, s.disturbed = 0.01, 0.05
		s.begin()
		for s.step() {
		}
		for _, x := range s.nodes {
			log = append(log, Action{Verdict: x.verdict})
		}
		return log
	}
	require.Equal(t, runs(), runs())
}

func FuzzEvents(f *testing.F) {
	f.Add(uint64(1), []byte("the events of a check"))
	f.Fuzz(func(t *testing.T, seed uint64, data []byte) {
		w := newWatcher(t, chanceConfig(seed))
		w.early = seed%2 == 1
		next := func(n int) int {
			if len(data) == 0 {
				return 0
			}
			x := int(data[0]) % n
			data = data[1:]
			return x
		}
		for len(data) > 0 {
			chance(w, next)
		}
		w.end()
	})
}
