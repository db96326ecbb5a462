package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/url"
	"strconv"
	"strings"
	"time"

	"dlrover-run/internal/text"
)

// The rights that the levels need.
var (
	getNodes     = right{"get", "nodes"}
	listNodes    = right{"list", "nodes"}
	patchNodes   = right{"patch", "nodes"}
	patchStatus  = right{"patch", "nodes/status"}
	createEvents = right{"create", "events"}
)

// eventNamespace is where Kubernetes keeps events about objects without a namespace.
const eventNamespace = "default"

// Client marks nodes. Its methods may be called at the same time. None takes longer than its context, nor than some
// minutes where the API server does not answer.
type Client struct {
	rest *rest
	log  *slog.Logger
}

// New returns a Client, and an error if the configuration makes no sense or the token cannot be read. Nothing is sent.
func New(cfg Config) (*Client, error) {
	cfg.Log = logger(cfg.Log)
	r, err := newRest(cfg)
	if err != nil {
		return nil, err
	}
	return &Client{r, cfg.Log}, nil
}

func logger(log *slog.Logger) *slog.Logger {
	if log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return log
}

// Close gives up connections that are idle.
func (c *Client) Close() { c.rest.http.CloseIdleConnections() }

// Allowed asks which of the rights that a level needs are missing, such as "patch nodes/status". The error is
// ErrNoFaults if the cluster does not have what the level needs.
func (c *Client) Allowed(ctx context.Context, l Level) (missing []string, err error) {
	for _, r := range l.properties().rights {
		ok, err := c.may(ctx, r)
		if err != nil {
			return nil, err
		}
		if !ok {
			missing = append(missing, r.String())
		}
	}
	if l == ExternalFault && len(missing) == 0 {
		_, err = c.faults(ctx, "") // RBAC allows what the cluster does not have
	}
	return missing, err
}

func (c *Client) may(ctx context.Context, r right) (bool, error) {
	resource, sub, _ := strings.Cut(r.resource, "/")
	attributes := map[string]string{"verb": r.verb, "resource": resource, "subresource": sub}
	switch r {
	case listFaults, createFaults, patchFaults, deleteFaults:
		attributes["group"] = faultGroup
	case createEvents:
		attributes["namespace"] = eventNamespace
	case patchPods: // a role may name the pod
		attributes["namespace"], attributes["name"] = c.rest.cfg.Namespace, c.rest.cfg.Pod
	}
	var review struct{ Status struct{ Allowed bool } }
	err := c.rest.do(ctx, request{
		right: right{"create", "selfsubjectaccessreviews"}, method: "POST",
		path: "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
		body: map[string]any{
			"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
			"spec": map[string]any{"resourceAttributes": attributes},
		},
	}, &review)
	return review.Status.Allowed, err
}

// Apply marks a node, or renews the owner's mark, and creates an event, of which there is one for each node, owner and
// Since. A node that has the mark already is not written. Level Event leaves an older mark of a higher level as it is.
// The error is ErrNotFound if the node is gone.
func (c *Client) Apply(ctx context.Context, l Level, m Mark) error {
	m, err := m.checked()
	if err != nil {
		return err
	}
	switch p := l.properties(); {
	case p == nil:
		_, err = ParseLevel(string(l))
	case p.apply != nil:
		err = p.apply(c, ctx, m)
	case p.note != nil:
		err = c.change(ctx, m.Node, func(n *node) (*patch, bool, error) { return n.apply(l, m, time.Now()) })
	}
	if err != nil || l == None {
		return err
	}
	return c.tell(ctx, m)
}

// Remove undoes the changes of a mark of m.Owner to m.Node, at any level but ExternalFault. Event leaves nothing to
// undo, and its rights do not allow reads: the error is ErrForbidden. Changes that other owners' marks hold as well
// stay. If m.Until is not zero, a mark that lasts longer than that has been renewed meanwhile and stays. A node that
// is gone is no error, nor one without such a mark. No mark lasts longer than one without an end.
func (c *Client) Remove(ctx context.Context, m Mark) error {
	if err := errors.Join(checkNode(m.Node), checkOwner(m.Owner)); err != nil {
		return err
	}
	err := c.change(ctx, m.Node, func(n *node) (*patch, bool, error) {
		p, err := n.remove(m.Owner, m.Until, time.Now())
		return p, false, err
	})
	if errors.Is(err, ErrNotFound) {
		c.log.Info("a node is gone, and its mark with it", "node", m.Node, "owner", m.Owner)
		return nil
	}
	return err
}

// maxRounds bounds how often a node is read again because others have changed it meanwhile.
const maxRounds = 10

// change reads the node and patches it until it is as f wants it; f reports whether that takes another patch.
func (c *Client) change(ctx context.Context, name string, f func(*node) (*patch, bool, error)) error {
	for round := range maxRounds {
		more, err := c.changeOnce(ctx, name, f)
		switch {
		case errors.Is(err, errConflict):
			if !sleep(ctx, rand.N(time.Duration(round+1)*20*time.Millisecond)) {
				return noTime(ctx, err)
			}
		case err != nil || !more:
			return err
		}
	}
	return fmt.Errorf("kube: node %s was changed by others at each of %d tries: %w", name, maxRounds, errConflict)
}

func (c *Client) changeOnce(ctx context.Context, name string, f func(*node) (*patch, bool, error)) (bool, error) {
	var n node
	if err := c.rest.do(ctx, request{right: getNodes, method: "GET", path: nodePath(name)}, &n); err != nil {
		return false, err
	}
	p, more, err := f(&n)
	if err != nil {
		const cure = "if nobody needs its marks: kubectl annotate node"
		return false, fmt.Errorf("kube: node %s: %w; %s %s %s-", name, err, cure, name, Key)
	}
	if p == nil {
		return more, nil
	}
	return more, c.patch(ctx, name, p)
}

func nodePath(name string) string { return "/api/v1/nodes/" + url.PathEscape(name) }

func (c *Client) patch(ctx context.Context, name string, p *patch) error {
	q := request{
		right: patchNodes, method: "PATCH", path: nodePath(name), contentType: "application/merge-patch+json", body: p.body,
	}
	if p.status {
		q.right, q.path = patchStatus, q.path+"/status"
	}
	return c.rest.do(ctx, q, nil)
}

// tell creates the event about a mark, unless it is there already.
func (c *Client) tell(ctx context.Context, m Mark) error {
	err := c.rest.do(ctx, request{
		right: createEvents, method: "POST", path: "/api/v1/namespaces/" + eventNamespace + "/events",
		body: c.event(m, time.Now().UTC().Truncate(time.Second)),
	}, nil)
	if errors.Is(err, errConflict) {
		return nil
	}
	return err
}

func (c *Client) event(m Mark, now time.Time) map[string]any {
	until := "somebody clears it"
	if !m.Until.IsZero() {
		until = m.Until.Format(time.RFC3339)
	}
	text := fmt.Sprintf("%s (marked by %s until %s)", message(newEntry(Event, m)), m.Owner, until)
	return map[string]any{
		"apiVersion": "v1", "kind": "Event",
		"metadata": map[string]any{
			"name": objectName(m), "namespace": eventNamespace,
		},
		// By its name, as the kubelet does: a client that may only create events cannot know the node's UID.
		"involvedObject": map[string]any{"apiVersion": "v1", "kind": "Node", "name": m.Node, "uid": m.Node},
		"reason":         ConditionType, "type": "Warning", "message": text, "count": 1,
		"firstTimestamp": now, "lastTimestamp": now,
		"source":             map[string]any{"component": "dlrover-master"},
		"reportingComponent": "dlrover-master", "reportingInstance": c.instance(),
	}
}

// instance is the own pod, "" where it is not known.
func (c *Client) instance() string {
	if c.rest.cfg.Namespace == "" || c.rest.cfg.Pod == "" {
		return text.Head(c.rest.cfg.Pod, 128)
	}
	return text.Head(c.rest.cfg.Namespace+"/"+c.rest.cfg.Pod, 128)
}

// pageSize is the number of nodes in an answer: only their metadata, a few kilobytes each.
const pageSize = 250

// metadataOnly leaves out the rest of a node, images above all. See
// https://kubernetes.io/docs/reference/using-api/api-concepts/#metadata-only-fetches.
const metadataOnly = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1, application/json"

// Marks returns the marks of all owners on all nodes, by node and owner. The errors are about nodes whose annotation
// cannot be read, and about the list itself, which may then be incomplete; Event's rights do not allow it. To remove
// expired marks of masters that never came back, pass them to Remove unchanged.
func (c *Client) Marks(ctx context.Context) (marks []Mark, errs []error) {
	nodes, err := c.marked(ctx)
	if err != nil {
		errs = append(errs, err)
	}
	for _, n := range nodes {
		r, err := parseRecord(n.Annotations[Key])
		if err != nil {
			errs = append(errs, fmt.Errorf("kube: node %s: %w", n.Name, err))
			continue
		}
		marks = append(marks, r.marks(n.Name)...)
	}
	return marks, errs
}

// marked returns the metadata of all nodes with our annotation. A list that took so long that it has expired is begun
// once more.
func (c *Client) marked(ctx context.Context) (nodes []metadata, err error) {
	for range 2 {
		if nodes, err = c.markedOnce(ctx); !errors.Is(err, errGone) {
			break
		}
	}
	return nodes, err
}

func (c *Client) markedOnce(ctx context.Context) (nodes []metadata, err error) {
	q := request{right: listNodes, path: "/api/v1/nodes", accept: metadataOnly}
	err = list(ctx, c, q, func(n struct{ Metadata metadata }) {
		if _, marked := n.Metadata.Annotations[Key]; marked && checkNode(n.Metadata.Name) == nil {
			nodes = append(nodes, n.Metadata)
		}
	})
	return nodes, err
}

// list reads a list page by page, and calls take with each of its objects.
func list[T any](ctx context.Context, c *Client, q request, take func(T)) error {
	q.method, q.query = "GET", url.Values{"limit": {strconv.Itoa(pageSize)}}
	for {
		var page struct {
			Metadata struct{ Continue string }
			Items    []T
		}
		if err := c.rest.do(ctx, q, &page); err != nil {
			return err
		}
		for _, item := range page.Items {
			take(item)
		}
		if page.Metadata.Continue == "" {
			return nil
		}
		q.query.Set("continue", page.Metadata.Continue)
	}
}
