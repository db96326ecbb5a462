package checkpointd

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/internal/retry"
)

// Drain waits until no save is on its way to the disk and returns how many are not on disk then: still on their way
// after the timeout, aborted, or kept in memory because the nodes could not agree on a save.
func (d *Daemon) Drain(ctx context.Context, timeout time.Duration) int {
	d.scan()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	_ = d.until(ctx, func() bool { return d.breakpoints == 0 && d.pendingLocked() == 0 }) // the rest is counted
	d.mu.Lock()
	left, lost := d.breakpoints+d.pendingLocked(), d.lostLocked()
	undecided := slices.Collect(maps.Values(d.undecided))
	d.mu.Unlock()
	for _, h := range undecided {
		plan := coordinator.Plan{Save: h.Save, Dir: h.Dir, Step: h.Step}
		if !d.onDiskAlready(plan, []coordinator.Holding{h}) {
			left++
		}
	}
	for _, j := range lost {
		if !d.replaced(j) {
			left++
		}
	}
	return left
}

func (d *Daemon) pendingLocked() int { return len(d.inFlightLocked("")) }

// inFlightLocked lists the saves of dir, "" for all, that are on their way to the disk.
func (d *Daemon) inFlightLocked(dir string) (out []*save) {
	for _, j := range d.saves {
		if !j.phase.terminal() && (dir == "" || j.meta.Dir == dir) {
			out = append(out, j)
		}
	}
	return out
}

// lostLocked lists the newest save of each shard that was aborted: this daemon has brought nothing newer to the disk.
func (d *Daemon) lostLocked() (lost []*save) {
	type key struct {
		dir   string
		shard int
	}
	newest := map[key]*save{}
	for _, j := range d.saves {
		at := key{j.meta.Dir, j.meta.Shard}
		if o := newest[at]; o == nil || !j.saved.Before(o.saved) {
			newest[at] = j
		}
	}
	for _, j := range newest {
		half := errors.Is(j.err, errPartial) || errors.Is(j.err, errIncomplete) || errors.Is(j.err, errOutdated)
		if j.phase == failed && !half { // halves are of no use
			lost = append(lost, j)
		}
	}
	return lost
}

// replaced reports whether the disk has j, or a later save. Other nodes may have completed a save that was aborted
// here. A node that came back writes its own shards; this node only had copies.
func (d *Daemon) replaced(j *save) bool {
	m, ok := d.tracked(j.meta.Dir)
	return d.already(j) || ok && m.Overtakes(j.made(), true)
}

// wait returns when the save is committed, or the reason why it will not be.
func (d *Daemon) wait(ctx context.Context, r request) (int64, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, r.timeout(),
		fmt.Errorf("step %d was not committed within %s", r.Step, r.timeout()))
	defer cancel()
	pause := retry.Backoff{First: 50 * time.Millisecond, Most: time.Second} // other nodes send no notice
	for {
		d.mu.Lock()
		news := d.changed
		j := d.newestLocked(r)
		var ph phase
		var err error
		if j != nil {
			ph, err = j.phase, j.err
		}
		d.mu.Unlock()
		switch {
		case ph == committed:
			return r.Step, nil
		case ph.terminal():
			return 0, fmt.Errorf("step %d is not on disk: %w", r.Step, err)
		case j == nil: // committed by another node, or by an earlier daemon
			if step, ok := d.onDisk(r); ok {
				return step, nil
			}
		}
		select {
		case <-news:
		case <-time.After(pause.Next()):
		case <-ctx.Done():
			return 0, d.timeoutError(ctx)
		}
	}
}

func (d *Daemon) timeoutError(ctx context.Context) error {
	err := context.Cause(ctx)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.storageTrouble != "" {
		err = fmt.Errorf("%w (%s)", err, d.storageTrouble)
	}
	return err
}

// newestLocked finds the save of a request among those of this daemon.
func (d *Daemon) newestLocked(r request) *save {
	for _, j := range slices.Backward(d.saves) {
		if j.meta.Dir == r.Dir && j.meta.Step == r.Step && (r.Save == "" || j.meta.Save == r.Save) {
			return j
		}
	}
	return nil
}

// onDisk looks for the step, or for the one that the tracker names if that is later.
func (d *Daemon) onDisk(r request) (int64, bool) {
	if m, ok := d.committedAt(r.Dir, r.Step); ok && (r.Save == "" || r.Save == m.ID) {
		return m.Step, true
	}
	m, ok := d.tracked(r.Dir)
	return m.Step, ok && r.Save == "" && m.Step >= r.Step
}
