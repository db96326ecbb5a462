package master

import (
	"bytes"
	"context"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/kube"
	"dlrover-run/internal/app/kube/kubetest"
	"dlrover-run/internal/app/nodehealth"
	"dlrover-run/internal/job"
	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

const broken = "nvidia.com/gpu GPU-7 is Unhealthy: XID 79"

// A worker fails without a word about its device. The kubelet knows more, and it becomes a finding about the machine.
func TestDevicesOfANodeThatFails(t *testing.T) {
	s := inPod(t, "create events", "get pods")
	s.BreakDevice("train", "n1", "nvidia.com/gpu", "GPU-7", "XID 79")
	d, c, _, end := served(t)
	defer end()
	require.NoError(t, c.Join(t.Context(), "r", rendezvous.Join{
		Node:   rendezvous.Node{ID: "n1", Name: "n1", Machine: "gpu-01", Rank: -1, Slots: 1, Addr: "10.0.0.1"},
		Params: rendezvous.Params{Min: 1, Max: 1, MaxRestarts: 9},
	}))
	var epoch job.EpochID
	require.Eventually(t, func() bool {
		next, err := d.service.Hub.Watch(t.Context(), "r", "n1", api.Cursor{})
		require.NoError(t, err)
		epoch = next.EpochID
		return next.Kind == job.Lead
	}, soon, 10*time.Millisecond)
	report(t, c, rendezvous.Ready{ID: "n1", EpochID: epoch, Addr: "10.0.0.1", Port: 1})
	failed := verdict.Failure{NodeName: "n1", PID: 42, ExitCode: 1, At: time.Now(), LastLines: "RuntimeError: nan"}
	report(t, c, rendezvous.Failing{ID: "n1", EpochID: epoch, Decision: rendezvous.RestartCharged,
		Failures: verdict.Pack([]verdict.Failure{failed})})
	require.Eventually(t, func() bool {
		for _, n := range listed(t, c).Nodes {
			for _, f := range n.Findings {
				if n.Name == "gpu-01" && f.Kind == nodehealth.Device && f.Text == broken {
					return true
				}
			}
		}
		return false
	}, soon, 10*time.Millisecond)
}

func TestDevicesThatCannotBeLookedUp(t *testing.T) {
	s := kubetest.Start(t)
	s.BreakDevice("train", "n1", "nvidia.com/gpu", "GPU-7", "XID 79")
	var find func(context.Context, string) []string
	lookup := func(rights ...string) (func(node string) []string, *bytes.Buffer) {
		cfg := s.Account(t, rights...)
		cfg.Namespace = "train"
		client, err := kube.New(cfg)
		require.NoError(t, err)
		t.Cleanup(client.Close)
		var out bytes.Buffer
		find = devices(client.Find, slog.New(slog.NewTextHandler(&out, nil)))
		return func(node string) []string { return find(t.Context(), node) }, &out
	}
	ask, out := lookup("get pods")
	require.Equal(t, []string{broken}, ask("n1"))
	require.Empty(t, ask("a-host-and-no-pod"))
	require.Empty(t, out.String())
	s.Intercept(func(w http.ResponseWriter, _ *http.Request) bool {
		http.Error(w, "no", http.StatusBadRequest)
		return true
	})
	require.Empty(t, ask("n1"))
	require.Contains(t, out.String(), "400 Bad Request")
	s.Intercept(nil)
	require.Equal(t, []string{broken}, ask("n1"))
	out.Reset()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.Empty(t, find(ctx, "n1"))
	require.Empty(t, out.String(), "the end of this master is no news")

	ask, out = lookup("get nodes")
	s.Requests()
	for range 3 {
		require.Empty(t, ask("n1"))
	}
	require.Len(t, s.Requests(), 1)
	require.Equal(t, 1, strings.Count(out.String(), "rbac-pods.yaml allows it"))
}
