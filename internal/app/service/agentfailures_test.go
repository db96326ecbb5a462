package service

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/pyproto"
	"dlrover-run/rendezvous/pyproto/agents"
)

// TestWhatAgentsOfDLRoverTell is read as what launchers tell.
func TestWhatAgentsOfDLRoverTell(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hub := api.NewHub(api.HubConfig{})
		defer hub.Close()
		h := agents.New(agents.Config{Service: hub, Run: "r"})
		defer h.Close()
		from := pyproto.Caller{NodeID: 4, NodeType: "worker"}
		send := func(get bool, name string, fs ...pyproto.Field) {
			m := pyproto.Comm.New(name, fs...)
			var err error
			if get {
				_, err = h.Get(t.Context(), from, m)
			} else {
				_, err = h.Report(t.Context(), from, m)
			}
			require.NoError(t, err)
			synctest.Wait()
		}
		type field = pyproto.Field
		const keys = "elastic-training/torch.rendezvous.elastic-training.1.0/"
		send(false, "RendezvousParams", field{Name: "min_nodes", Value: int64(1)}, field{Name: "max_nodes", Value: int64(1)})
		joins := func() {
			send(true, "JoinRendezvousRequest", field{Name: "rdzv_name", Value: "elastic-training"},
				field{Name: "local_world_size", Value: int64(8)}, field{Name: "node_rank", Value: int64(0)})
		}
		joins()
		send(true, "CommWorldRequest", field{Name: "rdzv_name", Value: "elastic-training"})
		send(false, "KeyValuePair", field{Name: "key", Value: keys + "MASTER_ADDR"}, field{Name: "value", Value: []byte("h")})
		send(false, "KeyValuePair", field{Name: "key", Value: keys + "MASTER_PORT"}, field{Name: "value", Value: []byte("1")})
		send(false, "NodeFailure", field{Name: "level", Value: "process_error"}, field{Name: "error_data",
			Value: `{"5": {"local_rank": 5, "exitcode": -9, "message": "killed", "datetime": "x"}}`})
		joins()
		time.Sleep(20 * time.Second)

		lines, err := hub.Evidences("r")
		require.NoError(t, err)
		require.NotEmpty(t, lines)
		v := verdict.Unpack(lines[0].Evidence)
		require.Len(t, v.Failures, 1)
		f := v.Failures[0]
		require.Equal(t, []any{5, 5, -9, "killed", "worker-4", 0},
			[]any{f.Rank, f.LocalRank, f.ExitCode, f.Message, f.NodeName, f.Node})
		require.WithinDuration(t, time.Now().Add(-20*time.Second), f.At, time.Second)
	})
}
