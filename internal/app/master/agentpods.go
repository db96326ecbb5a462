package master

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"dlrover-run/internal/app/kube"
)

// agentPods finds the Kubernetes nodes of DLRover's agents. Agents report only the address of their host, so their pods
// are looked up by the names that DLRover gives them.
type agentPods struct {
	find func(ctx context.Context, pod string) (kube.Place, error) // nil: there is no API server to ask
	job  string
	log  *slog.Logger
	busy chan struct{} // holds one for every request that is under way

	mu    sync.Mutex
	known map[podAt]string // nodes, "" where there is none to be found
	said  map[string]bool  // reasons that have been logged once
	never bool             // no further lookups
	after time.Time        // no lookups before this
}

// podAt is a pod by its name and the address that its agent reports. The same name on another host is a different pod.
type podAt struct{ name, ip string }

const (
	podLookups = 4               // at the same time
	podTime    = 3 * time.Second // for which an agent waits
	podPause   = time.Minute     // after a lookup without an answer
	maxPods    = 1 << 15         // that are remembered
)

func newAgentPods(c *cluster, job string, log *slog.Logger) *agentPods {
	p := &agentPods{job: job, log: log, busy: make(chan struct{}, podLookups), known: map[podAt]string{},
		said: map[string]bool{}}
	if c != nil {
		p.find = c.client.Find
	}
	return p
}

// machine is the Kubernetes node of an agent, "" if it is not to be found.
func (p *agentPods) machine(ctx context.Context, kind string, id int, ip string) string {
	if p.find == nil {
		p.tell("there is no level of --node-action that acts in Kubernetes, so their pods are not looked up")
		return ""
	}
	at := podAt{fmt.Sprintf("%s-edljob-%s-%d", p.job, kind, id), ip}
	if node, known := p.remembered(at); known {
		return node
	}
	ctx, cancel := context.WithTimeout(ctx, podTime)
	defer cancel()
	select {
	case p.busy <- struct{}{}:
		defer func() { <-p.busy }()
	case <-ctx.Done():
		return ""
	}
	place, err := p.find(ctx, at.name)
	return p.learn(at, place, err)
}

// remembered returns the known node of a pod; known is also true if there must be no lookup.
func (p *agentPods) remembered(at podAt) (node string, known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	node, known = p.known[at]
	return node, known || p.never || time.Now().Before(p.after)
}

func (p *agentPods) learn(at podAt, place kube.Place, err error) string {
	node := place.Node
	switch {
	case errors.Is(err, kube.ErrForbidden), errors.Is(err, kube.ErrNoPod):
		p.tell("docs/kubernetes/rbac-pods.yaml allows to look up their pods")
		p.mu.Lock()
		defer p.mu.Unlock()
		p.never = true
		return ""
	case errors.Is(err, kube.ErrNotFound):
		p.tell("their pods are not called JOB-edljob-TYPE-ID, where JOB is --python-run, in the namespace of this daemon",
			"pod", at.name)
		node = ""
	case err != nil:
		p.tell("the API server does not say where their pods are", "err", err)
		p.mu.Lock()
		defer p.mu.Unlock()
		p.after = time.Now().Add(podPause)
		return ""
	case at.ip != "" && !slices.Contains(place.IPs, at.ip):
		p.tell("a pod has another address than its agent tells in NODE_IP", "pod", at.name, "node_ip", at.ip)
		node = ""
	}
	p.remember(at, node)
	return node
}

// remember keeps the result for a pod, if its move to another host would be noticed.
func (p *agentPods) remember(at podAt, node string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.known) >= maxPods {
		clear(p.known)
	}
	if at.ip != "" {
		p.known[at] = node
	}
}

// tell logs once why agents keep their own names.
func (p *agentPods) tell(why string, attrs ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.said[why] {
		p.said[why] = true
		p.log.Info("agents of DLRover are marked by names of their own, which no Kubernetes node has: "+why, attrs...)
	}
}
