package run

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/shm"
)

// twoJobs are two trainings on one node, with one place for shared memory.
func twoJobs(t *testing.T, steps int) (a, b *training) {
	a, b = newTraining(t, steps), newTraining(t, steps)
	b.shm = a.shm
	return a, b
}

// job is a command line whose run id is that of every other such job.
func (b *training) job(id []string, diskEvery int) []string {
	return b.args(append([]string{"--nproc-per-node=2", "--max-restarts=100"}, id...), diskEvery)
}

// memory is, by checkpoint directory, the runtime directories with saves for it and the newest step of those.
func (b *training) memory() (places map[string]map[string]bool, newest map[string]int64) {
	places, newest = map[string]map[string]bool{}, map[string]int64{}
	paths, err := filepath.Glob(filepath.Join(b.shm, "dlrover-*", "*", "owner"))
	require.NoError(b.t, err)
	for _, path := range paths {
		d, err := shm.OpenDir(filepath.Dir(path))
		if err != nil {
			continue // it was just removed
		}
		names, _ := d.Names()
		for _, name := range names {
			s, err := d.Open(name)
			if err != nil {
				continue
			}
			if h, m, err := s.Peek(); err == nil {
				if places[m.Dir] == nil {
					places[m.Dir] = map[string]bool{}
				}
				places[m.Dir][d.Path()] = true
				newest[m.Dir] = max(newest[m.Dir], h.Step)
			}
			require.NoError(b.t, s.Close())
		}
	}
	return places, newest
}

// killWorker kills one and returns where the workers go on. They lose one step of memory at most.
func (b *training) killWorker() {
	b.t.Helper()
	n, before := len(b.starts()), b.trained()
	require.NoError(b.t, syscall.Kill(b.worker(), syscall.SIGKILL))
	eventually(b.t, "the next start", func() bool { return len(b.starts()) == n+2 })
	for _, step := range b.starts()[n:] {
		require.GreaterOrEqual(b.t, step, before-2, "it goes on from its own memory")
	}
}

// Two jobs with one run id on one node, each with its checkpoint directory: what happens to one is nothing to the
// memory of the other.
func TestTorchCheckpointTwoJobsWithOneRunID(t *testing.T) {
	long(t)
	t.Parallel()
	for name, id := range map[string][]string{
		"standalone, which has an id of its own": {"--standalone", "--rdzv-id=job"},
		"the same id":                            {"--rdzv-id=job"},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := twoJobs(t, 100000)
			la := a.run(a.job(id, 1000000)...)
			eventually(t, "training", func() bool { return a.trained() >= 20 })
			lb := b.run(b.job(id, 1000000)...)
			eventually(t, "training of both", func() bool { return b.trained() >= 20 })
			require.Equal(t, []int{0, 0}, b.starts(), "it does not load what the other has in memory")
			places, _ := a.memory()
			require.Len(t, places[a.ckpts], 1)
			require.Len(t, places[b.ckpts], 1)
			require.NotEqual(t, places[a.ckpts], places[b.ckpts])

			a.killWorker()
			eventually(t, "the breakpoint save", func() bool { return a.latest() >= 18 })
			la.signal(syscall.SIGKILL)
			la.wait()
			eventually(t, "the end of the memory of the dead one", func() bool {
				places, _ := a.memory()
				return len(places[a.ckpts]) == 0
			})
			require.GreaterOrEqual(t, a.latest(), a.trained()-2)

			require.Len(t, b.starts(), 2, "nobody was restarted")
			require.Zero(t, b.latest(), "nothing was written to disk")
			at := b.trained()
			_, newest := b.memory()
			require.GreaterOrEqual(t, newest[b.ckpts], int64(at-2))
			b.killWorker()
			lb.signal(syscall.SIGTERM)
			require.Equal(t, 1, lb.wait(), lb.err.String())
			require.GreaterOrEqual(t, b.latest(), b.trained()-2)
			b.requireMemoryIsGone()
		})
	}
}

// Two jobs with one run id and one checkpoint directory share what is on disk, as two runs one after the other would,
// and not what is in memory. The directory is never a mixture.
func TestTorchCheckpointTwoJobsWithOneDirectory(t *testing.T) {
	long(t)
	t.Parallel()
	a, b := twoJobs(t, 100000)
	b.ckpts = a.ckpts
	id := []string{"--rdzv-id=job"}
	la := a.run(a.job(id, 10)...)
	eventually(t, "a committed step", func() bool { return a.latest() >= 10 })
	lb := b.run(b.job(id, 10)...)
	eventually(t, "training of both", func() bool { return b.trained() >= 50 })
	require.Contains(t, lb.err.String(), "is loaded from disk")
	for _, step := range b.starts() {
		require.Zero(t, step%10)
		require.GreaterOrEqual(t, step, 10)
	}
	a.killWorker()
	n := a.trained()
	eventually(t, "training of both", func() bool { return a.trained() >= n+50 })
	la.signal(syscall.SIGTERM)
	lb.signal(syscall.SIGTERM)
	require.Equal(t, 1, la.wait(), la.err.String())
	require.Equal(t, 1, lb.wait(), lb.err.String())
	require.Len(t, b.starts(), 2, "nobody was restarted")
	curve := a.curve()
	for step, loss := range b.curve() {
		if other, ok := curve[step]; ok {
			require.Equal(t, other, loss, "step %s", step)
		}
	}
	out, err := exec.Command(filepath.Join(binDir, "dlroverctl"), "checkpoints", "verify", a.ckpts).CombinedOutput()
	require.NoError(t, err, "%s", out)
	stages, err := os.ReadDir(filepath.Join(a.ckpts, ".dlrover", "stage"))
	require.True(t, err != nil || len(stages) == 0, "%v", stages)
	a.requireMemoryIsGone()
}
