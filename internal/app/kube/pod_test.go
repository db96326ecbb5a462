package kube_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/kube"
	"dlrover-run/internal/app/kube/kubetest"
)

func TestTheListOfNodesToAvoid(t *testing.T) {
	s := kubetest.Start(t)
	for name, value := range s.Pod(t, "train", "master-0", "patch pods") {
		t.Setenv(name, value)
	}
	cfg, err := kube.InCluster()
	require.NoError(t, err)
	require.Equal(t, "train", cfg.Namespace)
	c := client(t, cfg)
	ok, err := c.MayAnnotate(t.Context())
	require.NoError(t, err)
	require.True(t, ok)
	require.NoError(t, c.Avoid(t.Context(), []string{"gpu-01", "gpu-07"}))
	require.Equal(t, map[string]any{kube.AvoidKey: `["gpu-01","gpu-07"]`}, s.PodAnnotations("train", "master-0"))
	var many []string
	for i := range 10_000 {
		many = append(many, fmt.Sprintf("node-%09d.example", i))
	}
	require.NoError(t, c.Avoid(t.Context(), many))
	text := s.PodAnnotations("train", "master-0")[kube.AvoidKey].(string)
	require.Less(t, len(text), 128<<10+1)
	var kept []string
	require.NoError(t, json.Unmarshal([]byte(text), &kept))
	require.Greater(t, len(kept), 4000)
	require.Equal(t, many[:len(kept)], kept)
	require.NoError(t, c.Avoid(t.Context(), nil))
	require.Empty(t, s.PodAnnotations("train", "master-0"))

	cfg.Pod = "gone"
	require.ErrorIs(t, client(t, cfg).Avoid(t.Context(), nil), kube.ErrNotFound)
	for _, cfg := range []kube.Config{s.Account(t, "patch pods"), {}} {
		cfg.Server, cfg.TokenFile = "https://127.0.0.1:1", s.Account(t).TokenFile
		_, err = client(t, cfg).MayAnnotate(t.Context())
		require.ErrorIs(t, err, kube.ErrNoPod)
		require.ErrorIs(t, client(t, cfg).Avoid(t.Context(), nil), kube.ErrNoPod)
	}
}

func TestTheListOfNodesToAvoidNeedsItsRight(t *testing.T) {
	s := kubetest.Start(t)
	for name, value := range s.Pod(t, "train", "master-0", "get nodes", "list nodes", "patch nodes", "create events") {
		t.Setenv(name, value)
	}
	cfg, err := kube.InCluster()
	require.NoError(t, err)
	c := client(t, cfg)
	ok, err := c.MayAnnotate(t.Context())
	require.NoError(t, err)
	require.False(t, ok)
	err = c.Avoid(t.Context(), []string{"a"})
	require.ErrorIs(t, err, kube.ErrForbidden)
	require.ErrorContains(t, err, "docs/kubernetes/rbac-avoid.yaml")
}

func TestTheManifestsAboutPods(t *testing.T) {
	for file, right := range map[string]string{"rbac-avoid.yaml": "patch pods", "rbac-pods.yaml": "get pods"} {
		docs := documents(t, file)
		require.Len(t, docs, 2)
		require.Equal(t, "Role", docs[0].Kind)
		require.Equal(t, []string{right}, rules(t, docs[0]))
		require.Equal(t, "RoleBinding", docs[1].Kind)
		require.Equal(t, "Role", docs[1].RoleRef.Kind)
		require.Equal(t, docs[0].Metadata.Name, docs[1].RoleRef.Name)
		for _, d := range docs {
			require.Equal(t, "default", d.Metadata.Namespace)
		}
		require.Equal(t, "dlrover-master", docs[1].Subjects[0].Name)
	}
}

func TestWhereAPodIs(t *testing.T) {
	s := kubetest.Start(t)
	s.PlacePod("train", "job-edljob-worker-2", "gpu-02", "10.0.0.2")
	s.AddPod("train", "job-edljob-worker-3")
	cfg := s.Account(t, "get pods")
	cfg.Namespace = "train"
	c := client(t, cfg)
	at, err := c.Find(t.Context(), "job-edljob-worker-2")
	require.NoError(t, err)
	require.Equal(t, "gpu-02", at.Node)
	require.Contains(t, at.IPs, "10.0.0.2")
	at, err = c.Find(t.Context(), "job-edljob-worker-3")
	require.NoError(t, err)
	require.Equal(t, kube.Place{}, at, "it is yet to be scheduled")
	s.BreakDevice("train", "n1", "nvidia.com/gpu", "GPU-7", strings.Repeat("long ", 100))
	at, err = c.Find(t.Context(), "n1")
	require.NoError(t, err)
	require.Len(t, at.Unhealthy, 1)
	require.Regexp(t, "^nvidia.com/gpu GPU-7 is Unhealthy: long .*…$", at.Unhealthy[0])
	require.LessOrEqual(t, len(at.Unhealthy[0]), 256)
	s.Requests()
	_, err = c.Find(t.Context(), "job-edljob-worker-4")
	require.ErrorIs(t, err, kube.ErrNotFound)
	require.Equal(t, []string{"GET /api/v1/namespaces/train/pods/job-edljob-worker-4"}, s.Requests())
	for _, name := range []string{"../nodes", "Worker_1", ""} {
		_, err = c.Find(t.Context(), name)
		require.ErrorIs(t, err, kube.ErrNotFound)
	}
	require.Empty(t, s.Requests(), "no pod can be called so")

	cfg = s.Account(t, "patch pods", "get nodes")
	_, err = client(t, cfg).Find(t.Context(), "job-edljob-worker-2")
	require.ErrorIs(t, err, kube.ErrNoPod)
	cfg.Namespace = "train"
	_, err = client(t, cfg).Find(t.Context(), "job-edljob-worker-2")
	require.ErrorIs(t, err, kube.ErrForbidden)
	require.ErrorContains(t, err, "docs/kubernetes/rbac-pods.yaml")
}
