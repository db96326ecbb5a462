package checkpointd

import (
	"context"
	"fmt"
	"time"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/internal/retry"
)

// Drain waits until no save is on its way to the disk and returns how many are not on disk then: still on their way
// after the timeout, aborted, or kept in memory because the nodes could not agree on a save.
func (d *Daemon) Drain(ctx context.Context, timeout time.Duration) int {
	d.scan()
	d.restart.over()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	_ = d.life.until(ctx, d.saves.quiet) // the rest is counted
	left, lost, undecided := d.saves.left()
	for _, h := range undecided {
		plan := coordinator.Plan{Save: h.Save, Dir: h.Dir, Step: h.Step}
		if !d.storage.hasPlanned(plan, []coordinator.Holding{h}) {
			left++
		}
	}
	for _, j := range lost {
		if !d.storage.replaced(j) {
			left++
		}
	}
	return left
}

// wait returns when the save is committed, or the reason why it will not be.
func (d *Daemon) wait(ctx context.Context, r request) (int64, error) {
	d.restart.over()
	ctx, cancel := context.WithTimeoutCause(ctx, r.timeout(),
		fmt.Errorf("step %d was not committed within %s", r.Step, r.timeout()))
	defer cancel()
	pause := retry.Backoff{First: 50 * time.Millisecond, Most: time.Second} // other nodes send no notice
	for {
		news := d.life.news()
		j := d.saves.requested(r)
		var ph phase
		var err error
		if j != nil {
			ph, err = d.saves.state(j)
		}
		switch {
		case ph == committed:
			return r.Step, nil
		case ph.terminal():
			return 0, fmt.Errorf("step %d is not on disk: %w", r.Step, err)
		case j == nil: // committed by another node, or by an earlier daemon
			if step, ok := d.storage.reached(r.Dir, r.Step, r.Save); ok {
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
	if trouble := d.retries.trouble(); trouble != "" {
		err = fmt.Errorf("%w (%s)", err, trouble)
	}
	return err
}
