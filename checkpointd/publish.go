package checkpointd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"time"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/retry"
)

// committer makes steps visible.
type committer struct {
	log     *slog.Logger
	storage *storage
	retries *retries
	locks   *dirLocks
	coords  coordinators
	epochs  *epochs
}

// commit makes the step visible together with the writers of the other shards. The writer of shard 0 leads.
func (c *committer) commit(ctx context.Context, j *save, entry commit.Entry) error {
	s, meet := saveOf(j), c.coords.forSave(j.meta)
	report := func(ctx context.Context, ph coordinator.Phase) ([]commit.Entry, error) {
		return post(ctx, meet, reportOf(j, ph, entry))
	}
	all, err := awaitOthers(ctx, j, report)
	if err != nil {
		return err
	}
	if entry.Shard == 0 {
		if err := c.retries.onStorage(ctx, j, func() error { return c.begin(c.asOfNow(j), all) }); err != nil {
			return err
		}
		if _, err := report(ctx, coordinator.Intent); err != nil {
			return err
		}
	}
	if err := c.retries.onStorage(ctx, j, func() error { return c.place(s, entry) }); err != nil {
		return err
	}
	if _, err := report(ctx, coordinator.Placed); err != nil || entry.Shard != 0 {
		return err
	}
	if err := c.retries.onStorage(ctx, j, func() error { return c.publish(ctx, c.asOfNow(j), all) }); err != nil {
		return err
	}
	_, err = report(ctx, coordinator.Published)
	return err
}

// asOfNow returns j for a part of its commit that begins now: workers that were started since may have overtaken it.
// Their epoch does not show that if it is of a later term, as after a master was started again.
func (c *committer) asOfNow(j *save) commit.Save {
	s := saveOf(j)
	s.Late = s.Late || c.epochs.hasEnded(j.meta.Epoch)
	return s
}

// post posts a report, again when the coordinator has to get other saves out of the way first.
func post(ctx context.Context, c coordinator.Coordinator, r coordinator.Report) ([]commit.Entry, error) {
	for {
		all, err := c.Post(ctx, r)
		if !errors.Is(err, coordinator.ErrLimit) || !retry.Sleep(ctx, retryFirst) {
			return all, err
		}
	}
}

// awaitOthers waits for the other shards, or until j is dropped and may be.
func awaitOthers(ctx context.Context, j *save,
	report func(context.Context, coordinator.Phase) ([]commit.Entry, error)) ([]commit.Entry, error) {
	waits, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(j.waits, func() { cancel(context.Cause(j.waits)) })
	defer stop()
	all, err := report(waits, coordinator.Prepared)
	if err == nil || waits.Err() == nil || ctx.Err() != nil {
		return all, err
	}
	if _, err := report(ctx, coordinator.Failed); errors.Is(err, coordinator.ErrDecided) {
		return report(ctx, coordinator.Prepared)
	}
	return nil, context.Cause(waits)
}

func reportOf(j *save, ph coordinator.Phase, entry commit.Entry) coordinator.Report {
	m := j.meta
	r := coordinator.Report{Save: coordinator.Save{ID: m.Save, Step: m.Step, Shards: m.Shards, Dir: m.Dir}, Phase: ph,
		Shards: []int{m.Shard}}
	if ph == coordinator.Prepared {
		r.Entries = []commit.Entry{entry}
	}
	return r
}

// begin writes the intent.
func (c *committer) begin(s commit.Save, all []commit.Entry) error {
	err := c.storage.store.Intent(s, all)
	if errors.Is(err, fs.ErrNotExist) && slices.ContainsFunc(all,
		func(e commit.Entry) bool { return c.storage.store.Gone(s, e) }) {
		err = fmt.Errorf("%w: %w", errLost, err)
	}
	return err
}

func (c *committer) place(s commit.Save, e commit.Entry) error {
	if err := c.storage.store.Place(s, e); err != nil {
		return err
	}
	return c.storage.store.Placed(s, e.Shard)
}

// publish is the leader's last part on storage.
func (c *committer) publish(ctx context.Context, s commit.Save, all []commit.Entry) error {
	defer c.locks.lock(s.Dir)()
	m, err := c.storage.store.Publish(s, all)
	if err != nil {
		return err
	}
	if m.ID != s.ID {
		c.log.Warn("another save of the step is in the place of this checkpoint: does another job save to this directory?",
			"step", s.Step, "dir", s.Dir)
	}
	var bytes int64
	for _, f := range m.Files {
		bytes += f.Size
	}
	c.log.Info("checkpoint committed", "step", s.Step, "dir", s.Dir, "files", len(m.Files), "bytes", bytes,
		"after", m.Committed.Sub(s.Saved).Round(time.Millisecond).String())
	removed, err := c.storage.store.Retain(ctx, s.Dir)
	if err != nil {
		c.log.Warn("cannot remove old checkpoints", "dir", s.Dir, "err", err)
	}
	if len(removed) > 0 {
		c.log.Debug("removed old checkpoints", "dir", s.Dir, "steps", removed)
	}
	return nil
}

// coordinators are the places where the writers of a save can meet.
type coordinators struct {
	local  coordinator.Coordinator // in this process
	shared coordinator.Coordinator // of all nodes
}

// forSave is local for a save whose writers are all here.
func (c coordinators) forSave(m shm.Meta) coordinator.Coordinator {
	if m.Shards == 1 || m.WorldSize == m.LocalWorldSize {
		return c.local
	}
	return c.shared
}
