package upstream

import (
	"context"
	"strconv"
)

// barrier is where the nodes of a world wait for each other at its end. There are two, of torch up to 1.13 and of later
// ones, and of DLRover. The first has two keys for every member, for the second of which the first member waits alone.
// The second has a count and a key that the last member sets. Nodes that wait at either see our arrival.
type barrier struct {
	kv      kvStore
	world   world
	counted bool // among the members that have arrived
}

// passed reports whether all have arrived, by either barrier, and announces this node before.
func (b *barrier) passed(ctx context.Context) (bool, error) {
	if !b.counted {
		if err := b.arrive(ctx); err != nil {
			return false, err
		}
	}
	return b.all(ctx)
}

// arrive announces this node at both barriers.
func (b *barrier) arrive(ctx context.Context) error {
	own, w := strconv.Itoa(b.world.own), b.world
	for _, key := range []string{terminalState + own, terminalState + own + fin} {
		if err := b.kv.set(ctx, w.key(key), []byte(own)); err != nil {
			return err
		}
	}
	n, err := b.kv.add(ctx, w.key(numMembers))
	if err != nil {
		return err
	}
	if n >= len(w.nodes) {
		err = b.open(ctx)
	}
	b.counted = err == nil
	return err
}

func (b *barrier) open(ctx context.Context) error {
	return b.kv.set(ctx, b.world.key(lastMember), []byte("<val_ignored>"))
}

// all asks whether all have arrived. A master without memory of our arrival was started again: we arrive anew.
func (b *barrier) all(ctx context.Context) (bool, error) {
	w := b.world
	last, err := b.kv.text(ctx, w.key(lastMember))
	if err != nil || last != "" {
		return err == nil, err
	}
	own, err := b.kv.text(ctx, w.key(terminalState+strconv.Itoa(w.own)))
	if err != nil {
		return false, err
	}
	if own == "" {
		b.counted = false
		return false, nil
	}
	for i := range w.nodes {
		v, err := b.kv.text(ctx, w.key(terminalState+strconv.Itoa(i)))
		if err != nil || v == "" {
			return false, err
		}
	}
	return true, b.open(ctx) // a count can be lost; see add
}
