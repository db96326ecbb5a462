package lease

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/app/leadtest"
	"dlrover-run/internal/testkit"
	"dlrover-run/rendezvous/lead"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// soon is ample for what takes as long as a leadership lasts.
const soon = 30 * time.Second

func open(t *testing.T, f *fake, who string) *Store {
	return openPod(t, f, who, "", slog.DiscardHandler)
}

func openPod(t *testing.T, f *fake, who, pod string, log slog.Handler) *Store {
	t.Helper()
	s, err := Open(Config{Name: "m", Namespace: "ns", Pod: pod, API: f.config(who), Log: slog.New(log)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func campaign(t *testing.T, s *Store, addr string) (lead.Term, <-chan struct{}) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	term, lost, err := s.Campaign(ctx, addr)
	require.NoError(t, err)
	return term, lost
}

func keys(t *testing.T, s *Store, term lead.Term) (all []string) {
	t.Helper()
	records, err := s.Load(t.Context(), term)
	require.NoError(t, err)
	for _, r := range records {
		all = append(all, r.Key)
	}
	return all
}

func record(key string) lead.Record { return lead.Record{Key: key, Value: []byte{}} }

func within(t *testing.T, lost <-chan struct{}, d time.Duration) {
	t.Helper()
	select {
	case <-lost:
	case <-time.After(d):
		require.Fail(t, "the leadership is not lost")
	}
}

func leads(lost <-chan struct{}) bool {
	select {
	case <-lost:
		return false
	default:
		return true
	}
}

func TestStore(t *testing.T) {
	leadtest.Run(t, func(t *testing.T) leadtest.Suite {
		f := startFake(t)
		var names, deaf sync.Map // of clients
		f.set(func(who string, r *http.Request) fate {
			if _, is := deaf.Load(who); is && strings.Contains(r.URL.Path, "/leases") {
				return stopped
			}
			return served
		})
		opened := 0
		return leadtest.Suite{
			Deposes: true,
			Open: func(t *testing.T) lead.Store {
				opened++
				s := open(t, f, fmt.Sprint("x", opened))
				names.Store(s, fmt.Sprint("x", opened))
				return s
			},
			Deafen: func(p lead.Store) (hear func()) {
				who, _ := names.Load(p)
				deaf.Store(who, true)
				f.expire(who.(string)) // watches that have begun
				return func() { deaf.Delete(who) }
			},
		}
	})
}

// A leader that gets no answer stops before another one can lead, and writes nothing after that.
func TestSilentServer(t *testing.T) {
	f := startFake(t)
	a, b := open(t, f, "a"), open(t, f, "b")
	term, lost := campaign(t, a, "a:1")
	elected := make(chan lead.Term, 1)
	go func() {
		if later, _, err := b.Campaign(t.Context(), "b:1"); err == nil {
			elected <- later
		}
	}()
	f.set(func(who string, _ *http.Request) fate { return map[string]fate{"a": stopped}[who] })
	select {
	case later := <-elected:
		require.False(t, leads(lost), "two lead")
		require.False(t, a.Holds())
		require.Greater(t, later, term)
	case <-time.After(soon):
		require.Fail(t, "nobody leads")
	}
	f.set(nil)
	require.ErrorIs(t, a.Append(t.Context(), term, record("late")), lead.ErrDeposed)
	require.NoError(t, a.Resign(t.Context()))
	_, err := b.leading(term + 1)
	require.NoError(t, err, "b leads on")
}

// A process that was frozen answers nothing once its leadership is over, even if no timer has run yet.
func TestHolds(t *testing.T) {
	f := startFake(t)
	a := open(t, f, "a")
	require.False(t, a.Holds())
	_, lost := campaign(t, a, "a:1")
	require.True(t, a.Holds())
	f.set(func(string, *http.Request) fate { return stopped })
	over := time.Now()
	a.tenure.until.Store(&over)
	require.False(t, a.Holds())
	require.True(t, leads(lost))
	f.set(nil)
	require.Eventually(t, a.Holds, soon, time.Millisecond, "it is renewed")
	require.NoError(t, a.Resign(t.Context()))
	require.False(t, a.Holds())
}

// A leader that believes it leads, and does not, is told by its first write.
func TestTwoBelieve(t *testing.T) {
	f := startFake(t)
	a, b := open(t, f, "a"), open(t, f, "b")
	term, _ := campaign(t, a, "a:1")
	f.set(func(who string, r *http.Request) fate { // a learns nothing of its Lease
		if who == "a" && r.URL.Path != mapPath {
			return stopped
		}
		return served
	})
	require.NoError(t, b.release(t.Context(), term))
	later, _ := campaign(t, b, "b:1")
	require.ErrorIs(t, a.Append(t.Context(), term, record("late")), lead.ErrDeposed)
	require.Empty(t, keys(t, b, later))
}

// Answers that are lost cost neither the leadership nor records.
func TestLostAnswers(t *testing.T) {
	f := startFake(t)
	a := open(t, f, "a")
	term, lost := campaign(t, a, "a:1")
	var n atomic.Int32
	f.set(func(_ string, r *http.Request) fate {
		if r.Method == http.MethodPut && n.Add(1)%2 == 1 {
			return fate(1 + n.Load()/2%2) // lost, refused, lost ...
		}
		return served
	})
	var want []string
	for i := range 20 {
		key := fmt.Sprintf("%02d", i)
		want = append(want, key)
		for end := time.Now().Add(soon); a.Append(t.Context(), term, record(key)) != nil; {
			require.True(t, time.Now().Before(end))
		}
	}
	renewals := n.Load()
	require.Eventually(t, func() bool { return n.Load() > renewals+3 }, soon, 10*time.Millisecond)
	f.set(nil)
	require.Equal(t, want, keys(t, a, term))
	require.True(t, leads(lost))
}

// A process that could not give up its leadership, and one that does not know of it, need not wait until it expires.
func TestOwnLeadershipIsOver(t *testing.T) {
	f := startFake(t)
	a := open(t, f, "a")
	for _, how := range []fate{refused, lost} {
		first, _ := campaign(t, a, "a:1")
		f.set(func(_ string, r *http.Request) fate { return map[string]fate{http.MethodPut: how}[r.Method] })
		require.Error(t, a.Resign(t.Context()))
		_, _, err := a.Campaign(t.Context(), "a:1")
		require.Error(t, err)
		f.set(nil)
		began := time.Now()
		second, _ := campaign(t, a, "a:1")
		require.Greater(t, second, first)
		require.Less(t, time.Since(began), lasts)
		require.NoError(t, a.Resign(t.Context()))
	}
}

// A write that arrives after Load does not count any more.
func TestLateWrite(t *testing.T) {
	f := startFake(t)
	a := open(t, f, "a")
	term, _ := campaign(t, a, "a:1")
	arrive, arrived := make(chan struct{}), make(chan struct{})
	f.set(func(_ string, r *http.Request) fate {
		if r.Method == http.MethodPut && r.URL.Path == mapPath {
			f.set(nil)
			defer close(arrived)
			<-arrive
		}
		return served
	})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	require.Error(t, a.Append(ctx, term, record("late")))
	require.Empty(t, keys(t, a, term))
	close(arrive)
	<-arrived
	require.Empty(t, keys(t, a, term))
}

// Watches that expire or end are begun anew; one that works is all that a follower asks for.
func TestWatches(t *testing.T) {
	f := startFake(t)
	a, b := open(t, f, "a"), open(t, f, "b")
	var asked atomic.Int32
	f.set(func(who string, _ *http.Request) fate {
		if who == "b" {
			asked.Add(1)
		}
		return served
	})
	term, lost := campaign(t, a, "a:1")
	leaders := b.Watch(t.Context())
	require.Equal(t, lead.Leader{Term: term, Addr: "a:1"}, <-leaders)
	require.Eventually(t, func() bool { return f.watching() == 2 }, soon, time.Millisecond, "a's own and b's")
	f.expire("")
	require.Eventually(t, func() bool { return asked.Load() >= 4 }, soon, time.Millisecond, "read and watched twice")
	version := meta(f.do("GET", leasePath, nil))["resourceVersion"]
	require.Eventually(t, func() bool {
		return meta(f.do("GET", leasePath, nil))["resourceVersion"] != version
	}, soon, time.Millisecond, "a renewal")
	require.LessOrEqual(t, asked.Load(), int32(4))
	require.True(t, leads(lost), "the leader's own watch expired, too")
	require.NoError(t, b.Depose(t.Context(), lead.Leader{Term: term}))
	within(t, lost, soon)
	require.Equal(t, lead.Leader{}, <-leaders)
}

// Terms rise although somebody deletes the Lease, and the leader of it stops.
func TestDeletedLease(t *testing.T) {
	f := startFake(t)
	a, b := open(t, f, "a"), open(t, f, "b")
	campaign(t, a, "a:1")
	require.NoError(t, a.Resign(t.Context()))
	term, lost := campaign(t, a, "a:1")
	f.do("DELETE", leasePath, nil)
	later, _ := campaign(t, b, "b:1")
	require.Greater(t, later, term)
	within(t, lost, soon)
}

// A leader whose Lease was deleted does not renew that of another process, which may have got the same term: nothing
// but the Lease has a term before the leader's first write.
func TestLeaseOfAnother(t *testing.T) {
	f := startFake(t)
	a, b := open(t, f, "a"), open(t, f, "b")
	term, _ := campaign(t, a, "a:1")
	of := &tenure{term: term, addr: "b:1", ctx: t.Context(), lease: object("coordination.k8s.io/v1", "Lease", "m")}
	of.lease.SetResourceVersion("77") // of the one that was deleted
	require.ErrorIs(t, b.renewOnce(of), lead.ErrDeposed)
}

// The label is on the pod that leads alone, whatever became of the process of the leader before.
func TestLabel(t *testing.T) {
	f := startFake(t)
	for _, pod := range []string{"a", "b"} {
		f.do("POST", strings.TrimSuffix(podPath, "/"), fields{"kind": "Pod", "apiVersion": "v1",
			"metadata": fields{"name": pod, "labels": fields{Label: "true"}}})
	}
	a, b := openPod(t, f, "a", "a", slog.DiscardHandler), openPod(t, f, "b", "b", slog.DiscardHandler)
	labelled := func(pods string) {
		t.Helper()
		require.Eventually(t, func() bool {
			return f.leads("a") == strings.Contains(pods, "a") && f.leads("b") == strings.Contains(pods, "b")
		}, soon, time.Millisecond)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	_, _, err := b.Campaign(ended, "b:1")
	require.Error(t, err)
	labelled("a") // that of an earlier process of b is gone
	term, _ := campaign(t, a, "a:1")
	labelled("a")
	f.set(func(who string, _ *http.Request) fate { return map[string]fate{"a": stopped}[who] })
	require.NoError(t, b.Depose(t.Context(), lead.Leader{Term: term}))
	campaign(t, b, "b:1")
	labelled("b")
	f.set(nil)
	f.do("PATCH", podPath+"b", fields{"metadata": fields{"labels": fields{Label: nil}}})
	labelled("")
	labelled("b") // which sets it again
	require.NoError(t, b.Resign(t.Context()))
	labelled("")
}

// Without the right to change pods one warning says so, and the election goes on.
func TestLabelIsForbidden(t *testing.T) {
	f := startFake(t)
	f.set(func(_ string, r *http.Request) fate { return map[string]fate{http.MethodPatch: forbidden}[r.Method] })
	var log testkit.Buffer
	a := openPod(t, f, "a", "a", slog.NewTextHandler(&log, nil))
	for range 2 {
		campaign(t, a, "a:1")
		require.Eventually(t, func() bool { return strings.Contains(log.String(), Label) }, soon, time.Millisecond)
		require.NoError(t, a.Resign(t.Context()))
	}
	require.NoError(t, a.Close())
	require.Equal(t, 1, strings.Count(log.String(), "level=WARN"), log.String())
}

func TestBounds(t *testing.T) {
	f := startFake(t)
	a := open(t, f, "a")
	term, _ := campaign(t, a, "a:1")
	n := 0
	var err error
	for ; err == nil; n++ {
		require.Less(t, n, 100)
		err = a.Append(t.Context(), term, lead.Record{Key: fmt.Sprint("k/", n), Value: make([]byte, lead.MaxValue)})
	}
	require.ErrorIs(t, err, lead.ErrFull)
	require.ErrorContains(t, err, "a ConfigMap takes 921600: shorten")
	require.Greater(t, n, 10)
	require.Len(t, keys(t, a, term), n-1)
	require.NoError(t, a.Append(t.Context(), term, lead.Record{Key: "k/0"}, record("k/new")), "one goes, one comes")
}

// Names of keys are such as Kubernetes takes, and none is another's.
func TestNames(t *testing.T) {
	seen := map[string]bool{}
	long := strings.Repeat("/", lead.MaxKey)
	for _, key := range []string{"a/b", "a_b", "..", "/", long, strings.ReplaceAll(long, "/", "_")} {
		require.Regexp(t, `^_[-._a-zA-Z0-9]{1,252}$`, nameOf(key))
		require.False(t, seen[nameOf(key)])
		seen[nameOf(key)] = true
	}
}

// An API server that refuses or is away is an error of Campaign, so that somebody hears of it.
func TestRefusedCampaign(t *testing.T) {
	f := startFake(t)
	a := open(t, f, "a")
	f.set(func(string, *http.Request) fate { return forbidden })
	_, _, err := a.Campaign(t.Context(), "a:1")
	require.ErrorContains(t, err, "docs/kubernetes/master.yaml has a Role with the rights")
	f.set(func(string, *http.Request) fate { return stopped })
	_, _, err = a.Campaign(t.Context(), "a:1")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	f.set(nil)
	campaign(t, a, "a:1")
}
