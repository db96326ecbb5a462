package checkpointd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/retry"
)

// commit makes the step visible together with the writers of the other shards. The writer of shard 0 leads.
func (d *Daemon) commit(ctx context.Context, j *save, entry commit.Entry) error {
	s, c := saveOf(j), d.coordinatorOf(j.meta)
	post := func(ctx context.Context, ph coordinator.Phase) ([]commit.Entry, error) {
		return d.post(ctx, c, reportOf(j, ph, entry))
	}
	all, err := d.awaitOthers(ctx, j, post)
	if err != nil {
		return err
	}
	if entry.Shard == 0 {
		if err := d.retryStorage(ctx, j, func() error { return d.begin(s, all) }); err != nil {
			return err
		}
		if _, err := post(ctx, coordinator.Intent); err != nil {
			return err
		}
	}
	if err := d.retryStorage(ctx, j, func() error { return d.place(s, entry) }); err != nil {
		return err
	}
	if _, err := post(ctx, coordinator.Placed); err != nil || entry.Shard != 0 {
		return err
	}
	if err := d.retryStorage(ctx, j, func() error { return d.publish(ctx, s, all) }); err != nil {
		return err
	}
	_, err = post(ctx, coordinator.Published)
	return err
}

// post posts a report, again when the coordinator has to get other saves out of the way first.
func (d *Daemon) post(ctx context.Context, c coordinator.Coordinator, r coordinator.Report) ([]commit.Entry, error) {
	for {
		all, err := c.Post(ctx, r)
		if !errors.Is(err, coordinator.ErrLimit) || !retry.Sleep(ctx, retryFirst) {
			return all, err
		}
	}
}

// awaitOthers waits for the other shards, or until j is dropped and may be.
func (d *Daemon) awaitOthers(ctx context.Context, j *save,
	post func(context.Context, coordinator.Phase) ([]commit.Entry, error)) ([]commit.Entry, error) {
	waits, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(j.waits, func() { cancel(context.Cause(j.waits)) })
	defer stop()
	all, err := post(waits, coordinator.Prepared)
	if err == nil || waits.Err() == nil || ctx.Err() != nil {
		return all, err
	}
	if _, err := post(ctx, coordinator.Failed); errors.Is(err, coordinator.ErrDecided) {
		return post(ctx, coordinator.Prepared)
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
func (d *Daemon) begin(s commit.Save, all []commit.Entry) error {
	err := d.store.Intent(s, all)
	if errors.Is(err, fs.ErrNotExist) && slices.ContainsFunc(all,
		func(e commit.Entry) bool { return d.store.Gone(s, e) }) {
		err = fmt.Errorf("%w: %w", errLost, err)
	}
	return err
}

func (d *Daemon) place(s commit.Save, e commit.Entry) error {
	if err := d.store.Place(s, e); err != nil {
		return err
	}
	return d.store.Placed(s, e.Shard)
}

// publish is the leader's last part on storage.
func (d *Daemon) publish(ctx context.Context, s commit.Save, all []commit.Entry) error {
	defer d.lockDirectory(s.Dir)()
	m, err := d.store.Publish(s, all)
	if err != nil {
		return err
	}
	var bytes int64
	for _, f := range m.Files {
		bytes += f.Size
	}
	d.log.Info("checkpoint committed", "step", s.Step, "dir", s.Dir, "files", len(m.Files), "bytes", bytes,
		"after", m.Committed.Sub(s.Saved).Round(time.Millisecond).String())
	removed, err := d.store.Retain(ctx, s.Dir)
	if err != nil {
		d.log.Warn("cannot remove old checkpoints", "dir", s.Dir, "err", err)
	}
	if len(removed) > 0 {
		d.log.Debug("removed old checkpoints", "dir", s.Dir, "steps", removed)
	}
	return nil
}

// coordinatorOf is where the writers of a save meet: in this process when they are all here.
func (d *Daemon) coordinatorOf(m shm.Meta) coordinator.Coordinator {
	switch {
	case m.Shards == 1 || m.WorldSize == m.LocalWorldSize:
		return d.local
	case d.cfg.Remote != nil:
		return d.cfg.Remote
	}
	return coordinator.Files(d.cfg.FS)
}

// shared is the coordinator of all nodes.
func (d *Daemon) shared() coordinator.Coordinator {
	if d.cfg.Remote != nil {
		return d.cfg.Remote
	}
	return coordinator.Files(d.cfg.FS)
}
