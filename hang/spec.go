package hang

import (
	"fmt"
	"strings"
)

// Spec is how a run's hangs are treated: what the rendezvous carries as Params.Hang.
type Spec struct {
	Action Action
}

// String is the text that ParseSpec understands.
func (s Spec) String() string { return "action=" + string(s.Action) }

// ParseSpec reads what String has written. What is not named has its default: hangs are reported.
func ParseSpec(text string) (Spec, error) {
	s := Spec{Action: ActReport}
	for _, field := range strings.Fields(text) {
		key, value, _ := strings.Cut(field, "=")
		if key != "action" {
			return Spec{}, fmt.Errorf("hang detection %.200q: %.80q is unknown here: all nodes of a run need the same version",
				text, field)
		}
		s.Action = Action(value)
	}
	if err := s.Validate(); err != nil {
		return Spec{}, fmt.Errorf("hang detection %.200q: %w", text, err)
	}
	return s, nil
}

// Validate refuses a Spec that no judge can follow.
func (s Spec) Validate() error {
	if s.Action != ActReport && s.Action != ActRestart && s.Action != ActStop {
		return fmt.Errorf("the action %.80q is unknown: use %s, %s or %s", s.Action, ActReport, ActRestart, ActStop)
	}
	return nil
}
