package checkpointd

import (
	"fmt"
	"sync"
)

// epochs are the present epoch and those before it.
type epochs struct {
	mu     sync.Mutex
	world  World
	ended  map[string]bool // epochs whose workers have ended
	found  []string        // epochs of an earlier daemon's saves, until the world is set
	loaded map[string]bool // loads of the present epoch that were logged
}

func newEpochs() *epochs {
	return &epochs{world: World{GroupWorldSize: 1}, // until a launcher sets it
		ended: map[string]bool{}, loaded: map[string]bool{}}
}

// set begins an epoch, and ends all others.
func (e *epochs) set(w World) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, epoch := range append(e.found, e.world.Key()) {
		e.ended[epoch] = true
	}
	e.found = nil
	delete(e.ended, w.Key())
	e.world = w
	e.loaded = map[string]bool{}
}

func (e *epochs) current() World {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.world
}

// setFound records the epochs of an earlier daemon's saves.
func (e *epochs) setFound(found []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.found = found
}

func (e *epochs) hasEnded(epoch string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.ended[epoch]
}

// firstLoad reports whether this is the first load of the present epoch with these values, and records it.
func (e *epochs) firstLoad(r request) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	key := fmt.Sprint(e.world.Key(), r.Dir, r.Step, r.Source)
	said := e.loaded[key]
	e.loaded[key] = true
	return !said
}
