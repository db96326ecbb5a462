package run

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/stretchr/testify/require"
)

// kubeCluster is what DLRover's master needs of Kubernetes: an API server that keeps objects of any kind in one
// namespace, and a kubelet, which runs every pod as a process on this machine.
type kubeCluster struct {
	*dlJob
	prologue string // what the shell of every container does before it executes the launcher

	mu      sync.Mutex
	objects map[string]kubeObject // by resource/name
	history []kubeChange          // the version of an object is its place here, from 1
	changed chan struct{}         // closed with the next change
	pods    map[string]*launched  // by name, also those that have ended
}

type kubeObject = map[string]any

// kubeChange is one line of a watch.
type kubeChange struct {
	resource string
	Type     string     `json:"type"`
	Object   kubeObject `json:"object"`
}

// newCluster serves until the test ends. Its only object is the ElasticJob of j.
func (j *dlJob) newCluster(nodes int) *kubeCluster {
	j.t.Helper()
	c := &kubeCluster{
		dlJob: j, objects: map[string]kubeObject{}, changed: make(chan struct{}), pods: map[string]*launched{},
	}
	container := kubeObject{
		"name": "main", "image": "dlrover-run", "command": slices.Concat([]string{"dlrover-run"}, j.args, j.then),
		"resources": kubeObject{"requests": kubeObject{"cpu": "1", "memory": "1Gi"}},
	}
	worker := kubeObject{"replicas": nodes, "restartCount": 3, "template": kubeObject{
		"metadata": kubeObject{}, "spec": kubeObject{"restartPolicy": "Never", "containers": []any{container}},
	}}
	c.put("elasticjobs", "ADDED", kubeObject{
		"apiVersion": "elastic.iml.github.io/v1alpha1", "kind": "ElasticJob",
		"metadata": kubeObject{"name": "job", "namespace": "default"},
		"spec":     kubeObject{"distributionStrategy": "AllreduceStrategy", "replicaSpecs": kubeObject{"worker": worker}},
	})
	s := httptest.NewServer(c)
	j.t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	config, err := json.Marshal(kubeObject{
		"apiVersion": "v1", "kind": "Config", "current-context": "here",
		"clusters": []any{kubeObject{"name": "here", "cluster": kubeObject{"server": s.URL}}},
		"users":    []any{kubeObject{"name": "me", "user": kubeObject{}}},
		"contexts": []any{kubeObject{"name": "here", "context": kubeObject{"cluster": "here", "user": "me"}}},
	})
	require.NoError(j.t, err)
	require.NoError(j.t, os.WriteFile(filepath.Join(j.dir, "kubeconfig"), config, 0o600))
	return c
}

// master is DLRover's, as its operator starts it in a pod.
func (c *kubeCluster) master() *launched {
	c.t.Helper()
	c.bench.env = append(c.bench.env, "KUBECONFIG="+filepath.Join(c.dir, "kubeconfig"))
	return c.theirMasterOn("pyk8s", "--namespace", "default", "--pending_fail_strategy", "0")
}

// put stores an object, with c locked or before anybody else has it. Its version tells it from earlier ones.
func (c *kubeCluster) put(resource, kind string, o kubeObject) kubeObject {
	o = copiedObject(o)
	meta := o["metadata"].(kubeObject)
	meta["resourceVersion"] = strconv.Itoa(len(c.history) + 1)
	if kind == "ADDED" {
		meta["uid"] = fmt.Sprintf("uid-%d", len(c.history)+1)
		meta["creationTimestamp"] = time.Now().UTC().Format(time.RFC3339)
	}
	key := resource + "/" + meta["name"].(string)
	c.objects[key] = o
	if kind == "DELETED" {
		delete(c.objects, key)
	}
	c.history = append(c.history, kubeChange{resource, kind, o})
	close(c.changed)
	c.changed = make(chan struct{})
	return o
}

func copiedObject(o kubeObject) (c kubeObject) {
	text, err := json.Marshal(o)
	if err == nil {
		err = json.Unmarshal(text, &c)
	}
	if err != nil {
		panic(err)
	}
	return c
}

func (c *kubeCluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, path, _ := strings.Cut(r.URL.Path, "/namespaces/default/")
	resource, name, _ := strings.Cut(path, "/")
	if r.Method == http.MethodGet && r.URL.Query().Get("watch") != "" {
		c.watch(w, r, resource)
		return
	}
	body := kubeObject{}
	if r.Method == http.MethodPost || r.Method == http.MethodPatch {
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
	}
	c.mu.Lock()
	code, answer := c.answer(r, resource, name, body)
	c.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(answer)
}

func (c *kubeCluster) answer(r *http.Request, resource, name string, body kubeObject) (int, kubeObject) {
	if r.Method == http.MethodPost {
		name = body["metadata"].(kubeObject)["name"].(string)
	}
	old := c.objects[resource+"/"+name]
	switch {
	case r.Method == http.MethodPost:
		if old != nil {
			return http.StatusConflict, kubeObject{"kind": "Status", "reason": "AlreadyExists", "code": 409}
		}
		body["status"] = kubeObject{"phase": "Pending"}
		o := c.put(resource, "ADDED", body)
		if resource == "pods" {
			go c.runPod(o)
		}
		return http.StatusCreated, o
	case r.Method == http.MethodGet && name == "":
		return http.StatusOK, c.list(resource, r.URL.Query().Get("labelSelector"))
	case old == nil:
		return http.StatusNotFound, kubeObject{"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
	case r.Method == http.MethodPatch:
		return http.StatusOK, c.put(resource, "MODIFIED", mergedObject(old, body))
	case r.Method == http.MethodDelete:
		c.remove(resource, old)
	}
	return http.StatusOK, old
}

func mergedObject(o, patch kubeObject) kubeObject {
	o = maps.Clone(o)
	for name, value := range patch {
		inner, ok := value.(kubeObject)
		if of, is := o[name].(kubeObject); ok && is {
			value = mergedObject(of, inner)
		}
		o[name] = value
	}
	return o
}

func (c *kubeCluster) list(resource, selector string) kubeObject {
	items := []any{}
	for _, key := range slices.Sorted(maps.Keys(c.objects)) {
		if strings.HasPrefix(key, resource+"/") && selects(selector, c.objects[key]) {
			items = append(items, c.objects[key])
		}
	}
	return kubeObject{
		"kind": "List", "apiVersion": "v1", "items": items,
		"metadata": kubeObject{"resourceVersion": strconv.Itoa(len(c.history))},
	}
}

// selects knows conditions of the form name=value.
func selects(selector string, o kubeObject) bool {
	labels, _ := o["metadata"].(kubeObject)["labels"].(kubeObject)
	for condition := range strings.SplitSeq(selector, ",") {
		if name, value, ok := strings.Cut(condition, "="); ok && labels[name] != value {
			return false
		}
	}
	return true
}

// watch tells of what has changed since a version, of all objects where none is given.
func (c *kubeCluster) watch(w http.ResponseWriter, r *http.Request, resource string) {
	seconds, _ := strconv.Atoi(r.URL.Query().Get("timeoutSeconds"))
	over := time.After(time.Duration(cmp.Or(seconds, 60)) * time.Second)
	next, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	w.Header().Set("Content-Type", "application/json")
	for {
		c.mu.Lock()
		news, changed := c.history[next:], c.changed
		c.mu.Unlock()
		for _, n := range news {
			if n.resource == resource && selects(r.URL.Query().Get("labelSelector"), n.Object) {
				_ = json.NewEncoder(w).Encode(n)
			}
		}
		next += len(news)
		w.(http.Flusher).Flush()
		select {
		case <-changed:
		case <-over:
			return
		case <-r.Context().Done():
			return
		}
	}
}

// remove deletes an object; of a pod the kubelet ends the process first. c is locked.
func (c *kubeCluster) remove(resource string, o kubeObject) {
	meta := o["metadata"].(kubeObject)
	l := c.pods[meta["name"].(string)]
	if resource != "pods" || l == nil || l.ended() {
		c.put(resource, "DELETED", o)
		return
	}
	if meta["deletionTimestamp"] == nil {
		c.put(resource, "MODIFIED", mergedObject(o, kubeObject{"metadata": kubeObject{
			"deletionTimestamp": time.Now().UTC().Format(time.RFC3339),
		}}))
		_ = l.cmd.Process.Signal(syscall.SIGTERM) // or it has ended
	}
}

// runPod is the kubelet of a pod.
func (c *kubeCluster) runPod(pod kubeObject) {
	meta := pod["metadata"].(kubeObject)
	name := meta["name"].(string)
	container := pod["spec"].(kubeObject)["containers"].([]any)[0].(kubeObject)
	env := c.environment(name, container)
	expand := func(text any) string {
		return os.Expand(strings.NewReplacer("$(", "${", ")", "}").Replace(text.(string)), func(name string) string {
			return env[name]
		})
	}
	var args, vars []string
	for _, arg := range container["command"].([]any) {
		args = append(args, expand(arg))
	}
	for name, value := range env {
		vars = append(vars, name+"="+value)
	}
	c.mu.Lock()
	shell := []string{"-c", c.prologue + "\n" + `exec "$0" "$@"`, filepath.Join(binDir, args[0])}
	c.pods[name] = c.startPath("/bin/sh", vars, append(shell, args[1:]...)...)
	l := c.pods[name]
	c.setStatus(name, "Running", kubeObject{"running": kubeObject{"startedAt": time.Now().UTC().Format(time.RFC3339)}})
	c.mu.Unlock()

	<-l.exited
	c.mu.Lock()
	defer c.mu.Unlock()
	phase, reason := "Succeeded", "Completed"
	if l.code != 0 {
		phase, reason = "Failed", "Error"
	}
	c.setStatus(name, phase, kubeObject{"terminated": kubeObject{"exitCode": l.code, "reason": reason}})
	if now := c.objects["pods/"+name]; now != nil && now["metadata"].(kubeObject)["deletionTimestamp"] != nil {
		c.put("pods", "DELETED", now)
	}
}

// environment is that of the container, with addresses of services on this machine.
func (c *kubeCluster) environment(pod string, container kubeObject) map[string]string {
	env := map[string]string{}
	for _, v := range container["env"].([]any) {
		v := v.(kubeObject)
		value, _ := v["value"].(string)
		switch name := v["name"].(string); name {
		case "POD_NAME":
			value = pod
		case "POD_IP", "NODE_IP":
			value = "127.0.0.1"
		case "DLROVER_MASTER_ADDR":
			value = c.service(value)
		}
		env[v["name"].(string)] = value
	}
	return env
}

// service is where the pods are that a service at name:port stands for.
func (c *kubeCluster) service(address string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	name, _, _ := strings.Cut(address, ":")
	port := c.objects["services/"+name]["spec"].(kubeObject)["ports"].([]any)[0].(kubeObject)
	return fmt.Sprintf("127.0.0.1:%v", port["targetPort"])
}

// setStatus is the kubelet's report. c is locked.
func (c *kubeCluster) setStatus(pod, phase string, state kubeObject) {
	o := c.objects["pods/"+pod]
	if o == nil {
		return
	}
	c.put("pods", "MODIFIED", mergedObject(o, kubeObject{
		"spec": mergedObject(o["spec"].(kubeObject), kubeObject{"nodeName": "machine-of-" + pod}),
		"status": kubeObject{"phase": phase, "podIP": "127.0.0.1", "hostIP": "127.0.0.1", "containerStatuses": []any{
			kubeObject{"name": "main", "image": "dlrover-run", "imageID": "dlrover-run", "ready": phase == "Running",
				"restartCount": 0, "state": state},
		}},
	}))
}

// worker waits for the pod of a node and returns its launcher.
func (c *kubeCluster) worker(id int) (l *launched) {
	c.t.Helper()
	require.Eventually(c.t, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		l = c.pods[podName(id)]
		return l != nil
	}, patience, 20*time.Millisecond, "no pod of node %d", id)
	return l
}

// pod is the present state of a node's pod, nil if there is none.
func (c *kubeCluster) pod(id int) kubeObject {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.objects["pods/"+podName(id)]
}

func podName(id int) string { return fmt.Sprintf("job-edljob-worker-%d", id) }

// evict deletes the pod of a node, as whoever needs its machine.
func (c *kubeCluster) evict(id int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.remove("pods", c.objects["pods/"+podName(id)])
}
