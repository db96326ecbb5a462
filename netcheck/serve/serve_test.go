package serve

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/internal/runhost"
	"dlrover-run/netcheck"
)

// place is a Hub with what it has told.
type place struct {
	*Hub
	spec netcheck.Spec

	mu     sync.Mutex
	barred []string
	notes  []string
	checks []*pairing
}

func newPlace(t *testing.T) *place {
	p := &place{spec: netcheck.Spec{Level: netcheck.LevelHost}}
	p.Hub = New(Config{
		Spec: func(string) (netcheck.Spec, error) { return p.spec, nil },
		Bar: func(run, id, aspect, reason string) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.barred = append(p.barred, fmt.Sprint(run, " ", id, " ", aspect, reason))
		},
		Note: func(run string, n job.Note) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.notes = append(p.notes, strings.TrimSpace(run+" "+string(n.Event)+" "+n.Node+n.Text))
		},
		check: func(c netcheck.Config) check {
			p.checks = append(p.checks, newPairing(c))
			return p.checks[len(p.checks)-1]
		},
	})
	t.Cleanup(p.Close)
	return p
}

func arrive(id string) Request {
	return Request{ID: id, Visit: "v-" + id, Arrive: &netcheck.Node{Name: "node-" + id, Addr: "10.0.0.1"}}
}

func ask(id string, seq uint64) Request { return Request{ID: id, Visit: "v-" + id, Seq: seq} }

func listens(id string, a netcheck.Assignment) Request {
	r := ask(id, a.Seq)
	r.Ready = &Ready{Test: a.Test, Addrs: []string{"10.0.0.1:4000"}}
	return r
}

func reports(id string, a netcheck.Assignment, c netcheck.Class) Request {
	r := ask(id, a.Seq)
	r.Report = &netcheck.Result{Test: a.Test, Class: c}
	return r
}

func atOnce(r Request) Request {
	r.NoWait = true
	return r
}

// next is a request that must not fail.
func (p *place) next(t *testing.T, run string, r Request) netcheck.Assignment {
	t.Helper()
	a, err := p.Next(t.Context(), run, r)
	require.NoError(t, err)
	return a
}

// later makes a request beside the test.
func (p *place) later(t *testing.T, run string, r Request) <-chan netcheck.Assignment {
	got := make(chan netcheck.Assignment, 1)
	go func() {
		a, err := p.Next(t.Context(), run, r)
		if err != nil {
			a = netcheck.Assignment{Duty: netcheck.Duty(err.Error())}
		}
		got <- a
	}()
	return got
}

// serving lets a and b meet, and returns a's assignment to serve.
func (p *place) serving(t *testing.T) netcheck.Assignment {
	require.NoError(t, p.Expect("r", []string{"a", "b"}, nil))
	p.next(t, "r", atOnce(arrive("a")))
	p.next(t, "r", atOnce(arrive("b")))
	s := p.next(t, "r", ask("a", 0))
	require.Equal(t, netcheck.Serve, s.Duty)
	return s
}

func TestTwoNodesCheckEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace(t)
		require.NoError(t, p.Expect("r", []string{"a"}, []string{"b"}))
		waits := p.later(t, "r", arrive("a"))
		dials := p.later(t, "r", arrive("b"))
		s := <-waits
		require.Equal(t, netcheck.Serve, s.Duty)
		require.Equal(t, "node-b", s.Peer.Name)
		require.Equal(t, "10.0.0.1", s.Peer.Addr)
		require.Len(t, s.Key, 32)
		require.Equal(t, rest(s.Seq), p.next(t, "r", atOnce(listens("a", s))))
		d := <-dials
		require.Equal(t, netcheck.Dial, d.Duty)
		require.Equal(t, s.Key, d.Key)
		require.Equal(t, []string{"10.0.0.1:4000"}, d.Peer.Addrs)
		require.Equal(t, netcheck.StateOK, p.next(t, "r", reports("a", s, netcheck.OK)).Verdict.State)
		v := p.next(t, "r", reports("b", d, netcheck.Stalled))
		require.True(t, v.Verdict.Excluded)
		synctest.Wait()
		require.Equal(t, []string{"r check-began 2 nodes", "r check-ended"}, p.notes)
		require.Equal(t, Stats{Verdicts: map[netcheck.State]int{"ok": 1, "faulty": 1}, Excluded: 1, Checks: 1}, p.Stats())
		require.Empty(t, p.runs.Get("r").keys, "a key outlives its test")
	})
}

// Nobody learns from the service how to speak for another launcher, and only the ends of a test learn its key.
func TestIDsAndKeysAreForNobodyElse(t *testing.T) {
	p := newPlace(t)
	s := p.serving(t)
	require.Equal(t, netcheck.Alias("b"), s.Peer.ID)
	pic, err := p.Picture("r")
	require.NoError(t, err)
	require.Len(t, pic.Nodes, 2)
	for _, n := range pic.Nodes {
		require.Contains(t, []string{netcheck.Alias("a"), netcheck.Alias("b")}, n.Node.ID)
	}
	p.next(t, "r", atOnce(listens("a", s)))
	one := p.next(t, "r", ask("b", 0)).Key
	p.next(t, "r", atOnce(Request{ID: "a", Visit: "again", Arrive: arrive("a").Arrive}))
	p.next(t, "r", atOnce(Request{ID: "b", Visit: "again", Arrive: arrive("b").Arrive}))
	other := p.next(t, "r", Request{ID: "a", Visit: "again"}).Key
	require.Len(t, other, 32)
	require.NotEqual(t, one, other)
}

func TestOnlyWhoWasToldMayTakePart(t *testing.T) {
	p := newPlace(t)
	_, err := p.Next(t.Context(), "r", arrive("a"))
	require.ErrorIs(t, err, errNotTold)
	require.ErrorContains(t, err, `"r"`)
	require.NoError(t, p.Expect("r", []string{"a"}, nil))
	for _, id := range []string{"b", "node-a", "v-a"} {
		_, err = p.Next(t.Context(), "r", arrive(id))
		require.ErrorIs(t, err, errNotTold)
	}
	_, err = p.Next(t.Context(), "other", arrive("a"))
	require.ErrorIs(t, err, errNotTold)
	p.next(t, "r", arrive("a"))
	p.Gone("r", "a")
	_, err = p.Next(t.Context(), "r", ask("a", 0))
	require.ErrorIs(t, err, errNotTold)
	p.Gone("r", "a")
	p.Gone("nothing", "a")
}

func TestLostAnswersAreRepeated(t *testing.T) {
	p := newPlace(t)
	s := p.serving(t)
	require.Equal(t, s.Seq, p.next(t, "r", ask("a", 0)).Seq)
	require.Equal(t, s.Seq, p.next(t, "r", arrive("a")).Seq, "an Arrive that is repeated begins nothing anew")
	for range 3 {
		p.next(t, "r", atOnce(listens("a", s)))
	}
	d := p.next(t, "r", ask("b", 0))
	require.Equal(t, d.Seq, p.next(t, "r", ask("b", 17)).Seq)
	require.Equal(t, d.Test, s.Test)
	for range 3 {
		require.Equal(t, netcheck.Decided, p.next(t, "r", reports("b", d, netcheck.OK)).Duty)
		require.Equal(t, netcheck.Decided, p.next(t, "r", ask("b", 0)).Duty)
	}
	n := map[string]int{}
	for _, ev := range p.checks[0].events {
		n[fmt.Sprintf("%T", ev)]++
	}
	require.Equal(t, map[string]int{
		"netcheck.Expect": 1, "netcheck.Arrive": 2, "netcheck.Ready": 1, "netcheck.Report": 1,
	}, n)
}

// A node may listen before its tests, at its own addresses; with others it sends Ready as an older one.
func TestNodesThatListenBeforeTheirTests(t *testing.T) {
	p := newPlace(t)
	require.NoError(t, p.Expect("r", []string{"a", "b"}, nil))
	first := arrive("a")
	first.Listens = []string{"10.0.0.1:1"}
	p.next(t, "r", atOnce(first))
	p.next(t, "r", atOnce(arrive("b")))
	s := p.next(t, "r", ask("a", 0))
	p.next(t, "r", atOnce(listens("a", s)))
	d := p.next(t, "r", ask("b", 0))
	for id, a := range map[string]netcheck.Assignment{"a": s, "b": d} {
		q := reports(id, a, netcheck.OK)
		q.Listens = map[string][]string{"a": {"10.0.0.1:2"}, "b": {"10.0.0.2:2"}}[id]
		for range 2 {
			p.next(t, "r", q)
		}
	}
	var said []netcheck.Event
	for _, ev := range p.checks[0].events {
		if ev, ok := ev.(netcheck.Listens); ok {
			said = append(said, ev)
		}
	}
	require.Equal(t, []netcheck.Event{netcheck.Listens{ID: "a", Addrs: []string{"10.0.0.1:1"}},
		netcheck.Listens{ID: "a", Addrs: []string{"10.0.0.1:2"}}}, said)
	first.Listens = []string{"10.0.0.1:0"}
	_, err := p.Next(t.Context(), "r", first)
	require.ErrorIs(t, err, errBadRequest)
	require.ErrorContains(t, err, `"10.0.0.1:0": need host:port`)
}

func TestWhatIsLeftOfEarlierIsVoid(t *testing.T) {
	p := newPlace(t)
	s := p.serving(t)
	old := listens("a", s)
	p.next(t, "r", atOnce(Request{ID: "a", Visit: "new", Arrive: arrive("a").Arrive}))
	for _, stale := range []Request{old, reports("a", s, netcheck.Reset), {ID: "a", Visit: "v-a", Leave: true}} {
		require.Equal(t, Introduce, p.next(t, "r", stale).Duty)
	}
	again := p.next(t, "r", Request{ID: "a", Visit: "new"})
	require.Equal(t, netcheck.Serve, again.Duty)
	require.NotEqual(t, s.Test, again.Test)
	r := reports("a", s, netcheck.Reset)
	r.Visit = "new"
	p.next(t, "r", atOnce(r)) // of the old test
	require.Empty(t, p.checks[0].decided)
}

func TestAServerMayOnlyNameItsOwnAddresses(t *testing.T) {
	p := newPlace(t)
	s := p.serving(t)
	r := listens("a", s)
	r.Ready.Addrs = []string{"10.0.0.1:4000", "10.9.9.9:22"}
	_, err := p.Next(t.Context(), "r", r)
	require.ErrorIs(t, err, errBadRequest)
	require.ErrorContains(t, err, `"10.9.9.9:22"`)
	require.Equal(t, netcheck.Assignment{Duty: netcheck.Rest}, p.next(t, "r", atOnce(ask("b", 0))))
}

func TestTheTimeOfATestRunsWhileNobodyAsks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace(t)
		s := p.serving(t)
		require.Equal(t, 6*time.Second, s.Left)
		time.Sleep(2 * time.Second)
		require.Equal(t, 4*time.Second, p.next(t, "r", ask("a", 0)).Left)
		time.Sleep(4 * time.Second)
		require.Equal(t, rest(s.Seq), p.next(t, "r", ask("a", 0)), "a test whose time is over is not begun")
	})
}

func TestAHeldRequestEnds(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(p *place, cancel context.CancelCauseFunc)
		want error
		took time.Duration
	}{
		"when it was held long enough": {func(*place, context.CancelCauseFunc) { time.Sleep(hold) }, nil, hold},
		"with its context":             {func(_ *place, stop context.CancelCauseFunc) { stop(errTest) }, errTest, 0},
		"when the node has left":       {func(p *place, _ context.CancelCauseFunc) { p.Gone("r", "a") }, errNotTold, 0},
		"when the run is forgotten": {func(p *place, _ context.CancelCauseFunc) { p.runs.Drop("r", nil) },
			ErrUnknownRun, 0},
		"when the service ends": {func(p *place, _ context.CancelCauseFunc) { p.Close() }, errClosed, 0},
		"with a newer one of the node": {func(p *place, _ context.CancelCauseFunc) {
			_, _ = p.Next(context.Background(), "r", atOnce(ask("a", 0)))
			go func() { _, _ = p.Next(context.Background(), "r", ask("a", 0)) }()
		}, nil, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPlace(t)
				require.NoError(t, p.Expect("r", []string{"a", "b", "c"}, nil))
				p.next(t, "r", atOnce(arrive("a")))
				run := p.runs.Get("r")
				run.Lock()
				p.checks[0].due = time.Time{} // nobody is silent here
				run.Unlock()
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				began, got := time.Now(), make(chan error, 1)
				go func() {
					a, err := p.Next(ctx, "r", ask("a", 0))
					if err == nil && a.Duty != netcheck.Rest {
						err = fmt.Errorf("duty %s", a.Duty)
					}
					got <- err
				}()
				synctest.Wait()
				run.Lock()
				run.Arm(began, run.check.Next())
				run.Unlock()
				c.end(p, cancel)
				err := <-got
				require.ErrorIs(t, err, c.want)
				require.Equal(t, c.took, time.Since(began))
			})
		})
	}
}

// Requests are held for as long as each other, to least.
func TestRequestsThatAreHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace(t)
		require.NoError(t, p.Expect("r", []string{"a", "b", "c", "d"}, nil))
		for _, id := range []string{"a", "b", "c"} {
			p.next(t, "r", atOnce(arrive(id)))
		}
		run := p.runs.Get("r")
		run.Lock()
		p.checks[0].due = time.Time{} // nobody is silent here
		run.Arm(time.Now(), run.check.Next())
		run.Unlock()
		began := time.Now()
		took := make(chan string, 3)
		for _, id := range []string{"a", "b", "c"} {
			go func() {
				begin := time.Now()
				p.next(t, "r", ask(id, 0))
				took <- fmt.Sprint(id, time.Since(begin))
			}()
			time.Sleep(least / 4)
		}
		require.Equal(t, "a20s", <-took)
		time.Sleep(least * 2)
		go func() { p.next(t, "r", ask("a", 0)); took <- fmt.Sprint("a", time.Since(began)) }()
		require.ElementsMatch(t, []string{"b20.75s", "c20.5s"}, []string{<-took, <-took})
		require.Equal(t, "a42s", <-took)
		run.Lock()
		defer run.Unlock()
		require.Nil(t, run.sweeper, "nobody waits")
	})
}

var errTest = errors.New("enough")

func TestWhoDoesNotComeIsBarredWithoutItsHelp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace(t)
		require.NoError(t, p.Expect("r", []string{"a", "b", "c"}, nil))
		p.next(t, "r", atOnce(arrive("a")))
		waits := p.later(t, "r", arrive("b"))
		time.Sleep(patience)
		synctest.Wait()
		require.Equal(t, []string{"r c silent"}, p.barred)
		_, err := p.Next(t.Context(), "r", arrive("c"))
		require.ErrorIs(t, err, errNotTold, "the rendezvous has barred it")
		require.Equal(t, netcheck.Serve, p.next(t, "r", ask("a", 0)).Duty)
		p.Gone("r", "b")
		require.Equal(t, netcheck.Duty(notTold("r").Error()), (<-waits).Duty)
		synctest.Wait()
		verdicts := map[netcheck.State]int{"faulty": 1, "ok": 1}
		require.Equal(t, Stats{Verdicts: verdicts, Excluded: 1, Checks: 1, Newest: patience}, p.Stats())
		require.Equal(t, "r check-verdict the node "+netcheck.Alias("c")+" is faulty: silent", p.notes[1])
	})
}

func TestNobodyIsBarredWhoIsOnlyReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace(t)
		p.spec.ReportOnly = true
		require.NoError(t, p.Expect("r", []string{"a"}, nil))
		time.Sleep(patience)
		synctest.Wait()
		require.Empty(t, p.barred)
	})
}

// The rendezvous calls Gone with its own lock held, and Bar and Note take that lock.
func TestGoneDoesNotWaitForWhatItCauses(t *testing.T) {
	var lock sync.Mutex
	told := make(chan struct{}, 10)
	take := func() { lock.Lock(); told <- struct{}{}; lock.Unlock() }
	h := New(Config{
		Spec:  func(string) (netcheck.Spec, error) { return netcheck.Spec{}, nil },
		Bar:   func(string, string, string, string) { take() },
		Note:  func(string, job.Note) { take() },
		check: func(c netcheck.Config) check { return newPairing(c) },
	})
	defer h.Close()
	lock.Lock()
	require.NoError(t, h.Expect("r", []string{"a"}, nil))
	h.Gone("r", "a")
	lock.Unlock()
	<-told
}

func TestANodeThatLeavesIsNotWaitedFor(t *testing.T) {
	p := newPlace(t)
	require.NoError(t, p.Expect("r", []string{"a", "b", "c"}, nil))
	for _, id := range []string{"a", "b", "c"} {
		if id == "c" {
			p.next(t, "r", Request{ID: "a", Visit: "v-a", Leave: true})
		}
		p.next(t, "r", atOnce(arrive(id)))
	}
	require.Equal(t, "node-c", p.next(t, "r", ask("b", 0)).Peer.Name)
}

// A new service knows nobody. The nodes are told to check themselves again by a new rendezvous, and begin anew.
func TestANewServiceIsIntroducedToTheNodes(t *testing.T) {
	old := newPlace(t)
	s := old.serving(t)
	p := newPlace(t)
	_, err := p.Next(t.Context(), "r", listens("a", s))
	require.ErrorIs(t, err, errNotTold)
	require.NoError(t, p.Expect("r", []string{"a", "b"}, nil))
	require.Equal(t, netcheck.Assignment{Duty: Introduce}, p.next(t, "r", listens("a", s)))
	p.next(t, "r", atOnce(arrive("b")))
	again := p.next(t, "r", arrive("a"))
	require.Greater(t, again.Seq, s.Seq, "numbers of different services differ")
	require.NotEqual(t, s.Key, again.Key)
}

func TestRunsDoNotMeet(t *testing.T) {
	p := newPlace(t)
	s := p.serving(t)
	require.NoError(t, p.Expect("q", []string{"a", "b"}, nil))
	require.Equal(t, Introduce, p.next(t, "q", listens("a", s)).Duty)
	p.next(t, "q", atOnce(arrive("a")))
	p.runs.Drop("r", nil)
	_, err := p.Picture("r")
	require.ErrorIs(t, err, ErrUnknownRun)
	pic, err := p.Picture("q")
	require.NoError(t, err)
	require.Len(t, pic.Nodes, 1)
}

func TestOtherRulesBeginAnotherCheck(t *testing.T) {
	p := newPlace(t)
	require.NoError(t, p.Expect("r", []string{"a"}, nil))
	require.Equal(t, netcheck.Decided, p.next(t, "r", arrive("a")).Duty)
	require.NoError(t, p.Expect("r", []string{"a"}, nil))
	require.Len(t, p.checks, 1)
	p.spec.Level = netcheck.LevelFull
	require.NoError(t, p.Expect("r", []string{"b"}, nil))
	require.Len(t, p.checks, 1, "a node is being checked")
	p.Gone("r", "a")
	p.Gone("r", "b")
	require.NoError(t, p.Expect("r", []string{"c"}, nil))
	require.Len(t, p.checks, 2)
	require.Equal(t, netcheck.LevelFull, p.checks[1].cfg.Spec.Level)
}

func TestARunThatCannotBeChecked(t *testing.T) {
	h := New(Config{Spec: func(string) (netcheck.Spec, error) { return netcheck.Spec{}, errTest }})
	defer h.Close()
	require.ErrorIs(t, h.Expect("r", []string{"a"}, nil), errTest)
	_, err := h.Picture("r")
	require.ErrorIs(t, err, ErrUnknownRun)
	h.Close()
	require.ErrorIs(t, h.Expect("r", []string{"a"}, nil), errClosed)
	_, err = h.Next(t.Context(), "r", arrive("a"))
	require.ErrorIs(t, err, errClosed)
}

func TestRunsThatTheRendezvousHasForgottenAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace(t)
		p.cfg.Keep = func(run string) bool { return run == "kept" }
		for _, run := range []string{"kept", "gone", "busy"} {
			require.NoError(t, p.Expect(run, []string{"a"}, nil))
			if run != "busy" {
				p.next(t, run, arrive("a"))
			}
		}
		busy := p.runs.Get("busy")
		busy.Lock()
		p.checks[2].due = time.Time{}
		busy.Unlock()
		time.Sleep(retention + time.Second)
		require.NoError(t, p.Expect("new", nil, nil))
		for run, known := range map[string]bool{"kept": true, "gone": false, "busy": true} {
			_, err := p.Picture(run)
			require.Equal(t, known, err == nil, run)
		}
	})
}

func TestThereAreNotMoreRunsThanMaxRuns(t *testing.T) {
	p := newPlace(t)
	for i := range runhost.MaxRuns {
		require.NoError(t, p.Expect(fmt.Sprint(i), nil, nil))
	}
	require.ErrorIs(t, p.Expect("more", nil, nil), errLimit)
	require.NoError(t, p.Expect("7", nil, nil))
}

// A node that is to be left out and does not say so to the rendezvous, because it is stopped, is barred without its
// help; one that does so in time is not barred twice.
func TestWhoDoesNotObeyItsVerdictIsBarred(t *testing.T) {
	for obeys, want := range map[bool][]string{false: {"r b stalled"}, true: nil} {
		synctest.Test(t, func(t *testing.T) {
			p := newPlace(t)
			s := p.serving(t)
			p.next(t, "r", atOnce(listens("a", s)))
			d := p.next(t, "r", ask("b", 0))
			p.next(t, "r", atOnce(reports("b", d, netcheck.Stalled)))
			p.next(t, "r", atOnce(reports("a", s, netcheck.OK)))
			if time.Sleep(obeyTime - time.Second); obeys {
				p.Gone("r", "b") // its launcher has told the rendezvous
			}
			time.Sleep(2 * time.Second)
			synctest.Wait()
			require.Equal(t, want, p.barred)
			_, err := p.Next(t.Context(), "r", atOnce(ask("b", d.Seq)))
			require.ErrorIs(t, err, errNotTold)
			require.Equal(t, netcheck.StateOK, p.next(t, "r", ask("a", s.Seq)).Verdict.State)
		})
	}
}
