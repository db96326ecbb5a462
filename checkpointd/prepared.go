package checkpointd

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
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

func (d *Daemon) preparedDir() string { return filepath.Join(d.cfg.Dir.Path(), preparedName) }

func (d *Daemon) preparedPath(j *save) string {
	return filepath.Join(d.preparedDir(), j.meta.Save+"."+strconv.Itoa(j.meta.Shard))
}

// keepPrepared writes a record. It need not outlive the machine: then there is no segment either.
func (d *Daemon) keepPrepared(j *save, e commit.Entry) error {
	meta, err := json.Marshal(j.meta)
	if err != nil {
		return fmt.Errorf("record save %s: %w", j.meta.Save, err)
	}
	b, err := json.Marshal(preparedRecord{Segment: j.seg.seg.Name(), Seq: j.seq, Saved: j.saved, Meta: meta, Entry: e})
	if err != nil {
		return fmt.Errorf("record save %s: %w", j.meta.Save, err)
	}
	if err := os.Mkdir(d.preparedDir(), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("record save %s: %w", j.meta.Save, err)
	}
	if err := openfile.Replace(d.preparedPath(j), b, 0o600); err != nil {
		return fmt.Errorf("record save %s: %w", j.meta.Save, err)
	}
	return nil
}

func (d *Daemon) dropPrepared(j *save) { _ = os.Remove(d.preparedPath(j)) }

// loadPrepared lists the shards that an earlier daemon had made durable.
func (d *Daemon) loadPrepared() (saves []*save) {
	entries, err := os.ReadDir(d.preparedDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		d.log.Warn("cannot look for saves to be committed", "err", err)
	}
	for _, e := range entries {
		path := filepath.Join(d.preparedDir(), e.Name())
		if strings.HasSuffix(path, ".new") { // half written
			_ = os.Remove(path)
			continue
		}
		j, err := d.readPrepared(path)
		if err != nil {
			d.log.Warn("a save cannot be gone on with", "note", path, "err", err)
			_ = os.Remove(path)
			continue
		}
		saves = append(saves, j)
	}
	return saves
}

// maxRecord bounds one file of an earlier daemon, in bytes.
const maxRecord = 16 << 20

func (d *Daemon) readPrepared(path string) (*save, error) {
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
	if path != d.preparedPath(j) {
		return nil, errors.New("it has the name of another save")
	}
	if s, err := d.open(n.Segment); err == nil {
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
