package lease

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/kube"
)

func write(t *testing.T, path, text string) string {
	t.Helper()
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func TestLocate(t *testing.T) {
	for _, name := range []string{"KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "KUBECONFIG", "POD_NAME"} {
		t.Setenv(name, "")
	}
	dir := t.TempDir()
	t.Setenv(kube.DirVariable, dir)
	_, err := Locate("m", "", nil)
	require.ErrorIs(t, err, kube.ErrNotInCluster)
	require.ErrorContains(t, err, "KUBECONFIG has to name a file")

	t.Setenv("KUBECONFIG", write(t, filepath.Join(dir, "config"), `
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://kubernetes.invalid:6443"}}]
contexts: [{name: x, context: {cluster: c, namespace: team}}]
current-context: x
`))
	cfg, err := Locate("m", "", nil)
	require.NoError(t, err)
	require.Equal(t, []string{"team", "", "https://kubernetes.invalid:6443"},
		[]string{cfg.Namespace, cfg.Pod, cfg.API.Host})
	cfg, err = Locate("m", "other", nil)
	require.NoError(t, err)
	require.Equal(t, "other", cfg.Namespace)

	t.Setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
	t.Setenv("KUBERNETES_SERVICE_PORT", "443")
	write(t, filepath.Join(dir, "token"), "secret")
	_, err = Locate("m", "", nil)
	require.ErrorContains(t, err, "namespace is not known")
	write(t, filepath.Join(dir, "namespace"), "pods\n")
	t.Setenv("POD_NAME", "master-0")
	cfg, err = Locate("m", "other", nil)
	require.NoError(t, err)
	require.Equal(t, []string{"other", "pods", "master-0", "https://10.0.0.1:443"},
		[]string{cfg.Namespace, cfg.PodNamespace, cfg.Pod, cfg.API.Host})
}
