package coordinator

import (
	"context"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// daemon is one on a connection that can be closed.
type daemon struct {
	Coordinator
	ctx   context.Context // of its requests
	close context.CancelFunc
}

type connectionKey struct{}

func (w *wire) connect(t *testing.T) *daemon {
	w.hub.Load().Connection = func(ctx context.Context) context.Context {
		conn, _ := ctx.Value(connectionKey{}).(context.Context)
		return conn
	}
	conn, end := context.WithCancel(t.Context())
	return &daemon{Client("http://hub", "r", nil, &http.Client{Transport: w}),
		context.WithValue(t.Context(), connectionKey{}, conn), end}
}

// daemonsOf runs a test with the daemons of a world of two nodes, round 7.2, both attending.
func daemonsOf(t *testing.T, test func(t *testing.T, w *wire, a, b *daemon)) {
	synctest.Test(t, func(t *testing.T) {
		w := newWire(t)
		a, b := w.connect(t), w.connect(t)
		for node, d := range []*daemon{a, b} {
			require.NoError(t, d.Ages(d.ctx, "7.2", node, nil))
		}
		test(t, w, a, b)
	})
}

// verdict is the answer to a node that agrees, and after how long.
type verdict struct {
	mine []int
	ok   bool
	took time.Duration
}

// agrees calls Agree for a node that holds one of two shards.
func (d *daemon) agrees(node int) <-chan verdict {
	out, begin := make(chan verdict, 1), time.Now()
	go func() {
		p, ok, err := d.Agree(d.ctx, "breakpoint.7.2.0.abc", node, 2, []Holding{holding("s", 5, 5, node, 2)}, time.Minute)
		if err == nil {
			out <- verdict{p.Mine, ok, time.Since(begin)}
		}
	}()
	synctest.Wait()
	return out
}

// Nobody waits for a daemon that is known to be gone, and a daemon that is there has its time.
func TestDaemonsOfDeadLaunchers(t *testing.T) {
	for name, c := range map[string]struct {
		happens func(w *wire, b *daemon)
		want    time.Duration
	}{
		"all at once": {func(w *wire, b *daemon) { b.close(); synctest.Wait(); w.hub.Load().Lost("r", 7, 2, 1) }, 0},
		"the launcher first": {func(w *wire, b *daemon) {
			w.hub.Load().Lost("r", 7, 2, 1)
			time.Sleep(lostGrace / 2)
			b.close()
		}, lostGrace / 2},
		"the launcher alone":   {func(w *wire, _ *daemon) { w.hub.Load().Lost("r", 7, 2, 1) }, lostGrace},
		"the connection alone": {func(_ *wire, b *daemon) { b.close() }, time.Minute},
		"one of another round": {func(w *wire, b *daemon) { b.close(); w.hub.Load().Lost("r", 7, 1, 1) }, time.Minute},
	} {
		for _, before := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				daemonsOf(t, func(t *testing.T, w *wire, a, b *daemon) {
					if before {
						c.happens(w, b)
						synctest.Wait()
						got := <-a.agrees(0)
						require.False(t, got.ok)
						require.LessOrEqual(t, got.took, c.want)
						return
					}
					got := a.agrees(0)
					c.happens(w, b)
					require.Equal(t, verdict{ok: false, took: c.want}, <-got)
				})
			})
		}
	}
}

// A daemon that dies just after it has announced its holdings, as when all processes of a node are killed, promises
// nothing: others would wait for its shards.
func TestDaemonDiesAfterItsWord(t *testing.T) {
	for name, order := range map[string][]string{
		"word, end, loss, question": {"word", "end", "loss", "question"},
		"word, end, question, loss": {"word", "end", "question", "loss"},
		"word, loss, end, question": {"word", "loss", "end", "question"},
		"end, word, loss, question": {"end", "word", "loss", "question"},
	} {
		t.Run(name, func(t *testing.T) {
			daemonsOf(t, func(t *testing.T, w *wire, a, b *daemon) {
				var got <-chan verdict
				for _, what := range order {
					switch what {
					case "word":
						_ = b.agrees(1)
					case "end":
						b.close()
					case "loss":
						w.hub.Load().Lost("r", 7, 2, 1)
					case "question":
						got = a.agrees(0)
					}
					synctest.Wait()
				}
				require.Equal(t, verdict{}, <-got)
				for _, r := range w.hub.Load().runs.All() {
					r.Lock()
					require.Equal(t, int64(0), r.state.bytes-r.state.agreements["breakpoint.7.2.0.abc"].bytes-
						r.state.participants["7.2"].bytes)
					r.Unlock()
				}
			})
		})
	}
}

// A daemon whose connection breaks repeats its word over another one, and another connection of it that stays will do.
func TestDaemonsConnectAgain(t *testing.T) {
	t.Run("another", func(t *testing.T) {
		daemonsOf(t, func(t *testing.T, w *wire, a, b *daemon) {
			_ = b.agrees(1)
			b.close()
			synctest.Wait()
			got := a.agrees(0)
			again := w.connect(t).agrees(1)
			require.Equal(t, verdict{[]int{0}, true, 0}, <-got)
			require.Equal(t, verdict{[]int{1}, true, 0}, <-again)
		})
	})
	t.Run("the one that stays", func(t *testing.T) {
		daemonsOf(t, func(t *testing.T, w *wire, a, b *daemon) {
			stays := w.connect(t)
			theirs := stays.agrees(1)
			b.close()
			synctest.Wait()
			w.hub.Load().Lost("r", 7, 2, 1)
			require.Equal(t, verdict{[]int{0}, true, 0}, <-a.agrees(0))
			require.Equal(t, verdict{[]int{1}, true, 0}, <-theirs)
		})
	})
}

// A daemon that goes on in the next round has left the one before, and the end of its connection is that of its new
// place.
func TestDaemonsChangeTheirPlaces(t *testing.T) {
	daemonsOf(t, func(t *testing.T, w *wire, a, b *daemon) {
		require.NoError(t, b.Ages(b.ctx, "7.3", 0, nil))
		r := w.hub.Load().runs.Get("r")
		require.True(t, r.state.gone(seat{"7.2", 1}))
		require.False(t, r.state.gone(seat{"7.3", 0}))
		b.close()
		synctest.Wait()
		require.True(t, r.state.gone(seat{"7.3", 0}))
		require.Len(t, r.conns, 1)
		a.close()
		time.Sleep(forgetAfter + sweepEvery)
		r.Lock()
		defer r.Unlock()
		require.True(t, r.Idle(time.Now()))
	})
}

// A word that arrives after the end of its connection has been seen promises nothing either.
func TestWordsOfTheGone(t *testing.T) {
	st := newState()
	at := seat{"7.2", 1}
	for _, ev := range []event{attendEvent{at, false}, attendEvent{at, true},
		agreeEvent{Key: "breakpoint.7.2.0.abc", Node: 1, Nodes: 2, Holdings: []Holding{holding("s", 5, 5, 1, 2)},
			Patience: 1}} {
		_, err := st.step(start, ev)
		require.NoError(t, err)
	}
	require.Empty(t, st.agreements["breakpoint.7.2.0.abc"].held)
	_, err := st.step(start, attendEvent{seat{"7.2", -1}, false})
	require.ErrorIs(t, err, errBadRequest)
}
