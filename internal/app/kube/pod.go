package kube

import (
	"context"
	"encoding/json"
	"errors"
	"net/url"
)

// AvoidKey is the annotation of the own pod that names the nodes which replacement pods should avoid. It is a JSON
// list, as a node affinity kubernetes.io/hostname NotIn takes it.
const AvoidKey = "dlrover/avoid-nodes"

// maxAvoid bounds the annotation in bytes: all annotations of a pod have 256 KiB.
const maxAvoid = 128 << 10

// Rights in the own namespace.
var (
	patchPods = right{"patch", "pods"}
	getPods   = right{"get", "pods"}
)

// ErrNoPod means that the name or the namespace of the own pod is not known.
var ErrNoPod = errors.New("the own pod is not known: set POD_NAME from metadata.name")

// MayAnnotate asks whether Avoid is allowed. It is not without the name of the own pod: the error is ErrNoPod.
func (c *Client) MayAnnotate(ctx context.Context) (bool, error) {
	if c.rest.cfg.Pod == "" || c.rest.cfg.Namespace == "" {
		return false, ErrNoPod
	}
	return c.may(ctx, patchPods)
}

// Avoid replaces the names of nodes in the annotation AvoidKey of the own pod. Without names there is no annotation.
// Names that do not fit are left out.
func (c *Client) Avoid(ctx context.Context, names []string) error {
	cfg := c.rest.cfg
	if cfg.Pod == "" || cfg.Namespace == "" {
		return ErrNoPod
	}
	return c.rest.do(ctx, request{
		right: patchPods, method: "PATCH", contentType: "application/merge-patch+json",
		path: "/api/v1/namespaces/" + url.PathEscape(cfg.Namespace) + "/pods/" + url.PathEscape(cfg.Pod),
		body: map[string]any{"metadata": map[string]any{"annotations": map[string]any{AvoidKey: avoidText(names)}}},
	}, nil)
}

// Place is where a pod is.
type Place struct {
	Node string   // "": nowhere yet
	IPs  []string // of the pod and of its node
	// Unhealthy are the devices of the pod that their plugin has given up, and why, as in "nvidia.com/gpu GPU-7 is
	// Unhealthy: XID 79". Kubernetes has reported them since 1.36.
	Unhealthy []string
}

// Find looks up a pod of the own namespace, with one request. The errors are ErrNoPod without a namespace, ErrNotFound,
// and ErrForbidden.
func (c *Client) Find(ctx context.Context, pod string) (Place, error) {
	if c.rest.cfg.Namespace == "" {
		return Place{}, ErrNoPod
	}
	if err := checkNode(pod); err != nil { // pods are called as nodes are
		return Place{}, err
	}
	type ip struct{ IP string }
	var p struct {
		Spec   struct{ NodeName string }
		Status struct {
			HostIP, PodIP   string
			HostIPs, PodIPs []ip

			ContainerStatuses, InitContainerStatuses []containerStatus
		}
	}
	err := c.rest.do(ctx, request{
		right: getPods, method: "GET",
		path: "/api/v1/namespaces/" + url.PathEscape(c.rest.cfg.Namespace) + "/pods/" + url.PathEscape(pod),
	}, &p)
	place := Place{Node: p.Spec.NodeName}
	for _, a := range append([]ip{{p.Status.HostIP}, {p.Status.PodIP}}, append(p.Status.HostIPs, p.Status.PodIPs...)...) {
		if a.IP != "" {
			place.IPs = append(place.IPs, a.IP)
		}
	}
	for _, c := range append(p.Status.ContainerStatuses, p.Status.InitContainerStatuses...) {
		place.Unhealthy = append(place.Unhealthy, c.unhealthy()...)
	}
	return place, err
}

// containerStatus holds the health of a container's devices.
type containerStatus struct {
	AllocatedResourcesStatus []struct {
		Name      string
		Resources []struct{ ResourceID, Health, Message string }
	}
}

func (c containerStatus) unhealthy() (devices []string) {
	for _, kind := range c.AllocatedResourcesStatus {
		for _, d := range kind.Resources {
			if d.Health != "Unhealthy" || len(devices) == maxUnhealthy {
				continue
			}
			line := kind.Name + " " + d.ResourceID + " is Unhealthy"
			if d.Message != "" {
				line += ": " + d.Message
			}
			devices = append(devices, clean(line, maxReason))
		}
	}
	return devices
}

// maxUnhealthy bounds the devices of one container that are reported.
const maxUnhealthy = 16

// avoidText is the value of the annotation, nil for none.
func avoidText(names []string) any {
	if len(names) == 0 {
		return nil
	}
	size := len("[]")
	for i, name := range names {
		if size += len(name) + len(`"",`); size > maxAvoid {
			names = names[:i]
			break
		}
	}
	text, err := json.Marshal(names)
	if err != nil {
		panic(err) // a list of strings
	}
	return string(text)
}
