package coordinator

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"time"
)

// Held is what a node holds in memory, for an agreement. Answer is set by a node that repeats it to a coordinator
// without memory although an earlier one has answered: that answer then holds for the others too.
type Held struct {
	Key      string        `json:"key"`
	Node     int           `json:"node"`
	Nodes    int           `json:"nodes"`
	Holdings []Holding     `json:"holdings,omitempty"`
	Patience time.Duration `json:"patience"` // ns
	Answer   *Agreement    `json:"answer,omitempty"`
}

// Agreement is the answer to a Held.
type Agreement struct {
	Plan  Plan `json:"plan"`
	Found bool `json:"found"`
}

// Here is a node that looks for its peers.
type Here struct {
	Key      string        `json:"key"`
	Self     Peer          `json:"self"`
	Nodes    int           `json:"nodes"`
	Patience time.Duration `json:"patience"` // ns
}

// barrier is what agreements and exchanges have in common: nodes that wait for each other.
type barrier struct {
	nodes int
	due   time.Time
	heard time.Time
	bytes int64
	open  bool // the answer is there
}

type agreement struct {
	barrier
	key     string
	of      [2]string         // its round and its epoch; see Speaks
	absent  map[int]bool      // nodes that will not speak
	held    map[int][]Holding // until the answer is there
	answers map[int]Agreement // what nodes say that an earlier coordinator has answered
	choice  Choice
	found   bool
	plans   map[int]Plan // of the writers
}

type exchange struct {
	barrier
	peers  map[int]Peer
	sorted []Peer // nil: to be made anew
	wire   []byte // sorted as a reply: encoded once for all nodes
}

func checkBarrier(key string, node, nodes int, patience time.Duration) error {
	switch {
	case key == "" || len(key) > maxKey:
		return fmt.Errorf("%w: key %.80q: need 1 to %d bytes", ErrBadRequest, key, maxKey)
	case nodes > MaxShards:
		return fmt.Errorf("%w: %d nodes, at most %d are possible", ErrLimit, nodes, MaxShards)
	case node < 0 || node >= nodes:
		return fmt.Errorf("%w: node %d of %d nodes", ErrBadRequest, node, nodes)
	case patience < 0:
		return fmt.Errorf("%w: patience %s", ErrBadRequest, patience)
	}
	return nil
}

func (h Held) check() error { return checkBarrier(h.Key, h.Node, h.Nodes, h.Patience) }

func (h Here) check() error {
	for _, c := range h.Self.Copies {
		if len(c.Dir) > maxPath || c.Dir != "" && !filepath.IsAbs(c.Dir) {
			return fmt.Errorf("%w: checkpoint directory %.80q of a copy of save %.64q is not an absolute path", ErrBadRequest, c.Dir, c.Save)
		}
	}
	return checkBarrier(h.Key, h.Self.Node, h.Nodes, h.Patience)
}

func (b *barrier) asBarrier() *barrier { return b }

// arrive books that somebody is there.
func (b *barrier) arrive(key string, nodes int, now time.Time) error {
	if b.nodes != nodes {
		return fmt.Errorf("%w: %q is for %d nodes, not for %d", ErrBadRequest, key, b.nodes, nodes)
	}
	b.heard = now
	return nil
}

// evictFor makes sure that one more key can be remembered, at the cost of the oldest that is answered.
func evictFor[M interface{ asBarrier() *barrier }](st *State, all map[string]M) error {
	if len(all) < MaxKeys {
		return nil
	}
	oldest := ""
	for key, x := range all {
		if b := x.asBarrier(); b.open && (oldest == "" || cmp.Or(b.heard.Compare(all[oldest].asBarrier().heard), cmp.Compare(key, oldest)) < 0) {
			oldest = key
		}
	}
	if oldest == "" {
		return fmt.Errorf("%w: the nodes of the run wait for each other under %d keys already", ErrLimit, len(all))
	}
	st.bytes -= all[oldest].asBarrier().bytes
	delete(all, oldest)
	return nil
}

func (h Held) step(st *State, now time.Time) ([]Topic, error) {
	a := st.agreements[h.Key]
	if a == nil {
		if err := evictFor(st, st.agreements); err != nil {
			return nil, err
		}
		a = &agreement{barrier: barrier{nodes: h.Nodes, due: now.Add(h.Patience)}, key: h.Key, of: roundAndEpoch(h.Key), absent: map[int]bool{}, held: map[int][]Holding{}, answers: map[int]Agreement{}}
		st.takeAttendance(a)
	}
	if err := a.arrive(h.Key, h.Nodes, now); err != nil {
		return nil, err
	}
	if !a.open {
		more := holdingBytes(h.Holdings)
		if old, ok := a.held[h.Node]; ok {
			more -= holdingBytes(old)
		}
		if err := st.reserve(more, "agreement "+h.Key); err != nil {
			return nil, err
		}
		a.bytes += more
		a.held[h.Node] = h.Holdings
		delete(a.absent, h.Node)
		if h.Answer != nil {
			a.answers[h.Node] = *h.Answer
		}
	}
	st.agreements[h.Key] = a
	if a.open || !a.complete() && now.Before(a.due) {
		return nil, nil
	}
	st.agree(a)
	return []Topic{{Agreed, h.Key}}, nil
}

// complete reports whether everybody has spoken who will.
func (a *agreement) complete() bool { return len(a.held)+len(a.absent) >= a.nodes }

// holdingBytes estimates the memory of what one node holds.
func holdingBytes(hs []Holding) int64 {
	n := int64(128)
	for _, h := range hs {
		n += int64(96 + len(h.Save) + len(h.Dir))
	}
	return n
}

// agree freezes the answer.
func (st *State) agree(a *agreement) {
	if len(a.answers) > 0 {
		a.choice, a.found = a.remembered()
	} else {
		a.choice, a.found = Choose(a.held)
	}
	a.open = true
	a.held, a.answers, a.absent = nil, nil, nil
	st.bytes -= a.bytes
	a.plans = plans(a.choice)
	a.bytes = int64(48*len(a.choice.Writers) + 160*len(a.plans))
	st.bytes += a.bytes // less than what was held
	if a.found {
		st.reopen(a.choice.Save)
	}
}

// reopen forgets that a save was given up: it will be written once more.
func (st *State) reopen(id string) {
	if s := st.saves[id]; s != nil && s.aborted() {
		st.dropSave(id)
	}
}

// remembered puts the answers of an earlier coordinator together. The shards of nodes that it had not answered yet, or
// that did not come back, are given to those that are here.
func (a *agreement) remembered() (Choice, bool) {
	first := a.answers[slices.Min(slices.Collect(maps.Keys(a.answers)))]
	if !first.Found {
		return Choice{}, false
	}
	c := Choice{Save: first.Plan.Save, Dir: first.Plan.Dir, Step: first.Plan.Step, Writers: map[int]int{}}
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
func plans(c Choice) map[int]Plan {
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

// Agreement is the answer to a node under the key; false as long as there is none.
func (st *State) Agreement(key string, node int) (Agreement, bool) {
	a := st.agreements[key]
	if a == nil || !a.open {
		return Agreement{}, false
	}
	if !a.found {
		return Agreement{}, true
	}
	p, writes := a.plans[node]
	if !writes {
		p = Plan{Save: a.choice.Save, Dir: a.choice.Dir, Step: a.choice.Step}
	}
	return Agreement{p, true}, true
}

func (h Here) step(st *State, now time.Time) ([]Topic, error) {
	x := st.exchanges[h.Key]
	if x == nil {
		if err := evictFor(st, st.exchanges); err != nil {
			return nil, err
		}
		x = &exchange{barrier: barrier{nodes: h.Nodes, due: now.Add(h.Patience)}, peers: map[int]Peer{}}
	}
	if err := x.arrive(h.Key, h.Nodes, now); err != nil {
		return nil, err
	}
	share(h.Self.Copies)
	old, again := x.peers[h.Self.Node]
	if !again || !samePeer(old, h.Self) {
		more := peerBytes(h.Self)
		if again {
			more -= peerBytes(old)
		}
		if err := st.reserve(more, "peers "+h.Key); err != nil {
			return nil, err
		}
		x.bytes += more
		x.peers[h.Self.Node] = h.Self
		x.sorted, x.wire = nil, nil
	}
	st.exchanges[h.Key] = x
	if x.open || len(x.peers) < x.nodes && now.Before(x.due) {
		return nil, nil
	}
	x.open = true
	return []Topic{{PeersKnown, h.Key}}, nil
}

func samePeer(a, b Peer) bool {
	return a.Node == b.Node && a.Addr == b.Addr && a.Switch == b.Switch && slices.Equal(a.Copies, b.Copies)
}

// share keeps one string for the directory of several copies, as peerBytes counts them.
func share(cs []Copy) {
	for i := 1; i < len(cs); i++ {
		if cs[i].Dir == cs[i-1].Dir {
			cs[i].Dir = cs[i-1].Dir
		}
	}
}

func peerBytes(p Peer) int64 {
	n := int64(160 + len(p.Addr) + len(p.Switch))
	for i, c := range p.Copies {
		n += int64(80 + len(c.Save))
		if i == 0 || c.Dir != p.Copies[i-1].Dir {
			n += int64(len(c.Dir))
		}
	}
	return n
}

// Peers are those of an exchange, in order of nodes; false as long as they wait for each other.
func (st *State) Peers(key string) ([]Peer, bool) {
	x := st.exchanges[key]
	if x == nil || !x.open {
		return nil, false
	}
	if x.sorted == nil {
		for _, node := range slices.Sorted(maps.Keys(x.peers)) {
			x.sorted = append(x.sorted, x.peers[node])
		}
	}
	return x.sorted, true
}

// peersReply is Peers as the body of a reply.
func (st *State) peersReply(key string) ([]byte, bool, error) {
	ps, ok := st.Peers(key)
	if !ok {
		return nil, false, nil
	}
	x := st.exchanges[key]
	if x.wire == nil {
		var err error
		if x.wire, err = json.Marshal(peersReply{ps}); err != nil {
			return nil, false, fmt.Errorf("peers %s: %w", key, err)
		}
	}
	return x.wire, true, nil
}

// Due is when patience runs out under the topic's key; zero if nobody waits there. Step in a Tick then.
func (st *State) Due(t Topic) time.Time {
	var b *barrier
	if a := st.agreements[t.Key]; t.Kind == Agreed && a != nil {
		b = &a.barrier
	}
	if x := st.exchanges[t.Key]; t.Kind == PeersKnown && x != nil {
		b = &x.barrier
	}
	if b == nil || b.open {
		return time.Time{}
	}
	return b.due
}

// expire answers those whose patience has run out.
func (st *State) expire(now time.Time) (topics []Topic) {
	for key, a := range st.agreements {
		if !a.open && !now.Before(a.due) {
			st.agree(a)
			topics = append(topics, Topic{Agreed, key})
		}
	}
	for key, x := range st.exchanges {
		if !x.open && !now.Before(x.due) {
			x.open = true
			topics = append(topics, Topic{PeersKnown, key})
		}
	}
	return topics
}
