package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// script is a Service whose answers a test writes.
type script struct {
	news  chan any // a News or an error, for the next Watch
	joins chan rendezvous.Join
	asked chan Cursor

	mu       sync.Mutex
	fail     error            // of everything but Watch
	reported rendezvous.Event // the newest
}

func newScript() *script {
	return &script{news: make(chan any), joins: make(chan rendezvous.Join, 100), asked: make(chan Cursor, 1000)}
}

func (s *script) failing() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fail
}

func (s *script) setFailing(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail = err
}

func (s *script) Join(_ context.Context, _ string, ev rendezvous.Join) error {
	if err := s.failing(); err != nil {
		return err
	}
	s.joins <- ev
	return nil
}

func (s *script) Watch(ctx context.Context, run, _ string, after Cursor) (News, error) {
	if after.Join != nil {
		if err := s.Join(ctx, run, *after.Join); err != nil {
			return News{}, err
		}
		after.Join = nil
	}
	s.asked <- after
	select {
	case v := <-s.news:
		if err, ok := v.(error); ok {
			return News{}, err
		}
		return v.(News), nil
	case <-ctx.Done():
		return News{}, ctx.Err()
	}
}

func (s *script) Report(_ context.Context, _ string, ev rendezvous.Event) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reported = ev
	return s.fail
}

func (s *script) Leave(context.Context, string, rendezvous.Leave) (job.Evidence, error) {
	return job.Evidence{}, nil
}

func (s *script) World(context.Context, string) ([]job.Member, error) { return nil, s.failing() }

func openScript(t *testing.T, svc Service, log *strings.Builder, can ...rendezvous.Ability) *Session {
	p := rendezvous.Params{Min: 1, Max: 1}
	node := joinOf("a", p).Node
	node.Can = can
	s, err := Open(t.Context(), svc,
		SessionConfig{Run: "r", Node: node, Params: p, Where: "test", Logger: slog.New(slog.NewTextHandler(log, nil))})
	require.NoError(t, err)
	return s
}

func newsOf(seq uint64, kind job.Kind) News {
	return News{Directive: rendezvous.Directive{Seq: seq, Kind: kind, EpochID: job.EpochID{Term: 1, Round: 1}}}
}

// Notices that nobody reads hold no directive back; the newest 64 are kept, and one line says so.
func TestNoticesDoNotBlockDirectives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		svc, log := newScript(), &strings.Builder{}
		s := openScript(t, svc, log, rendezvous.CanNotice)
		n := newsOf(5, job.Wait)
		for i := range maxNotices + 10 {
			n.Notices, n.NoticeSeq = []job.Notice{{Seq: uint64(i + 1), Topic: fmt.Sprint(i)}}, uint64(i+1)
			svc.news <- n
		}
		svc.news <- newsOf(6, job.Stop)
		synctest.Wait()
		require.Equal(t, job.Stop, (<-s.Directives()).Kind)
		for i := range maxNotices {
			require.Equal(t, fmt.Sprint(i+10), (<-s.Notices()).Topic)
		}
		require.Equal(t, 1, strings.Count(log.String(), "notices of the rendezvous daemon are not read in time"))
		s.Close()
		_, open := <-s.Notices()
		require.False(t, open)
	})
}

// A directive is delivered once, however many notices come beside it, and the cursor moves with what was heard.
func TestNoticeRepeatsNoDirective(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		svc := newScript()
		s := openScript(t, svc, &strings.Builder{}, rendezvous.CanNotice)
		defer s.Close()
		require.Equal(t, Cursor{WithNotices: true}, <-svc.asked)
		n := newsOf(5, job.Wait)
		n.NoticeSeq = 100
		svc.news <- n
		require.Equal(t, Cursor{Directive: 5, WithNotices: true, Notices: 100}, <-svc.asked)
		require.Equal(t, job.Wait, (<-s.Directives()).Kind)
		n.Notices, n.NoticeSeq = []job.Notice{{Seq: 101, Topic: "t"}}, 101
		svc.news <- n
		require.Equal(t, Cursor{Directive: 5, WithNotices: true, Notices: 101}, <-svc.asked)
		synctest.Wait()
		require.Empty(t, s.Directives())
		require.Equal(t, "t", (<-s.Notices()).Topic)
		svc.news <- ErrNothingNew
		require.Equal(t, Cursor{Directive: 5, WithNotices: true, Notices: 101}, <-svc.asked)
		svc.news <- rendezvous.ErrUnknownNode // a daemon that was started again
		require.Equal(t, Cursor{WithNotices: true, Notices: 101}, <-svc.asked, "no notice in between is missed")
	})
}

// A node that does not read notices does not ask; nor is it troubled by a daemon that knows none.
func TestOnlyListenersAskForNotices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		svc := newScript()
		s := openScript(t, svc, &strings.Builder{}, rendezvous.CanGate)
		defer s.Close()
		require.Equal(t, Cursor{}, <-svc.asked)
		svc.news <- newsOf(5, job.Wait)
		require.Equal(t, Cursor{Directive: 5}, <-svc.asked)
	})
}

func TestTheNextJoinOffersOtherPorts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		svc := newScript()
		s := openScript(t, svc, &strings.Builder{})
		defer s.Close()
		require.Empty(t, (<-svc.joins).Node.Ports)
		s.SetPorts([]int{4001, 4002})
		s.SetBases([]int{60000})
		require.NoError(t, s.Rejoin(t.Context(), job.EpochID{}, nil))
		joined := (<-svc.joins).Node
		require.Equal(t, []int{4001, 4002}, joined.Ports)
		require.Equal(t, []int{60000}, joined.Bases)
		svc.news <- rendezvous.ErrUnknownNode // a daemon that was started again hears of them, too
		require.Equal(t, []int{4001, 4002}, (<-svc.joins).Node.Ports)
	})
}

// The next daemon hears from the node that it was paused, or barred, until a directive has said otherwise.
func TestSessionRemembersPauseAndBar(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		svc := newScript()
		s := openScript(t, svc, &strings.Builder{})
		defer s.Close()
		<-svc.joins
		join := func(n News) rendezvous.Join {
			svc.news <- n
			svc.news <- rendezvous.ErrUnknownNode
			return <-svc.joins
		}
		pause := &job.Cause{Kind: job.CauseOperator, Text: "maintenance"}
		bar := &job.Cause{Kind: job.CauseCheck, Text: "slow link"}
		n := newsOf(1, job.Stop)
		n.Paused = pause
		got := join(n)
		require.Equal(t, pause, got.Paused)
		require.Nil(t, got.Barred)
		n = newsOf(2, job.Bar)
		n.Cause = bar
		got = join(n)
		require.Nil(t, got.Paused)
		require.Equal(t, bar, got.Barred)
		n = newsOf(3, job.Stop)
		n.Barred = bar
		require.Equal(t, bar, join(n).Barred, "it is told to stop first")
		n = newsOf(4, job.Check)
		n.Cause = bar
		got = join(n)
		require.Nil(t, got.Paused)
		require.Nil(t, got.Barred)
	})
}

// A pause and a bar outlive the daemon: the nodes tell the next one.
func TestPauseAndBarSurviveTheDaemon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		svc := &swapped{}
		svc.hub.Store(NewHub(HubConfig{}))
		p := rendezvous.Params{Min: 1, Max: 2}
		runs := make(chan rendezvous.Directive, 9)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for _, id := range []string{"a", "b"} {
			node := joinOf(id, p).Node
			node.Can = []rendezvous.Ability{rendezvous.CanGate}
			s, err := Open(t.Context(), svc, SessionConfig{Run: "r", Node: node, Params: p, Where: "test"})
			require.NoError(t, err)
			wg.Go(func() { defer s.Close(); _ = obedient(ctx, s, runs) })
		}
		first := (<-runs).EpochID
		<-runs
		require.NoError(t, svc.hub.Load().Order("r", rendezvous.Order{Kind: rendezvous.OrderPause, Text: "maintenance"}))
		require.NoError(t,
			svc.hub.Load().Order("r", rendezvous.Order{Kind: rendezvous.OrderBar, Node: "b", Cause: job.CauseHang}))
		time.Sleep(time.Minute)
		old := svc.hub.Swap(NewHub(HubConfig{}))
		old.Close()
		time.Sleep(2 * rendezvous.DefaultJoinTimeout)
		got := svc.hub.Load().Runs(true)[0]
		require.Equal(t, "maintenance", got.Paused.Text)
		require.Equal(t, job.CauseHang, got.Bars["b"].Kind)
		for len(runs) > 0 {
			require.Equal(t, first, (<-runs).EpochID, "no epoch but the one that they know has ended")
		}
		require.NoError(t, svc.hub.Load().Order("r", rendezvous.Order{Kind: rendezvous.OrderResume}))
		require.Equal(t, 1, (<-runs).Place.GroupWorldSize)
		cancel()
		wg.Wait()
		svc.hub.Load().Close()
	})
}

// What is reported of the epoch that has workers here is told to the next daemon, and nothing of an older one.
func TestSessionRemembersReports(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		svc := newScript()
		s := openScript(t, svc, &strings.Builder{})
		defer s.Close()
		<-svc.joins
		now := job.EpochID{Term: 1, Round: 1, Epoch: 1}
		s.Running(&rendezvous.Resume{EpochID: now})
		resume := func(e job.EpochID) *rendezvous.Resume {
			failing := rendezvous.Failing{ID: "a", EpochID: e, Decision: rendezvous.RestartCharged}
			require.NoError(t, s.Report(t.Context(), failing))
			svc.news <- rendezvous.ErrUnknownNode
			return (<-svc.joins).Resume
		}
		require.Empty(t, resume(job.EpochID{Term: 1, Round: 1}).Decision)
		require.Equal(t, rendezvous.RestartCharged, resume(now).Decision)
		saved := rendezvous.Stepped{ID: "a", EpochID: now, Progress: job.Progress{Saving: true, Checkpoint: 3}}
		require.NoError(t, s.Report(t.Context(), saved))
		require.False(t, resume(now).Stepped, "a checkpoint where nobody counts steps")
		saved.Progress.Step = 1
		require.NoError(t, s.Report(t.Context(), saved))
		require.True(t, resume(now).Stepped)
	})
}

// Ages are those of the moment when they are sent, however long the daemon was away.
func TestSessionAgesProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		svc := newScript()
		s := openScript(t, svc, &strings.Builder{})
		defer s.Close()
		<-svc.joins
		p := job.Progress{Step: 5, Stepping: true, Idle: time.Second}
		s.Achieved(p)
		time.Sleep(time.Minute)
		require.NoError(t, s.Rejoin(t.Context(), job.EpochID{Round: 1}, nil))
		require.Equal(t, 61*time.Second, (<-svc.joins).Progress.Idle)
		for _, ev := range []rendezvous.Event{rendezvous.Failing{Progress: p}, rendezvous.Stepped{Progress: p}} {
			svc.setFailing(io.EOF)
			began := time.Now()
			time.AfterFunc(time.Minute, func() { svc.setFailing(nil) })
			require.NoError(t, s.Report(t.Context(), ev))
			require.Greater(t, time.Since(began), 59*time.Second)
			require.Equal(t, rendezvous.Aged(ev, time.Since(began)), svc.reported)
			require.NotEqual(t, ev, svc.reported)
		}
	})
}

// A daemon that is lost just after it has told a node to start its workers has a successor that hears of them, however
// long their start takes; but not of workers that a newer directive has forestalled.
func TestSessionRemembersWorkersThatAreDue(t *testing.T) {
	svc := &joiner{}
	s := &Session{dirs: make(chan rendezvous.Directive, 1), svc: svc}
	place := job.Place{GroupRank: 1, GroupWorldSize: 2}
	first, second := job.EpochID{Term: 7, Round: 1}, job.EpochID{Term: 7, Round: 2}
	s.deliver(rendezvous.Directive{Kind: job.Run, EpochID: first, Place: &place})
	require.NoError(t, s.join(t.Context(), nil))
	require.Equal(t, &rendezvous.Resume{EpochID: first, Place: place}, svc.join.Resume)
	s.Running(&rendezvous.Resume{EpochID: first, Place: place, Done: true})
	s.deliver(rendezvous.Directive{Kind: job.Run, EpochID: first, Place: &place})
	require.NoError(t, s.join(t.Context(), nil))
	require.True(t, svc.join.Resume.Done, "of a running epoch more is known")
	s.deliver(rendezvous.Directive{Kind: job.Run, EpochID: second, Place: &place})
	s.deliver(rendezvous.Directive{Kind: job.Wait, EpochID: second})
	require.NoError(t, s.join(t.Context(), nil))
	require.Nil(t, svc.join.Resume)
}

// joiner keeps the newest Join.
type joiner struct {
	Service
	join rendezvous.Join
}

func (j *joiner) Join(_ context.Context, _ string, ev rendezvous.Join) error {
	j.join = ev
	return nil
}

// A world that has gone on without the launcher is not claimed at the next daemon: its workers have ended.
func TestSessionForgetsAWorldWithoutIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		svc := newScript()
		s := openScript(t, svc, &strings.Builder{})
		defer s.Close()
		<-svc.joins
		svc.news <- newsOf(5, job.Run)
		synctest.Wait()
		s.Running(&rendezvous.Resume{EpochID: newsOf(5, job.Run).Directive.EpochID})
		svc.news <- rendezvous.ErrUnknownNode
		require.NotNil(t, (<-svc.joins).Resume)
		svc.news <- newsOf(6, job.Wait)
		svc.news <- rendezvous.ErrUnknownNode
		require.Nil(t, (<-svc.joins).Resume)
	})
}

// What is refused for good is not tried again; a watch that ends so ends the session, and says why.
func TestSessionTakesARefusal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		svc, log := newScript(), &strings.Builder{}
		s := openScript(t, svc, log)
		defer s.Close()
		start := time.Now()
		svc.setFailing(rendezvous.ErrRefused)
		require.ErrorIs(t, s.Rejoin(t.Context(), job.EpochID{}, nil), rendezvous.ErrRefused)
		svc.news <- ErrUnauthorized
		_, open := <-s.Directives()
		require.False(t, open)
		require.ErrorIs(t, s.Err(), ErrUnauthorized)
		require.Zero(t, time.Since(start))
		require.Empty(t, log.String())
	})
}

// A session that is closed while the daemon refuses it ends without an error of its own.
func TestClosedSessionHasNoError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		svc, log := newScript(), &strings.Builder{}
		s := openScript(t, svc, log)
		s.Close()
		require.NoError(t, s.Err())
		require.Empty(t, log.String())
	})
}

// A Rejoin soon after a Stop asks for the next directive, too. It returns with the answer, or with the session.
func TestRejoinWaitsForTheNextDirective(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		svc := newScript()
		s := openScript(t, svc, &strings.Builder{})
		<-svc.joins
		require.Zero(t, <-svc.asked)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var seq uint64
		rejoin := func(after time.Duration) <-chan error {
			seq++
			svc.news <- newsOf(seq, job.Stop)
			require.Equal(t, job.Stop, (<-s.Directives()).Kind)
			time.Sleep(after)
			rejoined := make(chan error, 1)
			go func() { rejoined <- s.Rejoin(ctx, job.EpochID{Round: 1}, []job.Failure{{Text: "boom"}}) }()
			synctest.Wait()
			return rejoined
		}
		svc.setFailing(io.EOF)
		rejoined := rejoin(0)
		time.Sleep(time.Minute)
		require.Empty(t, svc.asked)
		svc.setFailing(nil)
		require.Equal(t, "boom", (<-svc.joins).Failures[0].Text, "it is tried again")
		require.Equal(t, seq, (<-svc.asked).Directive)
		require.Empty(t, rejoined)
		seq++
		svc.news <- newsOf(seq, job.Run)
		require.NoError(t, <-rejoined)
		require.Equal(t, job.Run, (<-s.Directives()).Kind)
		require.Equal(t, seq, (<-svc.asked).Directive)

		require.NoError(t, <-rejoin(2*stopLull), "beside a watch that is open again")
		<-svc.joins
		<-svc.asked
		rejoined = rejoin(0)
		<-svc.joins
		cancel()
		require.ErrorIs(t, <-rejoined, context.Canceled)
		svc.news <- ErrNothingNew

		ctx = t.Context()
		rejoined = rejoin(0)
		s.Close()
		require.ErrorIs(t, <-rejoined, context.Canceled)
	})
}

// While a run is paused its nodes wait for the daemon without end, and otherwise for the join timeout.
func TestPatienceWhilePaused(t *testing.T) {
	gone := errors.New("connection refused")
	for name, paused := range map[string]*job.Cause{"running": nil, "paused": {Kind: job.CauseOperator}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				svc := newScript()
				s := openScript(t, svc, &strings.Builder{})
				n := newsOf(1, job.Stop)
				n.Paused = paused
				svc.news <- n
				require.Equal(t, job.Stop, (<-s.Directives()).Kind)
				svc.setFailing(gone)
				rejoined := make(chan error, 1)
				go func() { rejoined <- s.Rejoin(t.Context(), job.EpochID{}, nil) }()
				time.Sleep(10 * rendezvous.DefaultJoinTimeout)
				if paused == nil {
					require.ErrorIs(t, <-rejoined, ErrAway)
				} else {
					require.Empty(t, rejoined)
				}
				svc.setFailing(nil)
				time.Sleep(time.Minute)
				if paused != nil {
					require.Empty(t, rejoined, "its request is held")
					svc.news <- ErrNothingNew
					require.NoError(t, <-rejoined)
				}
				s.Close()
			})
		})
	}
}

// The same of the watch itself.
func TestWatchIsPatientWhilePaused(t *testing.T) {
	for name, paused := range map[string]*job.Cause{"running": nil, "paused": {Kind: job.CauseOperator}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				svc := newScript()
				s := openScript(t, svc, &strings.Builder{})
				n := newsOf(1, job.Wait)
				n.Paused = paused
				svc.news <- n
				<-s.Directives()
				ctx, cancel := context.WithCancel(t.Context())
				go func() {
					for {
						select {
						case svc.news <- errors.New("connection refused"):
						case <-svc.asked:
						case <-ctx.Done():
							return
						}
					}
				}()
				time.Sleep(2 * rendezvous.DefaultJoinTimeout)
				synctest.Wait()
				if paused != nil {
					require.Empty(t, s.Directives())
					require.NoError(t, s.Err())
				} else {
					_, open := <-s.Directives()
					require.False(t, open)
					require.ErrorIs(t, s.Err(), ErrAway)
				}
				s.Close()
				cancel()
			})
		})
	}
}
