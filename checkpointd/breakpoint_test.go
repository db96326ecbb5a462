package checkpointd

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/coordinator"
)

func TestMadeAfterThePlannedSave(t *testing.T) {
	held := func(id string, shard int, second int64) coordinator.Holding {
		return coordinator.Holding{Save: id, Shard: shard, Shards: 2, Saved: time.Unix(second, 0)}
	}
	plan := coordinator.Plan{Save: "plan", Step: 5}
	for name, tc := range map[string]struct {
		held         []coordinator.Holding
		second, step int64
		want         bool
	}{
		"by the same shard":         {[]coordinator.Holding{held("plan", 1, 20), held("plan", 0, 10)}, 11, 1, true},
		"before, by the same shard": {[]coordinator.Holding{held("plan", 1, 5), held("plan", 0, 10)}, 9, 9, false},
		"after the last of other shards": {[]coordinator.Holding{held("plan", 1, 10), held("other", 0, 30)}, 11, 1,
			true},
		"before the last of other shards":   {[]coordinator.Holding{held("plan", 1, 10)}, 9, 9, false},
		"nothing of it here, a later step":  {nil, 1, 6, true},
		"nothing of it here, an older step": {nil, 99, 5, false},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, tc.want, madeAfter(madeAt(tc.second, "this", "1.0.0", tc.step, "/ckpt"), plan, tc.held))
		})
	}
}
