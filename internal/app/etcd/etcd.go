// Package etcd is a lead.Store in etcd 3.4 or newer: an election with a lease, and records that only the present leader
// can write.
//
// A leader L whose lease was not renewed in time serves no longer. With Failsafe it may go on while etcd does not
// answer, and never do two serve. Before it may, L has written who the other candidates are, on the condition that it
// leads and that no other process has written since it looked. Without others it does not go on. The next leader reads
// the record of L (Vouchers) before it serves, and writes its own only then (Serves). Either L has named it: then L
// needs its word, as that of all others, not to serve for a time that begins after L's question; L stops before that
// time is over, while the one that is elected gives its word no more, and waits for that time to end. Or L has not
// named it: then it serves only when L's host says that L's process is gone, or Unanswered is over. L needs all whom it
// has written last or may have written, so none is named of whom it does not know. A process at the address of a named
// one comes after that one's end, and waits as if it had given its word. Clocks only have to run equally fast. What
// etcd says counts at once.
package etcd

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"dlrover-run/internal/retry"
	"dlrover-run/rendezvous/lead"
)

const (
	dialTimeout = time.Second
	// A connection that etcd's host does not answer is given up after keepalive and its timeout together. Without that a
	// frozen member keeps its clients. The client's pings must be rarer than etcd's --grpc-keepalive-min-time of 5 s.
	keepalive        = 10 * time.Second
	keepaliveTimeout = 3 * time.Second
	again            = 200 * time.Millisecond // pause before a watch that has failed begins again
	reread           = time.Second            // a watch may be at a frozen member
	guarding         = 50 * time.Millisecond  // between two looks at the age of the lease
	// A process that has not run for so long may have been deposed by others, who wait a little longer.
	pause       = 600 * time.Millisecond
	pageSize    = 256 // records that one request reads
	pageTimeout = 2 * time.Second
)

// redial is how a client comes back to an etcd that was away. Without it the pauses grow to two minutes.
var redial = backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second}

// Config names an etcd.
type Config struct {
	Endpoints []string // HOST:PORT, or URLs
	Prefix    string   // of all keys; those of two masters differ
	TLS       *tls.Config
	User      string
	Password  string
	// Seats bounds how many processes campaign at a time; the others wait for a seat. 0: all campaign.
	Seats int
}

// Store is a lead.Store. It has no goroutine before its first call.
type Store struct {
	client                       *clientv3.Client
	prefix                       string // of all keys, and of some; ends with a slash but for elections
	elections, records, seatKeys string
	failed                       atomic.Int64 // requests
	seats                        int
	seated                       chan struct{} // closed when this process has had a seat
	sat                          sync.Once
	// vouched is that of Failsafe, or nil.
	vouched func(lead.Term, []string) bool

	mu     sync.Mutex // guards tenure
	tenure *tenure    // nil: this process does not lead
}

// tenure is a leadership of this process.
type tenure struct {
	term  lead.Term // the revision that created key
	key   string
	kv    clientv3.KV
	addr  string
	lease *lease
	ctx   context.Context // ends with the leadership
	lose  context.CancelFunc
	hurry chan struct{} // has guard read the candidates now

	// fence is the newest revision of key, which each Append names; 0: key has to be put again, because etcd may yet carry
	// out one that has failed.
	fencing sync.Mutex
	fence   int64

	mu       sync.Mutex
	serves   bool // no earlier leader goes on
	vouching vouching
	looked   time.Time // when guard has run last
	woke     time.Time // when it has run again after a pause
}

// Open connects when the first call needs it.
func Open(cfg Config) (*Store, error) {
	if len(cfg.Endpoints) == 0 {
		return nil, errors.New("etcd: need an endpoint")
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints: cfg.Endpoints, TLS: cfg.TLS, Username: cfg.User, Password: cfg.Password,
		DialTimeout: dialTimeout, DialKeepAliveTime: keepalive, DialKeepAliveTimeout: keepaliveTimeout,
		Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{
			grpc.WithNoProxy(), // a proxy of the environment would read the password
			grpc.WithConnectParams(grpc.ConnectParams{Backoff: redial, MinConnectTimeout: dialTimeout}),
		},
	})
	if err != nil {
		return nil, fmt.Errorf("etcd at %s: %w", strings.Join(cfg.Endpoints, ","), err)
	}
	prefix := strings.TrimSuffix(cfg.Prefix, "/") + "/"
	return &Store{client: client, prefix: prefix, elections: prefix + "leader", records: prefix + "decisions/",
		seatKeys: prefix + "seats/", seats: cfg.Seats, seated: make(chan struct{})}, nil
}

// Failed is how many requests have failed.
func (s *Store) Failed() int64 { return s.failed.Load() }

// Silence is how long etcd has not answered the renewals of this process, which leads; else 0.
func (s *Store) Silence() time.Duration {
	s.mu.Lock()
	t := s.tenure
	s.mu.Unlock()
	if t == nil {
		return 0
	}
	return t.lease.silence()
}

// Close ends all calls. A leadership ends with its lease; Resign ends it at once.
func (s *Store) Close() error { return s.client.Close() }

// Campaign implements lead.Leadership.
func (s *Store) Campaign(ctx context.Context, addr string) (lead.Term, <-chan struct{}, error) {
	value, err := json.Marshal(lead.Leader{Addr: addr})
	if err != nil {
		return 0, nil, err
	}
	l, err := s.enter(ctx)
	if err != nil {
		return 0, nil, err
	}
	t := &tenure{key: fmt.Sprintf("%s/%x", s.elections, l.id), kv: s.client, addr: addr, lease: l,
		hurry: make(chan struct{}, 1)}
	t.ctx, t.lose = context.WithCancel(l.ctx)
	err = s.try(ctx, func(ctx context.Context) error {
		_, err := s.client.Put(ctx, t.key, string(value), clientv3.WithLease(l.id))
		return err
	})
	if err == nil {
		err = s.await(ctx, t)
	}
	if err != nil {
		t.lose()
		leaving, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*renewTimeout)
		defer cancel()
		return 0, nil, errors.Join(fmt.Errorf("etcd: campaign: %w", err), s.release(leaving, l))
	}
	s.mu.Lock()
	s.tenure = t
	s.mu.Unlock()
	t.looked, t.fence = time.Now(), int64(t.term)
	go s.guard(t)
	return t.term, t.ctx.Done(), nil
}

// await returns when the candidate's key is the oldest one.
func (s *Store) await(ctx context.Context, t *tenure) error {
	waiting, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(t.ctx, stop)()
	s.candidates(waiting, nil, func(all []*mvccpb.KeyValue) {
		switch i := slices.IndexFunc(all, t.owns); {
		case i == 0:
			t.term = lead.Term(all[0].CreateRevision)
			stop()
		case i < 0:
			t.lose()
		}
	})
	switch {
	case t.ctx.Err() == nil && t.term > 0:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return errors.New("its lease has expired")
}

func (t *tenure) owns(kv *mvccpb.KeyValue) bool { return string(kv.Key) == t.key }

// guard notices the end of a leadership: etcd says that the key or the lease is gone, or has not renewed it in time and
// not all other candidates vouch for this one.
func (s *Store) guard(t *tenure) {
	defer t.lose()
	go s.candidates(t.ctx, t.hurry, func(all []*mvccpb.KeyValue) {
		if !slices.ContainsFunc(all, t.owns) {
			t.lose()
			return
		}
		s.register(t, all)
	})
	turn := time.NewTicker(guarding)
	defer turn.Stop()
	for s.holds(t) {
		t.look(time.Now())
		select {
		case <-t.ctx.Done():
			return
		case <-turn.C:
		}
	}
}

// Watch implements lead.Leadership.
func (s *Store) Watch(ctx context.Context) <-chan lead.Leader {
	leaders := make(chan lead.Leader, 1)
	go func() {
		defer close(leaders)
		var last *lead.Leader
		s.candidates(ctx, nil, func(all []*mvccpb.KeyValue) {
			l := leader(all)
			if last == nil || l != *last {
				lead.Newest(leaders, l)
				last = &l
			}
		})
	}()
	return leaders
}

// candidates calls see with the keys of all candidates, the oldest first, at once, after each change, and in any case
// now and then, and when hurry says so, until ctx ends.
func (s *Store) candidates(ctx context.Context, hurry <-chan struct{}, see func([]*mvccpb.KeyValue)) {
	for s.observe(ctx, hurry, see); retry.Sleep(ctx, again); {
		s.observe(ctx, hurry, see)
	}
}

// observe is candidates until a failure. Only reads tell who the candidates are, so that nothing is missed by a
// compaction, or while the watch is at a member of etcd that is frozen.
func (s *Store) observe(ctx context.Context, hurry <-chan struct{}, see func([]*mvccpb.KeyValue)) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var changes chan error
	turn := time.NewTicker(reread)
	defer turn.Stop()
	for {
		all, revision, err := s.read(ctx)
		if err != nil || ctx.Err() != nil {
			return
		}
		see(all)
		if changes == nil {
			changes = make(chan error)
			go s.notice(ctx, revision+1, changes)
		}
		select {
		case err, ok := <-changes:
			if !ok || err != nil {
				return
			}
		case <-turn.C:
		case <-hurry:
		case <-ctx.Done():
			return
		}
	}
}

// notice tells of changes from a revision on, and closes the channel at the end of the watch or of ctx. It takes long
// to begin a watch at a frozen member.
func (s *Store) notice(ctx context.Context, revision int64, changes chan<- error) {
	defer close(changes)
	for change := range s.client.Watch(clientv3.WithRequireLeader(ctx), s.elections+"/", clientv3.WithPrefix(),
		clientv3.WithRev(revision)) {
		select {
		case changes <- change.Err():
		case <-ctx.Done():
			return
		}
	}
}

// read returns the keys of all candidates, the oldest first, at a revision of the store.
func (s *Store) read(ctx context.Context) (all []*mvccpb.KeyValue, revision int64, err error) {
	err = s.try(ctx, func(ctx context.Context) error {
		r, err := s.client.Get(ctx, s.elections+"/", clientv3.WithPrefix(),
			clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend))
		if err == nil {
			all, revision = r.Kvs, r.Header.Revision
		}
		return err
	})
	return all, revision, err
}

// leader is the candidate with the oldest key.
func leader(all []*mvccpb.KeyValue) (l lead.Leader) {
	if len(all) > 0 && json.Unmarshal(all[0].Value, &l) == nil {
		l.Term = lead.Term(all[0].CreateRevision)
	}
	return l
}

// Depose implements lead.Leadership: it revokes the lease of the leader.
func (s *Store) Depose(ctx context.Context, l lead.Leader) error {
	all, _, err := s.read(ctx)
	if err == nil && leader(all).Term == l.Term && l.Term > 0 {
		err = s.revoke(ctx, clientv3.LeaseID(all[0].Lease))
	}
	if err != nil {
		return fmt.Errorf("etcd: depose: %w", err)
	}
	return nil
}

// Resign implements lead.Leadership.
func (s *Store) Resign(ctx context.Context) error {
	s.mu.Lock()
	t := s.tenure
	s.tenure = nil
	s.mu.Unlock()
	if t == nil {
		return nil
	}
	defer t.lose()
	if s.vouched != nil && t.ctx.Err() == nil && t.served() { // it does no longer; else they are those of one before
		_, _ = s.client.Txn(ctx).If(t.leads()).Then(clientv3.OpDelete(s.vouchers())).Commit()
	}
	if err := s.release(ctx, t.lease); err != nil {
		return fmt.Errorf("etcd: resign: %w", err)
	}
	return nil
}

// leading is this process's leadership of a term.
func (s *Store) leading(term lead.Term) (*tenure, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tenure == nil || s.tenure.term != term {
		return nil, lead.ErrDeposed
	}
	return s.tenure, nil
}

// fenced executes operations if this process still leads.
func (t *tenure) fenced(ctx context.Context, ops ...clientv3.Op) (*clientv3.TxnResponse, error) {
	r, err := t.execute(ctx, t.leads(), ops)
	if err == nil && !r.Succeeded {
		t.lose()
		return nil, lead.ErrDeposed
	}
	return r, err
}

// execute executes operations on a condition. It does not wait for etcd when the leadership is over.
func (t *tenure) execute(ctx context.Context, on clientv3.Cmp, ops []clientv3.Op) (*clientv3.TxnResponse, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(t.ctx, cancel)()
	r, err := t.kv.Txn(ctx).If(on).Then(ops...).Commit()
	if t.ctx.Err() != nil {
		return nil, lead.ErrDeposed
	}
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	return r, nil
}

// once executes operations, if this process still leads. Those of a call that has failed are executed before those of
// the next one or Load, or never: a frozen member of etcd may carry out its requests when it wakes.
func (t *tenure) once(ctx context.Context, ops []clientv3.Op) error {
	for {
		fence, err := t.named(ctx)
		if err != nil {
			return err
		}
		r, err := t.execute(ctx, clientv3.Compare(clientv3.ModRevision(t.key), "=", fence), ops)
		if err == nil && r.Succeeded {
			return nil
		}
		t.fencing.Lock()
		if t.fence == fence {
			t.fence = 0
		}
		t.fencing.Unlock()
		if err != nil {
			return err
		}
	}
}

// named returns the fence.
func (t *tenure) named(ctx context.Context) (int64, error) {
	t.fencing.Lock()
	defer t.fencing.Unlock()
	if t.fence == 0 {
		r, err := t.fenced(ctx, clientv3.OpPut(t.key, "", clientv3.WithIgnoreValue(), clientv3.WithIgnoreLease()))
		if err != nil {
			return 0, err
		}
		t.fence = r.Header.Revision
	}
	return t.fence, nil
}

// Append implements lead.Decisions.
func (s *Store) Append(ctx context.Context, term lead.Term, records ...lead.Record) error {
	if err := lead.Validate(records); err != nil {
		return err
	}
	ops := map[string]clientv3.Op{} // a transaction may have a key once
	for _, r := range records {
		key := s.records + r.Key
		if ops[key] = clientv3.OpPut(key, string(r.Value)); r.Value == nil {
			ops[key] = clientv3.OpDelete(key)
		}
	}
	all := make([]clientv3.Op, 0, len(ops))
	for _, op := range ops {
		all = append(all, op)
	}
	t, err := s.leading(term)
	if err == nil {
		err = t.once(ctx, all)
	}
	if err != nil {
		s.failed.Add(1)
	}
	return err
}

// Load implements lead.Decisions. It reads in pages, the later ones at the revision of the first.
func (s *Store) Load(ctx context.Context, term lead.Term) (all []lead.Record, err error) {
	t, err := s.leading(term)
	if err != nil {
		return nil, err
	}
	end, at := clientv3.GetPrefixRangeEnd(s.records), int64(0)
	for from := s.records; ; {
		page := clientv3.OpGet(from, clientv3.WithRange(end), clientv3.WithLimit(pageSize), clientv3.WithRev(at),
			clientv3.WithSort(clientv3.SortByKey, clientv3.SortAscend))
		var r *clientv3.TxnResponse
		err := s.try(ctx, func(ctx context.Context) (err error) {
			if _, err = t.named(ctx); err == nil { // or what is read may change yet
				r, err = t.fenced(ctx, page)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
		found := r.Responses[0].GetResponseRange()
		for _, kv := range found.Kvs {
			key := strings.TrimPrefix(string(kv.Key), s.records)
			all = append(all, lead.Record{Key: key, Value: append([]byte{}, kv.Value...)}) // empty, not nil
		}
		if !found.More {
			return all, nil
		}
		from, at = string(found.Kvs[len(found.Kvs)-1].Key)+"\x00", cmp.Or(at, r.Header.Revision)
	}
}
