package lease

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"dlrover-run/rendezvous/lead"
)

// Annotations of our objects.
const (
	podKey    = "dlrover.org/pod"    // of a Lease: the pod of its newest leader
	termKey   = "dlrover.org/term"   // of a ConfigMap: the first term whose leader may write
	writesKey = "dlrover.org/writes" // of a ConfigMap: a number that each write changes
)

// longest bounds the duration that a Lease names.
const longest = time.Minute

// view is what this process knows of the Lease.
type view struct {
	known   bool
	lease   *unstructured.Unstructured // nil: there is none
	version uint64                     // of the newest state seen
	since   time.Time                  // when that was, by the clock of this process
}

// see reports whether the state is a later one.
func (v *view) see(l *unstructured.Unstructured) bool {
	version := v.version
	if l != nil {
		version, _ = strconv.ParseUint(l.GetResourceVersion(), 10, 64)
	}
	if v.known && (version < v.version || version == v.version && (l == nil) == (v.lease == nil)) {
		return false
	}
	*v = view{known: true, lease: l, version: version, since: time.Now()}
	return true
}

// free reports whether a candidate may take the Lease.
func (v *view) free() bool {
	return v.known && (holder(v.lease) == "" || time.Since(v.since) >= duration(v.lease))
}

// leader is the zero Leader if there is none.
func (v *view) leader() lead.Leader {
	if v.free() {
		return lead.Leader{}
	}
	return lead.Leader{Term: termOf(v.lease), Addr: holder(v.lease)}
}

// rest is for how long the watch may say nothing.
func (v *view) rest() time.Duration {
	if left := duration(v.lease) - time.Since(v.since); left > 0 {
		return left
	}
	return duration(v.lease)
}

func object(version, kind, name string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{}}
	o.SetAPIVersion(version)
	o.SetKind(kind)
	o.SetName(name)
	return o
}

// annotate sets an annotation.
func annotate(o *unstructured.Unstructured, key, value string) {
	all := o.GetAnnotations()
	if all == nil {
		all = map[string]string{}
	}
	all[key] = value
	o.SetAnnotations(all)
}

// spec is that of a Lease, to be changed.
func spec(l *unstructured.Unstructured) map[string]any {
	s, ok := l.Object["spec"].(map[string]any)
	if !ok {
		s = map[string]any{}
		l.Object["spec"] = s
	}
	return s
}

// holder is the address of a Lease's leader, "" for none.
func holder(l *unstructured.Unstructured) string {
	if l == nil {
		return ""
	}
	addr, _, _ := unstructured.NestedString(l.Object, "spec", "holderIdentity")
	return addr
}

// duration is for how long a Lease holds after a change.
func duration(l *unstructured.Unstructured) time.Duration {
	if l != nil {
		n, _, _ := unstructured.NestedInt64(l.Object, "spec", "leaseDurationSeconds")
		if n > 0 {
			return min(time.Duration(n)*time.Second, longest)
		}
	}
	return lasts
}

// termOf is the newest term of a Lease, or the first one that may write to a ConfigMap; 0 of nil.
func termOf(o *unstructured.Unstructured) lead.Term {
	if o == nil {
		return 0
	}
	term, _ := strconv.ParseUint(o.GetAnnotations()[termKey], 10, 64)
	n, _, _ := unstructured.NestedInt64(o.Object, "spec", "leaseTransitions")
	return max(lead.Term(term), lead.Term(max(n, 0)))
}

// microTime is how a Lease has times, which are for people only.
const microTime = "2006-01-02T15:04:05.000000Z07:00"

func hold(l *unstructured.Unstructured, term lead.Term, addr, pod string) {
	s := spec(l)
	s["holderIdentity"], s["leaseTransitions"] = addr, int64(term)
	s["leaseDurationSeconds"] = int64(lasts / time.Second)
	renewed(l)
	s["acquireTime"] = s["renewTime"]
	annotate(l, podKey, pod)
}

func renewed(l *unstructured.Unstructured) { spec(l)["renewTime"] = time.Now().UTC().Format(microTime) }

func vacate(l *unstructured.Unstructured) { delete(spec(l), "holderIdentity") }

// get returns nil if there is no such object.
func (s *Store) get(ctx context.Context, of resource, name string) (*unstructured.Unstructured, error) {
	ctx, cancel := context.WithTimeout(ctx, of.patience)
	defer cancel()
	o, err := of.Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return o, s.failed("get", err)
}

// put replaces the version of an object that it names, or makes it.
func (s *Store) put(ctx context.Context, of resource, o *unstructured.Unstructured) (
	*unstructured.Unstructured, error,
) {
	ctx, cancel := context.WithTimeout(ctx, of.patience)
	defer cancel()
	if o.GetResourceVersion() == "" {
		o, err := of.Create(ctx, o, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			return nil, errConflict
		}
		return o, s.failed("create", err)
	}
	o, err := of.Update(ctx, o, metav1.UpdateOptions{})
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil, errConflict
	}
	return o, s.failed("update", err)
}

// retried calls f again while others change the object.
func (s *Store) retried(f func() error) (err error) {
	for range tries {
		if err = f(); !errors.Is(err, errConflict) {
			return err
		}
	}
	return fmt.Errorf("Lease %s: given up after %d tries: %w", s.name, tries, err)
}

func (s *Store) failed(verb string, err error) error {
	switch {
	case err == nil:
		return nil
	case apierrors.IsForbidden(err):
		return fmt.Errorf("Lease %s: %s: %w; docs/kubernetes/master.yaml has a Role with the rights", s.name, verb, err)
	}
	return fmt.Errorf("Lease %s: %s: %w", s.name, verb, err)
}
