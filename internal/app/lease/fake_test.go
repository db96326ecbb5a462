package lease

import (
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/rest"
)

type fields = map[string]any

// fake is an API server for one namespace: objects with versions, patches of labels, and watches.
type fake struct {
	http *httptest.Server

	mu        sync.Mutex
	version   int
	objects   map[string]fields // by path
	watches   map[chan fields]watcher
	intercept func(who string, r *http.Request) fate
}

// watcher is a client that watches an object.
type watcher struct{ who, path string }

// fate of a request.
type fate int

const (
	served  fate = iota
	lost         // it is executed, and its answer is lost
	refused      // with 503
	forbidden
	stopped // it gets no answer while the client waits
)

func startFake(t *testing.T) *fake {
	t.Helper()
	f := &fake{objects: map[string]fields{}, watches: map[chan fields]watcher{}}
	f.http = httptest.NewServer(f)
	t.Cleanup(f.http.Close)
	return f
}

// config is that of one of several clients.
func (f *fake) config(who string) *rest.Config { return &rest.Config{Host: f.http.URL + "/" + who} }

// set has a function decide about requests. It may wait.
func (f *fake) set(intercept func(who string, r *http.Request) fate) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.intercept = intercept
}

const (
	leasePath = "/apis/coordination.k8s.io/v1/namespaces/ns/leases/m"
	mapPath   = "/api/v1/namespaces/ns/configmaps/m-decisions"
	podPath   = "/api/v1/namespaces/ns/pods/"
)

// do executes a request by hand.
func (f *fake) do(method, path string, body fields) fields {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.execute(method, path, body)
}

// leads reports whether a pod has the label.
func (f *fake) leads(pod string) bool {
	labels, _ := meta(f.do("GET", podPath+pod, nil))["labels"].(fields)
	return labels[Label] == "true"
}

func copied(o fields) (c fields) {
	text, _ := json.Marshal(o)
	_ = json.Unmarshal(text, &c)
	return c
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	intercept := f.intercept
	f.mu.Unlock()
	how := served
	who, path, _ := strings.Cut(r.URL.Path[1:], "/")
	r.URL.Path = "/" + path
	if intercept != nil {
		how = intercept(who, r)
	}
	switch how {
	case stopped:
		_, _ = io.Copy(io.Discard, r.Body) // else the end of the client is not noticed
		<-r.Context().Done()
		return
	case refused:
		http.Error(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","code":503}`, http.StatusServiceUnavailable)
		return
	case forbidden:
		answer(w, status(http.StatusForbidden, "Forbidden"))
		return
	}
	if r.URL.Query().Get("watch") != "" {
		f.watch(w, r, who)
		return
	}
	var body fields
	if r.Method != http.MethodGet {
		_ = json.NewDecoder(r.Body).Decode(&body)
	}
	f.mu.Lock()
	o := f.execute(r.Method, r.URL.Path, body)
	f.mu.Unlock()
	if how == lost {
		panic(http.ErrAbortHandler)
	}
	answer(w, o)
}

func answer(w http.ResponseWriter, o fields) {
	w.Header().Set("Content-Type", "application/json")
	if code, ok := o["code"].(int); ok {
		w.WriteHeader(code)
	}
	_ = json.NewEncoder(w).Encode(o)
}

func status(code int, reason string) fields {
	return fields{
		"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": reason, "code": code,
	}
}

func meta(o fields) fields {
	m, _ := o["metadata"].(fields)
	if m == nil {
		m = fields{}
		o["metadata"] = m
	}
	return m
}

func (f *fake) execute(method, path string, body fields) fields {
	if method == http.MethodPost {
		name, _ := meta(body)["name"].(string)
		path += "/" + name
		if f.objects[path] != nil {
			return status(http.StatusConflict, "AlreadyExists")
		}
		return f.store(path, body)
	}
	o := f.objects[path]
	switch {
	case o == nil:
		return status(http.StatusNotFound, "NotFound")
	case method == http.MethodDelete:
		delete(f.objects, path)
		f.tell("DELETED", path, o)
	case method == http.MethodPut && meta(body)["resourceVersion"] != meta(o)["resourceVersion"]:
		return status(http.StatusConflict, "Conflict")
	case method == http.MethodPut:
		return f.store(path, body)
	case method == http.MethodPatch:
		o = copied(o)
		labels, _ := meta(body)["labels"].(fields)
		maps.DeleteFunc(labels, func(_ string, v any) bool { return v == nil })
		meta(o)["labels"] = labels // a pod has no other
		return f.store(path, o)
	}
	return o
}

// store keeps an object under a new version, unless it is as it was.
func (f *fake) store(path string, o fields) fields {
	f.version++
	meta(o)["resourceVersion"] = strconv.Itoa(f.version)
	event := "MODIFIED"
	if f.objects[path] == nil {
		event = "ADDED"
	}
	f.objects[path] = o
	f.tell(event, path, o)
	return o
}

func (f *fake) tell(event, path string, o fields) {
	for w, of := range f.watches {
		if of.path == path {
			w <- fields{"type": event, "object": copied(o)}
		}
	}
}

// watch begins with the present state.
func (f *fake) watch(w http.ResponseWriter, r *http.Request, who string) {
	name, _ := strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "metadata.name=")
	path, events := r.URL.Path+"/"+name, make(chan fields, 1000)
	f.mu.Lock()
	if o := f.objects[path]; o != nil {
		events <- fields{"type": "ADDED", "object": copied(o)}
	}
	f.watches[events] = watcher{who, path}
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.watches, events)
	}()
	w.Header().Set("Content-Type", "application/json")
	for flush := http.NewResponseController(w); ; {
		_ = flush.Flush()
		select {
		case e, ok := <-events:
			if !ok {
				return
			}
			_ = json.NewEncoder(w).Encode(e)
		case <-r.Context().Done():
			return
		}
	}
}

func (f *fake) watching() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.watches)
}

// expire ends all watches, or those of one client, as a compaction does.
func (f *fake) expire(who string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, w := range slices.Collect(maps.Keys(f.watches)) {
		if who != "" && f.watches[w].who != who {
			continue
		}
		w <- fields{"type": "ERROR", "object": status(http.StatusGone, "Expired")}
		close(w)
		delete(f.watches, w)
	}
}
