package kube_test

import (
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/client-go/rest"

	"dlrover-run/internal/app/leadtest"
	"dlrover-run/internal/app/lease"
	"dlrover-run/rendezvous/lead"
)

// testLease has masters elect one of them, with the rights of master.yaml and no others.
func (k real) testLease(t *testing.T) {
	var role []string
	for doc := range strings.SplitSeq(manifest(t, "master.yaml"), "\n---\n") {
		if kind := kindOf(doc); kind == "Role" || kind == "RoleBinding" {
			role = append(role, doc)
		}
	}
	require.Len(t, role, 2)
	fresh := func(t *testing.T) lease.Config {
		account := k.Bound(t, strings.Join(role, "\n---\n"), "patch pods")
		name := filepath.Base(account.TokenFile)
		k.Pod(t, name, account)
		api := &rest.Config{Host: account.Server, BearerTokenFile: account.TokenFile}
		api.CAFile = account.CAFile
		return lease.Config{
			Name: name, Namespace: "default", Pod: name, API: api, Log: slog.New(slog.DiscardHandler),
		}
	}
	open := func(t *testing.T, cfg lease.Config) lead.Store {
		s, err := lease.Open(cfg)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, s.Close()) })
		return s
	}
	leadtest.Run(t, func(t *testing.T) leadtest.Suite {
		cfg := fresh(t)
		return leadtest.Suite{Deposes: true, Open: func(t *testing.T) lead.Store { return open(t, cfg) }}
	})
	t.Run("Label", func(t *testing.T) {
		cfg := fresh(t)
		s := open(t, cfg)
		labelled := func() bool {
			var pod struct {
				Metadata struct{ Labels map[string]string }
			}
			newAdmin(t, k.root).want("GET", "/api/v1/namespaces/default/pods/"+cfg.Pod, "", nil, &pod)
			return pod.Metadata.Labels[lease.Label] == "true"
		}
		_, _, err := s.Campaign(t.Context(), "a:1")
		require.NoError(t, err)
		require.True(t, eventually(labelled))
		require.NoError(t, s.Resign(t.Context()))
		require.True(t, eventually(func() bool { return !labelled() }))
	})
}
