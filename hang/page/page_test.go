package page_test

import (
	"encoding/binary"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/hang/page"
	"dlrover-run/hang/page/pagetest"
	"dlrover-run/hang/rankset"
)

func somePage() hang.Page {
	return hang.Page{
		PID: 4711, Start: 98765, Rank: 9, WorldSize: 16, Local: 1,
		Created: time.Minute, Heartbeat: 90 * time.Second, Steps: 1000, LastStep: 89 * time.Second,
		Thread: 4713, Blocked: 3 * time.Second,
		Phase: hang.PhaseCheckpoint, PhaseSince: 89*time.Second + 5*time.Microsecond,
		Groups: []hang.GroupState{
			{ID: math.MaxUint64, Seq: 1804289384, Since: 88 * time.Second, Looks: hang.Looks{Steps: 5, Positions: 1<<32 - 1,
				Squares: 7, Full: 65535}}, {ID: 3, Since: time.Minute},
		},
		StepTimes: []time.Duration{86 * time.Second, 87 * time.Second, 89 * time.Second},
		Spans: []hang.Span{
			{Phase: hang.PhaseInit, From: 60 * time.Second, To: 61 * time.Second},
			{Phase: hang.PhaseData, From: 88 * time.Second, To: 88*time.Second + 7},
		},
	}
}

func set(b []byte, off int, w uint64) []byte {
	b = slices.Clone(b)
	binary.LittleEndian.PutUint64(b[off:], w)
	return b
}

func TestReadPage(t *testing.T) {
	want := somePage()
	got, err := page.Read(pagetest.Bytes(want))
	require.NoError(t, err)
	require.Equal(t, want, got)
}

func TestReadPageWithoutAnything(t *testing.T) {
	want := hang.Page{PID: 1, WorldSize: 1}
	got, err := page.Read(pagetest.Bytes(want))
	require.NoError(t, err)
	require.Equal(t, want, got)
}

func TestReadPageRefuses(t *testing.T) {
	good := pagetest.Bytes(somePage())
	for _, c := range []struct {
		b    []byte
		want string
	}{
		{nil, "a page has 4096 bytes, not 0"},
		{good[:4095], "a page has 4096 bytes, not 4095"},
		{make([]byte, page.Size), `a page begins with "DLRHANG1", not with "\x00\x00\x00\x00\x00\x00\x00\x00"`},
		{set(good, 8, 0), "a page names a pid and a world size"},
		{set(good, 8, math.MaxUint64), "pid 18446744073709551615 of a page: at most 2147483647 is possible"},
		{set(good, 24, 16), "rank 16 of a page: at most 15 is possible"},
		{set(good, 32, 0), "rank 9 of a page: at most 0 is possible"},
		{set(good, 32, rankset.Max+1), "world size 1048577 of a page: at most 1048576 is possible"},
		{set(good, 72, 1<<63), "last step 9223372036854775808 of a page: at most 9223372036854775807 is possible"},
	} {
		_, err := page.Read(c.b)
		require.ErrorContains(t, err, c.want)
	}
}

func TestPhaseOfALaterVersionIsUnknown(t *testing.T) {
	p, err := page.Read(set(pagetest.Bytes(somePage()), 80, 77<<8|200))
	require.NoError(t, err)
	require.Equal(t, hang.PhaseUnknown, p.Phase)
	require.Equal(t, 77*time.Microsecond, p.PhaseSince)
}

// full returns a page whose rings have been written so often.
func full(steps, spans int) []byte {
	p := somePage()
	p.Steps, p.StepTimes, p.Spans = uint64(steps), nil, nil
	for n := range steps {
		p.StepTimes = append(p.StepTimes, time.Duration(n+1)*time.Second)
	}
	for n := range spans {
		p.Spans = append(p.Spans, hang.Span{From: time.Duration(n) * time.Second, To: time.Duration(n+1) * time.Second})
	}
	return pagetest.Bytes(p)
}

// An older shim has no sums of looks, and its spans where they are now.
func TestPagesOfAnOlderShim(t *testing.T) {
	b := full(0, 0)
	b = set(set(b, 120, 0), 88, 300)
	for n := uint64(220); n < 300; n++ {
		b = set(b, 2816+16*int(n%80), n*uint64(time.Second/time.Microsecond)<<8|3)
		b = set(b, 2816+16*int(n%80)+8, (n+1)*uint64(time.Second))
	}
	p, err := page.Read(b)
	require.NoError(t, err)
	require.Len(t, p.Spans, 79)
	require.Equal(t, 300*time.Second, p.Spans[78].To)
	for _, g := range p.Groups {
		require.Zero(t, g.Looks, "of spans")
	}
}

func TestRings(t *testing.T) {
	for _, n := range []int{0, 1, 63, 64, 65, 191, 192, 193, 1000} {
		p, err := page.Read(full(n, n))
		require.NoError(t, err)
		require.Len(t, p.StepTimes, min(n, 191), "one slot may be in the making")
		require.Len(t, p.Spans, min(n, 63))
		if n > 0 {
			require.Equal(t, time.Duration(n)*time.Second, p.StepTimes[len(p.StepTimes)-1])
			require.Equal(t, time.Duration(n)*time.Second, p.Spans[len(p.Spans)-1].To)
			require.True(t, slices.IsSorted(p.StepTimes))
		}
	}
}

// A reader that is slow sees entries that are newer than the counter which it has read.
func TestRingsThatAreReplacedMeanwhile(t *testing.T) {
	b := full(300, 300)
	for n := uint64(300); n < 350; n++ {
		b = set(b, 1280+8*int(n%192), (n+1)*uint64(time.Second))
		b = set(b, 2816+16*int(n%64), n*uint64(time.Second/time.Microsecond)<<8)
		b = set(b, 2816+16*int(n%64)+8, (n+1)*uint64(time.Second))
	}
	p, err := page.Read(b)
	require.NoError(t, err)
	require.Len(t, p.StepTimes, 192-50)
	require.Equal(t, 300*time.Second, p.StepTimes[len(p.StepTimes)-1])
	require.Len(t, p.Spans, 64-50)
	require.Equal(t, 300*time.Second, p.Spans[len(p.Spans)-1].To)
}

// A span is written in two stores.
func TestSpansThatAreHalfWritten(t *testing.T) {
	b := full(0, 3)
	for _, c := range [][]byte{
		set(b, 2816+16, uint64(10*time.Second/time.Microsecond)<<8),
		set(set(b, 2816+16, 0), 2816+24, 0),
	} {
		p, err := page.Read(c)
		require.NoError(t, err)
		require.Equal(t, []hang.Span{{From: 2 * time.Second, To: 3 * time.Second}}, p.Spans)
	}
}

func FuzzReadPage(f *testing.F) {
	f.Add(pagetest.Bytes(somePage()))
	f.Add(full(300, 300))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := page.Read(b)
		if err != nil {
			require.Zero(t, p)
			return
		}
		require.Less(t, p.Rank, p.WorldSize)
		require.True(t, slices.IsSorted(p.StepTimes))
		require.True(t, slices.IsSortedFunc(p.Spans, func(a, b hang.Span) int { return int(min(1, max(-1, a.To-b.To))) }))
		for _, s := range p.Spans {
			require.LessOrEqual(t, s.From, s.To)
		}
		for _, at := range []time.Duration{p.Created, p.Heartbeat, p.LastStep, p.PhaseSince} {
			require.GreaterOrEqual(t, at, time.Duration(0))
		}
	})
}
