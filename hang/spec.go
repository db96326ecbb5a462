package hang

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"dlrover-run/internal/duration"
)

// ErrSpec is wrapped by all errors of ParseSpec.
var ErrSpec = errors.New("hang detection")

// Spec is how a run's hangs are treated: the rendezvous carries it as Params.Hang.
type Spec struct {
	Action Action
	// After is how long there must have been no progress before anything is done, unless other rules take longer; 0: three
	// minutes.
	After time.Duration
	// Slow is the reaction to ranks that slow the job: ActCheck or ActDrain; "" only reports them.
	Slow Action
	// SlowLink: with ActCheck the links to the other node are loaded for a moment.
	SlowLink bool
}

// String is the text that ParseSpec understands.
func (s Spec) String() string {
	text := "action=" + string(s.Action)
	if s.After > 0 {
		text += " after=" + s.After.String()
	}
	if s.Slow != "" {
		text += " slow=" + string(s.Slow)
	}
	if s.SlowLink {
		text += " slow-link=yes"
	}
	return text
}

// ParseSpec reads the text that String has written. Fields that are not named have their defaults: hangs are
// reported.
func ParseSpec(text string) (s Spec, err error) {
	s.Action = ActReport
	for _, field := range strings.Fields(text) {
		switch key, value, _ := strings.Cut(field, "="); key {
		case "action":
			s.Action = Action(value)
		case "after":
			if s.After, err = duration.Parse(value); err != nil || s.After <= 0 {
				return Spec{}, fmt.Errorf("%w %.200q: after %.80q is not a time: use 3m or the like", ErrSpec, text, value)
			}
		case "slow":
			s.Slow = Action(value)
		case "slow-link":
			s.SlowLink = value == "yes"
		default:
			return Spec{}, fmt.Errorf("%w %.200q: %.80q is unknown here: all nodes of a run need the same version",
				ErrSpec, text, field)
		}
	}
	if err := s.Validate(); err != nil {
		return Spec{}, fmt.Errorf("%w %.200q: %w", ErrSpec, text, err)
	}
	return s, nil
}

// Validate refuses a Spec that no judge can follow.
func (s Spec) Validate() error {
	if s.Action != ActReport && s.Action != ActRestart && s.Action != ActStop {
		return fmt.Errorf("the action %.80q is unknown: use %s, %s or %s", s.Action, ActReport, ActRestart, ActStop)
	}
	if s.Slow != "" && s.Slow != ActCheck && s.Slow != ActDrain {
		return fmt.Errorf("the action %.80q on slow ranks is unknown: use %s, %s, or none", s.Slow, ActCheck, ActDrain)
	}
	return nil
}
