package launcher

import (
	"context"
	"fmt"

	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/verdict"
)

// fetch is an epoch that is to run and waits for the table of its world. Any other directive drops it.
type fetch struct {
	epoch  Epoch
	err    error
	cancel context.CancelFunc
}

// fetchWorld asks for the world of d. Once it is there, the workers are started.
func (a *Agent) fetchWorld(d Directive) {
	ctx, cancel := context.WithCancel(a.bg.ctx)
	f := &fetch{epoch: Epoch{Directive: d}, cancel: cancel}
	a.fetch = f
	a.bg.Go(func() {
		f.epoch.World, f.err = a.cfg.Rendezvous.World(ctx)
		if f.err == nil {
			f.err = f.epoch.checkWorld(a.cfg.Slots)
		}
		select {
		case a.worlds <- f:
		case <-ctx.Done():
		}
	})
}

// checkWorld finds out whether the world is that of the epoch: there may be a newer one by now.
func (e *Epoch) checkWorld(slots int) error {
	if len(e.World) != e.Place.GroupWorldSize {
		return fmt.Errorf("it has %d nodes instead of %d: another world has been sealed meanwhile",
			len(e.World), e.Place.GroupWorldSize)
	}
	for i, m := range e.World {
		own := i == e.Place.GroupRank
		if m.GroupRank != i || own && (m.RankBase != e.Place.RankBase || m.Slots != slots) {
			return fmt.Errorf("its node %d (%s) has rank %d and %d workers from rank %d on: "+
				"another world has been sealed meanwhile", i, m.Node, m.GroupRank, m.Slots, m.RankBase)
		}
	}
	return nil
}

func (a *Agent) dropFetch() {
	if a.fetch != nil {
		a.fetch.cancel()
		a.fetch = nil
	}
}

func (a *Agent) onWorld(f *fetch) {
	if f != a.fetch {
		return
	}
	a.dropFetch()
	if f.err == nil {
		a.begin(f.epoch)
		return
	}
	failure := a.failures.ofWorld(f.epoch, f.err)
	a.fails = append(a.fails, failure)
	a.log.Error("cannot start the workers", "why", failure.Message)
	a.bg.call("report the failure", func(ctx context.Context) error {
		return a.cfg.Rendezvous.Failing(ctx, f.epoch.Directive, policy.RestartCharged, []verdict.Failure{failure.Compact()})
	})
}
