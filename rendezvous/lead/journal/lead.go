package journal

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/openfile"
	"dlrover-run/rendezvous/lead"
)

const (
	lockFile   = "lock"
	leaderFile = "leader"
	poll       = 100 * time.Millisecond
	maxLeader  = 4 << 10 // bytes of the leader's file
)

// Journal is a lead.Store in a directory. The kernel gives the lock of a dead process to the next one, so that a
// leadership never expires by time.
type Journal struct {
	dir directory
	log *slog.Logger

	mu    sync.Mutex // guards the rest
	store *store     // nil: this process does not lead
	lock  *os.File
	lost  chan struct{}
}

// Open uses a directory, which it makes if need be. The parent must exist.
func Open(dir string, log *slog.Logger) (*Journal, error) {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	return &Journal{dir: directory{dir}, log: log}, nil
}

// Campaign implements lead.Leadership. lost is closed by Resign alone.
func (j *Journal) Campaign(ctx context.Context, addr string) (lead.Term, <-chan struct{}, error) {
	lock, err := j.await(ctx)
	if err != nil {
		return 0, nil, err
	}
	s, err := openStore(j.dir, j.log)
	if err == nil {
		err = s.commit(batch{term: s.term + 1})
	}
	if err == nil {
		err = j.announce(lead.Leader{Term: s.term, Addr: addr})
	}
	if err != nil {
		return 0, nil, errors.Join(fmt.Errorf("journal in %s: %w", j.dir.path, err), lock.Close())
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.store, j.lock, j.lost = s, lock, make(chan struct{})
	return s.term, j.lost, nil
}

// await takes the lock.
func (j *Journal) await(ctx context.Context) (*os.File, error) {
	f, err := j.openLock()
	if err != nil {
		return nil, err
	}
	for {
		err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart})
		switch {
		case err == nil:
			return f, nil
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EINTR):
			return nil, errors.Join(fmt.Errorf("lock %s: %w", f.Name(), err), f.Close())
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), f.Close())
		case <-time.After(poll):
		}
	}
}

func (j *Journal) openLock() (*os.File, error) {
	return openfile.Open(filepath.Join(j.dir.path, lockFile), os.O_CREATE|os.O_RDWR, 0o600)
}

func (j *Journal) announce(l lead.Leader) error {
	data, err := json.Marshal(l)
	if err != nil {
		return err
	}
	return openfile.Replace(filepath.Join(j.dir.path, leaderFile), data, 0o600)
}

// Watch implements lead.Leadership. It looks ten times a second.
func (j *Journal) Watch(ctx context.Context) <-chan lead.Leader {
	leaders := make(chan lead.Leader, 1)
	go func() {
		defer close(leaders)
		for last := (lead.Leader{Term: lead.Term(1<<64 - 1)}); ; {
			if l := j.leader(); l != last {
				lead.Newest(leaders, l)
				last = l
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(poll):
			}
		}
	}()
	return leaders
}

// leader is the process that holds the lock. One that has just taken it counts from its announcement on.
func (j *Journal) leader() (l lead.Leader) {
	data, err := openfile.Read(filepath.Join(j.dir.path, leaderFile), maxLeader)
	if err != nil || json.Unmarshal(data, &l) != nil || !j.locked() {
		return lead.Leader{}
	}
	return l
}

func (j *Journal) locked() bool {
	f, err := j.openLock()
	if err != nil {
		return false
	}
	defer f.Close()
	asked := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	return unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &asked) == nil && asked.Type != unix.F_UNLCK
}

// Depose implements lead.Leadership. The lock of a dead process is free already, and that of one that lives cannot be
// taken.
func (j *Journal) Depose(context.Context, lead.Leader) error { return nil }

// Resign implements lead.Leadership.
func (j *Journal) Resign(context.Context) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.store == nil {
		return nil
	}
	err := errors.Join(os.Remove(filepath.Join(j.dir.path, leaderFile)), j.store.close(), j.lock.Close())
	close(j.lost)
	j.store, j.lock = nil, nil
	return err
}

// Append implements lead.Decisions. It blocks while the disk does, whatever ctx says.
func (j *Journal) Append(_ context.Context, term lead.Term, records ...lead.Record) error {
	s := j.leading()
	if s == nil {
		return lead.ErrDeposed
	}
	return s.append(batch{term: term, records: slices.Clone(records)})
}

// Load implements lead.Decisions.
func (j *Journal) Load(_ context.Context, term lead.Term) ([]lead.Record, error) {
	s := j.leading()
	if s == nil {
		return nil, lead.ErrDeposed
	}
	return s.all(term)
}

func (j *Journal) leading() *store {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.store
}

// all returns the records.
func (s *store) all(term lead.Term) ([]lead.Record, error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	if term != s.term {
		return nil, lead.ErrDeposed
	}
	return s.records(), nil
}

func (s *store) close() error {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.term++ // an Append that comes late is refused
	if s.seg.file == nil {
		return nil
	}
	return s.seg.file.close()
}
