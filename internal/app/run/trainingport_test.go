package run

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/run/feature/featuretest"
)

// Somebody takes a port of the range that both nodes had, and the next epoch has another range, the same on both.
func TestTrainingPortOfAllNodes(t *testing.T) {
	b := newBench(t)
	const hcclPorts = 16
	start := featuretest.FreeStretch(t, 16*hcclPorts)
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
