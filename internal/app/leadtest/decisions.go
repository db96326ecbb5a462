package leadtest

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous/lead"
)

// load returns the records as KEY=VALUE.
func load(t *testing.T, p lead.Store, term lead.Term) (all []string) {
	t.Helper()
	records, err := p.Load(t.Context(), term)
	require.NoError(t, err)
	for _, r := range records {
		all = append(all, r.Key+"="+string(r.Value))
	}
	return all
}

func record(key, value string) lead.Record { return lead.Record{Key: key, Value: []byte(value)} }

func leadersKnowEarlierOnes(t *testing.T, s Suite) {
	a, b := s.Open(t), s.Open(t)
	var last lead.Term
	for i := range 6 {
		p := []lead.Store{a, b}[i%2]
		term, lost := campaign(t, p, fmt.Sprintf("host:%d", i))
		require.Greater(t, term, last)
		require.Len(t, load(t, p, term), i)
		require.NoError(t, p.Append(t.Context(), term, record(fmt.Sprint(i), "x")))
		leads(t, lost)
		require.NoError(t, p.Resign(t.Context()))
		isLost(t, lost)
		require.ErrorIs(t, p.Append(t.Context(), term, record("late", "x")), lead.ErrDeposed)
		last = term
	}
}

func newestRecordCounts(t *testing.T, s Suite) {
	a := s.Open(t)
	term, _ := campaign(t, a, "a:1")
	require.Empty(t, load(t, a, term))
	require.NoError(t, a.Append(t.Context(), term, record("run/b", "1"), record("run/a", "2"), record("run/c", "")))
	require.NoError(t, a.Append(t.Context(), term, record("run/b", "3"), lead.Record{Key: "run/a"}))
	require.NoError(t, a.Append(t.Context(), term, record("run-b", "\x00\xff"), record("run-b", "4")))
	require.Equal(t, []string{"run-b=4", "run/b=3", "run/c="}, load(t, a, term))
	require.NoError(t, a.Append(t.Context(), term))
	require.NoError(t, a.Resign(t.Context()))
	b := s.Open(t)
	later, _ := campaign(t, b, "b:1")
	require.Equal(t, []string{"run-b=4", "run/b=3", "run/c="}, load(t, b, later))
	_, err := b.Load(t.Context(), term)
	require.ErrorIs(t, err, lead.ErrDeposed)
	require.ErrorIs(t, b.Append(t.Context(), term, record("old", "")), lead.ErrDeposed)
	require.ErrorIs(t, b.Append(t.Context(), later+1, record("new", "")), lead.ErrDeposed)
}

func recordsHaveBounds(t *testing.T, s Suite) {
	a := s.Open(t)
	term, _ := campaign(t, a, "a:1")
	most := make([]lead.Record, lead.MaxRecords)
	for i := range most {
		most[i] = record(fmt.Sprintf("%s%03d", strings.Repeat("k", lead.MaxKey-3), i), strings.Repeat("v", 3<<10))
	}
	require.NoError(t, a.Append(t.Context(), term, most...))
	require.NoError(t, a.Append(t.Context(), term, record("large", strings.Repeat("v", lead.MaxValue))))
	require.Len(t, load(t, a, term), lead.MaxRecords+1)
	for _, bad := range [][]lead.Record{
		{record("", "x")}, {record(strings.Repeat("k", lead.MaxKey+1), "x")}, {record("a b", "x")}, {record("ä", "x")},
		{record("good", "x"), record("large", strings.Repeat("v", lead.MaxValue+1))}, slices.Concat(most, most[:1]),
	} {
		require.Error(t, a.Append(t.Context(), term, bad...))
	}
	require.Len(t, load(t, a, term), lead.MaxRecords+1)
}

func manyAppendAtOnce(t *testing.T, s Suite) {
	a := s.Open(t)
	term, _ := campaign(t, a, "a:1")
	var wg sync.WaitGroup
	errs := make(chan error, 64)
	for i := range 64 {
		wg.Go(func() {
			errs <- a.Append(t.Context(), term, record(fmt.Sprintf("%d/a", i), "1"), record(fmt.Sprintf("%d/b", i), "2"))
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
	require.NoError(t, a.Resign(t.Context()))
	later, _ := campaign(t, a, "a:1")
	require.Len(t, load(t, a, later), 128)
}

func deposedWritesNothing(t *testing.T, s Suite) {
	if !s.Deposes {
		t.Skip("only the end of the process ends a leadership here")
	}
	a, b := s.Open(t), s.Open(t)
	term, lost := campaign(t, a, "a:1")
	require.NoError(t, a.Append(t.Context(), term, record("by-a", "")))
	require.NoError(t, b.Depose(t.Context(), lead.Leader{Term: term, Addr: "a:1"}))
	require.ErrorIs(t, a.Append(t.Context(), term, record("late", "")), lead.ErrDeposed)
	isLost(t, lost)
	later, _ := campaign(t, b, "b:1")
	require.Greater(t, later, term)
	require.Equal(t, []string{"by-a="}, load(t, b, later))
	require.ErrorIs(t, a.Append(t.Context(), term, record("later", "")), lead.ErrDeposed)
	_, err := a.Load(t.Context(), term)
	require.ErrorIs(t, err, lead.ErrDeposed)
}

func nobodyWritesWithoutTerm(t *testing.T, s Suite) {
	a := s.Open(t)
	require.NoError(t, a.Resign(t.Context()))
	require.ErrorIs(t, a.Append(t.Context(), 0, record("a", "")), lead.ErrDeposed)
	require.ErrorIs(t, a.Append(t.Context(), 1, record("a", "")), lead.ErrDeposed)
	_, err := a.Load(t.Context(), 0)
	require.ErrorIs(t, err, lead.ErrDeposed)
}
