package kube_test

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/kube"
)

// TestKubernetes holds a real API server, with the manifests as they are, to what the suite expects of ours.
func TestKubernetes(t *testing.T) {
	k := real{startKubernetes(t)}
	t.Run("Suite", func(t *testing.T) {
		suite(t, func(*testing.T) apiServer { return k })
	})
	t.Run("EveryRightIsNeeded", func(t *testing.T) { everyRightIsNeeded(t, k) })
	t.Run("TheListOfNodesToAvoid", k.testAvoid)
	t.Run("AdmissionPolicy", k.testPolicy)
	t.Run("DevicesOfAPod", k.testDevices)
	t.Run("Lease", k.testLease)
	t.Run("Masters", k.testMasters)
	k.define(t)
	t.Run("Docs", k.testDocs)
	t.Run("Chart", k.testChart)
	t.Run("LostPod", k.testLostPod)
}

type real struct{ *kubernetes }

func (k real) Level(t *testing.T, l kube.Level) kube.Config {
	return k.Bound(t, manifest(t, manifestOf[l]), granted(t, l)...)
}

func manifest(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(manifests, name))
	require.NoError(t, err)
	return string(text)
}

// testDevices is the kubelet, which writes into the status of a pod what the plugin of its devices says.
func (k real) testDevices(t *testing.T) {
	cfg := k.Bound(t, manifest(t, "rbac-pods.yaml"), "get pods")
	a := newAdmin(t, k.root)
	gpus := object{"nvidia.com/gpu": "3"}
	a.want("POST", "/api/v1/namespaces/default/pods", "application/json", object{
		"metadata": object{"name": "with-devices"}, "spec": object{
			"serviceAccountName": filepath.Base(cfg.TokenFile), "containers": []object{{"name": "master", "image": "none",
				"resources": object{"requests": gpus, "limits": gpus}}},
		},
	}, nil)
	resources := []object{{"resourceID": "GPU-1", "health": "Healthy"}, {"resourceID": "GPU-2", "health": "Unknown"},
		{"resourceID": "GPU-7", "health": "Unhealthy"}}
	a.want("PATCH", "/api/v1/namespaces/default/pods/with-devices/status", "application/merge-patch+json", object{
		"status": object{"containerStatuses": []object{{"name": "master", "image": "none", "imageID": "", "ready": true,
			"restartCount": 0, "allocatedResourcesStatus": []object{{"name": "nvidia.com/gpu", "resources": resources}}}}},
	}, nil)
	at, err := client(t, cfg).Find(t.Context(), "with-devices")
	require.NoError(t, err)
	var version struct{ Minor string }
	a.want("GET", "/version", "", nil, &version)
	if minor, err := strconv.Atoi(version.Minor); err == nil && minor < 36 {
		t.Skipf("SKIPPED: KUBERNETES 1.%d DOES NOT TELL OF DEVICES", minor)
	}
	require.Equal(t, []string{"nvidia.com/gpu GPU-7 is Unhealthy"}, at.Unhealthy)
}

func (k real) testAvoid(t *testing.T) {
	cfg := k.Bound(t, manifest(t, "rbac-avoid.yaml"), "patch pods")
	cfg.Pod = "master-0"
	k.Pod(t, cfg.Pod, cfg)
	c := client(t, cfg)
	may, err := c.MayAnnotate(t.Context())
	require.NoError(t, err)
	require.True(t, may)
	require.NoError(t, c.Avoid(t.Context(), []string{"gpu-01", "gpu-07"}))
	require.Equal(t, map[string]string{kube.AvoidKey: `["gpu-01","gpu-07"]`}, k.PodAnnotations(t, cfg.Pod))
	require.NoError(t, c.Avoid(t.Context(), nil))
	require.Empty(t, k.PodAnnotations(t, cfg.Pod))
	gone := cfg
	gone.Pod = "gone"
	require.ErrorIs(t, client(t, gone).Avoid(t.Context(), nil), kube.ErrNotFound)

	without := k.Level(t, kube.Taint)
	without.Pod = cfg.Pod
	c = client(t, without)
	may, err = c.MayAnnotate(t.Context())
	require.NoError(t, err)
	require.False(t, may)
	require.ErrorIs(t, c.Avoid(t.Context(), nil), kube.ErrForbidden)
}
