package kube_test

import (
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/kube"
)

// testPolicy holds an account that may patch nodes to what the policy allows, whose marks are as without it.
func (k real) testPolicy(t *testing.T) {
	rights := []string{"get nodes", "list nodes", "patch nodes", "patch nodes/status", "create events"}
	cfg := k.Account(t, rights...)
	name := "system:serviceaccount:default:" + filepath.Base(cfg.TokenFile)
	newAdmin(t, k.root).create(strings.NewReplacer("system:serviceaccount:default:dlrover-master", name,
		"dlrover-master-nodes", "tested").Replace(manifest(t, "admission-policy.yaml")))
	const node = "under.policy"
	k.AddNode(t, node)
	root, a := newAdmin(t, k.root), newAdmin(t, cfg)
	root.patch(node, "", object{"metadata": object{"labels": object{"zone": "a"}, "annotations": object{"note": "x"}},
		"spec": object{"taints": []object{vendor}, "providerID": "cloud://1"}})
	root.patch(node, "/status", object{"status": object{"capacity": object{"cpu": "8"}}})

	forbidden := map[string]object{
		"a label":             {"metadata": object{"labels": object{"zone": "b"}}},
		"a label of ours":     {"metadata": object{"labels": object{kube.Key: "x"}}},
		"a finalizer":         {"metadata": object{"finalizers": []string{"example/x"}}},
		"an annotation":       {"metadata": object{"annotations": object{"note": "y"}}},
		"a new annotation":    {"metadata": object{"annotations": object{"other": "y"}}},
		"an annotation less":  {"metadata": object{"annotations": object{"note": nil}}},
		"a taint less":        {"spec": object{"taints": []object{}}},
		"a taint more":        {"spec": object{"taints": []object{vendor, {"key": "x", "effect": "NoSchedule"}}}},
		"eviction":            {"spec": object{"taints": []object{vendor, {"key": kube.Key, "effect": "NoExecute"}}}},
		"a cordon":            {"spec": object{"unschedulable": true}},
		"status: a condition": {"status": object{"conditions": []object{{"type": "Ready", "status": "False"}}}},
		"status: a condition more": {"status": object{"conditions": []object{
			{"type": "Ready", "status": "True"}, {"type": "X", "status": "True"},
		}}},
		"status: no condition":          {"status": object{"conditions": []object{}}},
		"status: capacity":              {"status": object{"capacity": object{"cpu": "9"}}},
		"status: capacity of a new one": {"status": object{"capacity": object{"example.com/gpu": "9"}}},
	}
	change := func(what string, body object) (int, string) {
		path := "/api/v1/nodes/" + node
		if strings.HasPrefix(what, "status: ") {
			path += "/status"
		}
		code, answer := a.do("PATCH", path, "application/merge-patch+json", body)
		return code, string(answer)
	}
	require.True(t, eventually(func() bool { // the API server takes a moment to notice a policy
		code, _ := change("a label", forbidden["a label"])
		root.patch(node, "", object{"metadata": object{"labels": object{"zone": "a"}}})
		return code == http.StatusUnprocessableEntity
	}))
	before := root.view(node)
	for what, body := range forbidden {
		code, answer := change(what, body)
		require.Equal(t, http.StatusUnprocessableEntity, code, "%s: %s", what, answer)
		require.Contains(t, answer, "dlrover-master may", what)
	}
	require.Equal(t, before, root.view(node))

	c := client(t, cfg)
	for _, l := range []kube.Level{kube.Condition, kube.Taint} {
		require.NoError(t, c.Apply(t.Context(), l, markOf(node, "job-a")))
		require.NoError(t, c.Remove(t.Context(), markOf(node, "job-a")))
	}
	err := c.Apply(t.Context(), kube.Cordon, markOf(node, "job-a"))
	require.ErrorContains(t, err, "dlrover-master may change the taints of a node's spec and nothing else")
	require.NotErrorIs(t, err, kube.ErrForbidden)
	k.AddNode(t, "bare.node") // without status, annotations or taints
	require.NoError(t, c.Apply(t.Context(), kube.Taint, markOf("bare.node", "job-a")))
}
