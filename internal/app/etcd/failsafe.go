package etcd

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"dlrover-run/rendezvous/lead"
)

// Unanswered is how long a leader goes on at most while etcd does not answer. A new master that the leader cannot know,
// because all others were lost with it, waits as long before it serves.
const Unanswered = 3 * time.Minute

// Vouchers are written anew now and then, because they expire: those of a run that has ended, or of a leader that was
// lost, must not last for ever. They outlast a leader that goes on.
const (
	rewrite     = time.Minute
	vouchersTTL = Unanswered + 2*rewrite
)

// Vouchers are the candidates without whom a leader does not go on while etcd is away. It has written them before it
// may; if there are none, it does not go on.
type Vouchers struct {
	lead.Leader
	Candidates []string `json:"candidates"` // their addresses, sorted
}

// vouching is a leader's knowledge of its candidates. A failed write may have been made, so that until the next one
// those of both are needed.
type vouching struct {
	present []string // that wait now
	needed  []string
	last    []string // written for certain; without any, the leader does not go on
	written bool
	at      time.Time // of the write
}

// Failsafe lets a leader go on without etcd for as long as vouched returns true for its candidates. It is called before
// the first Campaign; vouched is called often, and must be quick.
func (s *Store) Failsafe(vouched func(lead.Term, []string) bool) { s.vouched = vouched }

// Serves says that no leader before that of a term can go on: it has read their Vouchers, which are replaced with its
// own from now on.
func (s *Store) Serves(term lead.Term) {
	t, err := s.leading(term)
	if err != nil {
		return
	}
	t.mu.Lock()
	t.serves = true
	t.mu.Unlock()
	select {
	case t.hurry <- struct{}{}:
	default:
	}
}

func (t *tenure) served() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.serves
}

// Vouchers returns those of the newest leader that has any; the zero value: none may go on without etcd.
func (s *Store) Vouchers(ctx context.Context) (Vouchers, error) {
	v, _, err := s.readVouchers(ctx)
	return v, err
}

func (s *Store) readVouchers(ctx context.Context) (v Vouchers, revision int64, err error) {
	err = s.try(ctx, func(ctx context.Context) error {
		r, err := s.client.Get(ctx, s.vouchers())
		if err != nil || len(r.Kvs) == 0 {
			return err
		}
		revision = r.Kvs[0].ModRevision
		return json.Unmarshal(r.Kvs[0].Value, &v)
	})
	if err != nil {
		err = fmt.Errorf("etcd: who vouches for the leader: %w", err)
	}
	return v, revision, err
}

func (s *Store) vouchers() string { return s.prefix + "vouchers" }

// Candidates are the others that wait, as this leader knows them.
func (s *Store) Candidates() []string {
	s.mu.Lock()
	t := s.tenure
	s.mu.Unlock()
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.vouching.present
}

// Holds reports whether this process leads, as far as it can know: it may answer requests. After a pause of the process
// etcd has to say so first.
func (s *Store) Holds() bool {
	s.mu.Lock()
	t := s.tenure
	s.mu.Unlock()
	return t != nil && t.ctx.Err() == nil && s.holds(t) && t.awake()
}

// look notes that the process runs.
func (t *tenure) look(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if now.Sub(t.looked) > pause {
		t.woke = now
	}
	t.looked = now
}

// awake: the lease was renewed after the last pause of this process, or is over, so that others vouch for it.
func (t *tenure) awake() bool {
	renewed := time.Now().Add(-t.lease.silence())
	t.mu.Lock()
	defer t.mu.Unlock()
	over := time.Since(renewed) >= t.lease.lasts
	return over || time.Since(t.looked) <= pause && !renewed.Before(t.woke)
}

// holds: no other process can serve now.
func (s *Store) holds(t *tenure) bool {
	silence := t.lease.silence()
	if silence < t.lease.lasts {
		return true
	}
	if s.vouched == nil || silence > Unanswered {
		return false
	}
	t.mu.Lock()
	needed, last := t.vouching.needed, t.vouching.last
	t.mu.Unlock()
	return len(last) > 0 && s.vouched(t.term, needed)
}

// register writes who the other candidates are, if that has changed, and none of an earlier leader matter any more.
func (s *Store) register(t *tenure, all []*mvccpb.KeyValue) {
	if s.vouched == nil {
		return
	}
	v := Vouchers{Leader: lead.Leader{Term: t.term, Addr: t.addr}, Candidates: t.others(all)}
	t.mu.Lock()
	t.vouching.present = v.Candidates
	fresh := t.vouching.written && time.Since(t.vouching.at) < rewrite
	if !t.serves || fresh && slices.Equal(t.vouching.last, v.Candidates) {
		t.mu.Unlock()
		return
	}
	t.vouching.needed = union(t.vouching.needed, v.Candidates)
	if len(v.Candidates) == 0 { // even if etcd does not answer: the next leader may read this, and does not wait
		t.vouching.last, t.vouching.written = nil, false
	}
	t.mu.Unlock()
	at := time.Now()
	if err := s.write(t, v); err != nil {
		s.failed.Add(1)
		return // again with the next read
	}
	t.mu.Lock()
	t.vouching = vouching{present: v.Candidates, needed: v.Candidates, last: v.Candidates, written: true,
		at: at}
	t.mu.Unlock()
}

// write does not overtake: one that a frozen member of etcd carries out later fails.
func (s *Store) write(t *tenure, v Vouchers) error {
	value, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, revision, err := s.readVouchers(t.ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(t.ctx, renewTimeout)
	defer cancel()
	lease, err := s.client.Grant(ctx, int64(vouchersTTL/time.Second))
	if err != nil {
		return err
	}
	r, err := s.client.Txn(ctx).If(t.leads(), clientv3.Compare(clientv3.ModRevision(s.vouchers()), "=", revision)).
		Then(clientv3.OpPut(s.vouchers(), string(value), clientv3.WithLease(lease.ID))).Commit()
	if err == nil && !r.Succeeded {
		err = lead.ErrDeposed
	}
	return err
}

// leads is true in etcd as long as this process leads.
func (t *tenure) leads() clientv3.Cmp {
	return clientv3.Compare(clientv3.CreateRevision(t.key), "=", int64(t.term))
}

// others are the addresses of the other candidates.
func (t *tenure) others(all []*mvccpb.KeyValue) []string {
	var addrs []string
	for _, kv := range all {
		var l lead.Leader
		if json.Unmarshal(kv.Value, &l) == nil && l.Addr != t.addr {
			addrs = append(addrs, l.Addr)
		}
	}
	return union(addrs, nil)
}

func union(a, b []string) []string {
	all := slices.Concat(a, b)
	slices.Sort(all)
	return slices.Compact(all)
}
