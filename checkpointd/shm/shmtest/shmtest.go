// Package shmtest makes segments for tests, as a worker would.
package shmtest

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/shm"
)

const page = 4096

// Save is the content of a segment, for Bytes.
type Save struct {
	Meta   shm.Meta // without Files
	Files  []File
	Fixups []Fixup
	Seq    uint64
	Disk   bool
	Saved  time.Time
}

// File is one file of a save.
type File struct {
	Path, Kind string
	Data       []byte
}

// Fixup is a row of the fix-up table, relative to a file.
type Fixup struct {
	File                    int
	Off, Len, First, Second int64
}

// Meta is a valid description of one shard of one, without files.
func Meta(dir string, step int64) shm.Meta {
	return shm.Meta{
		Run: "run", Epoch: "0", Save: fmt.Sprintf("%016x", step), Step: step, WorldSize: 1, LocalWorldSize: 1, Shards: 1,
		Primary: true, Dir: dir, Framework: "ddp", Layout: "00", Resize: "any", TimeoutS: 600, Torch: "2.0",
	}
}

// Bytes is the content of a segment that holds the save, complete.
func (s Save) Bytes(t testing.TB) []byte {
	t.Helper()
	var image []byte
	m := s.Meta
	m.Files = nil
	for _, f := range s.Files {
		m.Files = append(m.Files, shm.File{Path: f.Path, Off: int64(len(image)), Len: int64(len(f.Data)), Kind: f.Kind})
		image = padded(append(image, f.Data...), page)
	}
	meta, err := json.Marshal(m)
	require.NoError(t, err)
	h := shm.Header{
		State: shm.Complete, Seq: max(s.Seq, 1), Step: m.Step, Saved: s.Saved, Disk: s.Disk,
		ImageOff: page, ImageLen: int64(len(image)), FixOff: page + int64(len(image)), FixCount: int64(len(s.Fixups)),
	}
	if h.Saved.IsZero() {
		h.Saved = time.Now()
	}
	b := append(make([]byte, page), image...)
	for _, f := range s.Fixups {
		base := m.Files[f.File].Off
		for i, v := range []int64{f.Off, f.Len, f.First, f.Second} {
			if i != 1 && (i == 0 || v != 0) {
				v += base
			}
			b = binary.LittleEndian.AppendUint64(b, uint64(v))
		}
	}
	h.SetMeta(int64(len(b)), meta)
	b = padded(append(b, meta...), page)
	copy(b, h.Append(nil))
	return b
}

// Write makes the segment in the directory and returns its path.
func (s Save) Write(t testing.TB, d *shm.Dir, name string) string {
	t.Helper()
	path := filepath.Join(d.Path(), name)
	require.NoError(t, os.WriteFile(path+".tmp", s.Bytes(t), 0o600))
	require.NoError(t, os.Rename(path+".tmp", path))
	return path
}

func padded(b []byte, to int) []byte {
	return append(b, make([]byte, (to-len(b)%to)%to)...)
}
