package checkpointd

import (
	"fmt"
	"sync"
	"time"
)

// epochs are the present epoch and those before it.
type epochs struct {
	mu     sync.Mutex
	world  World
	ended  map[string]bool // epochs whose workers have ended
	found  []string        // epochs of an earlier daemon's saves, until the world is set
	loaded map[string]bool // loads of the present epoch that were logged
	usage  Usage           // of the present epoch
}

// Usage is what the workers of this node have told of their epoch.
type Usage struct {
	// Loaded is the step of the newest checkpoint that was loaded, 0 for none, if Resumed is true.
	Loaded  int64 `json:"loaded,omitempty"`
	Resumed bool  `json:"resumed,omitempty"`
	// Blocked is for how long saves have kept a worker from training, and Before that when the newest one was made.
	Blocked time.Duration `json:"blocked_ns,omitempty"`
	Before  time.Duration `json:"blocked_before_ns,omitempty"`
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
	e.loaded, e.usage = map[string]bool{}, Usage{}
}

func (e *epochs) used() Usage {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.usage
}

// blocked records the time of one worker, all saves together.
func (e *epochs) blocked(r request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	u := &e.usage
	if u.Blocked = max(u.Blocked, r.Blocked); r.Seg != "" {
		u.Before = max(u.Before, r.Blocked)
	}
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

// firstLoad reports whether this is the first load of the present epoch with these values, and records it. A load
// without a source has found nothing.
func (e *epochs) firstLoad(r request) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.usage.Loaded, e.usage.Resumed = max(e.usage.Loaded, r.Step), true
	key := fmt.Sprint(e.world.Key(), r.Dir, r.Step, r.Source)
	said := e.loaded[key]
	e.loaded[key] = true
	return !said && r.Source != ""
}
