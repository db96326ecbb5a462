package commit

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"dlrover-run/checkpointd/fsx"
	"dlrover-run/internal/stable"
)

// catalog reads the committed steps of a checkpoint directory, and the tracker that names one of them.
type catalog struct {
	storage storage
	cache   *Cache
}

// committed returns the manifest of a step. A damaged one counts as none.
func (c catalog) committed(step int64) (Manifest, bool) {
	m, found, err := c.storage.read(c.storage.manifest(step))
	return m, found && err == nil && m.Step == step
}

// tracked reads dlrover_latest.txt.
func (c catalog) tracked() (int64, bool) {
	step, err := c.tracker()
	return step, err == nil
}

// tracker returns the reason why dlrover_latest.txt names no step.
func (c catalog) tracker() (int64, error) {
	b, err := c.storage.fs.ReadFile(filepath.Join(c.storage.root, Latest), trackerLimit)
	if err != nil {
		return 0, err
	}
	step, ok := parseStep(b)
	if !ok {
		return 0, fmt.Errorf("%.20q is not a step", b)
	}
	return step, nil
}

// trackedSave returns the manifest of the step that dlrover_latest.txt names.
func (c catalog) trackedSave() (Manifest, bool) {
	step, ok := c.tracked()
	if !ok {
		return Manifest{}, false
	}
	return c.committed(step)
}

// notSuperseded fails when a save that was made later has put its files in the place of m's.
func (c catalog) notSuperseded(m Manifest) error {
	bs, err := c.briefs()
	if err != nil {
		return err
	}
	same := func(b *brief) bool {
		return b.Step == m.Step || slices.ContainsFunc(m.Files,
			func(f FileEntry) bool { return b.has(pathSum(f.Path)) })
	}
	for _, other := range bs {
		if other.Overtakes(m, m.Late) && same(other) {
			return fmt.Errorf("%w: save %s of step %d", ErrSuperseded, other.ID, other.Step)
		}
	}
	return nil
}

// overtaken returns the commit time of a save that is older than the tracked one, regardless of when it is completed:
// the time of the first later save of its epoch. Among saves of the same commit time the one that was made last is the
// newest.
func (c catalog) overtaken(m, by Manifest) (time.Time, error) {
	at := by.Committed
	bs, err := c.briefs()
	for _, b := range bs {
		if b.Epoch == m.Epoch && b.ID != m.ID && b.Saved.After(m.Saved) && b.Committed.Before(at) {
			at = b.Committed
		}
	}
	return at, err
}

func (c catalog) manifests() (ms []Manifest, damaged []Skipped, err error) {
	es, err := c.storage.list(c.storage.meta())
	if err != nil {
		return nil, nil, fmt.Errorf("list the checkpoints: %w", err)
	}
	for _, e := range es {
		step, ok := numbered(e, ".json")
		if !ok {
			continue
		}
		m, found, err := c.storage.read(c.storage.manifest(step))
		if err == nil && found && m.Step != step {
			err = fmt.Errorf("%s: is of step %d", c.storage.manifest(step), m.Step)
		}
		if err != nil {
			damaged = append(damaged, Skipped{Step: step, Reason: err.Error()})
		} else if found {
			ms = append(ms, m)
		}
	}
	stable.Sort(ms, newestFirst)
	return ms, damaged, nil
}

// newestFirst orders committed steps. Several that were overtaken by one have the same time of commit.
func newestFirst(a, b Manifest) int {
	return cmp.Or(b.Committed.Compare(a.Committed), b.Saved.Compare(a.Saved), cmp.Compare(b.Step, a.Step))
}

// numbered returns the step in the name of a manifest.
func numbered(e fsx.Entry, ext string) (int64, bool) {
	name, ok := strings.CutSuffix(e.Name, ext)
	if !ok || e.Dir {
		return 0, false
	}
	step, err := strconv.ParseInt(name, 10, 64)
	return step, err == nil && step >= 0 && strconv.FormatInt(step, 10) == name
}

// named reports whether a tracker names this save.
func (c catalog) named(m Manifest) bool {
	return slices.ContainsFunc(withLatest(m.Trackers, m.Step), func(tr Tracker) bool {
		b, err := c.storage.fs.ReadFile(filepath.Join(c.storage.root, tr.Path), trackerLimit)
		return err == nil && strings.TrimSpace(string(b)) == strings.TrimSpace(tr.Text)
	})
}

// trackedOf returns the step that the tracker names, or else the newest.
func (c catalog) trackedOf(bs []*brief) int64 {
	if step, ok := c.tracked(); ok {
		return step
	}
	return bs[0].Step
}

// briefs returns the committed steps of the directory, the newest commit first. It reads the manifests that the cache
// does not know. Damaged ones are left out.
func (c catalog) briefs() ([]*brief, error) {
	es, err := c.storage.list(c.storage.meta())
	if err != nil {
		return nil, fmt.Errorf("list the checkpoints: %w", err)
	}
	// A manifest that is replaced after this listing gets a time stamp no earlier than the newest one in the listing. So
	// entries that are older by more than the granularity would get another stamp.
	certain := lastCommit(es).Add(-stampGrain)
	known, now := c.cache.known(c.storage.root), memory{}
	var all []*brief
	for _, e := range es {
		step, ok := numbered(e, ".json")
		if !ok {
			continue
		}
		b, ok := known[e]
		if !ok {
			m, ok := c.committed(step)
			if !ok {
				continue
			}
			b = briefOf(m)
		}
		all = append(all, b)
		if e.ModTime.Before(certain) {
			now[e] = b
		}
	}
	c.cache.remember(c.storage.root, now)
	slices.SortFunc(all, func(a, b *brief) int { return newestFirst(a.Manifest, b.Manifest) })
	return all, nil
}
