package watch

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/internal/job"
)

// script is a Detector that suspects by the clock: rank 10 from one moment to the other.
type script struct {
	began    time.Time
	from, to time.Duration
	looks    []time.Duration
}

func (s *script) Look(time.Duration, []hang.Sample, []hang.StoreWait) []hang.Suspicion {
	at := time.Since(s.began)
	s.looks = append(s.looks, at)
	if s.from > 0 && at >= s.from && at < s.to {
		return []hang.Suspicion{{Rank: 10, Age: at}}
	}
	return nil
}

func (s *script) Work(int) hang.Work    { return hang.Work("network") }
func (s *script) Paused() time.Duration { return time.Hour }

// judge hears reports.
type judge struct {
	began time.Time
	fail  func(r hang.Report) error

	mu    sync.Mutex
	heard []hang.Report
	at    []time.Duration
}

func (j *judge) post(_ context.Context, r hang.Report) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.fail != nil {
		if err := j.fail(r); err != nil {
			return err
		}
	}
	j.heard, j.at = append(j.heard, r), append(j.at, time.Since(j.began))
	return nil
}

// bench watches over two processes that do nothing.
func bench(t *testing.T) (Config, *script, *judge) {
	root := t.TempDir()
	fakeProc(t, root, 7, 1)
	fakeProc(t, root, 8, 1)
	s, j := &script{began: time.Now()}, &judge{began: time.Now()}
	began := time.Now()
	for _, pid := range []string{"7", "8"} {
		require.NoError(t, os.Symlink("/usr/bin/python3.11", filepath.Join(root, pid, "exe")))
	}
	return Config{
		Epoch: job.EpochID{Term: 1, Round: 2, Epoch: 3}, Node: "n", RankBase: 10, PIDs: []int{7, 8},
		First: 5 * time.Second, Every: 5 * time.Second, Detector: s, Post: j.post, Log: slog.New(slog.DiscardHandler),
		root: root, now: func() time.Duration { return time.Hour + time.Since(began) },
	}, s, j
}

// watchFor watches for a time, and asks at some moment of it.
func watchFor(t *testing.T, w *Watcher, d time.Duration, asks map[time.Duration]hang.Ask) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	for at, a := range asks {
		time.AfterFunc(at, func() { w.Ask(a) })
	}
	w.Watch(ctx)
}

func TestNothingIsReadBeforeTheFirstLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s, j := bench(t)
		w := New(c)
		watchFor(t, w, c.First-time.Nanosecond, nil)
		require.Nil(t, w.looker)
		require.Empty(t, s.looks)
		require.Empty(t, j.heard)
	})
}

func TestSuspicionsAreToldAtOnceRepeatedAndWithdrawn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s, j := bench(t)
		s.from, s.to = 15*time.Second, 27*time.Second
		c.Store = func() []hang.StoreWait { return []hang.StoreWait{{Key: "rank_1"}} }
		watchFor(t, New(c), 39*time.Second, nil)
		require.Equal(t, []time.Duration{15 * time.Second, 15*time.Second + hang.RepeatEvery, 30 * time.Second}, j.at)
		for _, r := range j.heard[:2] {
			require.Equal(t, c.Epoch, r.Epoch)
			require.Len(t, r.Suspicions, 1)
			require.Equal(t, "rank_1", r.Store[0].Key)
			require.Nil(t, r.Evidence)
		}
		require.Empty(t, j.heard[2].Suspicions, "withdrawn")
		require.Equal(t, []time.Duration{5e9, 10e9, 15e9, 20e9, 25e9, 30e9, 35e9}, s.looks)
	})
}

// Nobody can say what a program that is no Python waits for, unless it uses the workers' store.
func TestSuspicionsOfOtherPrograms(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s, j := bench(t)
		s.from, s.to = time.Nanosecond, time.Hour
		require.NoError(t, os.Remove(filepath.Join(c.root, "7", "exe")))
		require.NoError(t, os.Symlink("/bin/sleep", filepath.Join(c.root, "7", "exe")))
		watchFor(t, New(c), 30*time.Second, nil)
		require.Len(t, j.heard, 1, "that they run")
		require.Empty(t, j.heard[0].Suspicions)
		c.Store = func() []hang.StoreWait { return []hang.StoreWait{{Key: "rank_1"}} }
		watchFor(t, New(c), 30*time.Second, nil)
		require.NotEmpty(t, j.heard[len(j.heard)-1].Suspicions)
	})
}

// Each of 10,000 nodes has less to say, and the first of it at any time.
func TestSummariesOfOneNodeAmongMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first := map[int]bool{}
		for range 20 {
			c, _, j := bench(t)
			c.Summaries = hang.Summaries(10_000)
			watchFor(t, New(c), 30*time.Minute, nil)
			require.InDelta(t, 6, len(j.heard), 1)
			first[int(j.at[0]/time.Minute)] = true
		}
		require.Greater(t, len(first), 2)
	})
}

func TestSummariesOfOneNodeAmongSeveral(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _, j := bench(t)
		watchFor(t, New(c), 5*time.Minute, nil)
		require.Len(t, j.heard, 1, "who is alone has nothing more to tell")
		c, _, j = bench(t)
		c.Summaries = hang.Summaries(2)
		watchFor(t, New(c), 5*time.Minute, nil)
		require.InDelta(t, 25, len(j.heard), 5)
		for i, r := range j.heard {
			require.NotNil(t, r.Summary)
			require.GreaterOrEqual(t, r.Summary.Age, time.Duration(i)*9*time.Second)
			require.Empty(t, r.Suspicions)
			require.Nil(t, r.Summary.Looks, "without pages")
		}
	})
}

// Who is alone tells the judge that its steps have become slower, and that they are as before.
func TestSlowStepsAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _, j := bench(t)
		c.Pages = t.TempDir()
		require.NoError(t, os.WriteFile(pageFile(c.Pages, 0, "page"), nil, 0o600))
		c.Parse = func([]byte) (hang.Page, error) {
			p, step := hang.Page{}, 100*time.Millisecond
			if at := time.Since(j.began); at > 10*time.Minute && at < 20*time.Minute {
				step = 130 * time.Millisecond
			}
			for i := range 20 {
				p.StepTimes = append(p.StepTimes, c.now()-time.Duration(20-i)*step)
			}
			return p, nil
		}
		watchFor(t, New(c), 30*time.Minute, nil)
		require.Greater(t, len(j.heard), 2)
		require.Empty(t, j.heard[0].Summary.Slow)
		require.InDelta(t, 14, j.at[1].Minutes(), 1.5)
		require.Regexp(t, `^steps of 100ms until \d\d:\d\d:\d\d, 130ms since$`, j.heard[1].Summary.Slow)
		last := len(j.heard) - 1
		require.InDelta(t, 24, j.at[last].Minutes(), 1.5)
		require.Empty(t, j.heard[last].Summary.Slow)
	})
}

// A judge that cannot be reached is tried again, with the newest news only.
func TestReportsAreTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s, j := bench(t)
		s.from, s.to = 5*time.Second, time.Hour
		j.fail = func(hang.Report) error {
			if time.Since(j.began) < 18*time.Second+time.Millisecond {
				return errors.New("refused")
			}
			return nil
		}
		watchFor(t, New(c), 19500*time.Millisecond, nil)
		require.Len(t, j.heard, 1)
		require.Greater(t, j.heard[0].Suspicions[0].Age, 14*time.Second)
	})
}

func TestEvidence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s, j := bench(t)
		s.from, s.to = time.Nanosecond, time.Hour
		c.Stacks = stuckFor(8, time.Minute)
		c.Sockets = func(pids []int) map[int][]string { return map[int][]string{pids[1]: {"127.0.0.1:1"}} }
		c.Flight = func(_ context.Context, rank int) (*hang.Flight, error) { return &hang.Flight{}, nil }
		c.RAS = func(ctx context.Context) string { return "ras" }
		c.Store = func() []hang.StoreWait { return []hang.StoreWait{{Key: "k"}} }
		watchFor(t, New(c), 30*time.Second, map[time.Duration]hang.Ask{
			6 * time.Second: {Seq: 9, What: hang.AskEvidence}, 13 * time.Second: {Seq: 10, What: hang.AskPages},
			14 * time.Second: {Seq: 11, What: hang.AskStacks},
		})
		answers := map[uint64]hang.Report{}
		at := map[uint64]time.Duration{}
		for i, r := range j.heard {
			answers[r.Ask], at[r.Ask] = r, j.at[i]
		}
		e := answers[9]
		require.InDelta(t, 10, at[9].Seconds(), 0.1, "as long as the one that cannot be read")
		require.Len(t, e.Suspicions, 1, "an answer withdraws nothing")
		require.Len(t, e.Evidence, 2)
		require.Equal(t, "ras", e.RAS)
		require.Equal(t, "k", e.Store[0].Key)
		require.Equal(t, time.Hour, e.Paused)
		for i, ev := range e.Evidence {
			require.Equal(t, 10+i, ev.Rank)
			require.Equal(t, "n", ev.Node)
			require.Equal(t, hang.Work("network"), ev.Work)
			require.NotNil(t, ev.Flight)
			require.Len(t, ev.Samples, 3)
			require.Equal(t, 4*time.Second, ev.Samples[2].At-ev.Samples[0].At)
		}
		require.Equal(t, "CPython", e.Evidence[0].Stacks.Interpreter)
		require.Empty(t, e.Evidence[0].Error)
		require.Nil(t, e.Evidence[1].Stacks)
		require.Contains(t, e.Evidence[1].Error, "in time")
		require.Equal(t, []string{"127.0.0.1:1"}, e.Evidence[1].Sockets)

		require.Len(t, answers[10].Evidence, 2)
		require.Len(t, answers[10].Evidence[0].Samples, 1)
		require.Nil(t, answers[10].Evidence[0].Stacks)
		require.Nil(t, answers[10].Evidence[0].Flight)
		require.NotNil(t, answers[11].Evidence[0].Stacks)
		require.NotNil(t, answers[11].Evidence[0].Flight, "of a healthy job, too")
		time.Sleep(2 * time.Minute) // what was left behind ends
	})
}

// stuckFor reads stacks, but of one process it does not return, whatever its context says.
func stuckFor(pid int, d time.Duration) func(context.Context, int) (hang.Stacks, error) {
	return func(_ context.Context, p int) (hang.Stacks, error) {
		if p == pid {
			time.Sleep(d)
		}
		return hang.Stacks{Interpreter: "CPython"}, nil
	}
}

// loop is a process whose main thread joins the one that trains.
func loop(tid int) hang.Stacks {
	threading := "/usr/lib/python3.11/threading.py"
	return hang.Stacks{Threads: []hang.Thread{
		{TID: 7, Main: true, Python: []hang.Frame{{Func: "join", File: threading}}},
		{TID: tid, Python: []hang.Frame{{Func: "load", File: "/job/data.py"}, {Func: "run", File: threading}}},
		{TID: 99, Name: "dlrover-hang", Python: []hang.Frame{{Func: "_run", File: "/x/_dlrover_hang/worker.py"}}},
	}}
}

// fakeThread adds a thread to a process of fakeProc.
func fakeThread(t *testing.T, root string, pid, tid int, state byte) {
	t.Helper()
	dir := filepath.Join(root, strconv.Itoa(pid), "task", strconv.Itoa(tid))
	require.NoError(t, os.MkdirAll(dir, 0o700))
	for name, text := range map[string]string{
		"stat": line("python3", state, 1, 1, 0, 0, 4, 1), "schedstat": "90 91 92\n", "wchan": "hrtimer_nanosleep",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
}

// From the moment that its stacks are known a worker is its thread that trains, until that has ended.
func TestTheThreadThatTrainsIsFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _, j := bench(t)
		fakeThread(t, c.root, 7, 70, 'R')
		c.Stacks = func(_ context.Context, pid int) (hang.Stacks, error) { return loop(10 * pid), nil }
		w := New(c)
		watchFor(t, w, 22*time.Second, map[time.Duration]hang.Ask{time.Second: {Seq: 1, What: hang.AskEvidence}})
		e := j.heard[0].Evidence[0]
		for i, thread := range []int{0, 70, 70} {
			require.Equal(t, thread, e.Samples[i].Proc.Thread)
		}
		p := e.Samples[2].Proc
		require.Equal(t, []any{byte('R'), "hrtimer_nanosleep", uint64(92)}, []any{p.State, p.WChan, p.Switches})
		require.Equal(t, "load", e.Stacks.Main().Python[0].Func)
		require.Len(t, e.Stacks.Threads, 2, "without the shim's own thread")
		require.Equal(t, byte('S'), j.heard[0].Evidence[1].Samples[2].Proc.State, "it has no thread 80")
		require.Equal(t, 70, w.looker.state[0].last.Proc.Thread, "looks follow it, too")
		require.NoError(t, os.RemoveAll(filepath.Join(c.root, "7", "task", "70")))
		require.Zero(t, w.looker.clone().look(t.Context(), false)[0].Proc.Thread)
	})
}

// What the shim has seen is known before any stack is read.
func TestTheShimKnowsTheThreadThatTrains(t *testing.T) {
	root := t.TempDir()
	fakeProc(t, root, 7, 1)
	fakeThread(t, root, 7, 70, 'S')
	l := lookAt(root, 7)
	l.sampler.pages, l.sampler.parse = t.TempDir(), func([]byte) (hang.Page, error) {
		return hang.Page{PID: 7, Start: 1, Thread: 70}, nil
	}
	require.NoError(t, os.WriteFile(pageFile(l.sampler.pages, 0, "page"), nil, 0o600))
	require.Equal(t, 70, l.look(t.Context(), false)[0].Proc.Thread)
	f := &family{sampler: l.sampler, pid: 7, steps: 71, own: func(context.Context, int) (hang.Stacks, error) {
		s := loop(70)
		s.Threads = append(s.Threads, hang.Thread{TID: 71, Python: s.Threads[1].Python})
		return s, nil
	}}
	require.Equal(t, 71, f.stacks(t.Context(), make(chan struct{}, 1)).Main().TID)
}

// Of sixteen loaders of data the one that is stuck is shown, and one of those that have nothing to do.
func TestChildrenOfWhoDoesNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _, j := bench(t)
		var children []string
		for pid := 200; pid < 216; pid++ {
			fakeProc(t, c.root, pid, 1)
			children = append(children, strconv.Itoa(pid))
		}
		for _, pid := range []string{"7", "8"} {
			path := filepath.Join(c.root, pid, "task", pid, "children")
			require.NoError(t, os.WriteFile(path, []byte(strings.Join(children, " ")), 0o600))
		}
		frames := func(names ...string) (fs []hang.Frame) {
			for _, n := range names {
				fs = append(fs, hang.Frame{Func: n, File: map[bool]string{true: "/job/data.py",
					false: "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py"}[n != "all_reduce"]})
			}
			return fs
		}
		c.Stacks = func(_ context.Context, pid int) (hang.Stacks, error) {
			what := frames("get", "main")
			switch pid {
			case 7:
				what = frames("main")
			case 8:
				what = frames("all_reduce", "main")
			case 209:
				what = frames("decode", "getitem", "main")
			}
			return hang.Stacks{Threads: []hang.Thread{{TID: pid, Name: "python3", Main: true, Python: what}}}, nil
		}
		watchFor(t, New(c), 3*time.Second, map[time.Duration]hang.Ask{time.Second: {Seq: 1, What: hang.AskStacks}})
		its := j.heard[0].Evidence[0].Stacks.Children
		require.Len(t, its, 2)
		require.Equal(t, []any{209, "python3", "decode"}, []any{its[0].TID, its[0].Name, its[0].Python[0].Func})
		require.Equal(t, []any{200, "python3, one of 15 alike"}, []any{its[1].TID, its[1].Name})
		require.Empty(t, j.heard[0].Evidence[1].Stacks.Children, "it waits for another rank")
		require.Empty(t, New(c).Once(t.Context())[0].Stacks.Children, "before a stop there is no time for them")
	})
}

func TestTheExceptionBehindAProcessThatDoesNotEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _, j := bench(t)
		c.Output = func(int) string { return "ValueError: bad" }
		c.Exception = func(output string) string { return "found " + output }
		c.Stacks = func(_ context.Context, pid int) (hang.Stacks, error) {
			name := map[int]string{7: "_shutdown", 8: "join"}[pid]
			return hang.Stacks{Threads: []hang.Thread{
				{TID: pid, Main: true, Python: []hang.Frame{{Func: name, File: "/usr/lib/python3.11/threading.py"}}},
			}}, nil
		}
		watchFor(t, New(c), 3*time.Second, map[time.Duration]hang.Ask{time.Second: {Seq: 1, What: hang.AskStacks}})
		require.Equal(t, "found ValueError: bad", j.heard[0].Evidence[0].Exception)
		require.Empty(t, j.heard[0].Evidence[1].Exception, "what it has printed it has survived")
	})
}

// What stops a process for a moment is for those that are suspected.
func TestTheHealthyAreNotTraced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s, j := bench(t)
		s.from, s.to = 4*time.Second, time.Hour
		c.Stacks = func(context.Context, int) (hang.Stacks, error) { return hang.Stacks{Interpreter: "read"}, nil }
		c.Trace = func(context.Context, int) (hang.Stacks, error) { return hang.Stacks{Interpreter: "traced"}, nil }
		watchFor(t, New(c), 12*time.Second, map[time.Duration]hang.Ask{
			time.Second: {Seq: 1, What: hang.AskStacks}, 6 * time.Second: {Seq: 2, What: hang.AskEvidence},
		})
		by := map[uint64][]string{}
		for _, r := range j.heard {
			for _, e := range r.Evidence {
				by[r.Ask] = append(by[r.Ask], e.Stacks.Interpreter)
			}
		}
		require.Equal(t, map[uint64][]string{1: {"read", "read"}, 2: {"traced", "read"}}, by)
	})
}

func TestAnErrorOfTheReaderIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _, j := bench(t)
		c.Stacks = func(context.Context, int) (hang.Stacks, error) { return hang.Stacks{}, errors.New("no permission") }
		watchFor(t, New(c), 3*time.Second, map[time.Duration]hang.Ask{time.Second: {Seq: 1, What: hang.AskStacks}})
		require.Equal(t, "no permission", j.heard[0].Evidence[0].Stacks.Error)
	})
}

// The end of an epoch ends what is being collected, and tells nothing half.
func TestTheEndOfTheEpochInMidEvidence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _, j := bench(t)
		watchFor(t, New(c), 3*time.Second, map[time.Duration]hang.Ask{time.Second: {Seq: 1, What: hang.AskEvidence}})
		require.Empty(t, j.heard)
	})
}

func TestTheEndOfTheOutputComesWithStacks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _, j := bench(t)
		c.Output = func(local int) string { return "output of " + strconv.Itoa(local) }
		watchFor(t, New(c), 4*time.Second, map[time.Duration]hang.Ask{
			time.Second: {Seq: 1, What: hang.AskStacks}, 2 * time.Second: {Seq: 2, What: hang.AskPages},
		})
		require.Len(t, j.heard, 2)
		require.Equal(t, "output of 1", j.heard[0].Evidence[1].Log)
		require.Empty(t, j.heard[1].Evidence[1].Log, "nor is it read when only progress is asked for")
	})
}
