package commit

import (
	"path/filepath"
	"strconv"
)

// layout has the paths of our own files in a checkpoint directory.
type layout struct{ root string } // without links

func (l layout) meta() string           { return filepath.Join(l.root, metaDir) }
func (l layout) stages() string         { return filepath.Join(l.meta(), "stage") }
func (l layout) stage(id string) string { return StageDir(l.root, id) }
func (l layout) intent(id string) string {
	return filepath.Join(l.stage(id), "intent")
}

// marker is a file by which the writer of a shard marks a phase: "plan", "prepared" or "placed".
func (l layout) marker(id string, shard int, phase string) string {
	return filepath.Join(l.stage(id), "shard-"+strconv.Itoa(shard)+"."+phase)
}

// lock is the file whose lock is that of the beginning and of the end of each commit.
func (l layout) lock() string { return filepath.Join(l.meta(), "lock") }

// manifest is where the manifest of a step is; gone is where it is while the files of the step are being removed.
func (l layout) manifest(step int64) string { return l.numbered(step, ".json") }
func (l layout) gone(step int64) string     { return l.numbered(step, ".gone") }
func (l layout) numbered(step int64, ext string) string {
	return filepath.Join(l.meta(), strconv.FormatInt(step, 10)+ext)
}
