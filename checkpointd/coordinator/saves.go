package coordinator

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/internal/text"
)

// reportEvent is a Report of a node.
type reportEvent struct{ Report }

func (p reportEvent) step(st *state, now time.Time) ([]topic, error) { return st.report(now, p.Report) }

// save is the progress of one save:
//
//	                 all Prepared        Intent      all Placed        Published
//	(writing) ------------------> prepared ---> intent -----> placed --------> published
//	    | Failed                     | Failed      | Failed
//	    v                            v (leader)    v
//	 aborted <-----------------------+          stalled
//
// An aborted save, which has a failure and no intent, starts over when all failed shards are Prepared again, or when an
// agreement chooses it. A stalled one has an intent and a shard that failed before it was placed. Recovery completes
// it, or that shard when it is placed after all. After the intent a save cannot be aborted: later failures are refused
// with ErrDecided. A state that has lost its memory treats a later phase as all earlier ones.
type save struct {
	Save
	heard     time.Time
	entries   map[int]commit.Entry // of the prepared shards, until the save is published or aborted
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

func (s *save) over() bool { return s.published || s.aborted() }

// known are the topics about which the waiting nodes have an answer.
func (s *save) known() (k topicKind) {
	add := func(kind topicKind, yes bool) {
		if yes {
			k |= kind
		}
	}
	add(allPrepared, s.aborted() || s.published || s.allPrepared())
	add(hasIntent, s.aborted() || s.intent)
	add(allPlaced, s.stalled() || s.published || s.placed.n == s.Shards)
	add(isPublished, s.stalled() || s.published)
	return k
}

func (st *state) report(now time.Time, r Report) ([]topic, error) {
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
	var topics []topic
	news := s.known() &^ before
	for _, kind := range []topicKind{allPrepared, hasIntent, allPlaced, isPublished} {
		if news&kind != 0 {
			topics = append(topics, topic{kind, r.Save.ID})
		}
	}
	return topics, nil
}

// find returns the save, a new one if need be. A new one is not in the state yet.
func (st *state) find(id Save) (*save, error) {
	if s := st.saves[id.ID]; s != nil {
		if s.Step != id.Step || s.Shards != id.Shards {
			return nil, fmt.Errorf("%w: save %s is known as step %d with %d shards, not step %d with %d shards",
				errBadRequest, id.ID, s.Step, s.Shards, id.Step, id.Shards)
		}
		return s, nil
	}
	inFlight := 0
	for _, s := range st.saves {
		if !s.over() {
			inFlight++
		}
	}
	if inFlight >= maxSaves {
		return nil, fmt.Errorf("%w: %d saves are in flight already; save %s has to wait for one of them", ErrLimit,
			inFlight, id.ID)
	}
	if len(st.saves)-inFlight >= 4*maxSaves {
		st.dropOldestOver()
	}
	return &save{Save: id, entries: map[int]commit.Entry{}, placed: newSet(id.Shards), failures: map[int]string{}}, nil
}

func (st *state) dropOldestOver() {
	oldest := ""
	for id, s := range st.saves {
		if s.over() && (oldest == "" || s.heard.Before(st.saves[oldest].heard) ||
			s.heard.Equal(st.saves[oldest].heard) && id < oldest) {
			oldest = id
		}
	}
	st.dropSave(oldest)
}

func (st *state) dropSave(id string) {
	st.dropEntries(st.saves[id])
	delete(st.saves, id)
}

func (st *state) dropEntries(s *save) {
	st.bytes -= s.bytes
	s.bytes = 0
	s.entries = map[int]commit.Entry{} // a cleared map would keep its memory
}

func (st *state) apply(s *save, r Report) error {
	if s.published && r.Phase != Failed {
		return nil
	}
	switch r.Phase {
	case Prepared:
		return st.prepare(s, r)
	case Intent:
		s.intent = true
	case Placed: // only after the intent, which an empty state may not know
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

// prepare records the entries and clears the failures of the same shards. Once the entries of all shards are there,
// they do not change: the leader may have them. While another shard has failed, no entry is recorded: the sender gets
// that failure and removes its files.
func (st *state) prepare(s *save, r Report) error {
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

// fail records a failure. The leader may abort until it has posted the intent; the others only as long as the leader
// cannot have written it.
func (st *state) fail(s *save, r Report) error {
	if !s.intent && s.allPrepared() && !r.leads() {
		return fmt.Errorf("%w: save %s: all shards are prepared and the leader may have gone on; keep the files",
			ErrDecided, s.ID)
	}
	for _, n := range r.Shards {
		if !s.published && !s.placed.has(n) {
			s.failures[n] = s.reason(r.Error)
		}
	}
	if s.aborted() {
		st.dropEntries(s) // a writer that gets the failure removes its files, and has to prepare again
	}
	return nil
}

// maxReasons bounds the texts that a save keeps: when storage is down, all shards fail with the same text.
const maxReasons = 16

func (s *save) reason(why string) string {
	if len(s.failures) >= maxReasons {
		return "failed, like others before"
	}
	return text.Head(cmp.Or(why, "no reason given"), maxReason)
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

// entryBytes estimates the memory of an entry.
func entryBytes(e commit.Entry) int64 {
	n := int64(128)
	for _, f := range e.Files {
		n += int64(96 + len(f.Path) + len(f.Tmp))
	}
	return n
}

// topic is the one that the sender of r waits for; the zero topic if it need not wait.
func (r Report) topic() topic {
	kind := topicKind(0)
	switch {
	case r.Phase == Prepared && r.leads():
		kind = allPrepared
	case r.Phase == Prepared:
		kind = hasIntent
	case r.Phase == Placed && r.leads():
		kind = allPlaced
	case r.Phase == Placed:
		kind = isPublished
	default:
		return topic{}
	}
	return topic{kind, r.Save.ID}
}

// reply is the answer to a Report that was stepped in; false as long as there is none.
func (st *state) reply(r Report) ([]commit.Entry, bool, error) {
	s := st.saves[r.Save.ID]
	if s == nil {
		return nil, false, nil
	}
	t := r.topic()
	switch {
	case r.Phase == Failed && s.intent:
		return nil, true, fmt.Errorf("%w: save %s: the intent is written; keep the files", ErrDecided, s.ID)
	case t == topic{}:
		return nil, true, nil
	case s.known()&t.kind == 0:
		return nil, false, nil
	case s.published && r.Phase == Prepared:
		return nil, true, fmt.Errorf("%w: save %s of step %d", ErrCommitted, s.ID, s.Step)
	case s.aborted() && r.Phase == Prepared:
		return nil, true, s.failure(ErrAborted)
	case s.stalled() && r.Phase == Placed:
		return nil, true, s.failure(ErrStalled)
	case t.kind == allPrepared:
		return s.sorted(), true, nil
	}
	return nil, true, nil
}

// failure names the lowest shard that failed.
func (s *save) failure(is error) error {
	shard := slices.Min(slices.Collect(maps.Keys(s.failures)))
	return failureError(is, s.Save, shard, s.failures[shard])
}

// failureError names the shard that failed. A shard that failed because of another already has that reason in its own,
// which must not be wrapped again.
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
