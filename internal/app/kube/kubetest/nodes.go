package kubetest

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"dlrover-run/internal/app/kube"
)

// stamp gives an object that has changed a new version.
func (s *Server) stamp(o object) {
	s.version++
	meta, _ := o["metadata"].(object)
	meta["resourceVersion"] = strconv.Itoa(s.version)
}

func (s *Server) createNode(n object) (int, object) {
	name, _ := field[string](n, "metadata", "name")
	if s.nodes[name] != nil || !subdomain(name) {
		return status(http.StatusUnprocessableEntity, "Invalid", fmt.Sprintf("nodes %q is there, or no name", name))
	}
	s.stamp(n)
	s.nodes[name] = n
	return http.StatusCreated, n
}

// listNodes pages by name: the continue token is the last name of the page before.
func (s *Server) listNodes(r *http.Request) (int, object) {
	names := slices.Sorted(maps.Keys(s.nodes))
	after := r.URL.Query().Get("continue")
	names = slices.DeleteFunc(names, func(name string) bool { return name <= after })
	meta := object{}
	if limit, _ := strconv.Atoi(r.URL.Query().Get("limit")); limit > 0 && limit < len(names) {
		names = names[:limit]
		meta["continue"] = names[limit-1]
	}
	kind, partial := "NodeList", strings.HasPrefix(r.Header.Get("Accept"), "application/json;as=PartialObjectMetadataList")
	if partial {
		kind = "PartialObjectMetadataList"
	}
	items := []any{}
	for _, name := range names {
		n := s.nodes[name]
		if partial {
			n = object{"metadata": n["metadata"]}
		}
		items = append(items, n)
	}
	return http.StatusOK, object{"kind": kind, "metadata": meta, "items": items}
}

// patchNode merges the patch into the node but for one part, which only the other of nodes and nodes/status changes.
// Metadata change with both.
func (s *Server) patchNode(r *http.Request, old, patch object, without string) (int, object) {
	if kind := r.Header.Get("Content-Type"); kind != "application/merge-patch+json" {
		return status(http.StatusUnsupportedMediaType, "UnsupportedMediaType", kind+" is not supported here")
	}
	version, conditional := field[string](patch, "metadata", "resourceVersion")
	if current, _ := field[string](old, "metadata", "resourceVersion"); conditional && version != current {
		return status(http.StatusConflict, "Conflict", "the object has been modified; please read it again")
	}
	n, _ := merge(copied(old), patch).(object)
	if part, ok := old[without]; ok {
		n[without] = part
	} else {
		delete(n, without)
	}
	if why := invalid(n); why != "" {
		return status(http.StatusUnprocessableEntity, "Invalid", why)
	}
	if reflect.DeepEqual(old, n) {
		return http.StatusOK, old
	}
	s.stamp(n)
	name, _ := field[string](old, "metadata", "name")
	s.nodes[name] = n
	return http.StatusOK, n
}

// merge is RFC 7396: null removes, objects merge, everything else, lists too, is replaced as a whole.
func merge(target, patch any) any {
	p, ok := patch.(object)
	if !ok {
		return patch
	}
	t, ok := target.(object)
	if !ok {
		t = object{}
	}
	for name, value := range p {
		if value == nil {
			delete(t, name)
		} else {
			t[name] = merge(t[name], value)
		}
	}
	return t
}

func copied(o object) (c object) {
	text, err := json.Marshal(o)
	if err == nil {
		err = json.Unmarshal(text, &c)
	}
	if err != nil {
		panic(err) // it came as JSON
	}
	return c
}

// invalid returns the reason why Kubernetes would not accept the taints of a node, "" for none.
func invalid(n object) string {
	taints, _ := field[[]any](n, "spec", "taints")
	seen := map[string]bool{}
	for _, t := range taints {
		t, _ := t.(object)
		value, _ := t["value"].(string)
		pair := fmt.Sprint(t["key"], t["effect"])
		if seen[pair] || !labelValue(value) {
			return "spec.taints: must be unique by key and effect, and a value a valid label value"
		}
		seen[pair] = true
	}
	return ""
}

func subdomain(name string) bool {
	const pattern = `^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`
	return len(name) <= 253 && regexp.MustCompile(pattern).MatchString(name)
}

func labelValue(text string) bool {
	return len(text) <= 63 && regexp.MustCompile(`^([A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?)?$`).MatchString(text)
}

// AddNode makes a node without anything.
func (s *Server) AddNode(t *testing.T, name string) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	n := object{"kind": "Node", "metadata": object{"name": name}, "spec": object{}, "status": object{}}
	if code, answer := s.createNode(n); code != http.StatusCreated {
		t.Fatal(answer)
	}
}

// Touch changes a node, so that patches of an earlier version are in conflict.
func (s *Server) Touch(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stamp(s.nodes[name])
}

// AddPod makes a pod without anything.
func (s *Server) AddPod(namespace, name string) { s.addPod(namespace, name, object{}) }

// PlacePod makes a pod that runs on a node with that address.
func (s *Server) PlacePod(namespace, name, node, hostIP string) {
	s.addPod(namespace, name, object{"spec": object{"nodeName": node},
		"status": object{"hostIP": hostIP, "hostIPs": []any{object{"ip": hostIP}}}})
}

// BreakDevice makes a pod with a device that works and one that does not.
func (s *Server) BreakDevice(namespace, name, kind, id, why string) {
	s.addPod(namespace, name, object{"status": object{"containerStatuses": []any{object{
		"name": "main", "allocatedResourcesStatus": []any{object{"name": kind, "resources": []any{
			object{"resourceID": "fine", "health": "Healthy"},
			object{"resourceID": id, "health": "Unhealthy", "message": why},
		}}},
	}}}})
}

func (s *Server) addPod(namespace, name string, pod object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pods[namespace+"/"+name] = pod
}

// PodAnnotations are those of a pod.
func (s *Server) PodAnnotations(namespace, name string) map[string]any {
	s.mu.Lock()
	defer s.mu.Unlock()
	annotations, _ := field[object](s.pods[namespace+"/"+name], "metadata", "annotations")
	return maps.Clone(annotations)
}

// pod answers about a pod, into which it merges the patch.
func (s *Server) pod(key string, patch object) (int, object) {
	pod, ok := s.pods[key]
	if !ok {
		return status(http.StatusNotFound, "NotFound", fmt.Sprintf("pods %q not found", key))
	}
	s.pods[key], _ = merge(copied(pod), patch).(object)
	return http.StatusOK, s.pods[key]
}

// Taint is the value of the taint kube.Key of a node, and whether it is there.
func (s *Server) Taint(name string) (value string, is bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	taints, _ := field[[]any](s.nodes[name], "spec", "taints")
	for _, t := range taints {
		if t, _ := t.(object); t["key"] == kube.Key {
			value, _ = t["value"].(string)
			return value, true
		}
	}
	return "", false
}

// Messages are those of the events about a node.
func (s *Server) Messages(name string) (messages []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, key := range slices.Sorted(maps.Keys(s.events)) {
		if of, _ := field[string](s.events[key], "involvedObject", "name"); of == name {
			text, _ := field[string](s.events[key], "message")
			messages = append(messages, text)
		}
	}
	return messages
}
