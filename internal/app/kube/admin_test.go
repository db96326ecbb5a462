package kube_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	"dlrover-run/internal/app/kube"
	"dlrover-run/internal/plainhttp"
)

type object = map[string]any

// admin does with the API what people do with kubectl.
type admin struct {
	t    *testing.T
	cfg  kube.Config
	http *http.Client
}

func newAdmin(t *testing.T, cfg kube.Config) *admin {
	t.Helper()
	text, err := os.ReadFile(cfg.CAFile)
	check(t, err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(text)
	hc := plainhttp.New(func(t *http.Transport) { t.TLSClientConfig = &tls.Config{RootCAs: roots} })
	t.Cleanup(hc.CloseIdleConnections)
	return &admin{t, cfg, hc}
}

// send returns the status code, 0 without an answer, and the answer.
func (a *admin) send(ctx context.Context, method, path, contentType string, body []byte) (code int, answer []byte) {
	a.t.Helper()
	req, err := http.NewRequestWithContext(ctx, method, a.cfg.Server+path, bytes.NewReader(body))
	check(a.t, err)
	token, err := os.ReadFile(a.cfg.TokenFile)
	check(a.t, err)
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	req.Header.Set("Content-Type", contentType)
	resp, err := a.http.Do(req)
	if err != nil {
		return 0, []byte(err.Error())
	}
	defer resp.Body.Close()
	answer, err = io.ReadAll(resp.Body)
	check(a.t, err)
	return resp.StatusCode, answer
}

// do is send of JSON.
func (a *admin) do(method, path, contentType string, body any) (code int, answer []byte) {
	a.t.Helper()
	text, err := json.Marshal(body)
	check(a.t, err)
	return a.send(a.t.Context(), method, path, contentType, text)
}

// want is do of what has to go well.
func (a *admin) want(method, path, contentType string, body, into any) {
	a.t.Helper()
	code, answer := a.do(method, path, contentType, body)
	if code/100 != 2 {
		a.t.Fatalf("%s %s: %d %s", method, path, code, answer)
	}
	if into != nil {
		check(a.t, json.Unmarshal(answer, into))
	}
}

// node makes a node that lasts until the test ends.
func (a *admin) node(name string, taints ...object) {
	a.t.Helper()
	body := object{"apiVersion": "v1", "kind": "Node", "metadata": object{"name": name}, "spec": object{"taints": taints}}
	a.want("POST", "/api/v1/nodes", "application/json", body, nil)
	a.patch(name, "/status", object{"status": object{"conditions": []object{{"type": "Ready", "status": "True"}}}})
	a.t.Cleanup(func() { a.delete(name) })
}

// delete is all right with a node that is gone. The test's own context may have ended.
func (a *admin) delete(name string) {
	code, answer := a.send(context.Background(), "DELETE", "/api/v1/nodes/"+name, "", nil)
	if code != http.StatusOK && code != http.StatusNotFound {
		a.t.Fatalf("delete node %s: %d %s", name, code, answer)
	}
}

func (a *admin) patch(name, part string, body object) {
	a.t.Helper()
	a.want("PATCH", "/api/v1/nodes/"+name+part, "application/merge-patch+json", body, nil)
}

// view is what a mark may change on a node.
type view struct {
	Version     string
	Annotations map[string]string
	Taints      []kubeTaint
	Cordoned    bool
	Conditions  map[string]string // status by type
}

type kubeTaint struct{ Key, Value, Effect string }

func (a *admin) view(name string) view {
	a.t.Helper()
	var n struct {
		Metadata struct {
			ResourceVersion string
			Annotations     map[string]string
		}
		Spec struct {
			Unschedulable bool
			Taints        []kubeTaint
		}
		Status struct {
			Conditions []struct{ Type, Status string }
		}
	}
	a.want("GET", "/api/v1/nodes/"+name, "application/json", nil, &n)
	v := view{n.Metadata.ResourceVersion, map[string]string{}, n.Spec.Taints, n.Spec.Unschedulable, map[string]string{}}
	maps.Copy(v.Annotations, n.Metadata.Annotations)
	for _, c := range n.Status.Conditions {
		v.Conditions[c.Type] = c.Status
	}
	return v
}

// ours is the value of our taint.
func (v view) ours() (value string, ok bool) {
	at := slices.IndexFunc(v.Taints, func(t kubeTaint) bool { return t.Key == kube.Key && t.Effect == "NoSchedule" })
	if at < 0 {
		return "", false
	}
	return v.Taints[at].Value, true
}

// foreign are the other taints.
func (v view) foreign() []kubeTaint {
	return slices.DeleteFunc(slices.Clone(v.Taints), func(t kubeTaint) bool { return t.Key == kube.Key })
}

// messages are those of the events about a node.
func (a *admin) messages(name string) (messages []string) {
	a.t.Helper()
	var list struct {
		Items []struct{ Reason, Type, Message string }
	}
	path := "/api/v1/namespaces/default/events?fieldSelector=involvedObject.name=" + name
	a.want("GET", path, "application/json", nil, &list)
	for _, e := range list.Items {
		equal(a.t, e.Reason+" "+e.Type, kube.ConditionType+" Warning")
		messages = append(messages, e.Message)
	}
	return messages
}
