package kube_test

import (
	"bytes"
	"encoding/base64"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"dlrover-run/internal/app/kube"
)

// chart renders charts/dlrover-run as Helm does.
type chart struct {
	k          real
	program    string // of tools/chart
	kubeconfig string
	namespace  string
}

func (k real) testChart(t *testing.T) {
	c := chart{k, filepath.Join(t.TempDir(), "chart"), k.kubeconfig(t), "default"}
	build := exec.Command("go", "build", "-o", c.program, ".")
	build.Dir = "../../../tools/chart"
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	t.Run("Valid", c.testValid)
	t.Run("Refused", c.testRefused)
	t.Run("Rights", c.testRights)
	t.Run("Secret", c.testSecret)
	t.Run("Topology", c.testTopology)
}

// render returns what Helm would send to the cluster, or its error.
func (c chart) render(t *testing.T, values string) (docs []string, refusal string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "values.yaml")
	write(t, file, values)
	cmd := exec.Command(c.program, "-kubeconfig", c.kubeconfig, "-values", file, "-namespace", c.namespace,
		"../../../charts/dlrover-run")
	var out, errors bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errors
	if cmd.Run() != nil {
		return nil, errors.String()
	}
	return strings.Split(out.String(), "\n---\n"), ""
}

// rendered is render of what has to go well.
func (c chart) rendered(t *testing.T, values string) []string {
	t.Helper()
	docs, refusal := c.render(t, values)
	require.Empty(t, refusal)
	return docs
}

// of are the documents of these kinds.
func of(t *testing.T, docs []string, kinds ...string) (found []string) {
	t.Helper()
	for _, doc := range docs {
		for _, kind := range kinds {
			if headOf(t, doc).Kind == kind {
				found = append(found, doc)
			}
		}
	}
	return found
}

const everything = `
image: {repository: registry.example/dlrover-run, tag: "1.2"}
imagePullSecrets: [{name: registry}]
replicas: 3
nodeAction: taint
topoMapper: {topology_config: "a p 10.0.0.1\nb p 10.0.0.2\n"}
args: [--keep-runs=72h]
env: [{name: DLROVER_TLS, value: auto}]
nodeSelector: {pool: system}
podAnnotations: {note: "yes"}
networkPolicy: {from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]}
serviceMonitor: {enabled: true, labels: {release: prometheus}}
`

func (c chart) testValid(t *testing.T) {
	a := newAdmin(t, c.k.root)
	const least = "nodeAction: none\nnetworkPolicy: {enabled: false}\npodDisruptionBudget: {enabled: false}\n" +
		"token: {create: false}\n"
	for values, kinds := range map[string]string{
		"": "Deployment NetworkPolicy PodDisruptionBudget Role RoleBinding Role RoleBinding Secret Service ServiceAccount",
		everything: "Deployment NetworkPolicy PodDisruptionBudget Role RoleBinding Role RoleBinding ClusterRole " +
			"ClusterRoleBinding Secret Service ServiceAccount ServiceMonitor ConfigMap",
		least: "Deployment Role RoleBinding Service ServiceAccount",
	} {
		var got []string
		for _, doc := range c.rendered(t, values) {
			code, answer := a.post(doc, "&dryRun=All")
			require.Equal(t, http.StatusCreated, code, "%s\n%s", answer, doc)
			got = append(got, headOf(t, doc).Kind)
		}
		require.Equal(t, strings.Fields(kinds), got)
	}
	a.create("apiVersion: v1\nkind: Namespace\nmetadata: {name: training}")
	elsewhere := c
	elsewhere.namespace = "training"
	for _, doc := range elsewhere.rendered(t, everything) {
		a.create(doc) // an install, as the account of an administrator
		if h := headOf(t, doc); h.Metadata.Namespace != "training" {
			require.Contains(t, "Role RoleBinding ClusterRole ClusterRoleBinding", h.Kind)
			require.Equal(t, "training-dlrover-master", h.Metadata.Name, "of no other release")
		}
	}
	doc := of(t, c.rendered(t, ""), "Deployment")[0]
	code, answer := a.post(strings.Replace(doc, "replicas:", "replica:", 1), "&dryRun=All")
	require.Equal(t, http.StatusBadRequest, code, "%s", answer)
	c.testPod(t, doc)
}

// testPod: the chart's pod is that of master.yaml, but for the name of the Lease.
func (c chart) testPod(t *testing.T, deployment string) {
	var ours, theirs object
	spec(t, decoded(t, []byte(deployment)), "Deployment", &ours, "template", "spec")
	spec(t, documents(t, "master.yaml"), "Deployment", &theirs, "template", "spec")
	for _, pod := range []object{ours, theirs} {
		delete(pod, "affinity") // the labels are others
	}
	our, their := containers(object{"x": ours})[0], containers(object{"x": theirs})[0]
	require.Equal(t, "dlrover-run:0.1.0", our["image"])
	our["image"] = their["image"]
	delete(our, "imagePullPolicy")
	their["args"] = append(their["args"].([]any), "--lease-name=dlrover-master")
	require.ElementsMatch(t, their["args"], our["args"])
	our["args"] = their["args"]
	require.Equal(t, theirs, ours)
}

func (c chart) testRefused(t *testing.T) {
	for values, part := range map[string]string{
		"replica: 2":                      "replica",
		"replicas: 0":                     "replicas",
		"replicas: two":                   "replicas",
		"nodeAction: reboot":              "nodeAction",
		"token: {secret: Job_Token}":      "secret",
		"args: [keep-runs=72h]":           "args",
		"goMemLimit: 900":                 "goMemLimit",
		"networkPolicy: {enabled: maybe}": "enabled",
		"serviceMonitor: {interval: 30}":  "interval",
		"topoMapper: {topology_config: \"a p 10.0.0.1\\nb 10.0.0.2\\n\"}": "topology_config",
	} {
		docs, refusal := c.render(t, values)
		require.Nil(t, docs, values)
		require.Contains(t, refusal, part)
	}
	for _, values := range []string{
		"topoMapper: {topology_config: \"# racks\\n\\n  a  p\\t10.0.0.1 \\nb p 10.0.0.2\"}", "replicas: 1",
	} {
		c.rendered(t, values)
	}
}

// testRights: what a level needs it may, as with the manifests, and nothing else.
func (c chart) testRights(t *testing.T) {
	c.k.AddFaults(t)
	for _, l := range []kube.Level{kube.Event, kube.Condition, kube.Taint, kube.Cordon, kube.ExternalFault} {
		docs := c.rendered(t, "nodeAction: "+string(l))
		rights := granted(t, l)
		var given []string
		for _, doc := range of(t, docs, "Role", "ClusterRole") {
			if name := headOf(t, doc).Metadata.Name; name != "dlrover-master" {
				given = append(given, rules(t, decoded(t, []byte(doc))[0])...)
				continue
			}
			var ours, theirs any
			require.NoError(t, yaml.Unmarshal([]byte(doc), &ours))
			for _, doc := range strings.Split(manifest(t, "master.yaml"), "\n---\n") {
				if headOf(t, doc).Kind == "Role" {
					require.NoError(t, yaml.Unmarshal([]byte(doc), &theirs))
				}
			}
			require.Equal(t, theirs.(object)["rules"], ours.(object)["rules"])
		}
		require.ElementsMatch(t, rights, given)
		bound := of(t, docs, "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
		account := c.k.Bound(t, strings.Join(bound, "\n---\n"), append(rights, "patch pods")...)
		c.k.AddNode(t, "chart."+string(l))
		require.NoError(t, story(t, l, "chart."+string(l), client(t, account)))
	}
	before, after := c.rendered(t, ""), c.rendered(t, "podLookup: true")
	require.Len(t, after, len(before)+2)
	roles := of(t, after, "Role")
	require.Equal(t, []string{"get pods"}, rules(t, decoded(t, []byte(roles[len(roles)-1]))[0]))
}

func (c chart) testSecret(t *testing.T) {
	a, path := newAdmin(t, c.k.root), "/api/v1/namespaces/default/secrets/job-token"
	data := func(docs []string) string {
		var s struct{ Data map[string]string }
		require.NoError(t, yaml.Unmarshal([]byte(of(t, docs, "Secret")[0]), &s))
		require.Len(t, s.Data, 1, "no certificate, no key")
		token, err := base64.StdEncoding.DecodeString(s.Data["token"])
		require.NoError(t, err)
		return string(token)
	}
	first := c.rendered(t, "")
	made := of(t, first, "Secret")[0]
	require.Len(t, data(first), 32)
	require.NotEqual(t, data(first), data(c.rendered(t, "")), "nothing is there yet")

	a.create(made)
	defer a.send(t.Context(), "DELETE", path, "", nil)
	require.Empty(t, of(t, c.rendered(t, ""), "Secret"), "of somebody else")
	a.want("PATCH", path, "application/merge-patch+json", object{"metadata": object{"annotations": object{
		"meta.helm.sh/release-name": "dlrover-master"}}}, nil) // as Helm does
	require.Equal(t, data(first), data(c.rendered(t, "")))
	code, answer := a.send(t.Context(), "PUT", path, "application/yaml", []byte(of(t, c.rendered(t, ""), "Secret")[0]))
	require.Equal(t, http.StatusOK, code, "%s", answer)
	require.Empty(t, of(t, c.rendered(t, "token: {create: false}"), "Secret"))
}

// testTopology: a master reads what the chart makes of topology_config, and reads it again after an upgrade, in the
// way in which the kubelet replaces it.
func (c chart) testTopology(t *testing.T) {
	program := filepath.Join(t.TempDir(), "dlrover-master")
	out, err := exec.Command("go", "build", "-o", program, "../../../cmd/dlrover-master").CombinedOutput()
	require.NoError(t, err, "%s", out)
	mount, version := t.TempDir(), ""
	update := func(config string) (args []any) {
		values := object{"topoMapper": object{"topology_config": config}}
		docs := c.rendered(t, text(t, values))
		var m struct {
			Metadata struct{ Name string }
			Data     map[string]string
		}
		require.NoError(t, yaml.Unmarshal([]byte(of(t, docs, "ConfigMap")[0]), &m))
		require.Equal(t, "node-topology-config", m.Metadata.Name)
		version += "+"
		require.NoError(t, os.Mkdir(filepath.Join(mount, version), 0o700))
		for name, text := range m.Data {
			write(t, filepath.Join(mount, version, name), text)
			_ = os.Symlink(filepath.Join("..data", name), filepath.Join(mount, name))
		}
		require.NoError(t, os.Symlink(version, filepath.Join(mount, "..new")))
		require.NoError(t, os.Rename(filepath.Join(mount, "..new"), filepath.Join(mount, "..data")))
		var pod object
		spec(t, decoded(t, []byte(of(t, docs, "Deployment")[0])), "Deployment", &pod, "template", "spec")
		return containers(object{"x": pod})[0]["args"].([]any)
	}
	args := update("# two racks\na p 10.0.0.1\nb p 10.0.0.2\n")
	var file string
	for _, arg := range args {
		if of, ok := strings.CutPrefix(arg.(string), "--topology-file=/etc/dlrover-topology/"); ok {
			file = of
		}
	}
	require.NotEmpty(t, file)
	master := spawn(t, t.TempDir(), program, "--listen=127.0.0.1:0", "--topology-file="+filepath.Join(mount, file))
	require.True(t, eventually(func() bool { return strings.Contains(master.tail(), "127.0.0.1:") }), master.tail())
	update("a p 10.0.0.1\nb p 10.0.0.2\nb p 10.0.0.3\n")
	require.True(t, eventually(func() bool {
		log := master.tail()
		return strings.Contains(log, "the topology file was read again") && strings.Contains(log, `"nodes":3`)
	}), master.tail())
}
