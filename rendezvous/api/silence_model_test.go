package api

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// fault is a trouble that a host survives, from the moment 0 on.
type fault struct {
	cut      time.Duration // nothing passes
	carrier  bool          // and both ends have to find each other's address anew
	lossy    time.Duration // a third of all packets is lost
	launcher time.Duration // the launcher is stopped
	daemon   time.Duration // the daemon is stopped
}

// link plays one connection of a launcher with its kernels, packet by packet.
type link struct {
	*rand.Rand
	fault
	found time.Duration // from then on both ends know each other's address
}

// passes: a packet and its answer arrive.
func (l *link) passes(at time.Duration) bool {
	loss := 0.001
	switch {
	case at < l.cut:
		return false
	case at < l.lossy:
		loss = 1. / 3
	}
	return at >= l.found && l.Float64() > loss && l.Float64() > loss
}

// silent is when the kernel gives the connection up, as watchAlive and TCP_USER_TIMEOUT have it; ok: it does not.
func (l *link) silent() (at time.Duration, ok bool) {
	heard, unanswered := -time.Duration(l.Int64N(int64(watchAlive.Idle))), 0
	for at = heard + watchAlive.Idle; at < max(l.cut, l.lossy)+watchAlive.Interval; at += watchAlive.Interval {
		if at-heard >= rendezvous.SuspectAfter && unanswered > 0 {
			return at, false
		}
		if unanswered++; l.passes(at) {
			heard, unanswered = at, 0
		}
	}
	return 0, true
}

// dials is when a launcher that runs has reached the daemon after at, in its own rhythm.
func (l *link) dials(at time.Duration) time.Duration {
	for at = max(at, l.launcher); !l.passes(at); {
		at += time.Duration(l.Int64N(int64(eagerBackoff)))
	}
	return at
}

// reached: the daemon's exam from at on is answered.
func (l *link) reached(at time.Duration) bool {
	for end := at + examTime; at < end; at += examPause {
		if l.passes(at) || at+time.Second < end && l.passes(at+time.Second) {
			return true
		}
	}
	return false
}

// runOfTwo is a running world of "a" and "b".
func runOfTwo(t *testing.T, at time.Time) *rendezvous.Round {
	t.Helper()
	r := rendezvous.New(rendezvous.Config{Term: 1})
	for _, id := range []string{"a", "b"} {
		step(t, r, at, rendezvous.Join{Node: rendezvous.Node{ID: id, Name: id, Rank: -1, Slots: 1},
			Params: rendezvous.Params{Min: 2, Max: 2}})
		step(t, r, at, rendezvous.Attach{ID: id})
	}
	leader, err := r.Member("a")
	require.NoError(t, err)
	require.Equal(t, job.Lead, leader.Directive.Kind)
	step(t, r, at, rendezvous.Ready{ID: "a", EpochID: leader.Directive.EpochID, Addr: "a", Port: 1})
	require.Equal(t, "running", r.Status().Phase)
	return r
}

func step(t *testing.T, r *rendezvous.Round, at time.Time, ev rendezvous.Event) {
	t.Helper()
	_, err := r.Step(at, ev)
	require.NoError(t, err)
}

// strikes plays a fault of b, and reports whether it became suspect.
func strikes(t *testing.T, r *rendezvous.Round, random *rand.Rand, at time.Time, f fault) (suspect bool) {
	t.Helper()
	l := &link{Rand: random, fault: f}
	if f.carrier { // the launcher or its kernel sends something, or the daemon's kernel asks once a second
		l.found = f.cut + min(time.Duration(random.Int64N(int64(time.Second))), max(f.launcher-f.cut, 0)+eagerBackoff)
	}
	silent, ok := l.silent()
	if ok {
		return false
	}
	noticed := max(silent, f.daemon)
	back := max(l.dials(silent), f.daemon)
	events := map[time.Duration]rendezvous.Event{
		noticed: rendezvous.Detach{ID: "b", Broken: true, Silent: true}, max(back, noticed+1): rendezvous.Attach{ID: "b"}}
	if !l.reached(noticed) {
		events[noticed+examTime] = rendezvous.Unreachable{ID: "b"}
	}
	for moment := noticed; moment <= max(back, noticed+examTime)+time.Second; {
		if ev := events[moment]; ev != nil {
			_, _ = r.Step(at.Add(moment), ev) // a node that was lost is not known
			delete(events, moment)
		}
		next := moment + time.Second
		for m := range events {
			next = min(next, m)
		}
		moment = max(next, moment+1)
	}
	step(t, r, at.Add(f.launcher+time.Minute), rendezvous.Tick{})
	return true
}

// In a thousand hours with a trouble every thirty seconds no host is lost that lives: links that are down for up to
// three seconds, losses of packets, hosts and launchers that are stopped, daemons that are.
func TestNoHostIsLostThatLives(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	upTo := func(d time.Duration) time.Duration { return time.Duration(random.Int64N(int64(d))) }
	at := time.Unix(1000, 0)
	r := runOfTwo(t, at)
	suspects := 0
	for range 1000 * 120 {
		at = at.Add(30 * time.Second)
		var f fault
		switch random.IntN(6) {
		case 0:
			f = fault{cut: upTo(3 * time.Second), carrier: true}
		case 1:
			f = fault{cut: upTo(3 * time.Second), launcher: upTo(10 * time.Second)} // the whole host, or its swap
		case 2:
			f = fault{cut: upTo(3 * time.Second), daemon: upTo(10 * time.Second)}
		case 3:
			f = fault{lossy: upTo(20 * time.Second)}
		case 4:
			f = fault{launcher: upTo(time.Minute)}
		default:
			f = fault{daemon: upTo(20 * time.Second)}
		}
		if strikes(t, r, random, at, f) {
			suspects++
		}
		at = at.Add(f.launcher + time.Minute)
		require.Empty(t, r.Evidence().Losses, "%+v", f)
	}
	t.Logf("%d times suspect", suspects)
	require.Greater(t, suspects, 1000, "the troubles are none")
	require.True(t, strikes(t, r, random, at.Add(time.Hour), fault{cut: 8 * time.Second}))
	require.Len(t, r.Evidence().Losses, 1, "a host that is silent for longer is lost")
}
