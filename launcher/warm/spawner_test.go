package warm

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/testkit"
	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/warm/python"
)

// rig is a Spawner of two workers with real processes, which end with status 7 once they have told of themselves.
type rig struct {
	*Spawner
	t    *testing.T
	cfg  Config
	dir  string
	mu   sync.Mutex
	hows []How // of the newest workers, in any order
}

const rigScript = `import os, sys
with open(os.environ["OUT"], "w") as f:
    f.write("%d %s %s" % (os.getppid(), __name__, "fractions" in sys.modules))
sys.exit(7)
`

func newRig(t *testing.T, mode Mode) *rig {
	t.Helper()
	interpreter, err := exec.LookPath("/usr/bin/python3")
	if err != nil {
		t.Skip("SKIPPED: WARM WORKERS ARE NOT TESTED: there is no /usr/bin/python3")
	}
	r := &rig{t: t, dir: t.TempDir()}
	script := filepath.Join(r.dir, "script.py")
	require.NoError(t, os.WriteFile(script, []byte(rigScript), 0o600))
	tree := filepath.Join(r.dir, "tree")
	require.NoError(t, os.CopyFS(tree, python.Files))
	const site = "import _dlrover_warm\n_dlrover_warm.install()\n" // as the sitecustomize of hang/shim
	require.NoError(t, os.WriteFile(filepath.Join(tree, "sitecustomize.py"), []byte(site), 0o600))
	procs, err := proc.New(proc.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, procs.Close()) })
	r.cfg = Config{
		Mode: mode, Slots: 2, Modules: []string{"fractions"}, Command: []string{interpreter, "-u", script}, Flags: 2,
		Path: interpreter, Program: filepath.Join(tree, python.Parent), Dir: t.TempDir(),
		Env:       []string{"PATH=" + os.Getenv("PATH"), "PYTHONPATH=" + tree},
		Processes: procs, Log: slog.New(slog.DiscardHandler), Started: r.started,
	}
	r.Spawner = New(r.cfg)
	t.Cleanup(r.Close)
	return r
}

func (r *rig) started(s Start) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hows = append(r.hows, s.How)
}

// ready waits until both workers could be warm.
func (r *rig) ready() {
	r.t.Helper()
	require.Eventually(r.t, func() bool { return len(r.waiting()) == 2 }, time.Minute, time.Millisecond)
}

// waiting are the pids of the processes that could become workers.
func (r *rig) waiting() (pids []int) {
	r.Spawner.mu.Lock()
	defer r.Spawner.mu.Unlock()
	for slot, c := range r.children {
		if _, ready := r.pool.Usable(slot); ready && c != nil {
			c.mu.Lock()
			pids = append(pids, c.proc.PID())
			c.mu.Unlock()
		}
	}
	return pids
}

// start starts both workers at once, waits for their end, and returns how they were started and their pids.
func (r *rig) start() (hows []How, pids [2]int) {
	r.t.Helper()
	r.hows = nil
	r.Starting()
	var wg sync.WaitGroup
	for rank := range 2 {
		out := filepath.Join(r.dir, fmt.Sprint("out", rank))
		spec := proc.Spec{Path: r.cfg.Path, Args: r.cfg.Command, Env: slices.Concat(r.cfg.Env, r.Environ(rank),
			[]string{"OUT=" + out, fmt.Sprint("RANK=", rank)})}
		wg.Go(func() {
			p, err := r.Spawn(spec, logs.WorkerID{LocalRank: rank})
			if err == nil {
				<-p.Done()
				pids[rank] = p.PID()
				r.ended(p.Exit(), out)
			} else {
				r.t.Error(err)
			}
		})
	}
	r.Running()
	wg.Wait()
	return slices.Sorted(slices.Values(r.hows)), pids
}

// ended: a worker has executed the script as the launcher's child. One that was killed before has not.
func (r *rig) ended(e proc.Exit, out string) {
	text, err := os.ReadFile(out)
	if e.Signal == syscall.SIGKILL && os.IsNotExist(err) {
		return
	}
	_ = os.Remove(out)
	var parent int
	var name string
	var imported bool
	if _, err := fmt.Sscan(string(text), &parent, &name, &imported); err != nil || e.Code != 7 || parent != os.Getpid() ||
		name != "__main__" {
		r.t.Errorf("exit %+v after %q", e, text)
	}
}

// A script that starts the interpreter, as pyenv's do, gives it variables that forks would not have.
func TestSpawnerWhoseInterpreterIsAScript(t *testing.T) {
	for _, mode := range []Mode{modeFork, modeStandby} {
		r := newRig(t, mode)
		path := filepath.Join(r.dir, "python3")
		require.NoError(t, testkit.WriteProgram(path, "#!/bin/sh\nexec "+r.cfg.Path+" \"$@\"\n"))
		r.cfg.Path, r.cfg.Command = path, slices.Concat([]string{path}, r.cfg.Command[1:])
		s := New(r.cfg)
		t.Cleanup(s.Close)
		s.Joined()
		off := func() string { s.mu.Lock(); defer s.mu.Unlock(); return s.pool.Off() }
		require.Eventually(t, func() bool { return off() != "" }, time.Minute, time.Millisecond)
		require.Equal(t, "not safe to fork: "+path+" starts another interpreter; set PYTHON_EXEC=/usr/bin/python3", off())
	}
}

// A start takes what waits; after a failure so early the next one is by exec, and a step prepares again.
func TestSpawner(t *testing.T) {
	for mode, want := range map[Mode]How{modeFork: ByParked, modeStandby: ByStandby} {
		t.Run(string(want), func(t *testing.T) {
			r := newRig(t, mode)
			r.Joined()
			r.ready()
			r.Await(t.Context())
			waiting := r.waiting()
			hows, pids := r.start()
			require.Equal(t, []How{want, want}, hows)
			require.ElementsMatch(t, waiting, pids[:])
			require.Contains(t, r.Excuse(0, pids[0], -7), "before the first step")
			r.Stopped()
			hows, pids = r.start()
			require.Equal(t, []How{ByExec, ByExec}, hows)
			require.Empty(t, r.Excuse(0, pids[0], 7))
			r.Stepped()
			r.Stopping()
			r.ready()
			r.Stopped()
			hows, _ = r.start()
			require.Equal(t, []How{want, want}, hows)
		})
	}
}

// The first workers, which wait for the imports, are all forked at once, before it is known whether they can be.
func TestSpawnerWhoseWorkersWaitForImports(t *testing.T) {
	r := newRig(t, modeFork)
	over := make(chan struct{})
	go func() {
		defer close(over)
		r.Await(t.Context())
	}()
	require.Eventually(t, func() bool {
		r.Spawner.mu.Lock()
		defer r.Spawner.mu.Unlock()
		return r.workersWait()
	}, time.Minute, time.Millisecond)
	r.Joined()
	<-over
	require.NotZero(t, r.parents[1].took, "it has imported")
	for _, c := range r.children {
		require.NotNil(t, c)
	}
	hows, _ := r.start()
	require.Equal(t, []How{ByFork, ByFork}, hows)
	require.Eventually(t, func() bool {
		r.Spawner.mu.Lock()
		defer r.Spawner.mu.Unlock()
		return len(r.parents[1].files) > 0
	}, time.Minute, time.Millisecond, "what has been imported is told when there is time")
}

// On a busy machine forks take longer, but so would the imports of a worker that is started by exec.
func TestSpawnerWaitsForForksAsLongAsImportsTake(t *testing.T) {
	s := New(Config{Mode: modeFork, Slots: 1})
	require.Equal(t, forkPatience, s.forkPatience())
	s.pool.parent.generation = 1
	for took, want := range map[time.Duration]time.Duration{0: forkPatience, 4 * time.Second: 4 * time.Second,
		time.Hour: maxForkPatience} {
		s.parents[1] = &parent{took: took}
		require.Equal(t, want, s.forkPatience())
	}
}

// The first workers wait for imports, but not for ever. Those that are stopped meanwhile leave the rest of the time to
// the next ones, and nobody waits after that.
func TestSpawnerWhoseFirstImportsTakeTooLong(t *testing.T) {
	r := newRig(t, modeFork)
	endless := filepath.Join(r.dir, "tree", "endless.py")
	require.NoError(t, os.WriteFile(endless, []byte("import time\ntime.sleep(1000)\n"), 0o600))
	r.cfg.Modules = []string{"endless"}
	s := New(r.cfg)
	t.Cleanup(s.Close)
	s.patience = 500 * time.Millisecond
	s.Joined()
	began := time.Now()
	ctx, stop := context.WithCancel(t.Context())
	stop()
	s.Await(ctx)
	require.Less(t, time.Since(began), s.patience, "stopped")
	s.Await(t.Context())
	require.GreaterOrEqual(t, time.Since(began), s.patience, "the next ones are the first to start")
	s.until = time.Now().Add(time.Hour)
	s.Await(t.Context())
	require.Less(t, time.Since(began), time.Minute, "later workers do not wait")
}

// Whoever is killed, and when, every start is one; in the end nobody prepares any more.
func TestSpawnerWhoseProcessesAreKilled(t *testing.T) {
	for _, mode := range []Mode{modeFork, modeStandby} {
		t.Run(fmt.Sprint(mode), func(t *testing.T) {
			r := newRig(t, mode)
			r.Joined()
			for i := range 8 {
				if i > 0 && i%2 == 0 {
					r.Stepped()
				}
				var killer sync.WaitGroup
				killer.Go(func() { r.kill(i) })
				hows, _ := r.start()
				require.Len(t, hows, 2)
				killer.Wait()
				r.Stopped()
			}
		})
	}
}

// kill kills what waits and, every other time, what it was forked from.
func (r *rig) kill(i int) {
	for _, pid := range r.waiting() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	r.Spawner.mu.Lock()
	p := r.parents[r.pool.Parent()]
	r.Spawner.mu.Unlock()
	if p == nil || i%2 == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.proc != nil {
		_ = p.proc.SignalOnly(syscall.SIGKILL)
	}
}
