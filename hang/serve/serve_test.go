package serve

import (
	"iter"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/internal/job"
	"dlrover-run/internal/runhost"
)

// live is nodes that have hung since the start, and answer what a Hub asks.
func (r *rdzv) live(t *testing.T, h *Hub, until time.Duration) {
	began := time.Now()
	report := func(node int, ask uint64) {
		rep := r.suspicion(node, time.Since(began))
		if rep.Ask = ask; ask > 0 {
			rep.Evidence = evidence(node, time.Since(began))
		}
		_, err := h.Post(t.Context(), "r", rep)
		require.NoError(t, err)
	}
	time.Sleep(12 * time.Second)
	for i := range r.nodes {
		report(i, 0)
	}
	for end := time.After(until - 12*time.Second); ; {
		select {
		case a := <-r.asks:
			if a.What == hang.AskEvidence {
				time.Sleep(5 * time.Second)
			}
			if a.What == hang.AskEvidence || a.What == hang.AskPages {
				for i := range r.nodes {
					report(i, a.Seq)
				}
			}
		case <-end:
			return
		}
	}
}

func TestHangIsJudgedAndEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRdzv(hang.ActRestart, 3)
		h := New(r.config())
		defer h.Close()
		r.live(t, h, 30*time.Second)
		synctest.Wait()
		const line = "rank 1 (node 0 n0) hung for 22 s: asleep"
		require.Equal(t, []hang.Order{{Action: hang.ActRestart, Epoch: r.epoch, Text: line}}, r.orders)
		require.Equal(t, job.EventHangSuspected, r.notes[0].Event)
		require.Equal(t, job.Note{Event: "hang-verdict", Node: "n0", Text: line}, r.notes[1])
		require.Equal(t, 1, r.worlds, "the world is fetched once")

		require.Equal(t, 1, h.Standing())
		h.Ended("r", r.epoch)
		synctest.Wait()
		require.Zero(t, h.Standing())
		p, err := h.Picture(t.Context(), "r", true)
		require.NoError(t, err)
		require.Equal(t, hang.StateIdle, p.State)
		require.Len(t, p.Evidence, 6)
		_, err = h.Post(t.Context(), "r", r.suspicion(1, time.Minute))
		require.ErrorIs(t, err, ErrNotMember, "the epoch is over, though the rendezvous still says that it runs")

		s := h.Stats()
		require.Equal(t, 1, s.Suspicions)
		require.Equal(t, 1, s.Verdicts[hang.KindBehind])
		require.Equal(t, 1, s.Orders[hang.ActRestart])
		require.Equal(t, 9, s.Reports)
		require.Positive(t, s.Held)
		time.Sleep(11 * time.Minute)
		require.Zero(t, h.Stats().Held, "evidence is kept for ten minutes")
		h.Forget("r")
	})
}

func TestNextEpochIsAnotherIncident(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRdzv(hang.ActRestart, 1)
		h := New(r.config())
		defer h.Close()
		_, err := h.Post(t.Context(), "r", r.suspicion(0, 12*time.Second))
		require.NoError(t, err)
		old := r.epoch
		r.epoch.Epoch++
		_, err = h.Post(t.Context(), "r", hang.Report{ID: id(0), Epoch: old})
		require.ErrorIs(t, err, ErrNotMember)
		_, err = h.Post(t.Context(), "r", hang.Report{ID: id(0), Epoch: r.epoch})
		require.NoError(t, err)
		p, err := h.Picture(t.Context(), "r", false)
		require.NoError(t, err)
		require.Equal(t, hang.StateIdle, p.State)
		require.Zero(t, p.Suspecting)
		h.Ended("r", old) // it comes late
		synctest.Wait()
		_, err = h.Post(t.Context(), "r", r.suspicion(0, time.Second))
		require.NoError(t, err)
	})
}

func TestWhoMayReport(t *testing.T) {
	r := newRdzv(hang.ActReport, 2)
	h := New(r.config())
	post := func(run, who string, e job.EpochID) error {
		_, err := h.Post(t.Context(), run, hang.Report{ID: who, Epoch: e})
		return err
	}
	require.ErrorIs(t, post("r", "id9", r.epoch), ErrNotMember)
	require.ErrorIs(t, post("r", "", r.epoch), ErrNotMember)
	require.ErrorIs(t, post("other", id(0), r.epoch), ErrNotMember)
	require.ErrorIs(t, post("r", id(0), job.EpochID{Term: 7, Round: 2}), ErrNotMember)
	r.running = false
	require.ErrorIs(t, post("r", id(0), r.epoch), ErrNotMember)
	_, err := h.Collect(t.Context(), "r")
	require.ErrorIs(t, err, ErrNotMember)
	require.Empty(t, h.runs.All(), "who may not report leaves nothing behind")
	_, err = h.Picture(t.Context(), "r", false)
	require.ErrorIs(t, err, ErrUnknownRun)
	r.running = true
	require.NoError(t, post("r", id(0), r.epoch))
	h.Close()
	require.ErrorIs(t, post("r", id(0), r.epoch), errClosed)
	_, err = h.Picture(t.Context(), "r", false)
	require.ErrorIs(t, err, errClosed)
	h.Ended("r", r.epoch)
	h.Forget("r")
	_, err = h.Picture(t.Context(), "r", false)
	require.ErrorIs(t, err, errClosed)
}

// A notice may be lost; whoever reports is asked by the answer.
func TestWhoHasMissedTheNoticeIsAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRdzv(hang.ActReport, 2)
		h := New(r.config())
		defer h.Close()
		a, err := h.Post(t.Context(), "r", r.suspicion(0, 12*time.Second))
		require.NoError(t, err)
		require.Equal(t, hang.AskEvidence, a.What)
		rep := r.suspicion(0, 13*time.Second)
		rep.Ask, rep.Evidence = a.Seq, evidence(0, 1)
		a, err = h.Post(t.Context(), "r", rep)
		require.NoError(t, err)
		require.Zero(t, a)
		a, err = h.Post(t.Context(), "r", hang.Report{ID: id(1), Epoch: r.epoch, Summary: &hang.Summary{}})
		require.NoError(t, err)
		require.Equal(t, hang.AskEvidence, a.What)
	})
}

func TestCollectStacks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRdzv(hang.ActReport, 2)
		h := New(r.config())
		defer h.Close()
		answer := func(seq uint64) {
			for i := range 2 {
				rep := hang.Report{ID: id(i), Epoch: r.epoch, Ask: seq, Evidence: evidence(i, 1)}
				_, err := h.Post(t.Context(), "r", rep)
				require.NoError(t, err)
			}
		}
		seq, err := h.Collect(t.Context(), "r")
		require.NoError(t, err)
		a := <-r.asks
		require.Equal(t, hang.Ask{Seq: seq, Judge: a.Judge, Incident: a.Incident, Epoch: r.epoch, What: hang.AskStacks}, a)
		require.NotZero(t, a.Judge)
		answer(seq)
		p, err := h.Picture(t.Context(), "r", true)
		require.NoError(t, err)
		require.True(t, p.Collected)
		require.Len(t, p.Evidence, 4)
		require.Empty(t, r.notes)
		for range 50 {
			if seq, err = h.Collect(t.Context(), "r"); err != nil {
				break
			}
			answer(seq)
			time.Sleep(6 * time.Second)
		}
		require.ErrorIs(t, err, errBusy)
	})
}

func TestJudgeThatFailsEndsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRdzv(hang.ActStop, 2)
		cfg := r.config()
		cfg.judge = func(hang.World, iter.Seq[hang.Evidence], []hang.StoreWait) hang.Verdict { panic("unthought of") }
		h := New(cfg)
		defer h.Close()
		r.live(t, h, 2*time.Minute)
		require.Empty(t, r.orders)
	})
}

func TestForgottenRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRdzv(hang.ActReport, 1)
		kept := true
		cfg := r.config()
		cfg.Keep = func(run string) bool { return kept }
		h := New(cfg)
		defer h.Close()
		_, err := h.Post(t.Context(), "r", r.suspicion(0, time.Second))
		require.NoError(t, err)
		time.Sleep(retention + time.Second)
		h.runs.Prune(time.Now(), false, cfg.Keep)
		require.Len(t, h.runs.All(), 1, "the rendezvous knows it")
		kept = false
		time.Sleep(time.Minute + time.Second)
		h.runs.Prune(time.Now(), false, cfg.Keep)
		require.Empty(t, h.runs.All())
	})
}

func TestRunsAreBounded(t *testing.T) {
	cfg := newRdzv(hang.ActReport, 1).config()
	cfg.Spec = func(string) (hang.Spec, error) { return hang.Spec{Action: hang.ActReport}, nil }
	h := New(cfg)
	defer h.Close()
	for i := range runhost.MaxRuns {
		_, err := h.open(id(i))
		require.NoError(t, err)
	}
	_, err := h.open("one more")
	require.ErrorIs(t, err, errLimit)
}

// A Spec of another version is no reason to say nothing: it is logged once, and the launcher hears of it.
func TestASpecThatCannotBeRead(t *testing.T) {
	var out strings.Builder
	r := newRdzv(hang.ActReport, 1)
	cfg := r.config()
	cfg.Log = slog.New(slog.NewTextHandler(&out, nil))
	cfg.Spec = func(string) (hang.Spec, error) { return hang.ParseSpec("action=report sooner=1s") }
	h := New(cfg)
	defer h.Close()
	for range 3 {
		_, err := h.Post(t.Context(), "r", r.suspicion(0, 12*time.Second))
		require.ErrorIs(t, err, ErrBadRequest)
		require.ErrorContains(t, err, `"sooner=1s" is unknown here`)
	}
	require.Equal(t, 1, strings.Count(out.String(), "level=WARN"), out.String())
	h.Forget("r")
	require.Empty(t, h.unread)
	cfg.Spec = func(string) (hang.Spec, error) { return hang.Spec{}, errNobody }
	_, err := New(cfg).Post(t.Context(), "r", r.suspicion(0, 12*time.Second))
	require.ErrorIs(t, err, ErrNotMember)
	require.Equal(t, 1, strings.Count(out.String(), "level=WARN"))
}

// Whoever comes beyond the bounds is taken without stacks, and then without evidence.
func TestHeldEvidenceIsBounded(t *testing.T) {
	body := func(node int, ask uint64) []byte {
		es := evidence(node, 1)
		es[0].Stacks = &hang.Stacks{Interpreter: name(node), Threads: []hang.Thread{{Python: frames("f", 200)}}}
		rep := newRdzv(hang.ActReport, 100).suspicion(node, 12*time.Second)
		rep.Ask, rep.Evidence = ask, es
		data, _, err := encode(rep)
		require.NoError(t, err)
		return data
	}
	synctest.Test(t, func(t *testing.T) {
		r := newRdzv(hang.ActReport, 100)
		cfg := r.config()
		cfg.maxRunHeld = 200 << 10
		h := New(cfg)
		defer h.Close()
		ask, err := h.Post(t.Context(), "r", r.suspicion(0, 12*time.Second))
		require.NoError(t, err)
		for i := range r.nodes {
			p, err := decode(body(i, ask.Seq), "gzip")
			require.NoError(t, err)
			_, err = h.take("r", id(i), p)
			require.NoError(t, err)
			require.LessOrEqual(t, h.Stats().Held, cfg.maxRunHeld)
		}
		p, err := h.Picture(t.Context(), "r", true)
		require.NoError(t, err)
		with, bare := 0, 0
		for _, e := range p.Evidence {
			if e.Stacks != nil {
				with++
			} else if bare++; e.Samples != nil {
				require.Equal(t, "the service keeps too many stacks", e.Error)
			}
		}
		require.Greater(t, with, 10)
		require.Greater(t, bare, 10)
		require.Equal(t, r.nodes, p.Answered)
	})
}

func TestManyNodesAtOnce(t *testing.T) {
	r := newRdzv(hang.ActReport, 64)
	h := New(r.config())
	defer h.Close()
	var wg sync.WaitGroup
	for i := range r.nodes {
		wg.Go(func() {
			for range 20 {
				a, err := h.Post(t.Context(), "r", r.suspicion(i, 12*time.Second))
				if err == nil && a.Seq > 0 {
					rep := r.suspicion(i, 12*time.Second)
					rep.Ask, rep.Evidence = a.Seq, evidence(i, 1)
					_, err = h.Post(t.Context(), "r", rep)
				}
				if err != nil {
					t.Error(err)
				}
				_, _ = h.Picture(t.Context(), "r", true)
			}
		})
	}
	wg.Wait()
	require.Equal(t, 1, r.worlds)
	p, err := h.Picture(t.Context(), "r", true)
	require.NoError(t, err)
	require.Len(t, p.Evidence, 128)
}
