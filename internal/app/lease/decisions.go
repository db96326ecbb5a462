package lease

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"dlrover-run/rendezvous/lead"
)

// maxRecords bounds all records together, in bytes: of values a ConfigMap takes 1 MiB, and etcd of everything 1.5 MiB.
const maxRecords = 900 << 10

// between is the pause between two writes that nobody waits for: each has all records.
const between = 2 * time.Second

// Pause implements lead.Slow.
func (s *Store) Pause() time.Duration { return between }

// mapName is that of the ConfigMap.
func (s *Store) mapName() string { return s.name + "-decisions" }

// readMap returns a new ConfigMap if there is none.
func (s *Store) readMap(ctx context.Context) (*unstructured.Unstructured, error) {
	m, err := s.get(ctx, s.maps, s.mapName())
	if err == nil && m == nil {
		m = object("v1", "ConfigMap", s.mapName())
	}
	return m, err
}

// write changes the records for the leader of t, after which no earlier one can, and returns the ConfigMap. It always
// changes that: a write before, whose answer was lost, is then either in it, or is refused when it arrives.
func (s *Store) write(ctx context.Context, t *tenure, change func(records map[string]string)) (
	m *unstructured.Unstructured, err error,
) {
	t.mu.Lock()
	defer t.mu.Unlock()
	err = s.retried(func() (err error) {
		if t.kept == nil {
			if t.kept, err = s.readMap(ctx); err != nil {
				return err
			}
		}
		if termOf(t.kept) > t.term {
			return lead.ErrDeposed
		}
		m = t.kept.DeepCopy()
		if err := edit(m, t.term, change); err != nil {
			return err
		}
		t.kept = nil
		if m, err = s.put(ctx, s.maps, m); err == nil {
			t.kept = m
		}
		return err
	})
	return m, err
}

// edit changes a ConfigMap.
func edit(m *unstructured.Unstructured, term lead.Term, change func(records map[string]string)) error {
	writes, _ := strconv.ParseUint(m.GetAnnotations()[writesKey], 10, 64)
	annotate(m, writesKey, strconv.FormatUint(writes+1, 10))
	annotate(m, termKey, strconv.FormatUint(uint64(term), 10))
	if change == nil {
		return nil
	}
	records := recordsOf(m)
	before := sizeOf(records)
	change(records)
	if size := sizeOf(records); size > maxRecords && size >= before {
		return fmt.Errorf("%w: the decisions would have %d bytes, and a ConfigMap takes %d: shorten --keep-runs, or use "+
			"--etcd", lead.ErrFull, size, maxRecords)
	}
	return unstructured.SetNestedStringMap(m.Object, records, "binaryData")
}

// sizeOf is the room of records in a ConfigMap.
func sizeOf(records map[string]string) (size int) {
	for name, value := range records {
		size += 2*len(name) + base64.StdEncoding.DecodedLen(len(value)) // managedFields has the names, too
	}
	return size
}

// recordsOf are the contents of a ConfigMap, in base64.
func recordsOf(m *unstructured.Unstructured) map[string]string {
	records, _, _ := unstructured.NestedStringMap(m.Object, "binaryData")
	if records == nil {
		records = map[string]string{}
	}
	return records
}

// nameOf is the name of a record in a ConfigMap, which may have no slash, two dots in front, or more than 253 bytes. A
// record there begins with its key.
func nameOf(key string) string {
	sum := sha256.Sum256([]byte(key))
	return "_" + strings.ReplaceAll(key, "/", "_") + "_" + hex.EncodeToString(sum[:16])
}

// leading is this process's leadership of a term.
func (s *Store) leading(term lead.Term) (*tenure, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tenure == nil || s.tenure.term != term || s.tenure.ctx.Err() != nil {
		return nil, lead.ErrDeposed
	}
	return s.tenure, nil
}

// fenced writes if this process still leads. It does not wait for the API server when the leadership is over.
func (s *Store) fenced(ctx context.Context, term lead.Term, change func(records map[string]string)) (
	*unstructured.Unstructured, error,
) {
	t, err := s.leading(term)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(t.ctx, cancel)()
	m, err := s.write(ctx, t, change)
	if errors.Is(err, lead.ErrDeposed) {
		t.lose()
	}
	if t.ctx.Err() != nil {
		return nil, lead.ErrDeposed
	}
	return m, err
}

// Append implements lead.Decisions.
func (s *Store) Append(ctx context.Context, term lead.Term, records ...lead.Record) error {
	if err := lead.Validate(records); err != nil {
		return err
	}
	_, err := s.fenced(ctx, term, func(all map[string]string) {
		for _, r := range records {
			if r.Value == nil {
				delete(all, nameOf(r.Key))
				continue
			}
			all[nameOf(r.Key)] = base64.StdEncoding.EncodeToString(append([]byte(r.Key+"\n"), r.Value...))
		}
	})
	return err
}

// Load implements lead.Decisions. It writes, so that nothing of an earlier leader comes after it.
func (s *Store) Load(ctx context.Context, term lead.Term) (all []lead.Record, err error) {
	m, err := s.fenced(ctx, term, nil)
	if err != nil {
		return nil, err
	}
	for _, text := range recordsOf(m) {
		data, err := base64.StdEncoding.DecodeString(text)
		key, value, ok := bytes.Cut(data, []byte("\n"))
		if err == nil && ok { // else it is not ours
			all = append(all, lead.Record{Key: string(key), Value: value})
		}
	}
	slices.SortFunc(all, func(a, b lead.Record) int { return cmp.Compare(a.Key, b.Key) })
	return all, nil
}
