package lease

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"dlrover-run/internal/retry"
)

// Label is that of the pod that leads, by which a Service finds it.
const Label = "dlrover.org/leader"

const (
	longestPause = 10 * time.Second // between two tries to set the label
	relabel      = lasts            // between two times: somebody may have removed it
)

// announce has the label be on the pod that leads, for as long as t lasts, and then on this one no longer. The process
// of the leader before may be gone. Without t it only removes what an earlier process of this pod has left.
func (s *Store) announce(t *tenure) {
	if s.pod == "" {
		return
	}
	s.labels.Lock()
	defer s.labels.Unlock()
	if t != nil {
		may := s.label(t.ctx, s.pod, `"true"`)
		if t.before != "" && t.before != s.pod {
			s.label(t.ctx, t.before, "null")
		}
		for may && retry.Sleep(t.ctx, relabel) { // a patch that changes nothing is no write to Kubernetes
			may = s.label(t.ctx, s.pod, `"true"`)
		}
		<-t.ctx.Done()
	}
	s.label(s.ctx, s.pod, "null")
}

// label sets the label of a pod to a value in JSON. It gives up when ctx ends, or nothing else would help; may is false
// if that is not allowed.
func (s *Store) label(ctx context.Context, pod, value string) (may bool) {
	body := fmt.Appendf(nil, `{"metadata":{"labels":{%q:%s}}}`, Label, value)
	pause := retry.Backoff{First: again, Most: longestPause}
	for {
		asking, cancel := context.WithTimeout(ctx, patience)
		_, err := s.pods.Patch(asking, pod, types.MergePatchType, body, metav1.PatchOptions{})
		cancel()
		var status apierrors.APIStatus
		answered := errors.As(err, &status)
		switch {
		case err == nil, apierrors.IsNotFound(err) && pod != s.pod:
			return true
		case answered && status.Status().Code/100 == 4 && !apierrors.IsTooManyRequests(err):
			s.warned.Do(func() {
				s.log.Warn("a Service cannot find the leader by the label "+Label+"; docs/kubernetes/master.yaml has the right",
					"err", err)
			})
			return false
		}
		if !pause.Wait(ctx) {
			return false
		}
	}
}
