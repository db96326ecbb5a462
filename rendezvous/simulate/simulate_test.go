// Package simulate has the whole control plane in one process, on the virtual clock of testing/synctest: the real Hub
// and its Keeper, a real Session for each node, and between them a network that fails on purpose. Workers are values,
// so that ten minutes of 10,000 nodes take less than one.
//
// A history depends on its seed alone, see link.
package simulate

import (
	"os"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/testkit"
	"dlrover-run/rendezvous"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rulesOf are those of a run that begins with so many nodes, may lose half of them, and grow by a tenth.
func rulesOf(nodes int) rendezvous.Params {
	return rendezvous.Params{Min: nodes / 2, Max: min(nodes+nodes/10, rendezvous.MaxNodes), MaxRestarts: 1 << 20,
		LastCall: 30 * time.Second, Quiet: 2 * time.Second, Budget: rendezvous.Budget{BackoffLimit: -1}}
}

// simulated runs a story on a cluster whose nodes have their places.
func simulated(t *testing.T, seed uint64, nodes int, p rendezvous.Params, story func(c *cluster)) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, seed, p)
		defer c.close()
		c.start(nodes, time.Second)
		c.settle("the start", time.Minute)
		story(c)
	})
}

// TestStorms is ten minutes of a run of 10,000 nodes: every storm, in an order of chance. SIMULATED_NODES is another
// number of nodes, and SIMULATED_SEED another history.
func TestStorms(t *testing.T) {
	nodes := number("SIMULATED_NODES", 10_000)
	if testing.Short() {
		nodes = 500
	}
	before := processorTime()
	simulated(t, uint64(number("SIMULATED_SEED", 1)), nodes, rulesOf(nodes), func(c *cluster) {
		t.Logf("%d nodes have their places; memory of a node, its launcher's included: %d bytes", nodes, heap()/nodes)
		c.weather(c.shuffled(storms()))
		time.Sleep(10*time.Minute - c.clock())
		c.settle("ten minutes", 0)
		c.sometimes("a worker has failed", "a launcher was killed", "a rack has lost its power", "slow nodes have met",
			"nodes were cut off for 1s", "nodes were cut off for 20s", "a run was paused",
			"a daemon was killed, its decisions kept: true", "a daemon was killed, its decisions kept: false",
			"note seal", "note break", "note node-loss", "note node-leave", "note resume", "note resumed", "note order")
	})
	t.Logf("processor time of a node: %s", (processorTime()-before)/time.Duration(nodes))
}

// TestSameHistory: a failure can be looked at again.
func TestSameHistory(t *testing.T) {
	type history struct {
		digest uint64
		lines  []string
	}
	var hs []history
	for _, seed := range []uint64{1, 1, 2} {
		simulated(t, seed, 40, rulesOf(40), func(c *cluster) {
			var h history
			c.rules.tell(&h.lines)
			c.weather(c.shuffled(storms()))
			h.digest = c.rules.tell(nil)
			slices.Sort(h.lines)
			hs = append(hs, h)
		})
	}
	for i := range min(len(hs[0].lines), len(hs[1].lines)) {
		require.Equal(t, hs[0].lines[i], hs[1].lines[i], "after %v", hs[0].lines[max(0, i-10):i])
	}
	require.Equal(t, hs[0].digest, hs[1].digest)
	require.NotEqual(t, hs[0].digest, hs[2].digest)
}

// TestNothingGrows: ten hours of a run that loses a node and gets another one every minute.
func TestNothingGrows(t *testing.T) {
	testkit.Long(t, "ten hours of a hundred nodes take ten seconds")
	const nodes = 100
	simulated(t, 1, nodes, rulesOf(nodes), func(c *cluster) {
		var heaps []int
		for range 10 {
			for range 60 {
				c.kills(1)
				c.start(1, time.Second)
				time.Sleep(30 * time.Second)
				c.failures(1)
				time.Sleep(30 * time.Second)
			}
			c.settle("an hour", 0)
			heaps = append(heaps, heap())
			require.LessOrEqual(t, runtime.NumGoroutine(), 3*nodes+20)
		}
		t.Logf("bytes after each hour: %v", heaps)
		require.Less(t, slices.Max(heaps[5:]), slices.Max(heaps[:5])*11/10, "%v", heaps)
	})
}

// heap is the memory in use, in bytes.
func heap() int {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapInuse + m.StackInuse)
}

func processorTime() time.Duration {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r) // cannot fail
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// number is a variable of the environment.
func number(name string, otherwise int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return n
	}
	return otherwise
}
