package runhost

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	errClosed  = errors.New("closed")
	errFull    = errors.New("full")
	errUnknown = errors.New("unknown")
	errForgot  = errors.New("forgotten")
)

// machine counts what is done to it.
type machine struct {
	Run
	idle   bool
	ticks  []time.Time
	ends   int
	onTick func(*machine)

	due  time.Time // what it has armed, when it checks its ticks
	said int       // it has told the numbers below
	told []int     // that arrived; nobody but the teller writes
	busy atomic.Int32
}

func (m *machine) Tick(now time.Time) {
	m.ticks = append(m.ticks, now)
	if m.onTick != nil {
		m.onTick(m)
	}
}

func (m *machine) Idle(time.Time) bool { return m.idle }
func (m *machine) Closed()             { m.ends++ }

func newHost(waits bool) *Host[*machine] {
	return New[*machine](Config{Closed: errClosed, Full: errFull, Waits: waits,
		Forgotten: func(id string) error { return fmt.Errorf("%w: %s", errForgot, id) }})
}

func unknown(id string) error { return fmt.Errorf("%w: %s", errUnknown, id) }

func opened(t *testing.T, h *Host[*machine], id string) *machine {
	t.Helper()
	m, err := h.Open(id, func() *machine { return &machine{} })
	require.NoError(t, err)
	return m
}

func (m *machine) locked(f func()) {
	m.Lock()
	defer m.Unlock()
	f()
}

// err is why the run is closed.
func (m *machine) err() (err error) {
	m.locked(func() { err = m.Err() })
	return err
}

func TestRunsAreFoundAndBounded(t *testing.T) {
	h := newHost(false)
	_, err := h.Find("0", unknown)
	require.ErrorIs(t, err, errUnknown)
	require.Nil(t, h.Get("0"))
	for i := range MaxRuns {
		opened(t, h, strconv.Itoa(i))
	}
	again, err := h.Open("0", func() *machine { panic("it is there") })
	require.NoError(t, err)
	found, err := h.Find("0", unknown)
	require.NoError(t, err)
	require.Same(t, again, found)
	require.Same(t, again, h.Get("0"))
	clear(h.All())
	require.Len(t, h.All(), MaxRuns)
	_, err = h.Open("more", func() *machine { panic("there is no room") })
	require.ErrorIs(t, err, errFull)

	h.Drop("0", nil)
	require.ErrorIs(t, again.err(), errForgot)
	require.ErrorContains(t, again.err(), ": 0")
	require.NotSame(t, again, opened(t, h, "0"))
	h.Drop("nobody", func(*machine) bool { panic("nobody is asked") })
}

func TestClosedHost(t *testing.T) {
	h := newHost(false)
	m := opened(t, h, "r")
	h.Close()
	h.Close()
	require.Equal(t, 1, m.ends)
	require.ErrorIs(t, m.err(), errClosed)
	_, err := h.Open("r", func() *machine { panic("it is closed") })
	require.ErrorIs(t, err, errClosed)
	_, err = h.Find("r", unknown)
	require.ErrorIs(t, err, errClosed)
	require.Same(t, m, h.Get("r"))
	require.Contains(t, h.All(), "r", "the runs can be looked at")
	require.False(t, h.Prune(time.Now(), true, nil))
}

func TestOneTimer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(false)
		m := opened(t, h, "r")
		start := time.Now()
		arm := func(at time.Duration) {
			m.locked(func() { m.Arm(time.Now(), start.Add(at)) })
		}
		ticks := func() (at []time.Duration) {
			synctest.Wait()
			m.locked(func() {
				for _, tick := range m.ticks {
					at = append(at, tick.Sub(start))
				}
			})
			return at
		}
		arm(3 * time.Second)
		arm(2 * time.Second)
		arm(2 * time.Second)
		time.Sleep(2500 * time.Millisecond)
		require.Equal(t, []time.Duration{2 * time.Second}, ticks(), "the newest Arm counts")
		arm(2 * time.Second) // in the past
		require.Equal(t, []time.Duration{2 * time.Second, 2500 * time.Millisecond}, ticks(), "at once")
		arm(4 * time.Second)
		m.locked(func() { m.Arm(time.Now(), time.Time{}) })
		time.Sleep(time.Minute)
		require.Len(t, ticks(), 2, "never")
		m.Expire()
		require.Len(t, ticks(), 3, "now")

		m.onTick = func(m *machine) { m.Arm(time.Now(), m.ticks[len(m.ticks)-1].Add(time.Second)) }
		arm(time.Minute + 5*time.Second)
		time.Sleep(5500 * time.Millisecond)
		require.Len(t, ticks(), 7, "each tick arms the next")
		h.Drop("r", nil)
		m.Expire()
		arm(2 * time.Minute)
		time.Sleep(time.Hour)
		require.Len(t, ticks(), 7, "a closed run has no time")
	})
}

// What is told arrives without a lock, in order, one at a time, also when telling leads to more of it.
func TestTelling(t *testing.T) {
	for _, waits := range []bool{false, true} {
		t.Run(fmt.Sprint("waits ", waits), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHost(waits)
				m := opened(t, h, "r")
				var told []string
				say := func(text string) func() { return func() { told = append(told, text) } }
				slow := func() {
					require.Contains(t, h.All(), "r", "the host is not locked")
					time.Sleep(time.Second)
					m.locked(func() { m.Tell(say("inner")) })
					say("slow")()
				}
				start := time.Now()
				m.locked(func() { m.Tell(slow); m.Tell(say("second")) })
				if waits {
					require.Equal(t, []string{"slow", "second", "inner"}, told, "the caller has waited")
				} else {
					require.Equal(t, start, time.Now(), "the caller has not waited")
				}
				m.locked(func() { m.Tell(say("last")) })
				synctest.Wait()
				h.Close()
				if !waits {
					require.Equal(t, []string{"slow"}, told, "a closed run tells nothing more")
					return
				}
				require.Equal(t, []string{"slow", "second", "inner", "last"}, told)
				m.locked(func() { m.Tell(say("too late")) })
				require.Len(t, told, 4)
			})
		})
	}
}

// A Run without a host is a lock.
func TestRunWithoutHost(t *testing.T) {
	m := &machine{}
	m.locked(func() { m.Arm(time.Now(), time.Time{}) })
	require.NoError(t, m.err())
}

func TestPrune(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(false)
		defer h.Close()
		idle, back, kept, used := opened(t, h, "idle"), opened(t, h, "back"), opened(t, h, "kept"), opened(t, h, "used")
		for _, m := range []*machine{idle, back, kept} {
			m.locked(func() { m.idle = true })
		}
		var asked []string
		keep := func(id string) bool {
			asked = append(asked, id)
			require.Len(t, h.All(), 4-len(asked)+1, "no lock is held, and one after the other goes")
			if id == "back" {
				back.locked(func() { back.idle = false })
			}
			return false
		}
		h.Drop("kept", func(*machine) bool { return false })
		require.True(t, h.Prune(time.Now(), false, func(id string) bool { return true }))
		require.Len(t, h.All(), 4)
		time.Sleep(pruneEvery)
		require.False(t, h.Prune(time.Now(), false, nil), "too early")
		require.True(t, h.Prune(time.Now(), true, func(id string) bool { return id != "idle" }), "urgent")
		require.ErrorIs(t, idle.err(), errForgot)
		require.Len(t, h.All(), 3)
		time.Sleep(pruneEvery + 1)
		asked = []string{"idle"}
		keepBack := func(id string) bool { return id == "kept" || keep(id) }
		require.True(t, h.Prune(time.Now(), false, keepBack))
		require.NoError(t, back.err(), "it was used meanwhile")
		require.NoError(t, kept.err())
		require.NoError(t, used.err())
		require.True(t, h.Prune(time.Now(), true, nil))
		require.ErrorIs(t, kept.err(), errForgot)
		require.Len(t, h.All(), 2)
	})
}

// history lets many do anything at the same time, on the clock of synctest, and holds what a Machine may rely on.
type history struct {
	t    *testing.T
	host *Host[*machine]
	mu   sync.Mutex
	all  []*machine // that were ever made
}

func (h *history) open(id string) *machine {
	m, err := h.host.Open(id, func() *machine {
		m := &machine{onTick: h.ticked}
		h.mu.Lock()
		defer h.mu.Unlock()
		h.all = append(h.all, m)
		return m
	})
	if err != nil {
		require.ErrorIs(h.t, err, errClosed)
		return nil
	}
	return m
}

// ticked: a tick comes when it was armed for.
func (h *history) ticked(m *machine) {
	require.Equal(h.t, m.due, time.Now())
	require.Zero(h.t, m.ends, "no tick after the end")
	m.due = time.Time{}
}

// step arms the timer and tells a number.
func (h *history) step(r *rand.Rand, m *machine) {
	now := time.Now()
	if m.due = now.Add(time.Duration(1+r.IntN(5)) * time.Second); r.IntN(4) == 0 {
		m.due = time.Time{}
	}
	m.Arm(now, m.due)
	m.idle = r.IntN(4) == 0
	n := m.said
	if m.Err() == nil {
		m.said++
	}
	m.Tell(func() {
		require.Equal(h.t, int32(1), m.busy.Add(1), "one at a time")
		m.told = append(m.told, n)
		time.Sleep(time.Millisecond)
		if r := rand.IntN(8); r == 0 {
			m.locked(func() {})
		}
		m.busy.Add(-1)
	})
}

func (h *history) act(r *rand.Rand) {
	id := strconv.Itoa(r.IntN(4))
	switch r.IntN(8) {
	case 0:
		h.host.Drop(id, func(m *machine) bool { return m.idle })
	case 1:
		h.host.Prune(time.Now(), r.IntN(2) == 0, func(string) bool { return rand.IntN(2) == 0 })
	default:
		if m := h.open(id); m != nil {
			m.locked(func() { h.step(r, m) })
		}
	}
	time.Sleep(time.Duration(r.IntN(1500)) * time.Millisecond)
}

func (h *history) run(seed uint64) {
	var wg sync.WaitGroup
	for i := range uint64(5) {
		r := rand.New(rand.NewPCG(seed, i))
		wg.Go(func() {
			for range 40 {
				h.act(r)
			}
			if i == 0 && r.IntN(2) == 0 {
				h.host.Close()
			}
		})
	}
	wg.Wait()
	h.host.Close()
	for _, m := range h.all {
		require.Equal(h.t, 1, m.ends)
		require.Error(h.t, m.err())
		require.LessOrEqual(h.t, len(m.told), m.said)
		require.True(h.t, slices.IsSorted(m.told), "in order")
		require.Equal(h.t, len(m.told), len(slices.Compact(m.told)), "once")
		ticks := len(m.ticks)
		time.Sleep(time.Hour)
		require.Len(h.t, m.ticks, ticks)
	}
}

func TestRandomHistories(t *testing.T) {
	for seed := range uint64(100) {
		synctest.Test(t, func(t *testing.T) {
			(&history{t: t, host: newHost(seed%2 == 0)}).run(seed)
		})
	}
}
