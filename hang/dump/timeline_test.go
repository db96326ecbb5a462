package dump

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/hang/page/pagetest"
)

const patience = 20 * time.Second

// worker is a page, and what a worker does with requests.
type worker struct {
	*timeline
	t *testing.T
}

func newWorker(t *testing.T) (w *worker, dir string) {
	t.Helper()
	dir = t.TempDir()
	w = &worker{&timeline{page: filepath.Join(dir, "l1.page"), request: filepath.Join(dir, "l1.timeline")}, t}
	page := pagetest.Bytes(hang.Page{PID: 7, WorldSize: 2, Rank: 1, Local: 1})
	require.NoError(t, os.WriteFile(w.page, page, 0o600))
	return w, dir
}

// asked waits for a request.
func (w *worker) asked() (r struct {
	Path  string
	Steps int
}) {
	require.Eventually(w.t, func() bool { w.word, _ = w.wanted(); return w.word > stop }, patience, lookEvery/10)
	b, err := os.ReadFile(w.request)
	require.NoError(w.t, err)
	require.NoError(w.t, json.Unmarshal(b, &r))
	return r
}

// answers says what has become of it.
func (w *worker) answers(r result) {
	r.Word = w.word
	b, err := json.Marshal(r)
	require.NoError(w.t, err)
	require.NoError(w.t, os.WriteFile(w.request+".done", b, 0o600))
	require.NoError(w.t, w.put(0))
}

// ask calls Timeline beside the test.
func ask(ctx context.Context, dir string) (note chan string, err chan error) {
	note, err = make(chan string, 1), make(chan error, 1)
	go func() {
		n, e := Timeline(ctx, dir, 1, 5, "/out/t.json")
		note <- n
		err <- e
	}()
	return note, err
}

func TestTimelineIsAskedFor(t *testing.T) {
	w, dir := newWorker(t)
	note, err := ask(t.Context(), dir)
	r := w.asked()
	require.Equal(t, "/out/t.json", r.Path)
	require.Equal(t, 5, r.Steps)
	require.NoError(t, w.put(w.word|begun))
	_, again := Timeline(t.Context(), dir, 1, 5, "/out/t.json")
	require.ErrorContains(t, again, "another timeline")
	w.answers(result{Path: r.Path, Steps: 5})
	require.Empty(t, <-note)
	require.NoError(t, <-err)

	note, err = ask(t.Context(), dir)
	w.asked()
	w.answers(result{Path: r.Path, Steps: 2, Error: "the process has ended"})
	require.Equal(t, "2 of 5 steps: the process has ended", <-note)
	require.NoError(t, <-err)

	_, err = ask(t.Context(), dir)
	w.asked()
	w.answers(result{Error: "the job's own profiler runs"})
	require.ErrorContains(t, <-err, "the job's own profiler runs")
}

// What nobody waits for any more is not recorded, and ends if it has begun. Then there may be another one.
func TestTimelineIsWithdrawn(t *testing.T) {
	w, dir := newWorker(t)
	for _, begins := range []bool{false, true} {
		ctx, cancel := context.WithCancel(t.Context())
		_, err := ask(ctx, dir)
		w.asked()
		if begins {
			require.NoError(t, w.put(w.word|begun))
		}
		cancel()
		require.ErrorContains(t, <-err, "it has not ended")
		word, _ := w.wanted()
		require.EqualValues(t, stop, word)
	}
}

// Of two who ask at once, one is refused.
func TestTimelinesAreAskedForAtOnce(t *testing.T) {
	w, _ := newWorker(t)
	for range 20 {
		var asked atomic.Int32
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				mine := &timeline{page: w.page, request: w.request, word: uint64(100 + i)}
				if mine.ask(map[string]any{"path": "/x"}) == nil {
					asked.Add(1)
				}
			})
		}
		wg.Wait()
		require.EqualValues(t, 1, asked.Load())
		require.NoError(t, w.put(0))
	}
}

func TestTimelineOfWhatIsNoWorker(t *testing.T) {
	w, dir := newWorker(t)
	_, err := Timeline(t.Context(), dir, 0, 1, "/x")
	require.ErrorContains(t, err, "no optimizer of PyTorch steps in it")
	_, gone := ask(t.Context(), dir)
	w.asked()
	require.NoError(t, os.Remove(w.page))
	require.ErrorContains(t, <-gone, "the worker has ended")
	require.NoError(t, os.WriteFile(w.page, binary.LittleEndian.AppendUint64(nil, 1), 0o600))
	_, err = Timeline(t.Context(), dir, 1, 1, "/x")
	require.Error(t, err)
}
