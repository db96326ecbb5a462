// Package lease is a lead.Store in Kubernetes, without any other server: an election in a Lease, and records in a
// ConfigMap that only the present leader can write.
//
// Each write names the version of the object that it replaces, and Kubernetes refuses it if that is not the present
// one. So no clock but that of a process itself decides anything: a candidate takes a Lease that it has not seen change
// for as long as it lasts, and a leader that could not renew it stops earlier than that.
package lease

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"

	"dlrover-run/internal/retry"
	"dlrover-run/rendezvous/lead"
)

const (
	lasts    = 5 * time.Second        // a leadership, from its last renewal on
	renewal  = time.Second            // between two renewals
	margin   = time.Second            // by which a leader stops before its leadership can be another's
	patience = 2 * time.Second        // for an answer of the API server
	bulk     = 10 * time.Second       // for one about the ConfigMap, which may be large; a lost leadership ends it earlier
	again    = 200 * time.Millisecond // pause before a watch or a renewal that has failed
	tries    = 8                      // of a write, when others change the object meanwhile
	farewell = time.Second            // for the last request about the label
)

// errConflict is the error of a write whose object was changed, made or deleted since it was read.
var errConflict = errors.New("it was changed meanwhile")

// Store is a lead.Store. It has no goroutine before its first call.
type Store struct {
	name, pod          string
	leases, maps, pods resource
	http               *http.Client
	log                *slog.Logger

	ctx    context.Context // ends with Close
	stop   context.CancelFunc
	wg     sync.WaitGroup
	clean  sync.Once  // an earlier process of the pod may have left its label
	labels sync.Mutex // held by the goroutine that is in charge of the label
	warned sync.Once  // about the label

	// mine are the newest leaderships that this process has asked for; of Campaign, where all of them are over, even if
	// the Lease does not say so: the API server was away.
	mine map[lead.Leader]bool

	mu     sync.Mutex // guards tenure
	tenure *tenure    // nil: this process does not lead
}

// resource is the objects of one kind.
type resource struct {
	dynamic.ResourceInterface
	patience time.Duration // for an answer
}

// tenure is a leadership of this process.
type tenure struct {
	term   lead.Term
	addr   string
	before string          // pod of the leader before
	ctx    context.Context // ends with the leadership
	lose   context.CancelFunc
	expiry *time.Timer                // loses
	until  atomic.Pointer[time.Time]  // when it does
	lease  *unstructured.Unstructured // as last written; of the goroutine that renews it

	mu   sync.Mutex                 // held by the only write that is under way
	kept *unstructured.Unstructured // the ConfigMap as last read or written; nil: it has to be read
}

// Close ends all calls. A leadership ends with its Lease; Resign ends it at once.
func (s *Store) Close() error {
	if t := s.resigned(); t != nil {
		t.lose()
	}
	late := time.AfterFunc(farewell, s.stop)
	s.wg.Wait()
	late.Stop()
	s.stop()
	s.http.CloseIdleConnections()
	return nil
}

// Campaign implements lead.Leadership.
func (s *Store) Campaign(ctx context.Context, addr string) (lead.Term, <-chan struct{}, error) {
	s.clean.Do(func() { s.wg.Go(func() { s.announce(nil) }) })
	var v view
	free := func() bool { return v.free() || s.mine[v.leader()] }
	for ctx.Err() == nil {
		err := s.follow(ctx, &v, func() bool { return !free() })
		if !free() {
			if err != nil && ctx.Err() == nil {
				return 0, nil, err
			}
			retry.Sleep(ctx, again)
			continue
		}
		t, err := s.take(ctx, &v, addr)
		if errors.Is(err, errConflict) {
			continue
		}
		if err != nil {
			return 0, nil, err
		}
		return t.term, t.ctx.Done(), nil
	}
	return 0, nil, ctx.Err()
}

// take makes this process the leader, unless another one was faster.
func (s *Store) take(ctx context.Context, v *view, addr string) (*tenure, error) {
	kept, err := s.readMap(ctx) // its term counts, too: somebody may have deleted the Lease
	if err != nil {
		return nil, err
	}
	l := v.lease.DeepCopy()
	if l == nil {
		l = object("coordination.k8s.io/v1", "Lease", s.name)
	}
	t := &tenure{term: max(termOf(l), termOf(kept)) + 1, addr: addr, before: l.GetAnnotations()[podKey], kept: kept}
	maps.DeleteFunc(s.mine, func(m lead.Leader, _ bool) bool { return m.Term < termOf(l) }) // no Lease has them any more
	hold(l, t.term, addr, s.pod)
	s.mine[lead.Leader{Term: t.term, Addr: addr}] = true
	sent := time.Now()
	if t.lease, err = s.put(ctx, s.leases, l); err != nil {
		return nil, err
	}
	t.ctx, t.lose = context.WithCancel(s.ctx)
	t.expiry = time.AfterFunc(lasts, t.lose)
	t.extend(sent)
	s.mu.Lock()
	s.tenure = t
	s.mu.Unlock()
	s.wg.Go(func() { s.renew(t) })
	s.wg.Go(func() { s.guard(t) })
	s.wg.Go(func() { s.announce(t) })
	if _, err := s.fenced(ctx, t.term, nil); err != nil { // from now on no earlier leader writes
		return nil, errors.Join(err, s.Resign(ctx))
	}
	return t, nil
}

// extend has the leadership last from a renewal on.
func (t *tenure) extend(sent time.Time) {
	until := sent.Add(lasts - margin)
	t.until.Store(&until)
	t.expiry.Reset(time.Until(until))
}

// Holds reports whether this process leads, as far as it can know: it may answer requests. A process that was frozen
// may run for a while before its timers do.
func (s *Store) Holds() bool {
	s.mu.Lock()
	t := s.tenure
	s.mu.Unlock()
	return t != nil && t.ctx.Err() == nil && time.Now().Before(*t.until.Load())
}

// renew renews a leadership until it is lost.
func (s *Store) renew(t *tenure) {
	defer t.expiry.Stop()
	for pause := renewal; retry.Sleep(t.ctx, pause); {
		sent := time.Now()
		err := s.renewOnce(t)
		switch {
		case err == nil:
			t.extend(sent)
			pause = renewal
		case errors.Is(err, lead.ErrDeposed):
			t.lose()
		default:
			s.log.Debug("the Lease was not renewed", "err", err)
			pause = again
		}
	}
}

func (s *Store) renewOnce(t *tenure) error {
	l := t.lease.DeepCopy()
	renewed(l)
	l, err := s.put(t.ctx, s.leases, l)
	if errors.Is(err, errConflict) { // or an earlier renewal was executed, and its answer lost
		found, err := s.get(t.ctx, s.leases, s.name)
		if err != nil {
			return err
		}
		if found == nil || !t.owns(found) {
			return lead.ErrDeposed
		}
		t.lease = found
		return errConflict
	}
	if err == nil {
		t.lease = l
	}
	return err
}

// owns reports whether a Lease is held for this leadership. Where somebody has deleted the Lease before the ConfigMap
// had the term, another process may have one of the same term.
func (t *tenure) owns(l *unstructured.Unstructured) bool {
	return termOf(l) == t.term && holder(l) == t.addr
}

// guard notices that another process has ended a leadership.
func (s *Store) guard(t *tenure) {
	var v view
	for t.ctx.Err() == nil {
		_ = s.follow(t.ctx, &v, func() bool {
			if !t.owns(v.lease) {
				t.lose()
			}
			return t.ctx.Err() == nil
		})
		retry.Sleep(t.ctx, again)
	}
}

// Watch implements lead.Leadership.
func (s *Store) Watch(ctx context.Context) <-chan lead.Leader {
	leaders := make(chan lead.Leader, 1)
	go func() {
		defer close(leaders)
		var v view
		var last *lead.Leader
		for ctx.Err() == nil {
			_ = s.follow(ctx, &v, func() bool {
				if l := v.leader(); last == nil || l != *last {
					lead.Newest(leaders, l)
					last = &l
				}
				return true
			})
			retry.Sleep(ctx, again)
		}
	}()
	return leaders
}

// follow reads the Lease and then watches it. It calls more after the read and after every change of v, until that
// returns false, the watch ends, or says nothing for as long as a leadership lasts: its connection may be dead.
func (s *Store) follow(ctx context.Context, v *view, more func() bool) error {
	l, err := s.get(ctx, s.leases, s.name)
	if err != nil {
		return err
	}
	v.see(l)
	if !more() {
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	silence := time.AfterFunc(v.rest(), cancel)
	defer silence.Stop()
	// From any version on: one that is too old does not matter to v, none is too old for the API server, and it need not
	// wait for etcd, which with some versions takes three seconds.
	w, err := s.leases.Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + s.name, ResourceVersion: "0"})
	if err != nil {
		return s.failed("watch", err)
	}
	defer w.Stop()
	for e := range w.ResultChan() {
		l, _ := e.Object.(*unstructured.Unstructured)
		if e.Type == watch.Error || l == nil {
			return s.failed("watch", apierrors.FromObject(e.Object))
		}
		if e.Type == watch.Deleted {
			l = nil
		}
		if v.see(l) {
			silence.Reset(v.rest())
			if !more() {
				return nil
			}
		}
	}
	return nil
}

// Depose implements lead.Leadership. The leader's records are refused before its Lease is free.
func (s *Store) Depose(ctx context.Context, l lead.Leader) error {
	found, err := s.get(ctx, s.leases, s.name)
	if err != nil || found == nil || termOf(found) != l.Term || holder(found) == "" {
		return err
	}
	fence := &tenure{term: l.Term + 1}
	if _, err := s.write(ctx, fence, nil); err != nil && !errors.Is(err, lead.ErrDeposed) {
		return err
	}
	return s.release(ctx, l.Term)
}

// release ends the leadership of a term, if that lasts.
func (s *Store) release(ctx context.Context, term lead.Term) error {
	return s.retried(func() error {
		l, err := s.get(ctx, s.leases, s.name)
		if err != nil || l == nil || termOf(l) != term || holder(l) == "" {
			return err
		}
		vacate(l)
		_, err = s.put(ctx, s.leases, l)
		return err
	})
}

// resigned is the tenure until now.
func (s *Store) resigned() *tenure {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.tenure
	s.tenure = nil
	return t
}

// Resign implements lead.Leadership.
func (s *Store) Resign(ctx context.Context) error {
	t := s.resigned()
	if t == nil {
		return nil
	}
	t.lose()
	return s.release(ctx, t.term)
}
