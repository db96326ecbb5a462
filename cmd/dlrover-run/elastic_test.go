package main

import (
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// elasticJob is a training of testdata/elastic.py.
type elasticJob struct {
	*training
	samples, epochs int
}

func newElasticJob(t *testing.T) elasticJob {
	b := newTraining(t, 0)
	b.env = append(b.env, "DLROVER_TOKEN="+testToken)
	return elasticJob{b, 301, 3}
}

func (b elasticJob) args(opts ...string) []string {
	script, err := filepath.Abs("testdata/elastic.py")
	require.NoError(b.t, err)
	return append(append([]string{"--ckpt-shm-dir=" + b.shm}, opts...),
		script, b.dir, b.ckpts, strconv.Itoa(b.samples), strconv.Itoa(b.epochs))
}

// begins is the step at which each start of the workers goes on, in their order, and how many ranks it has.
func (b elasticJob) begins() (names []string, steps, ranks []int) {
	for _, row := range b.rows("starts") {
		f := strings.Fields(row)
		if slices.Contains(names, f[0]) {
			continue
		}
		step, err := strconv.Atoi(f[3])
		require.NoError(b.t, err)
		size, err := strconv.Atoi(f[2])
		require.NoError(b.t, err)
		names, steps, ranks = append(names, f[0]), append(steps, step), append(ranks, size)
	}
	return names, steps, ranks
}

// batchesOf is how many batches the newest start has trained on, if it has so many ranks.
func (b elasticJob) batchesOf(ranks int) (n int) {
	names, _, sizes := b.begins()
	if len(names) == 0 || sizes[len(sizes)-1] != ranks {
		return 0
	}
	for _, row := range b.rows("batches") {
		if strings.HasPrefix(row, names[len(names)-1]+" ") {
			n++
		}
	}
	return n
}

// trainedOn counts, for each epoch, how often the job's model has seen each sample. What was trained after the save
// with which the next start goes on is forgotten.
func (b elasticJob) trainedOn() []map[string]int {
	names, steps, _ := b.begins()
	epochs := make([]map[string]int, b.epochs)
	for i := range epochs {
		epochs[i] = map[string]int{}
	}
	for _, row := range b.rows("batches") {
		f := strings.Fields(row)
		step, err := strconv.Atoi(f[1])
		require.NoError(b.t, err)
		epoch, err := strconv.Atoi(f[2])
		require.NoError(b.t, err)
		if next := slices.Index(names, f[0]) + 1; next < len(names) && step > steps[next] {
			continue
		}
		for _, sample := range f[3:] {
			epochs[epoch][sample]++
		}
	}
	return epochs
}

// requireEveryEpochWhole: nothing is missing, and nothing was trained on twice but what fills up the last ranks of an
// epoch.
func (b elasticJob) requireEveryEpochWhole(most int) {
	b.t.Helper()
	for epoch, seen := range b.trainedOn() {
		require.Equal(b.t, b.samples, len(seen), "epoch %d", epoch)
		extra := 0
		for _, n := range seen {
			extra += n - 1
		}
		require.Less(b.t, extra, most, "epoch %d", epoch)
	}
}

// Two ranks, of which one is killed, grow to three and shrink to two: in every epoch the model has seen every sample,
// and none twice.
func TestTorchElasticSampler(t *testing.T) {
	long(t)
	b := newElasticJob(t)
	args := b.args(b.c10d("2:3", "--max-restarts=10", "--nproc-per-node=1", "--rdzv-conf=last_call_timeout=1")...)
	l1 := b.run(args...)
	eventually(t, "serving", func() bool { return strings.Contains(l1.err.String(), "serving the rendezvous") })
	l2 := b.run(args...)
	eventually(t, "training of two", func() bool { return b.batchesOf(2) >= 15 })
	require.NoError(t, syscall.Kill(b.worker(), syscall.SIGKILL))
	eventually(t, "the next start", func() bool { names, _, _ := b.begins(); return len(names) == 2 })
	eventually(t, "training of two", func() bool { return b.batchesOf(2) >= 15 })
	l3 := b.run(args...)
	eventually(t, "training of three", func() bool { return b.batchesOf(3) >= 15 })
	l3.signal(syscall.SIGKILL)
	l3.wait()
	eventually(t, "training of two again", func() bool { return b.batchesOf(2) >= 15 })
	require.Equal(t, 0, l1.wait(), l1.err.String())
	require.Equal(t, 0, l2.wait(), l2.err.String())

	_, steps, ranks := b.begins()
	require.Equal(t, []int{2, 2, 3, 2}, ranks)
	for i := range len(steps) - 1 {
		require.Greater(t, steps[i+1], steps[i], "each start goes on where the one before was")
	}
	b.requireEveryEpochWhole(3)
	b.requireMemoryIsGone()
}

// The largest world is told where there may be others.
func TestMaxNodesForElasticTrainer(t *testing.T) {
	for nodes, want := range map[string]string{"1:3": "3", "1": "none"} {
		t.Run(nodes, func(t *testing.T) {
			b := newBench(t)
			l := b.run(b.sh(`echo ${DLROVER_MAX_NODES-none} >> $DIR/most`, b.c10d(nodes)...)...)
			require.Equal(t, 0, l.wait(), l.err.String())
			require.Equal(t, []string{want, want}, b.lines("most"))
		})
	}
}
