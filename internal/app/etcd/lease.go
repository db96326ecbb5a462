package etcd

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"dlrover-run/rendezvous/lead"
)

const (
	// ttl is that of a candidate's lease in seconds. etcd makes it no shorter than one and a half of its election
	// timeouts: 2 s by default.
	ttl = 2
	// A lease is renewed this often, by a request of its own that ends after renewTimeout: the client's stream of renewals
	// stays with a member of etcd that is frozen, while the next request goes to another one.
	renewal      = 250 * time.Millisecond
	renewTimeout = 600 * time.Millisecond
	// A leadership counts as lost this long before its lease can be over.
	margin = 100 * time.Millisecond
	tries  = 3 // of other requests, of which each has twice as much time as the one before
)

// lease is that of a candidate.
type lease struct {
	id    clientv3.LeaseID
	lasts time.Duration   // without a renewal
	ctx   context.Context // ends when etcd says that the lease is gone, or with the client
	end   context.CancelFunc

	mu      sync.Mutex
	renewed time.Time // when the last renewal was sent that has been answered
}

// grant gets a lease, which is kept until its end is called.
func (s *Store) grant(ctx context.Context) (*lease, error) {
	l := &lease{}
	err := s.try(ctx, func(ctx context.Context) error {
		l.renewed = time.Now()
		grant, err := s.client.Grant(ctx, ttl)
		if err == nil {
			l.id, l.lasts = grant.ID, time.Duration(grant.TTL)*time.Second-margin
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("etcd: lease: %w", err)
	}
	l.ctx, l.end = context.WithCancel(s.client.Ctx())
	go s.keep(l)
	return l, nil
}

// keep renews a lease until its end.
func (s *Store) keep(l *lease) {
	defer l.end()
	turn := time.NewTicker(renewal)
	defer turn.Stop()
	for {
		select {
		case <-l.ctx.Done():
			return
		case <-turn.C:
		}
		sent := time.Now()
		ctx, cancel := context.WithTimeout(l.ctx, renewTimeout)
		_, err := s.client.KeepAliveOnce(ctx, l.id)
		cancel()
		switch {
		case err == nil:
			l.mu.Lock()
			l.renewed = sent
			l.mu.Unlock()
		case errors.Is(err, rpctypes.ErrLeaseNotFound):
			return
		case l.ctx.Err() == nil:
			s.failed.Add(1)
		}
	}
}

// silence is how long etcd has not answered.
func (l *lease) silence() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Since(l.renewed)
}

// release ends a lease at once, if etcd answers.
func (s *Store) release(ctx context.Context, l *lease) error {
	l.end()
	return s.revoke(ctx, l.id)
}

func (s *Store) revoke(ctx context.Context, id clientv3.LeaseID) error {
	return s.try(ctx, func(ctx context.Context) error {
		if _, err := s.client.Revoke(ctx, id); !errors.Is(err, rpctypes.ErrLeaseNotFound) {
			return err
		}
		return nil
	})
}

// try sends a request that may be sent again, so that one frozen member of etcd does not fail it.
func (s *Store) try(ctx context.Context, f func(context.Context) error) (err error) {
	for i := range tries {
		one, cancel := context.WithTimeout(ctx, renewTimeout<<i)
		err = f(one)
		cancel()
		if err == nil || errors.Is(err, lead.ErrDeposed) || ctx.Err() != nil {
			return err
		}
		s.failed.Add(1)
	}
	return err
}
