package netcheck

import (
	"container/heap"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"time"

	"dlrover-run/internal/job"
)

// sim drives a Check by events, with a model of nodes, paths and faults. It is deterministic.
type sim struct {
	check *Check
	rng   *rand.Rand
	nodes []*simNode
	byID  map[string]*simNode
	queue simQueue
	n     int
	now   time.Time
	start time.Time

	spurious  float64                // chance that a test fails for no reason
	badPath   func(a, b int) bool    // such paths fail always
	slowPath  func(a, b int) float64 // share of the rate
	noise     float64                // standard deviation of rates
	disturbed float64                // share of samples that are too low
	failTime  time.Duration          // of a test that fails
	failText  string
	compute   time.Duration
	helpers   int // the last so many nodes

	commFails bool
	commBus   float64                     // of the collective, in 10^6 byte/s
	before    int                         // tests of earlier checks
	began     func(test string, a, b int) // of every test; nil
	ended     func(test string)

	notes []job.Note
	work  []simWork
	story *json.Encoder // of all actions; nil for nobody

	early   bool   // nodes listen before their tests
	arrived string // the last one
	told    int    // tests that began so
}

// simWork is one test that was begun.
type simWork struct {
	at    time.Duration
	round int
	ends  [2]int
	kind  testKind
}

type simNode struct {
	i      int
	id     string
	fails  float64 // share of its tests
	dead   bool    // says nothing after its arrival
	class  Class   // with which its tests fail
	tx, rx float64 // share of the rate
	loss   float64
	// sent changes what others report of what they got from this node, got what it reports itself.
	sent, got  func(*Result, *simNode)
	matmul     float64
	torchFails bool
	broken     Class // with which it computes
	node       Node
	absent     bool
	passed     bool // a test of this check
	duty       Assignment
	verdict    *Verdict
	done       time.Duration
}

type simEvent struct {
	at time.Time
	n  int
	ev Event
}

type simQueue []simEvent

func (q simQueue) Len() int { return len(q) }
func (q simQueue) Less(i, j int) bool {
	return q[i].at.Before(q[j].at) || q[i].at.Equal(q[j].at) && q[i].n < q[j].n
}
func (q simQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *simQueue) Push(x any)   { *q = append(*q, x.(simEvent)) }
func (q *simQueue) Pop() any {
	old := *q
	x := old[len(old)-1]
	*q = old[:len(old)-1]
	return x
}

var simBegin = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// Times of tests as netcheck/probe and netcheck/python need them.
func simSpec() Spec { return Spec{Level: LevelHost, TTL: DefaultTTL, Timeout: DefaultTimeout} }

// newSim is n healthy nodes.
func newSim(seed uint64, n int) *sim {
	s := &sim{rng: rand.New(rand.NewPCG(seed, 7)), byID: map[string]*simNode{},
		now: simBegin, start: simBegin, early: seed%2 == 1, failTime: 2500 * time.Millisecond, noise: 0.03, commBus: 100}
	for i := range n {
		x := &simNode{i: i, id: fmt.Sprintf("n%d", i), tx: 1, rx: 1, class: Unreachable, matmul: 1}
		x.node = Node{ID: x.id, Name: fmt.Sprintf("node%d", i), NICs: []NIC{{Name: "eth0", Mbps: 1000, MTU: 1500}}}
		s.nodes = append(s.nodes, x)
		s.byID[x.id] = x
	}
	s.check = New(Config{Spec: simSpec(), Seed: seed})
	return s
}

func (s *sim) at(after time.Duration, ev Event) {
	s.n++
	heap.Push(&s.queue, simEvent{s.now.Add(after), s.n, ev})
}

func (s *sim) took() time.Duration { return s.now.Sub(s.start) }

// begin has all nodes arrive within a tenth of a second.
func (s *sim) begin() {
	var ids, helpers []string
	s.before = len(s.work)
	for i, x := range s.nodes {
		x.passed = false
		if i >= len(s.nodes)-s.helpers {
			helpers = append(helpers, x.id)
		} else {
			ids = append(ids, x.id)
		}
	}
	s.at(0, Expect{IDs: ids, Helpers: helpers})
	for _, x := range s.nodes {
		if !x.absent {
			s.at(time.Duration(s.rng.IntN(100))*time.Millisecond, Arrive{x.node})
		}
	}
}

// run until nothing is to be done any more.
func (s *sim) run() {
	s.begin()
	s.drain()
}

func (s *sim) drain() {
	for s.step() {
	}
}

// step handles the next event, or the Check's own time.
func (s *sim) step() bool {
	next := s.check.Next()
	if len(s.queue) > 0 && (next.IsZero() || !s.queue[0].at.After(next)) {
		e := heap.Pop(&s.queue).(simEvent)
		s.now = e.at
		s.give(e.ev)
		return true
	}
	if next.IsZero() {
		return false
	}
	s.now = later(s.now, next)
	s.give(Tick{})
	return true
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func (s *sim) give(ev Event) {
	if r, ok := ev.(Report); ok && s.ended != nil {
		s.ended(r.Result.Test)
	}
	if s.early {
		s.listen(ev)
	}
	for _, a := range s.check.Step(s.now, ev) {
		s.act(a)
	}
}

// listen has a node that reports listen for its next test. The one that arrives last does not.
func (s *sim) listen(ev Event) {
	id := ""
	switch ev := ev.(type) {
	case Arrive:
		id = s.arrived
		s.arrived = ev.Node.ID
	case Report:
		id = ev.ID
	}
	if id != "" {
		for _, a := range s.check.Step(s.now, Listens{ID: id, Addrs: []string{"10.0.0.1:1"}}) {
			s.act(a)
		}
	}
}

func (s *sim) act(a Action) {
	if s.story != nil {
		_ = s.story.Encode(a)
	}
	switch {
	case a.Silent != "":
		s.byID[a.Silent].verdict = a.Verdict
	case a.Note != nil:
		s.notes = append(s.notes, *a.Note)
	case a.Assign != nil:
		x := s.byID[a.To]
		x.duty = *a.Assign
		if !x.dead || a.Assign.Duty == Decided {
			s.obey(x, *a.Assign)
		}
	}
}

const (
	simLatency = 20 * time.Millisecond // of a message to the service and back
	simComm    = 5 * time.Second
)

func (s *sim) obey(x *simNode, a Assignment) {
	switch a.Duty {
	case Decided:
		if a.Verdict.State == StateOK && !x.passed && len(s.work) > s.before {
			panic(fmt.Sprintf("node %d is ok, and has passed no test: %+v", x.i, a.Verdict))
		}
		x.verdict = a.Verdict
		x.done = s.took()
	case Serve:
		s.told += map[bool]int{true: 1}[a.Told]
		s.at(simLatency, Ready{ID: x.id, Test: a.Test, Addrs: []string{"10.0.0.1:1"}})
		peer := s.byID[a.Peer.ID]
		t := s.check.roster.byID[x.id].test
		if s.began != nil {
			s.began(a.Test, x.i, peer.i)
		}
		s.work = append(s.work, simWork{s.took(), a.Round, [2]int{x.i, peer.i}, t.kind})
		if peer.dead {
			s.at(testTime, Report{x.id, Result{Test: a.Test, Class: Unreachable}})
		}
	case Dial:
		s.meet(x, s.byID[a.Peer.ID], a)
	case Compute:
		s.at(s.compute, Report{x.id, Result{Test: a.Test, Class: x.broken, Torch: &TorchResult{Matmul: []float64{x.matmul}}}})
	case Join:
		s.obeyJoin(x, a)
	}
}

// meet is a test of two nodes.
func (s *sim) meet(x, server *simNode, a Assignment) {
	if server.dead {
		s.at(testTime, Report{x.id, Result{Test: a.Test, Class: Unreachable}})
		return
	}
	if s.broken(x, server, a) {
		class := x.class
		if x.fails == 0 {
			class = server.class
		}
		s.at(s.failTime, Report{x.id, Result{Test: a.Test, Class: class, Text: s.failText}})
		s.at(s.failTime, Report{server.id, Result{Test: a.Test, Class: class, Text: s.failText}})
		return
	}
	x.passed, server.passed = true, true
	took := 3 * time.Second
	switch {
	case a.Torch:
		took = 4 * time.Second
	case a.Quick:
		took = 1200 * time.Millisecond
	}
	s.at(took, Report{x.id, s.measured(a, server, x)})
	s.at(took, Report{server.id, s.measured(a, x, server)})
}

func (s *sim) broken(x, y *simNode, a Assignment) bool {
	if a.Torch && (x.torchFails || y.torchFails) {
		return true
	}
	return s.rng.Float64() < x.fails || s.rng.Float64() < y.fails || s.rng.Float64() < s.spurious ||
		s.badPath != nil && s.badPath(x.i, y.i)
}

// measured is what y reports of what it got from x.
func (s *sim) measured(a Assignment, x, y *simNode) Result {
	rate := 1000 * min(x.tx, y.rx)
	if s.slowPath != nil {
		rate = min(rate, 1000*s.slowPath(x.i, y.i))
	}
	rate *= 1 + s.noise*s.rng.NormFloat64()
	if s.rng.Float64() < s.disturbed {
		rate *= 0.3 + 0.5*s.rng.Float64()
	}
	if a.Torch {
		return Result{Test: a.Test, Torch: &TorchResult{Matmul: []float64{y.matmul}, BusMBps: rate / 8}}
	}
	r := Result{Test: a.Test, Flows: []Flow{{NIC: "eth0", Mbps: max(rate, 1), P50: 50, Segments: 50000, Retrans: y.loss}}}
	for _, change := range []func(*Result, *simNode){y.got, x.sent} {
		if change != nil {
			change(&r, y)
		}
	}
	return r
}
