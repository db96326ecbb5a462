package etcd

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"

	"dlrover-run/internal/retry"
)

// seatSpread is the longest pause before a process tries to take a seat that has become free, so that many do not try
// at once. The other seats are taken meanwhile.
const seatSpread = time.Second

// enter gets the lease with which this process campaigns. A process without a seat has none, and only watches.
func (s *Store) enter(ctx context.Context) (*lease, error) {
	if s.seats == 0 {
		return s.grant(ctx)
	}
	for {
		free, revision, err := s.freeSeats(ctx)
		if err != nil {
			return nil, fmt.Errorf("etcd: seats: %w", err)
		}
		if len(free) == 0 {
			if err := s.awaitSeat(ctx, revision+1); err != nil {
				return nil, err
			}
			continue
		}
		l, err := s.sit(ctx, free[rand.IntN(len(free))])
		if l != nil || err != nil {
			return l, err
		}
	}
}

// Seated is closed when this process has a seat for the first time.
func (s *Store) Seated() <-chan struct{} { return s.seated }

// Reach returns when etcd has answered.
func (s *Store) Reach(ctx context.Context) error {
	_, err := s.client.Get(ctx, s.seatKeys, clientv3.WithCountOnly())
	return err
}

// Refused reports whether etcd has answered that this user may not do that.
func Refused(err error) bool {
	refusal, ok := errors.AsType[rpctypes.EtcdError](err)
	return ok && slices.Contains([]codes.Code{codes.InvalidArgument, codes.PermissionDenied, codes.Unauthenticated},
		refusal.Code())
}

// freeSeats are the keys of seats that nobody has, at a revision of the store.
func (s *Store) freeSeats(ctx context.Context) (free []string, revision int64, err error) {
	r, err := s.client.Get(ctx, s.seatKeys, clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return nil, 0, err
	}
	taken := map[string]bool{}
	for _, kv := range r.Kvs {
		taken[string(kv.Key)] = true
	}
	for i := range s.seats {
		if key := s.seatKeys + strconv.Itoa(i); !taken[key] {
			free = append(free, key)
		}
	}
	return free, r.Header.Revision, nil
}

// sit takes a seat for as long as its lease lasts. It returns nil if another process was faster.
func (s *Store) sit(ctx context.Context, key string) (*lease, error) {
	l, err := s.grant(ctx)
	if err != nil {
		return nil, err
	}
	r, err := s.client.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
		Then(clientv3.OpPut(key, "", clientv3.WithLease(l.id))).Commit()
	if err == nil && r.Succeeded {
		s.sat.Do(func() { close(s.seated) })
		return l, nil
	}
	_ = s.release(ctx, l) // else its lease ends it
	if err != nil {
		return nil, fmt.Errorf("etcd: seat: %w", err)
	}
	return nil, nil
}

// awaitSeat waits until a seat may be free.
func (s *Store) awaitSeat(ctx context.Context, revision int64) error {
	watching, cancel := context.WithCancel(ctx)
	defer cancel()
	<-s.client.Watch(watching, s.seatKeys, clientv3.WithPrefix(), clientv3.WithRev(revision), clientv3.WithFilterPut())
	select {
	case <-ctx.Done():
	case <-time.After(again + rand.N(seatSpread)):
	}
	return ctx.Err()
}

// Agree returns the value of a key that all processes share: the first one sets it. The key lasts for life after the
// last Agree.
func (s *Store) Agree(ctx context.Context, key, value string, life time.Duration) (string, error) {
	key = s.prefix + key
	for {
		r, err := s.client.Get(ctx, key)
		if err != nil {
			return "", fmt.Errorf("etcd: %w", err)
		}
		if len(r.Kvs) == 0 {
			if err := s.propose(ctx, key, value, life); err != nil {
				return "", err
			}
			continue
		}
		if id := clientv3.LeaseID(r.Kvs[0].Lease); id != clientv3.NoLease { // else somebody has set it by hand
			_, err = s.client.KeepAliveOnce(ctx, id)
		}
		switch {
		case err == nil:
			return string(r.Kvs[0].Value), nil
		case !errors.Is(err, rpctypes.ErrLeaseNotFound) || !retry.Sleep(ctx, again): // else it has just expired
			return "", fmt.Errorf("etcd: lease: %w", err)
		}
	}
}

// propose sets the key unless another process has.
func (s *Store) propose(ctx context.Context, key, value string, life time.Duration) error {
	lease, err := s.client.Grant(ctx, int64(life/time.Second))
	if err != nil {
		return fmt.Errorf("etcd: lease: %w", err)
	}
	r, err := s.client.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
		Then(clientv3.OpPut(key, value, clientv3.WithLease(lease.ID))).Commit()
	if err != nil {
		return fmt.Errorf("etcd: %w", err)
	}
	if !r.Succeeded {
		_, err = s.client.Revoke(ctx, lease.ID)
	}
	return err
}
