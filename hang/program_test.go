package hang

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang/rankset"
	"dlrover-run/internal/testkit"
)

// A program is what all ranks of a job in three dimensions do, step by step. It is run until nobody can go on, because
// some ranks have stopped to. What the pages and stacks then say must lead to them.

// op is one thing that a rank does: a collective of a group, or p2p.
type op struct {
	group int // index of a group; -1: recv of from; -2: nothing that others see
	from  int
}

type program struct {
	groups [][]int // ranks
	ids    []uint64
	names  []string
	ops    [][]op // of each rank
}

// newProgram makes the groups of tensor, pipeline and data parallelism, and some steps.
func newProgram(rng *rand.Rand, tp, pp, dp, steps int) *program {
	n := tp * pp * dp
	p := &program{ops: make([][]op, n)}
	rank := func(t, s, d int) int { return (d*pp+s)*tp + t }
	group := func(name string, ranks []int) int {
		p.groups, p.names = append(p.groups, ranks), append(p.names, name)
		p.ids = append(p.ids, uint64(len(p.groups)))
		return len(p.groups) - 1
	}
	world := make([]int, n)
	for r := range world {
		world[r] = r
	}
	all := group("world", world)
	tensor, data := make([]int, n), make([]int, n)
	for s := range pp {
		for d := range dp {
			var ranks []int
			for t := range tp {
				ranks = append(ranks, rank(t, s, d))
			}
			g := group("tp", ranks)
			for _, r := range ranks {
				tensor[r] = g
			}
		}
		for t := range tp {
			var ranks []int
			for d := range dp {
				ranks = append(ranks, rank(t, s, d))
			}
			g := group("dp", ranks)
			for _, r := range ranks {
				data[r] = g
			}
		}
	}
	for step := range steps {
		for r := range n {
			p.ops[r] = append(p.ops[r], op{group: -2})
			if stage := r / tp % pp; stage > 0 {
				p.ops[r][len(p.ops[r])-1] = op{group: -1, from: r - tp}
			}
			for range 1 + step%2 {
				p.ops[r] = append(p.ops[r], op{group: -2}, op{group: tensor[r]})
			}
			p.ops[r] = append(p.ops[r], op{group: data[r]})
			if step%3 == 0 {
				p.ops[r] = append(p.ops[r], op{group: all})
			}
		}
	}
	return p
}

// run lets all ranks go on until nobody can. A culprit stops before an op of its own.
func (p *program) run(stops map[int]int) (pc []int, seq []map[int]uint64) {
	n := len(p.ops)
	pc, seq = make([]int, n), make([]map[int]uint64, n)
	for r := range seq {
		seq[r] = map[int]uint64{}
	}
	entered := make([]bool, n)
	for moved := true; moved; {
		moved = false
		for r := range n {
			if at, stopped := stops[r]; pc[r] >= len(p.ops[r]) || stopped && pc[r] == at {
				continue
			}
			o := p.ops[r][pc[r]]
			if o.group >= 0 && !entered[r] {
				entered[r], moved = true, true
				seq[r][o.group]++
			}
			if p.done(r, o, pc, seq) {
				pc[r]++
				entered[r], moved = false, true
			}
		}
	}
	return pc, seq
}

// done says whether an op can end: everybody has entered it, or the sender has come so far.
func (p *program) done(r int, o op, pc []int, seq []map[int]uint64) bool {
	switch {
	case o.group == -2:
		return true
	case o.group == -1:
		return pc[o.from] > pc[r]+2 // what it sends is ready
	}
	for _, m := range p.groups[o.group] {
		if seq[m][o.group] < seq[r][o.group] {
			return false
		}
	}
	return true
}

// scene is what is seen of it.
func (p *program) scene(rng *rand.Rand, stops map[int]int) *scene {
	pc, seq := p.run(stops)
	s := &scene{world: World{Nodes: []WorldNode{{Name: "n", Slots: len(p.ops)}}}}
	for r := range p.ops {
		w := Worker{Rank: r, Local: r, PID: r + 1, Start: 5}
		e := Evidence{Worker: w, Node: "n", Stacks: inUser("hold")}
		wchan := "hrtimer_nanosleep"
		if _, stopped := stops[r]; !stopped && pc[r] < len(p.ops[r]) {
			e.Stacks, wchan = [...]*Stacks{inRecv(), inAllReduce()}[min(1+p.ops[r][pc[r]].group, 1)], "futex_wait_queue"
		}
		page := &Page{PID: w.PID, Start: 5, Created: 1, Steps: 50, LastStep: now0 - time.Second}
		for g, ranks := range p.groups {
			for _, m := range ranks {
				if m == r {
					e.Groups = append(e.Groups, Group{ID: p.ids[g], Name: fmt.Sprint(g), Desc: p.names[g],
						Ranks: rankset.Of(ranks...).String()})
					since := now0 - time.Duration(rng.IntN(2))*time.Second/2
					page.Groups = append(page.Groups, GroupState{ID: p.ids[g], Seq: 100 + seq[r][g], Since: since})
				}
			}
		}
		for i := range 3 {
			at := now0 + evenAge + time.Duration(2*i)*time.Second
			page := *page
			page.Heartbeat = at
			e.Samples = append(e.Samples, Sample{Worker: w, At: at, Page: &page, Proc: Proc{State: 'S', WChan: wchan}})
		}
		s.ev = append(s.ev, e)
	}
	return s
}

// Whoever stops to go on is named, and nobody else with high confidence, in any topology.
func TestWhoeverStopsIsNamed(t *testing.T) {
	rounds := 4000
	if testing.Short() {
		rounds = 300
	}
	rng := rand.New(rand.NewPCG(testkit.Seed(t, "HANG_SEED"), 3))
	high, low := 0, 0
	for range rounds {
		tp, pp, dp := 1<<rng.IntN(3), 1<<rng.IntN(3), 1<<rng.IntN(3)
		if tp*pp*dp < 2 {
			continue
		}
		p := newProgram(rng, tp, pp, dp, 8)
		stops := map[int]int{}
		for range 1 + rng.IntN(2) {
			r := rng.IntN(tp * pp * dp)
			stops[r] = 4 + rng.IntN(len(p.ops[r])-8)
		}
		pc, _ := p.run(stops)
		reached := map[int]int{}
		for r, at := range stops {
			if pc[r] == at {
				reached[r] = at // others were stopped by others before
			}
		}
		if slices.ContainsFunc(pc, func(at int) bool { return at == len(p.ops[0]) }) {
			continue // a rank that nobody needs to wait for has come to the end
		}
		v := p.scene(rng, reached).judge()
		about := fmt.Sprintf("tp %d, pp %d, dp %d, stopped %v: %s %s", tp, pp, dp, reached, v.Kind, v.Line)
		if len(reached) == tp*pp*dp {
			require.Equal(t, KindAlone, v.Kind, about)
			continue
		}
		require.Equal(t, KindBehind, v.Kind, about)
		for _, s := range v.Suspects {
			require.Contains(t, reached, s.Rank, about)
		}
		if v.Confidence == High {
			high++
		} else {
			low++
		}
	}
	t.Logf("%d of high confidence, %d of low", high, low)
	require.Greater(t, high, 10*low)
}
