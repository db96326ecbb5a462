package coordinator

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"dlrover-run/checkpointd/commit"
)

// State is what one run knows about its saves, agreements, peers and ages. It has no clock and does no I/O: time
// comes with every Step and must not go back. It may be started empty at any time, for everything comes again:
// waiting daemons repeat their last report, and a later phase implies the earlier ones.
//
// A State keeps the slices that it is given and hands out its own: neither may be modified.
type State struct {
	saves      map[string]*save
	agreements map[string]*agreement
	exchanges  map[string]*exchange
	ages       map[int]age
	rosters    map[string]*roster // by round or epoch
	bytes      int64              // of entries, holdings and peers
	swept      time.Time
}

// NewState returns a State that knows nothing.
func NewState() *State {
	return &State{saves: map[string]*save{}, agreements: map[string]*agreement{}, exchanges: map[string]*exchange{}, ages: map[int]age{}, rosters: map[string]*roster{}}
}

// Topic is something that waiting nodes want to know.
type Topic struct {
	Kind TopicKind
	Key  string // a save's id, or the key of an agreement or exchange
}

// TopicKind says what a Topic is about.
type TopicKind uint8

// The kinds of topics. Those of a save are bits, because Step compares what was known before and after.
const (
	AllPrepared TopicKind = 1 << iota // for the leader
	HasIntent                         // for the others
	AllPlaced                         // for the leader
	IsPublished                       // for the others
	Agreed
	PeersKnown
)

// Event is what Step takes: Posted, Held, Here, Aged, Attendance or Tick.
type Event interface {
	check() error
	step(st *State, now time.Time) ([]Topic, error)
}

// Posted is a Report of a node.
type Posted struct{ Report }

// Aged replaces the ages of the given ranks.
type Aged struct {
	Node int   `json:"node"`
	Ages []Age `json:"ages"`
}

// Tick lets time pass.
type Tick struct{}

// sweepEvery is how often Step looks for what is to be forgotten.
const sweepEvery = 10 * time.Second

// Step takes an event in and returns the topics about which there is something to say now. An event that is
// refused changes nothing but time; errors wrap ErrBadRequest, ErrLimit or ErrDecided.
func (st *State) Step(now time.Time, ev Event) ([]Topic, error) {
	if err := ev.check(); err != nil {
		return nil, err
	}
	if now.Sub(st.swept) >= sweepEvery {
		st.sweep(now)
	}
	due := st.expire(now)
	topics, err := ev.step(st, now)
	return append(due, topics...), err
}

func (Tick) check() error                                       { return nil }
func (Tick) step(*State, time.Time) ([]Topic, error)            { return nil, nil }
func (p Posted) step(st *State, now time.Time) ([]Topic, error) { return st.report(now, p.Report) }

// sweep forgets what has not been heard of for Forget.
func (st *State) sweep(now time.Time) {
	st.swept = now
	old := func(heard time.Time) bool { return now.Sub(heard) >= Forget }
	for id, s := range st.saves {
		if old(s.heard) {
			st.dropSave(id)
		}
	}
	maps.DeleteFunc(st.ages, func(_ int, a age) bool { return old(a.heard) })
	if len(st.ages) > 0 && len(st.exchanges) > 0 { // its epoch may still run
		slices.MaxFunc(slices.Collect(maps.Values(st.exchanges)), func(a, b *exchange) int { return a.heard.Compare(b.heard) }).heard = now
	}
	forget(st, st.agreements, old)
	forget(st, st.exchanges, old)
	forget(st, st.rosters, old)
}

func forget[M interface{ asBarrier() *barrier }](st *State, all map[string]M, old func(time.Time) bool) {
	for key, x := range all {
		if b := x.asBarrier(); old(b.heard) {
			st.bytes -= b.bytes
			delete(all, key)
		}
	}
}

// Empty reports whether there is nothing to remember.
func (st *State) Empty() bool {
	return len(st.saves)+len(st.agreements)+len(st.exchanges)+len(st.ages)+len(st.rosters) == 0
}

// reserve takes n bytes more (or fewer) from the run's budget.
func (st *State) reserve(n int64, what string) error {
	if n > 0 && st.bytes+n > MaxBytes {
		return fmt.Errorf("%w: %s: the run would keep more than %d MiB of entries, holdings and peers; save less often or in fewer files", ErrLimit, what, MaxBytes>>20)
	}
	st.bytes += n
	return nil
}

// save is what is known about one save. It is given up when a shard has failed and there is no intent.
type save struct {
	Save
	heard     time.Time
	entries   map[int]commit.Entry // of the prepared shards, until the save is published or given up
	bytes     int64                // of entries
	placed    set                  // until the save is published
	failures  map[int]string       // by shard
	intent    bool
	published bool
}

func (s *save) aborted() bool { return len(s.failures) > 0 && !s.intent }
func (s *save) stalled() bool {
	return len(s.failures) > 0 && s.intent && !s.published && s.placed.n < s.Shards
}
func (s *save) allPrepared() bool { return len(s.entries) == s.Shards }
func (s *save) over() bool        { return s.published || s.aborted() }

// known are the topics about which the waiting nodes have an answer.
func (s *save) known() (k TopicKind) {
	add := func(kind TopicKind, yes bool) {
		if yes {
			k |= kind
		}
	}
	add(AllPrepared, s.aborted() || s.published || s.allPrepared())
	add(HasIntent, s.aborted() || s.intent)
	add(AllPlaced, s.stalled() || s.published || s.placed.n == s.Shards)
	add(IsPublished, s.stalled() || s.published)
	return k
}

func (st *State) report(now time.Time, r Report) ([]Topic, error) {
	s, err := st.find(r.Save)
	if err != nil {
		return nil, err
	}
	before := s.known()
	if err := st.apply(s, r); err != nil {
		return nil, err
	}
	s.heard = now
	st.saves[r.Save.ID] = s
	var topics []Topic
	news := s.known() &^ before
	for _, kind := range []TopicKind{AllPrepared, HasIntent, AllPlaced, IsPublished} {
		if news&kind != 0 {
			topics = append(topics, Topic{kind, r.Save.ID})
		}
	}
	return topics, nil
}

// find returns the save, a new one if need be. A new one is not in the state yet.
func (st *State) find(id Save) (*save, error) {
	if s := st.saves[id.ID]; s != nil {
		if s.Step != id.Step || s.Shards != id.Shards {
			return nil, fmt.Errorf("%w: save %s is known as step %d with %d shards, not step %d with %d shards", ErrBadRequest, id.ID, s.Step, s.Shards, id.Step, id.Shards)
		}
		return s, nil
	}
	flying := 0
	for _, s := range st.saves {
		if !s.over() {
			flying++
		}
	}
	if flying >= MaxSaves {
		return nil, fmt.Errorf("%w: %d saves are in flight already; save %s has to wait for one of them", ErrLimit, flying, id.ID)
	}
	if len(st.saves)-flying >= 4*MaxSaves {
		st.dropOldestOver()
	}
	return &save{Save: id, entries: map[int]commit.Entry{}, placed: newSet(id.Shards), failures: map[int]string{}}, nil
}

func (st *State) dropOldestOver() {
	oldest := ""
	for id, s := range st.saves {
		if s.over() && (oldest == "" || s.heard.Before(st.saves[oldest].heard) || s.heard.Equal(st.saves[oldest].heard) && id < oldest) {
			oldest = id
		}
	}
	st.dropSave(oldest)
}

func (st *State) dropSave(id string) {
	st.dropEntries(st.saves[id])
	delete(st.saves, id)
}

func (st *State) dropEntries(s *save) {
	st.bytes -= s.bytes
	s.bytes = 0
	s.entries = map[int]commit.Entry{} // a cleared map would keep its memory
}

func (st *State) apply(s *save, r Report) error {
	if s.published && r.Phase != Failed {
		return nil
	}
	switch r.Phase {
	case Prepared:
		return st.prepare(s, r)
	case Intent:
		s.intent = true
	case Placed: // only after the intent, of which an empty state may not know
		s.intent = true
		for _, n := range r.Shards {
			s.placed.add(n)
			delete(s.failures, n)
		}
	case Published:
		s.intent, s.published = true, true
		st.dropEntries(s)
		s.placed = set{}
		clear(s.failures)
	case Failed:
		return st.fail(s, r)
	}
	return nil
}

// prepare books the entries and takes back the failures of the same shards. Once there are the entries of all shards
// they stay as they are: the leader may have them. Nothing is booked while another failure stands: the sender learns
// of it and removes its files.
func (st *State) prepare(s *save, r Report) error {
	failures := maps.Clone(s.failures)
	for _, n := range r.Shards {
		delete(failures, n)
	}
	if !s.allPrepared() && (s.intent || len(failures) == 0) {
		var more int64
		for _, e := range r.Entries {
			more += entryBytes(e)
			if old, ok := s.entries[e.Shard]; ok {
				more -= entryBytes(old)
			}
		}
		if err := st.reserve(more, "save "+s.ID); err != nil {
			return err
		}
		s.bytes += more
		for _, e := range r.Entries {
			s.entries[e.Shard] = e
		}
	}
	s.failures = failures
	return nil
}

// fail books a failure. The leader may give up until it has posted the intent; the others only as long as the leader
// cannot have written it.
func (st *State) fail(s *save, r Report) error {
	if !s.intent && s.allPrepared() && !r.leads() {
		return fmt.Errorf("%w: save %s: all shards are prepared and the leader may have gone on; keep the files", ErrDecided, s.ID)
	}
	for _, n := range r.Shards {
		if !s.published && !s.placed.has(n) {
			s.failures[n] = s.reason(r.Error)
		}
	}
	if s.aborted() {
		st.dropEntries(s) // whoever learns of it removes its files, and has to prepare again
	}
	return nil
}

// maxReasons bounds the texts that a save keeps: when storage is down, everybody says the same.
const maxReasons = 16

func (s *save) reason(text string) string {
	if len(s.failures) >= maxReasons {
		return "failed, like others before"
	}
	return cut(cmp.Or(text, "no reason given"))
}

// set is a set of shards.
type set struct {
	words []uint64
	n     int
}

func newSet(size int) set { return set{words: make([]uint64, (size+63)/64)} }

func (s *set) has(i int) bool { return s.words != nil && s.words[i/64]&(1<<(i%64)) != 0 }

func (s *set) add(i int) {
	if !s.has(i) {
		s.words[i/64] |= 1 << (i % 64)
		s.n++
	}
}

func cut(reason string) string {
	if len(reason) > maxReason {
		return reason[:maxReason-3] + "..."
	}
	return reason
}

// entryBytes estimates the memory of an entry.
func entryBytes(e commit.Entry) int64 {
	n := int64(128)
	for _, f := range e.Files {
		n += int64(96 + len(f.Path) + len(f.Tmp))
	}
	return n
}

// topic is what the sender of r waits for; the zero Topic if it need not wait.
func (r Report) topic() Topic {
	kind := TopicKind(0)
	switch {
	case r.Phase == Prepared && r.leads():
		kind = AllPrepared
	case r.Phase == Prepared:
		kind = HasIntent
	case r.Phase == Placed && r.leads():
		kind = AllPlaced
	case r.Phase == Placed:
		kind = IsPublished
	default:
		return Topic{}
	}
	return Topic{kind, r.Save.ID}
}

// Reply is the answer to a Report that was stepped in; false as long as there is none.
func (st *State) Reply(r Report) ([]commit.Entry, bool, error) {
	s := st.saves[r.Save.ID]
	if s == nil {
		return nil, false, nil
	}
	t := r.topic()
	switch {
	case r.Phase == Failed && s.intent:
		return nil, true, fmt.Errorf("%w: save %s: the intent is written; keep the files", ErrDecided, s.ID)
	case t == Topic{}:
		return nil, true, nil
	case s.known()&t.Kind == 0:
		return nil, false, nil
	case s.published && r.Phase == Prepared:
		return nil, true, fmt.Errorf("%w: save %s of step %d", ErrCommitted, s.ID, s.Step)
	case s.aborted() && r.Phase == Prepared:
		return nil, true, s.failure(ErrAborted)
	case s.stalled() && r.Phase == Placed:
		return nil, true, s.failure(ErrStalled)
	case t.Kind == AllPrepared:
		return s.sorted(), true, nil
	}
	return nil, true, nil
}

// failure names the lowest shard that failed.
func (s *save) failure(is error) error {
	shard := slices.Min(slices.Collect(maps.Keys(s.failures)))
	return failureError(is, s.Save, shard, s.failures[shard])
}

// failureError names the shard that failed. A shard that only followed another has that one's reason in its own, and
// must not wrap it again.
func failureError(is error, s Save, shard int, reason string) error {
	head := fmt.Sprintf("save %s of step %d: shard ", s.ID, s.Step)
	if at := strings.LastIndex(reason, head); at >= 0 {
		return fmt.Errorf("%w: %s", is, reason[at:])
	}
	return fmt.Errorf("%w: %s%d: %s", is, head, shard, reason)
}

func (s *save) sorted() []commit.Entry {
	es := make([]commit.Entry, 0, len(s.entries))
	for _, n := range slices.Sorted(maps.Keys(s.entries)) {
		es = append(es, s.entries[n])
	}
	return es
}

type age struct {
	Age
	node  int
	heard time.Time
}

func (a Aged) check() error {
	for _, x := range a.Ages {
		if x.Rank < 0 || x.Rank >= MaxShards {
			return fmt.Errorf("%w: rank %d: need 0 to %d", ErrBadRequest, x.Rank, MaxShards-1)
		}
	}
	return nil
}

func (a Aged) step(st *State, now time.Time) ([]Topic, error) {
	for _, x := range a.Ages {
		st.ages[x.Rank] = age{x, a.Node, now}
	}
	return nil, nil
}

// Summary is a run for the status page and for metrics.
type Summary struct {
	Saves []SaveStatus `json:"saves"` // in order of steps; those that are over stay for a while
	Ages  []Age        `json:"ages"`  // in order of ranks
}

// SaveStatus is one save in a Summary. Prepared and Placed count shards.
type SaveStatus struct {
	Save
	Phase    Phase     `json:"phase"` // the last that is known to be reached by all it takes
	Prepared int       `json:"prepared"`
	Placed   int       `json:"placed"`
	Error    string    `json:"error,omitempty"`
	Heard    time.Time `json:"heard"` // when a node last spoke of it
}

// Summary describes the run as it is.
func (st *State) Summary() Summary {
	sum := Summary{Saves: make([]SaveStatus, 0, len(st.saves)), Ages: make([]Age, 0, len(st.ages))}
	for _, s := range st.saves {
		sum.Saves = append(sum.Saves, s.status())
	}
	slices.SortFunc(sum.Saves, func(a, b SaveStatus) int { return cmp.Or(cmp.Compare(a.Step, b.Step), cmp.Compare(a.ID, b.ID)) })
	for _, rank := range slices.Sorted(maps.Keys(st.ages)) {
		sum.Ages = append(sum.Ages, st.ages[rank].Age)
	}
	return sum
}

func (s *save) status() SaveStatus {
	st := SaveStatus{Save: s.Save, Prepared: len(s.entries), Placed: s.placed.n, Heard: s.heard}
	if len(s.failures) > 0 {
		st.Error = s.failure(ErrAborted).Error()
		if s.intent {
			st.Error = s.failure(ErrStalled).Error()
		}
	}
	switch {
	case s.published:
		st.Phase, st.Prepared, st.Placed = Published, s.Shards, s.Shards
	case s.aborted():
		st.Phase = Failed
	case s.placed.n == s.Shards:
		st.Phase = Placed
	case s.intent:
		st.Phase = Intent
	case s.allPrepared():
		st.Phase = Prepared
	}
	return st
}
