package serve

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"dlrover-run/internal/job"
	"dlrover-run/netcheck"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pairing is a Check of its own rules, small enough to be seen through: when all who are expected have arrived it lets
// them test each other in pairs, in the order of their names, once, and decides by their reports. Who has not arrived
// after patience is silent.
type pairing struct {
	cfg     netcheck.Config
	waiting map[string]bool
	nodes   map[string]netcheck.Node
	tests   map[string]*pairTest // by node
	count   int
	due     time.Time
	seq     uint64
	decided map[string]netcheck.Verdict
	over    bool
	acts    []netcheck.Action
	events  []netcheck.Event
}

type pairTest struct {
	name string
	ends [2]string
}

const patience = 10 * time.Second

func newPairing(cfg netcheck.Config) *pairing {
	return &pairing{cfg: cfg, waiting: map[string]bool{}, nodes: map[string]netcheck.Node{}, tests: map[string]*pairTest{},
		decided: map[string]netcheck.Verdict{}}
}

func (p *pairing) Next() time.Time { return p.due }

func (p *pairing) Picture() netcheck.Picture {
	pic := netcheck.Picture{Phase: "host", Summary: fmt.Sprintf("%d tests", p.count)}
	for _, n := range p.sorted() {
		v, done := p.decided[n.ID]
		pic.Nodes = append(pic.Nodes, netcheck.NodePicture{Node: n, Open: !done, Verdict: v})
	}
	return pic
}

func (p *pairing) Progress() string {
	return fmt.Sprintf("%d of %d nodes passed", len(p.decided), len(p.nodes))
}

func (p *pairing) sorted() (ns []netcheck.Node) {
	for _, n := range p.nodes {
		ns = append(ns, n)
	}
	slices.SortFunc(ns, func(a, b netcheck.Node) int { return cmp.Compare(a.Name, b.Name) })
	return ns
}

func (p *pairing) Step(now time.Time, ev netcheck.Event) []netcheck.Action {
	p.acts = nil
	p.events = append(p.events, ev)
	switch ev := ev.(type) {
	case netcheck.Expect:
		for _, id := range slices.Concat(ev.IDs, ev.Helpers) {
			p.waiting[id] = true
		}
		p.due = now.Add(patience)
		p.note("check-began", "", fmt.Sprintf("%d nodes", len(p.waiting)))
	case netcheck.Arrive:
		delete(p.waiting, ev.Node.ID)
		p.void(ev.Node.ID)
		delete(p.decided, ev.Node.ID)
		p.nodes[ev.Node.ID] = ev.Node
		p.pair()
	case netcheck.Ready:
		if t := p.tests[ev.ID]; t != nil && t.name == ev.Test {
			p.assign(t.ends[1], netcheck.Dial, t, ev.Addrs)
		}
	case netcheck.Report:
		p.report(ev)
	case netcheck.Gone:
		delete(p.waiting, ev.ID)
		delete(p.nodes, ev.ID)
		delete(p.decided, ev.ID)
		p.void(ev.ID)
		p.pair()
	case netcheck.Tick:
		p.tick(now)
	}
	over := len(p.waiting) == 0 && len(p.decided) == len(p.nodes)
	if over && !p.over {
		p.note("check-ended", "", "")
	}
	p.over = over
	return p.acts
}

// void ends the test of a node without a result.
func (p *pairing) void(id string) {
	if t := p.tests[id]; t != nil {
		delete(p.tests, t.ends[0])
		delete(p.tests, t.ends[1])
	}
}

func (p *pairing) tick(now time.Time) {
	if now.Before(p.due) {
		return
	}
	for id := range p.waiting {
		v := netcheck.Verdict{State: netcheck.StateFaulty, Excluded: !p.cfg.Spec.ReportOnly, Reason: "silent"}
		p.note("check-verdict", id, id+" is faulty: silent")
		p.acts = append(p.acts, netcheck.Action{Silent: id, Verdict: &v})
	}
	clear(p.waiting)
	p.pair()
}

// pair begins the tests as soon as nobody is waited for.
func (p *pairing) pair() {
	if len(p.waiting) > 0 || len(p.tests) > 0 {
		return
	}
	p.due = time.Time{}
	ns := p.sorted()
	for i := 0; i+1 < len(ns); i += 2 {
		p.count++
		t := &pairTest{fmt.Sprintf("t%d", p.count), [2]string{ns[i].ID, ns[i+1].ID}}
		p.tests[ns[i].ID], p.tests[ns[i+1].ID] = t, t
		p.assign(ns[i].ID, netcheck.Serve, t, nil)
	}
	if len(ns)%2 > 0 {
		p.decide(ns[len(ns)-1].ID, netcheck.Verdict{State: netcheck.StateOK})
	}
}

func (p *pairing) assign(to string, d netcheck.Duty, t *pairTest, addrs []string) {
	other := t.ends[0]
	if other == to {
		other = t.ends[1]
	}
	n := p.nodes[other]
	p.seq++
	p.acts = append(p.acts, netcheck.Action{To: to, Assign: &netcheck.Assignment{
		Seq: p.seq, Duty: d, Round: 1, Test: t.name, Left: 6 * time.Second,
		Peer: netcheck.Peer{ID: other, Name: n.Name, Addr: n.Addr, NICs: n.NICs, Addrs: addrs},
	}})
}

func (p *pairing) report(ev netcheck.Report) {
	t := p.tests[ev.ID]
	if t == nil || t.name != ev.Result.Test {
		return
	}
	v := netcheck.Verdict{State: netcheck.StateOK, Paired: true}
	if ev.Result.Class != netcheck.OK {
		v = netcheck.Verdict{State: netcheck.StateFaulty, Excluded: true, Paired: true, Reason: string(ev.Result.Class)}
	}
	p.decide(ev.ID, v)
}

func (p *pairing) decide(id string, v netcheck.Verdict) {
	p.seq++
	p.decided[id] = v
	delete(p.tests, id)
	a := &netcheck.Assignment{Seq: p.seq, Duty: netcheck.Decided, Verdict: &v}
	p.acts = append(p.acts, netcheck.Action{To: id, Assign: a})
}

func (p *pairing) note(event job.Event, node, text string) {
	p.acts = append(p.acts, netcheck.Action{Note: &job.Note{Event: event, Node: node, Text: text}})
}
