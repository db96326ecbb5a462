package checkpointd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"syscall"
	"time"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/fsx"
	"dlrover-run/checkpointd/retry"
	"dlrover-run/checkpointd/shm"
)

// phase is how far this node is with its shard of a save.
type phase string

const (
	waiting    phase = "waiting"  // for a writer
	writing    phase = "writing"  // to temporary files
	prepared   phase = "prepared" // durable here; the other shards are waited for
	committed  phase = "committed"
	superseded phase = "superseded" // overwritten by a newer save before it was written
	failed     phase = "failed"
)

func (p phase) over() bool { return p == committed || p == superseded || p == failed }

// save is one shard of a save on its way to the disk.
type save struct {
	seg   *segment // nil: it holds a newer save by now
	seq   uint64
	saved time.Time
	meta  shm.Meta
	begun time.Time
	ctx   context.Context         // of all that is done for it
	quit  context.CancelCauseFunc // ends ctx
	waits context.Context         // ends when it is of no use to wait for the other shards
	give  context.CancelCauseFunc // ends waits

	entry   *commit.Entry // what is durable; nil: nothing yet
	resumed bool          // entry is an earlier daemon's work

	// Guarded by Daemon.mu.
	phase       phase
	err         error
	second      bool // a breakpoint's: it was given up before
	said        bool // why it was given up
	bytes, done int64
	ground      ground
	stuck       bool // has waited for other shards for long: nobody should wait for it
}

var (
	errSuperseded = errors.New("overwritten by a newer save before it could be written")
	errLost       = errors.New("somebody has removed what was written")
	errHalf       = errors.New("a worker of this node has ended without its shard, or has saved over it")
)

// start puts a shard on its way to the disk, unless it is there or on the way, or was given up.
func (d *Daemon) start(s *segment, h shm.Header, m shm.Meta) *save {
	return d.launch(newSave(s, h.Seq, h.Saved, m))
}

func newSave(s *segment, seq uint64, saved time.Time, m shm.Meta) *save {
	j := &save{seg: s, seq: seq, saved: saved, meta: m, begun: time.Now(), phase: waiting}
	for _, f := range m.Files {
		j.bytes += f.Len
	}
	return j
}

// launch runs j, unless the same shard was launched before: a save that was given up stays given up, for all its shards
// alike, but for the second attempt that a breakpoint may make.
func (d *Daemon) launch(j *save) *save {
	d.mu.Lock()
	defer d.mu.Unlock()
	if o := d.latestLocked(j.meta.Save, j.meta.Shard); o != nil && (!o.gaveUp() || !j.second || o.second) {
		return o
	}
	j.ctx, j.quit = context.WithCancelCause(d.ctx)
	j.waits, j.give = context.WithCancelCause(j.ctx)
	d.saves = append(d.saves, j)
	d.trimLocked()
	d.changedLocked()
	d.wg.Go(func() { d.run(j) })
	return j
}

// latestLocked is the last attempt at a shard of a save, nil if there was none.
func (d *Daemon) latestLocked(id string, shard int) *save {
	for _, j := range slices.Backward(d.saves) {
		if j.meta.Save == id && j.meta.Shard == shard {
			return j
		}
	}
	return nil
}

// gaveUp reports whether j is over and not on disk. The lock is held.
func (j *save) gaveUp() bool { return j.phase == failed || j.phase == superseded }

// drop ends a save that will not be complete any more. If the leader may have decided
// otherwise already, it has a while to go on.
func (d *Daemon) drop(j *save, why error) {
	if j.waits.Err() == nil {
		j.give(why)
		time.AfterFunc(dropGrace, func() { j.quit(why) })
	}
}

// trimLocked forgets the oldest saves that are over.
func (d *Daemon) trimLocked() {
	for i := 0; len(d.saves) > maxRemembered && i < len(d.saves); {
		if d.saves[i].phase.over() {
			d.saves = append(d.saves[:i], d.saves[i+1:]...)
			continue
		}
		i++
	}
}

// run takes one shard from memory to a committed step.
func (d *Daemon) run(j *save) {
	defer j.quit(nil)
	ctx, cancel := context.WithTimeoutCause(j.ctx, timeoutOf(j.meta), fmt.Errorf("not committed within its save timeout of %s", timeoutOf(j.meta)))
	defer cancel()
	stop := d.progress(j)
	defer stop()
	if time.Since(j.saved) > lookFirst && d.outdated(j) { // an earlier daemon should have written it
		d.giveUp(j, errOutdated)
		d.finish(j, failed, errOutdated)
		return
	}
	if d.already(j) { // an earlier daemon committed it, and may not have said so
		if j.meta.Shard == 0 {
			_, _ = d.coordinatorOf(j.meta).Post(ctx, reportOf(j, coordinator.Published, commit.Entry{}))
		}
		d.finish(j, committed, nil)
		return
	}
	err := d.flush(ctx, j)
	if j.seg != nil && d.gone(ctx, j, err) {
		j.entry, j.resumed = nil, false
		err = d.flush(ctx, j)
	}
	switch {
	case d.ctx.Err() != nil && err != nil: // the next daemon goes on
	case err == nil, errors.Is(err, coordinator.ErrCommitted), d.already(j):
		d.finish(j, committed, nil)
	case errors.Is(err, errSuperseded), errors.Is(err, commit.ErrSuperseded):
		d.giveUp(j, err)
		d.finish(j, superseded, err)
	default:
		if cause := context.Cause(ctx); cause != nil && ctx.Err() != nil {
			err = fmt.Errorf("%w; last: %w", cause, err)
		}
		d.giveUp(j, err)
		d.finish(j, failed, err)
	}
}

// gone reports whether somebody has removed what was written, by an earlier daemon perhaps.
// Memory may still have it.
func (d *Daemon) gone(ctx context.Context, j *save, err error) bool {
	if j.entry == nil || !errors.Is(err, fs.ErrNotExist) {
		return false
	}
	gone, err := bounded(ctx, func() (bool, error) { return d.store.Gone(saveOf(j), *j.entry) || d.deleted(j), nil })
	return gone && err == nil
}

// flush makes the shard durable, lets its segment go, and commits it.
func (d *Daemon) flush(ctx context.Context, j *save) error {
	if j.entry == nil {
		entry, err := d.prepare(ctx, j)
		if err != nil {
			return err
		}
		if err := d.keepPrepared(j, entry); err != nil {
			d.log.Debug("a segment stays in use until its save is committed", "err", err)
		} else {
			j.seg.seg.Settle(j.seq)
		}
		j.entry = &entry
	}
	d.move(j, prepared)
	defer d.look(j)()
	return d.commit(ctx, j, *j.entry)
}

var (
	errElsewhere = errors.New("another daemon has committed it")
	errOutdated  = errors.New("workers that were started later have saved a newer step")
)

// look ends a wait for other shards when storage shows that it is of no use: others may
// have completed the save, or gone on without it, and be dead.
func (d *Daemon) look(j *save) (stop func()) {
	ctx, cancel := context.WithCancel(j.ctx)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		for pause := (retry.Backoff{First: lookFirst, Most: lookMost}); pause.Wait(ctx); {
			d.lookOnce(j)
		}
	}()
	return func() { cancel(); <-gone }
}

func (d *Daemon) lookOnce(j *save) {
	m, ok := d.committedAt(j.meta.Dir, j.meta.Step)
	if ok && m.ID == j.meta.Save {
		j.quit(errElsewhere)
	}
	if d.outdated(j) {
		d.drop(j, errOutdated)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !j.stuck && time.Since(j.begun) > agreePatience {
		j.stuck = true
		d.changedLocked()
	}
}

// outdated reports whether workers that were started later have gone on from another
// state, or have saved the same step.
func (d *Daemon) outdated(j *save) bool {
	later := func(m commit.Manifest) bool { return m.Epoch != j.meta.Epoch && m.Saved.After(j.saved) }
	if m, ok := d.tracked(j.meta.Dir); ok && later(m) {
		return true
	}
	m, ok := d.committedAt(j.meta.Dir, j.meta.Step)
	return ok && m.ID != j.meta.Save && later(m)
}

func timeoutOf(m shm.Meta) time.Duration {
	if m.TimeoutS <= 0 {
		return defaultSave
	}
	return time.Duration(m.TimeoutS) * time.Second
}

// already reports whether an earlier daemon committed this very save.
func (d *Daemon) already(j *save) bool {
	m, ok := d.committedAt(j.meta.Dir, j.meta.Step)
	return ok && m.ID == j.meta.Save
}

// committedAt is the manifest of a step; none when storage does not answer.
func (d *Daemon) committedAt(dir string, step int64) (commit.Manifest, bool) {
	ctx, cancel := context.WithTimeout(d.ctx, refuseBudget)
	defer cancel()
	m, err := bounded(ctx, func() (commit.Manifest, error) {
		if m, ok := d.store.Committed(dir, step); ok {
			return m, nil
		}
		return commit.Manifest{}, commit.ErrNone
	})
	return m, err == nil
}

// tracked is the manifest of the step that the tracker names.
func (d *Daemon) tracked(dir string) (commit.Manifest, bool) {
	ctx, cancel := context.WithTimeout(d.ctx, refuseBudget)
	defer cancel()
	step, err := bounded(ctx, func() (int64, error) {
		if step, ok := d.store.Tracked(dir); ok {
			return step, nil
		}
		return 0, commit.ErrNone
	})
	if err != nil {
		return commit.Manifest{}, false
	}
	return d.committedAt(dir, step)
}

func saveOf(j *save) commit.Save {
	m := j.meta
	s := commit.Save{ID: m.Save, Epoch: m.Epoch, Dir: m.Dir, Framework: m.Framework, Layout: m.Layout, Step: m.Step, Shards: m.Shards, WorldSize: m.WorldSize, Saved: j.saved, Late: j.resumed}
	for _, t := range m.Trackers {
		s.Trackers = append(s.Trackers, commit.Tracker(t))
	}
	if m.Retention != nil {
		r := commit.Retention(*m.Retention)
		s.Retention = &r
	}
	return s
}

// prepare writes the shard's files under temporary names, unless a newer save has
// taken the segment.
func (d *Daemon) prepare(ctx context.Context, j *save) (entry commit.Entry, err error) {
	err = d.retry(ctx, j, func() error {
		entry, err = d.attempt(ctx, j)
		return err
	})
	return entry, err
}

// retryStorage is retry for a step on storage, which may hang.
func (d *Daemon) retryStorage(ctx context.Context, j *save, step func() error) error {
	return d.retry(ctx, j, func() error {
		_, err := bounded(ctx, func() (any, error) { return nil, step() })
		return err
	})
}

// retry repeats a step until it works or the save's time is over.
func (d *Daemon) retry(ctx context.Context, j *save, step func() error) error {
	pause := retry.Backoff{First: retryFirst, Most: retryMost}
	for {
		err := step()
		if err == nil {
			d.works(j)
			return nil
		}
		if errors.Is(err, errSuperseded) || errors.Is(err, shm.ErrDamaged) || hopeless(err) || ctx.Err() != nil || d.gone(ctx, j, err) {
			return err
		}
		step, ok := d.overtaken(j)
		if !ok {
			d.trouble(ctx, j, err)
			step, ok = d.rest(ctx, j, pause.Next())
		}
		if ok {
			d.works(j)
			return fmt.Errorf("%w: step %d; %w", commit.ErrSuperseded, step, err)
		}
		if ctx.Err() != nil {
			return err
		}
	}
}

// rest waits before the next try of j, at most until a later save is committed: its step.
func (d *Daemon) rest(ctx context.Context, j *save, pause time.Duration) (step int64, ok bool) {
	ctx, cancel := context.WithTimeout(ctx, pause)
	defer cancel()
	_ = d.until(ctx, func() bool { // the next try comes then
		step, ok = d.laterLocked(j)
		return ok
	})
	return step, ok
}

// laterLocked returns the step of a committed save of the same shard and directory that was
// made after j, of which nothing is durable. Later by the clock of one node: steps may go back.
func (d *Daemon) laterLocked(j *save) (step int64, ok bool) {
	if j.entry != nil {
		return 0, false
	}
	i := slices.IndexFunc(d.saves, func(o *save) bool {
		return o.phase == committed && o.meta.Dir == j.meta.Dir && o.meta.Shard == j.meta.Shard && o.saved.After(j.saved)
	})
	if i < 0 {
		return 0, false
	}
	return d.saves[i].meta.Step, true
}

// overtaken is laterLocked for what is on disk, too. Clocks of several nodes may differ, so
// in one epoch the step must be a later one as well.
func (d *Daemon) overtaken(j *save) (step int64, ok bool) {
	d.mu.Lock()
	step, ok = d.laterLocked(j)
	d.mu.Unlock()
	if ok || j.entry != nil {
		return step, ok
	}
	m, ok := d.tracked(j.meta.Dir)
	return m.Step, ok && m.Saved.After(j.saved) && (m.Epoch != j.meta.Epoch || m.Step > j.meta.Step)
}

// hopeless tells errors that waiting does not mend. A device that is gone may come back.
func hopeless(err error) bool {
	return slices.ContainsFunc([]error{
		commit.ErrSuperseded, commit.ErrBegun, errLost, fsx.ErrNotRegular, fsx.ErrTooLong, fs.ErrPermission, fs.ErrInvalid, syscall.EINVAL,
		syscall.EISDIR, syscall.ENOTDIR, syscall.ENAMETOOLONG, syscall.ELOOP, syscall.EROFS, syscall.EFBIG,
	}, func(e error) bool { return errors.Is(err, e) })
}

// trouble books a failed write, and makes room when the storage is full.
func (d *Daemon) trouble(ctx context.Context, j *save, err error) {
	text := "storage: " + err.Error()
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		text = "storage is full: " + err.Error()
		if removed, err := d.store.Retain(ctx, j.meta.Dir); err == nil && len(removed) > 0 {
			d.log.Info("removed old checkpoints to make room", "dir", j.meta.Dir, "steps", removed)
		}
	}
	if d.worse(j, err, text) {
		d.log.Warn("cannot write a checkpoint, trying again", "step", j.meta.Step, "shard", j.meta.Shard, "err", err)
	}
	d.mu.Lock()
	d.count.Retries++
	j.done = 0
	d.mu.Unlock()
}

// worse books what is wrong with the storage of j, and reports whether that is news: all saves of a directory have the
// same trouble, and each of them many times.
func (d *Daemon) worse(j *save, err error, text string) bool {
	cause := err.Error()
	if no, ok := errors.AsType[syscall.Errno](err); ok {
		cause = no.Error()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.troubles[j.meta.Dir] == cause {
		return false
	}
	d.troubles[j.meta.Dir], d.storageTrouble = cause, text
	return true
}

// works books that the storage of j does what it is told, or that nobody waits for it.
func (d *Daemon) works(j *save) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.troubles, j.meta.Dir)
	if len(d.troubles) == 0 {
		d.storageTrouble = ""
	}
}

// attempt writes all files of the shard once. The segment is pinned meanwhile.
func (d *Daemon) attempt(ctx context.Context, j *save) (commit.Entry, error) {
	p, err := j.seg.pin(ctx, j.seq)
	if err != nil {
		return commit.Entry{}, err
	}
	select {
	case d.writeSem <- struct{}{}:
		defer func() { <-d.writeSem }()
	case <-ctx.Done():
		p.Release()
		return commit.Entry{}, ctx.Err()
	}
	d.move(j, writing)
	return bounded(ctx, func() (commit.Entry, error) {
		defer p.Release()
		return d.write(ctx, j, p)
	})
}

// bounded runs a step on storage. When its time is over and storage does not answer, the
// step is left to itself: a call that hangs in the kernel cannot be ended, and must not
// keep saves to other storage waiting.
func bounded[T any](ctx context.Context, step func() (T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	done := make(chan result, 1)
	go func() {
		v, err := step()
		done <- result{v, err}
	}()
	select {
	case r := <-done:
		return r.v, r.err
	case <-ctx.Done():
	}
	select {
	case r := <-done:
		return r.v, r.err
	case <-time.After(stuckGrace):
		var none T
		return none, fmt.Errorf("storage does not answer: %w", context.Cause(ctx))
	}
}

func (d *Daemon) write(ctx context.Context, j *save, p *shm.Pinned) (entry commit.Entry, err error) {
	s := saveOf(j)
	entry.Shard = j.meta.Shard
	paths := make([]string, len(j.meta.Files))
	for i, f := range j.meta.Files {
		paths[i] = f.Path
	}
	if err := d.vanished(j.meta.Dir); err != nil {
		return entry, err
	}
	tmps, err := d.store.Plan(s, j.meta.Shard, paths)
	if err != nil {
		return entry, err
	}
	defer func() {
		if errors.Is(err, fs.ErrNotExist) { // others have ended the save, and removed the plan that lists these
			err = errors.Join(err, d.remove(tmps))
		}
	}()
	d.standOn(j)
	begin := time.Now()
	for i, f := range j.meta.Files {
		crc, err := d.writeFile(ctx, j, p, i, tmps[i])
		if err != nil {
			return entry, err
		}
		entry.Files = append(entry.Files, commit.FileEntry{Path: f.Path, Size: f.Len, CRC: crc, Shard: j.meta.Shard, Tmp: tmps[i]})
	}
	if err := d.store.Prepared(s, entry); err != nil {
		return entry, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.count.Flushes++
	d.count.FlushedBytes += j.bytes
	d.count.WriteTime += time.Since(begin)
	return entry, nil
}

func (d *Daemon) remove(paths []string) (err error) {
	for _, path := range paths {
		err = errors.Join(err, d.cfg.FS.Remove(path))
	}
	return err
}

// writeFile writes file i of p; what follows on CPU (checksums) runs ahead of what
// follows on the disk.
func (d *Daemon) writeFile(ctx context.Context, j *save, p *shm.Pinned, i int, tmp string) (uint32, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	sealing := p.Seal(ctx, i)
	defer sealing.Sum() // it uses the pin
	src := &source{bytes: p.File(i), ready: sealing.Ready, passed: func(n int64) { d.advance(j, n) }}
	if err := d.cfg.FS.WriteFrom(ctx, tmp, src); err != nil {
		cancel()
		return 0, err
	}
	return sealing.Sum()
}

// source is a file's image as fsx wants it, counting what has been asked for.
type source struct {
	bytes  []byte
	ready  func(context.Context, int64) error
	passed func(int64)
	at     int64
}

func (s *source) Len() int64    { return int64(len(s.bytes)) }
func (s *source) Bytes() []byte { return s.bytes }

func (s *source) Ready(ctx context.Context, end int64) error {
	if err := s.ready(ctx, end); err != nil {
		return err
	}
	s.passed(end - s.at)
	s.at = end
	return nil
}

func (d *Daemon) advance(j *save, n int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	j.done += n
}

// commit makes the step visible together with the writers of the other shards. The
// writer of shard 0 leads.
func (d *Daemon) commit(ctx context.Context, j *save, entry commit.Entry) error {
	s, c := saveOf(j), d.coordinatorOf(j.meta)
	post := func(ctx context.Context, ph coordinator.Phase) ([]commit.Entry, error) {
		return d.post(ctx, c, reportOf(j, ph, entry))
	}
	all, err := d.together(ctx, j, post)
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

// together waits for the other shards, or until j is dropped and may be.
func (d *Daemon) together(ctx context.Context, j *save, post func(context.Context, coordinator.Phase) ([]commit.Entry, error)) ([]commit.Entry, error) {
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
	r := coordinator.Report{Save: coordinator.Save{ID: m.Save, Step: m.Step, Shards: m.Shards, Dir: m.Dir}, Phase: ph, Shards: []int{m.Shard}}
	if ph == coordinator.Prepared {
		r.Entries = []commit.Entry{entry}
	}
	return r
}

// begin writes the intent.
func (d *Daemon) begin(s commit.Save, all []commit.Entry) error {
	err := d.store.Intent(s, all)
	if errors.Is(err, fs.ErrNotExist) && slices.ContainsFunc(all, func(e commit.Entry) bool { return d.store.Gone(s, e) }) {
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
	defer d.turn(s.Dir)()
	m, err := d.store.Publish(s, all)
	if err != nil {
		return err
	}
	var bytes int64
	for _, f := range m.Files {
		bytes += f.Size
	}
	d.log.Info("checkpoint committed", "step", s.Step, "dir", s.Dir, "files", len(m.Files), "bytes", bytes, "after", m.Committed.Sub(s.Saved).Round(time.Millisecond).String())
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

// giveUp tells the other shards that this save will not be complete, and removes what
// was written of ours. When the leader may be past its intent, the files stay: recovery
// completes the save.
func (d *Daemon) giveUp(j *save, cause error) {
	if errors.Is(cause, coordinator.ErrStalled) {
		return
	}
	ctx, cancel := context.WithTimeout(d.ctx, refuseBudget)
	defer cancel()
	report := reportOf(j, coordinator.Failed, commit.Entry{})
	report.Error = cause.Error()
	if _, err := d.coordinatorOf(j.meta).Post(ctx, report); err != nil && !errors.Is(err, coordinator.ErrAborted) {
		d.log.Debug("a failed save stays for recovery", "step", j.meta.Step, "err", err)
		return
	}
	if _, err := bounded(ctx, func() (any, error) { return nil, d.store.Abandon(saveOf(j), j.meta.Shard) }); err != nil {
		d.log.Debug("clean up after a failed save", "step", j.meta.Step, "err", err)
	}
}

func (d *Daemon) move(j *save, to phase) {
	d.mu.Lock()
	defer d.mu.Unlock()
	j.phase = to
	d.changedLocked()
}

// finish books the end of a save and lets its segment go.
func (d *Daemon) finish(j *save, to phase, err error) {
	switch to {
	case committed:
		if j.seg != nil {
			j.seg.seg.SetDurable(j.seq)
		}
	case superseded:
		d.sayOnce(j, slog.LevelWarn, "a checkpoint was not written: a newer one came first", "err", err)
	case failed:
		d.sayOnce(j, slog.LevelError, "a checkpoint was not committed", "err", err)
	}
	if j.seg != nil {
		j.seg.seg.Settle(j.seq)
	}
	d.dropPrepared(j)
	d.mu.Lock()
	defer d.mu.Unlock()
	j.phase, j.err = to, err
	switch to {
	case committed:
		d.count.Commits++
		d.useLocked(j)
		if !j.saved.Before(d.durable[j.meta.Rank].Saved) {
			d.durable[j.meta.Rank] = SegmentStatus{Rank: j.meta.Rank, Step: j.meta.Step, Saved: j.saved, Durable: true}
		}
	case superseded:
		d.count.Superseded++
	case failed:
		d.count.Failures++
	}
	d.changedLocked()
}

// sayOnce says why a save was given up, in one line for all its shards on this node: the first to know tells the others.
func (d *Daemon) sayOnce(j *save, level slog.Level, text string, more ...any) {
	d.mu.Lock()
	said := slices.ContainsFunc(d.saves, func(o *save) bool { return o.meta.Save == j.meta.Save && o.said })
	j.said = true
	d.mu.Unlock()
	if said {
		level = slog.LevelDebug
	}
	d.log.Log(d.ctx, level, text, append([]any{"step", j.meta.Step, "shard", j.meta.Shard, "dir", j.meta.Dir}, more...)...)
}

// progress writes a line about a long write now and then, and ever more seldom while nothing moves.
func (d *Daemon) progress(j *save) (stop func()) {
	ctx, cancel := context.WithCancel(j.ctx)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		last, pause := int64(-1), retry.Backoff{First: progressEvery}
		for pause.Wait(ctx) {
			if done := d.tell(j); done > last {
				last = done
				pause.Reset()
			}
		}
	}()
	return func() { cancel(); <-gone }
}

func (d *Daemon) tell(j *save) (done int64) {
	d.mu.Lock()
	ph, done := j.phase, j.done
	d.mu.Unlock()
	took := time.Since(j.begun)
	d.log.Info("checkpoint under way", "step", j.meta.Step, "shard", j.meta.Shard, "phase", string(ph), "percent", 100*done/max(j.bytes, 1), "bytes", done, "of", j.bytes, "for", took.Round(time.Second).String())
	return done
}
