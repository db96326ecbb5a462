package commit

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

const (
	metaDir = ".dlrover"
	version = 1
	// readLimit is the most that is written and read of a manifest, an entry or a plan: 10,000 shards of 40 files.
	readLimit    = 64 << 20
	trackerLimit = 4 << 10
)

// manifestJSON is a manifest on disk.
type manifestJSON struct {
	Version   int         `json:"version"`
	Step      int64       `json:"step"`
	Save      string      `json:"save"`
	Epoch     string      `json:"epoch"`
	Shards    int         `json:"shards"`
	WorldSize int         `json:"world_size"`
	Framework string      `json:"framework"`
	Layout    string      `json:"layout"`
	Saved     int64       `json:"saved_ns"`
	Committed int64       `json:"committed_ns"`
	Files     []FileEntry `json:"files"`
	Trackers  []Tracker   `json:"trackers"`
	Retention *Retention  `json:"retention"`
}

// MarshalJSON gives the form on disk. The directory is not in it: it may be moved.
func (m Manifest) MarshalJSON() ([]byte, error) {
	return json.Marshal(manifestJSON{
		Version: m.Version, Step: m.Step, Save: m.ID, Epoch: m.Epoch, Shards: m.Shards, WorldSize: m.WorldSize,
		Framework: m.Framework, Layout: m.Layout, Saved: nanos(m.Saved), Committed: nanos(m.Committed),
		Files: m.Files, Trackers: m.Trackers, Retention: m.Retention,
	})
}

// UnmarshalJSON reads the form on disk without judging it; see parseManifest.
func (m *Manifest) UnmarshalJSON(b []byte) error {
	var j manifestJSON
	if err := json.Unmarshal(b, &j); err != nil {
		return err
	}
	*m = Manifest{Version: j.Version, Committed: fromNanos(j.Committed), Files: j.Files, Save: Save{
		ID: j.Save, Epoch: j.Epoch, Framework: j.Framework, Layout: j.Layout, Step: j.Step, Shards: j.Shards,
		WorldSize: j.WorldSize, Saved: fromNanos(j.Saved), Trackers: j.Trackers, Retention: j.Retention,
	}}
	return nil
}

func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func fromNanos(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns).UTC()
}

// parseManifest reads a manifest and checks all of it.
func parseManifest(b []byte) (Manifest, error) {
	var m Manifest
	if err := json.Unmarshal(b, &m); err != nil {
		return Manifest{}, fmt.Errorf("manifest: %w: %w", errDamaged, err)
	}
	if m.Version > version { // it may be sound
		return Manifest{}, fmt.Errorf("manifest: version %d is not known", m.Version)
	}
	if err := checkManifest(m); err != nil {
		return Manifest{}, fmt.Errorf("manifest: %w: %w", errDamaged, err)
	}
	return m, nil
}

func checkManifest(m Manifest) error {
	if m.Version != version {
		return fmt.Errorf("version %d", m.Version)
	}
	if len(m.Files) == 0 {
		return errors.New("no files")
	}
	return errors.Join(checkSave(m.Save), checkFiles(m.Files, m.Shards))
}

// parsePlan reads the list of the temporary files of one shard of a save. If a path is not such a file of that very
// save, the plan is refused: the files it lists will be removed.
func parsePlan(b []byte, save string) ([]string, error) {
	var paths []string
	if err := json.Unmarshal(b, &paths); err != nil {
		return nil, fmt.Errorf("plan: %w", err)
	}
	if err := checkID(save); err != nil {
		return nil, fmt.Errorf("plan: %w", err)
	}
	for _, path := range paths {
		base := filepath.Base(path)
		name, ok := strings.CutSuffix(base, "."+save+".tmp")
		if !ok || len(name) < 2 || name[0] != '.' {
			return nil, fmt.Errorf("plan: %q is not a temporary file of save %s", path, save)
		}
		if err := checkPath(path); err != nil {
			return nil, fmt.Errorf("plan: %w", err)
		}
	}
	return paths, nil
}

// temporary is the name that the file at path has before the commit.
func temporary(path, save string) string {
	dir, base := filepath.Split(path)
	return dir + "." + base + "." + save + ".tmp"
}

func checkID(id string) error {
	odd := strings.ContainsFunc(id, func(c rune) bool {
		return !('0' <= c && c <= '9' || 'A' <= c && c <= 'Z' || 'a' <= c && c <= 'z' || c == '_' || c == '-')
	})
	if odd || id == "" || len(id) > 64 {
		return fmt.Errorf("save id %q: want 1 to 64 letters, digits, - and _", id)
	}
	return nil
}

func checkSave(s Save) error {
	if err := checkID(s.ID); err != nil {
		return err
	}
	if s.Step < 0 || s.Shards < 1 {
		return fmt.Errorf("save %s: step %d of %d shards", s.ID, s.Step, s.Shards)
	}
	for _, tr := range s.Trackers {
		if err := checkPath(tr.Path); err != nil {
			return fmt.Errorf("tracker: %w", err)
		}
		if filepath.IsAbs(tr.Path) || len(tr.Text) > trackerLimit {
			return fmt.Errorf("tracker %q: not in the directory, or too long", tr.Path)
		}
	}
	return nil
}

func checkFiles(files []FileEntry, shards int) error {
	seen := make(map[string]bool, len(files))
	for _, f := range files {
		if err := checkPath(f.Path); err != nil {
			return err
		}
		if f.Size < 0 || f.Shard < 0 || f.Shard >= shards {
			return fmt.Errorf("%s: size %d, shard %d of %d", f.Path, f.Size, f.Shard, shards)
		}
		if seen[f.Path] {
			return fmt.Errorf("%s: written by more than one", f.Path)
		}
		seen[f.Path] = true
	}
	return nil
}

// checkPath takes an absolute path, or one that stays in the directory and out of our own corner of it.
func checkPath(path string) error {
	rel := strings.TrimPrefix(path, "/")
	switch {
	case !utf8.ValidString(path) || strings.ContainsRune(path, 0):
		return fmt.Errorf("path %q: not UTF-8", path)
	case path == "" || path == "." || path == "/" || filepath.Clean(path) != path || !filepath.IsLocal(rel):
		return fmt.Errorf("path %q: not a clean path in the directory", path)
	case path == metaDir || strings.HasPrefix(path, metaDir+"/"):
		return fmt.Errorf("path %q: %s is reserved", path, metaDir)
	}
	return nil
}

// parseStep reads a tracker: a plain number from 0 on.
func parseStep(b []byte) (int64, bool) {
	step, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return step, err == nil && step >= 0
}

// withLatest returns the trackers of a step with Latest as the last one.
func withLatest(trackers []Tracker, step int64) []Tracker {
	all := slices.DeleteFunc(slices.Clone(trackers), func(tr Tracker) bool { return tr.Path == Latest })
	return append(all, Tracker{Path: Latest, Text: strconv.FormatInt(step, 10)})
}
