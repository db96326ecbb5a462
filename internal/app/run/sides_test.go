package run

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/launcher"
)

func TestSidesOptions(t *testing.T) {
	for line, want := range map[string]string{
		"--preset=mindspore --ms-port=65536 train.py":   "--ms-port=65536: need a port from 1 to 65535",
		"--preset=mindspore --ms-servers=-1 train.py":   "--ms-servers=-1: need 0 to 256",
		"--ms-port=8118 train.py":                       "--ms-port is for MindSpore, and the preset is torch",
		"--preset=jax --ms-servers=1 train.py":          "--ms-servers is for MindSpore, and the preset is jax",
		"--preset=mindspore --max-restarts=1 train.py ": "$MS_SCHED_PORT=\"x\": need a number from 0 to 65535",
	} {
		_, err := resolved(t, line, map[string]string{"MS_SCHED_PORT": "x"})
		require.ErrorContains(t, err, want)
	}
	s, err := resolved(t, "--preset=mindspore train.py", map[string]string{"MS_SCHED_PORT": "2222", "MS_SERVER_NUM": "2"})
	require.NoError(t, err)
	require.Equal(t, []int{2222, 2}, []int{s.framework.port, s.framework.servers})
	s, err = resolved(t, "--preset=mindspore --ms-port=0 train.py", map[string]string{"MS_SCHED_PORT": "2222"})
	require.NoError(t, err)
	require.Zero(t, s.framework.port)
}

func TestThePlanShowsWhatRunsBesideTheWorkers(t *testing.T) {
	s, err := resolved(t, "--preset=mindspore --ms-servers=1 train.py arg", nil)
	require.NoError(t, err)
	p, err := makePlan(&s, testHost())
	require.NoError(t, err)
	require.Len(t, p.Beside, 2)
	require.Equal(t, "pserver-0", p.Beside[1].Name)
	require.Equal(t, p.Workers[0].Argv, p.Beside[0].Argv)
	require.Contains(t, p.Beside[0].Env, "MS_ROLE=MS_SCHED")
	require.Contains(t, p.Beside[0].Env, "MS_SCHED_PORT="+fromRendezvous)
}

func TestTheFirstNodeNeedsThePort(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	p := &fixedPort{root: os.DirFS("/"), port: taken.Addr().(*net.TCPAddr).Port}
	e := launcher.Epoch{World: []job.Member{{Addr: "127.0.0.1"}, {Addr: "127.0.0.1"}}}
	_, err = p.sides(e)
	require.ErrorContains(t, err, fmt.Sprintf("--ms-port=%d: port %[1]d is taken by pid %d", p.port, os.Getpid()))
	e.Place.GroupRank = 1
	_, err = p.sides(e)
	require.NoError(t, err)
}

// schedulerScript is MindSpore for shells: workers need a scheduler on the first node, which ends when all of them
// have.
const schedulerScript = `case $MS_ROLE in
MS_SCHED) echo "$MS_SCHED_HOST:$MS_SCHED_PORT $MS_WORKER_NUM ${RANK:-none}" > $DIR/sched.new
  mv $DIR/sched.new $DIR/sched
  echo listening; for i in $(seq $MS_WORKER_NUM); do while [ ! -e $DIR/end.$((i-1)) ]; do sleep 0.02; done; done
  : > $DIR/sched.end;;
MS_PSERVER) : > $DIR/pserver; exec sleep 600;;
MS_WORKER) while [ ! -e $DIR/sched ]; do sleep 0.02; done
  [ $(cut -d' ' -f1 $DIR/sched) = $MS_SCHED_HOST:$MS_SCHED_PORT ] || exit 4
  while [ -n "$NEEDS" ] && [ ! -e $DIR/$NEEDS ]; do sleep 0.02; done
  : > $DIR/end.$MS_NODE_ID; while [ ! -e $DIR/sched.end ]; do sleep 0.02; done;;
esac`

// Two nodes have one scheduler, on the first.
func TestASchedulerForTwoNodes(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	args := b.sh(schedulerScript, b.c10d("2", "--preset=mindspore", "--log-dir="+b.dir+"/logs",
		"--redirects=3", "--success-rule=all")...)
	l1, l2 := b.run(args...), b.run(args...)
	require.Equal(t, 0, l1.wait(), l1.err.String())
	require.Equal(t, 0, l2.wait(), l2.err.String())
	require.FileExists(t, filepath.Join(b.dir, "sched.end"))
	require.Regexp(t, `^127\.0\.0\.1:\d+ 4 none\n$`, string(read(t, filepath.Join(b.dir, "sched"))))
	found, err := filepath.Glob(filepath.Join(b.dir, "logs", "*", "attempt_*", "scheduler.log"))
	require.NoError(t, err)
	require.Len(t, found, 1, "of the first node")
	require.Equal(t, "listening\n", string(read(t, found[0])))
}

// Who does not end by itself is stopped with the job.
func TestParameterServersOnAFixedPort(t *testing.T) {
	long(t)
	t.Parallel()
	b := newBench(t)
	port := freePort(t)
	l := b.start("dlrover-run", []string{"NEEDS=pserver"}, b.sh(schedulerScript, "--standalone", "--nproc-per-node=2",
		"--preset=mindspore", "--ms-servers=1", "--ms-port="+port, "--success-rule=all")...)
	eventually(t, "the scheduler's end", b.exists("sched.end"))
	require.Contains(t, string(read(t, filepath.Join(b.dir, "sched"))), ":"+port+" 2 ")
	eventually(t, "the job's end", func() bool { return strings.Contains(l.err.String(), "does not end; stopping it") })
	require.Equal(t, 0, l.wait(), l.err.String())
}
