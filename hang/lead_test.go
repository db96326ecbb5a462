package hang

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Where main threads wait for others, and where nothing is waited for that these do.
const (
	threadingPy = "/usr/lib/python3.11/threading.py"
	joining     = "<module>@/job/train.py:90 join@" + threadingPy + ":1119 _wait_for_tstate_lock@" + threadingPy + ":1139"
	ends        = "_shutdown@" + threadingPy + ":1553"
	waitsEvent  = "<module>@/job/train.py:91 wait@" + threadingPy + ":629 wait@" + threadingPy + ":327"
	bootstrap   = "_bootstrap@" + threadingPy + ":1002 run@" + threadingPy + ":975 "
	fetching    = bootstrap + "train@/job/train.py:15 load_batch@/job/data.py:12"
	reducing    = bootstrap + "train@/job/train.py:18 all_reduce@" + c10dPy + ":1541"
	beating     = bootstrap + "beat@/job/train.py:5"
	pinning     = bootstrap + "_pin_memory_loop@" + site + "utils/data/_utils/pin_memory.py:51"
	saving      = bootstrap + "f@/job/s.py:1 save@" + site + "serialization.py:1"
	nextBatch   = "<module>@/job/train.py:90 __next__@" + site + "utils/data/dataloader.py:1 wait@" + threadingPy + ":3"
	iterating   = bootstrap + "train@/job/train.py:15 __next__@" + site + "utils/data/dataloader.py:628"
)

// threads are those of a process, with ids from 1 on.
func threads(stacks ...string) *Stacks {
	s := &Stacks{}
	for i, text := range stacks {
		s.Threads = append(s.Threads, Thread{TID: i + 1, Main: i == 0, Python: stack(text)})
	}
	return s
}

func TestLead(t *testing.T) {
	for name, c := range map[string]struct {
		by     int
		stacks []string
		want   int // 0: the main thread
	}{
		"a loop in the main thread":                  {0, []string{"main@/job/train.py:3 step@/job/train.py:9", reducing}, 0},
		"joined, in a collective":                    {0, []string{joining, beating, reducing}, 3},
		"joined, in PyTorch":                         {0, []string{joining, beating, iterating}, 3},
		"joined, nothing but the user's code":        {0, []string{joining, fetching}, 2},
		"joined, deepest in the user's code":         {0, []string{joining, beating, fetching}, 3},
		"the main thread itself is deeper":           {0, []string{"f@/job/a.py:1 g@/job/a.py:2 " + joining, beating}, 2},
		"a thread in PyTorch waits for its own":      {0, []string{nextBatch, iterating}, 0},
		"the main thread has no frames":              {0, []string{"", reducing}, 0},
		"two that are alike":                         {0, []string{joining, beating, beating}, 0},
		"the shim has seen which":                    {2, []string{joining, beating, fetching}, 2},
		"the shim's has no frames":                   {3, []string{"main@/job/train.py:3", beating, ""}, 0},
		"the shim's main joins a save":               {1, []string{joining, saving}, 2},
		"never joined, the interpreter waits for it": {0, []string{ends, fetching}, 2},
		"an event":                               {0, []string{waitsEvent, reducing}, 2},
		"an event that a heartbeat does not set": {0, []string{waitsEvent, beating}, 0},
		"a loader that waits for its own thread": {0, []string{nextBatch, pinning, beating}, 0},
		"threads of libraries do not train":      {0, []string{joining, pinning}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := threads(c.stacks...)
			require.Equal(t, c.want, s.Lead(c.by))
			require.True(t, s.Threads[0].Main)
			require.Equal(t, max(c.want, 1), s.Threads[0].TID)
			mains := 0
			for _, th := range s.Threads {
				if th.Main {
					mains++
				}
			}
			require.Equal(t, 1, mains)
			require.Len(t, s.Threads, len(c.stacks))
		})
	}
	require.Zero(t, (&Stacks{}).Lead(7))
}

func TestTheShimsThreadIsLeftOut(t *testing.T) {
	s := threads("main@/job/train.py:3", "_run@/x/_dlrover_hang/worker.py:250")
	s.Threads[1].Name = "dlrover-hang"
	s.Lead(0)
	require.Len(t, s.Threads, 1)
	s = threads("main@/job/train.py:3", "_run@/x/_dlrover_hang/worker.py:250")
	s.Threads[1].Name, s.Threads[1].GIL = "dlrover-hang", true
	s.Lead(0)
	require.Len(t, s.Threads, 2, "it keeps the lock that all others wait for")
}

// The verdict is about the thread that trains, whatever the main one waits for.
func TestALoopInAThreadIsJudgedAsAnyOther(t *testing.T) {
	inThread := func(text string) *Stacks {
		s := threads(joining, text)
		s.Lead(0)
		return s
	}
	s := newScene(2)
	for i := range s.ev {
		s.ev[i].Stacks = inThread(reducing)
	}
	s.behind(2, inThread(fetching))
	v := s.judge()
	require.Equal(t, []any{KindBehind, High, "2"}, []any{v.Kind, v.Confidence, suspects(v)})
	require.Contains(t, v.Line, "asleep in load_batch at data.py:12")
	require.Contains(t, v.Line, "wait in all_reduce")

	s.outside()
	v = s.judge()
	require.Equal(t, []any{KindBehind, "2"}, []any{v.Kind, suspects(v)})
	require.Contains(t, v.Line, "asleep in load_batch at data.py:12")
}

// The main thread has failed, and another one keeps the process alive.
func TestTheExceptionBehindAProcessThatDoesNotEnd(t *testing.T) {
	s := newScene(2)
	st := threads(ends, beating)
	require.True(t, st.Ending())
	st.Lead(1)
	require.True(t, st.Ending())
	s.behind(2, st)
	s.ev[2].Exception = "ValueError: bad \x1b batch"
	require.Contains(t, s.judge().Line,
		"asleep in beat at train.py:5, after its main thread has ended by ValueError: bad   batch; ranks 0-1,3 wait in")
	require.False(t, threads(joining, reducing).Ending())

	s.ev[2].add(Evidence{Worker: s.ev[2].Worker})
	require.NotEmpty(t, s.ev[2].Exception, "a look at pages alone does not know of it")
	s.ev[2].add(Evidence{Worker: s.ev[2].Worker, Stacks: threads(beating)})
	require.Empty(t, s.ev[2].Exception)
}

// Two samples of one thread and two of another one: what both have used cannot be compared.
func TestSamplesOfDifferentThreads(t *testing.T) {
	s := newScene(2).outside()
	s.edit(2, func(i int, x *Sample) {
		if i > 0 {
			x.Proc.Thread, x.Proc.MainCPU, x.Proc.Switches = 7, 1000*evenAge, 5000
		}
	})
	samples := s.ev[2].Samples
	require.False(t, Progressed(samples[0], samples[1]))
	require.Zero(t, classify(&s.ev[2], readings{}).use.mainCPU)
	s.edit(2, func(i int, x *Sample) { x.Proc.Switches += uint64(i * 100) })
	require.True(t, Progressed(samples[1], samples[2]), "the thread that trains goes on, whatever the main one does")
}

// stack is a Python stack written from the outside in, as "main@t.py:5 step@t.py:9".
func stack(text string) (frames []Frame) {
	for _, word := range strings.Fields(text) {
		name, at, _ := strings.Cut(word, "@")
		f := Frame{Func: name, File: at}
		if file, line, ok := strings.Cut(at, ":"); ok {
			f.File = file
			_, _ = fmt.Sscan(line, &f.Line)
		}
		frames = append([]Frame{f}, frames...)
	}
	return frames
}
