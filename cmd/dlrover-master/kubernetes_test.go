package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/kube"
	"dlrover-run/rendezvous/kube/kubetest"
	"dlrover-run/rendezvous/nodes"
)

// TestKubernetes has two masters mark a node in a real API server, with no more rights than the manifests give.
func TestKubernetes(t *testing.T) {
	k := kubetest.StartKubernetes(t)
	for _, name := range []string{"gpu-00", "gpu-01", "gpu-02"} {
		k.AddNode(t, name)
	}
	a, endA := masterIn(t, k, "master-0")
	defer endA()
	b, endB := masterIn(t, k, "other-0")
	defer endB()
	join(t, a)
	report(t, a, rendezvous.Barred{ID: "n1", Reason: "its link is slow", Aspect: "network"})
	change(t, b, "gpu-01", "mark")
	state := func(taint, avoid string, events int) {
		t.Helper()
		require.Eventually(t, func() bool {
			value, messages := k.Node(t, "gpu-01")
			return value == taint && k.PodAnnotations(t, "master-0")[kube.AvoidKey] == avoid && len(messages) == events
		}, soon, 20*time.Millisecond)
	}
	state(string(nodes.CheckFailed), `["gpu-01"]`, 2)
	_, messages := k.Node(t, "gpu-01")
	told := strings.Join(messages, "\n")
	require.Contains(t, told, "its link is slow (marked by dlrover-master/default/master-0 until 2")
	require.Contains(t, told, "(marked by dlrover-master/default/other-0 until somebody clears it)")
	report(t, a, rendezvous.Cleared{ID: "n1", Covered: []string{"network"}})
	state(string(nodes.Operator), "", 2)
	change(t, b, "gpu-01", "clear")
	state("", "", 2)
	value, messages := k.Node(t, "gpu-00")
	require.Empty(t, value)
	require.Empty(t, messages)
}

// masterIn is a daemon in a pod of its own, at level taint.
func masterIn(t *testing.T, k *kubetest.Kubernetes, pod string) (c *api.Client, end func()) {
	t.Helper()
	var manifests []string
	for _, name := range []string{"rbac-taint.yaml", "rbac-avoid.yaml"} {
		text, err := os.ReadFile(filepath.Join("../../docs/kubernetes", name))
		require.NoError(t, err)
		manifests = append(manifests, string(text))
	}
	cfg := k.Bound(t, strings.Join(manifests, "\n---\n"), append([]string{"patch pods"}, taintRights...)...)
	for key, value := range k.Pod(t, pod, cfg) {
		t.Setenv(key, value)
	}
	_, c, _, end = served(t, "--node-action=taint")
	return c, end
}
