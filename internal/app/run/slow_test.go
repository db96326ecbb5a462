package run

import (
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/torchpython"
)

// slowJob is a job of two nodes with four ranks each that runs testdata/slow.py.
func slowJob(t *testing.T, script ...string) (found func() []string) {
	t.Helper()
	besideOthers(t)
	b := newBench(t)
	b.env = append(b.env, "PYTHON_EXEC="+torchpython.Require(t, "SLOW RANKS ARE"), "GLOO_SOCKET_IFNAME=lo",
		"OMP_NUM_THREADS=1", "PYTHONWARNINGS=ignore")
	path, err := filepath.Abs("testdata/slow.py")
	require.NoError(t, err)
	args := append(b.c10d("2"), "--nproc-per-node=4", "--hang=auto", "--log-format=json", path)
	ls := []*launched{b.run(append(args, script...)...), b.run(append(args, script...)...)}
	t.Cleanup(func() {
		b.release()
		for _, l := range ls {
			require.Zero(t, l.wait())
		}
	})
	require.Eventually(t, b.exists("up"), 2*time.Minute, 100*time.Millisecond, "the ranks train")
	return func() []string { return append(ls[0].logged("slow-"), ls[1].logged("slow-")...) }
}

// A rank that slows a job of two nodes is named within 60 s, and no other one is.
func TestSlowRanksAreNamedWithTorch(t *testing.T) {
	besideOthers(t)
	for _, c := range []struct {
		name, script string
		rank         int
		factor, want string
		rare         bool
	}{
		{"stopped for a while", "stop", 5, "2", `rank 5 \(node 1 .*\) slows the job: [12]\..x since .*, computing`, false},
		{"slow data", "data", 2, "1.5", `rank 2 \(node 0 .*\) slows the job: 1\.[3-7]x since .*, loading data`, true},
		{"more to compute", "compute", 7, "1.3", `rank 7 \(node 1 .*\) slows the job: 1\.[12345]x since .*`, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.rare {
				longest(t)
			}
			found := slowJob(t, c.script, strconv.Itoa(c.rank), c.factor)
			began := time.Now()
			require.Eventually(t, func() bool { return len(found()) > 0 }, 150*time.Second, 100*time.Millisecond, "it is named")
			t.Logf("%.0f s: %s", time.Since(began).Seconds(), found())
			require.Len(t, found(), 1)
			require.Regexp(t, "^slow-found: "+c.want, found()[0])
		})
	}
}

// Uneven batches, evaluations and logs of rank 0 make nobody slow.
func TestUnevenRanksAreNotSlowWithTorch(t *testing.T) {
	found := slowJob(t, "healthy", "0", "1")
	require.Never(t, func() bool { return len(found()) > 0 }, 45*time.Second, time.Second, "%q", found())
}

// The node of a rank that slows the job leaves after five minutes, and the spare takes its place.
func TestTheNodeOfASlowRankIsReplacedWithTorch(t *testing.T) {
	longest(t)
	besideOthers(t)
	b := newBench(t)
	b.env = append(b.env, "PYTHON_EXEC="+torchpython.Require(t, "NODES OF SLOW RANKS ARE"), "GLOO_SOCKET_IFNAME=lo",
		"OMP_NUM_THREADS=1", "PYTHONWARNINGS=ignore")
	path, err := filepath.Abs("testdata/slow.py")
	require.NoError(t, err)
	args := append(b.c10d("2"), "--slow-action=drain", "--log-format=json", path, "stop", "3", "2")
	first := b.start("dlrover-run", []string{"POD_NAME=n0"}, args...)
	eventually(t, "it serves", func() bool { return len(first.logged("serving the rendezvous")) > 0 })
	slow := b.start("dlrover-run", []string{"POD_NAME=n1"}, args...)
	require.Eventually(t, b.exists("up"), 2*time.Minute, 100*time.Millisecond, "the ranks train")
	spare, began := b.start("dlrover-run", []string{"POD_NAME=n2"}, args...), time.Now()
	require.Eventually(t, func() bool { return len(slow.logged("leaving the job")) > 0 }, 10*time.Minute, time.Second)
	require.Greater(t, time.Since(began), 4*time.Minute, "a while is no reason")
	require.Equal(t, 1, slow.wait())
	require.Contains(t, slow.err.String(), "left: drained: rank 3 (node 1 n1) slows the job")
	require.Eventually(t, func() bool { return len(spare.logged("workers started")) > 0 }, time.Minute, time.Second)
	b.release()
	require.Zero(t, first.wait())
	require.Zero(t, spare.wait())
}
