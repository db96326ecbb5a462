package dump

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSecondsAreAskedFor(t *testing.T) {
	w, dir := newWorker(t)
	profile := func() (note chan string, err chan error) {
		note, err = make(chan string, 1), make(chan error, 1)
		go func() {
			n, e := Profile(t.Context(), dir, 1, 1500*time.Millisecond, "/out/t.json")
			note <- n
			err <- e
		}()
		return note, err
	}
	note, err := profile()
	r := w.asked()
	require.NotZero(t, w.word&timed)
	require.Zero(t, w.word&begun)
	require.Equal(t, "/out/t.json", r.Path)
	b, readErr := os.ReadFile(w.request)
	require.NoError(t, readErr)
	require.Contains(t, string(b), `"seconds":1.5`)
	_, again := Timeline(t.Context(), dir, 1, 5, "/out/t.json")
	require.ErrorContains(t, again, "another timeline")
	w.answers(result{Path: r.Path, Steps: 7, Seconds: 1.52})
	require.Equal(t, "1.5 s with 7 steps", <-note)
	require.NoError(t, <-err)

	note, err = profile()
	w.asked()
	w.answers(result{Path: r.Path, Steps: 2, Seconds: 0.4, Error: "the process has forked"})
	require.Equal(t, "0.4 s with 2 steps, and no more: the process has forked", <-note)
	require.NoError(t, <-err)

	_, err = profile()
	w.asked()
	w.answers(result{Error: "a profile needs PyTorch 2.7 or newer"})
	require.ErrorContains(t, <-err, "a profile needs PyTorch 2.7 or newer")
}

// Whatever the clock says, a request for steps is not mistaken for a request for seconds.
func TestAWordHasNoStrangeBits(t *testing.T) {
	for _, kind := range []uint64{0, timed} {
		require.Equal(t, kind, newTimeline(t.TempDir(), 0, kind).word&(begun|timed))
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Profile(ctx, t.TempDir(), 0, time.Second, "/x")
	require.ErrorContains(t, err, "no optimizer of PyTorch steps in it, and it has no process group")
}
