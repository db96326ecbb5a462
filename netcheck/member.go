package netcheck

// capability is an ability of a node that can be at fault: to reach others at all, or to send or receive over one lane
// at the rate of the others. Every test is evidence about a capability of one end and the counterpart of the other.
type capability int

// reach is the capability of reaching others. Lane i has the capabilities 1+2i (to send) and 2+2i (to receive).
const reach capability = 0

func sends(lane int) capability    { return capability(1 + 2*lane) }
func receives(lane int) capability { return capability(2 + 2*lane) }

func (f capability) receives() bool { return f > 0 && f%2 == 0 }
func (f capability) lane() int      { return int(f-1) / 2 }

// counterpart is the capability of the other end that the same sample is about.
func (f capability) counterpart() capability {
	switch {
	case f == reach:
		return reach
	case f.receives():
		return f - 1
	}
	return f + 1
}

// standing is the state of a capability, or of a member.
type standing uint8

const (
	cleared standing = iota // no evidence against it
	pending                 // it waits for another member's standing, or for a pair to be tested again
	open                    // it needs another test
	exposed                 // blamed
	capped                  // as much as allowed was tested, without a decision
)

// record is the outcome of a member's tests for one capability.
type record struct {
	best   float32 // of a rate: the largest share of the median
	passed bool    // certified: a slow partner or a disturbance makes a test worse, nothing makes it better
	blamed bool    // for good: it explains the failures of others, and so must not be withdrawn
	weight float32 // log-likelihood when it was blamed
}

// member is a node's part in one phase.
type member struct {
	n        *node
	queue    []*test
	tests    []*test  // that have ended, in order
	records  []record // by capability
	retests  int      // made for this member
	mutual   int      // tests passed with others that were blamed
	silents  int
	owns     int
	want     int // tests that have to be passed, by different nodes
	newcomer bool
	mated    bool // tested with one that seems slow, too
	standing standing
	told     int  // known, when those it has failed with were last reassessed
	pooled   bool // in scheduler.pool
	waiting  bool // in scheduler.waiting
	counted  bool // in scheduler.unsettled
	released bool
	leaf     string
}

// record of a capability; one that was never tested is blank.
func (m *member) record(f capability) record {
	if int(f) < len(m.records) {
		return m.records[f]
	}
	return record{}
}

// recordOf makes room for the record of f.
func (m *member) recordOf(f capability) *record {
	for len(m.records) <= int(f) {
		m.records = append(m.records, record{})
	}
	return &m.records[f]
}

// certified reports whether f of m has been seen to work, and is not blamed all the same.
func (m *member) certified(f capability) bool {
	r := m.record(f)
	return r.passed && !r.blamed && !m.record(reach).blamed
}

// exposed reports whether f of m is blamed; a member that reaches nobody has no rates either.
func (m *member) exposed(f capability) bool { return m.record(f).blamed || m.record(reach).blamed }

// idle reports whether m can be given a test.
func (m *member) idle() bool { return m.n.present() && m.n.test == nil && !m.released }

// meetings counts the tests of m with o.
func (m *member) meetings(o *member) (n int) {
	for _, t := range m.tests {
		if t.other(m) == o {
			n++
		}
	}
	return n
}

// passes counts the different members with which m has passed.
func (m *member) passes() (n int) {
	for i, t := range m.tests {
		if t.reach == pass && !metBefore(m, t.other(m), m.tests[:i]) {
			n++
		}
	}
	return n
}

func metBefore(m, o *member, tests []*test) bool {
	for _, t := range tests {
		if t.reach == pass && t.other(m) == o {
			return true
		}
	}
	return false
}

// known grows whenever a capability of m becomes certified or blamed.
func (m *member) known() (n int) {
	for i := range m.records {
		if m.records[i].passed {
			n++
		}
		if m.records[i].blamed {
			n++
		}
	}
	return n
}

// failedWith are the members with which any capability of m has failed.
func (m *member) failedWith() (others []*member) {
	for _, t := range m.tests {
		if t.failed() {
			others = append(others, t.other(m))
		}
	}
	return others
}
