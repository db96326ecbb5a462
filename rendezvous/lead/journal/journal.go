// Package journal is a lead.Store in a directory of one host: the processes of this host elect one of them by a lock,
// and the decisions are in an append-only file.
package journal

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"

	"dlrover-run/rendezvous/lead"
)

const (
	format  = "dlrover-run journal 1" // payload of the first frame of a segment
	suffix  = ".journal"
	damaged = ".damaged"
	// segmentSize is the length from which on a segment is written anew, with the newest record of each key alone, if it
	// has also doubled since it was new.
	segmentSize = 1 << 20
	maxKept     = 256 << 20 // bytes of all records
)

// store is the decisions in a directory. One process uses it at a time.
type store struct {
	disk  disk
	log   *slog.Logger
	limit int64 // segmentSize

	mu      sync.Mutex // guards waiting
	waiting []*request

	writing sync.Mutex // guards the rest; held while a frame is written
	term    lead.Term
	newest  map[string][]byte // by key
	kept    int               // bytes of newest
	seg     segment
}

// request is an Append that waits for its frame.
type request struct {
	batch
	err  error
	done bool
}

// segment is the file that is written.
type segment struct {
	name   string
	file   file // nil: a write has failed, and the next one begins another segment
	number uint64
	size   int64 // of the frames that were written whole
	fresh  int64 // size when it was new, or about that which it would have as a new one
}

// openStore reads the newest segment. It moves a damaged one aside, says so, and goes on with the records that it could
// read.
func openStore(d disk, log *slog.Logger) (*store, error) {
	s := &store{disk: d, log: log, limit: segmentSize, newest: map[string][]byte{}}
	names, err := s.segments()
	if err != nil {
		return nil, err
	}
	for i, name := range slices.Backward(names) {
		ok, err := s.load(name)
		if err != nil {
			return nil, err
		}
		if ok {
			for _, old := range names[:i] { // of a crash between two segments
				s.drop(old)
			}
			break
		}
	}
	return s, nil
}

// drop removes a segment that is not read any more.
func (s *store) drop(name string) {
	if err := s.disk.remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.log.Warn("an old segment of the journal remains", "file", name, "err", err)
	}
}

// segments are the names of the segments, the oldest first.
func (s *store) segments() ([]string, error) {
	names, err := s.disk.list()
	if err != nil {
		return nil, err
	}
	names = slices.DeleteFunc(names, func(name string) bool {
		return !strings.HasSuffix(name, suffix) || len(name) != len(segmentName(0))
	})
	slices.Sort(names)
	return names, nil
}

func segmentName(n uint64) string { return fmt.Sprintf("%016x%s", n, suffix) }

// load takes over the records of a segment, unless a crash has left it before its first record.
func (s *store) load(name string) (ok bool, err error) {
	data, err := s.disk.read(name)
	if err != nil {
		return false, err
	}
	found := read(data)
	if len(found.payloads) > 0 && string(found.payloads[0]) != format && found.damage == "" {
		return false, fmt.Errorf("%s is %q: this program writes %q; use the version that wrote it, or another directory",
			name, cut(found.payloads[0]), format)
	}
	if len(found.payloads) < 2 {
		return false, nil
	}
	for _, payload := range found.payloads {
		if b, err := decode(payload); err == nil && string(payload) != format {
			s.apply(b)
		}
	}
	if found.damage != "" {
		return true, s.setAside(name, found.damage)
	}
	s.seg = segment{name: name, number: found.next, size: int64(found.end), fresh: int64(s.kept)}
	s.seg.file, err = s.disk.open(name, s.seg.size)
	return true, err
}

func cut(b []byte) []byte { return b[:min(len(b), 40)] }

// setAside writes what could be read to a new segment, and gives the damaged one another name.
func (s *store) setAside(name, damage string) error {
	if err := s.begin(name); err != nil {
		return err
	}
	s.log.Error("the journal is damaged: decisions may be lost; the file is kept", "file", name+damaged, "damage", damage)
	return errors.Join(s.disk.rename(name, name+damaged), s.disk.sync())
}

func (s *store) apply(b batch) {
	s.term = max(s.term, b.term)
	for _, r := range b.records {
		if old, known := s.newest[r.Key]; known {
			s.kept -= len(r.Key) + len(old)
		}
		if r.Value == nil {
			delete(s.newest, r.Key)
			continue
		}
		s.newest[r.Key] = r.Value
		s.kept += len(r.Key) + len(r.Value)
	}
}

// append keeps a batch. Requests that come while a frame is written share the next one.
func (s *store) append(b batch) error {
	if err := lead.Validate(b.records); err != nil {
		return err
	}
	r := &request{batch: b}
	s.mu.Lock()
	s.waiting = append(s.waiting, r)
	s.mu.Unlock()
	s.writing.Lock()
	defer s.writing.Unlock()
	if !r.done { // else another request has written it
		s.flush()
	}
	return r.err
}

// flush writes the waiting requests, and refuses those of other terms.
func (s *store) flush() {
	s.mu.Lock()
	requests := s.waiting
	s.waiting = nil
	s.mu.Unlock()
	var all batch
	for _, r := range requests {
		switch {
		case r.term != s.term:
			r.err = lead.ErrDeposed
			continue
		case s.kept > maxKept && slices.ContainsFunc(r.records, func(r lead.Record) bool { return r.Value != nil }):
			r.err = fmt.Errorf("%w: the journal has %d bytes of records: at most %d are kept", lead.ErrFull, s.kept, maxKept)
			continue
		}
		all.term, all.records = r.term, append(all.records, r.records...)
	}
	var err error
	if all.term != 0 {
		err = s.commit(all)
	}
	for _, r := range requests {
		if r.done = true; r.err == nil {
			r.err = err
		}
	}
}

// commit makes a batch durable. After an error nothing of it is kept, unless not even a cut of the file succeeds.
func (s *store) commit(b batch) error {
	if s.seg.file == nil || s.seg.size > max(s.limit, 2*s.seg.fresh) {
		if err := s.renew(); err != nil {
			return err
		}
	}
	frame := appendFrame(nil, s.seg.number, b.encode(nil))
	err := s.seg.file.append(frame)
	if err != nil {
		err = errors.Join(err, s.seg.file.truncate(s.seg.size), s.seg.file.close())
		s.seg.file = nil
		return err
	}
	s.seg.number, s.seg.size = s.seg.number+1, s.seg.size+int64(len(frame))
	s.apply(b)
	return nil
}

// renew begins another segment, and removes the one before.
func (s *store) renew() error {
	old := s.seg
	if err := s.begin(old.name); err != nil {
		return err
	}
	if old.file != nil {
		_ = old.file.close() // it is not read any more
	}
	if old.name != "" {
		s.drop(old.name)
	}
	return nil
}

// recordsInFrame bounds a frame of a new segment: maxFrame is more than that many of the largest records.
const recordsInFrame = 512

// begin writes the newest records to the segment that follows another one; "" is none.
func (s *store) begin(after string) (err error) {
	var number uint64
	_, _ = fmt.Sscanf(after, "%x", &number)
	content := appendFrame(nil, 0, []byte(format))
	content = appendFrame(content, 1, batch{term: s.term}.encode(nil))
	next := segment{name: segmentName(number + 1), number: 2}
	for some := range slices.Chunk(s.records(), recordsInFrame) {
		content = appendFrame(content, next.number, batch{term: s.term, records: some}.encode(nil))
		next.number++
	}
	next.size, next.fresh = int64(len(content)), int64(len(content))
	if next.file, err = s.disk.create(next.name, content); err == nil {
		s.seg = next
	}
	return err
}

// records are the newest of each key, by key.
func (s *store) records() (all []lead.Record) {
	for _, key := range slices.Sorted(maps.Keys(s.newest)) {
		all = append(all, lead.Record{Key: key, Value: s.newest[key]})
	}
	return all
}
