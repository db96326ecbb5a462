package kube_test

import (
	"os"
	"path/filepath"
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
	t.Run("Lease", k.testLease)
	t.Run("Masters", k.testMasters)
	t.Run("Manifests", func(t *testing.T) {
		files, err := filepath.Glob(filepath.Join(manifests, "*.yaml"))
		require.NoError(t, err)
		require.NotEmpty(t, files)
		for _, file := range files {
			k.Check(t, manifest(t, filepath.Base(file)))
		}
	})
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
