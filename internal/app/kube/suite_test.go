package kube_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.yaml.in/yaml/v3"

	"dlrover-run/internal/app/kube"
	"dlrover-run/internal/app/kube/kubetest"
)

const manifests = "../../../docs/kubernetes"

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// cluster gives accounts the rights that the manifests have.
type cluster struct{ *kubetest.Server }

func (c cluster) Level(t *testing.T, l kube.Level) kube.Config { return c.Account(t, granted(t, l)...) }

func TestSuite(t *testing.T) {
	suite(t, func(t *testing.T) apiServer { return cluster{kubetest.Start(t)} })
}

// document is what we read of a manifest.
type document struct {
	Kind     string
	Metadata struct{ Name, Namespace string }
	Rules    []struct {
		APIGroups        []string `yaml:"apiGroups"`
		Resources, Verbs []string
	}
	RoleRef  struct{ Kind, Name string } `yaml:"roleRef"`
	Subjects []struct{ Kind, Name, Namespace string }
	Spec     map[string]any
}

func documents(t *testing.T, name string) (documents []document) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(manifests, name))
	require.NoError(t, err)
	for line := range bytes.Lines(text) {
		require.LessOrEqual(t, len(line), 121, "%s: %s", name, line)
	}
	return decoded(t, text)
}

func decoded(t *testing.T, manifest []byte) (documents []document) {
	t.Helper()
	decoder := yaml.NewDecoder(bytes.NewReader(manifest))
	for {
		var d document
		err := decoder.Decode(&d)
		if errors.Is(err, io.EOF) {
			return documents
		}
		require.NoError(t, err)
		documents = append(documents, d)
	}
}

// manifestOf are the manifests of the levels.
var manifestOf = map[kube.Level]string{
	kube.Event: "rbac-event.yaml", kube.Condition: "rbac-condition.yaml", kube.Taint: "rbac-taint.yaml",
	kube.Cordon: "rbac-taint.yaml", kube.ExternalFault: "rbac-external-fault.yaml",
}

// granted are the rights that a level's manifest binds to the master's service account.
func granted(t *testing.T, l kube.Level) (rights []string) {
	t.Helper()
	roles := map[string][]string{}
	for _, d := range documents(t, manifestOf[l]) {
		switch d.Kind {
		case "ClusterRole":
			roles[d.Metadata.Name] = rules(t, d)
		case "ClusterRoleBinding", "RoleBinding":
			require.Equal(t, "ClusterRole", d.RoleRef.Kind)
			require.Contains(t, roles, d.RoleRef.Name)
			require.Len(t, d.Subjects, 1)
			require.Equal(t, "dlrover-master", d.Subjects[0].Name)
			bound := roles[d.RoleRef.Name]
			if d.Kind == "RoleBinding" { // which gives nothing of what is in no namespace
				require.Equal(t, "default", d.Metadata.Namespace)
				require.Equal(t, []string{"create events"}, bound)
			} else {
				require.NotContains(t, bound, "create events", "namespace default is enough")
			}
			rights = append(rights, bound...)
		default:
			require.Fail(t, d.Kind)
		}
	}
	return rights
}

func rules(t *testing.T, d document) (rights []string) {
	for _, rule := range d.Rules {
		for _, resource := range rule.Resources {
			require.Equal(t, []string{groupOf(resource)}, rule.APIGroups)
			for _, verb := range rule.Verbs {
				rights = append(rights, verb+" "+resource)
			}
		}
	}
	return rights
}

// groupOf is the group of API of a resource.
func groupOf(resource string) string {
	if resource == "externalfaults" {
		return "nvsentinel.dgxc.nvidia.com"
	}
	return ""
}

// TestEveryRightIsNeeded: what the suite shows to be enough is not too much either.
func TestEveryRightIsNeeded(t *testing.T) { everyRightIsNeeded(t, cluster{kubetest.Start(t)}) }

func everyRightIsNeeded(t *testing.T, p apiServer) {
	p.AddFaults(t)
	for _, l := range []kube.Level{kube.Event, kube.Condition, kube.Taint, kube.Cordon, kube.ExternalFault} {
		rights := granted(t, l)
		name := "everything." + string(l)
		p.AddNode(t, name)
		require.NoError(t, story(t, l, name, client(t, p.Account(t, rights...))))
		for i, right := range rights {
			name := fmt.Sprintf("%d.%s", i, l)
			p.AddNode(t, name)
			err := story(t, l, name, client(t, p.Account(t, slices.Delete(slices.Clone(rights), i, i+1)...)))
			require.ErrorIs(t, err, kube.ErrForbidden, "%s without %s", l, right)
			require.ErrorContains(t, err, "not allowed to "+right)
			file, _, _ := strings.Cut(strings.SplitAfter(err.Error(), "docs/kubernetes/")[1], " ")
			_, err = os.Stat(filepath.Join(manifests, strings.TrimSuffix(file, ",")))
			require.NoError(t, err, "the manifest that the error names")
		}
	}
}

// story is what a master does at a level.
func story(t *testing.T, l kube.Level, node string, c *kube.Client) error {
	missing, err := c.Allowed(t.Context(), l)
	require.NoError(t, err)
	m := mark(node)
	if err := c.Apply(t.Context(), l, m); err != nil {
		require.Len(t, missing, 1)
		return err
	}
	switch l {
	case kube.Event:
		return nil
	case kube.ExternalFault:
		m.Until = m.Until.Add(time.Second)
		err = c.Apply(t.Context(), l, m)
		return errors.Join(err, c.Withdraw(t.Context(), kube.Mark{Node: m.Node, Owner: m.Owner}))
	}
	_, errs := c.Marks(t.Context())
	err = errors.Join(errors.Join(errs...), c.Remove(t.Context(), m))
	require.Equal(t, err != nil, len(missing) > 0)
	return err
}

func client(t *testing.T, cfg kube.Config) *kube.Client {
	t.Helper()
	c, err := kube.New(cfg)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

func mark(node string) kube.Mark {
	since := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	return kube.Mark{Node: node, Owner: "job-a", Reason: "net.loss", Since: since, Until: since.Add(4 * time.Hour)}
}
