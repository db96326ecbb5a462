package run

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/torchpython"
)

// stepping makes steps, and asks for a restart.
const stepping = `
import os, sys, torch
open(os.path.join(os.environ["DIR"], "starts"), "a").write("start\n")
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(30):
    optimizer.zero_grad()
    (weight * weight).sum().backward()
    optimizer.step()
sys.exit(138)
`

// Worker 0 alone decides: a failure of another one is restarted while a restart is left, and ends nothing after that.
func TestWorkerZeroDecidesAlone(t *testing.T) {
	for name, opts := range map[string][]string{
		"success rule": {"--success-rule=rank0", "--max-restarts=1"},
		"T9k's policy": {"--policy=t9k", "--max-restarts=1", "--restart-policy=OnFailure"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			args := b.sh(`echo $RANK >> $DIR/starts; : > $DIR/up.$RANK.$TORCHELASTIC_RESTART_COUNT; `+
				`if [ $RANK = 2 ]; then while [ ! -e $DIR/up.0.$TORCHELASTIC_RESTART_COUNT ]; do sleep 0.01; done; exit 3; fi; `+
				`while [ ! -e $DIR/go ]; do sleep 0.02; done`, b.c10d("2", opts...)...)
			first, second := b.run(args...), b.run(args...)
			told := func() int {
				return strings.Count(first.err.String()+second.err.String(), "the rendezvous decides whether all restart")
			}
			eventually(t, "two failures", func() bool { return told() == 2 })
			require.Equal(t, 2, count(b.lines("starts"), "0"))
			b.release()
			require.Equal(t, 0, first.wait())
			require.Equal(t, 0, second.wait(), "its worker has failed, and the job has succeeded")
		})
	}
	t.Run("rank 0 fails", func(t *testing.T) {
		b := newBench(t)
		l := b.run(b.sh(`if [ $RANK = 1 ]; then : > $DIR/up.1; exit 3; fi; while [ ! -e $DIR/up.1 ]; do sleep 0.01; done; `+
			`sleep 0.5; exit 4`, "--nproc-per-node=2", "--success-rule=rank0")...)
		require.Equal(t, 1, l.wait())
		require.Contains(t, l.err.String(), "rank 1 (node 0")
	})
}

// Progress gives none of T9k's restarts back.
func TestT9kAddsItsRestartsUp(t *testing.T) {
	long(t)
	t.Parallel()
	b := newBench(t)
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, "train.py"), []byte(stepping), 0o600))
	l := b.start("dlrover-run", []string{"PYTHON_EXEC=" + torchpython.Require(t, "THE LIMIT OF ALL RESTARTS IS")},
		"--standalone", "--policy=t9k", "--max-restarts=1", "--backoff-limit=3", "--hang=auto", "train.py")
	require.Equal(t, 1, l.wait(), l.err.String())
	require.Equal(t, 4, len(b.lines("starts")))
	require.Contains(t, strings.Join(strings.Fields(l.err.String()), " "), "3 restarts of the job, whether they have "+
		"brought progress or not (--backoff-limit)")
}
