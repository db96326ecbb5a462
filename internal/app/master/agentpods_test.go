package master

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/kube"
	"dlrover-run/internal/app/marks"
	"dlrover-run/rendezvous/pyproto"
)

func TestThePodsOfAgents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		var asked []string
		var answer kube.Place
		var fault error
		p := newAgentPods(nil, "job", slog.New(slog.NewTextHandler(&out, nil)))
		require.Empty(t, p.machine(t.Context(), "worker", 1, "10.0.0.1"))
		p.find = func(ctx context.Context, pod string) (kube.Place, error) {
			asked = append(asked, pod)
			return answer, fault
		}
		is := func(want string, asks int, id int, ip string) {
			t.Helper()
			asked = nil
			require.Equal(t, want, p.machine(t.Context(), "worker", id, ip))
			require.Len(t, asked, asks)
		}
		answer = kube.Place{Node: "gpu-01", IPs: []string{"10.0.0.1", "10.244.0.7"}}
		is("gpu-01", 1, 1, "10.0.0.1")
		require.Equal(t, []string{"job-edljob-worker-1"}, asked)
		is("gpu-01", 0, 1, "10.0.0.1")
		is("gpu-01", 1, 2, "10.244.0.7")
		answer = kube.Place{Node: "gpu-05", IPs: []string{"10.0.0.5"}}
		is("gpu-05", 1, 1, "10.0.0.5") // a pod of the same name was made on another host
		is("gpu-05", 1, 1, "")         // from here on nobody would see that
		is("gpu-05", 1, 1, "")
		is("", 1, 1, "10.0.0.9") // it is not the agent's
		is("", 0, 1, "10.0.0.9")
		fault = fmt.Errorf("kube: %w", kube.ErrNotFound)
		is("", 1, 6, "10.0.0.6")
		is("", 0, 6, "10.0.0.6")
		fault = errors.New("no route to host")
		is("", 1, 7, "10.0.0.7")
		is("", 0, 8, "10.0.0.8")
		time.Sleep(podPause)
		fault, answer = nil, kube.Place{Node: "gpu-07", IPs: []string{"10.0.0.7"}}
		is("gpu-07", 1, 7, "10.0.0.7")
		for _, fault = range []error{kube.ErrForbidden, nil} {
			is("", map[bool]int{true: 1}[fault != nil], 9, "10.0.0.9")
		}
		is("gpu-07", 0, 7, "10.0.0.7")
		require.Empty(t, p.machine(t.Context(), "worker", 10, ""))
		for _, why := range []string{"no level of --node-action", "has another address", "are not called JOB-edljob-TYPE-ID",
			"no route to host", "rbac-pods.yaml allows"} {
			require.Equal(t, 1, strings.Count(out.String(), why), why)
		}
	})
}

// An agent's check fails before it has joined: its Kubernetes node is tainted where its pod may be looked up, and else
// what is known of it bears its own name.
func TestTheNodeOfAnAgentIsMarked(t *testing.T) {
	for right, want := range map[string]string{"get pods": "gpu-02", "patch pods": "worker-2"} {
		t.Run(right, func(t *testing.T) {
			s := inPod(t, append(taintRights, right)...)
			s.PlacePod("train", "job-edljob-worker-2", "gpu-02", "10.0.0.2")
			_, c, at, end := served(t, "--python-agents=open", "--python-run=job", "--node-action=taint")
			defer end()
			agent := pyproto.NewClient(pyproto.ClientConfig{
				Addr: strings.TrimPrefix(at, "http://"), Caller: pyproto.Caller{NodeType: "worker", NodeID: 2},
			})
			defer agent.Close()
			for range 3 {
				_, err := agent.Get(t.Context(), agent.New("JoinRendezvousRequest", pyproto.Field{Name: "node_id", Value: 2},
					pyproto.Field{Name: "node_rank", Value: 2}, pyproto.Field{Name: "local_world_size", Value: 8},
					pyproto.Field{Name: "rdzv_name", Value: "network-check"}, pyproto.Field{Name: "node_ip", Value: "10.0.0.2"}))
				require.NoError(t, err)
			}
			require.NoError(t, agent.Report(t.Context(), agent.New("NodeFailure",
				pyproto.Field{Name: "error_data", Value: "CheckFailure"}, pyproto.Field{Name: "restart_count", Value: -1},
				pyproto.Field{Name: "level", Value: "node_error"})))
			require.Eventually(t, func() bool { return record(t, c, want).State != "" }, soon, 10*time.Millisecond)
			lookups := 0
			for _, q := range s.Requests() {
				lookups += strings.Count(q, "GET /api/v1/namespaces/train/pods/job-edljob-worker-2")
			}
			require.Equal(t, 1, lookups)
			if want == "gpu-02" {
				tainted(t, s, "gpu-02", true)
				return
			}
			require.Eventually(t, func() bool { return record(t, c, want).State == marks.GivenUp }, soon, 10*time.Millisecond)
		})
	}
}
