// Package kubetest is an API server for tests: the part of Kubernetes that package kube uses, with its rules. The tests
// of package kube run against it, and against Kubernetes' own, to verify the behaviour that package kube relies on.
package kubetest

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"dlrover-run/internal/app/kube"
)

type object = map[string]any

// Server keeps nodes and events in memory. Its methods may be called at the same time.
type Server struct {
	dir  string
	http *httptest.Server

	mu        sync.Mutex
	version   int // of the newest object
	nodes     map[string]object
	events    map[string]object
	pods      map[string]object  // by namespace/name
	faults    map[string]object  // nil: there are no ExternalFaults
	accounts  map[string]account // by token
	tokens    int
	requests  []string
	intercept func(http.ResponseWriter, *http.Request) bool
}

type account struct {
	name   string
	rights []string
}

// everything is the right to do everything.
const everything = "*"

// Start serves over TLS on loopback until the test ends.
func Start(t *testing.T) *Server {
	s := New(t)
	s.http = httptest.NewUnstartedServer(s)
	s.http.Config.ErrorLog = log.New(io.Discard, "", 0) // clients that do not trust it are tests
	s.http.StartTLS()
	t.Cleanup(s.http.Close)
	authority := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.http.Certificate().Raw})
	write(t, filepath.Join(s.dir, "ca.crt"), string(authority))
	return s
}

// New is a server that listens nowhere, for transports that call it.
func New(t *testing.T) *Server {
	return &Server{
		dir: t.TempDir(), nodes: map[string]object{}, events: map[string]object{}, accounts: map[string]account{},
		pods: map[string]object{},
	}
}

// Account makes an account with these rights, such as "patch nodes/status".
func (s *Server) Account(t *testing.T, rights ...string) kube.Config {
	s.mu.Lock()
	s.tokens++
	cfg := kube.Config{TokenFile: filepath.Join(s.dir, fmt.Sprintf("token-%d", s.tokens))}
	if s.http != nil {
		cfg.Server, cfg.CAFile = s.http.URL, filepath.Join(s.dir, "ca.crt")
	}
	s.mu.Unlock()
	s.Rotate(t, cfg, rights...)
	return cfg
}

// Rotate gives an account another token and writes it to the file. The old one is no longer accepted.
func (s *Server) Rotate(t *testing.T, cfg kube.Config, rights ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, _ := os.ReadFile(cfg.TokenFile)
	delete(s.accounts, strings.TrimSpace(string(old)))
	s.tokens++
	token := fmt.Sprintf("secret.token.%d", s.tokens)
	s.accounts[token] = account{filepath.Base(cfg.TokenFile), rights}
	write(t, cfg.TokenFile, token+"\n")
}

// Admin is an account that may do everything.
func (s *Server) Admin(t *testing.T) kube.Config { return s.Account(t, everything) }

// Pod makes an account for a pod, and returns the variables with which kube.InCluster finds it.
func (s *Server) Pod(t *testing.T, namespace, name string, rights ...string) (env map[string]string) {
	t.Helper()
	s.AddPod(namespace, name)
	cfg, dir := s.Account(t, rights...), t.TempDir()
	host, port, err := net.SplitHostPort(strings.TrimPrefix(cfg.Server, "https://"))
	if err != nil {
		t.Fatal(err)
	}
	for name, from := range map[string]string{"token": cfg.TokenFile, "ca.crt": cfg.CAFile} {
		text, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, name), string(text))
	}
	write(t, filepath.Join(dir, "namespace"), namespace)
	return map[string]string{
		"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port, kube.DirVariable: dir, "POD_NAME": name,
	}
}

// Intercept sets a function that is called before every admitted request; it reports whether it has answered.
func (s *Server) Intercept(f func(http.ResponseWriter, *http.Request) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.intercept = f
}

// Requests returns the requests until now, such as "PATCH /api/v1/nodes/n", and forgets them.
func (s *Server) Requests() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	requests := s.requests
	s.requests = nil
	return requests
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.requests = append(s.requests, r.Method+" "+r.URL.Path)
	intercept := s.intercept
	s.mu.Unlock()
	if intercept != nil && intercept(w, r) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	code, answer := s.answer(r)
	reply(w, code, answer)
}

func reply(w http.ResponseWriter, code int, answer object) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(answer)
}

// answer authenticates, then authorizes, then looks.
func (s *Server) answer(r *http.Request) (int, object) {
	token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	who, ok := s.accounts[token]
	if !ok {
		return status(http.StatusUnauthorized, "Unauthorized", "Unauthorized")
	}
	q, ok := parse(r)
	if !ok {
		return status(http.StatusNotFound, "NotFound", "the server could not find the requested resource")
	}
	if !who.may(q.verb, q.resource, q.namespace) {
		return status(http.StatusForbidden, "Forbidden", fmt.Sprintf("%s %q is forbidden: User %q cannot %s resource %q",
			q.resource, q.name, who.name, q.verb, q.resource))
	}
	body := object{}
	if r.Method == "POST" || r.Method == "PATCH" {
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			return status(http.StatusBadRequest, "BadRequest", err.Error())
		}
	}
	return s.handle(r, q, who, body)
}

// query is a request in the terms of authorization.
type query struct{ verb, resource, namespace, name string }

func parse(r *http.Request) (query, bool) {
	q, path := query{}, strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	switch {
	case strings.Join(path, "/") == "apis/authorization.k8s.io/v1/selfsubjectaccessreviews" && r.Method == "POST":
		return query{verb: "create", resource: "selfsubjectaccessreviews"}, true
	case strings.Join(path[:min(3, len(path))], "/") == "apis/nvsentinel.dgxc.nvidia.com/v1":
		path = path[1:]
	case len(path) < 3 || path[0] != "api" || path[1] != "v1":
		return q, false
	}
	path = path[2:]
	if len(path) == 0 {
		return q, false
	}
	if path[0] == "namespaces" && len(path) > 2 {
		q.namespace, path = path[1], path[2:]
	}
	q.resource = path[0]
	if len(path) > 1 {
		q.name = path[1]
	}
	if len(path) > 2 {
		q.resource += "/" + path[2]
	}
	verbs := map[string]string{"GET": "get", "POST": "create", "PATCH": "patch", "DELETE": "delete"}
	if q.verb = verbs[r.Method]; q.verb == "get" && q.name == "" {
		q.verb = "list"
	}
	return q, q.verb != "" && len(path) <= 3
}

// may reports a right. Events are granted in namespace default only, as our roles do.
func (a account) may(verb, resource, namespace string) bool {
	switch {
	case slices.Contains(a.rights, everything), resource == "selfsubjectaccessreviews":
		return true
	case resource == "events" && namespace != "default":
		return false
	}
	return slices.Contains(a.rights, verb+" "+resource)
}

func (s *Server) handle(r *http.Request, q query, who account, body object) (int, object) {
	switch q.verb + " " + q.resource {
	case "create selfsubjectaccessreviews":
		return review(who, body)
	case "create events":
		return s.createEvent(q.namespace, body)
	case "list events":
		return s.listEvents(r.URL.Query().Get("fieldSelector"))
	case "create nodes":
		return s.createNode(body)
	case "list nodes":
		return s.listNodes(r)
	case "create externalfaults", "list externalfaults", "patch externalfaults", "delete externalfaults",
		"patch externalfaults/status":
		return s.fault(q, body)
	case "get pods", "patch pods":
		return s.pod(q.namespace+"/"+q.name, body)
	}
	n, ok := s.nodes[q.name]
	if !ok {
		return status(http.StatusNotFound, "NotFound", fmt.Sprintf("nodes %q not found", q.name))
	}
	switch q.verb + " " + q.resource {
	case "get nodes", "get nodes/status":
		return http.StatusOK, n
	case "delete nodes":
		delete(s.nodes, q.name)
		return status(http.StatusOK, "", "")
	case "patch nodes":
		return s.patchNode(r, n, body, "status")
	case "patch nodes/status":
		return s.patchNode(r, n, body, "spec")
	}
	return status(http.StatusMethodNotAllowed, "MethodNotAllowed", "not supported")
}

// status is the answer with the result.
func status(code int, reason, message string) (int, object) {
	outcome := "Failure"
	if code == http.StatusOK {
		outcome = "Success"
	}
	return code, object{
		"kind": "Status", "apiVersion": "v1", "status": outcome, "reason": reason, "message": message, "code": code,
	}
}

func review(who account, body object) (int, object) {
	attributes, _ := field[object](body, "spec", "resourceAttributes")
	text := func(name string) string { v, _ := attributes[name].(string); return v }
	resource := text("resource")
	if sub := text("subresource"); sub != "" {
		resource += "/" + sub
	}
	body["status"] = object{"allowed": who.may(text("verb"), resource, text("namespace"))}
	return http.StatusCreated, body
}

// field is the value at the path, if it has that type.
func field[T any](o object, path ...string) (value T, ok bool) {
	for _, name := range path[:len(path)-1] {
		o, _ = o[name].(object)
	}
	value, ok = o[path[len(path)-1]].(T)
	return value, ok
}

func (s *Server) createEvent(namespace string, e object) (int, object) {
	name, _ := field[string](e, "metadata", "name")
	of, _ := field[string](e, "metadata", "namespace")
	_, namespaced := field[string](e, "involvedObject", "namespace")
	switch {
	case of != "" && of != namespace:
		return status(http.StatusBadRequest, "BadRequest", "the namespace of the object does not match the request's")
	case !subdomain(name) || !namespaced && namespace != "default":
		return status(http.StatusUnprocessableEntity, "Invalid", "Event is invalid: name, or involvedObject.namespace")
	case s.events[namespace+"/"+name] != nil:
		return status(http.StatusConflict, "AlreadyExists", fmt.Sprintf("events %q already exists", name))
	}
	s.stamp(e)
	s.events[namespace+"/"+name] = e
	return http.StatusCreated, e
}

// listEvents knows the selector by the name of the object concerned only.
func (s *Server) listEvents(selector string) (int, object) {
	want, selects := strings.CutPrefix(selector, "involvedObject.name=")
	items := []any{}
	for _, key := range slices.Sorted(maps.Keys(s.events)) {
		name, _ := field[string](s.events[key], "involvedObject", "name")
		if !selects || name == want {
			items = append(items, s.events[key])
		}
	}
	return http.StatusOK, object{"kind": "EventList", "apiVersion": "v1", "metadata": object{}, "items": items}
}
