package journal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous/lead"
)

var errCrashed = errors.New("crashed")

// model is a disk that fails at one of its changes. From then on it is as a crash leaves it, or it works again.
type model struct {
	files  map[string][]byte
	step   int
	failAt int
	part   func(frame []byte) []byte // of the frame that was being written
	done   bool                      // whether another change that was being made is found afterwards
	err    error                     // of that change: errCrashed ends everything
	over   bool
}

// change reports whether the next change happens, and its error.
func (m *model) change() (happens bool, err error) {
	if m.over {
		return false, errCrashed
	}
	if m.step++; m.step != m.failAt {
		return true, nil
	}
	m.over = m.err == errCrashed
	return m.done, m.err
}

func (m *model) list() ([]string, error) { return slices.Collect(maps.Keys(m.files)), nil }

func (m *model) read(name string) ([]byte, error) {
	data, ok := m.files[name]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return bytes.Clone(data), nil
}

func (m *model) create(name string, content []byte) (file, error) {
	happens, err := m.change()
	if happens {
		m.files[name] = bytes.Clone(content)
	}
	return &modelFile{m, name}, err
}

func (m *model) open(name string, size int64) (file, error) {
	f := &modelFile{m, name}
	return f, f.truncate(size)
}

func (m *model) rename(from, to string) error {
	happens, err := m.change()
	if happens {
		m.files[to] = m.files[from]
		delete(m.files, from)
	}
	return err
}

func (m *model) remove(name string) error {
	happens, err := m.change()
	if happens {
		delete(m.files, name)
	}
	return err
}

func (m *model) sync() error { _, err := m.change(); return err }

type modelFile struct {
	m    *model
	name string
}

func (f *modelFile) append(frame []byte) error {
	happens, err := f.m.change()
	if err != nil {
		frame = f.m.part(frame)
	}
	if happens || err != nil && len(frame) > 0 && f.m.part != nil {
		f.m.files[f.name] = append(f.m.files[f.name], frame...)
	}
	return err
}

func (f *modelFile) truncate(size int64) error {
	if f.m.over {
		return errCrashed
	}
	f.m.files[f.name] = f.m.files[f.name][:size]
	return nil
}

func (f *modelFile) close() error { return nil }

// parts are what a crash may leave of a frame.
var parts = map[string]func([]byte) []byte{
	"nothing": func([]byte) []byte { return nil },
	"half":    func(f []byte) []byte { return f[:len(f)/2] },
	"sector":  func(f []byte) []byte { return f[:8] },
	"zeros":   func(f []byte) []byte { return make([]byte, len(f)) },
	"no end":  func(f []byte) []byte { return append(bytes.Clone(f[:len(f)-8]), make([]byte, 8)...) },
	"no head": func(f []byte) []byte { return append(make([]byte, 8), f[8:]...) },
	"all":     func(f []byte) []byte { return f },
}

// history appends until an error, and returns the keys that were kept, and the one that was being written.
func history(s *store) (kept []string, tried string, err error) {
	for i := range 60 {
		tried = fmt.Sprint(i % 7)
		value := fmt.Sprint(i)
		err = s.append(batch{term: s.term, records: []lead.Record{record(tried, value), record("twin"+tried, value)}})
		if err != nil {
			return kept, tried + "=" + value, err
		}
		kept = append(kept, tried+"="+value)
	}
	return kept, "", nil
}

func record(key, value string) lead.Record { return lead.Record{Key: key, Value: []byte(value)} }

// values are the newest of each key.
func values(entries []string) map[string]string {
	all := map[string]string{}
	for _, e := range entries {
		var key, value string
		_, _ = fmt.Sscanf(e, "%1s=%s", &key, &value)
		all[key], all["twin"+key] = value, value
	}
	return all
}

func found(s *store) map[string]string {
	all := map[string]string{}
	for k, v := range s.newest {
		all[k] = string(v)
	}
	return all
}

func newStore(t *testing.T, m *model) *store {
	t.Helper()
	s, err := openStore(m, quiet())
	require.NoError(t, err)
	s.limit = 300 // a new segment every few records
	require.NoError(t, s.commit(batch{term: s.term + 1}))
	return s
}

// Every change is the last one before a crash. What was acknowledged is there afterwards, and what was being written is
// there as a whole or not at all.
func TestCrashAtEveryChange(t *testing.T) {
	for name, part := range parts {
		for _, done := range []bool{false, true} {
			for at := 3; ; at++ {
				m := &model{files: map[string][]byte{}, failAt: at, part: part, done: done, err: errCrashed}
				kept, tried, err := history(newStore(t, m))
				if err == nil {
					require.Greater(t, at, 60, "every change was tried")
					break
				}
				require.ErrorIs(t, err, errCrashed)
				again := newStore(t, &model{files: m.files})
				got := found(again)
				if !maps.Equal(got, values(append(kept, tried))) {
					require.Equal(t, values(kept), got, "%s, %v, change %d", name, done, at)
				}
				for name := range m.files {
					require.NotContains(t, name, damaged)
				}
			}
		}
	}
}

// A write that fails is refused, is not found later, and does not stop the next one.
func TestFullDiskAtEveryChange(t *testing.T) {
	for name, part := range parts {
		for at := 3; at < 70; at++ {
			m := &model{files: map[string][]byte{}, failAt: at, part: part, err: syscall.ENOSPC}
			s := newStore(t, m)
			kept, tried, err := history(s)
			if err != nil {
				require.ErrorIs(t, err, syscall.ENOSPC)
				require.Equal(t, values(kept), found(s), "%s, change %d: %s", name, at, tried)
			}
			last := []lead.Record{record("6", "last"), record("twin6", "last")}
			require.NoError(t, s.append(batch{term: s.term, records: last}))
			require.Equal(t, values(append(kept, "6=last")), found(newStore(t, m)), "%s, change %d", name, at)
		}
	}
}

// Every byte of a segment is damaged once: only the frame around it is lost, the file is kept, and that is said.
func TestDamageAtEveryByte(t *testing.T) {
	m := &model{files: map[string][]byte{}}
	s := newStore(t, m)
	for i := range 9 {
		require.NoError(t, s.append(batch{term: s.term, records: []lead.Record{record(fmt.Sprint(i), "x")}}))
	}
	name := s.seg.name
	lost, last := 0, nextFrame(m.files[name], 0, s.seg.number-1)
	for at := range m.files[name] {
		copied := &model{files: map[string][]byte{name: bytes.Clone(m.files[name])}}
		copied.files[name][at] ^= 0x55
		got, err := openStore(copied, quiet())
		require.NoError(t, err, "byte %d", at)
		require.GreaterOrEqual(t, len(got.newest), 8, "byte %d", at)
		require.NotZero(t, got.term, "byte %d", at)
		_, aside := copied.files[name+damaged]
		if at >= last { // as a crash leaves it
			require.False(t, aside, "byte %d", at)
		} else if len(got.newest) < 9 {
			require.True(t, aside, "byte %d", at)
			lost++
		}
	}
	require.Greater(t, lost, 100)
}

func TestOtherVersions(t *testing.T) {
	content := appendFrame(appendFrame(nil, 0, []byte("dlrover-run journal 2")), 1, []byte{1})
	_, err := openStore(&model{files: map[string][]byte{segmentName(1): content}}, quiet())
	require.ErrorContains(t, err, `is "dlrover-run journal 2": this program writes "dlrover-run journal 1"`)
}

func FuzzRead(f *testing.F) {
	good := appendFrame(appendFrame(nil, 0, []byte(format)), 1, batch{1, []lead.Record{record("a", "b")}}.encode(nil))
	f.Add(good)
	f.Add(good[:len(good)-1])
	f.Add(binary.LittleEndian.AppendUint32(nil, maxFrame))
	f.Fuzz(func(t *testing.T, data []byte) {
		s := read(data)
		require.LessOrEqual(t, s.end, len(data))
		for _, p := range s.payloads {
			b, err := decode(p)
			if err == nil {
				again, err := decode(b.encode(nil))
				require.NoError(t, err)
				require.Equal(t, b, again)
			}
		}
		if len(s.payloads) > 0 && s.damage == "" {
			require.Equal(t, s.payloads, read(data[:s.end]).payloads)
		}
	})
}
