package marks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/nodehealth"
)

// cluster is an Actor that remembers marks, and that fails as it is told.
type cluster struct {
	mu    sync.Mutex
	marks map[string]bool
	until map[string]time.Time // of those that were applied
	avoid []string
	calls int
	fail  error
}

func (c *cluster) call(f func()) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.calls++; c.fail != nil {
		return fmt.Errorf("port %d: %w", 40000+c.calls, c.fail)
	}
	f()
	return nil
}

func (c *cluster) Apply(_ context.Context, m nodehealth.Mark) error {
	return c.call(func() {
		c.marks[m.Node] = true
		if c.until == nil {
			c.until = map[string]time.Time{}
		}
		c.until[m.Node] = m.Until
	})
}

func (c *cluster) Remove(_ context.Context, m nodehealth.Mark) error {
	return c.call(func() { delete(c.marks, m.Node) })
}

func (c *cluster) Avoid(_ context.Context, machines []string) error {
	return c.call(func() { c.avoid = machines })
}

func (c *cluster) Sweep(_ context.Context, known func(string) bool) error {
	return c.call(func() {
		for name := range c.marks {
			if !known(name) {
				delete(c.marks, name)
			}
		}
	})
}

func (c *cluster) names() (names []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name := range c.marks {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func (c *cluster) failing(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fail = err
}

// What an earlier daemon has left goes at the start, and what comes later within an hour.
func TestMarksThatWereLeftAreSwept(t *testing.T) {
	dir := t.TempDir()
	k := open(t, in(t, dir))
	require.NoError(t, k.Mark(t.Context(), "n1", "me", "smoke"))
	require.NoError(t, k.Close())
	synctest.Test(t, func(t *testing.T) {
		c := &cluster{marks: map[string]bool{"n1": true, "old": true}}
		cfg := in(t, dir)
		cfg.Actor = c
		k := open(t, cfg)
		synctest.Wait()
		require.Equal(t, []string{"n1"}, c.names())
		require.Equal(t, []string{"n1"}, c.avoid)
		k.Find(broken("n2"))
		synctest.Wait()
		require.Equal(t, []string{"n1", "n2"}, c.names())
		require.Equal(t, []string{"n1", "n2"}, c.avoid)
		_ = c.call(func() { c.marks["stray"] = true })
		time.Sleep(sweepEvery + time.Second)
		synctest.Wait()
		require.Equal(t, []string{"n1", "n2"}, c.names())
		require.NoError(t, k.Close())
	})
}

// A shorter time for marks counts from the daemon's start on, and is not begun again by the next one.
func TestMarksEndSoonerWhereTheyMayLastLess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, c := t.TempDir(), &cluster{marks: map[string]bool{}}
		start := func(expiry time.Duration) *Manager {
			cfg := in(t, dir)
			cfg.Actor, cfg.Policy = c, nodehealth.Config{Expiry: expiry}
			k := open(t, cfg)
			synctest.Wait()
			return k
		}
		k := start(4 * time.Hour)
		k.Find(broken("n1"))
		require.NoError(t, k.Mark(t.Context(), "n2", "me", "smoke"))
		require.NoError(t, k.Close())
		end := time.Now().Add(10 * time.Minute)
		require.NoError(t, start(10*time.Minute).Close())
		time.Sleep(9 * time.Minute)
		k = start(10 * time.Minute)
		require.Equal(t, []string{"n1", "n2"}, c.names())
		require.WithinDuration(t, end, c.until["n1"], time.Second)
		time.Sleep(time.Minute + time.Second)
		synctest.Wait()
		require.Equal(t, []string{"n2"}, c.names())
		require.NoError(t, k.Close())
	})
}

func TestAnActorThatFailsIsShownAndLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		c := &cluster{marks: map[string]bool{"old": true}, fail: errors.New("away")}
		k := open(t, Config{Actor: c, Log: slog.New(slog.NewTextHandler(&out, nil))})
		k.Find(broken("n1"))
		time.Sleep(20 * time.Minute)
		synctest.Wait()
		list := k.List()
		require.Len(t, list.Nodes, 1)
		require.Equal(t, Pending, list.Nodes[0].Record.State)
		require.Regexp(t, `^port \d+: away$`, list.Nodes[0].Record.Why)
		require.Len(t, list.Troubles, 2)
		stats := k.Stats()
		require.Equal(t, Stats{Marked: 1, Pending: 1, Failures: c.calls}, stats)
		require.InDelta(t, 45, stats.Failures, 15, "two tasks at last every two minutes, and a sweep")
		require.Equal(t, 3, strings.Count(out.String(), `msg="not carried out"`))

		c.failing(errors.New("closed"))
		time.Sleep(20 * time.Minute)
		synctest.Wait()
		require.Equal(t, 6, strings.Count(out.String(), `msg="not carried out"`), "it is another error")
		_, err := k.Clear(t.Context(), "n1", "me", "")
		require.NoError(t, err)
		synctest.Wait()
		list = k.List()
		require.Equal(t, machineRecord{nodehealth.Node{Name: "n1"}, list.Nodes[0].Record}, list.Nodes[0])
		require.Equal(t, nodehealth.Remove, list.Nodes[0].Record.Do)

		c.failing(nil)
		time.Sleep(sweepEvery)
		synctest.Wait()
		require.Empty(t, k.List().Nodes)
		require.Empty(t, k.List().Troubles)
		require.Empty(t, c.names())
		require.Zero(t, k.Stats().Pending)
		require.NoError(t, k.Close())
	})
}

// lister is a cluster of which something cannot be read.
type lister struct {
	cluster
	sweeps []time.Time
}

func (l *lister) Sweep(context.Context, func(string) bool) error {
	_ = l.call(func() { l.sweeps = append(l.sweeps, time.Now()) })
	return errors.New("an annotation cannot be read")
}

func TestASweepThatFailsIsTriedEverMoreRarely(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &lister{cluster: cluster{marks: map[string]bool{}}}
		k := open(t, Config{Actor: l})
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		require.InDelta(t, 12+23, len(l.sweeps), 2)
		n := len(l.sweeps)
		require.Equal(t, sweepEvery, l.sweeps[n-1].Sub(l.sweeps[n-2]))
		require.Equal(t, firstPause, l.sweeps[1].Sub(l.sweeps[0]), "it may pass")
		require.NoError(t, k.Close())
	})
}

func TestWhatIsFinalIsNotTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		c := &cluster{marks: map[string]bool{}, fail: fmt.Errorf("no such node: %w", ErrFinal)}
		k := open(t, Config{Actor: c, Log: slog.New(slog.NewTextHandler(&out, nil))})
		synctest.Wait()
		for range 3 { // a mark that is renewed is tried, and nothing is said
			k.Find(broken("n1"))
			time.Sleep(20 * time.Minute)
			synctest.Wait()
		}
		require.Equal(t, GivenUp, k.List().Nodes[0].Record.State)
		require.Equal(t, 2+2*3, c.calls, "the list and the sweep, and with each finding the list again")
		require.Equal(t, 1, strings.Count(out.String(), "action=mark node=n1"))
		require.Zero(t, k.Stats().Pending)
		c.failing(nil)
		k.Find(broken("n1"))
		time.Sleep(time.Minute)
		k.Find(broken("n1"))
		synctest.Wait()
		require.NoError(t, k.Close())
	})
}

func TestASpareIsPreferredToWhatIsMarked(t *testing.T) {
	k := open(t, Config{})
	require.False(t, k.Suspect("n1"))
	require.NoError(t, k.Mark(t.Context(), "n1", "me", "smoke"))
	require.True(t, k.Suspect("n1"))
	require.Equal(t, []string{"n1"}, k.Avoid())
	require.Equal(t, 1, k.Stats().Marked)
	require.NoError(t, k.Close())
}
