package watch

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"dlrover-run/hang"
	"dlrover-run/internal/stable"
)

// Bounds of the data about the children of a worker.
const (
	maxChildren  = 32 // that are read
	keptChildren = 4  // with different stacks
	childTime    = time.Second
)

// family is a worker and its children; a goroutine reads their stacks.
type family struct {
	own, child func(ctx context.Context, pid int) (hang.Stacks, error) // read one process
	sampler    *sampler                                                // of this family alone
	pid        int
	steps      int  // the thread that the shim has seen making a step; 0: none
	children   bool // are read if the worker does not wait for other ranks
}

// stacks returns nil if there is no result in time.
func (f *family) stacks(ctx context.Context, room chan struct{}) *hang.Stacks {
	select {
	case room <- struct{}{}:
		defer func() { <-room }()
	case <-ctx.Done():
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, stackTime)
	defer cancel()
	s, ok := within(ctx, func() *hang.Stacks { return read(ctx, f.own, f.pid) })
	if !ok {
		return nil
	}
	f.sampler.leads.set(f.pid, s.Lead(f.steps))
	if f.children && !s.Waits() {
		ctx, cancel := context.WithTimeout(ctx, childTime)
		defer cancel()
		s.Children, _ = within(ctx, func() []hang.Thread { return f.readChildren(ctx) })
	}
	return s
}

// within returns the result of f, if it ends before ctx.
func within[T any](ctx context.Context, f func() T) (v T, ok bool) {
	done := make(chan T, 1)
	go func() { done <- f() }()
	select {
	case v := <-done:
		return v, true
	case <-ctx.Done():
		return v, false
	}
}

func read(ctx context.Context, by func(context.Context, int) (hang.Stacks, error), pid int) *hang.Stacks {
	s, err := by(ctx, pid)
	if err != nil && s.Error == "" {
		s.Error = err.Error()
	}
	return &s
}

// readChildren returns the stacks of the children, each once. Stacks that are deepest in the user's own code are
// first.
func (f *family) readChildren(ctx context.Context) []hang.Thread {
	pids := f.sampler.descendants(f.pid, true)
	var found []hang.Thread
	alike := map[string]int{}
	for _, pid := range pids[:min(len(pids), maxChildren)] {
		main := read(ctx, f.child, pid).Main()
		if main == nil || ctx.Err() != nil {
			continue
		}
		if key := stackKey(main); alike[key] == 0 {
			main.TID, main.Main = pid, false
			found = append(found, *main)
		}
		alike[stackKey(main)]++
	}
	stable.Sort(found, func(a, b hang.Thread) int {
		return cmp.Or(cmp.Compare(b.Own(), a.Own()), cmp.Compare(len(b.Python), len(a.Python)))
	})
	found = found[:min(len(found), keptChildren)]
	for i := range found {
		if n := alike[stackKey(&found[i])]; n > 1 {
			found[i].Name = fmt.Sprintf("%s, one of %d alike", found[i].Name, n)
		}
	}
	return found
}

// stackKey is the same for children that do the same.
func stackKey(t *hang.Thread) string {
	if len(t.Python) == 0 {
		return fmt.Sprint(t.Name, t.Native[:min(len(t.Native), 1)])
	}
	return fmt.Sprint(t.Python)
}
