package pystack

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
)

func mainOf(t *testing.T, s hang.Stacks) hang.Thread {
	t.Helper()
	require.NotEmpty(t, s.Threads)
	require.True(t, s.Threads[0].Main)
	return s.Threads[0]
}

// Whatever a process does, it is read, and goes on with it.
func TestStates(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, states string
		gil          bool
		native       string // a function that is to be found; "" if the thread runs
	}{
		{name: "asleep", states: "S", native: "sleep|select"},
		{name: "locked", states: "S", native: "Py"},
		{name: "spins", states: "R", gil: true},
		{name: "spins_in_c", states: "R", gil: true},
		{name: "sleeps_with_gil", states: "S", gil: true, native: "pause"},
		{name: "uninterruptible", states: "D", gil: true, native: "spawn"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			somePythons(t, func(t *testing.T, p python) {
				x, line := start(t, p, "testdata/states.py", c.name)
				t.Cleanup(func() { release(line) })
				gil := c.gil && !strings.HasSuffix(p.version, freeThreaded)
				main := x.arrives(t, c.name, c.states)
				for range 100 { // it may have been seen on its way
					if main.GIL == gil {
						break
					}
					main = x.arrives(t, c.name, c.states)
				}
				require.Equal(t, "<module>", main.Python[1].Func)
				require.Equal(t, gil, main.GIL)
				if c.native != "" {
					require.Regexp(t, c.native, strings.Join(text(main.Native), " "))
				}
				x.in(t, c.states)
			})
		})
	}
}

// arrives waits until the main thread is in a function and a state.
func (x *target) arrives(t *testing.T, function, states string) (main hang.Thread) {
	t.Helper()
	r, problem := New(), ""
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		s, err := r.Read(t.Context(), x.pid, Native)
		require.NoError(t, err)
		if s.Error != "" {
			problem = s.Error // it may change while it is on its way
			continue
		}
		main = mainOf(t, s)
		if len(main.Python) > 0 && main.Python[0].Func == function && strings.IndexByte(states, main.State) >= 0 {
			return main
		}
	}
	require.Fail(t, "it does not arrive", "%s in %s: %+v %s", function, states, main, problem)
	return main
}

// release lets the child of testdata/states.py's uninterruptible go.
func release(fifo string) {
	if f, err := os.OpenFile(fifo, os.O_WRONLY|syscall.O_NONBLOCK, 0); err == nil {
		f.Close()
		os.RemoveAll(filepath.Dir(fifo))
	}
}

func TestStoppedStaysStopped(t *testing.T) {
	t.Parallel()
	somePythons(t, func(t *testing.T, p python) {
		x, _ := start(t, p, "testdata/states.py", "spins")
		x.arrives(t, "spins", "R")
		require.NoError(t, syscall.Kill(x.pid, syscall.SIGSTOP))
		x.in(t, "T")
		s, err := New().Read(t.Context(), x.pid, Native, Tool)
		require.NoError(t, err)
		main := mainOf(t, s)
		require.Equal(t, byte('T'), main.State)
		require.Equal(t, "spins", main.Python[0].Func)
		require.NotEmpty(t, main.Native)
		x.in(t, "T")
	})
}

// The child of a thread has that thread as its main one, whatever its parent's was.
func TestForkedChild(t *testing.T) {
	t.Parallel()
	somePythons(t, func(t *testing.T, p python) {
		_, line := start(t, p, "-W", "ignore", "testdata/states.py", "forked")
		child, err := strconv.Atoi(line)
		require.NoError(t, err)
		var s hang.Stacks
		require.Eventually(t, func() bool {
			s, err = New().Read(t.Context(), child)
			return err == nil && len(s.Threads[0].Python) > 0 && s.Threads[0].Python[0].Func == "in_child"
		}, 10*time.Second, 10*time.Millisecond, "%+v, %v", s, err)
		require.Len(t, s.Threads, 1)
		require.Equal(t, child, mainOf(t, s).TID)
	})
}

func TestManyThreads(t *testing.T) {
	t.Parallel()
	somePythons(t, func(t *testing.T, p python) {
		x, _ := start(t, p, "testdata/states.py", "many")
		s, err := New().Read(t.Context(), x.pid)
		require.NoError(t, err)
		require.Empty(t, s.Error)
		require.Len(t, s.Threads, 201)
		tids := map[int]bool{}
		for _, th := range s.Threads {
			require.NotZero(t, th.TID)
			require.NotEmpty(t, th.Python)
			tids[th.TID] = true
		}
		require.Len(t, tids, 201)
	})
}

// What runs in an interpreter within the interpreter is above what called it.
func TestInterpreterWithin(t *testing.T) {
	t.Parallel()
	somePythons(t, func(t *testing.T, p python) {
		x, _ := start(t, p, "testdata/states.py", "interpreters")
		var functions []string
		for _, f := range x.arrives(t, "within", "S").Python {
			functions = append(functions, f.Func)
		}
		require.Equal(t, []string{"within", "<module>", "interpreters", "<module>"}, functions)
	})
}

func TestMainThreadHasEnded(t *testing.T) {
	t.Parallel()
	somePythons(t, func(t *testing.T, p python) {
		x, _ := start(t, p, "testdata/states.py", "main_has_ended")
		x.in(t, "Z")
		s, err := New().Read(t.Context(), x.pid)
		require.NoError(t, err)
		require.Equal(t, "asleep", s.Threads[1].Python[0].Func)
	})
}

func TestProcessThatHasEnded(t *testing.T) {
	t.Parallel()
	all := pythons()
	if len(all) == 0 {
		t.Skip("SKIPPED: " + t.Name() + " IS NOT RUN: there is no Python")
	}
	x, _ := start(t, all[0], "testdata/states.py", "asleep")
	require.NoError(t, x.cmd.Process.Kill())
	x.in(t, "Z")
	_, err := New().Read(t.Context(), x.pid)
	require.EqualError(t, err, "process "+strconv.Itoa(x.pid)+": it has ended")
	_ = x.cmd.Wait()
	_, err = New().Read(t.Context(), x.pid)
	require.EqualError(t, err, "process "+strconv.Itoa(x.pid)+": it has ended")
}

// A process that is no Python has native frames only.
func TestNoPython(t *testing.T) {
	t.Parallel()
	x, _ := start(t, python{path: "/bin/sh"}, "-c", "echo; read x; echo $x; exec sleep 1000")
	x.in(t, "S")
	s, err := New().Read(t.Context(), x.pid, Native)
	require.NoError(t, err)
	require.Empty(t, s.Interpreter)
	require.Empty(t, s.Error)
	require.NotEmpty(t, mainOf(t, s).Native)
	require.Empty(t, mainOf(t, s).Python)
}
