package run

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/freeports"
	"dlrover-run/internal/job"
	"dlrover-run/launcher"
)

func TestTrainingPortOption(t *testing.T) {
	const ascend = "--accelerator=ascend-npu "
	for _, c := range []struct {
		line  string
		env   map[string]string
		start int
		warn  string
		err   string
	}{
		{line: "", start: 0},
		{line: "--training-port=0", start: 0},
		{line: ascend, start: 60000},
		{line: ascend + "--training-port=0", start: 0},
		{line: ascend + "--training_port=50000", start: 50000},
		{line: ascend, env: map[string]string{"HCCL_IF_BASE_PORT": "40000"}, start: 40000},
		{line: "", env: map[string]string{"HCCL_IF_BASE_PORT": "soon"}, start: 0},
		{line: "--training-port=50000", warn: "--training-port has no effect"},
		{line: ascend, env: map[string]string{"HCCL_IF_BASE_PORT": "soon"}, err: `$HCCL_IF_BASE_PORT="soon": need a number`},
		{line: ascend, env: map[string]string{"HCCL_IF_BASE_PORT": "80"}, err: `$HCCL_IF_BASE_PORT=80: need a port from`},
		{line: "--training-port=65521", err: "--training-port=65521: need a port from 1024 to 65520"},
		{line: ascend + "--training-port=-1", err: "need a port from 1024 to 65520"},
	} {
		h := testHost()
		h.gpus = func() (int, string) { return 0, "" }
		dir := t.TempDir()
		t.Chdir(dir)
		require.NoError(t, os.WriteFile("train.py", nil, 0o600))
		lookup := func(name string) (string, bool) { v, ok := c.env[name]; return v, ok }
		l, err := parse(strings.Fields(c.line+" train.py"), lookup, os.Stderr)
		require.NoError(t, err)
		o := &options{Line: l, env: lookup, host: h}
		start, err := readTrainingPort(o)
		if c.err != "" {
			require.ErrorContains(t, err, c.err, c.line)
			continue
		}
		require.NoError(t, err, c.line)
		require.Equal(t, c.start, start, c.line)
		require.Equal(t, c.warn != "", len((&settings{warnings: o.warnings}).about("effect")) > 0, c.line)
	}
}

func TestCommonBase(t *testing.T) {
	node := func(bases ...int) job.Member { return job.Member{Bases: bases} }
	for want, world := range map[int][]job.Member{
		0:     {node(60000), node(60016)},
		60000: {node(60000, 60016), node(60016, 60000)},
		60032: {node(60000, 60032, 60048), node(60048, 60032), node(60016, 60032)},
	} {
		require.Equal(t, want, commonBase(world))
	}
	require.Zero(t, commonBase(nil))
	require.Zero(t, commonBase([]job.Member{node(60000), node()}), "a launcher of another version")
}

// freeStretch is where many ranges in a row are free, and no other test looks for any: who has the last port of a
// stretch has all of it. DLRover's agents take theirs from 20000 on, and the kernel's are higher.
func freeStretch(t *testing.T) int {
	t.Helper()
	const first, last, size = 2000, 10000, 16 * hcclPorts // freeports.ForServer takes none of these
	for _, i := range rand.Perm((last - first) / size) {
		start := first + i*size
		claim, err := net.Listen("tcp", fmt.Sprintf(":%d", start+size-1))
		if err != nil {
			continue
		}
		t.Cleanup(func() { _ = claim.Close() })
		if freeports.AreFree(start, size-1) {
			return start
		}
	}
	t.Skipf("SKIPPED: TRAINING PORTS ARE NOT TESTED: no %d free ports in a row between %d and %d", size, first, last)
	return 0
}

func TestFreeBases(t *testing.T) {
	start := freeStretch(t)
	taken, err := net.Listen("tcp", fmt.Sprintf(":%d", start+hcclPorts-1))
	require.NoError(t, err)
	defer taken.Close()
	bases := freeBases(start, freeports.Range{})
	require.Len(t, bases, offeredBases)
	require.Equal(t, start+hcclPorts, bases[0])
	p := &trainingPort{bases: func() []int { return freeBases(start, freeports.Range{}) },
		log: slog.New(slog.DiscardHandler), session: &offered{}}
	env := func(bases []int) [][]string {
		r := &launcher.StartRequest{Epoch: launcher.Epoch{World: []job.Member{{Bases: bases}}}, Env: make([][]string, 2)}
		p.start(r)
		return r.Env
	}
	want := []string{fmt.Sprintf("HCCL_IF_BASE_PORT=%d", start+hcclPorts)}
	require.Equal(t, [][]string{want, want}, env(bases))
	p.stop(launcher.StopRequest{Early: true})
	require.Nil(t, p.session.(*offered).bases)
	p.stop(launcher.StopRequest{})
	require.Equal(t, bases, p.session.(*offered).bases)
	require.Equal(t, make([][]string, 2), env(nil))
	require.Empty(t, freeBases(hcclHighest+1, freeports.Range{}))
}

// What no connection takes by chance is offered first.
func TestFreeBasesBesideOutgoingPorts(t *testing.T) {
	start := freeStretch(t)
	bases := freeBases(start, freeports.Range{First: start, Last: start + 2*hcclPorts})
	require.Equal(t, []int{start, start + 3*hcclPorts}, bases[:2])
	require.NotContains(t, bases, start+hcclPorts)
	bases = freeBases(start, freeports.Range{First: 1024, Last: 65535})
	require.Len(t, bases, offeredBases)
	require.Equal(t, []int{start, start + hcclPorts}, bases[:2])
}

type offered struct{ bases []int }

func (o *offered) SetBases(bases []int) { o.bases = bases }

// Somebody takes a port of the range that both nodes had, and the next epoch has another range, the same on both.
func TestTrainingPortOfAllNodes(t *testing.T) {
	b := newBench(t)
	start := freeStretch(t)
	args := b.sh(`n=$RANK.$TORCHELASTIC_RESTART_COUNT; echo $HCCL_IF_BASE_PORT > $DIR/base.$n; : > $DIR/up.$n
		while [ ! -e $DIR/go.$TORCHELASTIC_RESTART_COUNT ]; do sleep 0.02; done
		[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 1`,
		b.c10d("2", "--max-restarts=1", "--accelerator=ascend-npu", fmt.Sprintf("--training-port=%d", start))...)
	l1, l2 := b.run(args...), b.run(args...)
	base := func(restarts int) (found string) {
		for rank := range 2 {
			n := fmt.Sprintf("%d.%d", rank, restarts)
			eventually(t, "rank and restarts "+n, b.exists("up."+n))
			now := strings.TrimSpace(string(read(t, filepath.Join(b.dir, "base."+n))))
			require.True(t, found == "" || found == now, "the nodes have different ports: %s, %s", found, now)
			found = now
		}
		return found
	}
	require.Equal(t, fmt.Sprint(start), base(0))
	taken, err := net.Listen("tcp", fmt.Sprintf(":%d", start+3))
	require.NoError(t, err)
	defer taken.Close()
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, "go.0"), nil, 0o600))
	require.Equal(t, fmt.Sprint(start+hcclPorts), base(1))
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, "go.1"), nil, 0o600))
	require.Equal(t, 0, l1.wait(), l1.err.String())
	require.Equal(t, 0, l2.wait(), l2.err.String())
}
