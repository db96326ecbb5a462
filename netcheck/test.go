package netcheck

import (
	"math"
	"strings"
	"time"
)

// Bounds of one test. A node that has reported nothing when a test expires is silent in it.
const (
	testTime   = 6 * time.Second // of a test by TCP, handshake and both directions included
	quickTime  = 4 * time.Second // of a shorter one
	torchTime  = 20 * time.Second
	reportTime = 2 * time.Second // beyond it, for the report to come; also after the other end's report of a failure
	readyTime  = 4 * time.Second // from the assignment to Ready
	freshTime  = 2 * time.Second // a node that was heard so lately is taken to be there still
	torchReady = 10 * time.Second
	maxRails   = 64
)

// outcome of a test for one capability of its ends.
type outcome uint8

const (
	none outcome = iota // no evidence
	pass
	fail
)

// testKind is why a test is made.
type testKind uint8

const (
	baseTest   testKind = iota
	retest              // of a suspect, against a certified node where there is one
	pairTest            // of a pair that has failed, once more
	mutualTest          // of two that are blamed, with each other
)

// test is one measurement between two nodes.
type test struct {
	id       string
	kind     testKind
	round    int
	quick    bool
	torch    bool
	ends     [2]*member // the first one serves
	start    time.Time
	deadline time.Time
	ready    bool
	told     bool // ready at its start: the serving end has not answered to its assignment
	ended    bool
	dropped  bool // planned, and will not be made
	reported [2]bool
	class    [2]Class
	text     [2]string // of a failure
	reach    outcome
	cross    bool // between two leaves
	listed   bool // in scheduler.disputes, or was
	// lanes[d] has the samples sent by ends[d] to the other end.
	lanes [2][]sample
	again *test // the later test of the same pair
}

// sample is one direction of one lane in one test. Rates are in 10^6 bit/s.
type sample struct {
	mbps    float32
	figures figures
	cpu     bool // a low rate is no evidence
	result  outcome
	lossy   bool // result is fail because of losses
}

// lane identifies comparable samples across tests: the i-th rail of all nodes, by one means.
type lane struct {
	rail int
	kind string
}

// end is the place of m in the test.
func (t *test) end(m *member) int {
	if t.ends[0] == m {
		return 0
	}
	return 1
}

// by names the means by which a lane was measured, unless it is TCP.
func (l lane) by() string {
	if l.kind == "" {
		return ""
	}
	return " by " + strings.ToUpper(l.kind)
}

// other is m's partner in the test.
func (t *test) other(m *member) *member { return t.ends[1-t.end(m)] }

// silentEnd reports whether m's end did not report.
func (t *test) silentEnd(m *member) bool { return t.class[t.end(m)] == Silent }

// blameless reports whether the class is no news about the network or the other node.
func blameless(c Class) bool { return c == Own || c == Canceled }

// absorb takes one end's report.
func (t *test) absorb(rs *rates, end int, r *Result) {
	t.reported[end] = true
	t.class[end] = r.Class
	if r.Class != OK {
		t.text[end] = r.Text
	}
	for i := range r.Flows[:min(len(r.Flows), 2*maxRails)] {
		t.flow(rs, end, &r.Flows[i])
	}
	if r.Torch != nil && r.Torch.BusMBps > 0 {
		t.sample(rs, 1-end, lane{}).mbps = positive(8 * r.Torch.BusMBps)
	}
}

func (t *test) flow(rs *rates, end int, f *Flow) {
	if f.Rail < 0 || f.Rail >= maxRails {
		return
	}
	l := lane{rail: f.Rail}
	if f.Kind == "rdma" {
		l.kind = f.Kind
	}
	in := t.sample(rs, 1-end, l)
	in.mbps, in.cpu = positive(f.Mbps), in.cpu || f.CPUBound
	in.figures.take(f, false)
	out := t.sample(rs, end, l) // after in: either may have moved the slice
	out.cpu = out.cpu || f.CPUBound
	out.figures.take(f, true)
}

// sample is the place of one lane's direction; it is valid until the next call.
func (t *test) sample(rs *rates, from int, l lane) *sample {
	i := rs.lane(l)
	for len(t.lanes[from]) <= i {
		t.lanes[from] = append(t.lanes[from], sample{})
	}
	return &t.lanes[from][i]
}

// positive is x where that is a usable measure, else 0.
func positive(x float64) float32 {
	if x > 0 && x < math.MaxFloat32 {
		return float32(x)
	}
	return 0
}

// conclude decides whether the ends reach each other; rates are judged once the usual rates are known.
func (t *test) conclude() {
	t.reach = pass
	for _, c := range t.class {
		switch {
		case blameless(c):
			t.reach = none
			return
		case c != OK:
			t.reach = fail
		}
	}
}

// outcome for capability f of m.
func (t *test) outcome(m *member, f capability) outcome {
	if f == reach {
		return t.reach
	}
	s := t.of(m, f)
	if s == nil {
		return none
	}
	return s.result
}

// of is the sample that capability f of m made, or nil.
func (t *test) of(m *member, f capability) *sample {
	from := t.end(m)
	if f.receives() {
		from = 1 - from
	}
	if i := f.lane(); i < len(t.lanes[from]) {
		return &t.lanes[from][i]
	}
	return nil
}

// failed reports whether the ends did not reach each other, or any rate was low.
func (t *test) failed() bool {
	if t.reach == fail {
		return true
	}
	for d := range t.lanes {
		for i := range t.lanes[d] {
			if t.lanes[d][i].result == fail {
				return true
			}
		}
	}
	return false
}

// part is the assignment of the end with that duty.
func (t *test) part(duty Duty, now time.Time) Assignment {
	other := t.ends[1].n
	if duty == Dial {
		other = t.ends[0].n
	}
	return Assignment{Duty: duty, Round: t.round, Test: t.id, Quick: t.quick, Torch: t.torch, Told: t.told,
		Left: t.start.Add(t.limit()).Sub(now),
		Peer: Peer{ID: other.ID, Name: other.name(), Addr: other.Addr, NICs: other.NICs}}
}

// expire ends a test that took too long. An end that has not reported in time is silent. After one end has reported a
// failure, the wait for the other is shorter, and that end does not count as silent.
func (t *test) expire(now time.Time) {
	switch {
	case !t.ready:
		t.class[0] = Silent
	case t.start.Add(t.limit() + reportTime).After(now): // one end has reported a failure
	default:
		for i := range t.ends {
			if !t.reported[i] {
				t.class[i] = Silent
			}
		}
	}
}

// dial is the assignment of the end that connects, once the other one listens.
func (t *test) dial(addrs []string, now time.Time) Assignment {
	t.ready = true
	a := t.part(Dial, now)
	a.Peer.Addrs = addrs[:min(len(addrs), maxRails)]
	return a
}

// early reports whether the serving end listens already. The other end must know of such tests, too.
func (t *test) early(now time.Time) bool {
	for _, m := range t.ends {
		if m.n.listens == nil || now.Sub(m.n.heard) > freshTime {
			return false
		}
	}
	return !t.torch
}

// cancel ends a test without a result.
func (t *test) cancel() { t.class = [2]Class{Canceled, Canceled} }

// limit is how long the test itself may take.
func (t *test) limit() time.Duration {
	switch {
	case t.torch:
		return torchTime
	case t.quick:
		return quickTime
	}
	return testTime
}

func (t *test) readyTime() time.Duration {
	if t.torch {
		return torchReady
	}
	return readyTime
}
