package commit

import (
	"bytes"
	"context"
	"fmt"
	"hash/crc32"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/checkpointd/fsx"
	"dlrover-run/checkpointd/fsx/crashfs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const dir = "/data/run"

// content is a Source that is ready.
type content []byte

func (c content) Len() int64                         { return int64(len(c)) }
func (c content) Bytes() []byte                      { return c }
func (c content) Ready(context.Context, int64) error { return nil }

// bytesOf is the content of save id at path: all files have the same size, so that only their content differs.
func bytesOf(id, path string) content {
	return bytes.Repeat([]byte(id+":"+path+"|"), 100)[:64]
}

// saveOf returns the save that was the nth to be made.
func saveOf(nth int, epoch string, step int64, shards int) Save {
	return Save{
		ID: fmt.Sprintf("s%d", nth), Epoch: epoch, Dir: dir, Framework: "fsdp", Layout: "00ff", Step: step, Shards: shards,
		WorldSize: shards, Saved: time.Date(2026, 1, 1, 0, nth, 0, 0, time.UTC),
		Trackers: []Tracker{{Path: "latest", Text: stepDir(step)}},
	}
}

func stepDir(step int64) string { return "global_step" + itoa(step) }

// job writes the files of one shard of one save.
type job struct {
	store Store
	s     Save
	entry Entry
}

func newJob(t Store, s Save, shard int) *job {
	j := &job{store: t, s: s, entry: Entry{Shard: shard}}
	for _, name := range []string{"model.pt", "optim.pt"} {
		path := stepDir(s.Step) + "/" + itoa(int64(shard)) + "_" + name
		j.entry.Files = append(j.entry.Files, fileOf(s.ID, path, shard))
	}
	return j
}

// prepare is the part before the intent.
func (j *job) prepare() error {
	var paths []string
	for _, f := range j.entry.Files {
		paths = append(paths, f.Path)
	}
	tmps, err := j.store.Plan(j.s, j.entry.Shard, paths)
	if err != nil {
		return err
	}
	for i, f := range j.entry.Files {
		if err := j.store.FS.WriteFrom(context.Background(), tmps[i], bytesOf(j.s.ID, f.Path)); err != nil {
			return err
		}
	}
	return j.store.Prepared(j.s, j.entry)
}

func (j *job) place() error {
	if err := j.store.Place(j.s, j.entry); err != nil {
		return err
	}
	return j.store.Placed(j.s, j.entry.Shard)
}

// write commits a save, with its shards in the given order.
func write(t Store, s Save, order ...int) error {
	var entries []Entry
	jobs := make([]*job, s.Shards)
	for i := range jobs {
		jobs[i] = newJob(t, s, i)
		entries = append(entries, jobs[i].entry)
	}
	for _, i := range order {
		if err := jobs[i].prepare(); err != nil {
			return err
		}
	}
	if err := t.Intent(s, entries); err != nil {
		return err
	}
	for _, i := range order {
		if err := jobs[i].place(); err != nil {
			return err
		}
	}
	_, err := t.Publish(s, entries)
	return err
}

// mustWrite commits a save of all its shards.
func mustWrite(t *testing.T, store Store, s Save) {
	t.Helper()
	order := make([]int, s.Shards)
	for i := range order {
		order[i] = i
	}
	require.NoError(t, write(store, s, order...))
}

func modelStore() (*crashfs.FS, Store) {
	fs := crashfs.New()
	return fs, storeOn(fs)
}

// storeOn has a clock that hardly moves, so that two recoveries of the same write the same.
func storeOn(fs *crashfs.FS) Store {
	aside := func(path string, why error) { panic(path + " is set aside: " + why.Error()) } // a crash damages nothing
	now := func() time.Time { return fs.Now().Truncate(time.Hour) }
	return Store{FS: fs, Now: now, Cache: new(Cache), OnDamaged: aside, patience: time.Millisecond}
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

var _ fsx.Source = content(nil)

func fileOf(id, path string, shard int) FileEntry {
	b := bytesOf(id, path)
	return FileEntry{Path: path, Size: b.Len(), CRC: crc32.ChecksumIEEE(b), Shard: shard}
}
