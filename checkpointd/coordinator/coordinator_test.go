package coordinator

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/fsx"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func entry(shard int) commit.Entry {
	return commit.Entry{Shard: shard, Files: []commit.FileEntry{{Path: fmt.Sprintf("20/rank_%d.pt", shard), Size: 10,
		CRC: 7, Shard: shard, Tmp: "t"}}}
}

func report(s Save, p Phase, shards ...int) Report {
	r := Report{Save: s, Phase: p, Shards: shards}
	if p == Prepared {
		for _, n := range shards {
			r.Entries = append(r.Entries, entry(n))
		}
	}
	if p == Failed {
		r.Error = "disk full"
	}
	return r
}

// world is the coordinators of two nodes, which write shards 0 and 1.
type world struct {
	t            *testing.T
	coordinators [2]Coordinator
	save         Save
	store        bool // a poster leaves the files that commit.Store would
}

func newWorld(t *testing.T, coordinators [2]Coordinator) world {
	return world{t: t, coordinators: coordinators,
		save: Save{ID: "0123456789abcdef", Step: 20, Shards: 2, Dir: t.TempDir()}}
}

// worlds are all implementations of Coordinator.
var worlds = map[string]func(*testing.T) world{
	"local": func(t *testing.T) world { b := Local(0); return newWorld(t, [2]Coordinator{b, b}) },
	"markers": func(t *testing.T) world {
		w := newWorld(t, [2]Coordinator{Files(fsx.OS{}), Files(fsx.OS{})})
		w.store = true
		return w
	},
	"http": func(t *testing.T) world {
		hub := NewHub()
		s := httptest.NewServer(hub.Handler())
		transport := &http.Transport{}
		t.Cleanup(func() { hub.Close(); transport.CloseIdleConnections(); s.Close() })
		hc := &http.Client{Transport: transport}
		token := func() []string { return []string{"token"} }
		return newWorld(t, [2]Coordinator{Client(s.URL, "a run", token, hc), Client(s.URL+"/", "a run", token, hc)})
	},
}

type result struct {
	entries []commit.Entry
	err     error
}

// post posts for the node that writes the shard, and leaves the files of the phase first.
func (w world) post(p Phase, shard int) <-chan result {
	if w.store {
		w.leave(p, shard)
	}
	return posting(w.t.Context(), w.coordinators[shard], report(w.save, p, shard))
}

func posting(ctx context.Context, b Coordinator, r Report) <-chan result {
	done := make(chan result, 1)
	go func() {
		es, err := b.Post(ctx, r)
		done <- result{es, err}
	}()
	return done
}

// leave writes the file of a phase.
func (w world) leave(p Phase, shard int) {
	stage := commit.StageDir(w.save.Dir, w.save.ID)
	require.NoError(w.t, os.MkdirAll(stage, 0o755))
	write := func(path string, content any) {
		data, err := json.Marshal(content)
		require.NoError(w.t, err)
		require.NoError(w.t, fsx.OS{}.WriteFile(path, data))
	}
	switch p {
	case Prepared:
		write(filepath.Join(stage, marker(shard, "prepared")), entry(shard))
	case Intent:
		write(filepath.Join(stage, "intent"), nil)
	case Placed:
		write(filepath.Join(stage, marker(shard, "placed")), nil)
	case Published:
		write(filepath.Join(w.save.Dir, ".dlrover", "20.json"), map[string]any{"version": 1, "save": w.save.ID})
		require.NoError(w.t, os.RemoveAll(stage))
	}
}

func (w world) now(p Phase, shard int) []commit.Entry {
	w.t.Helper()
	r := <-w.post(p, shard)
	require.NoError(w.t, r.err)
	return r.entries
}

func (w world) waits(done <-chan result) {
	w.t.Helper()
	select {
	case r := <-done:
		require.Fail(w.t, "went on too early", "%v", r)
	default:
	}
}

// prepare brings the save to where the leader may write the intent.
func (w world) prepare() (follower <-chan result) {
	w.t.Helper()
	follower = w.post(Prepared, 1)
	require.Equal(w.t, []commit.Entry{entry(0), entry(1)}, w.now(Prepared, 0))
	w.waits(follower)
	return follower
}

// finish brings a prepared save to its end.
func (w world) finish(follower <-chan result) {
	w.t.Helper()
	require.Empty(w.t, w.now(Intent, 0))
	r := <-follower
	require.NoError(w.t, r.err)
	require.Empty(w.t, r.entries, "for the leader only")
	leader := w.post(Placed, 0)
	w.waits(leader)
	follower = w.post(Placed, 1)
	require.NoError(w.t, (<-leader).err)
	w.waits(follower)
	w.now(Published, 0)
	require.NoError(w.t, (<-follower).err)
}

// Every Coordinator obeys the same contract.
func TestCoordinators(t *testing.T) {
	for name, open := range worlds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for name, test := range contract {
				t.Run(name, func(t *testing.T) { t.Parallel(); test(open(t)) })
			}
		})
	}
}

var contract = map[string]func(world){
	"commit": func(w world) {
		w.finish(w.prepare())
	},
	"a report may be repeated": func(w world) {
		follower := w.prepare()
		require.Equal(w.t, []commit.Entry{entry(0), entry(1)}, w.now(Prepared, 0))
		again := w.post(Prepared, 1)
		w.now(Intent, 0)
		w.now(Intent, 0)
		require.NoError(w.t, (<-follower).err)
		require.NoError(w.t, (<-again).err)
		follower = w.post(Placed, 1)
		again = w.post(Placed, 1)
		w.now(Placed, 0)
		w.now(Placed, 0)
		w.now(Published, 0)
		require.NoError(w.t, (<-follower).err)
		require.NoError(w.t, (<-again).err)
	},
	"a failure before": func(w world) {
		w.now(Failed, 1)
		r := <-w.post(Prepared, 0)
		require.ErrorIs(w.t, r.err, ErrAborted)
		require.ErrorContains(w.t, r.err, "shard 1: disk full")
	},
	"a failure while the leader waits": func(w world) {
		leader := w.post(Prepared, 0)
		w.now(Failed, 1)
		require.ErrorIs(w.t, (<-leader).err, ErrAborted)
	},
	"a failure of the leader": func(w world) {
		follower := w.prepare()
		w.now(Failed, 0)
		r := <-follower
		require.ErrorIs(w.t, r.err, ErrAborted)
		require.ErrorContains(w.t, r.err, "shard 0: disk full")
	},
	"a failure that comes too late": func(w world) {
		w.prepare()
		require.ErrorIs(w.t, (<-w.post(Failed, 1)).err, ErrDecided)
	},
	"a failure after the intent": func(w world) {
		follower := w.prepare()
		w.now(Intent, 0)
		require.NoError(w.t, (<-follower).err)
		leader := w.post(Placed, 0)
		require.ErrorIs(w.t, (<-w.post(Failed, 1)).err, ErrDecided)
		r := <-leader
		require.ErrorIs(w.t, r.err, ErrStalled)
		require.ErrorContains(w.t, r.err, "disk full")
	},
	"another attempt": func(w world) {
		leader := w.post(Prepared, 0)
		w.now(Failed, 1)
		require.ErrorIs(w.t, (<-leader).err, ErrAborted)
		if w.store {
			require.NoError(w.t, os.Remove(filepath.Join(commit.StageDir(w.save.Dir, w.save.ID),
				marker(0, "prepared"))))
		}
		follower := w.post(Prepared, 1)
		w.waits(follower)
		leader = w.post(Prepared, 0)
		if r := <-leader; r.err != nil { // the follower had not taken it back yet
			require.ErrorIs(w.t, r.err, ErrAborted)
			require.Eventually(w.t, func() bool { return (<-w.post(Prepared, 0)).err == nil }, 5*time.Second,
				time.Millisecond)
		}
		w.finish(follower)
	},
	"a save that is committed": func(w world) {
		w.finish(w.prepare())
		if w.store {
			r := <-posting(w.t.Context(), w.coordinators[1], report(w.save, Prepared, 1))
			require.ErrorIs(w.t, r.err, ErrCommitted)
			return
		}
		require.ErrorIs(w.t, (<-w.post(Prepared, 1)).err, ErrCommitted)
		w.now(Placed, 1)
	},
	"patience ends": func(w world) {
		ctx, cancel := context.WithTimeout(w.t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err := w.coordinators[1].Post(ctx, report(w.save, Prepared, 1))
		require.ErrorIs(w.t, err, context.DeadlineExceeded)
		require.ErrorContains(w.t, err, w.save.ID)
	},
	"reports that make no sense": func(w world) {
		s := w.save
		for name, r := range map[string]Report{
			"no id":           report(Save{Step: 1, Shards: 2, Dir: s.Dir}, Prepared, 1),
			"a path as id":    report(Save{ID: "../x", Step: 1, Shards: 2, Dir: s.Dir}, Prepared, 1),
			"no shards":       report(Save{ID: "x", Step: 1, Dir: s.Dir}, Prepared, 1),
			"too many shards": report(Save{ID: "x", Shards: maxShards + 1, Dir: s.Dir}, Prepared, 1),
			"a relative dir":  report(Save{ID: "x", Shards: 2, Dir: "x"}, Prepared, 1),
			"no such shard":   report(s, Placed, 2),
			"no shard":        report(s, Placed),
			"no such phase":   report(s, "done", 1),
			"not the leader":  report(s, Intent, 1),
			"no entry":        {Save: s, Phase: Prepared, Shards: []int{1}},
			"a foreign entry": {Save: s, Phase: Prepared, Shards: []int{1}, Entries: []commit.Entry{entry(0)}},
			"an entry too many": {Save: s, Phase: Prepared, Shards: []int{1},
				Entries: []commit.Entry{entry(1), entry(1)}},
		} {
			_, err := w.coordinators[1].Post(w.t.Context(), r)
			require.Error(w.t, err, name)
			if r.Save.Shards > maxShards {
				require.ErrorIs(w.t, err, ErrLimit, name)
			} else {
				require.ErrorIs(w.t, err, errBadRequest, name)
			}
		}
	},
	"alone": func(w world) {
		saved := time.Unix(1000, 0)
		hs := []Holding{{Save: "s", Dir: "/d", Step: 5, Saved: saved, Shard: 0, Shards: 1},
			{Save: "old", Dir: "/d", Step: 4, Saved: saved.Add(-time.Second), Shards: 1}}
		p, ok, err := w.coordinators[0].Agree(w.t.Context(), "k", 0, 1, hs, time.Minute)
		require.NoError(w.t, err)
		require.True(w.t, ok)
		require.Equal(w.t, Plan{Save: "s", Dir: "/d", Step: 5, Mine: []int{0}, Leader: true}, p)
		_, ok, err = w.coordinators[0].Agree(w.t.Context(), "k2", 0, 1, nil, time.Minute)
		require.NoError(w.t, err)
		require.False(w.t, ok)
		self := Peer{Node: 0, Addr: "10.0.0.1:1", Copies: []Copy{{Rank: 3, Save: "s"}}}
		ps, err := w.coordinators[0].Peers(w.t.Context(), "k", self, 1, time.Minute)
		require.NoError(w.t, err)
		require.Equal(w.t, []Peer{self}, ps)
		require.NoError(w.t, w.coordinators[0].Ages(w.t.Context(), "", 0, []Age{{Rank: 1, MemoryStep: 3}}))
	},
}

// The files of a real store are those that Files waits for, from the first to the last.
func TestFilesWithAStore(t *testing.T) {
	dir := t.TempDir()
	store := commit.Store{FS: fsx.OS{}, Now: time.Now}
	s := commit.Save{ID: "feed", Dir: dir, Step: 7, Shards: 2, WorldSize: 2, Saved: time.Now()}
	done := make(chan error, 2)
	for shard := range 2 {
		go func() { done <- commitShard(t.Context(), Files(fsx.OS{}), store, s, shard) }()
	}
	require.NoError(t, <-done)
	require.NoError(t, <-done)
	step, ok := store.Tracked(dir)
	require.True(t, ok)
	require.EqualValues(t, 7, step)
	m, _, err := store.Newest(t.Context(), dir, nil)
	require.NoError(t, err)
	require.Equal(t, "feed", m.ID)
	require.NoDirExists(t, commit.StageDir(dir, "feed"))
}

func commitShard(ctx context.Context, b Coordinator, store commit.Store, s commit.Save, shard int) error {
	path := fmt.Sprintf("7/rank_%d.pt", shard)
	tmps, err := store.Plan(s, shard, []string{path})
	if err != nil {
		return err
	}
	if err := os.WriteFile(tmps[0], nil, 0o644); err != nil {
		return err
	}
	e := commit.Entry{Shard: shard, Files: []commit.FileEntry{{Path: path, Shard: shard, Tmp: tmps[0]}}}
	if err := store.Prepared(s, e); err != nil {
		return err
	}
	post := func(p Phase) ([]commit.Entry, error) {
		return b.Post(ctx, Report{Save: Save{s.ID, s.Step, s.Shards, s.Dir}, Phase: p, Shards: []int{shard},
			Entries: []commit.Entry{e}})
	}
	all, err := post(Prepared)
	if err == nil && shard == 0 {
		err = store.Intent(s, all)
	}
	if err == nil {
		err = store.Place(s, e)
	}
	if err == nil {
		err = store.Placed(s, shard)
	}
	if err == nil {
		_, err = post(Placed)
	}
	if err == nil && shard == 0 {
		_, err = store.Publish(s, all)
	}
	return err
}
