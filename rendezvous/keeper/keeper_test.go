package keeper

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/lead"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// store is a lead.Decisions in memory.
type store struct {
	mu      sync.Mutex
	term    lead.Term
	records map[string][]byte
	appends int
	err     error         // of the next Appends
	lost    error         // as err, but they have been carried out
	most    int           // bytes of values; 0: it is never full
	block   chan struct{} // Append waits until it is closed; nil: it does not
}

func newStore() *store { return &store{term: 1, records: map[string][]byte{}} }

func (s *store) Append(ctx context.Context, term lead.Term, records ...lead.Record) error {
	s.mu.Lock()
	block := s.block
	s.mu.Unlock()
	if block != nil {
		select {
		case <-block:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if term != s.term {
		return lead.ErrDeposed
	}
	if s.err != nil {
		return s.err
	}
	if err := lead.Validate(records); err != nil {
		return err
	}
	if after := maps.Clone(s.records); s.most > 0 {
		for _, r := range records {
			after[r.Key] = r.Value
		}
		if size := sizeOf(after); size > s.most && size >= sizeOf(s.records) {
			return fmt.Errorf("%w: %d bytes", lead.ErrFull, size)
		}
	}
	s.appends++
	for _, r := range records {
		if s.records[r.Key] = r.Value; r.Value == nil {
			delete(s.records, r.Key)
		}
	}
	return s.lost
}

func (s *store) Load(_ context.Context, term lead.Term) (all []lead.Record, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if term != s.term {
		return nil, lead.ErrDeposed
	}
	for _, key := range slices.Sorted(maps.Keys(s.records)) {
		all = append(all, lead.Record{Key: key, Value: s.records[key]})
	}
	return all, nil
}

func sizeOf(records map[string][]byte) (size int) {
	for _, value := range records {
		size += len(value)
	}
	return size
}

func (s *store) keys() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.records))
}

func (s *store) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

// daemon is one leader.
type daemon struct {
	t    *testing.T
	keep *Keeper
	hub  *api.Hub
	log  *bytes.Buffer

	mu    sync.Mutex
	hangs string // of every run
}

// daemon starts a leader that ends with the test, or with close.
func (s *store) daemon(t *testing.T) *daemon {
	t.Helper()
	d := &daemon{t: t, log: &bytes.Buffer{}}
	var err error
	d.keep, err = Load(t.Context(), s, s.term, slog.New(slog.NewTextHandler(&locked{w: d.log}, nil)))
	require.NoError(t, err)
	d.hub = api.NewHub(api.HubConfig{Keep: time.Hour, Keeper: d.keep})
	d.keep.Follow(d.hub, func(string) []byte {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.hangs == "" {
			return nil
		}
		return []byte(d.hangs)
	})
	t.Cleanup(d.close)
	return d
}

type locked struct {
	mu sync.Mutex
	w  *bytes.Buffer
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

func (d *daemon) close() {
	d.hub.Close()
	d.keep.Close()
}

func (d *daemon) join(run string, n int, ids ...string) {
	d.t.Helper()
	for _, id := range ids {
		require.NoError(d.t, d.hub.Join(d.t.Context(), run, rendezvous.Join{
			Node: rendezvous.Node{ID: id, Name: id, Rank: -1, Slots: 1}, Params: rendezvous.Params{Min: n, Max: n}}))
	}
}

// directive is what a node gets next.
func (d *daemon) directive(run, id string) rendezvous.Directive {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(d.t.Context(), 10*time.Second)
	defer cancel()
	n, err := d.hub.Watch(ctx, run, id, api.Cursor{})
	require.NoError(d.t, err)
	return n.Directive
}

// finish has the run of one node succeed.
func (d *daemon) finish(run, id string) {
	d.t.Helper()
	d.join(run, 1, id)
	lead := d.directive(run, id)
	require.Equal(d.t, job.Lead, lead.Kind)
	require.NoError(d.t, d.hub.Report(d.t.Context(), run, rendezvous.Ready{ID: id, EpochID: lead.EpochID, Port: 1}))
	require.NoError(d.t, d.hub.Report(d.t.Context(), run, rendezvous.Success{ID: id, EpochID: lead.EpochID}))
	require.Equal(d.t, job.Done, d.directive(run, id).Kind)
}

func (d *daemon) leave(run, id string) {
	d.t.Helper()
	_, err := d.hub.Leave(d.t.Context(), run, rendezvous.Leave{ID: id})
	require.NoError(d.t, err)
}

func (d *daemon) settled() {
	d.t.Helper()
	require.Eventually(d.t, func() bool { return d.keep.Stats().Pending == 0 }, 20*time.Second, time.Millisecond)
}

func (d *daemon) remark(run string, lines int) {
	d.t.Helper()
	for range lines {
		require.NoError(d.t, d.hub.Annotate(run, "remark", "", strings.Repeat("x", 5000)))
	}
}

// What a launcher was told of the end of its run, and a user of an order, the next leader knows, whatever the store was
// given since: here, nothing.
func TestNextLeaderKnows(t *testing.T) {
	s := newStore()
	a := s.daemon(t)
	a.keep.patience = time.Minute // however busy this machine is
	a.finish("ended", "n1")
	a.join("paused", 2, "n1")
	require.NoError(t, a.hub.Order("paused", rendezvous.Order{Kind: rendezvous.OrderPause, Text: "lunch"}))
	require.NoError(t, a.hub.Order("paused", rendezvous.Order{Kind: rendezvous.OrderBar, Node: "gpu-07"}))
	s.mu.Lock()
	s.term++ // it is killed: nothing that it writes later counts
	s.mu.Unlock()
	b := s.daemon(t)
	st, err := b.hub.Run("ended")
	require.NoError(t, err)
	require.Equal(t, "succeeded", st.Outcome)
	require.Len(t, st.Ended, 1)
	st, err = b.hub.Run("paused")
	require.NoError(t, err)
	require.Equal(t, "lunch", st.Paused.Text)
	require.Contains(t, st.Bars, "gpu-07")
}

// What ended a world, and which one follows, the next leader knows once the new workers start; and a node that has left
// is not waited for.
func TestNextLeaderKnowsTheWorld(t *testing.T) {
	s := newStore()
	a := s.daemon(t)
	a.keep.patience = time.Minute
	runs := func(id string) rendezvous.Directive {
		lead := a.directive("job", id)
		require.Equal(t, job.Lead, lead.Kind)
		require.NoError(t, a.hub.Report(t.Context(), "job", rendezvous.Ready{ID: id, EpochID: lead.EpochID, Port: 1}))
		require.Equal(t, job.Run, a.directive("job", id).Kind)
		return lead
	}
	a.join("job", 2, "n1", "n2")
	first := runs("n1")
	require.NoError(t, a.hub.Report(t.Context(), "job", rendezvous.Failing{ID: "n2", EpochID: first.EpochID,
		Decision: rendezvous.RestartFree, Failures: []job.Failure{{Text: "boom"}}}))
	for _, id := range []string{"n1", "n2"} {
		require.NoError(t, a.hub.Join(t.Context(), "job", rendezvous.Join{Stopped: first.EpochID,
			Node: rendezvous.Node{ID: id, Name: id, Rank: -1, Slots: 1}, Params: rendezvous.Params{Min: 2, Max: 2}}))
	}
	runs("n1")
	a.leave("job", "n2")
	s.mu.Lock()
	s.term++ // it is killed: nothing that it writes later counts
	s.mu.Unlock()
	b := s.daemon(t)
	proofs, err := b.hub.Evidences("job")
	require.NoError(t, err)
	require.Len(t, proofs, 1)
	require.Equal(t, "boom", proofs[0].Failures[0].Text)
	es, err := b.hub.Events(t.Context(), "job", 0)
	require.NoError(t, err)
	var names []job.Event
	for _, e := range es.Events {
		if e.Event != job.EventCost { // of a restart that takes a millisecond
			names = append(names, e.Event)
		}
	}
	world, exists := b.hub.Kept("job", 0, 0)
	require.True(t, exists)
	require.Equal(t, []string{"n1"}, world.Round.World.Names)
	require.Equal(t, []job.Event{"join", "join", "seal", "run", "break", "seal", "run", "node-leave", "break"}, names)
}

// The timeline and the evidence go on where the last leader was: numbers grow, and nothing is told twice.
func TestTimelineGoesOn(t *testing.T) {
	s := newStore()
	a := s.daemon(t)
	a.finish("job", "n1")
	a.settled()
	before, err := a.hub.Events(t.Context(), "job", 0)
	require.NoError(t, err)
	proofs, err := a.hub.Evidences("job")
	require.NoError(t, err)
	require.Len(t, proofs, 1)
	for range 3 {
		a.close()
		b := s.daemon(t)
		after, err := b.hub.Events(t.Context(), "job", 0)
		require.NoError(t, err)
		require.Equal(t, wire(t, before.Events), wire(t, after.Events))
		require.False(t, after.Dropped)
		again, err := b.hub.Evidences("job")
		require.NoError(t, err)
		require.Equal(t, wire(t, proofs), wire(t, again))
		require.NoError(t, b.hub.Annotate("job", "remark", "", "x"))
		news, err := b.hub.Events(t.Context(), "job", before.Events[len(before.Events)-1].Seq)
		require.NoError(t, err)
		require.Len(t, news.Events, 1)
		require.False(t, news.Dropped)
		before.Events, a = append(before.Events, news.Events...), b
	}
	require.Empty(t, a.log.String())
}

// The store has a bounded part of a timeline, the newest, and says so.
func TestTimelineIsBounded(t *testing.T) {
	s := newStore()
	a := s.daemon(t)
	a.join("job", 2, "n1")
	text := strings.Repeat("x", 5000)
	for i := range 200 {
		require.NoError(t, a.hub.Annotate("job", "remark", fmt.Sprint("n", i), text))
		if i%20 == 0 {
			a.settled()
		}
	}
	a.settled()
	require.Len(t, s.keys(), 1+maxChunks)
	require.NoError(t, lead.Validate(mustLoad(t, s)[:4]))
	a.close()
	b := s.daemon(t)
	got, err := b.hub.Events(t.Context(), "job", 0)
	require.NoError(t, err)
	require.True(t, got.Dropped)
	require.Equal(t, "n199", got.Events[len(got.Events)-1].Node)
	require.Greater(t, len(got.Events), (maxChunks-1)*fullChunk/6000)
	b.keep.maxLines = 5 * fullChunk
	b.join("other", 1, "n1")
	b.settled()
	require.Eventually(t, func() bool { return len(s.keys()) <= 2+6 }, 20*time.Second, time.Millisecond)
	b.close()
	got, err = s.daemon(t).hub.Events(t.Context(), "job", 0)
	require.NoError(t, err)
	require.True(t, got.Dropped)
}

// wire is v as users see it.
func wire(t *testing.T, v any) string {
	t.Helper()
	data, err := json.Marshal(v)
	require.NoError(t, err)
	return string(data)
}

func mustLoad(t *testing.T, s *store) []lead.Record {
	t.Helper()
	all, err := s.Load(t.Context(), s.term)
	require.NoError(t, err)
	return all
}

// A chunk that is damaged is told up to there.
func TestDamagedChunk(t *testing.T) {
	s := newStore()
	a := s.daemon(t)
	a.finish("job", "n1")
	a.close()
	key := chunkKey("job", 1)
	lines := strings.SplitAfter(string(s.records[key]), "\n")
	require.Greater(t, len(lines), 4)
	s.records[key] = []byte(lines[0] + lines[1] + lines[2][:20])
	b := s.daemon(t)
	got, err := b.hub.Events(t.Context(), "job", 0)
	require.NoError(t, err)
	require.Len(t, got.Events, 1)
	require.Contains(t, b.log.String(), key)
}

func TestLargeEvidence(t *testing.T) {
	p := api.Proof{N: 3}
	for range 16 {
		p.Failures = append(p.Failures, job.Failure{Text: strings.Repeat("\x01", 8<<10), Detail: []byte(`"d"`)})
		p.Losses = append(p.Losses, job.Loss{Reason: strings.Repeat("r", 8<<10)})
	}
	p.Cause = &job.Cause{Text: strings.Repeat("\x01", 8<<10)}
	require.LessOrEqual(t, len(encodeProof(p)), maxItem)
	require.Len(t, p.Failures, 16)
	require.NotNil(t, p.Failures[0].Detail, "the run itself is left as it is")
}

// A store that is full gets less of the timelines, down to none of the oldest ones, so that it takes all decisions.
func TestFullStore(t *testing.T) {
	s := newStore()
	s.most = 150_000
	a := s.daemon(t)
	for i := range 10 {
		run := fmt.Sprint("job", i)
		a.join(run, 2, "n1")
		a.remark(run, 6)
		a.settled()
	}
	require.NoError(t, a.hub.Order("job0", rendezvous.Order{Kind: rendezvous.OrderBar, Node: "gpu-07"}))
	a.settled()
	require.Equal(t, 1, strings.Count(a.log.String(), "the store is full"))
	require.NotContains(t, a.log.String(), "cannot be kept")
	require.Zero(t, a.keep.Stats().Failed)
	keys := s.keys()
	require.NotContains(t, keys, chunkKey("job1", 1), "the last chunk of a run goes, too")
	require.Contains(t, keys, chunkKey("job9", 1))
	a.remark("job1", 1)
	a.settled()
	require.Contains(t, s.keys(), chunkKey("job1", 2))
	a.close()
	b := s.daemon(t)
	require.Len(t, b.hub.Runs(false), 10)
	st, err := b.hub.Run("job0")
	require.NoError(t, err)
	require.Contains(t, st.Bars, "gpu-07")
	for run, events := range map[string]int{"job1": 1, "job2": 0} {
		require.NoError(t, b.hub.Annotate(run, "remark", "", "new"))
		got, err := b.hub.Events(t.Context(), run, 0)
		require.NoError(t, err)
		require.True(t, got.Dropped, run)
		require.Len(t, got.Events, events+1)
	}
}

// Runs that have ended leave the store to those that have not: when it is full without any timeline, only their ends
// are kept. What is forgotten makes room again.
func TestFullOfEndedRuns(t *testing.T) {
	s := newStore()
	a := s.daemon(t)
	const count = 20
	for i := range count {
		a.finish(fmt.Sprint("ended", i), "n1")
		a.leave(fmt.Sprint("ended", i), "n1")
	}
	a.join("job", 2, "n1")
	a.settled()
	s.mu.Lock()
	for key, value := range s.records {
		if strings.HasSuffix(key, roundName) {
			s.most += len(value)
		}
	}
	s.most -= 100
	s.mu.Unlock()
	require.NoError(t, a.hub.Order("job", rendezvous.Order{Kind: rendezvous.OrderPause, Text: "lunch"}))
	a.settled()
	require.Zero(t, a.keep.Stats().Failed)
	for i := range count / 2 {
		require.NoError(t, a.hub.Forget(fmt.Sprint("ended", i)))
	}
	a.settled()
	a.remark("job", 1)
	a.settled()
	require.Contains(t, strings.Join(s.keys(), " "), "runs/job"+lineName)
	a.close()
	b := s.daemon(t)
	st, err := b.hub.Run("job")
	require.NoError(t, err)
	require.Equal(t, "lunch", st.Paused.Text)
	st, err = b.hub.Run(fmt.Sprint("ended", count-1))
	require.NoError(t, err)
	require.Equal(t, "succeeded", st.Outcome)
	require.Empty(t, st.Ended)
}

// A store that takes nothing at all is an error as any other, and no reason to try for ever.
func TestStoreWithoutRoom(t *testing.T) {
	s := newStore()
	s.most = 10
	a := s.daemon(t)
	a.join("job", 2, "n1")
	require.Eventually(t, func() bool { return a.keep.Stats().Failed >= 2 }, 20*time.Second, time.Millisecond)
	s.mu.Lock()
	s.most = 0
	s.mu.Unlock()
	a.settled()
}

// slowStore is one in which nothing is written for a long time unless somebody waits for it.
type slowStore struct{ *store }

func (slowStore) Pause() time.Duration { return time.Hour }

// News of many runs wait in a slow store until somebody waits for some, and are then written at once.
func TestSlowStore(t *testing.T) {
	s := newStore()
	k, err := Load(t.Context(), slowStore{s}, s.term, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	k.patience = time.Minute
	a := &daemon{t: t, keep: k, hub: api.NewHub(api.HubConfig{Keep: time.Hour, Keeper: k})}
	k.Follow(a.hub, func(string) []byte { return nil })
	defer a.close()
	for round := range 3 {
		for i := range 10 {
			a.join(fmt.Sprint("job", round, i), 2, "n1")
		}
		signal(k.hurry) // of somebody who has given up, or has been served by the write before
		require.Equal(t, 10, k.Stats().Pending)
		require.NoError(t, a.hub.Order(fmt.Sprint("job", round, 0), rendezvous.Order{Kind: rendezvous.OrderPause}))
		a.settled()
		s.mu.Lock()
		require.Equal(t, round+1, s.appends)
		s.mu.Unlock()
	}
}

// What is known from hangs comes back, and is kept while the next leader learns nothing.
func TestHangs(t *testing.T) {
	s := newStore()
	a := s.daemon(t)
	a.mu.Lock()
	a.hangs = `{"restarts":1}`
	a.mu.Unlock()
	a.join("job", 2, "n1")
	for range 2 {
		a.close()
		a = s.daemon(t)
		require.JSONEq(t, `{"restarts":1}`, string(a.keep.Hangs("job")))
		require.Nil(t, a.keep.Hangs("other"))
		require.NoError(t, a.hub.Annotate("job", "remark", "", "x"))
	}
}

// A run that is forgotten is forgotten in the store, too.
func TestForgottenRun(t *testing.T) {
	s := newStore()
	a := s.daemon(t)
	a.finish("job", "n1")
	a.leave("job", "n1")
	a.settled()
	require.NotEmpty(t, s.keys())
	require.NoError(t, a.hub.Forget("job"))
	a.settled()
	require.Empty(t, s.keys())
	a.finish("job", "n2")
	a.settled()
	require.NotEmpty(t, s.keys())
}

// A run that is opened anew before the store has heard that it was forgotten has nothing of the one before.
// A run is forgotten whose writes have failed, and were carried out all the same: nothing of it stays.
func TestForgottenRunOfLostAnswers(t *testing.T) {
	s := newStore()
	s.lost = errors.New("timeout")
	d := s.daemon(t)
	d.finish("r", "a")
	d.leave("r", "a")
	require.Eventually(t, func() bool { return len(s.keys()) > 1 }, 10*time.Second, time.Millisecond)
	require.NoError(t, d.hub.Forget("r"))
	s.mu.Lock()
	s.lost = nil
	s.mu.Unlock()
	d.settled()
	require.Empty(t, s.keys())
}

func TestForgottenRunIsOpenedAnew(t *testing.T) {
	s := newStore()
	a := s.daemon(t)
	a.hangs = `{"restarts":1}`
	a.finish("job", "n1")
	a.leave("job", "n1")
	a.settled()
	a.mu.Lock()
	a.hangs = ""
	a.mu.Unlock()
	s.fail(errors.New("no quorum"))
	require.NoError(t, a.hub.Forget("job"))
	a.finish("job", "n2")
	s.fail(nil)
	a.settled()
	events, err := a.hub.Events(t.Context(), "job", 0)
	require.NoError(t, err)
	proofs, err := a.hub.Evidences("job")
	require.NoError(t, err)
	a.close()
	b := s.daemon(t)
	got, err := b.hub.Events(t.Context(), "job", 0)
	require.NoError(t, err)
	require.Equal(t, wire(t, events.Events), wire(t, got.Events))
	again, err := b.hub.Evidences("job")
	require.NoError(t, err)
	require.Equal(t, wire(t, proofs), wire(t, again))
	require.Nil(t, b.keep.Hangs("job"))
	require.NotContains(t, s.keys(), chunkKey("job", 1))
}

// A closed Hub's runs are not forgotten, and what nobody waited for is written at the end.
func TestCloseKeeps(t *testing.T) {
	s := newStore()
	a := s.daemon(t)
	a.join("job", 2, "n1")
	a.close()
	b := s.daemon(t)
	_, err := b.hub.Run("job")
	require.NoError(t, err)
	require.Empty(t, a.log.String())
}

// While the store is away, nobody waits for long, one line tells it, and all is written when it is back.
func TestStoreIsAway(t *testing.T) {
	s := newStore()
	s.fail(errors.New("no quorum"))
	a := s.daemon(t)
	a.join("job", 2, "n1")
	began := time.Now()
	for range 100 {
		require.NoError(t, a.hub.Order("job", rendezvous.Order{Kind: rendezvous.OrderBar, Node: "x"}))
	}
	require.Less(t, time.Since(began), 5*time.Second, "only the first one may wait")
	require.Eventually(t, func() bool { return a.keep.Stats().Failed >= 2 }, 20*time.Second, time.Millisecond)
	require.Equal(t, 1, a.keep.Stats().Pending)
	s.fail(nil)
	a.settled()
	a.close()
	require.Equal(t, 1, strings.Count(a.log.String(), "cannot be kept"))
	require.Equal(t, 1, strings.Count(a.log.String(), "kept again"))
	st, err := s.daemon(t).hub.Run("job")
	require.NoError(t, err)
	require.Contains(t, st.Bars, "x")
}

// A store that does not answer costs an order its patience, and launchers that only wait nothing.
func TestStoreBlocks(t *testing.T) {
	s := newStore()
	s.block = make(chan struct{})
	a := s.daemon(t)
	began := time.Now()
	a.finish("job", "n1")
	require.Less(t, time.Since(began), 4*time.Second)
	close(s.block)
	a.settled()
}

// A leader that is deposed writes nothing more, lets nobody wait, and answers nothing that another one has to decide.
func TestDeposed(t *testing.T) {
	s := newStore()
	a := s.daemon(t)
	s.mu.Lock()
	s.term++
	s.mu.Unlock()
	a.join("job", 2, "n1")
	require.Eventually(t, func() bool {
		a.keep.mu.Lock()
		defer a.keep.mu.Unlock()
		return a.keep.over
	}, 20*time.Second, time.Millisecond)
	require.ErrorIs(t, a.hub.Order("job", rendezvous.Order{Kind: rendezvous.OrderPause}), api.ErrClosed)
	require.Empty(t, s.keys())
	require.Empty(t, a.log.String())
	_, err := Load(t.Context(), s, 1, slog.Default())
	require.ErrorIs(t, err, lead.ErrDeposed)
}

// Records that cannot be used are named and left alone; the others count.
func TestUnusableRecords(t *testing.T) {
	s := newStore()
	a := s.daemon(t)
	a.finish("good", "n1")
	a.close()
	s.records["runs/bad/round"] = []byte(`{"version":1,"run":"bad","kept":`)
	s.records["runs/new/round"] = []byte(`{"version":2,"run":"new","kept":[1]}`)
	s.records["runs/other/round"] = []byte(`{"version":1,"run":"another"}`)
	s.records["nodes/x"] = []byte(`?`)
	b := s.daemon(t)
	runs := b.hub.Runs(false)
	require.Len(t, runs, 1)
	require.Equal(t, "good", runs[0].Run)
	require.Equal(t, 3, strings.Count(b.log.String(), "cannot be used"))
	require.Contains(t, b.log.String(), "version 2")
	require.Contains(t, s.keys(), "runs/new/round")
}

func TestKeysOfRuns(t *testing.T) {
	long := strings.Repeat("é", 200)
	for run, want := range map[string]string{
		"job-1.a": "job-1.a", "a/b_c": "a_2fb_5fc", "": "", "é": "_c3_a9",
	} {
		require.Equal(t, want, escape(run))
	}
	require.NotEqual(t, escape(long), escape(long+"a"))
	require.NoError(t, lead.Validate([]lead.Record{{Key: roundKey(long)}}))
}

// A record is never larger than a store takes.
func TestLargeRecords(t *testing.T) {
	k := rendezvous.Kept{Bars: map[string]job.Cause{}, Works: []string{"a", "b"}, Passes: map[string]rendezvous.KeptPass{}}
	for i := range 512 {
		k.Passes[strings.Repeat("i", 400)+fmt.Sprint(i)] = rendezvous.KeptPass{}
	}
	for i := range 100 {
		k.Bars[fmt.Sprint(i)] = job.Cause{Text: strings.Repeat("x", 1000)}
	}
	k.End = &rendezvous.KeptEnd{Evidence: job.Evidence{Failures: []job.Failure{
		{Text: strings.Repeat("y", 5000), Detail: []byte(`"` + strings.Repeat("z", 90_000) + `"`)}}}}
	data, err := encode(loaded{Kept: k})
	require.NoError(t, err)
	require.LessOrEqual(t, len(data), lead.MaxValue)
	require.Contains(t, string(data), `"99":`)
	require.Len(t, k.End.Evidence.Failures[0].Text, 5000, "the run itself is left as it is")
	for i := range 4000 {
		k.Bars[fmt.Sprint(i)] = job.Cause{Text: "x"}
	}
	_, err = encode(loaded{Kept: k})
	require.ErrorContains(t, err, "unbar some nodes")
}
