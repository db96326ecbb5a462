package shm

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/commit"
)

func goodHeader() Header {
	return Header{
		State: Complete, Seq: 3, Step: 20, Saved: time.Unix(0,
			1700000000123456789), Disk: true, MetaOff: 20480, MetaLen: 700,
		MetaCRC: 0xdeadbeef, FixOff: 16384, FixCount: 2, ImageOff: 4096, ImageLen: 8192, Released: 2, Durable: 1,
	}
}

func TestHeader(t *testing.T) {
	t.Run("what is written is read", func(t *testing.T) {
		b := goodHeader().Append(nil)
		require.Len(t, b, headerSize)
		h, err := ParseHeader(b)
		require.NoError(t, err)
		require.Equal(t, goodHeader(), h)
	})
	t.Run("a new file is unused", func(t *testing.T) {
		h, err := ParseHeader(make([]byte, headerSize))
		require.NoError(t, err)
		require.Equal(t, Header{}, h)
	})
	t.Run("later marks of the daemon leave the checksum alone", func(t *testing.T) {
		b := goodHeader().Append(nil)
		binary.LittleEndian.PutUint64(b[offReleased:], 9)
		binary.LittleEndian.PutUint64(b[offDurable:], 8)
		h, err := ParseHeader(b)
		require.NoError(t, err)
		require.Equal(t, []uint64{9, 8}, []uint64{h.Released, h.Durable})
	})
	t.Run("a save in progress has no checksum yet", func(t *testing.T) {
		b := goodHeader().Append(nil)
		b[offState] = byte(Writing)
		b[offSeq]++
		h, err := ParseHeader(b)
		require.NoError(t, err)
		require.Equal(t, Writing, h.State)
	})
	for name, change := range map[string]func(b []byte){
		"short":           nil,
		"magic":           func(b []byte) { b[0] = 'X' },
		"version":         func(b []byte) { b[8] = 2 },
		"header length":   func(b []byte) { b[12] = 1 },
		"state":           func(b []byte) { b[offState] = 3 },
		"large state":     func(b []byte) { b[offState+7] = 1 },
		"step is changed": func(b []byte) { b[32]++ },
		"checksum":        func(b []byte) { b[offHeaderCRC]++ },
	} {
		t.Run(name, func(t *testing.T) {
			b := goodHeader().Append(nil)
			if change == nil {
				b = b[:headerUsed-1]
			} else {
				change(b)
			}
			_, err := ParseHeader(b)
			require.ErrorIs(t, err, ErrDamaged)
		})
	}
	for name, change := range map[string]func(h *Header){
		"negative image":           func(h *Header) { h.ImageLen = -4096 },
		"image in the header":      func(h *Header) { h.ImageOff = 0 },
		"image not at a page":      func(h *Header) { h.ImageOff = 4104 },
		"image of all memory":      func(h *Header) { h.ImageLen = math.MaxInt64 },
		"image over the fix-ups":   func(h *Header) { h.ImageLen = 16385 - 4096 },
		"meta over the fix-ups":    func(h *Header) { h.MetaOff = 16384 + 63 },
		"meta over the image":      func(h *Header) { h.MetaOff = 5000; h.MetaLen = 1 },
		"meta in the header":       func(h *Header) { h.MetaOff = 4000; h.MetaLen = 10 },
		"meta too long":            func(h *Header) { h.MetaLen = MaxMeta + 1 },
		"negative meta":            func(h *Header) { h.MetaLen = -1 },
		"negative fix-ups":         func(h *Header) { h.FixCount = -1 },
		"fix-ups that overflow":    func(h *Header) { h.FixCount = math.MaxInt64 / 16 },
		"fix-ups not aligned":      func(h *Header) { h.FixOff++ },
		"no fix-ups at a negative": func(h *Header) { h.FixOff = -8; h.FixCount = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			h := goodHeader()
			change(&h)
			_, err := ParseHeader(h.Append(nil))
			require.ErrorIs(t, err, ErrDamaged)
		})
	}
}

func FuzzParseHeader(f *testing.F) {
	f.Add(goodHeader().Append(nil)[:headerUsed])
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= headerUsed { // let it get past the checksum
			binary.LittleEndian.PutUint32(b[offHeaderCRC:], headerCRC(b))
		}
		h, err := ParseHeader(b)
		if err != nil || h.State != Complete {
			return
		}
		require.Positive(t, h.used())
		for _, v := range []int64{h.MetaOff, h.MetaLen, h.FixOff, h.FixCount, h.ImageOff, h.ImageLen} {
			require.GreaterOrEqual(t, v, int64(0))
			require.LessOrEqual(t, v, h.used())
		}
	})
}

func goodMeta() Meta {
	return Meta{
		Run: "r", Epoch: "0.29500", Save: "0123456789abcdef", Step: 20, Rank: 3, LocalRank: 1,
		WorldSize: 4, LocalWorldSize: 2,
		NodeRank: 1, Shard: 3, Shards: 4, Primary: true, Dir: "/data/ckpt", Framework: "fsdp", Layout: "ab", Resize: "same",
		Files: []File{{"20/a.distcp", 0, 4096, "distcp"}, {"/else/b.pt", 8192, 10, "raw"},
			{"20/empty", 4096, 0, "raw"}},
		Trackers:  []commit.Tracker{{Path: "dlrover_latest.txt", Text: "20"}},
		Retention: &commit.Retention{KeepLatest: 2}, TimeoutS: 600, Replicas: 1,
		Torch: "2.1",
	}
}

func TestMeta(t *testing.T) {
	t.Run("what is written is read", func(t *testing.T) {
		b, err := json.Marshal(goodMeta())
		require.NoError(t, err)
		m, err := ParseMeta(b)
		require.NoError(t, err)
		require.Equal(t, goodMeta(), m)
	})
	for name, b := range map[string]string{"empty": "", "not JSON": "x", "null": "null", "more behind": "{} {}",
		"wrong type": `{"step":"1"}`, "long": strings.Repeat(" ", MaxMeta+1)} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseMeta([]byte(b))
			require.ErrorIs(t, err, ErrDamaged)
		})
	}
	path := func(p string) func(*Meta) { return func(m *Meta) { m.Files[0].Path = p } }
	for name, change := range map[string]func(m *Meta){
		"save id with a slash":    func(m *Meta) { m.Save = "../../../../etc/" },
		"short save id":           func(m *Meta) { m.Save = "ab" },
		"rank behind the world":   func(m *Meta) { m.Rank = 4 },
		"negative rank":           func(m *Meta) { m.Rank = -1 },
		"local rank":              func(m *Meta) { m.LocalRank = 2 },
		"shard":                   func(m *Meta) { m.Shard = 4 },
		"no shards":               func(m *Meta) { m.Shard, m.Shards = 0, 0 },
		"node rank":               func(m *Meta) { m.NodeRank = -1 },
		"timeout":                 func(m *Meta) { m.TimeoutS = -1 },
		"resize":                  func(m *Meta) { m.Resize = "some" },
		"retention":               func(m *Meta) { m.Retention.KeepLatest = -1 },
		"relative directory":      func(m *Meta) { m.Dir = "ckpt" },
		"directory with a NUL":    func(m *Meta) { m.Dir = "/a\x00" },
		"directory not clean":     func(m *Meta) { m.Dir = "/a/../b" },
		"path with ..":            path("../x"),
		"path that is ..":         path(".."),
		"path with .. inside":     path("a/../../x"),
		"path with a slash":       path("a/"),
		"path with NUL":           path("a\x00b"),
		"empty path":              path(""),
		"path of the directory":   path("/data/ckpt"),
		"path that is the root":   path("/"),
		"absolute, not clean":     path("/a//b"),
		"path of our records":     path(".dlrover/20.json"),
		"the same, absolute":      path("/data/ckpt/.dlrover/20.json"),
		"long path":               path(strings.Repeat("a/", 3000) + "a"),
		"path twice":              path("/else/b.pt"),
		"path twice, absolute":    path("/data/ckpt/20/empty"),
		"path of a tracker":       path("dlrover_latest.txt"),
		"tracker path":            func(m *Meta) { m.Trackers[0].Path = "../x" },
		"file not at a page":      func(m *Meta) { m.Files[0].Off = 8 },
		"file at a negative":      func(m *Meta) { m.Files[0].Off = -4096 },
		"file of negative length": func(m *Meta) { m.Files[0].Len = -1 },
		"file that overflows":     func(m *Meta) { m.Files[1].Off, m.Files[1].Len = math.MaxInt64&^4095, 4096 },
		"files that overlap":      func(m *Meta) { m.Files[0].Len = 8193 },
	} {
		t.Run(name, func(t *testing.T) {
			m := goodMeta()
			change(&m)
			b, err := json.Marshal(m)
			require.NoError(t, err)
			_, err = ParseMeta(b)
			require.ErrorIs(t, err, ErrDamaged)
		})
	}
}

func FuzzParseMeta(f *testing.F) {
	b, err := json.Marshal(goodMeta())
	require.NoError(f, err)
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := ParseMeta(b)
		if err != nil {
			return
		}
		for _, file := range m.Files {
			require.NotContains(t, "/"+file.Path+"/", "/../")
			require.NotContains(t, file.Path, "\x00")
		}
	})
}

func table(rows ...[4]int64) (b []byte) {
	for _, r := range rows {
		for _, v := range r {
			b = binary.LittleEndian.AppendUint64(b, uint64(v))
		}
	}
	return b
}

func TestFixups(t *testing.T) {
	files := []File{{Path: "b", Off: 8192, Len: 4096}, {Path: "none", Off: 8192}, {Path: "a", Len: 5000}}
	const image = 16384
	t.Run("rows go to their files", func(t *testing.T) {
		rows, err := parseFixes(table([4]int64{100, 50, 10, 4996}, [4]int64{150, 0, 14, 0}, [4]int64{160, 4, 0, 0},
			[4]int64{8192, 100, 8292, 0}), files, image)
		require.NoError(t, err)
		require.Equal(t, [][]fix{{{0, 100, [2]int64{100, -1}}}, nil,
			{{100, 50, [2]int64{10, 4996}}, {150, 0, [2]int64{14, -1}}}}, rows)
	})
	for name, rows := range map[string][][4]int64{
		"payload behind the image":    {{image, 1, 10, 0}},
		"payload that overflows":      {{100, math.MaxInt64, 10, 0}},
		"negative payload":            {{-1, 10, 100, 0}},
		"negative target":             {{100, 10, -8, 0}},
		"payloads overlap":            {{100, 50, 10, 0}, {149, 10, 20, 0}},
		"payloads descend":            {{200, 50, 10, 0}, {100, 10, 20, 0}},
		"payload leaves its file":     {{4990, 11, 10, 0}},
		"payload in another file":     {{100, 10, 8300, 0}},
		"targets in two files":        {{100, 10, 50, 8300}},
		"target leaves its file":      {{100, 10, 4997, 0}},
		"target between files":        {{100, 10, 6000, 0}},
		"target in its payload":       {{100, 10, 106, 0}},
		"target begins before":        {{100, 10, 97, 0}},
		"target in another payload":   {{100, 10, 200, 0}, {200, 10, 50, 0}},
		"target in a payload without": {{100, 10, 200, 0}, {200, 10, 0, 0}},
		"target twice":                {{100, 10, 50, 50}},
		"targets overlap":             {{100, 10, 50, 0}, {120, 10, 53, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parseFixes(table(rows...), files, image)
			require.ErrorIs(t, err, ErrDamaged)
		})
	}
	t.Run("file behind the image", func(t *testing.T) {
		_, err := parseFixes(nil, files, 12287)
		require.ErrorIs(t, err, ErrDamaged)
	})
	t.Run("part of a row", func(t *testing.T) {
		_, err := parseFixes(make([]byte, 31), files, image)
		require.ErrorIs(t, err, ErrDamaged)
	})
}

func FuzzParseFixes(f *testing.F) {
	f.Add(table([4]int64{100, 50, 10, 4996}, [4]int64{8192, 100, 8292, 0}))
	files := []File{{Path: "b", Off: 8192, Len: 4096}, {Path: "a", Len: 5000}}
	f.Fuzz(func(t *testing.T, b []byte) {
		rows, err := parseFixes(b, files, 16384)
		if err != nil {
			return
		}
		for i, fixes := range rows {
			touched := make([]byte, files[i].Len)
			for _, x := range fixes {
				for k := x.off; k < x.end(); k++ {
					touched[k]++
				}
				for _, d := range x.dst {
					for k := d; d >= 0 && k < d+4; k++ {
						touched[k]++
					}
				}
			}
			for k, n := range touched {
				require.LessOrEqual(t, n, byte(1), "byte %d of file %d", k, i)
			}
		}
	})
}
