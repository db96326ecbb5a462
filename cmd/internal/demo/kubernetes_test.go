package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous/kube"
	"dlrover-run/rendezvous/kube/kubetest"
)

// TestKubernetesFeedback plays the story with a real API server, where the master has the rights of the manifests only.
func TestKubernetesFeedback(t *testing.T) {
	k := realCluster{t, kubetest.StartKubernetes(t)}
	testFeedback(t, func(*feedbackStory) kubernetes { return k })
	require.Empty(t, k.avoid())
	for n := 1; n <= machineCount; n++ {
		require.Empty(t, k.taint(machine(n)))
		require.NotContains(t, k.server.NodeAnnotations(t, machine(n)), kube.Key)
	}
}

type realCluster struct {
	t      *testing.T
	server *kubetest.Kubernetes
}

func (k realCluster) addNode(name string) { k.server.AddNode(k.t, name) }

func (k realCluster) masterPod() map[string]string {
	var manifests []string
	for _, name := range []string{"rbac-taint.yaml", "rbac-avoid.yaml"} {
		text, err := os.ReadFile(filepath.Join("../../../docs/kubernetes", name))
		require.NoError(k.t, err)
		manifests = append(manifests, string(text))
	}
	return k.server.Pod(k.t, masterPod, k.server.Bound(k.t, strings.Join(manifests, "\n---\n"), masterRights...))
}

func (k realCluster) taint(node string) string {
	value, _ := k.server.Node(k.t, node)
	return value
}

func (k realCluster) avoid() string { return k.server.PodAnnotations(k.t, masterPod)[kube.AvoidKey] }
