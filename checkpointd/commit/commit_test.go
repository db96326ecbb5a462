package commit

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/checkpointd/fsx"
	"dlrover-run/checkpointd/fsx/crashfs"
)

// diskStore is a store on a real disk; save is a function that names its directory.
func diskStore(t *testing.T) (store Store, root string, save func(nth int, epoch string, step int64) Save) {
	root, err := fsx.OS{}.Resolve(t.TempDir())
	require.NoError(t, err)
	return Store{FS: fsx.OS{}, Now: time.Now}, root, func(nth int, epoch string, step int64) Save {
		s := saveOf(nth, epoch, step, 2)
		s.Dir = root
		return s
	}
}

func steplist(ms []Manifest) (steps []int64) {
	for _, m := range ms {
		steps = append(steps, m.Step)
	}
	return steps
}

func TestFilesOnDisk(t *testing.T) {
	store, root, save := diskStore(t)
	s := save(1, "0", 10)
	s.Retention = &Retention{KeepLatest: 3}
	mustWrite(t, store, s)

	var found []string
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if !d.IsDir() {
			found = append(found, strings.TrimPrefix(path, root+"/"))
		}
		return err
	}))
	require.Equal(t, []string{
		".dlrover/10.json", ".dlrover/lock", "dlrover_latest.txt",
		"global_step10/0_model.pt", "global_step10/0_optim.pt", "global_step10/1_model.pt",
		"global_step10/1_optim.pt", "latest",
	}, found)
	b, err := os.ReadFile(filepath.Join(root, Latest))
	require.NoError(t, err)
	require.Equal(t, "10", string(b))

	ms, err := store.Manifests(root)
	require.NoError(t, err)
	require.Len(t, ms, 1)
	require.WithinDuration(t, time.Now(), ms[0].Committed, time.Minute)
	s.Trackers = append(s.Trackers, Tracker{Path: Latest, Text: "10"})
	require.Equal(t, s, ms[0].Save)
	require.NoError(t, store.Verify(t.Context(), root, ms[0], nil))
}

func TestDirectoryThroughALink(t *testing.T) {
	store, root, save := diskStore(t)
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(root, link))
	s := save(1, "0", 10)
	s.Dir = link
	mustWrite(t, store, s)
	m, skipped, err := store.Newest(t.Context(), link, nil)
	require.NoError(t, err)
	require.Empty(t, skipped)
	require.Equal(t, root, m.Dir)
}

func TestPlantedLinks(t *testing.T) {
	store, root, save := diskStore(t)
	other := t.TempDir()
	target := filepath.Join(other, "target")
	require.NoError(t, os.WriteFile(target, []byte("safe"), 0o600))
	intact := func() {
		b, err := os.ReadFile(target)
		require.NoError(t, err)
		require.Equal(t, "safe", string(b))
		es, err := os.ReadDir(other)
		require.NoError(t, err)
		require.Len(t, es, 1)
	}

	// Links at the very names of files, temporary files and trackers are replaced, not followed.
	s := save(1, "0", 10)
	require.NoError(t, os.Mkdir(filepath.Join(root, "global_step10"), 0o755))
	for _, name := range []string{"latest", Latest, "global_step10/0_model.pt", "global_step10/.1_model.pt.s1.tmp"} {
		require.NoError(t, os.Symlink(target, filepath.Join(root, name)))
	}
	mustWrite(t, store, s)
	intact()

	// A link in place of a directory stops the save.
	require.NoError(t, os.Symlink(other, filepath.Join(root, "global_step20")))
	require.Error(t, write(store, save(2, "0", 20), 0, 1))
	intact()

	// A link in place of a committed file makes the step unusable.
	path := filepath.Join(root, "global_step10", "0_model.pt")
	require.NoError(t, os.Rename(path, filepath.Join(root, "elsewhere")))
	require.NoError(t, os.Symlink(filepath.Join(root, "elsewhere"), path))
	_, skipped, err := store.Newest(t.Context(), root, nil)
	require.ErrorIs(t, err, ErrNone)
	require.Len(t, skipped, 1)

	// The removal of steps stays in the directory.
	mustWrite(t, store, save(3, "0", 30))
	mustWrite(t, store, save(4, "0", 40))
	step30 := filepath.Join(root, "global_step30")
	require.NoError(t, os.RemoveAll(step30))
	require.NoError(t, os.WriteFile(filepath.Join(other, "0_model.pt"), nil, 0o600))
	require.NoError(t, os.Symlink(other, step30))
	require.Error(t, store.Remove(t.Context(), root, 30))
	require.FileExists(t, filepath.Join(other, "0_model.pt"))
}

func TestFullDisk(t *testing.T) {
	store, root, save := diskStore(t)
	if err := unix.Mount("tmpfs", root, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("SKIPPED: what a full disk does to a commit is not tested: cannot mount a small tmpfs: %v", err)
	}
	defer func() { require.NoError(t, unix.Unmount(root, 0)) }()
	mustWrite(t, store, save(1, "0", 10))
	s := save(2, "0", 20)
	tmps, err := store.Plan(s, 0, []string{"global_step20/big.pt"})
	require.NoError(t, err)
	require.ErrorIs(t, store.FS.WriteFrom(t.Context(), tmps[0], make(content, 1<<20)), syscall.ENOSPC)
	require.NoError(t, store.Abort(s, 0))
	m, skipped, err := store.Newest(t.Context(), root, nil)
	require.NoError(t, err)
	require.Empty(t, skipped)
	require.Equal(t, int64(10), m.Step)
	require.NoDirExists(t, filepath.Join(root, "global_step20"))
	mustWrite(t, store, save(3, "0", 30))
}

func TestLeftoversAreRemoved(t *testing.T) {
	store, root, save := diskStore(t)
	mustWrite(t, store, save(1, "0", 10))
	s := save(2, "0", 20)
	require.NoError(t, newJob(store, s, 0).prepare())
	torn := filepath.Join(root, ".latest.w0123456789abcdef.tmp")
	require.NoError(t, os.WriteFile(torn, nil, 0o600))

	r, err := store.Recover(t.Context(), root, nil)
	require.NoError(t, err)
	require.Empty(t, r, "it may be the save of another node")
	late := Store{FS: store.FS, Now: func() time.Time { return time.Now().Add(2 * time.Hour) }}
	r, err = late.Recover(t.Context(), root, func(id string) bool { return id == s.ID })
	require.NoError(t, err)
	require.Empty(t, r)
	require.NoFileExists(t, torn)
	r, err = late.Recover(t.Context(), root, nil)
	require.NoError(t, err)
	require.Equal(t, Recovered{Removed: []string{s.ID}}, r)
	require.NoDirExists(t, filepath.Join(root, "global_step20"))
	require.NoDirExists(t, StageDir(root, s.ID))
}

func TestAbortedSaveIsRemovedAfterTheNextCommit(t *testing.T) {
	_, store := modelStore()
	s := saveOf(1, "0", 10, 2)
	require.NoError(t, newJob(store, s, 0).prepare())
	mustWrite(t, store, saveOf(2, "0", 20, 2))
	r, err := store.Recover(t.Context(), dir, nil)
	require.NoError(t, err)
	require.Equal(t, Recovered{Removed: []string{s.ID}}, r)
}

func TestNoDirectory(t *testing.T) {
	for name, store := range map[string]Store{"disk": {FS: fsx.OS{}, Now: time.Now}, "model": storeOn(crashfs.New())} {
		t.Run(name, func(t *testing.T) {
			none := filepath.Join(t.TempDir(), "none")
			r, err := store.Recover(t.Context(), none, nil)
			require.NoError(t, err)
			require.Empty(t, r)
			ms, err := store.Manifests(none)
			require.NoError(t, err)
			require.Empty(t, ms)
			_, ok := store.Tracked(none)
			require.False(t, ok)
			_, _, err = store.Newest(t.Context(), none, nil)
			require.ErrorIs(t, err, ErrNone)
			removed, err := store.Retain(t.Context(), none)
			require.NoError(t, err)
			require.Empty(t, removed)
			require.ErrorIs(t, store.Remove(t.Context(), none, 10), ErrNone)
			require.NoDirExists(t, none)
		})
	}
}

func TestTracker(t *testing.T) {
	cases := map[string]struct {
		text    string
		tracked bool
		newest  int64
	}{
		"as written":           {"20", true, 20},
		"set back by a person": {"10\n", true, 10},
		"empty":                {"", false, 20},
		"garbage":              {"\x00\x00", false, 20},
		"negative":             {"-1", false, 20},
		"no such step":         {"30", true, 20},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			store, root, save := diskStore(t)
			mustWrite(t, store, save(1, "0", 10))
			mustWrite(t, store, save(2, "0", 20))
			require.NoError(t, os.WriteFile(filepath.Join(root, Latest), []byte(c.text), 0o600))
			_, ok := store.Tracked(root)
			require.Equal(t, c.tracked, ok)
			m, skipped, err := store.Newest(t.Context(), root, nil)
			require.NoError(t, err)
			require.Empty(t, skipped)
			require.Equal(t, c.newest, m.Step)
		})
	}
}

func TestDamage(t *testing.T) {
	flip := func(t *testing.T, path string) {
		b, err := os.ReadFile(path)
		require.NoError(t, err)
		b[3] ^= 1
		require.NoError(t, os.WriteFile(path, b, 0o600))
	}
	cases := map[string]struct {
		do     func(t *testing.T, root string)
		shards []int
		newest int64
		reason string
	}{
		"nothing": {func(*testing.T, string) {}, nil, 20, ""},
		"a flipped bit": {func(t *testing.T, root string) { flip(t, root+"/global_step20/1_model.pt") }, nil, 10,
			"is damaged"},
		"of our shard": {func(t *testing.T, root string) { flip(t, root+"/global_step20/1_model.pt") }, []int{1},
			10, "is damaged"},
		"not of our shard": {func(t *testing.T, root string) { flip(t, root+"/global_step20/1_model.pt") }, []int{0},
			20, ""},
		"no shard is read": {func(t *testing.T, root string) { flip(t, root+"/global_step20/1_model.pt") }, []int{},
			20, ""},
		"short": {func(t *testing.T, root string) {
			require.NoError(t, os.Truncate(root+"/global_step20/1_model.pt", 5))
		}, []int{0}, 10, "5 bytes instead of 64"},
		"missing": {func(t *testing.T, root string) {
			require.NoError(t, os.Remove(root+"/global_step20/1_model.pt"))
		}, []int{0}, 10, "no such file"},
		"manifest is garbage": {func(t *testing.T, root string) {
			require.NoError(t, os.WriteFile(root+"/.dlrover/20.json", nil, 0o600))
		}, nil, 10, "manifest"},
		"manifest of a step": {func(t *testing.T, root string) {
			require.NoError(t, os.Rename(root+"/.dlrover/20.json", root+"/.dlrover/30.json"))
		}, nil, 10, "is of step 20"},
		"manifest that is a dir": {func(t *testing.T, root string) {
			require.NoError(t, os.Mkdir(root+"/.dlrover/30.json", 0o700))
		}, nil, 20, ""},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			store, root, save := diskStore(t)
			mustWrite(t, store, save(1, "0", 10))
			mustWrite(t, store, save(2, "0", 20))
			c.do(t, root)
			m, skipped, err := store.Newest(t.Context(), root, c.shards)
			require.NoError(t, err)
			require.Equal(t, c.newest, m.Step)
			if c.reason == "" {
				require.Empty(t, skipped)
				return
			}
			require.Len(t, skipped, 1)
			require.Contains(t, skipped[0].Reason, c.reason)
		})
	}
}

func TestUnreadableStorageIsNotTakenForEmpty(t *testing.T) {
	model, store := modelStore()
	mustWrite(t, store, saveOf(1, "0", 10, 1))
	s := saveOf(2, "1", 10, 1)
	j := newJob(store, s, 0)
	require.NoError(t, j.prepare())
	require.NoError(t, store.Intent(s, []Entry{j.entry}))
	before := model.Tree()
	model.Fault(func(o crashfs.Op) error {
		if o.Reads() {
			return syscall.EIO
		}
		return nil
	})
	_, err := store.Recover(t.Context(), dir, nil)
	require.ErrorIs(t, err, syscall.EIO)
	_, err = store.Manifests(dir)
	require.ErrorIs(t, err, syscall.EIO)
	require.Equal(t, before, model.Tree())
}

// TestFaults makes each change of a re-save fail once. The next recovery must find one save or the other, whole.
func TestFaults(t *testing.T) {
	first, second := saveOf(1, "0", 10, 2), saveOf(2, "1", 10, 2)
	for n := 0; ; n++ {
		model, store := modelStore()
		mustWrite(t, store, first)
		before := model.Ops()
		model.FailAt(before+n, syscall.EIO)
		err := write(store, second, 0, 1)
		if before+n >= model.Ops() {
			require.NoError(t, err)
			return
		}
		model.Fault(nil)
		r := newRun()
		r.fs, r.store, r.committed = model, store, first
		r.saves = map[string]Save{first.ID: first, second.ID: second}
		r.checkRecovery(t, model.Log()[before+n].String())
	}
}

func TestStepsMayBeRepeated(t *testing.T) {
	_, store := modelStore()
	s := saveOf(1, "0", 10, 1)
	j := newJob(store, s, 0)
	entries := []Entry{j.entry}
	twice := func(f func() error) {
		require.NoError(t, f())
		require.NoError(t, f())
	}
	twice(j.prepare)
	twice(func() error { return store.Intent(s, entries) })
	twice(j.place)
	twice(func() error {
		m, err := store.Publish(s, entries)
		require.Equal(t, s.ID, m.ID)
		return err
	})
	twice(j.place)
	require.NoError(t, store.Intent(s, entries))
	twice(func() error { return store.Abort(s, 0) })
	m, _, err := store.Newest(t.Context(), dir, nil)
	require.NoError(t, err)
	require.Equal(t, s.ID, m.ID)
}

func TestRefusals(t *testing.T) {
	_, store := modelStore()
	s := saveOf(1, "0", 10, 2)
	a, b := newJob(store, s, 0), newJob(store, s, 1)
	require.NoError(t, a.prepare())
	both := []Entry{a.entry, b.entry}

	require.ErrorIs(t, store.Prepared(s, b.entry), fs.ErrNotExist, "the files are not there")
	require.ErrorIs(t, store.Intent(s, both), fs.ErrNotExist, "the files of shard 1 are not there")
	require.ErrorContains(t, store.Intent(s, both[:1]), "1 shards instead of 2")
	require.ErrorContains(t, store.Intent(s, []Entry{a.entry, a.entry}), "shard 1 is missing")
	thief := Entry{Shard: 1, Files: a.entry.Files}
	require.ErrorContains(t, store.Intent(s, []Entry{a.entry, thief}), "written by more than one")
	_, err := store.Publish(s, both)
	require.ErrorIs(t, err, errNoIntent)

	require.NoError(t, b.prepare())
	require.NoError(t, store.Intent(s, both))
	require.ErrorIs(t, store.Abort(s, 1), ErrBegun)
	_, err = store.Plan(s, 1, nil)
	require.ErrorIs(t, err, ErrBegun)
	_, err = store.Publish(s, both)
	require.ErrorIs(t, err, fs.ErrNotExist, "nothing is placed")

	for _, path := range []string{"", ".", "..", "../x", "a/../../x", "a//b", "a/", ".dlrover/x", dir + "/.dlrover/x",
		"/", "a\x00b", "\xff"} {
		_, err := store.Plan(saveOf(2, "0", 20, 1), 0, []string{path})
		require.Error(t, err, path)
	}
	for _, id := range []string{"", "..", "a/b", ".", "a b"} {
		s := saveOf(2, "0", 20, 1)
		s.ID = id
		_, err := store.Plan(s, 0, []string{"x"})
		require.ErrorContains(t, err, "save id")
	}
	bad := saveOf(2, "0", 20, 1)
	bad.Trackers = []Tracker{{Path: "/etc/passwd", Text: "x"}}
	_, err = store.Plan(bad, 0, []string{"x"})
	require.ErrorContains(t, err, "not in the directory")
	_, err = store.Plan(saveOf(2, "0", 20, 1), 1, []string{"x"})
	require.ErrorContains(t, err, "shard 1 of 1")
}

func TestFilesElsewhere(t *testing.T) {
	store, root, save := diskStore(t)
	other := t.TempDir()
	commit := func(s Save, files ...FileEntry) {
		s.Shards = 1
		j := &job{store: store, s: s, entry: Entry{Files: files}}
		require.NoError(t, j.prepare())
		require.NoError(t, store.Intent(s, []Entry{j.entry}))
		require.NoError(t, j.place())
		_, err := store.Publish(s, []Entry{j.entry})
		require.NoError(t, err)
	}
	inside, outside := filepath.Join(root, "sub", "in.pt"), filepath.Join(other, "new", "out.pt")
	commit(save(1, "0", 10), fileOf("s1", inside, 0), fileOf("s1", outside, 0))
	ms, err := store.Manifests(root)
	require.NoError(t, err)
	require.Equal(t, "sub/in.pt", ms[0].Files[0].Path)
	require.Equal(t, outside, ms[0].Files[1].Path)
	require.NoError(t, store.Verify(t.Context(), root, ms[0], nil))

	mustWrite(t, store, save(2, "0", 20))
	require.NoError(t, store.Remove(t.Context(), root, 10))
	require.NoFileExists(t, inside)
	require.FileExists(t, outside)
}

func TestTrackersOfOvertakenSaves(t *testing.T) {
	cases := map[string]struct {
		first, second string // epochs
		want          int64
		order         []int64
	}{
		"same epoch":                           {"0", "0", 20, []int64{20, 10}},
		"after a restart":                      {"0", "1", 10, []int64{10, 20}},
		"of the epoch before":                  {"7.1.1", "7.1.0", 20, []int64{20, 10}},
		"of the round before":                  {"7.10.0", "7.9.3", 20, []int64{20, 10}},
		"of the epoch after, a clock is wrong": {"7.1.0", "7.1.1", 10, []int64{10, 20}},
		"of another history":                   {"8.1.1", "7.1.0", 10, []int64{10, 20}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			_, store := modelStore()
			mustWrite(t, store, saveOf(5, c.first, 20, 1))
			mustWrite(t, store, saveOf(4, c.second, 10, 1)) // made before, committed after
			step, ok := store.Tracked(dir)
			require.True(t, ok)
			require.Equal(t, c.want, step)
			ms, err := store.Manifests(dir)
			require.NoError(t, err)
			require.Equal(t, c.order, steplist(ms), "what the tracker names first, although the clock stands still")
		})
	}
}

// The machine of the earlier epoch has a clock that is ahead.
func TestEpochsCountMoreThanClocks(t *testing.T) {
	_, store := modelStore()
	mustWrite(t, store, saveOf(4, "7.1.1", 20, 1))
	mustWrite(t, store, saveOf(5, "7.1.0", 10, 1))
	step, _ := store.Tracked(dir)
	require.EqualValues(t, 20, step)
	late := saveOf(6, "7.1.0", 20, 1)
	j := newJob(store, late, 0)
	require.NoError(t, j.prepare())
	require.ErrorIs(t, store.Intent(late, []Entry{j.entry}), ErrSuperseded, "the step is that of the later epoch")
}

// A job that begins again with a new rendezvous has another, arbitrary term: its saves replace those of the same steps,
// regardless of the numbers of rounds and epochs.
func TestSavesOfAnotherHistoryAreTaken(t *testing.T) {
	for _, epoch := range []string{"6.1.0", "8.1.0", "0", ""} {
		for nth, step := range map[int]int64{5: 20, 3: 10, 2: 20} { // 3 and 2: with a clock that is behind
			_, store := modelStore()
			mustWrite(t, store, saveOf(4, "7.12.3", 20, 1))
			s := saveOf(nth, epoch, step, 1)
			mustWrite(t, store, s)
			tracked, _ := store.Tracked(dir)
			require.Equal(t, step, tracked, "%q", epoch)
			m, ok := store.Committed(dir, step)
			require.True(t, ok)
			require.Equal(t, s.ID, m.ID, "%q", epoch)
		}
	}
}

func TestOvertakenSaveOfTheSameStep(t *testing.T) {
	_, store := modelStore()
	old := saveOf(1, "0", 10, 1)
	j := newJob(store, old, 0)
	require.NoError(t, j.prepare())
	mustWrite(t, store, saveOf(2, "0", 10, 1))
	require.ErrorIs(t, store.Intent(old, []Entry{j.entry}), ErrSuperseded)
	m, _, err := store.Newest(t.Context(), dir, nil)
	require.NoError(t, err)
	require.Equal(t, "s2", m.ID)
}

func TestRecoveredSaveDoesNotOvertake(t *testing.T) {
	_, store := modelStore()
	s := saveOf(1, "0", 10, 1)
	j := newJob(store, s, 0)
	require.NoError(t, j.prepare())
	require.NoError(t, store.Intent(s, []Entry{j.entry}))
	mustWrite(t, store, saveOf(2, "1", 20, 1))
	r, err := store.Recover(t.Context(), dir, func(id string) bool { return id == s.ID })
	require.NoError(t, err)
	require.Empty(t, r)
	r, err = store.Recover(t.Context(), dir, nil)
	require.NoError(t, err)
	require.Equal(t, Recovered{Forward: []string{"s1"}}, r)
	step, _ := store.Tracked(dir)
	require.Equal(t, int64(20), step)
}

func TestRemove(t *testing.T) {
	model, store := modelStore()
	mustWrite(t, store, saveOf(1, "0", 10, 1))
	require.ErrorIs(t, store.Remove(t.Context(), dir, 10), ErrKept, "the only one")
	model.Put(dir+"/global_step10/notes.txt", "by a person")
	mustWrite(t, store, saveOf(2, "0", 20, 1))
	require.ErrorIs(t, store.Remove(t.Context(), dir, 20), ErrKept, "tracked")
	model.Put(dir+"/latest", "global_step10\n")
	require.ErrorIs(t, store.Remove(t.Context(), dir, 10), ErrKept, "named by the tracker of a framework")
	model.Put(dir+"/latest", "global_step20")

	again := saveOf(3, "1", 10, 1)
	j := newJob(store, again, 0)
	require.NoError(t, j.prepare())
	require.NoError(t, store.Intent(again, []Entry{j.entry}))
	require.ErrorIs(t, store.Remove(t.Context(), dir, 10), ErrKept, "being saved again")
	_, err := store.Recover(t.Context(), dir, nil)
	require.NoError(t, err)

	require.ErrorIs(t, store.Remove(t.Context(), dir, 10), ErrKept, "tracked now")
	require.NoError(t, store.Remove(t.Context(), dir, 20))
	tree := model.Tree()
	require.NotContains(t, tree, dir+"/global_step20/")
	require.Contains(t, tree, dir+"/global_step10/notes.txt")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	mustWrite(t, store, saveOf(4, "1", 30, 1))
	require.ErrorIs(t, store.Remove(ctx, dir, 10), context.Canceled)
}

func TestRetain(t *testing.T) {
	cases := map[string]struct {
		keep    *Retention
		damage  string
		removed []int64
		err     string
	}{
		"no policy":                {nil, "", nil, ""},
		"keep one":                 {&Retention{KeepLatest: 1}, "", []int64{1, 2, 3}, ""},
		"keep three":               {&Retention{KeepLatest: 3}, "", []int64{1}, ""},
		"keep more than there are": {&Retention{KeepLatest: 9}, "", nil, ""},
		"keep the even":            {&Retention{KeepInterval: 2}, "", []int64{1, 3}, ""},
		"the last one is damaged":  {&Retention{KeepLatest: 1}, "/global_step4/0_model.pt", nil, "is damaged"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			model, store := modelStore()
			for step := range int64(4) {
				s := saveOf(int(step)+1, "0", step+1, 1)
				s.Retention = c.keep
				mustWrite(t, store, s)
			}
			if c.damage != "" {
				model.Put(dir+c.damage, strings.Repeat("x", 64))
			}
			removed, err := store.Retain(t.Context(), dir)
			require.Equal(t, c.removed, removed)
			if c.err != "" {
				require.ErrorContains(t, err, c.err)
				return
			}
			require.NoError(t, err)
			ms, err := store.Manifests(dir)
			require.NoError(t, err)
			require.Len(t, ms, 4-len(removed))
		})
	}
}

func TestKeepSteps(t *testing.T) {
	upTo := func(n int) (ms []Manifest) {
		for i := range n {
			ms = append(ms, Manifest{Save: Save{Step: int64(i + 1)}, Committed: time.Unix(int64(i), 0)})
		}
		return ms
	}
	cases := map[string]struct {
		ms      []Manifest
		r       Retention
		tracked int64
		want    []int64
	}{
		"nothing":                   {nil, Retention{KeepLatest: 1}, 0, nil},
		"no policy":                 {upTo(4), Retention{}, 4, nil},
		"negative":                  {upTo(4), Retention{KeepLatest: -1, KeepInterval: -1}, 4, nil},
		"latest":                    {upTo(4), Retention{KeepLatest: 3}, 4, []int64{1}},
		"interval":                  {upTo(8), Retention{KeepInterval: 4}, 8, []int64{1, 2, 3, 5, 6, 7}},
		"interval keeps the newest": {upTo(6), Retention{KeepInterval: 4}, 6, []int64{1, 2, 3, 5}},
		"what either keeps":         {upTo(6), Retention{KeepLatest: 2, KeepInterval: 4}, 6, []int64{1, 2, 3}},
		"tracked":                   {upTo(4), Retention{KeepLatest: 1}, 2, []int64{1, 3}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, c.want, stepsToRemove(c.ms, c.r, c.tracked))
		})
	}
}
