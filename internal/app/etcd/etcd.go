// Package etcd is a lead.Store in etcd 3.4 or newer: an election with a lease, and records that only the present leader
// can write.
package etcd

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"dlrover-run/rendezvous/lead"
)

const (
	// ttl is that of a leader's lease in seconds. etcd makes it no shorter than one and a half of its election timeouts:
	// 2 s by default.
	ttl = 2
	// A lease counts as lost when its first renewal is not answered for this and a second more.
	dialTimeout = time.Second
	// A connection that etcd's host does not answer is given up after keepalive and its timeout together. Without that a
	// frozen member keeps its clients. The client's pings must be rarer than etcd's --grpc-keepalive-min-time of 5 s.
	keepalive        = 10 * time.Second
	keepaliveTimeout = 3 * time.Second
	again            = 200 * time.Millisecond // pause before a watch that has failed begins again
	pageSize         = 256                    // records that one request reads
)

// Config names an etcd.
type Config struct {
	Endpoints []string // HOST:PORT, or URLs
	Prefix    string   // of all keys; those of two masters differ
	TLS       *tls.Config
	User      string
	Password  string
}

// Store is a lead.Store. It has no goroutine before its first call.
type Store struct {
	client *clientv3.Client
	prefix string // ends with a slash

	mu     sync.Mutex // guards tenure
	tenure *tenure    // nil: this process does not lead
}

// tenure is a leadership of this process.
type tenure struct {
	term    lead.Term // the revision that created key
	key     string
	session *concurrency.Session
	ctx     context.Context // ends with the leadership
	lose    context.CancelFunc
}

// Open connects when the first call needs it.
func Open(cfg Config) (*Store, error) {
	if len(cfg.Endpoints) == 0 {
		return nil, errors.New("etcd: need an endpoint")
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints: cfg.Endpoints, TLS: cfg.TLS, Username: cfg.User, Password: cfg.Password,
		DialTimeout: dialTimeout, DialKeepAliveTime: keepalive, DialKeepAliveTimeout: keepaliveTimeout,
		Logger:      zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithNoProxy()}, // a proxy of the environment would read the password
	})
	if err != nil {
		return nil, fmt.Errorf("etcd at %s: %w", strings.Join(cfg.Endpoints, ","), err)
	}
	return &Store{client: client, prefix: strings.TrimSuffix(cfg.Prefix, "/") + "/"}, nil
}

// Close ends all calls. A leadership ends with its lease; Resign ends it at once.
func (s *Store) Close() error { return s.client.Close() }

func (s *Store) elections() string { return s.prefix + "leader" }

func (s *Store) records() string { return s.prefix + "decisions/" }

// Campaign implements lead.Leadership.
func (s *Store) Campaign(ctx context.Context, addr string) (lead.Term, <-chan struct{}, error) {
	ctx = clientv3.WithRequireLeader(ctx)
	session, err := s.newSession(ctx)
	if err != nil {
		return 0, nil, err
	}
	value, err := json.Marshal(lead.Leader{Addr: addr})
	if err != nil {
		return 0, nil, err
	}
	election := concurrency.NewElection(session, s.elections())
	if err := election.Campaign(ctx, string(value)); err != nil {
		return 0, nil, errors.Join(fmt.Errorf("etcd: campaign: %w", err), session.Close())
	}
	t := &tenure{term: lead.Term(election.Rev()), key: election.Key(), session: session}
	t.ctx, t.lose = context.WithCancel(context.Background())
	s.mu.Lock()
	s.tenure = t
	s.mu.Unlock()
	go s.guard(t)
	return t.term, t.ctx.Done(), nil
}

// guard notices the end of a leadership: the key is gone, or the lease was not renewed in time. Watch does not return
// while etcd does not answer.
func (s *Store) guard(t *tenure) {
	defer t.lose()
	ctx, cancel := context.WithCancel(s.client.Ctx())
	defer cancel()
	go func() {
		for change := range s.client.Watch(ctx, t.key, clientv3.WithRev(int64(t.term)+1), clientv3.WithFilterPut()) {
			if len(change.Events) > 0 {
				t.lose()
			}
		}
	}()
	<-t.session.Done()
}

// newSession gets a lease, or ends with ctx: the client's own calls have no deadline.
func (s *Store) newSession(ctx context.Context) (*concurrency.Session, error) {
	grant, err := s.client.Grant(ctx, ttl)
	if err != nil {
		return nil, fmt.Errorf("etcd: lease: %w", err)
	}
	session, err := concurrency.NewSession(s.client, concurrency.WithLease(grant.ID), concurrency.WithTTL(ttl))
	if err != nil {
		return nil, fmt.Errorf("etcd: keep the lease: %w", err)
	}
	return session, nil
}

// Watch implements lead.Leadership.
func (s *Store) Watch(ctx context.Context) <-chan lead.Leader {
	leaders := make(chan lead.Leader, 1)
	go func() {
		defer close(leaders)
		var last *lead.Leader
		for ctx.Err() == nil {
			s.follow(ctx, func(l lead.Leader) {
				if last == nil || l != *last {
					lead.Newest(leaders, l)
					last = &l
				}
			})
			select {
			case <-ctx.Done():
			case <-time.After(again):
			}
		}
	}()
	return leaders
}

// follow reports leaders until the watch fails. Its beginning is a read, so that nothing is missed by a compaction.
func (s *Store) follow(ctx context.Context, report func(lead.Leader)) {
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	leader, revision, err := s.leader(ctx)
	if err != nil {
		return
	}
	report(leader)
	changes := s.client.Watch(ctx, s.elections()+"/", clientv3.WithPrefix(), clientv3.WithRev(revision+1))
	for change := range changes {
		if change.Err() != nil {
			return
		}
		if leader, _, err = s.leader(ctx); err != nil {
			return
		}
		report(leader)
	}
}

// leader is the candidate with the oldest key, at a revision of the store.
func (s *Store) leader(ctx context.Context) (l lead.Leader, revision int64, err error) {
	r, err := s.client.Get(ctx, s.elections()+"/", clientv3.WithFirstCreate()...)
	if err != nil {
		return l, 0, err
	}
	if len(r.Kvs) > 0 && json.Unmarshal(r.Kvs[0].Value, &l) == nil {
		l.Term = lead.Term(r.Kvs[0].CreateRevision)
	}
	return l, r.Header.Revision, nil
}

// Depose implements lead.Leadership: it revokes the lease of the leader.
func (s *Store) Depose(ctx context.Context, l lead.Leader) error {
	r, err := s.client.Get(ctx, s.elections()+"/", clientv3.WithFirstCreate()...)
	if err != nil {
		return fmt.Errorf("etcd: depose: %w", err)
	}
	if len(r.Kvs) == 0 || lead.Term(r.Kvs[0].CreateRevision) != l.Term {
		return nil
	}
	_, err = s.client.Revoke(ctx, clientv3.LeaseID(r.Kvs[0].Lease))
	if err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
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
	t.session.Orphan()
	_, err := s.client.Revoke(ctx, t.session.Lease())
	if err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
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

// fenced executes operations if this process still leads. It does not wait for etcd when the leadership is over.
func (s *Store) fenced(ctx context.Context, term lead.Term, ops ...clientv3.Op) (*clientv3.TxnResponse, error) {
	t, err := s.leading(term)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(t.ctx, cancel)()
	leads := clientv3.Compare(clientv3.CreateRevision(t.key), "=", int64(t.term))
	r, err := s.client.Txn(ctx).If(leads).Then(ops...).Commit()
	if t.ctx.Err() != nil {
		return nil, lead.ErrDeposed
	}
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	if !r.Succeeded {
		t.lose()
		return nil, lead.ErrDeposed
	}
	return r, nil
}

// Append implements lead.Decisions.
func (s *Store) Append(ctx context.Context, term lead.Term, records ...lead.Record) error {
	if err := lead.Validate(records); err != nil {
		return err
	}
	ops := map[string]clientv3.Op{} // a transaction may have a key once
	for _, r := range records {
		key := s.records() + r.Key
		if ops[key] = clientv3.OpPut(key, string(r.Value)); r.Value == nil {
			ops[key] = clientv3.OpDelete(key)
		}
	}
	all := make([]clientv3.Op, 0, len(ops))
	for _, op := range ops {
		all = append(all, op)
	}
	_, err := s.fenced(ctx, term, all...)
	return err
}

// Load implements lead.Decisions. It reads in pages, the later ones at the revision of the first.
func (s *Store) Load(ctx context.Context, term lead.Term) (all []lead.Record, err error) {
	end, at := clientv3.GetPrefixRangeEnd(s.records()), int64(0)
	for from := s.records(); ; {
		page := clientv3.OpGet(from, clientv3.WithRange(end), clientv3.WithLimit(pageSize), clientv3.WithRev(at),
			clientv3.WithSort(clientv3.SortByKey, clientv3.SortAscend))
		r, err := s.fenced(ctx, term, page)
		if err != nil {
			return nil, err
		}
		found := r.Responses[0].GetResponseRange()
		for _, kv := range found.Kvs {
			key := strings.TrimPrefix(string(kv.Key), s.records())
			all = append(all, lead.Record{Key: key, Value: append([]byte{}, kv.Value...)}) // empty, not nil
		}
		if !found.More {
			return all, nil
		}
		from, at = string(found.Kvs[len(found.Kvs)-1].Key)+"\x00", cmp.Or(at, r.Header.Revision)
	}
}
