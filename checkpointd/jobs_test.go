package checkpointd_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/fsx"
)

// Two jobs with one run id save the same steps into one directory at the same time, each with a daemon of its own. Each
// step is of one of them.
func TestTwoDaemonsWithOneDirectory(t *testing.T) {
	const shards = 4
	steps := 40
	if testing.Short() {
		steps = 10
	}
	dir := t.TempDir()
	nodes := []*node{newNode(t), newNode(t)}
	for step := range int64(steps) {
		var wg sync.WaitGroup
		for i, n := range nodes {
			wg.Go(func() {
				for rank := range shards {
					s := shard(dir, step, rank, shards, shards)
					s.Meta.Epoch, s.Meta.Save = fmt.Sprintf("%d.1.0", 7+i), fmt.Sprintf("%x%015x", 10+i, step)
					s.Saved = time.Now()
					s.Files[0].Data = bytes.Repeat(fmt.Appendf(nil, "job %d.", i), 5000)
					n.put(s, fmt.Sprintf("seg/l%d-%d.seg", rank, step%3))
				}
				n.ask(map[string]any{"op": "wait", "dir": dir, "step": step, "timeout_ms": 10_000})
			})
		}
		wg.Wait()
	}
	store := commit.Store{FS: fsx.OS{}, Now: time.Now}
	ms, err := store.Manifests(dir)
	require.NoError(t, err)
	require.Len(t, ms, steps)
	of := map[string]int{}
	for _, m := range ms {
		require.NoError(t, store.Verify(t.Context(), dir, m, nil), "step %d", m.Step)
		for _, f := range m.Files {
			data, err := os.ReadFile(filepath.Join(dir, f.Path))
			require.NoError(t, err)
			require.True(t, bytes.HasPrefix(data, []byte(fmt.Sprintf("job %d.", m.ID[0]-97))), "step %d: %s", m.Step, f.Path)
		}
		of[m.ID[:1]]++
	}
	t.Logf("steps of each job: %v", of)
}
