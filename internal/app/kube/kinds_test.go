package kube_test

import (
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// kinds have the definitions of what manifests describe, in modules of Go. The sum is that of go.sum.
var kinds = []struct{ module, sum, files string }{
	{"sigs.k8s.io/jobset@v0.12.0", "h1:YYPuV0px8Ongq/RXmJg6V0w2UC67aiR+rCMD06vhQQQ=",
		"config/components/crd/bases/*.yaml"},
	{"github.com/kubeflow/trainer/v2@v2.3.0", "h1:Je+e7zvTLzB4qW09J1fB7pZrqvPtWuGng2NqdN5p5QU=",
		"manifests/base/crds/trainer.kubeflow.org_*.yaml"},
	// Without MPIJob: that of the MPI operator is newer, and has the same name.
	{"github.com/kubeflow/training-operator@v1.8.1", "h1:mVvoBSCInbMBX0gGSn4+Ihj3ycwoLO1iEAw+0qPhQfc=",
		"manifests/base/crds/kubeflow.org_[^m]*.yaml"},
	{"github.com/kubeflow/mpi-operator@v0.8.0", "h1:22EccUiO4VDooG4TooesdE8o8euGVj89PIRhiP24SRE=",
		"manifests/base/kubeflow.org_mpijobs.yaml"},
	{"volcano.sh/volcano@v1.15.1", "h1:M0iGzhy1dvod2GFy1QiyWdv1jmmNfHW4+2WoRU7CIAk=",
		"config/crd/volcano/bases/*.yaml"},
	{"sigs.k8s.io/kueue@v0.19.2", "h1:mPNzr37u0nwI7ikST5QQl5gg6EgtYOAvC9ZbTgywdN8=",
		"config/components/crd/bases/*.yaml"},
	{"sigs.k8s.io/lws@v0.8.0", "h1:DdhJ8QabwTfWgbgaHH2gdf8twliioHaoSfmDXRYEVU0=", "config/crd/bases/*.yaml"},
	{"github.com/cert-manager/cert-manager@v1.19.1", "h1:Txh8L/nLWTDcb7ZnXuXbTe15BxQnLbLirXmbNk0fGgY=",
		"deploy/crds/cert-manager.io_certificates.yaml"},
	{"github.com/prometheus-operator/prometheus-operator@v0.89.0", "h1:2HA351OwWBa10H6TDhjeSdHOA7wiY71sEivg+z2cykk=",
		"example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml"},
}

// define makes the API server know all kinds.
func (k *kubernetes) define(t *testing.T) {
	t.Helper()
	a := newAdmin(t, k.root)
	var defined []head
	for _, m := range kinds {
		files, err := filepath.Glob(filepath.Join(fetch(t, m.module, m.sum), m.files))
		require.NoError(t, err)
		require.NotEmpty(t, files, m.module)
		for _, file := range files {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			code, answer := a.send(t.Context(), "POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
				"application/yaml", text)
			require.Equal(t, http.StatusCreated, code, "%s: %s", file, answer)
			defined = append(defined, served(t, answer)...)
		}
	}
	for _, h := range defined {
		require.True(t, eventually(func() bool { return a.path(h) != "" }), "%v is not served", h)
	}
}

// served are the versions of a kind that a definition has the API server serve.
func served(t *testing.T, definition []byte) (kinds []head) {
	t.Helper()
	var d struct {
		Spec struct {
			Group    string
			Names    struct{ Kind string }
			Versions []struct {
				Name   string
				Served bool
			}
		}
	}
	require.NoError(t, json.Unmarshal(definition, &d))
	for _, v := range d.Spec.Versions {
		if v.Served {
			kinds = append(kinds, head{APIVersion: d.Spec.Group + "/" + v.Name, Kind: d.Spec.Names.Kind})
		}
	}
	require.NotEmpty(t, kinds)
	return kinds
}

// fetch returns the directory of a module in Go's cache, into which go gets it.
func fetch(t *testing.T, module, sum string) string {
	t.Helper()
	cmd := exec.Command("go", "mod", "download", "-json", module)
	cmd.Dir = t.TempDir() // outside of our module
	out, err := cmd.Output()
	var of struct{ Dir, Sum, Error string }
	require.NoError(t, json.Unmarshal(out, &of), "%s: %v", module, err)
	require.Empty(t, of.Error)
	require.Equal(t, sum, of.Sum, module)
	return of.Dir
}
