package coordinator

import (
	"cmp"
	"fmt"
	"time"
)

// barrier is the common part of agreements and exchanges: nodes that wait for each other. It opens when all are there,
// or at due, which the first request sets, and does not close again. It is forgotten after forgetAfter without
// requests, or, once it is open, when maxKeys others are newer.
type barrier struct {
	nodes int       // that are waited for
	due   time.Time // when patience is over
	heard time.Time // time of the last request
	bytes int64     // its part of state.bytes
	open  bool      // the answer is known
}

func checkBarrier(key string, node, nodes int, patience time.Duration) error {
	switch {
	case key == "" || len(key) > maxKey:
		return fmt.Errorf("%w: key %.80q: need 1 to %d bytes", errBadRequest, key, maxKey)
	case nodes > maxShards:
		return fmt.Errorf("%w: %d nodes, at most %d are possible", ErrLimit, nodes, maxShards)
	case node < 0 || node >= nodes:
		return fmt.Errorf("%w: node %d of %d nodes", errBadRequest, node, nodes)
	case patience < 0:
		return fmt.Errorf("%w: patience %s", errBadRequest, patience)
	}
	return nil
}

func (b *barrier) asBarrier() *barrier { return b }

// arrive records a request.
func (b *barrier) arrive(key string, nodes int, now time.Time) error {
	if b.nodes != nodes {
		return fmt.Errorf("%w: %q is for %d nodes, not for %d", errBadRequest, key, b.nodes, nodes)
	}
	b.heard = now
	return nil
}

// evictFor makes room for one more key, at the cost of the oldest that is open.
func evictFor[M interface{ asBarrier() *barrier }](st *state, all map[string]M) error {
	if len(all) < maxKeys {
		return nil
	}
	oldest := ""
	for key, x := range all {
		if b := x.asBarrier(); b.open && (oldest == "" ||
			cmp.Or(b.heard.Compare(all[oldest].asBarrier().heard), cmp.Compare(key, oldest)) < 0) {
			oldest = key
		}
	}
	if oldest == "" {
		return fmt.Errorf("%w: the nodes of the run wait for each other under %d keys already", ErrLimit, len(all))
	}
	st.bytes -= all[oldest].asBarrier().bytes
	delete(all, oldest)
	return nil
}

// next returns the time when patience, or a grace, runs out next; zero if no node waits. Pass a tick to step then.
func (st *state) next() time.Time {
	next := soonest(st.exchanges, soonest(st.agreements, time.Time{}))
	for _, due := range st.lost {
		if next.IsZero() || due.Before(next) {
			next = due
		}
	}
	return next
}

func soonest[M interface{ asBarrier() *barrier }](all map[string]M, next time.Time) time.Time {
	for _, x := range all {
		if b := x.asBarrier(); !b.open && (next.IsZero() || b.due.Before(next)) {
			next = b.due
		}
	}
	return next
}

// expire gives up the dead, and opens the barriers whose patience has run out.
func (st *state) expire(now time.Time) (topics []topic) {
	topics = st.endGraces(now)
	for key, a := range st.agreements {
		if !a.open && !now.Before(a.due) {
			st.agree(a)
			topics = append(topics, topic{agreed, key})
		}
	}
	for key, x := range st.exchanges {
		if !x.open && !now.Before(x.due) {
			x.open = true
			topics = append(topics, topic{peersKnown, key})
		}
	}
	return topics
}

func forget[M interface{ asBarrier() *barrier }](st *state, all map[string]M, old func(time.Time) bool) {
	for key, x := range all {
		if b := x.asBarrier(); old(b.heard) {
			st.bytes -= b.bytes
			delete(all, key)
		}
	}
}
