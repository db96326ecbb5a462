package service

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	hangs "dlrover-run/hang/serve"
	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// trainer is one of some nodes whose workers all hang, because rank 1 sleeps.
type trainer struct {
	t     *testing.T
	s     *Service
	id    string
	seat  rendezvous.Seat
	began time.Time
	lines []string // that it has been told
}

func (n *trainer) report(ask uint64) {
	age := time.Since(n.began)
	r := hang.Report{
		ID: n.id, Epoch: n.seat.EpochID, Ask: ask,
		Suspicions: []hang.Suspicion{{Rank: n.seat.GroupRank, Age: age, Limit: 10 * time.Second, Why: "no step"}},
	}
	if ask > 0 {
		w := hang.Worker{Rank: n.seat.GroupRank, PID: 100, Start: 1}
		page := &hang.Page{PID: 100, Start: 1, Rank: w.Rank, WorldSize: 2, Steps: 9, LastStep: time.Second,
			Groups: []hang.GroupState{{ID: 5, Seq: 246, Since: time.Second}}, Heartbeat: age}
		stack := hang.Frame{Func: "all_reduce", File: "torch/distributed/distributed_c10d.py", Line: 7}
		if w.Rank == 1 {
			page.Groups[0].Seq = 245
			stack = hang.Frame{Func: "load_batch", File: "/job/data.py", Line: 12}
		}
		e := hang.Evidence{
			Worker: w, Groups: []hang.Group{{ID: 5, Name: "0", Backend: "gloo", Ranks: "0-1"}},
			Stacks: &hang.Stacks{Threads: []hang.Thread{{Main: true, State: 'S', Python: []hang.Frame{stack}}}},
		}
		for i := range 3 {
			at := age + time.Duration(i)*2*time.Second
			p := *page
			p.Heartbeat = at
			e.Samples = append(e.Samples, hang.Sample{Worker: w, At: at, Page: &p, Proc: hang.Proc{State: 'S', Threads: 1}})
		}
		r.Evidence = []hang.Evidence{e}
	}
	_, _ = n.s.Hangs.Post(n.t.Context(), "r", r) // of an epoch that has ended nothing is taken
}

// follow answers what comes by notices until the node is told to stop, which it returns.
func (n *trainer) follow(ctx context.Context) rendezvous.Directive {
	var c api.Cursor
	c.WithNotices = true
	for ctx.Err() == nil {
		news, err := n.s.Hub.Watch(ctx, "r", n.id, c)
		if err != nil {
			continue
		}
		c.Directive, c.Notices = news.Seq, news.NoticeSeq
		for _, notice := range news.Notices {
			var a hang.Ask
			require.NoError(n.t, json.Unmarshal([]byte(notice.Body), &a))
			switch a.What {
			case hang.AskEvidence, hang.AskPages:
				n.report(a.Seq)
			default:
				n.lines = append(n.lines, fmt.Sprintf("%s: %s", a.What, a.Line))
			}
		}
		if news.Kind == job.Stop || news.Kind == job.Fail {
			return news.Directive
		}
	}
	return rendezvous.Directive{}
}

// training is a run of two nodes whose workers run.
func training(t *testing.T, s *Service, p rendezvous.Params) (ns []*trainer) {
	ids := []string{"n0", "n1"}
	for i, id := range ids {
		j := joining(id, fmt.Sprintf("10.0.0.%d", i+1))
		j.Params, j.Node.Can = p, []rendezvous.Ability{rendezvous.CanNotice, rendezvous.CanGate}
		require.NoError(t, s.Hub.Join(t.Context(), "r", j))
	}
	ready(t, s)
	for _, id := range ids {
		seat, err := s.Hub.Seat("r", id)
		require.NoError(t, err)
		require.True(t, seat.Running)
		ns = append(ns, &trainer{t: t, s: s, id: id, seat: seat, began: time.Now()})
	}
	return ns
}

// ready says that the leader's store is, whoever that is.
func ready(t *testing.T, s *Service) {
	for _, id := range []string{"n0", "n1"} {
		seat, err := s.Hub.Seat("r", id)
		require.NoError(t, err)
		require.NoError(t, s.Hub.Report(t.Context(), "r", rendezvous.Ready{ID: id, EpochID: seat.EpochID, Addr: "10.0.0.1"}))
	}
}

func hangParams(a hang.Action) rendezvous.Params {
	return rendezvous.Params{Min: 2, Max: 2, MaxRestarts: 1, Hang: hang.Spec{Action: a, After: 20 * time.Second}.String()}
}

func TestHangEndsTheEpoch(t *testing.T) {
	for action, want := range map[hang.Action]job.Kind{
		hang.ActRestart: job.Stop, hang.ActStop: job.Fail, hang.ActReport: "",
	} {
		t.Run(string(action), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newService(t)
				ns := training(t, s, hangParams(action))
				ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
				defer cancel()
				dirs := make([]rendezvous.Directive, 2)
				var wg sync.WaitGroup
				for i, n := range ns {
					wg.Go(func() { dirs[i] = n.follow(ctx) })
				}
				time.Sleep(12 * time.Second)
				for _, n := range ns {
					n.report(0)
				}
				time.Sleep(10 * time.Second)
				for _, n := range ns {
					n.report(0)
				}
				wg.Wait()
				for i, n := range ns {
					require.Equal(t, want, dirs[i].Kind)
					require.NotEmpty(t, n.lines)
					require.Regexp(t, `^verdict: rank 1 \(node 1 n1\) hung for 2\d s: .*load_batch at data.py:12; rank 0 waits`,
						n.lines[0])
				}
				events, err := s.Hub.Events(t.Context(), "r", 0)
				require.NoError(t, err)
				var kinds []string
				for _, e := range events.Events {
					kinds = append(kinds, string(e.Event))
				}
				all := strings.Join(kinds, " ")
				require.Contains(t, all, "hang-suspected hang-verdict")
				if action == hang.ActReport {
					return
				}
				require.Equal(t, job.CauseHang, dirs[0].Cause.Kind)
				require.Contains(t, all, "hang-decided order")
			})
		})
	}
}

func TestVerdictNamesWhoHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		ns := training(t, s, hangParams(hang.ActStop))
		ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
		defer cancel()
		var wg sync.WaitGroup
		for _, n := range ns {
			wg.Go(func() { n.follow(ctx) })
		}
		time.Sleep(12 * time.Second)
		ns[0].report(0)
		wg.Wait()
		epochs, err := s.Hub.Evidences("r")
		require.NoError(t, err)
		v, ok := judge(epochs)
		require.True(t, ok)
		require.Equal(t, verdict.WasHung, v.Rule)
		v.blame(s.hangOf("r", v.epoch))
		require.Equal(t, 1, *v.RootRank)
		require.Equal(t, "n1", v.RootNode)
		require.Equal(t, hang.KindBehind, v.Hang.Kind)
	})
}

// Runs whose nodes say nothing leave nothing here.
func TestHangsCostNothingUnasked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t)
		training(t, s, hangParams(hang.ActReport))
		require.NoError(t, s.Hub.Order("r", rendezvous.Order{Kind: rendezvous.OrderRestart}))
		_, err := s.Hangs.Picture(t.Context(), "r", false)
		require.ErrorIs(t, err, hangs.ErrUnknownRun)
	})
}

func TestTextsOfOrders(t *testing.T) {
	require.Equal(t, "rank 2 hung", orderText("rank 2 hung"))
	require.Equal(t, "a b  c", orderText("a\nb\x1b\u202ec"))
	long := orderText(strings.Repeat("ä", 2000))
	require.LessOrEqual(t, len(long), 1024)
	require.True(t, text.Printable(long))
}
