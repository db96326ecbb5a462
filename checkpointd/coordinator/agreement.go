package coordinator

import (
	"maps"
	"slices"
	"time"
)

// agreeEvent is a node's holdings in memory, for an agreement. Answer is set when a node repeats its request to a
// coordinator without memory after an earlier one has answered: that answer then holds for the other nodes too.
type agreeEvent struct {
	Key      string        `json:"key"`
	Node     int           `json:"node"`
	Nodes    int           `json:"nodes"`
	Holdings []Holding     `json:"holdings,omitempty"`
	Patience time.Duration `json:"patience"` // ns
	Answer   *agreeAnswer  `json:"answer,omitempty"`
}

// agreeAnswer is the answer to an agreeEvent.
type agreeAnswer struct {
	Plan  Plan `json:"plan"`
	Found bool `json:"found"`
}

// agreement collects holdings until all nodes that take part have sent theirs, or patience is over. Then the answer is
// frozen: later requests get the same one, regardless of their holdings.
type agreement struct {
	barrier
	key     string
	of      [2]string           // its round and its epoch; see Participation
	absent  map[int]bool        // nodes that take no part
	held    map[int][]Holding   // until the agreement is open
	answers map[int]agreeAnswer // answers of an earlier coordinator, by node
	choice  choice
	found   bool
	plans   map[int]Plan // of the writers
}

func (h agreeEvent) check() error { return checkBarrier(h.Key, h.Node, h.Nodes, h.Patience) }

func (h agreeEvent) step(st *state, now time.Time) ([]topic, error) {
	a, err := st.agreementFor(h, now)
	if err == nil {
		err = a.arrive(h.Key, h.Nodes, now)
	}
	if err == nil && !a.open && !st.gone(seat{a.of[0], h.Node}) {
		err = st.hold(a, h)
	}
	if err != nil {
		return nil, err
	}
	st.agreements[h.Key] = a
	if a.open || !a.complete() && now.Before(a.due) {
		return nil, nil
	}
	st.agree(a)
	return []topic{{agreed, h.Key}}, nil
}

// agreementFor returns that of the key. A new one is not in the state yet.
func (st *state) agreementFor(h agreeEvent, now time.Time) (*agreement, error) {
	if a := st.agreements[h.Key]; a != nil {
		return a, nil
	}
	if err := evictFor(st, st.agreements); err != nil {
		return nil, err
	}
	a := &agreement{
		barrier: barrier{nodes: h.Nodes, due: now.Add(h.Patience)},
		key:     h.Key, of: roundAndEpoch(h.Key),
		absent: map[int]bool{}, held: map[int][]Holding{}, answers: map[int]agreeAnswer{},
	}
	st.applyParticipants(a)
	return a, nil
}

// hold records the holdings of a node, which takes part from now on.
func (st *state) hold(a *agreement, h agreeEvent) error {
	more := holdingBytes(h.Holdings)
	if old, ok := a.held[h.Node]; ok {
		more -= holdingBytes(old)
	}
	if err := st.reserve(more, "agreement "+h.Key); err != nil {
		return err
	}
	a.bytes += more
	a.held[h.Node] = h.Holdings
	delete(a.absent, h.Node)
	if h.Answer != nil {
		a.answers[h.Node] = *h.Answer
	}
	return nil
}

// complete reports whether all nodes that take part have sent their holdings.
func (a *agreement) complete() bool { return len(a.held)+len(a.absent) >= a.nodes }

// holdingBytes estimates the memory of one node's holdings.
func holdingBytes(hs []Holding) int64 {
	n := int64(128)
	for _, h := range hs {
		n += int64(96 + len(h.Save) + len(h.Dir))
	}
	return n
}

// agree freezes the answer.
func (st *state) agree(a *agreement) {
	if len(a.answers) > 0 {
		a.choice, a.found = a.remembered()
	} else {
		a.choice, a.found = choose(a.held)
	}
	a.open = true
	a.held, a.answers, a.absent = nil, nil, nil
	st.bytes -= a.bytes
	a.plans = plans(a.choice)
	a.bytes = int64(48*len(a.choice.Writers) + 160*len(a.plans))
	st.bytes += a.bytes // less than the holdings took
	if a.found {
		st.reopen(a.choice.Save)
	}
}

// reopen forgets that a save was aborted: it will be written once more.
func (st *state) reopen(id string) {
	if s := st.saves[id]; s != nil && s.aborted() {
		st.dropSave(id)
	}
}

// remembered puts the answers of an earlier coordinator together. The shards of nodes that it had not answered yet, or
// that did not come back, are given to those that are here.
func (a *agreement) remembered() (choice, bool) {
	first := a.answers[slices.Min(slices.Collect(maps.Keys(a.answers)))]
	if !first.Found {
		return choice{}, false
	}
	c := choice{Save: first.Plan.Save, Dir: first.Plan.Dir, Step: first.Plan.Step, Writers: map[int]int{}}
	rest := map[int][]Holding{}
	for node, hs := range a.held {
		if _, answered := a.answers[node]; !answered {
			rest[node] = hs
		}
	}
	if again := candidates(rest)[c.Save]; again != nil {
		c.Writers = again.Writers
	}
	for node, answer := range a.answers {
		for _, shard := range answer.Plan.Mine {
			if answer.Found && answer.Plan.Save == c.Save {
				c.Writers[shard] = node
			}
		}
	}
	return c, true
}

// plans are the parts of all writers.
func plans(c choice) map[int]Plan {
	all := map[int]Plan{}
	for _, shard := range slices.Sorted(maps.Keys(c.Writers)) {
		node := c.Writers[shard]
		p := all[node]
		p.Mine = append(p.Mine, shard)
		all[node] = p
	}
	for node, p := range all {
		all[node] = Plan{Save: c.Save, Dir: c.Dir, Step: c.Step, Mine: p.Mine, Leader: p.Mine[0] == 0}
	}
	return all
}

// agreement is the answer to a node under the key; false as long as there is none.
func (st *state) agreement(key string, node int) (agreeAnswer, bool) {
	a := st.agreements[key]
	if a == nil || !a.open {
		return agreeAnswer{}, false
	}
	if !a.found {
		return agreeAnswer{}, true
	}
	p, writes := a.plans[node]
	if !writes {
		p = Plan{Save: a.choice.Save, Dir: a.choice.Dir, Step: a.choice.Step}
	}
	return agreeAnswer{p, true}, true
}
