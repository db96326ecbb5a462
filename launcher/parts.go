package launcher

import (
	"errors"
	"fmt"

	"dlrover-run/internal/job"
)

// parts are Config.Parts by the interfaces that they implement.
type parts struct {
	checkers           []named[Checker]
	checkInvalidators  []named[CheckInvalidator]
	envProviders       []EnvProvider
	preparers          []Preparer
	starters           []Starter
	sideProcesses      []SideProcesses
	watchers           []named[Watcher]
	examiners          []named[Examiner]
	stoppers           []Stopper
	savers             []Saver
	spawner            Spawner // nil: Config.Processes starts the workers
	failureClassifiers []FailureClassifier
	messageHandlers    []MessageHandler
	worldUsers         []WorldUser
}

// named is a part with its name for messages.
type named[T any] struct {
	name string
	part T
}

func sortParts(list []Part) parts {
	p := parts{
		checkers:           withNames[Checker](list),
		checkInvalidators:  withNames[CheckInvalidator](list),
		envProviders:       only[EnvProvider](list),
		preparers:          only[Preparer](list),
		starters:           only[Starter](list),
		sideProcesses:      only[SideProcesses](list),
		watchers:           withNames[Watcher](list),
		examiners:          withNames[Examiner](list),
		stoppers:           only[Stopper](list),
		savers:             only[Saver](list),
		failureClassifiers: only[FailureClassifier](list),
		messageHandlers:    only[MessageHandler](list),
		worldUsers:         only[WorldUser](list),
	}
	if s := only[Spawner](list); len(s) > 0 {
		p.spawner = s[0]
	}
	return p
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

func withNames[T any](list []Part) (found []named[T]) {
	for _, p := range list {
		if t, ok := p.(T); ok {
			found = append(found, named[T]{p.Name(), t})
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

// onNotice passes a notice on; the channel closes with the directives'.
func (a *Agent) onNotice(n job.Notice, ok bool) {
	if !ok {
		a.notices = nil
		return
	}
	for _, p := range a.parts.messageHandlers {
		p.Notice(n.Topic, n.Body)
	}
}
