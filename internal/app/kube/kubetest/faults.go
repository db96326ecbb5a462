package kubetest

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"testing"
)

// AddFaults has the cluster know NVSentinel's ExternalFaults.
func (s *Server) AddFaults(*testing.T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = map[string]object{}
}

// fault answers about ExternalFaults.
func (s *Server) fault(q query, body object) (int, object) {
	if s.faults == nil {
		return status(http.StatusNotFound, "NotFound", "the server could not find the requested resource")
	}
	switch q.verb {
	case "list":
		items := []any{}
		for _, name := range slices.Sorted(maps.Keys(s.faults)) {
			items = append(items, s.faults[name])
		}
		return http.StatusOK, object{"kind": "ExternalFaultList", "metadata": object{}, "items": items}
	case "create":
		q.name, _ = field[string](body, "metadata", "name")
		if s.faults[q.name] != nil || !subdomain(q.name) {
			return status(http.StatusConflict, "AlreadyExists", fmt.Sprintf("externalfaults %q already exists", q.name))
		}
		s.stamp(body)
		s.faults[q.name] = body
		return http.StatusCreated, body
	}
	f, ok := s.faults[q.name]
	if !ok {
		return status(http.StatusNotFound, "NotFound", fmt.Sprintf("externalfaults %q not found", q.name))
	}
	if q.verb == "delete" {
		body = object{"metadata": object{"deletionTimestamp": "2026-03-01T13:00:00Z"}}
	}
	f, _ = merge(copied(f), body).(object)
	s.faults[q.name] = f
	_, deleted := field[string](f, "metadata", "deletionTimestamp")
	if left, _ := field[[]any](f, "metadata", "finalizers"); deleted && len(left) == 0 {
		delete(s.faults, q.name)
	}
	return http.StatusOK, f
}

// Faults are the nodes of the ExternalFaults, in order.
func (s *Server) Faults() (nodes []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.faults {
		node, _ := field[string](f, "spec", "healthEvent", "nodeName")
		nodes = append(nodes, node)
	}
	slices.Sort(nodes)
	return nodes
}
