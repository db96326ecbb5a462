package checkpointd

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/shm/shmtest"
)

func FuzzParsePrepared(f *testing.F) {
	meta, err := json.Marshal(shmtest.Meta("/ckpt", 7))
	require.NoError(f, err)
	good, err := json.Marshal(preparedRecord{Segment: "seg/l0-0.seg", Seq: 3, Saved: time.Unix(1, 0), Meta: meta,
		Entry: commit.Entry{Files: []commit.FileEntry{{Path: "7/a.pt", Size: 1}}}})
	require.NoError(f, err)
	_, _, err = parsePrepared(good)
	require.NoError(f, err)
	f.Add(good)
	f.Add([]byte(`{"meta":{}}`))
	f.Add([]byte(`{"meta":null,"entry":{"Shard":-1}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		n, m, err := parsePrepared(b)
		if err == nil {
			require.Equal(t, m.Shard, n.Entry.Shard)
			require.Less(t, m.Shard, m.Shards)
		}
	})
}
