package commit

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/fsx"
	"dlrover-run/checkpointd/fsx/crashfs"
)

// coarse stamps files to two seconds, as some file systems do.
type coarse struct{ fsx.FS }

func (c coarse) List(dir string) ([]fsx.Entry, error) {
	es, err := c.FS.List(dir)
	for i := range es {
		es[i].ModTime = es[i].ModTime.Truncate(2 * time.Second)
	}
	return es, err
}

// commitFiles commits a save of one shard that has the given files.
func commitFiles(t *testing.T, store Store, s Save, paths ...string) {
	t.Helper()
	j := newJob(store, s, 0)
	j.entry.Files = nil
	for _, path := range paths {
		j.entry.Files = append(j.entry.Files, fileOf(s.ID, path, 0))
	}
	entries := []Entry{j.entry}
	require.NoError(t, steps(j.prepare(), store.Intent(s, entries), j.place()))
	_, err := store.Publish(s, entries)
	require.NoError(t, err)
}

// TestReplacedManifestIsReadAgain: another process saves a step again that the cache may know.
func TestReplacedManifestIsReadAgain(t *testing.T) {
	for name, pause := range map[string]time.Duration{"a minute later": time.Minute, "with the same stamp": 0} {
		t.Run(name, func(t *testing.T) {
			model := crashfs.New()
			other := Store{FS: coarse{model}, Now: model.Now}
			store := other
			store.Cache = new(Cache)
			commitFiles(t, store, saveOf(1, "0", 10, 1), "a.pt")
			model.Advance(pause)
			commitFiles(t, store, saveOf(2, "0", 15, 1), "b.pt")
			_, err := store.Retain(t.Context(), dir)
			require.NoError(t, err)
			again := saveOf(3, "1", 10, 1)
			commitFiles(t, other, again, "a.pt", "b.pt")
			model.Advance(time.Minute)
			last := saveOf(4, "1", 20, 1)
			last.Retention = &Retention{KeepInterval: 10}
			commitFiles(t, other, last, "c.pt")

			removed, err := store.Retain(t.Context(), dir)
			require.NoError(t, err)
			require.Equal(t, []int64{15}, removed)
			m, ok := store.Committed(dir, 10)
			require.True(t, ok)
			require.Equal(t, again.ID, m.ID)
			require.NoError(t, store.Verify(t.Context(), dir, m, nil))
		})
	}
}

// grown is a directory with a minute between commits, and with all manifests in a cache.
func grown(t *testing.T, keep int, until int64) (*crashfs.FS, Store) {
	model, store := modelStore()
	for step := int64(10); step <= until; step += 10 {
		s := saveOf(int(step), "0", step, 1)
		s.Retention = &Retention{KeepLatest: keep}
		mustWrite(t, store, s)
		model.Advance(time.Minute)
		if step < until {
			_, err := store.Retain(t.Context(), dir)
			require.NoError(t, err)
		}
	}
	return model, store
}

func TestRetainDoesNotReadRemainingSteps(t *testing.T) {
	model, store := grown(t, 4, 60)
	read := map[string]bool{}
	model.Fault(func(o crashfs.Op) error {
		read[o.Path] = read[o.Path] || o.Kind == "read"
		return nil
	})
	removed, err := store.Retain(t.Context(), dir)
	require.NoError(t, err)
	require.Equal(t, []int64{20}, removed)
	manifest := layout{dir}.manifest
	require.True(t, read[manifest(60)], "it is new")
	require.True(t, read[manifest(20)], "it goes")
	require.False(t, read[manifest(30)])
	require.False(t, read[manifest(40)])
}

func TestManifestDamagedAfterItWasKnown(t *testing.T) {
	model, store := grown(t, 3, 40)
	model.Put(layout{dir}.manifest(20), "{}")
	removed, err := store.Retain(t.Context(), dir)
	require.NoError(t, err)
	require.Empty(t, removed, "three are left")
}

// TestManifestLostWhileRetaining checks that remaining steps are read again, not taken from the cache, before any is
// removed.
func TestManifestLostWhileRetaining(t *testing.T) {
	for name, c := range map[string]struct {
		lost int64
		err  string
	}{
		"what stays": {30, "old checkpoints stay"},
		"what goes":  {20, ""},
	} {
		t.Run(name, func(t *testing.T) {
			model, store := grown(t, 1, 30)
			reads := 0
			model.Fault(func(o crashfs.Op) error {
				if o.Kind == "read" && o.Path == (layout{dir}).manifest(c.lost) {
					if reads++; reads > 1 {
						return fs.ErrNotExist
					}
				}
				return nil
			})
			removed, err := store.Retain(t.Context(), dir)
			if c.err != "" {
				require.ErrorContains(t, err, c.err)
			} else {
				require.NoError(t, err)
			}
			require.Greater(t, reads, 1)
			require.Empty(t, removed)
		})
	}
}

func TestCacheIsBounded(t *testing.T) {
	entry := func(name string) fsx.Entry { return fsx.Entry{Name: name} }
	big := &brief{sums: make([]uint64, cacheLimit/8*2/3)}
	var c Cache
	c.remember("/a", memory{entry("1"): big})
	require.Len(t, c.known("/a"), 1)
	c.remember("/b", memory{entry("1"): {}})
	require.Len(t, c.known("/a"), 1, "there is room for both")
	c.remember("/b", memory{entry("1"): big, entry("2"): big})
	require.Len(t, c.known("/b"), 1, "there is room for one")
	require.Empty(t, c.known("/a"))
	c.remember("/b", memory{})
	require.Empty(t, c.dirs)
}

// TestSharedCache is for the race detector.
func TestSharedCache(t *testing.T) {
	_, store := grown(t, 9, 40)
	errs := make(chan error)
	for range 4 {
		go func() {
			_, err := store.Retain(t.Context(), dir)
			errs <- err
		}()
	}
	for range 4 {
		require.NoError(t, <-errs)
	}
}

// history is a directory with many committed steps, a minute apart. Only the steps that are looked at have files.
type history struct {
	b           *testing.B
	root        string
	steps, each int
}

func (h history) files(step int64) (files []FileEntry) {
	for i := range h.each {
		files = append(files, FileEntry{Path: fmt.Sprintf("checkpoint-%d/rank_%d.pt", step, i), Size: 1})
	}
	return files
}

// commit writes the files of a commit; with files, those too.
func (h history) commit(step int64) {
	at := time.Unix(1e9, 0).Add(time.Duration(step) * time.Minute)
	m := Manifest{Version: version, Committed: at, Files: h.files(step), Save: Save{
		ID: fmt.Sprint("s", step), Step: step, Shards: 1, WorldSize: 1, Saved: at, Retention: &Retention{KeepLatest: h.steps},
		Trackers: []Tracker{{Path: Latest, Text: fmt.Sprint(step)}},
	}}
	text, err := json.Marshal(m)
	require.NoError(h.b, err)
	name := filepath.Join(h.root, metaDir, fmt.Sprint(step)+".json")
	require.NoError(h.b, os.WriteFile(name, text, 0o600))
	require.NoError(h.b, os.Chtimes(name, at, at))
	require.NoError(h.b, os.WriteFile(filepath.Join(h.root, Latest), []byte(fmt.Sprint(step)), 0o600))
}

func (h history) fill(step int64) {
	require.NoError(h.b, os.MkdirAll(filepath.Join(h.root, fmt.Sprint("checkpoint-", step)), 0o700))
	for _, f := range h.files(step) {
		require.NoError(h.b, os.WriteFile(filepath.Join(h.root, f.Path), []byte{1}, 0o600))
	}
}

// BenchmarkRetain measures a commit that keeps a thousand steps and removes one.
func BenchmarkRetain(b *testing.B) {
	for _, each := range []int{1, 64, 512} {
		b.Run(fmt.Sprintf("1000 steps of %d files", each), func(b *testing.B) {
			root, err := fsx.OS{}.Resolve(b.TempDir())
			require.NoError(b, err)
			h, store := history{b, root, 1000, each}, Store{FS: fsx.OS{}, Now: time.Now, Cache: new(Cache)}
			require.NoError(b, os.Mkdir(filepath.Join(root, metaDir), 0o700))
			for step := range int64(h.steps) {
				h.commit(step)
			}
			h.fill(int64(h.steps) - 1)
			_, err = store.Retain(b.Context(), root)
			require.NoError(b, err)
			next := int64(h.steps)
			for b.Loop() {
				b.StopTimer()
				h.fill(next - int64(h.steps))
				h.fill(next)
				h.commit(next)
				b.StartTimer()
				removed, err := store.Retain(b.Context(), root)
				b.StopTimer()
				require.NoError(b, err)
				require.Equal(b, []int64{next - int64(h.steps)}, removed)
				next++
				b.StartTimer()
			}
		})
	}
}
