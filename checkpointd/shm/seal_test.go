package shm_test

import (
	"context"
	"encoding/binary"
	"hash/crc32"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/shm/shmtest"
)

// randomSave is a file with rows of payloads between literal bytes, of about the sizes given.
func randomSave(r *rand.Rand, rows, payload, gap int) shmtest.Save {
	s := simple(1)
	var data []byte
	literal := func(n int) int64 {
		at := len(data)
		for range n {
			data = append(data, byte(r.Uint32()))
		}
		return int64(at)
	}
	type chunk struct{ off, len, dst int64 }
	var chunks []chunk
	for range rows {
		dst := literal(4 + r.IntN(gap+1))
		n := r.IntN(payload + 1)
		chunks = append(chunks, chunk{literal(n), int64(n), dst})
	}
	for i, p := range chunks {
		f := shmtest.Fixup{Off: p.off, Len: p.len, First: p.dst}
		if p.dst == 0 || i%2 == 1 { // as the directory at the end of a zip
			f.Second = literal(4)
			literal(r.IntN(gap + 1))
		}
		s.Fixups = append(s.Fixups, f)
	}
	literal(r.IntN(gap + 1))
	s.Files[0].Data = data
	return s
}

func checkSealed(t *testing.T, s shmtest.Save) {
	t.Helper()
	p := pinned(t, s)
	want := append([]byte{}, s.Files[0].Data...)
	for _, f := range s.Fixups {
		for _, d := range []int64{f.First, f.Second} {
			if d > 0 {
				binary.LittleEndian.PutUint32(want[d:], crc32.ChecksumIEEE(want[f.Off:f.Off+f.Len]))
			}
		}
	}
	for range 2 { // again changes nothing
		sealing := p.Seal(t.Context(), 0)
		for end := int64(0); end <= int64(len(want)); end += 1 + int64(len(want)/7) {
			require.NoError(t, sealing.Ready(t.Context(), end))
			require.Equal(t, want[:end], p.File(0)[:end])
		}
		sum, err := sealing.Sum()
		require.NoError(t, err)
		require.Equal(t, crc32.ChecksumIEEE(want), sum)
		require.Equal(t, want, p.File(0))
	}
}

func TestSeal(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, tc := range []struct {
		name               string
		rows, payload, gap int
	}{
		{"no fix-ups", 0, 0, 10000}, {"one", 1, 100, 10}, {"empty payloads", 20, 0, 3}, {"many small", 500, 3, 3},
		{"several chunks", 2, 9 << 20, 10}, {"mixed", 100, 5000, 300},
	} {
		t.Run(tc.name, func(t *testing.T) { checkSealed(t, randomSave(r, tc.rows, tc.payload, tc.gap)) })
	}
	t.Run("empty file", func(t *testing.T) {
		s := simple(1)
		s.Files[0].Data = nil
		checkSealed(t, s)
	})
	t.Run("targets before earlier payloads", func(t *testing.T) {
		s := simple(1)
		s.Files[0].Data = make([]byte, 1000)
		s.Fixups = []shmtest.Fixup{{Off: 100, Len: 50, First: 90, Second: 900}, {Off: 200, Len: 60, First: 40},
			{Off: 300, Len: 5, First: 290}}
		checkSealed(t, s)
	})
	t.Run("second file of the image", func(t *testing.T) {
		s := randomSave(r, 10, 100, 10)
		s.Files = append(s.Files, shmtest.File{Path: "b", Kind: "raw", Data: []byte("0123456789")})
		s.Fixups = append(s.Fixups, shmtest.Fixup{File: 1, Off: 0, Len: 4, First: 5})
		p := pinned(t, s)
		sum, err := p.Seal(t.Context(), 1).Sum()
		require.NoError(t, err)
		require.Equal(t, crc32.ChecksumIEEE(p.File(1)), sum)
		require.Equal(t, s.Files[0].Data, p.File(0), "the first one is as it was")
	})
}

func FuzzSeal(f *testing.F) {
	f.Add(uint64(1), uint8(10), uint16(100), uint8(10))
	f.Fuzz(func(t *testing.T, seed uint64, rows uint8, payload uint16, gap uint8) {
		checkSealed(t, randomSave(rand.New(rand.NewPCG(seed, 0)), int(rows), int(payload), int(gap)))
	})
}

func TestReadyDoesNotWaitForLaterFixups(t *testing.T) {
	s := simple(1)
	s.Files[0].Data = make([]byte, 1000)
	s.Fixups = []shmtest.Fixup{{Off: 500, Len: 100, First: 490}}
	p := pinned(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	sealing := p.Seal(ctx, 0) // gets nowhere
	require.NoError(t, sealing.Ready(t.Context(), 490))
	require.ErrorIs(t, sealing.Ready(t.Context(), 491), context.Canceled)
	_, err := sealing.Sum()
	require.ErrorIs(t, err, context.Canceled)
}

func TestManyFixups(t *testing.T) {
	s := randomSave(rand.New(rand.NewPCG(3, 4)), 32<<10, 64, 64)
	start := time.Now()
	p := pinned(t, s)
	sum, err := p.Seal(t.Context(), 0).Sum()
	took := time.Since(start)
	require.NoError(t, err)
	require.Equal(t, crc32.ChecksumIEEE(p.File(0)), sum)
	t.Logf("32768 fix-ups: %v with writing the segment", took)
}

func BenchmarkSeal(b *testing.B) {
	const tensor, count = 16 << 20, 16
	s := simple(1)
	s.Files[0].Data = make([]byte, count*(tensor+64))
	for i := range int64(count) {
		s.Fixups = append(s.Fixups, shmtest.Fixup{Off: i*(tensor+64) + 64, Len: tensor, First: i*(tensor+64) + 8})
	}
	p := pinned(b, s)
	b.SetBytes(int64(len(s.Files[0].Data)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := p.Seal(b.Context(), 0).Sum(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkManyFixups(b *testing.B) {
	p := pinned(b, randomSave(rand.New(rand.NewPCG(3, 4)), 32<<10, 64, 64))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := p.Seal(b.Context(), 0).Sum(); err != nil {
			b.Fatal(err)
		}
	}
}

func TestSealIsDoneOnce(t *testing.T) {
	d := newDir(t)
	s := sized(1, 100)
	s.Fixups = []shmtest.Fixup{{Off: 1000, Len: 5000, First: 8}}
	seg := received(t, d, copyName, s)
	seal := func() (uint32, []byte) {
		p, err := seg.Pin()
		require.NoError(t, err)
		defer p.Release()
		sealing := p.Seal(t.Context(), 0)
		sum, err := sealing.Sum()
		require.NoError(t, err)
		require.NoError(t, sealing.Ready(t.Context(), int64(len(p.File(0)))))
		return sum, p.File(0)
	}
	first, file := seal()
	require.Equal(t, crc32.ChecksumIEEE(file), first)
	file[50000]++ // to see whether it is read again
	again, _ := seal()
	require.Equal(t, first, again)

	s.Meta.Step, s.Files[0].Data = 2, sized(2, 100).Files[0].Data
	b := s.Bytes(t)
	in, err := seg.Reuse(int64(len(b)), 1)
	require.NoError(t, err)
	publish(t, in, b)
	next, file := seal()
	require.Equal(t, crc32.ChecksumIEEE(file), next, "another save")
	require.NotEqual(t, first, next)
}
