package commit

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/fsx/crashfs"
	"dlrover-run/internal/testkit"
)

var choices = []crashfs.Choice{crashfs.Process, crashfs.Lost, crashfs.Kept, crashfs.Torn, 1, 2, 3}

// nested are those after which the recovery is cut too, and the ways to cut it.
var nested = []crashfs.Choice{crashfs.Process, crashfs.Lost, 1}

// run is one run of a scenario, and its promises so far.
type run struct {
	fs        *crashfs.FS
	store     Store
	saves     map[string]Save
	committed Save // the last save whose Publish has returned
	only      bool // only the tracked step must be intact: steps share files
	seen      map[seen]bool
}

// seen are the results that were checked already.
type seen struct {
	state     uint64
	committed string
	recovery  bool
}

// sample is the share of states that are checked under the race detector: one of so many. Each check takes six times as
// long there, and only one goroutine runs. make race checks all states without it.
const sample = 8

// news reports whether this state is a new one, and to be checked.
func (r *run) news(recovery bool) bool {
	s := seen{r.fs.Fingerprint(), r.committed.ID, recovery}
	was := r.seen[s]
	r.seen[s] = true
	return !was && (!testkit.Race || len(r.seen)%sample == 0)
}

// commit writes a save, and checks that it is the one to load.
func (r *run) commit(s Save, order ...int) error {
	r.saves[s.ID] = s
	if err := write(r.store, s, order...); err != nil {
		return err
	}
	r.committed = s
	return nil
}

func (r *run) retain() error {
	_, err := r.store.Retain(context.Background(), dir)
	return err
}

// on returns the same promises for another file system.
func (r *run) on(fs *crashfs.FS) *run {
	c := *r
	c.fs, c.store = fs, storeOn(fs)
	return &c
}

// scenarios are the histories that are cut at every operation.
var scenarios = map[string]func(*run) error{
	"two writers, shard 0 first": func(r *run) error {
		return steps(
			r.commit(saveOf(1, "0", 10, 2), 0, 1),
			r.commit(saveOf(2, "0", 20, 2), 0, 1))
	},
	"two writers, shard 1 first": func(r *run) error {
		return steps(
			r.commit(saveOf(1, "0", 10, 2), 1, 0),
			r.commit(saveOf(2, "0", 20, 2), 1, 0))
	},
	"a step saved again after a rollback": func(r *run) error {
		return steps(
			r.commit(saveOf(1, "0", 10, 2), 0, 1),
			r.commit(saveOf(2, "0", 20, 2), 0, 1),
			r.commit(saveOf(3, "1", 20, 2), 1, 0))
	},
	"an older step saved again": func(r *run) error {
		return steps(
			r.commit(saveOf(1, "0", 10, 1), 0),
			r.commit(saveOf(2, "0", 20, 1), 0),
			r.commit(saveOf(3, "1", 10, 1), 0))
	},
	"a step saved again by fewer shards": func(r *run) error {
		return steps(
			r.commit(saveOf(1, "0", 10, 2), 0, 1),
			r.commit(saveOf(2, "1", 10, 1), 0))
	},
	"keep_latest=1": func(r *run) error {
		return retained(r, Retention{KeepLatest: 1})
	},
	"keep_interval=20": func(r *run) error {
		return retained(r, Retention{KeepInterval: 20})
	},
	"the same file names in each step": func(r *run) error {
		r.only = true
		for i, step := range []int64{10, 20} {
			s := saveOf(i+1, "0", step, 1)
			s.Retention = &Retention{KeepLatest: 1}
			if err := shared(r, s); err != nil {
				return err
			}
		}
		return r.retain()
	},
	"abandoned": func(r *run) error {
		if err := r.commit(saveOf(1, "0", 10, 2), 0, 1); err != nil {
			return err
		}
		s := saveOf(2, "0", 20, 2)
		r.saves[s.ID] = s
		if err := steps(newJob(r.store, s, 0).prepare(), newJob(r.store, s, 1).prepare()); err != nil {
			return err
		}
		return steps(r.store.Abort(s, 1), r.store.Abort(s, 0), r.commit(saveOf(3, "0", 30, 2), 0, 1))
	},
	"two saves of a step at the same time": func(r *run) error {
		first, second := saveOf(1, "0", 10, 1), saveOf(2, "1", 10, 1)
		r.saves[first.ID], r.saves[second.ID] = first, second
		a, b := newJob(r.store, first, 0), newJob(r.store, second, 0)
		if err := steps(a.prepare(), b.prepare(), r.store.Intent(first, []Entry{a.entry})); err != nil {
			return err
		}
		if err := r.store.Intent(second, []Entry{b.entry}); err != nil { // completes the first
			return err
		}
		r.committed = first
		if err := steps(a.place(), b.place()); err != nil {
			return err
		}
		if _, err := r.store.Publish(first, []Entry{a.entry}); err != nil {
			return err
		}
		if _, err := r.store.Publish(second, []Entry{b.entry}); err != nil {
			return err
		}
		r.committed = second
		return nil
	},
}

// steps returns the first error. Its arguments have been evaluated in order: those after an error see the same crash.
func steps(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func retained(r *run, keep Retention) error {
	for i, step := range []int64{10, 20, 30} {
		s := saveOf(i+1, "0", step, 1)
		s.Retention = &keep
		if err := steps(r.commit(s, 0), r.retain()); err != nil {
			return err
		}
		r.fs.Advance(time.Minute) // the cache trusts old stamps
	}
	return nil
}

// shared commits a save of one file that has the same name at each step.
func shared(r *run, s Save) error {
	r.saves[s.ID] = s
	j := newJob(r.store, s, 0)
	j.entry.Files = []FileEntry{fileOf(s.ID, "last.pt", 0)}
	entries := []Entry{j.entry}
	if err := j.prepare(); err != nil {
		return err
	}
	if err := steps(r.store.Intent(s, entries), j.place()); err != nil {
		return err
	}
	if _, err := r.store.Publish(s, entries); err != nil {
		return err
	}
	r.committed = s
	return nil
}

// TestCrash cuts every scenario at every operation, with several losses of unsynced changes, and checks the state
// before and after the recovery. Recoveries that change something are cut in the same way.
func TestCrash(t *testing.T) {
	for name, script := range scenarios {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cuts := 0
			r := newRun()
			r.cut(func(at crashfs.Op, c crashfs.Choice, found *run) {
				cuts++
				if !found.news(false) {
					return
				}
				where := fmt.Sprintf("crash (%v) before %v", c, at)
				found.checkBefore(t, where)
				if slices.Contains(nested, c) {
					cuts += found.cutRecovery(t, where)
				}
				found.checkRecovery(t, where)
				found.checkLater(t, where)
			}, choices...)
			require.NoError(t, script(r))
			r.fs.Fault(nil)
			r.checkRecovery(t, "at the end")
			r.checkLater(t, "at the end")
			require.Equal(t, r.committed.ID, r.trackedSave(t, "at the end").ID)
			t.Logf("%d operations, %d crashes, %d different states", r.fs.Ops(), cuts, len(r.seen))
		})
	}
}

// TestCrashThenGoOn cuts the work after a recovery: the process died, nothing was lost, its successor saves the same
// step again, and then the power fails. Only now may unsynced changes of the first process appear.
func TestCrashThenGoOn(t *testing.T) {
	firsts := map[string]func(*run) error{
		"in a new directory": func(*run) error { return nil },
		"after a save":       func(r *run) error { return r.commit(saveOf(1, "0", 10, 1), 0) },
	}
	for name, first := range firsts {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cuts := 0
			r := newRun()
			require.NoError(t, first(r))
			r.cut(func(at crashfs.Op, _ crashfs.Choice, found *run) {
				_, err := found.store.Recover(context.Background(), dir, nil)
				require.NoError(t, err)
				found.cut(func(then crashfs.Op, c crashfs.Choice, left *run) {
					cuts++
					if !left.news(false) {
						return
					}
					where := fmt.Sprintf("crash before %v, then (%v) before %v", at, c, then)
					left.checkRecovery(t, where)
					left.checkLater(t, where)
				}, crashfs.Lost, 1)
				require.NoError(t, found.commit(saveOf(3, "1", 20, 1), 0))
			}, crashfs.Process)
			require.NoError(t, r.commit(saveOf(2, "0", 20, 2), 0, 1))
			t.Logf("%d crashes, %d different states", cuts, len(r.seen))
		})
	}
}

func newRun() *run {
	fs, store := modelStore()
	return &run{fs: fs, store: store, saves: map[string]Save{}, seen: map[seen]bool{}}
}

// cut calls visit before each change of r from now on, for each of the choices, with the state after a crash there.
func (r *run) cut(visit func(crashfs.Op, crashfs.Choice, *run), choices ...crashfs.Choice) {
	r.fs.Fault(func(at crashfs.Op) error {
		if !at.Reads() {
			for _, c := range choices {
				visit(at, c, r.on(r.fs.Crash(c)))
			}
		}
		return nil
	})
}

// checkBefore checks the view of a reader that does not recover first. The tracker names a step with a manifest, and
// until an intent is written that is the last committed save, complete.
func (r *run) checkBefore(t *testing.T, where string) {
	d, err := r.store.at(dir)
	require.NoError(t, err, where)
	if step, ok := d.steps.tracked(); ok {
		_, ok := d.steps.committed(step)
		require.True(t, ok, where)
	}
	intents, damaged, err := d.stages.intents()
	require.NoError(t, err, where)
	require.Empty(t, damaged, where)
	if r.committed.ID == "" || len(intents) > 0 {
		return
	}
	m, skipped, err := r.store.Newest(context.Background(), dir, nil)
	require.NoError(t, err, where)
	require.Empty(t, skipped, where)
	r.checkSave(t, m, where)
	require.False(t, m.Saved.Before(r.committed.Saved), where)
}

// cutRecovery crashes a recovery at each of its operations and lets the next one end it.
func (r *run) cutRecovery(t *testing.T, where string) (cuts int) {
	first := r.on(r.fs.Crash(crashfs.Process))
	first.cut(func(at crashfs.Op, c crashfs.Choice, found *run) {
		cuts++
		if !found.news(true) {
			return
		}
		where := fmt.Sprintf("%s; recovery crashed (%v) before %v", where, c, at)
		found.checkRecovery(t, where)
		if cuts%8 == 0 { // a sample is enough
			found.checkLater(t, where)
		}
	}, nested...)
	_, err := first.store.Recover(context.Background(), dir, nil)
	require.NoError(t, err, where)
	return cuts
}

// checkRecovery recovers, and checks everything that must hold then.
func (r *run) checkRecovery(t *testing.T, where string) {
	ctx := context.Background()
	_, err := r.store.Recover(ctx, dir, nil)
	require.NoError(t, err, where)
	before := r.fs.Tree()
	again, err := r.store.Recover(ctx, dir, nil)
	require.NoError(t, err, where)
	require.Empty(t, append(again.Forward, again.Removed...), where)
	require.Equal(t, before, r.fs.Tree(), where)

	if r.committed.ID != "" {
		m := r.trackedSave(t, where)
		require.False(t, m.Saved.Before(r.committed.Saved), "%s: went back to %s from %s", where, m.ID, r.committed.ID)
	}
	ms, err := r.store.Manifests(dir)
	require.NoError(t, err, where)
	for _, m := range ms {
		if !r.only {
			r.checkSave(t, m, where)
		}
	}
	r.checkTrackers(t, ms, where)
}

// checkLater checks that a recovery some hours later leaves no unknown file.
func (r *run) checkLater(t *testing.T, where string) {
	ctx := context.Background()
	r.fs.Advance(2 * orphanAge)
	_, err := r.store.Recover(ctx, dir, nil)
	require.NoError(t, err, where)
	ms, err := r.store.Manifests(dir)
	require.NoError(t, err, where)
	r.checkNothingLeft(t, ms, where)
}

// trackedSave returns the save that dlrover_latest.txt names, after checking it.
func (r *run) trackedSave(t *testing.T, where string) Manifest {
	step, ok := r.store.Tracked(dir)
	require.True(t, ok, where)
	m, skipped, err := r.store.Newest(context.Background(), dir, nil)
	require.NoError(t, err, where)
	require.Empty(t, skipped, where)
	require.Equal(t, step, m.Step, where)
	r.checkSave(t, m, where)
	return m
}

// checkSave checks that a manifest is that of a save as it was made, and that the files are of this save alone.
func (r *run) checkSave(t *testing.T, m Manifest, where string) {
	s, ok := r.saves[m.ID]
	require.True(t, ok, where)
	require.Equal(t, s.Step, m.Step, where)
	require.NoError(t, r.store.Verify(context.Background(), dir, m, nil), where)
	tree := r.fs.Tree()
	for _, f := range m.Files {
		require.Equal(t, string(bytesOf(m.ID, f.Path)), tree[filepath.Join(dir, f.Path)], where)
	}
}

// checkTrackers checks that each tracker names a committed step, and all the same.
func (r *run) checkTrackers(t *testing.T, ms []Manifest, where string) {
	tree := r.fs.Tree()
	text, exists := tree[dir+"/latest"]
	step, tracked := r.store.Tracked(dir)
	require.Equal(t, tracked, exists, where)
	if tracked {
		require.Equal(t, stepDir(step), text, where)
		require.True(t, slices.ContainsFunc(ms, func(m Manifest) bool { return m.Step == step }), where)
	}
}

// checkNothingLeft checks that there is no unknown file.
func (r *run) checkNothingLeft(t *testing.T, ms []Manifest, where string) {
	known := map[string]bool{dir + "/latest": true, dir + "/" + Latest: true}
	for _, m := range ms {
		known[filepath.Join(dir, metaDir, itoa(m.Step)+".json")] = true
		for _, f := range m.Files {
			known[filepath.Join(dir, f.Path)] = true
		}
	}
	for path := range r.fs.Tree() {
		require.True(t, known[path] || strings.HasSuffix(path, "/"), "%s: %s is left", where, path)
	}
}

// TestHeldUpRecovery: while a recovery is held up, others complete the save and the next one of the step.
func TestHeldUpRecovery(t *testing.T) {
	fs, store := modelStore()
	s := saveOf(1, "0", 10, 1)
	j := newJob(store, s, 0)
	require.NoError(t, steps(j.prepare(), store.Intent(s, []Entry{j.entry})))
	r := newRun()
	r.fs, r.store, r.saves[s.ID] = fs, store, s
	fs.Fault(func(o crashfs.Op) error {
		if o.Kind == "size" && strings.HasSuffix(o.Path, "/intent") {
			fs.Fault(nil)
			_, err := store.Recover(context.Background(), dir, nil)
			require.NoError(t, err)
			require.NoError(t, r.commit(saveOf(2, "1", 10, 1), 0))
		}
		return nil
	})
	r.checkRecovery(t, "held up")
	require.Equal(t, "s2", r.trackedSave(t, "held up").ID)
}

func TestConcurrentRecovery(t *testing.T) {
	fs, store := modelStore()
	mustWrite(t, store, saveOf(1, "0", 10, 2))
	s := saveOf(2, "0", 20, 2)
	jobs := []*job{newJob(store, s, 0), newJob(store, s, 1)}
	entries := []Entry{jobs[0].entry, jobs[1].entry}
	require.NoError(t, steps(jobs[0].prepare(), jobs[1].prepare(), store.Intent(s, entries)))
	errs := make(chan error)
	for range 4 {
		go func() {
			_, err := store.Recover(context.Background(), dir, nil)
			errs <- err
		}()
	}
	for _, j := range jobs {
		go func() { errs <- j.place() }()
	}
	for range 6 {
		require.NoError(t, <-errs)
	}
	_, err := store.Publish(s, entries)
	require.NoError(t, err)
	r := &run{fs: fs, store: store, committed: s, saves: map[string]Save{"s1": saveOf(1, "0", 10, 2), "s2": s}}
	r.checkRecovery(t, "after all")
}
