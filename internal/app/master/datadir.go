package master

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/urfave/cli/v2"

	"dlrover-run/internal/app/marks"
	"dlrover-run/rendezvous/lead"
	"dlrover-run/rendezvous/lead/journal"
)

// alone returns the tenure of the only master, in the journal of --data-dir; nil without that.
func (d *daemon) alone(c *cli.Context) (*tenure, error) {
	dir := c.String("data-dir")
	if dir == "" {
		return nil, nil
	}
	t, err := d.takeData(c.Context, dir)
	if err != nil {
		return nil, fmt.Errorf("data directory %s: %w", dir, err)
	}
	return t, nil
}

func (d *daemon) takeData(ctx context.Context, dir string) (*tenure, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("%w; give one that can be made, or is there", err)
	}
	j, err := journal.Open(dir, d.log)
	if err != nil {
		return nil, err
	}
	term, err := j.TryCampaign()
	switch {
	case errors.Is(err, journal.ErrTaken):
		return nil, errors.New("another dlrover-master uses it; end that one, or give this one a directory of its own")
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return nil, fmt.Errorf("%w; give one that this user may write to", err)
	case err != nil:
		return nil, err
	}
	d.data = j
	return &tenure{decisions: j, term: term}, marks.Import(ctx, dir, j, term, d.log)
}

// track has failures of a store be said and counted. The first write makes the term durable.
func (d *daemon) track(ctx context.Context, t *tenure) {
	s := &tracked{Decisions: t.decisions, log: d.log}
	t.decisions = s
	d.metrics.watchKept(s)
	if d.data != nil {
		_ = s.Append(ctx, t.term) // it has been said
	}
}

// leaveData lets another master have the directory.
func (d *daemon) leaveData() {
	if d.data != nil {
		_ = d.data.Resign(context.Background()) // the process ends, and its lock with it
	}
}

// ready reports why something cannot be kept. An elected master serves while its store is away: no other one could.
func (d *daemon) ready(t *tenure) error {
	if t != nil && t.election != nil {
		return nil
	}
	if d.marks != nil {
		if err := d.marks.Ready(); err != nil {
			return err
		}
	}
	if d.data != nil {
		return d.data.Probe()
	}
	return nil
}

// tracked is a store that says when it begins to fail, and when that is over.
type tracked struct {
	lead.Decisions
	log    *slog.Logger
	failed atomic.Int64 // writes

	mu      sync.Mutex
	failing bool
}

// Append implements lead.Decisions.
func (s *tracked) Append(ctx context.Context, term lead.Term, records ...lead.Record) error {
	err := s.Decisions.Append(ctx, term, records...)
	if errors.Is(err, lead.ErrDeposed) {
		return err
	}
	if err != nil {
		s.failed.Add(1)
	}
	s.mu.Lock()
	before := s.failing
	s.failing = err != nil
	s.mu.Unlock()
	switch {
	case err != nil && !before:
		s.log.Warn("what is decided cannot be kept, and would be lost with this process; it goes on, and tries again",
			"err", err)
	case err == nil && before:
		s.log.Info("what is decided is kept again")
	}
	return err
}

// Pause implements lead.Slow.
func (s *tracked) Pause() time.Duration {
	if slow, is := s.Decisions.(lead.Slow); is {
		return slow.Pause()
	}
	return 0
}

// watchKept adds the failures of a store.
func (m *metrics) watchKept(s *tracked) {
	m.reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "dlrover_store_failures_total", Help: "Writes to --data-dir or etcd that have failed.",
	}, func() float64 { return float64(s.failed.Load()) }))
}
