package launcher

import (
	"context"
	"fmt"
)

// fetch is an epoch that is to run and waits for the table of its world. Any other directive drops it.
type fetch struct {
	epoch  Epoch
	err    error
	cancel context.CancelFunc
}

// worlds fetches the table of the world.
type worlds struct {
	cfg     *Config
	bg      *background
	fetched chan *fetch
	now     *fetch // nil when none is under way; without a group
}

// fetch asks for the world of d. Once it is there, the workers are started.
func (w *worlds) fetch(d Directive) {
	ctx, cancel := context.WithCancel(w.bg.ctx)
	f := &fetch{epoch: Epoch{Directive: d}, cancel: cancel}
	w.now = f
	w.bg.Go(func() {
		f.epoch.World, f.err = w.cfg.Rendezvous.World(ctx)
		if f.err == nil {
			f.err = f.epoch.checkWorld(w.cfg.Slots)
		}
		select {
		case w.fetched <- f:
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

func (w *worlds) drop() {
	if w.now != nil {
		w.now.cancel()
		w.now = nil
	}
}
