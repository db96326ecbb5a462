package serve

import (
	"errors"
	"fmt"
	"iter"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"dlrover-run/hang"
	"dlrover-run/internal/job"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rdzv is a rendezvous with one run, "r", whose nodes have the IDs id0, id1 and so on, with two workers each.
type rdzv struct {
	mu       sync.Mutex
	spec     hang.Spec
	epoch    job.EpochID
	nodes    int
	running  bool
	worlds   int              // that were asked for
	suspects []hang.Suspicion // of node 0, while it trains

	asks   chan hang.Ask
	notes  []job.Note
	orders []hang.Order
	doubts int
}

func newRdzv(action hang.Action, nodes int) *rdzv {
	return &rdzv{
		spec: hang.Spec{Action: action}, epoch: job.EpochID{Term: 7, Round: 1}, nodes: nodes, running: true,
		asks: make(chan hang.Ask, 100),
	}
}

var errNobody = errors.New("nobody of that name is here")

func id(node int) string { return fmt.Sprintf("id%d", node) }

func (r *rdzv) config() Config {
	return Config{
		Spec: func(run string) (hang.Spec, error) {
			if run != "r" {
				return hang.Spec{}, errNobody
			}
			return r.spec, nil
		},
		Seat: r.seat, World: r.world,
		Notify: func(_ string, a hang.Ask) { r.asks <- a },
		Note:   func(_ string, n job.Note) { r.locked(func() { r.notes = append(r.notes, n) }) },
		Order:  func(_ string, o hang.Order) { r.locked(func() { r.orders = append(r.orders, o) }) },
		Doubt:  func(string, string) { r.locked(func() { r.doubts++ }) },
		judge:  blame,
	}
}

func (r *rdzv) locked(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

func (r *rdzv) seat(run, who string) (s Seat, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := -1
	for i := range r.nodes {
		if run == "r" && who == id(i) {
			n = i
		}
	}
	if n < 0 {
		return s, errNobody
	}
	return Seat{r.epoch, n, name(n), r.running}, nil
}

func name(node int) string { return fmt.Sprintf("n%d", node) }

func (r *rdzv) world(string) (w hang.World, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.worlds++
	if !r.running {
		return w, errNobody
	}
	w.Epoch = r.epoch
	for i := range r.nodes {
		w.Nodes = append(w.Nodes, hang.WorldNode{Name: name(i), RankBase: 2 * i, Slots: 2})
	}
	return w, nil
}

// blame names the rank with the smallest number of steps.
func blame(_ hang.World, all iter.Seq[hang.Evidence], _ []hang.StoreWait) hang.Verdict {
	es := slices.Collect(all)
	if len(es) == 0 {
		return hang.Verdict{}
	}
	least := slices.MinFunc(es, func(a, b hang.Evidence) int {
		return int(a.Samples[0].Page.Steps) - int(b.Samples[0].Page.Steps)
	})
	return hang.Verdict{
		Kind: hang.KindBehind, Confidence: hang.High, Deadline: 20 * time.Second, Certain: true,
		Suspects: []hang.Suspect{{Rank: least.Rank, Node: least.Node, GroupRank: least.GroupRank, Doing: "asleep"}},
	}
}

// evidence is what a node has of its two workers; rank 1 is a step behind.
func evidence(node int, at time.Duration) (es []hang.Evidence) {
	stacks := &hang.Stacks{Interpreter: "CPython 3.11.2", Threads: []hang.Thread{
		{TID: 100 + node, Main: true, State: 'S', Python: frames("train", 20)}, {TID: 200 + node, Native: frames("poll", 3)},
	}}
	for rank := 2 * node; rank < 2*node+2; rank++ {
		w := hang.Worker{Rank: rank, Local: rank % 2, PID: 100 + rank, Start: 3}
		p := &hang.Page{PID: w.PID, Steps: 9, Groups: []hang.GroupState{{ID: 1, Seq: 246}}}
		if rank == 1 {
			p.Steps = 8
		}
		es = append(es, hang.Evidence{
			Worker: w, Stacks: stacks, Samples: []hang.Sample{{Worker: w, At: at, Page: p}},
			Groups: []hang.Group{{ID: 1, Name: "0", Backend: "gloo", Ranks: "0-3"}},
		})
	}
	return es
}

func frames(name string, n int) (fs []hang.Frame) {
	for i := range n {
		fs = append(fs, hang.Frame{Func: fmt.Sprintf("%s_%d", name, i), File: "/job/train.py", Line: i})
	}
	return fs
}

func (r *rdzv) suspicion(node int, age time.Duration) hang.Report {
	return hang.Report{
		ID: id(node), Epoch: r.epoch, Suspicions: []hang.Suspicion{{Rank: 2 * node, Age: age, Limit: 10 * time.Second}},
	}
}
