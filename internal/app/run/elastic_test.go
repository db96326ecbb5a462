package run

import (
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// elasticJob is a training of testdata/elastic.py, or another script that leaves such marks.
type elasticJob struct {
	*training
	script          string
	samples, epochs int
}

func newElasticJob(t *testing.T, script string) elasticJob {
	b := newTraining(t, 0)
	b.env = append(b.env, "DLROVER_TOKEN="+testToken)
	return elasticJob{b, script, 301, 3}
}

func (b elasticJob) args(more ...string) []string {
	script, err := filepath.Abs("testdata/" + b.script)
	require.NoError(b.t, err)
	opts := b.c10d("2:3", "--max-restarts=10", "--nproc-per-node=1", "--rdzv-conf=last_call_timeout=1",
		"--ckpt-shm-dir="+b.shm, script, b.dir, b.ckpts, strconv.Itoa(b.samples), strconv.Itoa(b.epochs))
	return append(opts, more...)
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

// trainedOn counts, for each epoch, how often each sample was trained on. With saved it is by the model that the job
// ends with: what came after the save with which the next start goes on is forgotten.
func (b elasticJob) trainedOn(saved bool) []map[string]int {
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
		if next := slices.Index(names, f[0]) + 1; saved && next < len(names) && step > steps[next] {
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
	for epoch, seen := range b.trainedOn(true) {
		require.Equal(b.t, b.samples, len(seen), "epoch %d", epoch)
		extra := 0
		for _, n := range seen {
			extra += n - 1
		}
		require.Less(b.t, extra, most, "epoch %d", epoch)
	}
}

// disturb runs the job with two ranks, kills one, and then runs it with three, and with two again.
func (b elasticJob) disturb(more ...string) {
	b.t.Helper()
	args := b.args(more...)
	l1 := b.run(args...)
	eventually(b.t, "serving", func() bool { return strings.Contains(l1.err.String(), "serving the rendezvous") })
	l2 := b.run(args...)
	eventually(b.t, "training of two", func() bool { return b.batchesOf(2) >= 15 })
	require.NoError(b.t, syscall.Kill(b.worker(), syscall.SIGKILL))
	eventually(b.t, "the next start", func() bool { names, _, _ := b.begins(); return len(names) == 2 })
	eventually(b.t, "training of two", func() bool { return b.batchesOf(2) >= 15 })
	l3 := b.run(args...)
	eventually(b.t, "training of three", func() bool { return b.batchesOf(3) >= 15 })
	l3.signal(syscall.SIGKILL)
	l3.wait()
	eventually(b.t, "training of two again", func() bool { return b.batchesOf(2) >= 15 })
	require.Equal(b.t, 0, l1.wait(), l1.err.String())
	require.Equal(b.t, 0, l2.wait(), l2.err.String())
	_, _, ranks := b.begins()
	require.Equal(b.t, []int{2, 2, 3, 2}, ranks)
}

// requireProgress: each start goes on where the one before was, and nothing is left of what it has saved.
func (b elasticJob) requireProgress() {
	b.t.Helper()
	_, steps, _ := b.begins()
	for i := range len(steps) - 1 {
		require.Greater(b.t, steps[i+1], steps[i])
	}
	b.requireMemoryIsGone()
}

// In every epoch the model has seen every sample, and none twice.
func TestTorchElasticSampler(t *testing.T) {
	long(t)
	t.Parallel()
	b := newElasticJob(t, "elastic.py")
	b.disturb()
	b.requireProgress()
	b.requireEveryEpochWhole(3)
}

// The same with data shards: the checkpoint says which are left.
func TestTorchElasticShards(t *testing.T) {
	long(t)
	t.Parallel()
	b := newElasticJob(t, "shards.py")
	b.disturb("saved")
	b.requireProgress()
	seen := b.trainedOn(true)[0]
	require.Len(t, seen, b.samples)
	for record, n := range seen {
		require.Equal(t, b.epochs, n, record)
	}
}

// A script that saves nothing gets the shards that are left all the same. Each of the three starts that ended may have
// had one for each rank that it had trained on and not told of.
func TestTorchElasticShardsThatNobodySaves(t *testing.T) {
	long(t)
	t.Parallel()
	b := newElasticJob(t, "shards.py")
	b.disturb("kept")
	extra := 0
	seen := b.trainedOn(false)[0]
	require.Len(t, seen, b.samples)
	for record, n := range seen {
		require.GreaterOrEqual(t, n, b.epochs, record)
		extra += n - b.epochs
	}
	require.LessOrEqual(t, extra, (2+2+3)*4)
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
