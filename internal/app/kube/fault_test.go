package kube_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/kube"
	"dlrover-run/internal/app/kube/kubetest"
)

const faults = "/apis/nvsentinel.dgxc.nvidia.com/v1/externalfaults"

// AddFaults installs a kind with the fields of NVSentinel's ADR-049. The project's own definition is not public.
func (k *kubernetes) AddFaults(t *testing.T) {
	t.Helper()
	text := object{"type": "string"}
	texts := object{"type": "array", "items": text}
	event := object{"type": "object", "required": []string{"nodeName"}, "properties": object{
		"version": object{"type": "integer"}, "agent": text, "componentClass": text, "checkName": text, "nodeName": text,
		"isHealthy": object{"type": "boolean"}, "isFatal": object{"type": "boolean"}, "message": text,
		"recommendedAction":       object{"type": "string", "enum": []string{"NONE", "CUSTOM"}},
		"customRecommendedAction": text, "errorCode": texts, "generatedTimestamp": text,
		"entitiesImpacted": object{"type": "array", "items": object{"type": "object", "properties": object{
			"entityType": text, "entityValue": text,
		}}},
	}, "x-kubernetes-validations": []object{{"rule": "self == oldSelf", "message": "the event is frozen"}}}
	schema := object{"type": "object", "properties": object{
		"spec":   object{"type": "object", "properties": object{"healthEvent": event}},
		"status": object{"type": "object", "properties": object{"completionTime": text}},
	}}
	a, path := newAdmin(t, k.root), "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	code, answer := a.do("POST", path, "application/json", object{
		"metadata": object{"name": "externalfaults.nvsentinel.dgxc.nvidia.com"}, "spec": object{
			"group": "nvsentinel.dgxc.nvidia.com", "scope": "Cluster",
			"names": object{"plural": "externalfaults", "singular": "externalfault", "kind": "ExternalFault"},
			"versions": []object{{"name": "v1", "served": true, "storage": true,
				"subresources": object{"status": object{}}, "schema": object{"openAPIV3Schema": schema}}},
		},
	})
	require.Contains(t, []int{http.StatusCreated, http.StatusConflict}, code, string(answer))
	require.True(t, eventually(func() bool {
		code, _ := a.do("GET", faults, "", nil)
		return code == http.StatusOK
	}))
}

// faultsOf are the ExternalFaults about a node.
func (f *fixture) faultsOf(node string) (found []object) {
	f.t.Helper()
	var all struct {
		Items []struct {
			Metadata object
			Spec     struct{ HealthEvent object }
		}
	}
	f.admin.want("GET", faults, "", nil, &all)
	for _, item := range all.Items {
		if item.Spec.HealthEvent["nodeName"] == node {
			item.Spec.HealthEvent["name"] = item.Metadata["name"]
			found = append(found, item.Spec.HealthEvent)
		}
	}
	return found
}

func testExternalFaults(t *testing.T, f *fixture) {
	f.cluster.AddFaults(t)
	name, c, m := f.node(), f.client(kube.ExternalFault), markOf("", "job-a")
	m.Node = name
	before := f.admin.view(name)
	for range 2 {
		check(t, c.Apply(t.Context(), kube.ExternalFault, m))
	}
	found := f.faultsOf(name)
	require.Len(t, found, 1)
	require.Equal(t, "gpu.link: GPU 3: 41 GB/s, need 300", found[0]["message"])
	require.Equal(t, []any{"gpu.link"}, found[0]["errorCode"])
	require.Equal(t, []any{true, false}, []any{found[0]["isFatal"], found[0]["isHealthy"]})
	require.Len(t, f.admin.messages(name), 1)
	require.Equal(t, before, f.admin.view(name), "nothing changes on the node")

	longer := m
	longer.Until = m.Until.Add(m.Until.Sub(m.Since))
	check(t, c.Apply(t.Context(), kube.ExternalFault, longer))
	require.Equal(t, found, f.faultsOf(name), "the event stays")
	require.Equal(t, []kube.Mark{longer}, f.reported(c, name))
	check(t, c.Withdraw(t.Context(), m))
	require.Equal(t, []kube.Mark{longer}, f.reported(c, name), "it was renewed")

	other := markOf(name, "job-b")
	check(t, c.Apply(t.Context(), kube.ExternalFault, other))
	require.Equal(t, found, f.faultsOf(name), "one that is open is enough")
	check(t, c.Withdraw(t.Context(), other))
	require.Equal(t, found, f.faultsOf(name), "that of another owner stays")
	for range 2 {
		check(t, c.Withdraw(t.Context(), kube.Mark{Node: name, Owner: "job-a"}))
	}
	require.Empty(t, f.faultsOf(name))
}

// NVSentinel has repaired the node: what is found later is told anew.
func testExternalFaultsAreDone(t *testing.T, f *fixture) {
	f.cluster.AddFaults(t)
	name, c, m := f.node(), f.client(kube.ExternalFault), markOf("", "job-a")
	m.Node = name
	check(t, c.Apply(t.Context(), kube.ExternalFault, m))
	first := f.faultsOf(name)[0]["name"].(string)
	f.admin.want("PATCH", faults+"/"+first+"/status", "application/merge-patch+json",
		object{"status": object{"completionTime": "2026-03-01T13:00:00Z"}}, nil)
	check(t, c.Apply(t.Context(), kube.ExternalFault, m))
	require.Len(t, f.faultsOf(name), 1)
	m.Since, m.Until = m.Until, m.Until.Add(m.Until.Sub(m.Since))
	check(t, c.Apply(t.Context(), kube.ExternalFault, m))
	require.Len(t, f.faultsOf(name), 2)
	check(t, c.Withdraw(t.Context(), kube.Mark{Node: name, Owner: "job-a"}))
	require.Empty(t, f.faultsOf(name))
}

// NVSentinel gives a node back before its ExternalFault is gone. What is found meanwhile is told afterwards.
func testExternalFaultsThatLinger(t *testing.T, f *fixture) {
	f.cluster.AddFaults(t)
	name, c, m := f.node(), f.client(kube.ExternalFault), markOf("", "job-a")
	m.Node = name
	check(t, c.Apply(t.Context(), kube.ExternalFault, m))
	first := f.faultsOf(name)[0]["name"].(string)
	finalizers := func(all ...string) {
		f.admin.want("PATCH", faults+"/"+first, "application/merge-patch+json",
			object{"metadata": object{"finalizers": all}}, nil)
	}
	finalizers("nvsentinel.dgxc.nvidia.com/release")
	for range 2 {
		check(t, c.Withdraw(t.Context(), kube.Mark{Node: name, Owner: "job-a"}))
		require.Len(t, f.faultsOf(name), 1)
		require.Empty(t, f.reported(c, name), "it is on its way out")
	}
	m.Since, m.Until = m.Until, m.Until.Add(m.Until.Sub(m.Since))
	require.ErrorContains(t, c.Apply(t.Context(), kube.ExternalFault, m), first+" of node "+name+" is being deleted")
	finalizers()
	check(t, c.Apply(t.Context(), kube.ExternalFault, m))
	require.Equal(t, []kube.Mark{m}, f.reported(c, name))
}

// reported are the marks of level ExternalFault on one node.
func (f *fixture) reported(c *kube.Client, node string) (marks []kube.Mark) {
	f.t.Helper()
	all, errs := c.Reported(f.t.Context())
	check(f.t, errors.Join(errs...))
	for _, m := range all {
		if m.Node == node {
			marks = append(marks, m)
		}
	}
	return marks
}

func TestAClusterWithoutExternalFaults(t *testing.T) {
	s := kubetest.Start(t)
	c := client(t, s.Account(t, granted(t, kube.ExternalFault)...))
	_, err := c.Allowed(t.Context(), kube.ExternalFault)
	require.ErrorIs(t, err, kube.ErrNoFaults)
	require.ErrorContains(t, err, "is NVSentinel installed?")
	require.ErrorIs(t, c.Apply(t.Context(), kube.ExternalFault, mark("n")), kube.ErrNoFaults)
}

// The webhook of NVSentinel refuses a node that is not there. That is no question of rights.
func TestAnExternalFaultThatAWebhookRefuses(t *testing.T) {
	s := kubetest.Start(t)
	s.AddFaults(t)
	const message = `admission webhook "externalfault.nvsentinel" denied the request: node n does not exist`
	s.Intercept(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != "POST" {
			return false
		}
		w.WriteHeader(http.StatusForbidden)
		_ = json.NewEncoder(w).Encode(object{"kind": "Status", "code": http.StatusForbidden, "message": message})
		return true
	})
	err := client(t, s.Admin(t)).Apply(t.Context(), kube.ExternalFault, mark("n"))
	require.ErrorContains(t, err, message)
	require.NotErrorIs(t, err, kube.ErrForbidden)
	require.NotContains(t, err.Error(), "rbac")
}
