package kube_test

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"dlrover-run/internal/app/kube"
)

// apiServerVariable names the program kube-apiserver that startKubernetes starts. It finds etcd on PATH.
const apiServerVariable = "KUBE_APISERVER"

// soon is ample for what takes seconds.
const soon = 2 * time.Minute

// kubernetes is a real API server with RBAC. Nothing else of a cluster is there: no kubelet, scheduler or controller.
// Accounts are in namespace default. Its methods may be called at the same time.
type kubernetes struct {
	dir  string
	root kube.Config // may do everything

	mu    sync.Mutex
	count int // of accounts
}

// startKubernetes serves on loopback until the test ends. The test is skipped where no API server is at hand.
func startKubernetes(t *testing.T) *kubernetes {
	t.Helper()
	program := os.Getenv(apiServerVariable)
	if program == "" {
		t.Skipf("SKIPPED: %s IS RUN BY make e2e-kube only: it takes Kubernetes' own API server", t.Name())
	}
	k := &kubernetes{dir: t.TempDir()}
	certify(t, k.dir)
	const secret = "of-the-administrator"
	write(t, k.file("admin"), secret)
	write(t, k.file("tokens.csv"), secret+",admin,admin,system:masters\n")
	port := freePort(t)
	k.root = kube.Config{
		Server: "https://127.0.0.1:" + port, TokenFile: k.file("admin"), CAFile: k.file("ca.crt"),
	}
	store := "http://127.0.0.1:" + freePort(t)
	k.await(t, k.startEtcd(t, store), k.startServer(t, program, store, port))
	return k
}

func (k *kubernetes) file(name string) string { return filepath.Join(k.dir, name) }

func (k *kubernetes) startEtcd(t *testing.T, url string) *process {
	t.Helper()
	peers := "http://127.0.0.1:" + freePort(t)
	return spawn(t, k.dir, "etcd", "--name=kubetest", "--data-dir="+k.file("etcd"),
		"--listen-client-urls="+url, "--advertise-client-urls="+url,
		"--listen-peer-urls="+peers, "--initial-advertise-peer-urls="+peers, "--initial-cluster=kubetest="+peers)
}

func (k *kubernetes) startServer(t *testing.T, program, store, port string) *process {
	t.Helper()
	return spawn(t, k.dir, program, "--etcd-servers="+store,
		"--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--secure-port="+port,
		"--tls-cert-file="+k.file("server.crt"), "--tls-private-key-file="+k.file("server.key"), "--cert-dir="+k.dir,
		"--authorization-mode=RBAC", "--token-auth-file="+k.file("tokens.csv"),
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file="+k.file("server.crt"), "--service-account-signing-key-file="+k.file("server.key"),
		"--service-cluster-ip-range=10.0.0.0/24", "--feature-gates=ContainerRestartRules=true", // the default from 1.35 on
		"--endpoint-reconciler-type=none") // an endpoint cannot be on loopback
}

// await returns when the API server is ready and the namespace default is there.
func (k *kubernetes) await(t *testing.T, of ...*process) {
	t.Helper()
	a := newAdmin(t, k.root)
	ready := func() bool {
		for _, p := range of {
			select {
			case <-p.ended:
				t.Fatal("ended early: " + p.tail())
			default:
			}
		}
		ready, _ := a.send(t.Context(), "GET", "/readyz", "", nil)
		namespace, _ := a.send(t.Context(), "GET", "/api/v1/namespaces/default", "", nil)
		return ready == http.StatusOK && namespace == http.StatusOK
	}
	if !eventually(ready) {
		t.Fatalf("not ready\n%s\n%s", of[0].tail(), of[1].tail())
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	check(t, os.WriteFile(path, []byte(text), 0o600))
}

func eventually(so func() bool) bool {
	for end := time.Now().Add(soon); !so(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

// Admin is an account that may do everything.
func (k *kubernetes) Admin(*testing.T) kube.Config { return k.root }

// kubeconfig is a file with which other programs may do everything, too.
func (k *kubernetes) kubeconfig(t *testing.T) string {
	t.Helper()
	token, err := os.ReadFile(k.root.TokenFile)
	check(t, err)
	config, err := json.Marshal(object{
		"apiVersion": "v1", "kind": "Config", "current-context": "test",
		"clusters": []object{{"name": "test", "cluster": object{
			"server": k.root.Server, "certificate-authority": k.root.CAFile}}},
		"users":    []object{{"name": "test", "user": object{"token": string(token)}}},
		"contexts": []object{{"name": "test", "context": object{"cluster": "test", "user": "test"}}},
	})
	check(t, err)
	write(t, k.file("kubeconfig"), string(config))
	return k.file("kubeconfig")
}

// AddNode makes a node that is ready, for as long as the test lasts.
func (k *kubernetes) AddNode(t *testing.T, name string) {
	t.Helper()
	newAdmin(t, k.root).node(name)
}

// binding is a right as a manifest, with the name of the role, resource, verb, kind of the binding and group.
const binding = `apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: %[1]s
rules:
- apiGroups: [%[5]q]
  resources: [%[2]q]
  verbs: [%[3]q]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: %[4]s
metadata:
  name: %[1]s
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: %[1]s
subjects:
- kind: ServiceAccount
  name: dlrover-master
  namespace: default
`

// Account makes a service account with these rights, such as "patch nodes/status". Those to events and pods are for
// namespace default.
func (k *kubernetes) Account(t *testing.T, rights ...string) kube.Config {
	t.Helper()
	var docs []string
	for i, right := range rights {
		verb, resource, _ := strings.Cut(right, " ")
		kind := "ClusterRoleBinding"
		if resource == "events" || resource == "pods" {
			kind = "RoleBinding"
		}
		docs = append(docs, fmt.Sprintf(binding, fmt.Sprintf("dlrover-master-%d", i), resource, verb, kind,
			groupOf(resource)))
	}
	return k.Bound(t, strings.Join(docs, "---\n"), rights...)
}

// Bound makes a service account to which a manifest gives these rights, and returns when they are in force. The account
// is a new one: its name takes the place of dlrover-master everywhere in the manifest.
func (k *kubernetes) Bound(t *testing.T, manifest string, rights ...string) kube.Config {
	t.Helper()
	k.mu.Lock()
	k.count++
	cfg := kube.Config{Server: k.root.Server, CAFile: k.root.CAFile, Namespace: "default"}
	name := fmt.Sprintf("account-%d", k.count)
	k.mu.Unlock()
	a, accounts := newAdmin(t, k.root), "/api/v1/namespaces/default/serviceaccounts"
	a.want("POST", accounts, "application/json", object{"metadata": object{"name": name}}, nil)
	if manifest != "" {
		a.create(strings.ReplaceAll(manifest, "dlrover-master", name))
	}
	var token struct{ Status struct{ Token string } }
	a.want("POST", accounts+"/"+name+"/token", "application/json", object{}, &token)
	cfg.TokenFile = k.file(name)
	write(t, cfg.TokenFile, token.Status.Token)
	inForce(t, cfg, rights)
	return cfg
}

// create sends the documents of a manifest as they are. Fields that Kubernetes does not know are errors.
func (a *admin) create(manifest string) {
	a.t.Helper()
	for doc := range strings.SplitSeq(manifest, "\n---\n") {
		if code, answer := a.post(doc, ""); code != http.StatusCreated {
			a.t.Fatalf("%d %s\n%s", code, answer, doc)
		}
	}
}

// post sends one document, in YAML or JSON, to where objects of its kind are created.
func (a *admin) post(doc, options string) (code int, answer []byte) {
	a.t.Helper()
	path := a.path(headOf(a.t, doc))
	if path == "" {
		a.t.Fatalf("the API server does not have this kind:\n%s", doc)
	}
	return a.send(a.t.Context(), "POST", path+"?fieldValidation=Strict"+options, "application/yaml", []byte(doc))
}

// head says what a document describes.
type head struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string
	Metadata   struct{ Name, Namespace string }
}

func headOf(t *testing.T, doc string) (h head) {
	t.Helper()
	check(t, yaml.Unmarshal([]byte(doc), &h))
	return h
}

// path is where objects of a kind are, in namespace default if they name none; "" if the API server lacks the kind.
func (a *admin) path(h head) string {
	a.t.Helper()
	root := "/apis/" + h.APIVersion
	if !strings.Contains(h.APIVersion, "/") {
		root = "/api/" + h.APIVersion
	}
	var list struct {
		Resources []struct {
			Name, Kind string
			Namespaced bool
		}
	}
	code, answer := a.send(a.t.Context(), "GET", root, "", nil)
	if code == http.StatusNotFound {
		return ""
	}
	check(a.t, json.Unmarshal(answer, &list))
	for _, r := range list.Resources {
		switch {
		case r.Kind != h.Kind || strings.Contains(r.Name, "/"):
		case r.Namespaced:
			return root + "/namespaces/" + cmp.Or(h.Metadata.Namespace, "default") + "/" + r.Name
		default:
			return root + "/" + r.Name
		}
	}
	return ""
}

// inForce waits until the API server has seen what it was told of an account.
func inForce(t *testing.T, cfg kube.Config, rights []string) {
	t.Helper()
	a := newAdmin(t, cfg)
	for _, right := range rights {
		verb, resource, _ := strings.Cut(right, " ")
		resource, sub, _ := strings.Cut(resource, "/")
		of := object{"verb": verb, "resource": resource, "subresource": sub, "group": groupOf(resource)}
		if resource == "events" || resource == "pods" {
			of["namespace"] = "default"
		}
		question := object{"spec": object{"resourceAttributes": of}}
		allowed := func() bool {
			var review struct{ Status struct{ Allowed bool } }
			path := "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
			a.want("POST", path, "application/json", question, &review)
			return review.Status.Allowed
		}
		if !eventually(allowed) {
			t.Fatalf("an account is not allowed to %s", right)
		}
	}
}

// Pod makes a pod for an account.
func (k *kubernetes) Pod(t *testing.T, name string, cfg kube.Config) {
	t.Helper()
	newAdmin(t, k.root).want("POST", "/api/v1/namespaces/default/pods", "application/json", object{
		"metadata": object{"name": name}, "spec": object{
			"serviceAccountName": filepath.Base(cfg.TokenFile), "containers": []object{{"name": "master", "image": "none"}},
		},
	}, nil)
}

// PodAnnotations are those of a pod.
func (k *kubernetes) PodAnnotations(t *testing.T, name string) map[string]string {
	t.Helper()
	var pod struct {
		Metadata struct{ Annotations map[string]string }
	}
	newAdmin(t, k.root).want("GET", "/api/v1/namespaces/default/pods/"+name, "", nil, &pod)
	return pod.Metadata.Annotations
}
