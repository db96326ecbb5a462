package api

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

const testBase = 1000

func testLine(limit int) *timeline { return newArchive(limit).open(testBase) }

func noteOf(text string) rendezvous.Note {
	return rendezvous.Note{Event: "join", Node: "n", Text: text, Members: []job.Member{{}}}
}

func numbers(es Events) (ns []uint64) {
	for _, e := range es.Events {
		ns = append(ns, e.Seq-testBase)
	}
	return ns
}

func TestTimelineSince(t *testing.T) {
	line := testLine(maxLines)
	for i := range 3 {
		line.note(time.Unix(int64(i), 0), noteOf(fmt.Sprint(i)))
	}
	for name, c := range map[string]struct {
		after   uint64
		want    []uint64
		dropped bool
	}{
		"from the beginning":                   {0, []uint64{1, 2, 3}, false},
		"from the number before the first":     {testBase, []uint64{1, 2, 3}, false},
		"in the middle":                        {testBase + 2, []uint64{3}, false},
		"at the end":                           {testBase + 3, nil, false},
		"of an earlier daemon":                 {7, []uint64{1, 2, 3}, true},
		"of a daemon whose clock was ahead":    {testBase + 4, []uint64{1, 2, 3}, true},
		"the largest number that there can be": {1<<64 - 1, []uint64{1, 2, 3}, true},
	} {
		t.Run(name, func(t *testing.T) {
			es, news, err := line.since(c.after)
			require.NoError(t, err)
			require.Equal(t, c.want, numbers(es))
			require.Equal(t, c.dropped, es.Dropped)
			require.EqualValues(t, testBase+3, es.Next)
			require.Equal(t, c.want == nil, news != nil)
		})
	}
}

func TestTimelineKeepsTheNewest(t *testing.T) {
	line := testLine(maxLines)
	for range maxEvents + 5 {
		line.note(time.Now(), noteOf(""))
	}
	es, _, err := line.since(0)
	require.NoError(t, err)
	require.Len(t, es.Events, maxEvents)
	require.EqualValues(t, 6, es.Events[0].Seq-testBase)
	require.True(t, es.Dropped)
	es, _, _ = line.since(testBase + 5)
	require.False(t, es.Dropped, "nothing is missing between 5 and 6")
	es, _, _ = line.since(testBase + 4)
	require.True(t, es.Dropped)
	require.Nil(t, es.Events[0].Members, "a world of 10,000 nodes is not kept with every seal")
}

// Whatever floods a timeline, the events of others stay, as far as they are no more than their share.
func TestTimelineUnderFloods(t *testing.T) {
	const n = 3 * maxEvents
	for name, flood := range map[string]func(i int) rendezvous.Note{
		"one kind, of one node": func(int) rendezvous.Note { return rendezvous.Note{Event: "node-error", Node: "evil"} },
		"one kind, of many nodes": func(i int) rendezvous.Note {
			return rendezvous.Note{Event: "node-error", Node: fmt.Sprint("evil", i)}
		},
		"one kind, of no node":    func(int) rendezvous.Note { return rendezvous.Note{Event: "break"} },
		"a known kind, of a node": func(int) rendezvous.Note { return rendezvous.Note{Event: "join", Node: "evil"} },
		"all kinds, of a node": func(i int) rendezvous.Note {
			return rendezvous.Note{Event: job.Event(fmt.Sprint("kind", i%40)), Node: "evil"}
		},
		"long texts, of many nodes": func(i int) rendezvous.Note {
			return rendezvous.Note{Event: "node-error", Node: fmt.Sprint("evil", i), Text: strings.Repeat("x", 10*maxText)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			line := testLine(maxLines)
			at := time.Unix(0, 0)
			note := func(n rendezvous.Note) {
				at = at.Add(time.Second)
				line.note(at, n)
			}
			line.end(at, rendezvous.EpochEvidence{Evidence: job.Evidence{Failures: []job.Failure{{Text: "why"}}}})
			for i := range 100 {
				note(rendezvous.Note{Event: "join", Node: fmt.Sprint("n", i)})
			}
			for range 20 {
				note(rendezvous.Note{Event: "run"})
			}
			for i := range n {
				note(flood(i))
			}
			kept := map[job.Event]int{}
			es, _, err := line.since(0)
			require.NoError(t, err)
			for _, e := range es.Events {
				if e.Node != "evil" {
					kept[e.Event]++
				}
			}
			require.Equal(t, 100, kept["join"])
			require.Equal(t, 20, kept["run"])
			require.Len(t, line.evidences(), 1)
			require.True(t, es.Dropped)
			require.IsIncreasing(t, numbers(es))
			require.EqualValues(t, 120+n, es.Events[len(es.Events)-1].Seq-testBase, "the newest is there")
			require.LessOrEqual(t, line.size, maxLine)
			sum := 0
			for _, s := range line.sources {
				sum += s.bytes
			}
			require.Equal(t, line.size, sum)
			es, _, _ = line.since(es.Next - 1)
			require.False(t, es.Dropped, "a reader who follows misses nothing")
		})
	}
}

func TestTimelineKeepsEvidence(t *testing.T) {
	line := testLine(maxLines)
	for i := range maxEnded + 2 {
		line.end(time.Now(), rendezvous.EpochEvidence{
			EpochID: job.EpochID{Epoch: i}, Evidence: job.Evidence{Failures: []job.Failure{{Text: "x"}}},
		})
	}
	got := line.evidences()
	require.Len(t, got, maxEnded)
	require.Equal(t, 2, got[0].Epoch)
	require.Equal(t, maxEnded+1, got[maxEnded-1].Epoch)
}

// One run has a limit in bytes, too, whatever it is filled with; the oldest goes first.
func TestTimelineIsBounded(t *testing.T) {
	line := testLine(maxLines)
	at := time.Unix(0, 0)
	for i := range 3 * maxEnded {
		at = at.Add(time.Second)
		line.note(at, noteOf(strings.Repeat("x", 10*maxText)))
		var fs []job.Failure
		for range 16 {
			fs = append(fs, job.Failure{Text: "t", Detail: make(json.RawMessage, 7<<10)})
		}
		line.end(at,
			rendezvous.EpochEvidence{EpochID: job.EpochID{Epoch: i}, Evidence: job.Evidence{Failures: fs}})
	}
	require.LessOrEqual(t, line.size, maxLine)
	require.Equal(t, line.size, line.of.used)
	got := line.evidences()
	require.Equal(t, 3*maxEnded-1, got[len(got)-1].Epoch)
	require.Len(t, got[0].Failures, 16)
	es, _, err := line.since(0)
	require.NoError(t, err)
	require.Less(t, len(es.Events[0].Text), maxText+10)
	line.close(ErrClosed)
	require.Zero(t, line.of.used)
}

func TestEvidenceIsBounded(t *testing.T) {
	huge := job.Failure{Text: strings.Repeat("ä", maxText), Detail: make(json.RawMessage, maxDetail+1)}
	in := rendezvous.EpochEvidence{
		Evidence: job.Evidence{Cause: &job.Cause{Text: huge.Text}, Failures: []job.Failure{huge}},
	}
	for range 300 {
		in.Losses = append(in.Losses, job.Loss{Reason: strings.Repeat("r", 2000)})
	}
	out := bounded(in)
	require.LessOrEqual(t, Proof{EpochEvidence: out}.size(), maxProof+maxText+10)
	require.Nil(t, out.Failures[0].Detail)
	require.Less(t, len(out.Failures[0].Text), maxText+10)
	require.NotEmpty(t, out.Losses)
	require.Less(t, len(out.Losses), 300)
	require.NotNil(t, in.Failures[0].Detail, "the Round's own is left alone")
	require.Equal(t, huge.Text, in.Cause.Text)
}

// All runs of a daemon share a limit. What is oldest goes, whosever it is.
func TestArchiveIsBounded(t *testing.T) {
	a := newArchive(4 * evictStep)
	old, young := a.open(testBase), a.open(testBase)
	at := time.Unix(0, 0)
	for a.used < a.limit*3/4 {
		at = at.Add(time.Second)
		old.note(at, noteOf("old"))
	}
	before := old.size
	for range 300 {
		at = at.Add(time.Second)
		young.note(at, noteOf("young"))
		require.LessOrEqual(t, a.used, a.limit)
		require.Equal(t, a.used, old.size+young.size)
	}
	require.Less(t, old.size, before)
	require.Equal(t, 300, young.events.count, "the younger run keeps all of its own")
	for range 1000 {
		at = at.Add(time.Second)
		young.note(at, noteOf(strings.Repeat("y", 1000)))
		require.LessOrEqual(t, a.used, a.limit)
	}
	require.Zero(t, old.size)
	require.Len(t, old.events.items, firstRing, "nor does it keep the room")
	es, _, err := old.since(testBase + 1)
	require.NoError(t, err)
	require.Empty(t, es.Events)
	old.note(at, noteOf("again"))
	es, _, _ = old.since(testBase + 1)
	require.True(t, es.Dropped)
	require.Len(t, es.Events, 1)
}

// A note that nobody reads costs no memory once the timeline is full.
func TestNotesAreCheap(t *testing.T) {
	line := testLine(maxLines)
	n, now := noteOf("2 slots"), time.Now()
	for range maxEvents {
		line.note(now, n)
	}
	require.Zero(t, testing.AllocsPerRun(1000, func() { line.note(now, n) }))
}

// BenchmarkFlood is the worst case: what gives way lies behind all others.
func BenchmarkFlood(b *testing.B) {
	line := testLine(maxLines)
	now := time.Now()
	for i := range maxEvents / 2 {
		line.note(now, rendezvous.Note{Event: job.Event(fmt.Sprint("kind", i%20))})
	}
	for b.Loop() {
		line.note(now, noteOf("2 slots"))
	}
}

func BenchmarkNote(b *testing.B) {
	line := testLine(maxLines)
	n, now := noteOf("2 slots"), time.Now()
	for b.Loop() {
		line.note(now, n)
	}
}

func TestEventsAreHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub(HubConfig{})
		defer h.Close()
		_, err := h.Events(t.Context(), "r", 0)
		require.ErrorIs(t, err, ErrUnknownRun)
		require.NoError(t, h.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 2, Max: 2})))
		_, err = h.Leave(t.Context(), "r", rendezvous.Leave{ID: "a"}) // nothing happens by itself from here on
		require.NoError(t, err)
		es, err := h.Events(t.Context(), "r", 0)
		require.NoError(t, err)
		require.Len(t, es.Events, 2)
		require.Equal(t, job.EventJoin, es.Events[0].Event)
		require.Equal(t, time.Now().UTC(), es.Events[0].At)

		start := time.Now()
		_, err = h.Events(t.Context(), "r", es.Next)
		require.ErrorIs(t, err, ErrNothingNew)
		require.Equal(t, hold(0), time.Since(start))

		go func() {
			time.Sleep(5 * time.Second)
			_ = h.Join(t.Context(), "r", joinOf("b", rendezvous.Params{Min: 2, Max: 2}))
		}()
		start = time.Now()
		es, err = h.Events(t.Context(), "r", es.Next)
		require.NoError(t, err)
		require.Equal(t, 5*time.Second, time.Since(start))
		require.Equal(t, "b", es.Events[0].Node)
	})
}

// Whoever waits for events hears when the hub closes, and when the run is forgotten.
func TestHeldEventsEnd(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(t *testing.T, h *Hub)
		want error
	}{
		"hub closed": {func(_ *testing.T, h *Hub) { h.Close() }, ErrClosed},
		"run forgotten": {func(t *testing.T, h *Hub) {
			h.prune(time.Now().Add(time.Hour), true)
			require.Empty(t, h.Runs(false))
		}, ErrUnknownRun},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := NewHub(HubConfig{})
				defer h.Close()
				require.NoError(t, h.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 1, Max: 1})))
				_, err := h.Leave(t.Context(), "r", rendezvous.Leave{ID: "a"})
				require.NoError(t, err)
				es, err := h.Events(t.Context(), "r", 0)
				require.NoError(t, err)
				held := make(chan error)
				go func() {
					_, err := h.Events(t.Context(), "r", es.Next)
					held <- err
				}()
				synctest.Wait()
				c.end(t, h)
				require.ErrorIs(t, <-held, c.want)
				require.Zero(t, h.lines.used)
				require.Empty(t, h.lines.lines)
			})
		})
	}
}

// Every byte that a sender chooses counts.
func TestSizesCount(t *testing.T) {
	const n = 100
	long := strings.Repeat("x", n)
	e := Event{Note: rendezvous.Note{Event: job.Event(long), Node: long, Text: long}}
	require.Equal(t, Event{}.size()+3*n, e.size())
	cause := &job.Cause{Node: long, Text: long}
	empty, full := Proof{}, Proof{}
	empty.Failures, empty.Losses = make([]job.Failure, 2), make([]job.Loss, 2)
	full.Cause = cause
	for range 2 {
		full.Failures = append(full.Failures, job.Failure{Text: long, Detail: json.RawMessage(long)})
		full.Losses = append(full.Losses, job.Loss{Node: long, Reason: long})
	}
	require.Equal(t, empty.size()+10*n, full.size())
	require.Greater(t, empty.size(), Proof{}.size())
}
