package checkpointd

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/openfile"
)

// A preparedRecord stands for a shard that is durable and not committed. When its segment is released the worker may
// save over it. If the daemon is killed then, the next one needs this record, in the runtime directory, to commit the
// shard.
type preparedRecord struct {
	Segment string          `json:"segment"` // that held it, and may still
	Seq     uint64          `json:"seq"`
	Saved   time.Time       `json:"saved"`
	Meta    json.RawMessage `json:"meta"`
	Entry   commit.Entry    `json:"entry"`
}

// preparedName is below the runtime directory.
const preparedName = "prepared"

// preparedRecords are the records in a directory.
type preparedRecords struct {
	log *slog.Logger
	dir string
}

func (r preparedRecords) path(j *save) string {
	return filepath.Join(r.dir, j.meta.Save+"."+strconv.Itoa(j.meta.Shard))
}

// keep writes a record. It need not outlive the machine: then there is no segment either.
func (r preparedRecords) keep(j *save, e commit.Entry) error {
	meta, err := json.Marshal(j.meta)
	if err != nil {
		return fmt.Errorf("record save %s: %w", j.meta.Save, err)
	}
	b, err := json.Marshal(preparedRecord{Segment: j.seg.seg.Name(), Seq: j.seq, Saved: j.saved, Meta: meta, Entry: e})
	if err != nil {
		return fmt.Errorf("record save %s: %w", j.meta.Save, err)
	}
	if err := os.Mkdir(r.dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("record save %s: %w", j.meta.Save, err)
	}
	if err := openfile.Replace(r.path(j), b, 0o600); err != nil {
		return fmt.Errorf("record save %s: %w", j.meta.Save, err)
	}
	return nil
}

func (r preparedRecords) drop(j *save) { _ = os.Remove(r.path(j)) }

// load lists the shards that an earlier daemon had made durable.
func (r preparedRecords) load(segs *segments) (saves []*save) {
	entries, err := os.ReadDir(r.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.log.Warn("cannot look for saves to be committed", "err", err)
	}
	for _, e := range entries {
		path := filepath.Join(r.dir, e.Name())
		if strings.HasSuffix(path, ".new") { // half written
			_ = os.Remove(path)
			continue
		}
		j, err := r.read(path, segs)
		if err != nil {
			r.log.Warn("a save cannot be gone on with", "note", path, "err", err)
			_ = os.Remove(path)
			continue
		}
		saves = append(saves, j)
	}
	return saves
}

// maxRecord bounds one file of an earlier daemon, in bytes.
const maxRecord = 16 << 20

func (r preparedRecords) read(path string, segs *segments) (*save, error) {
	b, err := openfile.Read(path, maxRecord)
	if err != nil {
		return nil, err
	}
	n, m, err := parsePrepared(b)
	if err != nil {
		return nil, err
	}
	j := newSave(nil, n.Seq, n.Saved, m)
	j.entry, j.resumed = &n.Entry, true
	if path != r.path(j) {
		return nil, errors.New("it has the name of another save")
	}
	if s, err := segs.open(n.Segment); err == nil {
		if h, held, err := s.seg.Peek(); err == nil && h.Seq == n.Seq && held.Save == m.Save && held.Shard == m.Shard {
			j.seg = s
		}
	}
	return j, nil
}

func parsePrepared(b []byte) (preparedRecord, shm.Meta, error) {
	var n preparedRecord
	if err := json.Unmarshal(b, &n); err != nil {
		return n, shm.Meta{}, fmt.Errorf("record of a prepared shard: %w", err)
	}
	m, err := shm.ParseMeta(n.Meta)
	if err != nil {
		return n, m, fmt.Errorf("record of a prepared shard: %w", err)
	}
	if n.Entry.Shard != m.Shard {
		return n, m, fmt.Errorf("record of a prepared shard: of shard %d in a save of shard %d", n.Entry.Shard, m.Shard)
	}
	return n, m, nil
}
