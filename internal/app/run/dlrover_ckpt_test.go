package run

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestDLRoverCheckpoints: the launchers of two nodes save the shards of their workers under DLRover's master, at every
// step to memory and at every tenth to disk. A worker of each is killed, then a launcher, whose place another one
// takes. Every rank goes on from its own shard, and what was committed is whole.
func TestDLRoverCheckpoints(t *testing.T) {
	besideDLRovers(t)
	const steps, every = 120, 10
	j := dlrover{version: "0.6.1"}.newJob(t, "2")
	j.one()
	m := j.theirMaster(2)
	b := newTraining(t, steps)
	python := b.env[len(b.env)-1]
	b.bench = j.bench
	b.env = append(b.env, python)
	node := func(rank, id int) *launched {
		command := append([]string{filepath.Join(binDir, "dlrover-run")}, b.args(j.args, every, "sharded")...)
		return j.startOn(1+id, j.place(rank, id), command...)
	}
	nodes := []*launched{node(0, 0), node(1, 1)}
	// goesOn waits for the next epoch, in which all ranks begin at the same step.
	goesOn := func(from int) {
		t.Helper()
		n := len(b.starts())
		require.Zero(t, n%2)
		eventually(t, "the next epoch", func() bool { return len(b.starts()) == n+2 })
		next := b.starts()[n:]
		require.Equal(t, next[0], next[1])
		require.GreaterOrEqual(t, next[0], from)
	}
	for rank := range nodes {
		eventually(t, "training", func() bool { return b.trained() >= 15+25*rank })
		before := b.trained()
		require.NoError(t, syscall.Kill(b.rank(rank), syscall.SIGKILL))
		goesOn(before - 2) // from memory
	}
	eventually(t, "training", func() bool { return b.trained() >= 65 })
	committed := b.latest()
	nodes[1].signal(syscall.SIGKILL)
	<-nodes[1].exited
	nodes[1] = node(1, 2)
	goesOn(committed)
	for _, l := range nodes {
		require.Equal(t, 0, l.wait(), l.err.String())
	}
	require.Equal(t, steps, b.latest())
	b.requireShards(strings.TrimPrefix(python, "PYTHON_EXEC="), 2)
	b.requireMemoryIsGone()
	j.clean(m)
}

// rank is the process of a rank.
func (b *training) rank(rank int) int {
	b.t.Helper()
	all := b.workers()
	i := slices.IndexFunc(all, func(pid int) bool {
		env, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		return strings.Contains(string(env), fmt.Sprintf("\x00RANK=%d\x00", rank))
	})
	require.GreaterOrEqual(b.t, i, 0, "no process of rank %d", rank)
	return all[i]
}

// requireShards: every step on disk has the shards of all ranks, each of which can be loaded and is its own.
func (b *training) requireShards(python string, ranks int) {
	b.t.Helper()
	const load = `import os, sys, torch
for step in sys.argv[3:]:
    for rank in range(int(sys.argv[2])):
        own = torch.load(os.path.join(sys.argv[1], step, "rank_%d.pt" % rank))["own"]
        assert own.tolist() == [float(step), float(rank)], (step, rank, own)
`
	var onDisk []string
	dirs, err := filepath.Glob(filepath.Join(b.ckpts, "[0-9]*"))
	require.NoError(b.t, err)
	for _, dir := range dirs {
		onDisk = append(onDisk, filepath.Base(dir))
	}
	require.Contains(b.t, onDisk, fmt.Sprint(b.steps))
	args := append([]string{"-c", load, b.ckpts, fmt.Sprint(ranks)}, onDisk...)
	out, err := exec.Command(python, args...).CombinedOutput()
	require.NoError(b.t, err, "%s", out)
	out, err = exec.Command(filepath.Join(binDir, "dlroverctl"), "checkpoints", "verify", b.ckpts).CombinedOutput()
	require.NoError(b.t, err, "%s", out)
}
