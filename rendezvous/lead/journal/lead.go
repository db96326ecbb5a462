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
	probeFile  = "probe"
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

	probing sync.Mutex // guards the rest
	probed  time.Time
	bad     error
}

// ErrTaken is the error of TryCampaign while another process leads.
var ErrTaken = errors.New("another process uses the directory")

// Open uses a directory, which it makes if need be. The parent must exist.
func Open(dir string, log *slog.Logger) (*Journal, error) {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	return &Journal{dir: directory{dir}, log: log}, nil
}

// Campaign implements lead.Leadership. lost is closed by Resign alone.
func (j *Journal) Campaign(ctx context.Context, addr string) (lead.Term, <-chan struct{}, error) {
	for {
		term, err := j.TryCampaign()
		if err == nil {
			if err = j.begin(term, addr); err != nil {
				return 0, nil, errors.Join(err, j.Resign(ctx))
			}
			return term, j.lost, nil
		}
		if !errors.Is(err, ErrTaken) {
			return 0, nil, err
		}
		select {
		case <-ctx.Done():
			return 0, nil, ctx.Err()
		case <-time.After(poll):
		}
	}
}

// begin makes a term durable, and announces its leader.
func (j *Journal) begin(term lead.Term, addr string) error {
	err := j.leading().append(batch{term: term})
	if err == nil {
		err = j.announce(lead.Leader{Term: term, Addr: addr})
	}
	if err != nil {
		return fmt.Errorf("journal in %s: %w", j.dir.path, err)
	}
	return nil
}

// TryCampaign makes this process lead, or returns ErrTaken. It writes nothing: the first Append makes the term durable,
// so that a full disk keeps nobody from leading. Watchers see no leader.
func (j *Journal) TryCampaign() (lead.Term, error) {
	lock, err := j.take()
	if err != nil {
		return 0, err
	}
	s, err := openStore(j.dir, j.log)
	if err != nil {
		return 0, errors.Join(fmt.Errorf("journal in %s: %w", j.dir.path, err), lock.Close())
	}
	s.term++
	j.mu.Lock()
	defer j.mu.Unlock()
	j.store, j.lock, j.lost = s, lock, make(chan struct{})
	return s.term, nil
}

// take takes the lock.
func (j *Journal) take() (*os.File, error) {
	f, err := j.openLock()
	if err != nil {
		return nil, err
	}
	err = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart})
	switch {
	case err == nil:
		return f, nil
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EACCES), errors.Is(err, unix.EINTR):
		err = ErrTaken
	default:
		err = fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return nil, errors.Join(err, f.Close())
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
	err := os.Remove(filepath.Join(j.dir.path, leaderFile))
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	err = errors.Join(err, j.store.close(), j.lock.Close())
	close(j.lost)
	j.store, j.lock = nil, nil
	return err
}

// probeEvery bounds how often the directory is tried.
const probeEvery = 2 * time.Second

// Probe reports why the directory cannot be written to.
func (j *Journal) Probe() error {
	j.probing.Lock()
	defer j.probing.Unlock()
	if now := time.Now(); j.probed.IsZero() || now.Sub(j.probed) >= probeEvery {
		j.probed = now
		f, err := j.dir.create(probeFile, []byte("ok\n"))
		if err == nil {
			err = errors.Join(f.close(), j.dir.remove(probeFile))
		}
		j.bad = err
	}
	return j.bad
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
