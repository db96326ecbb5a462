package marks

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"dlrover-run/internal/app/nodehealth"
	"dlrover-run/rendezvous/lead"
)

const (
	recordPrefix = "nodes/"
	storeTimeout = 5 * time.Second // of one request
)

// records is the Registry in a store that a later leader reads. Only changes are written.
type records struct {
	store lead.Decisions
	term  lead.Term
	kept  map[string][]byte // what the store has, by key without recordPrefix
}

// load returns the Registry that the leader before has left.
func (r *records) load(ctx context.Context, policy nodehealth.Config) (*nodehealth.Registry, error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	all, err := r.store.Load(ctx, r.term)
	if err != nil {
		return nil, fmt.Errorf("what is known of nodes cannot be read: %w", err)
	}
	r.kept = map[string][]byte{}
	for _, record := range all {
		if key, ours := strings.CutPrefix(record.Key, recordPrefix); ours {
			r.kept[key] = record.Value
		}
	}
	g, err := nodehealth.RestoreRecords(policy, r.kept)
	if err != nil {
		return nil, fmt.Errorf("what is known of nodes: %w; remove the records, or use a program as new as their writer", err)
	}
	return g, nil
}

// take returns the write of a Registry as it is now. Writes come one after the other.
func (r *records) take(g *nodehealth.Registry) (write func() error, err error) {
	changes, err := r.changes(g)
	if err != nil {
		return nil, err
	}
	return func() error { return r.write(changes) }, nil
}

// changes are those of a Registry since the last write.
func (r *records) changes(g *nodehealth.Registry) (changes []lead.Record, err error) {
	now, err := g.Records()
	if err != nil {
		return nil, err
	}
	for _, key := range slices.Sorted(maps.Keys(now)) {
		if string(r.kept[key]) != string(now[key]) {
			changes = append(changes, lead.Record{Key: recordPrefix + key, Value: now[key]})
		}
	}
	for key := range r.kept {
		if now[key] == nil {
			changes = append(changes, lead.Record{Key: recordPrefix + key})
		}
	}
	return changes, nil
}

// unkept are the machines with unwritten changes, sorted.
func (r *records) unkept(g *nodehealth.Registry) (names []string) {
	changes, _ := r.changes(g)
	for _, c := range changes {
		value := c.Value
		if value == nil {
			value = r.kept[strings.TrimPrefix(c.Key, recordPrefix)]
		}
		var machine struct{ Name string }
		if json.Unmarshal(value, &machine) == nil && machine.Name != "" {
			names = append(names, machine.Name)
		}
	}
	slices.Sort(names)
	return names
}

func (r *records) write(changes []lead.Record) error {
	for len(changes) > 0 {
		some := changes[:fitting(changes)]
		ctx, cancel := context.WithTimeout(context.Background(), storeTimeout)
		err := r.store.Append(ctx, r.term, some...)
		cancel()
		if err != nil {
			return err
		}
		for _, c := range some {
			key := strings.TrimPrefix(c.Key, recordPrefix)
			if r.kept[key] = c.Value; c.Value == nil {
				delete(r.kept, key)
			}
		}
		changes = changes[len(some):]
	}
	return nil
}

// fitting is how many of some records fit into one Append.
func fitting(all []lead.Record) (n int) {
	size := 0
	for _, r := range all[:min(len(all), lead.MaxRecords)] {
		if size += len(r.Key) + len(r.Value); size > lead.MaxBytes && n > 0 {
			break
		}
		n++
	}
	return n
}
