package kube

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"
)

// maxOwners bounds the entries on a node, because masters that never came back leave theirs.
const maxOwners = 64

// entry is one owner's mark in the annotation.
type entry struct {
	Reason   string    `json:"reason"`
	Evidence string    `json:"evidence"`
	Since    time.Time `json:"since"`
	Until    time.Time `json:"until,omitzero"`
	Level    Level     `json:"level"`
	Tainted  bool      `json:"tainted,omitempty"` // the taint is there because of us
	Cordoned bool      `json:"cordoned"`          // and the node unschedulable
}

func newEntry(l Level, m Mark) entry {
	return entry{Reason: m.Reason, Evidence: m.Evidence, Since: m.Since, Until: m.Until, Level: l}
}

// The changes of an entry; the node has them while any entry does.
func tainted(e entry) bool     { return e.Tainted }
func cordoned(e entry) bool    { return e.Cordoned }
func conditioned(e entry) bool { return e.Level == Condition && !e.Tainted && !e.Cordoned }

// record is the value of the annotation. Other owners' entries are written as they were read, including fields of later
// versions.
type record struct {
	entries map[string]entry // by owner
	raw     map[string]json.RawMessage
}

// parseRecord reads an annotation; "" is an empty one.
func parseRecord(text string) (record, error) {
	r := record{entries: map[string]entry{}, raw: map[string]json.RawMessage{}}
	if text == "" {
		return r, nil
	}
	if err := json.Unmarshal([]byte(text), &r.raw); err != nil || r.raw == nil {
		return r, fmt.Errorf("annotation %s holds no JSON object of marks by owner", Key)
	}
	for owner, raw := range r.raw {
		var e *entry
		if err := json.Unmarshal(raw, &e); err != nil || e == nil || checkOwner(owner) != nil {
			return r, fmt.Errorf("annotation %s: the entry of owner %.260q is not a mark", Key, owner)
		}
		e.Reason, e.Evidence = clean(e.Reason, maxReason), clean(e.Evidence, maxEvidence)
		r.entries[owner] = *e
	}
	return r, nil
}

// String is the value of the annotation, "" without entries.
func (r record) String() string {
	if len(r.raw) == 0 {
		return ""
	}
	text, err := json.Marshal(r.raw)
	if err != nil {
		panic(err) // every part has been read or written as JSON before
	}
	return string(text)
}

// with is a copy in which owner has the entry e.
func (r record) with(owner string, e entry) (record, error) {
	r = r.without(owner)
	if len(r.raw) >= maxOwners {
		return r, fmt.Errorf("annotation %s holds marks of %d owners already", Key, len(r.raw))
	}
	raw, err := json.Marshal(e)
	r.entries[owner], r.raw[owner] = e, raw
	return r, err
}

// single is the value of an annotation with one entry.
func single(owner string, e entry) (string, error) {
	r, err := parseRecord("")
	if err == nil {
		r, err = r.with(owner, e)
	}
	return r.String(), err
}

// without is a copy without owner's entry.
func (r record) without(owner string) record {
	r = record{maps.Clone(r.entries), maps.Clone(r.raw)}
	delete(r.entries, owner)
	delete(r.raw, owner)
	return r
}

// held reports whether owner has an entry, one that ends by until if that is given.
func (r record) held(owner string, until time.Time) bool {
	e, ok := r.entries[owner]
	return ok && (until.IsZero() || !e.Until.IsZero() && !e.Until.After(until))
}

// first is, of the entries for which holds is true, that of the first owner by name: all masters agree on it.
func (r record) first(holds func(entry) bool) (entry, bool) {
	for _, owner := range slices.Sorted(maps.Keys(r.entries)) {
		if e := r.entries[owner]; holds(e) {
			return e, true
		}
	}
	return entry{}, false
}

func (r record) any(holds func(entry) bool) bool {
	_, ok := r.first(holds)
	return ok
}

// marks are the entries as marks of node, by owner.
func (r record) marks(node string) (marks []Mark) {
	for _, owner := range slices.Sorted(maps.Keys(r.entries)) {
		e := r.entries[owner]
		marks = append(marks, Mark{node, owner, e.Reason, e.Evidence, e.Since, e.Until})
	}
	return marks
}
