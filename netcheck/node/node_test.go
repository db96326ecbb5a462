package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/netcheck"
	"dlrover-run/netcheck/serve"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var errAway = errors.New("nobody answers")

// service answers a node by a script: what next says, one request after the other.
type service struct {
	next func(ctx context.Context, req serve.Request) (netcheck.Assignment, error)

	mu   sync.Mutex
	said []string
}

func (s *service) Next(ctx context.Context, run string, req serve.Request) (netcheck.Assignment, error) {
	s.mu.Lock()
	s.said = append(s.said, words(req))
	s.mu.Unlock()
	if run != "r" || req.ID != "me" || req.Visit == "" {
		return netcheck.Assignment{}, fmt.Errorf("%w: run %q, %+v", errFinal, run, req)
	}
	return s.next(ctx, req)
}

var errFinal = errors.New("this is final")

func words(q serve.Request) string {
	switch {
	case q.Arrive != nil:
		return "arrive " + q.Arrive.Name
	case q.Ready != nil:
		return fmt.Sprint("ready ", q.Ready.Test, q.Ready.Addrs, q.NoWait)
	case q.Report != nil:
		return fmt.Sprint("report ", q.Report.Test, " ", q.Report.Class)
	case q.Leave:
		return "leave"
	}
	return fmt.Sprint("poll ", q.Seq)
}

// answers are given one after the other; after the last one every request is held.
func answers(as ...netcheck.Assignment) *service {
	s := &service{}
	s.next = func(ctx context.Context, req serve.Request) (netcheck.Assignment, error) {
		if req.Leave {
			return netcheck.Assignment{}, nil
		}
		s.mu.Lock()
		if len(as) > 0 {
			a := as[0]
			as = as[1:]
			s.mu.Unlock()
			return a, nil
		}
		s.mu.Unlock()
		<-ctx.Done()
		return netcheck.Assignment{}, ctx.Err()
	}
	return s
}

// prober does what it is told to.
type prober struct {
	serve func(ctx context.Context, a netcheck.Assignment, ready func([]string) error) netcheck.Result
	dial  func(ctx context.Context, a netcheck.Assignment) netcheck.Result
	early []string // listeners
}

func (p prober) Listen(context.Context) []string { return p.early }

func (prober) Close() {}

func (p prober) Serve(ctx context.Context, a netcheck.Assignment, ready func([]string) error) netcheck.Result {
	return p.serve(ctx, a, ready)
}

func (p prober) Dial(ctx context.Context, a netcheck.Assignment) netcheck.Result {
	return p.dial(ctx, a)
}

// patient lasts until it is told to end.
func patient(ctx context.Context, _ netcheck.Assignment) netcheck.Result {
	<-ctx.Done()
	return netcheck.Result{Class: netcheck.Canceled}
}

func decided(seq uint64) netcheck.Assignment {
	return netcheck.Assignment{Seq: seq, Duty: netcheck.Decided, Verdict: &netcheck.Verdict{State: netcheck.StateOK}}
}

func dial(seq uint64, test string, left time.Duration) netcheck.Assignment {
	return netcheck.Assignment{
		Seq: seq, Duty: netcheck.Dial, Test: test, Left: left,
		Peer: netcheck.Peer{Name: "peer", Addrs: []string{"10.0.0.2:1"}},
	}
}

func of(s *service, p Prober) Config {
	return Config{
		Run: "r", Node: netcheck.Node{ID: "me", Name: "n"}, Transport: s, Prober: p,
		Final: func(err error) bool { return errors.Is(err, errFinal) },
	}
}

func TestAServingAndADialingTest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := answers(netcheck.Assignment{Duty: netcheck.Rest}, netcheck.Assignment{Seq: 5, Duty: netcheck.Serve, Test: "t1"},
			netcheck.Assignment{Seq: 5, Duty: netcheck.Rest}, dial(6, "t2", 0), decided(7))
		v, err := Run(t.Context(), of(s, prober{
			func(ctx context.Context, a netcheck.Assignment, ready func([]string) error) netcheck.Result {
				require.NoError(t, ready([]string{"10.0.0.1:7"}))
				time.Sleep(3 * time.Second)
				return netcheck.Result{}
			},
			func(ctx context.Context, a netcheck.Assignment) netcheck.Result {
				require.Equal(t, []string{"10.0.0.2:1"}, a.Peer.Addrs)
				return netcheck.Result{Test: "wrong", Class: netcheck.Refused}
			}, nil,
		}))
		require.NoError(t, err)
		require.Equal(t, netcheck.StateOK, v.State)
		said := []string{"arrive n", "poll 0", "ready t1[10.0.0.1:7] true", "report t1 ", "report t2 refused"}
		require.Equal(t, said, s.said)
	})
}

func TestANewerAssignmentEndsWhatIsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		ended := time.Duration(0)
		s := answers(dial(5, "t1", time.Hour), dial(6, "t2", 0), decided(7))
		_, err := Run(t.Context(), of(s, prober{dial: func(ctx context.Context, a netcheck.Assignment) netcheck.Result {
			if a.Test == "t1" {
				defer func() { ended = time.Since(began) }()
				return patient(ctx, a)
			}
			return netcheck.Result{}
		}}))
		require.NoError(t, err)
		require.Equal(t, []string{"arrive n", "poll 5", "report t2 "}, s.said, "what was ended has no result")
		require.Equal(t, listenAfter, ended)
	})
}

// The request that waits for news while a long test runs gives way to its result.
func TestALongTestIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		s := answers(dial(5, "t1", time.Hour))
		script := s.next
		s.next = func(ctx context.Context, req serve.Request) (netcheck.Assignment, error) {
			if req.Report != nil {
				return decided(6), nil
			}
			return script(ctx, req)
		}
		_, err := Run(t.Context(), of(s, prober{dial: func(context.Context, netcheck.Assignment) netcheck.Result {
			time.Sleep(time.Minute)
			return netcheck.Result{}
		}}))
		require.NoError(t, err)
		require.Equal(t, []string{"arrive n", "poll 5", "report t1 "}, s.said)
		require.Equal(t, time.Minute, time.Since(began))
	})
}

func TestATestHasItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		s := answers(dial(5, "t1", 3*time.Second), decided(6))
		_, err := Run(t.Context(), of(s, prober{dial: patient}))
		require.NoError(t, err)
		require.Equal(t, 3*time.Second, time.Since(began))
		require.Equal(t, []string{"arrive n", "report t1 canceled"}, s.said)
	})
}

func TestWhatDoesNotReturnIsNamedAndLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		began, stuck := time.Now(), make(chan struct{})
		defer close(stuck)
		s := answers(dial(5, "t1", 3*time.Second), decided(6))
		cfg := of(s, prober{dial: func(context.Context, netcheck.Assignment) netcheck.Result {
			<-stuck
			return netcheck.Result{}
		}})
		cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
		_, err := Run(t.Context(), cfg)
		require.NoError(t, err)
		require.Equal(t, 4*time.Second, time.Since(began))
		require.Equal(t, []string{"arrive n", "report t1 own"}, s.said)
		require.Contains(t, log.String(), `what="dial of a test with peer"`)
	})
}

func TestTheEndOfTheContextEndsEverything(t *testing.T) {
	for name, c := range map[string]struct {
		s    *service
		p    Prober
		took time.Duration
		said []string
	}{
		"while it waits": {answers(), nil, 0, []string{"arrive n"}},
		"in a test":      {answers(dial(5, "t1", time.Hour)), prober{dial: patient}, 0, []string{"arrive n", "leave"}},
		"in a test that does not return": {answers(dial(5, "t1", time.Hour)),
			prober{dial: func(context.Context, netcheck.Assignment) netcheck.Result {
				time.Sleep(time.Hour)
				return netcheck.Result{}
			}}, time.Second, []string{"arrive n", "leave"}},
		"while the service is away": {&service{next: func(context.Context, serve.Request) (netcheck.Assignment, error) {
			return netcheck.Assignment{}, errAway
		}}, nil, 0, nil},
		"while nobody listens": {&service{next: func(ctx context.Context, req serve.Request) (netcheck.Assignment, error) {
			if req.Arrive != nil {
				return netcheck.Assignment{Seq: 1, Duty: netcheck.Rest}, nil
			}
			<-ctx.Done()
			return netcheck.Assignment{}, ctx.Err()
		}}, nil, goodbye, []string{"arrive n", "poll 1", "leave"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, stop := context.WithCancelCause(t.Context())
				time.AfterFunc(3*time.Second, func() { stop(errAway) })
				began := time.Now()
				cfg := of(c.s, c.p)
				torch := &torch{}
				cfg.Torch = torch
				_, err := Run(ctx, cfg)
				require.ErrorIs(t, err, errAway)
				require.Equal(t, 3*time.Second+c.took, time.Since(began))
				require.True(t, torch.closed)
				time.Sleep(time.Hour) // until what was left behind has ended
				if c.said != nil {
					require.Equal(t, c.said, c.s.said)
				}
			})
		})
	}
}

func TestAServiceThatIsAwayIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		began := time.Now()
		back := began.Add(20 * time.Second)
		s := answers(dial(5, "t1", 0))
		script := s.next
		s.next = func(ctx context.Context, req serve.Request) (netcheck.Assignment, error) {
			switch {
			case req.Report != nil && time.Now().Before(back):
				return netcheck.Assignment{}, errAway
			case req.Report != nil:
				return decided(6), nil
			}
			return script(ctx, req)
		}
		cfg := of(s, prober{dial: func(context.Context, netcheck.Assignment) netcheck.Result { return netcheck.Result{} }})
		cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
		_, err := Run(t.Context(), cfg)
		require.NoError(t, err)
		require.Less(t, time.Since(back), 2*longestPause)
		require.InDelta(t, 27, len(s.said), 12)
		require.Equal(t, 1, strings.Count(log.String(), "level=WARN"), log.String())
		require.Contains(t, log.String(), errAway.Error())
	})
}

func TestAFinalError(t *testing.T) {
	s := &service{next: func(context.Context, serve.Request) (netcheck.Assignment, error) {
		return netcheck.Assignment{}, fmt.Errorf("%w: enough", errFinal)
	}}
	_, err := Run(t.Context(), of(s, nil))
	require.ErrorIs(t, err, errFinal)
	require.Equal(t, []string{"arrive n"}, s.said)
}

// A new service does not know the node: it begins anew, and what it did is void.
func TestANewServiceIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := answers(dial(5, "t1", time.Hour), netcheck.Assignment{Duty: serve.Introduce}, decided(1))
		_, err := Run(t.Context(), of(s, prober{dial: patient}))
		require.NoError(t, err)
		require.Equal(t, []string{"arrive n", "poll 5", "arrive n"}, s.said)
	})
}

// torch says what it was asked for.
type torch struct {
	did    []string
	closed bool
}

func (o *torch) note(what string, a netcheck.Assignment) netcheck.Result {
	o.did = append(o.did, what+" "+a.Test)
	return netcheck.Result{Torch: &netcheck.TorchResult{Backend: "gloo"}}
}

func (o *torch) Compute(_ context.Context, a netcheck.Assignment) netcheck.Result {
	return o.note("compute", a)
}

func (o *torch) Serve(_ context.Context, a netcheck.Assignment, ready func([]string) error) netcheck.Result {
	_ = ready([]string{"10.0.0.1:1"})
	return o.note("serve", a)
}

func (o *torch) Dial(_ context.Context, a netcheck.Assignment) netcheck.Result {
	return o.note("dial", a)
}

func (o *torch) Join(_ context.Context, a netcheck.Assignment, ready func([]string) error) netcheck.Result {
	return o.note("join", a)
}

func (o *torch) Close() { o.closed = true }

func torchDuties() []netcheck.Assignment {
	return []netcheck.Assignment{
		{Seq: 1, Duty: netcheck.Compute, Test: "t1"},
		{Seq: 2, Duty: netcheck.Dial, Test: "t2", Torch: true},
		{Seq: 3, Duty: netcheck.Join, Test: "t3"},
		{Seq: 4, Duty: netcheck.Serve, Test: "t4", Torch: true},
	}
}

// inTurn gives the next assignment for every report.
func inTurn(as ...netcheck.Assignment) *service {
	s := &service{}
	s.next = func(ctx context.Context, req serve.Request) (netcheck.Assignment, error) {
		if req.Arrive == nil && req.Report == nil {
			return netcheck.Assignment{Seq: req.Seq, Duty: netcheck.Rest}, nil
		}
		if len(as) == 0 {
			return decided(100), nil
		}
		a := as[0]
		as = as[1:]
		return a, nil
	}
	return s
}

func TestPyTorchsDuties(t *testing.T) {
	o := &torch{}
	cfg := of(inTurn(torchDuties()...), nil)
	cfg.Torch = o
	_, err := Run(t.Context(), cfg)
	require.NoError(t, err)
	require.Equal(t, []string{"compute t1", "dial t2", "join t3", "serve t4"}, o.did)
	require.True(t, o.closed)
}

func TestWhatANodeCannotDoItSays(t *testing.T) {
	duties := append(torchDuties(), dial(5, "t5", 0), netcheck.Assignment{Seq: 6, Duty: "dance", Test: "t6"})
	s := inTurn(duties...)
	script := s.next
	var texts []string
	s.next = func(ctx context.Context, req serve.Request) (netcheck.Assignment, error) {
		if req.Report != nil {
			require.Equal(t, netcheck.Own, req.Report.Class)
			texts = append(texts, req.Report.Text)
		}
		return script(ctx, req)
	}
	_, err := Run(t.Context(), of(s, nil))
	require.NoError(t, err)
	require.Len(t, texts, len(duties))
	require.Contains(t, texts[0], "PyTorch")
	require.Contains(t, texts[4], "network")
}

func TestWhatAToolSaysIsCutToWhatTheServiceTakes(t *testing.T) {
	long := strings.Repeat("x\n", 10_000)
	s := inTurn(dial(5, "t5", 0))
	script := s.next
	s.next = func(ctx context.Context, req serve.Request) (netcheck.Assignment, error) {
		if req.Arrive != nil {
			require.LessOrEqual(t, len(req.Arrive.Findings[0].Text), serve.MaxLine)
		}
		if req.Report != nil {
			require.LessOrEqual(t, len(req.Report.Text), serve.MaxText)
			require.NotContains(t, req.Report.Text, "\n")
		}
		return script(ctx, req)
	}
	cfg := of(s, prober{dial: func(context.Context, netcheck.Assignment) netcheck.Result {
		return netcheck.Result{Class: netcheck.Reset, Text: long}
	}})
	cfg.Node.Findings = []netcheck.Finding{{Severity: netcheck.Info, Text: long}}
	_, err := Run(t.Context(), cfg)
	require.NoError(t, err)
	require.Equal(t, long, cfg.Node.Findings[0].Text, "the caller's findings are its own")
}
