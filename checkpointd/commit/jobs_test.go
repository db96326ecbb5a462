package commit

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/fsx/crashfs"
)

// saver is the writers of a save of two shards.
type saver struct {
	store   Store
	s       Save
	jobs    []*job
	entries []Entry
}

func newSaver(store Store, s Save) *saver {
	jobs := []*job{newJob(store, s, 0), newJob(store, s, 1)}
	return &saver{store, s, jobs, []Entry{jobs[0].entry, jobs[1].entry}}
}

func (v *saver) begin() error { return v.store.Intent(v.s, v.entries) }

func (v *saver) publish() error {
	_, err := v.store.Publish(v.s, v.entries)
	return err
}

func (v *saver) all() error {
	return steps(v.begin(), v.jobs[0].place(), v.jobs[1].place(), v.publish())
}

// Two jobs save the same step into one directory at the same time. Wherever the first one is when the second comes, the
// directory ends up with the step of one of them, and never with a mixture.
func TestTwoJobsCommitOneStep(t *testing.T) {
	for name, play := range map[string]func(a, b *saver, pauses func(f func() error, meanwhile func() error)){
		"they begin": func(a, b *saver, pauses func(func() error, func() error)) {
			pauses(a.begin, b.begin)
			_ = steps(a.jobs[0].place(), b.jobs[0].place(), b.jobs[1].place(), a.jobs[1].place())
			_, _ = a.publish(), b.publish() // the one that was overtaken may fail
		},
		"one ends": func(a, b *saver, pauses func(func() error, func() error)) {
			_ = steps(a.begin(), a.jobs[0].place(), a.jobs[1].place())
			pauses(a.publish, b.all)
		},
	} {
		t.Run(name, func(t *testing.T) {
			for n, more := 0, true; more; n++ {
				more = twoJobs(t, n, play)
				require.True(t, more || n > 8, "there are more operations")
			}
		})
	}
}

// twoJobs has the first job pause at an operation, and reports whether there is such a one.
func twoJobs(t *testing.T, n int, play func(a, b *saver, pauses func(func() error, func() error))) (paused bool) {
	fs, store := modelStore()
	store.patience = time.Minute
	a, b := newSaver(store, saveOf(2, "7.1.0", 10, 2)), newSaver(store, saveOf(3, "8.1.0", 10, 2))
	mustWrite(t, store, saveOf(1, "6.1.0", 5, 2))
	for _, v := range []*saver{a, b} {
		require.NoError(t, steps(v.jobs[0].prepare(), v.jobs[1].prepare()))
	}
	play(a, b, func(f, meanwhile func() error) {
		at, goOn, errs := make(chan struct{}), make(chan struct{}), make(chan error, 2)
		left := n
		fs.Fault(func(crashfs.Op) error {
			if left--; left == -1 {
				close(at)
				<-goOn
			}
			return nil
		})
		go func() { errs <- f() }()
		select {
		case <-at:
			paused = true
		case err := <-errs:
			errs <- err
		}
		fs.Fault(nil)
		go func() { errs <- meanwhile() }()
		time.Sleep(2 * time.Millisecond) // it waits, or is done
		close(goOn)
		for range 2 {
			if err := <-errs; err != nil {
				require.ErrorIs(t, err, ErrSuperseded)
			}
		}
	})
	_, err := store.Recover(context.Background(), dir, nil)
	require.NoError(t, err)
	m, ok := store.Committed(dir, 10)
	require.True(t, ok)
	require.NoError(t, store.Verify(t.Context(), dir, m, nil), "paused at %d", n)
	for path, data := range fs.Tree() {
		if strings.Contains(path, "global_step10/") && !strings.HasSuffix(path, "/") {
			require.True(t, strings.HasPrefix(data, m.ID+":"), "%s is of another job", path)
		}
	}
	return paused
}
