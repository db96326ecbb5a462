package shm

import (
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/internal/stable"
)

// File is one file of a checkpoint, as part of the image of a segment.
type File struct {
	Path string `json:"path"` // absolute, or relative to the checkpoint directory; clean
	Off  int64  `json:"off"`  // from the start of the image
	Len  int64  `json:"len"`
	Kind string `json:"kind"`
}

// Meta describes the save in a segment.
type Meta struct {
	Run            string            `json:"run"`
	Epoch          string            `json:"epoch"`
	Save           string            `json:"save"` // id, equal on all ranks: 16 hex digits
	Step           int64             `json:"step"`
	SavedNS        int64             `json:"saved_ns"` // when its rank began to save it
	Order          int64             `json:"order"`    // of the save in Epoch and Dir, alike on all ranks; 0: not known
	Rank           int               `json:"rank"`
	LocalRank      int               `json:"local_rank"`
	WorldSize      int               `json:"world_size"`
	LocalWorldSize int               `json:"local_world_size"`
	NodeRank       int               `json:"node_rank"`
	Shard          int               `json:"shard"`
	Shards         int               `json:"shards"`
	Primary        bool              `json:"primary"` // this holder writes the shard to disk
	Dir            string            `json:"dir"`
	Framework      string            `json:"framework"`
	Layout         string            `json:"layout"`
	Resize         string            `json:"resize"` // "any": usable in a world of another size; else "same"
	Files          []File            `json:"files"`
	Trackers       []commit.Tracker  `json:"trackers"`
	Retention      *commit.Retention `json:"retention"`
	TimeoutS       int               `json:"timeout_s"`
	Replicas       int               `json:"replicas"`
	Torch          string            `json:"torch"`
}

// ParseMeta reads and checks the description of a save. Whether the files fit in the image is for the reader of the
// segment to check: the image is not known here.
func ParseMeta(b []byte) (Meta, error) {
	if len(b) > MaxMeta {
		return Meta{}, fmt.Errorf("%w: description of %d bytes, the limit is %d", ErrDamaged, len(b), MaxMeta)
	}
	var m Meta
	if err := json.Unmarshal(b, &m); err != nil {
		return Meta{}, fmt.Errorf("%w: description: %w", ErrDamaged, err)
	}
	if err := m.check(); err != nil {
		return Meta{}, fmt.Errorf("%w: description: %w", ErrDamaged, err)
	}
	return m, nil
}

func (m *Meta) check() error {
	if len(m.Save) != 16 || strings.Trim(m.Save, "0123456789abcdef") != "" {
		return fmt.Errorf("save id %q is not 16 hex digits", m.Save)
	}
	for _, c := range []struct {
		name      string
		at, count int
	}{
		{"rank", m.Rank, m.WorldSize}, {"local_rank", m.LocalRank, m.LocalWorldSize}, {"shard", m.Shard, m.Shards},
	} {
		if c.at < 0 || c.at >= c.count {
			return fmt.Errorf("%s %d of %d", c.name, c.at, c.count)
		}
	}
	if m.NodeRank < 0 || m.TimeoutS < 0 || m.Replicas < 0 {
		return errors.New("node_rank, timeout_s or replicas is negative")
	}
	if m.Resize != "any" && m.Resize != "same" {
		return fmt.Errorf("resize %q is neither any nor same", m.Resize)
	}
	if r := m.Retention; r != nil && (r.KeepLatest < 0 || r.KeepInterval < 0) {
		return errors.New("retention is negative")
	}
	if !path.IsAbs(m.Dir) {
		return fmt.Errorf("checkpoint directory %q is not absolute", m.Dir)
	}
	if m.Dir != "/" {
		if err := checkPath(m.Dir); err != nil {
			return fmt.Errorf("checkpoint directory: %w", err)
		}
	}
	return m.checkFiles()
}

func (m *Meta) checkFiles() error {
	seen := map[string]bool{}
	add := func(p string) error {
		if err := checkPath(p); err != nil {
			return err
		}
		if !path.IsAbs(p) {
			p = path.Join(m.Dir, p)
		}
		own := path.Join(m.Dir, ".dlrover")
		if p == m.Dir || p == own || strings.HasPrefix(p, own+"/") {
			return fmt.Errorf("path %q is kept for the checkpoints' own records", p)
		}
		if seen[p] {
			return fmt.Errorf("path %q comes twice", p)
		}
		seen[p] = true
		return nil
	}
	for _, f := range m.Files {
		if err := add(f.Path); err != nil {
			return err
		}
		if f.Off < 0 || f.Len < 0 || f.Off%pageSize != 0 || f.Off+f.Len < 0 {
			return fmt.Errorf("file %q at %d of %d bytes", f.Path, f.Off, f.Len)
		}
	}
	for _, t := range m.Trackers {
		if err := add(t.Path); err != nil {
			return err
		}
	}
	files := stable.Sorted(slices.Values(m.Files), byOffset)
	for i := 1; i < len(files); i++ {
		if a, b := files[i-1], files[i]; a.Off+a.Len > b.Off {
			return fmt.Errorf("files %q and %q overlap", a.Path, b.Path)
		}
	}
	return nil
}

// checkPath accepts clean paths that stay below the directory they are relative to, and clean absolute ones.
func checkPath(p string) error {
	const limit = 4096 // PATH_MAX
	switch {
	case p == "" || p == "." || p == "/" || len(p) >= limit || strings.ContainsRune(p, 0):
	case path.Clean(p) != p, p == "..", strings.HasPrefix(p, "../"):
	default:
		return nil
	}
	return fmt.Errorf("path %.100q is not clean, or leaves the directory", p)
}
