package launcher

import (
	"errors"
	"fmt"
)

// parts are Config.Parts by what they take part in.
type parts struct {
	environers []Environer
	starters   []Starter
	stoppers   []Stopper
}

func sortParts(list []Part) parts {
	return parts{
		environers: only[Environer](list),
		starters:   only[Starter](list),
		stoppers:   only[Stopper](list),
	}
}

// only returns the parts that implement T, in order.
func only[T any](list []Part) (found []T) {
	for _, p := range list {
		if t, ok := p.(T); ok {
			found = append(found, t)
		}
	}
	return found
}

// validateParts reports the first part that cannot be used together with those before it.
func validateParts(list []Part) error {
	names, spawner := map[string]bool{}, ""
	for _, p := range list {
		if p == nil {
			return errors.New("launcher: a part is nil")
		}
		if names[p.Name()] {
			return fmt.Errorf("launcher: two parts are called %q", p.Name())
		}
		names[p.Name()] = true
		if _, ok := p.(Spawner); !ok {
			continue
		}
		if spawner != "" {
			return fmt.Errorf("launcher: the parts %q and %q both start workers; use one of them", spawner, p.Name())
		}
		spawner = p.Name()
	}
	return nil
}

func (a *Agent) observe(tell func(Observer)) {
	for _, o := range a.cfg.Observers {
		tell(o)
	}
}
