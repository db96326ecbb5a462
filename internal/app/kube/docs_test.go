package kube_test

import (
	"bytes"
	"encoding/json"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// unvalidated kinds have no definition that we could get. A page says so of each.
var unvalidated = []string{"ElasticJob", "PyTorchTrainingJob", "DeepSpeedJob", "MSJob", "etjob", "ExternalFault"}

const (
	fragment    = "FRAGMENT"
	podTemplate = `
apiVersion: v1
kind: PodTemplate
metadata: {name: train}
template:
  spec:
    FRAGMENT
`
)

// Blocks of docs that are a part of a manifest, by page and heading: manifests to put them into.
var fragments = map[string][]string{
	"restart-policy.md: Files":            nil, // of ours, which is not for Kubernetes
	"schedulers.md: MSJob of ms-operator": nil, // unvalidated
	"schedulers.md: PyTorchJob of Kubeflow (v1), and what imitates it": {`
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: train}
spec:
  pytorchReplicaSpecs:
    Worker:
      template:
        spec:
          FRAGMENT
`},
	"schedulers.md: Indexed Job, JobSet": {`
apiVersion: batch/v1
kind: Job
metadata: {name: train}
spec:
  FRAGMENT
`, `
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: train}
spec:
  replicatedJobs:
  - name: workers
    template:
      spec:
        FRAGMENT
`},
	"schedulers.md: Volcano": {`
apiVersion: batch.volcano.sh/v1alpha1
kind: Job
metadata: {name: train}
spec:
  FRAGMENT
`},
	"schedulers.md: MPI operator, Arena": {`
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata: {name: train}
spec:
  mpiReplicaSpecs:
    Launcher:
      template: {spec: {containers: [{command: [sleep, infinity]}]}}
    FRAGMENT
`},
	"schedulers.md: StatefulSet": {`
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: train}
spec:
  serviceName: train
  selector: {matchLabels: {app: train}}
  template:
    metadata: {labels: {app: train}}
    spec:
      containers:
      - name: main
        FRAGMENT
`},
	"helm.md: The topology": {podTemplate},
	"tls.md: cert-manager":  {podTemplate},
}

// block is a block of YAML of a page.
type block struct{ page, heading, text string }

func (b block) whole() bool { return strings.HasPrefix(b.text, "apiVersion: ") }

func blocks(t *testing.T, file string) (found []block) {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	b, in := block{page: filepath.Base(file)}, false
	for line := range strings.Lines(string(text)) {
		switch {
		case strings.HasPrefix(line, "```yaml"):
			b.text, in = "", true
		case in && strings.HasPrefix(line, "```"):
			found, in = append(found, b), false
		case in:
			b.text += line
		case strings.HasPrefix(line, "#"):
			b.heading = strings.TrimSpace(strings.TrimLeft(line, "#"))
		default:
			require.NotRegexp(t, "^ +(apiVersion|kind|containers|env):", line, "%s: a block of YAML begins with ```yaml", file)
		}
	}
	return found
}

// described are all manifests of docs, with the place that describes each.
func described(t *testing.T) map[string]string {
	t.Helper()
	docs, unused := map[string]string{}, maps.Clone(fragments)
	for _, pattern := range []string{"tasks/*.md", "start/*.md", "reference/*.md", "../README.md"} {
		pages, err := filepath.Glob(filepath.Join(manifests, "..", pattern))
		require.NoError(t, err)
		require.NotEmpty(t, pages, pattern)
		for _, page := range pages {
			for _, b := range blocks(t, page) {
				place := b.page + ": " + b.heading
				if b.whole() {
					docs[place+", whole"] = b.text
					continue
				}
				require.Contains(t, unused, place, "into which manifest does this belong?")
				for _, m := range unused[place] {
					doc := placed(m, b.text)
					docs[place+", "+headOf(t, doc).Kind] = doc
				}
				delete(unused, place)
			}
		}
	}
	require.Empty(t, unused, "which no page has")
	return docs
}

func placed(manifest, text string) string {
	before, after, _ := strings.Cut(manifest, fragment)
	indent := before[strings.LastIndex(before, "\n"):]
	return before + strings.ReplaceAll(strings.TrimSpace(text), "\n", indent) + after
}

// parsed completes containers with the name and the image that fragments leave out.
func parsed(t *testing.T, doc string) object {
	t.Helper()
	var o object
	decoder := yaml.NewDecoder(bytes.NewReader([]byte(doc)))
	require.NoError(t, decoder.Decode(&o), doc)
	for _, c := range containers(o) {
		for field, value := range map[string]string{"name": "main", "image": "training"} {
			if c[field] == nil {
				c[field] = value
			}
		}
	}
	return o
}

// containers are those of each pod that an object describes.
func containers(of any) (found []object) {
	switch of := of.(type) {
	case object:
		for _, name := range slices.Sorted(maps.Keys(of)) {
			found = append(found, containers(of[name])...)
			if list, ok := of[name].([]any); ok && name == "containers" {
				for _, c := range list {
					found = append(found, c.(object))
				}
			}
		}
	case []any:
		for _, part := range of {
			found = append(found, containers(part)...)
		}
	}
	return found
}

// testDocs: Kubernetes would create what docs describe, and refuses each with a misspelt field.
func (k real) testDocs(t *testing.T) {
	docs := described(t)
	files, err := filepath.Glob(filepath.Join(manifests, "*.yaml"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		for i, doc := range strings.Split(manifest(t, filepath.Base(file)), "\n---\n") {
			docs[filepath.Base(file)+" "+string(rune('a'+i))] = doc
		}
	}
	a := newAdmin(t, k.root)
	for _, place := range slices.Sorted(maps.Keys(docs)) {
		t.Run(place, func(t *testing.T) {
			o := parsed(t, docs[place])
			code, answer := a.post(text(t, o), "&dryRun=All")
			require.Equal(t, http.StatusCreated, code, "%s", answer)
			for _, part := range builtin(o) {
				code, answer := a.post(text(t, part), "&dryRun=All")
				require.Equal(t, http.StatusCreated, code, "%s", answer)
			}
			misspell(o)
			code, answer = a.post(text(t, o), "&dryRun=All")
			require.Equal(t, http.StatusBadRequest, code, "%s", answer)
			require.Contains(t, string(answer), `misspelt\"`)
		})
	}
}

// builtin are the jobs and pods that a controller would make of an object. A definition checks their fields, and only
// Kubernetes itself how these go together.
func builtin(of any) (made []object) {
	switch of := of.(type) {
	case object:
		for name, part := range of {
			made = append(made, builtin(part)...)
			template, _ := part.(object)
			spec, _ := template["spec"].(object)
			switch {
			case !strings.HasSuffix(strings.ToLower(name), "template") || spec == nil: // workerTemplate, too
			case spec["containers"] != nil:
				made = append(made, object{"apiVersion": "v1", "kind": "PodTemplate", "metadata": object{"name": "train"},
					"template": template})
			case spec["template"] != nil:
				job := maps.Clone(spec)
				if job["completions"] == nil { // which the controller of a TrainJob sets
					job["completions"], job["parallelism"] = 4, 4
				}
				made = append(made, object{"apiVersion": "batch/v1", "kind": "Job", "metadata": object{"name": "train"},
					"spec": job})
			}
		}
	case []any:
		for _, part := range of {
			made = append(made, builtin(part)...)
		}
	}
	return made
}

// misspell adds a field to the first container, or to the object itself.
func misspell(o object) {
	if all := containers(o); len(all) > 0 {
		o = all[0]
	}
	o["misspelt"] = "x"
}

func text(t *testing.T, o object) string {
	t.Helper()
	text, err := json.Marshal(o)
	require.NoError(t, err)
	return string(text)
}

// TestPagesSayWhatNobodyHasValidated, and every block of YAML has its place.
func TestPagesSayWhatNobodyHasValidated(t *testing.T) {
	described(t)
	page, err := os.ReadFile(filepath.Join(manifests, "../tasks/kubernetes-jobs.md"))
	require.NoError(t, err)
	_, says, ok := strings.Cut(string(page), "Nobody has validated")
	require.True(t, ok)
	says, _, _ = strings.Cut(says, "\n\n")
	for _, kind := range unvalidated {
		require.Contains(t, says, kind)
	}
}
