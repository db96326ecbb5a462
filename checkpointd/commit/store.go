package commit

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"dlrover-run/internal/stable"
)

// Plan begins a shard of a save and returns the paths that its files, in the order of paths, are to be written to. They
// are absolute and without links. The directories of the files are made.
func (t Store) Plan(s Save, shard int, paths []string) ([]string, error) {
	d, err := t.open(s, shard)
	if err != nil {
		return nil, fmt.Errorf("plan: %w", err)
	}
	if err := d.stages.notBegun(s.ID); err != nil {
		return nil, fmt.Errorf("plan save %s: %w", s.ID, err)
	}
	files := make([]FileEntry, len(paths))
	for i, path := range paths {
		files[i] = FileEntry{Path: path, Shard: shard}
	}
	e, err := d.storage.entry(Entry{Shard: shard, Files: files})
	if err != nil {
		return nil, fmt.Errorf("plan save %s: %w", s.ID, err)
	}
	finals, tmps, err := d.storage.realFiles(e.Files, s.ID)
	if err != nil {
		return nil, fmt.Errorf("plan save %s: %w", s.ID, err)
	}
	if err := d.storage.free(finals); err != nil {
		return nil, fmt.Errorf("plan save %s: %w", s.ID, err)
	}
	named := make([]string, len(e.Files))
	for i, f := range e.Files {
		named[i] = temporary(f.Path, s.ID)
	}
	if err := d.stages.plan(d.storage.marker(s.ID, shard, "plan"), named, finals); err != nil {
		return nil, fmt.Errorf("plan save %s: %w", s.ID, err)
	}
	return tmps, nil
}

// open checks the arguments of a call about a save.
func (t Store) open(s Save, shard int) (directory, error) {
	if err := checkSave(s); err != nil {
		return directory{}, err
	}
	if shard < 0 || shard >= s.Shards {
		return directory{}, fmt.Errorf("save %s: shard %d of %d", s.ID, shard, s.Shards)
	}
	return t.at(s.Dir)
}

// Prepared records that the temporary files of a shard are complete. It makes their names durable; their content is.
func (t Store) Prepared(s Save, e Entry) error {
	d, err := t.open(s, e.Shard)
	if err != nil {
		return fmt.Errorf("prepare: %w", err)
	}
	e, err = d.storage.entry(e)
	if err != nil {
		return fmt.Errorf("prepare save %s: %w", s.ID, err)
	}
	_, tmps, err := d.storage.realFiles(e.Files, s.ID)
	if err == nil {
		err = d.storage.expect(tmps, e.Files)
	}
	if err == nil {
		err = d.storage.syncDirs(tmps)
	}
	if err == nil {
		err = d.storage.put(d.storage.marker(s.ID, e.Shard, "prepared"), e)
	}
	if err != nil {
		return fmt.Errorf("prepare save %s: %w", s.ID, err)
	}
	return nil
}

// Intent begins the commit: es has the entries of all shards, whose temporary files must exist. An earlier save of the
// same files whose commit was interrupted is completed first.
func (t Store) Intent(s Save, es []Entry) error {
	d, err := t.open(s, 0)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	m, err := d.future(s, es)
	if err == nil {
		defer t.turn(d)()
		err = t.begin(d, m)
	}
	if err != nil {
		return fmt.Errorf("begin the commit of save %s: %w", s.ID, err)
	}
	return nil
}

// usualPatience is enough for a process that completes a large save of another one.
const usualPatience = 10 * time.Second

// turn waits until no other process begins or completes a commit in the directory. So of two saves of the same files,
// perhaps of two jobs, the one that begins later sees the intent of the other and completes that first: from then on
// nobody has files of the other to rename. It waits for nobody where storage has no locks, and not for ever.
func (t Store) turn(d directory) (done func()) {
	if t.Cache != nil && t.Cache.lockless.Load() {
		return func() {}
	}
	done, err := t.FS.Lock(d.storage.lock(), cmp.Or(t.patience, usualPatience))
	if err != nil {
		if t.Cache != nil && errors.Is(err, syscall.ETIMEDOUT) {
			t.Cache.lockless.Store(true)
		}
		return func() {}
	}
	return done
}

func (t Store) begin(d directory, m Manifest) error {
	if old, ok := d.steps.committed(m.Step); ok && old.ID == m.ID {
		return nil
	}
	if begun, err := d.stages.begun(m.ID); begun || err != nil {
		return err
	}
	_, tmps, err := d.storage.realFiles(m.Files, m.ID)
	if err != nil {
		return err
	}
	if err := d.storage.expect(tmps, m.Files); err != nil {
		return err
	}
	for _, tr := range m.Trackers {
		if err := d.storage.free([]string{filepath.Join(d.storage.root, tr.Path)}); err != nil {
			return err
		}
	}
	others, err := t.intents(d)
	if err != nil {
		return err
	}
	for _, other := range others {
		if overlap(other, m) {
			if err := t.rollForward(d, other); err != nil && !errors.Is(err, errAside) {
				return fmt.Errorf("complete save %s, which has the same files: %w", other.ID, err)
			}
		}
	}
	if err := d.steps.notSuperseded(m); err != nil {
		return err
	}
	return d.storage.put(d.storage.intent(m.ID), m) // the directories above it are durable since Plan
}

// future makes the manifest of a save that is to be committed.
func (d directory) future(s Save, es []Entry) (Manifest, error) {
	m := Manifest{Version: version, Save: s}
	m.Dir, m.Trackers = d.storage.root, withLatest(s.Trackers, s.Step)
	es = stable.Sorted(slices.Values(es), func(a, b Entry) int { return a.Shard - b.Shard })
	if len(es) != s.Shards {
		return m, fmt.Errorf("%d shards instead of %d", len(es), s.Shards)
	}
	for i, e := range es {
		if e.Shard != i {
			return m, fmt.Errorf("shard %d is missing", i)
		}
		e, err := d.storage.entry(e)
		if err != nil {
			return m, err
		}
		m.Files = append(m.Files, e.Files...)
	}
	if len(m.Files) == 0 {
		return m, errors.New("no files")
	}
	return m, checkFiles(m.Files, s.Shards)
}

// overlap reports whether two saves have a step or a file in common.
func overlap(a, b Manifest) bool {
	has := paths(a.Files)
	return a.Step == b.Step || slices.ContainsFunc(b.Files, func(f FileEntry) bool { return has[f.Path] })
}

func paths(files []FileEntry) map[string]bool {
	set := make(map[string]bool, len(files))
	for _, f := range files {
		set[f.Path] = true
	}
	return set
}

// Begun reports whether a save has an intent: it can only be completed.
func (t Store) Begun(dir, save string) (bool, error) {
	d, err := t.at(dir)
	if err != nil {
		return false, fmt.Errorf("look for the intent of save %s: %w", save, err)
	}
	return d.stages.begun(save)
}

// Used reports whether a directory exists and has been saved to.
func (t Store) Used(dir string) bool {
	d, err := t.at(dir)
	return err == nil && !d.storage.missing(d.storage.meta())
}

// Gone reports whether the storage is there, and a file of a prepared shard is not, under either of its names.
func (t Store) Gone(s Save, e Entry) bool {
	d, err := t.open(s, e.Shard)
	if err != nil || d.storage.missing(d.storage.meta()) {
		return false
	}
	e, err = d.storage.entry(e)
	if err != nil {
		return false
	}
	finals, tmps, err := d.storage.realFiles(e.Files, s.ID)
	if err != nil {
		return false
	}
	for i := range finals {
		if d.storage.missing(tmps[i]) && d.storage.missing(finals[i]) {
			return true
		}
	}
	return false
}

// Place gives the files of a shard their final names, durably. The intent must have been written.
func (t Store) Place(s Save, e Entry) error {
	d, err := t.open(s, e.Shard)
	if err != nil {
		return fmt.Errorf("place: %w", err)
	}
	e, err = d.storage.entry(e)
	if err == nil {
		err = d.storage.place(e.Files, s.ID)
	}
	if err != nil {
		return fmt.Errorf("place the files of save %s: %w", s.ID, err)
	}
	return nil
}

// Placed records that the files of a shard have their final names. After the commit it does nothing.
func (t Store) Placed(s Save, shard int) error {
	d, err := t.open(s, shard)
	if err != nil {
		return fmt.Errorf("placed: %w", err)
	}
	err = d.storage.fs.WriteFile(d.storage.marker(s.ID, shard, "placed"), nil)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("placed: %w", err)
	}
	return nil
}

// Publish ends the commit when all shards are placed: manifest, trackers, and the markers go. It returns the manifest
// that the step has then: that of a save of the step that has followed, if there is one, such as another job's. The
// trackers stay where they are when they name a save that was made after this one, in the same epoch or a later one.
func (t Store) Publish(s Save, es []Entry) (Manifest, error) {
	d, err := t.open(s, 0)
	if err != nil {
		return Manifest{}, fmt.Errorf("publish: %w", err)
	}
	m, err := d.future(s, es)
	if err != nil {
		return Manifest{}, fmt.Errorf("publish save %s: %w", s.ID, err)
	}
	defer t.turn(d)()
	begun, err := d.stages.begun(s.ID)
	if err != nil {
		return Manifest{}, fmt.Errorf("publish save %s: %w", s.ID, err)
	}
	old, exists := d.steps.committed(s.Step)
	if !begun && exists {
		return old, nil // by Recover, by an earlier call, or by a save of the step that began later
	}
	if !begun {
		return Manifest{}, fmt.Errorf("publish save %s: %w", s.ID, errNoIntent)
	}
	m, err = t.complete(d, m, s.Late)
	if err != nil {
		return Manifest{}, fmt.Errorf("publish save %s: %w", s.ID, err)
	}
	return m, nil
}

// complete finishes a save whose files all have their final names. It does not move the trackers away from later saves.
// A recovered save may have been overtaken by others, in any epoch.
func (t Store) complete(d directory, m Manifest, recovered bool) (Manifest, error) {
	finals, _, err := d.storage.realFiles(m.Files, m.ID)
	if err != nil {
		return m, err
	}
	if err := d.storage.expect(finals, m.Files); err != nil {
		return m, err
	}
	if old, ok := d.steps.committed(m.Step); ok && old.ID != m.ID {
		if err := d.removeOthers(old, m); err != nil {
			return m, err
		}
	}
	moves := true
	m.Committed = t.Now()
	if last, ok := d.steps.trackedSave(); ok {
		moves = !last.Overtakes(m, recovered)
		if moves {
			m.Committed = later(m.Committed, last.Committed)
		} else if m.Committed, err = d.steps.overtaken(m, last); err != nil {
			return m, err
		}
	}
	// Another process may have completed it while we were held up, and begun the next save of the step.
	if begun, err := d.stages.begun(m.ID); !begun {
		last, _ := d.steps.committed(m.Step)
		return last, err
	}
	if err := d.storage.put(d.storage.manifest(m.Step), m); err != nil {
		return m, err
	}
	if moves {
		if err := d.storage.track(m.Trackers); err != nil {
			return m, err
		}
	}
	return m, d.stages.clear(m.ID)
}

// later keeps commit times in order when the clocks of nodes differ.
func later(now, last time.Time) time.Time {
	if now.After(last) {
		return now
	}
	return last.Add(1)
}

// Abort removes the files of a shard of a save that will not be committed. It fails with ErrBegun after the intent.
// Once a shard is prepared, Abort may be called only if it is certain that no intent is being written.
func (t Store) Abort(s Save, shard int) error {
	d, err := t.open(s, shard)
	if err != nil {
		return fmt.Errorf("abandon: %w", err)
	}
	err = d.stages.notBegun(s.ID)
	if err == nil {
		err = d.stages.abort(s.ID, shard)
	}
	if err != nil {
		return fmt.Errorf("abandon shard %d of save %s: %w", shard, s.ID, err)
	}
	return nil
}
